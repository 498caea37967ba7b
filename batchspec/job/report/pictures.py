"""Pictures of the report: SVG drawn by matplotlib, with the colours and fonts of the page.

A picture is drawn in placeholder colours, which are then replaced by the page's CSS variables, so that it follows the reader's
light or dark theme.
"""

from __future__ import annotations

import io
import re

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

from batchspec.job.report.quality import Lengths
from batchspec.job.report.timeline import Course

COLOURS = {"muted": "#010101", "grid": "#010102", "first": "#010103", "second": "#010104", "third": "#010105",
           "fourth": "#010106"}
"""CSS variable -> its placeholder."""
MUTED, GRID, FIRST, SECOND, THIRD, FOURTH = COLOURS.values()
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


def _figure() -> tuple[Figure, Axes]:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type,unused-ignore]
        figure = Figure(figsize=SIZE)
        axes = figure.subplots()
    figure.subplots_adjust(left=0.11, right=0.965, top=0.96, bottom=0.2)
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


def _short() -> EngFormatter:
    return EngFormatter(sep="")


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
