"""Pictures of the report: SVG drawn by matplotlib, with the colours and fonts of the page.

A picture is drawn in placeholder colours, which are then replaced by the page's CSS variables, so that it follows the reader's
light or dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from batchspec.console.text import one_line
from batchspec.job.report.quality import Lengths
from batchspec.job.report.summary import Calibration
from batchspec.job.report.timeline import Course

COLOURS = {"ink": "#010101", "muted": "#010102", "grid": "#010103", "first": "#010104", "second": "#010105", "third": "#010106",
           "fourth": "#010107"}
"""CSS variable -> its placeholder."""
INK, MUTED, GRID, FIRST, SECOND, THIRD, FOURTH = COLOURS.values()
LABEL_SIZE = 11.0
"""Font size of all text in a picture, in points; the page shows all pictures at one scale."""
STYLE = {
    "axes.edgecolor": GRID, "axes.facecolor": "none", "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "axes.labelcolor": MUTED, "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    "figure.facecolor": "none", "font.size": LABEL_SIZE, "grid.color": GRID, "grid.linewidth": 0.8, "lines.linewidth": 1.6,
    "svg.fonttype": "none", "svg.hashsalt": "batchspec", "text.color": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.major.size": 0, "xtick.major.pad": 5, "ytick.major.size": 0,
}
SIZE = (5.0, 2.7)
LABEL_CHARS = 24


def bars(
    names: Sequence[str], values: Sequence[float | None], *, x: str, top: float | None = None,
    counts: Sequence[int] | None = None,
) -> str:
    """Vertical bars labelled with their values; None has no bar.

    x       label of the axis of names
    top     upper end of the axis of values; None: the largest value and a margin
    counts  number of items in each bar, shown below its name
    """
    figure, axes = _figure(bottom=0.2 if counts is None else 0.27)
    places = range(len(names))
    axes.bar(places, [value or 0 for value in values], width=0.7, color=FIRST)
    for place, value in zip(places, values, strict=True):
        if value is not None and len(names) <= 12:
            axes.annotate(f"{value:.2f}", (place, value), (0, 2), textcoords="offset points", ha="center", color=INK)
    empty = max(0, 3 - len(names)) / 2
    axes.set_xlim(-0.5 - empty, len(names) - 0.5 + empty)
    step = -(-len(names) // 12)
    below = [""] * len(names) if counts is None else [f"\n({_abbreviated(count)})" for count in counts]
    axes.set_xticks(places[::step], [_cut(name) + count for name, count in zip(names[::step], below[::step], strict=True)])
    axes.set_ylim(0, top or 1.15 * max([value or 0 for value in values], default=1) or 1)
    axes.set_xlabel(x)
    return _svg(figure)


def rows(values: Mapping[str, float], *, form: str = ",.0f", counts: Sequence[int] | None = None) -> str:
    """Horizontal bars, the first on top, labelled with their values and, if given, the `counts` of items in each."""
    longest = max(len(_cut(name)) for name in [*values, ""])
    figure, axes = _figure(left=min(0.44, 0.05 + 0.0165 * longest), bottom=0.05)
    places = range(len(values))
    axes.barh(places, list(values.values()), height=0.66, color=FIRST)
    ends = [""] * len(values) if counts is None else [f" ({_abbreviated(count)})" for count in counts]
    for place, (value, end) in enumerate(zip(values.values(), ends, strict=True)):
        axes.annotate(f"{value:{form}}{end}", (value, place), (4, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(places, [_cut(name) for name in values])
    axes.set_ylim(max(len(values), 4) - 0.5, -0.5)
    axes.set_xlim(0, (1.2 if counts is None else 1.45) * max(values.values(), default=1) or 1)
    axes.xaxis.set_visible(False)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    return _svg(figure)


def histogram(lengths: Lengths, *, x: str) -> str:
    """A histogram of lengths of rows."""
    figure, axes = _figure()
    low, high, width = lengths.shortest, lengths.longest, lengths.bin_width
    begins = low + width * np.arange(len(lengths.bins))
    edges = np.append(begins, begins[-1] + width) - (0.5 if width == 1 else 0.0)  # bars of width 1 are centred on their length
    axes.hist(begins, edges.tolist(), weights=lengths.bins, color=FIRST, rwidth=0.9)
    axes.set_xlim(min(edges[0], low - 2), max(edges[-1], high + 2))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(_short())
    axes.yaxis.set_major_formatter(_short())
    axes.set_xlabel(x)
    return _svg(figure)


def speed(course: Course) -> str:
    """Tokens a second over time."""
    figure, axes = _over_time(course)
    axes.stairs(course.tok_s, _time(course)[0], color=FIRST, fill=True, alpha=0.2)
    axes.stairs(course.tok_s, _time(course)[0], color=FIRST, baseline=None, lw=1.6)
    axes.set_ylim(0, 1.1 * max(float(course.tok_s.max()), 1e-9))
    axes.yaxis.set_major_formatter(_short())
    return _svg(figure)


def slots(course: Course) -> str:
    """The slots over time: live, in prefill, empty while rows were left, and empty because no row was left."""
    figure, axes = _over_time(course)
    below = np.zeros_like(course.live_rows)
    for part, colour in ((course.live_rows, FIRST), (course.prefill, FOURTH), (course.waiting, SECOND), (course.ending, THIRD)):
        axes.stairs(below + part, _time(course)[0], baseline=below, fill=True, color=colour, lw=0)
        below = below + part
    axes.set_ylim(0, 1.05 * max(float(below.max()), 1e-9))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    return _svg(figure)


def two_lines(course: Course, *, first: NDArray[np.float64], second: NDArray[np.float64]) -> str:
    """Two figures over time, [bins] each, NaN where there is none."""
    figure, axes = _over_time(course)
    highest = 1.0
    for values, colour in ((second, SECOND), (first, FIRST)):
        axes.stairs(values, _time(course)[0], baseline=None, color=colour, lw=1.6)
        highest = max(highest, float(np.nanmax(values, initial=0)))
    axes.set_ylim(0, 1.1 * highest)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    return _svg(figure)


def calibration(found: Sequence[Calibration]) -> str:
    """Measured over expected share of accepted drafts, a point for each confidence, its area by the number of drafts."""
    figure, axes = _figure()
    most = max(one.drafts for one in found)
    axes.plot([0, 1], [0, 1], color=MUTED, lw=0.8, ls=":")
    axes.scatter(
        [one.expected for one in found], [one.accepted for one in found], s=[6 + 60 * one.drafts / most for one in found],
        color=FIRST, lw=0, clip_on=False,
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("expected share of accepted drafts")
    return _svg(figure)


def _figure(*, left: float = 0.11, bottom: float = 0.2) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type,unused-ignore]
        figure = Figure(figsize=SIZE)
        axes = figure.subplots()
    figure.subplots_adjust(left=left, right=0.965, top=0.96, bottom=bottom)
    return figure, axes


def _over_time(course: Course) -> tuple[Figure, Axes]:
    figure, axes = _figure()
    edges, unit = _time(course)
    scale = edges[-1] / course.edges_s[-1]
    for start in course.starts_s[1:]:  # where a later run began
        axes.axvline(start * scale, color=MUTED, lw=0.8, ls=":")
    axes.set_xlim(0, edges[-1])
    axes.set_xlabel(f"{unit} of work")
    return figure, axes


def _time(course: Course) -> tuple[NDArray[np.float64], str]:
    total = course.edges_s[-1]
    for seconds, unit in ((3600, "hours"), (60, "minutes")):
        if total > 5 * seconds:
            return course.edges_s / seconds, unit
    return course.edges_s, "seconds"


def _abbreviated(count: int) -> str:
    """Numbers up to 9,999 in full, larger ones like 12.3k."""
    return f"{count:,}" if count < 10_000 else str(_short().format_data_short(count)).strip()


def _short() -> EngFormatter:
    return EngFormatter(sep="")


def _cut(name: str) -> str:
    # matplotlib renders text between two dollar signs as a formula.
    name = one_line(name)
    return (name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 2] + "..").replace("$", r"\$")


def _svg(figure: Figure) -> str:
    """The picture as an svg element whose width and colours are set by the page's CSS."""
    for written in figure.findobj(Text):
        written.set_fontsize(LABEL_SIZE)
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type,unused-ignore]
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"(<svg [^>]*?)width=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg [^>]*?)height=\"[^\"]*\"", r'\1role="img"', text, count=1)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)  # ids of several pictures on one page must not clash
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text.strip()
