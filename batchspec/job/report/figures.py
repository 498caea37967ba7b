"""The sections of the report that show pictures: lengths, and the job over time. They need the extra `report`."""

from __future__ import annotations

from collections.abc import Iterator

from batchspec.job.report import html, pictures
from batchspec.job.report.quality import Lengths
from batchspec.job.report.stats import JobStats
from batchspec.job.report.timeline import Course


def over_time(over: Course | None, counts: str) -> Iterator[str]:
    """Tokens a second and use of the slots over time. counts: what the tokens are."""
    if over is None:
        yield '<p class="note">No run recorded a timeline.</p>'
        return
    runs = len(over.starts_s)
    joined = f" {runs} runs, without the pauses between them; dotted lines mark the starts of runs." if runs > 1 else ""
    sums = [float(part.sum()) for part in (over.live_rows, over.prefill, over.waiting, over.ending)]
    share = [part / (sum(sums) or 1) for part in sums]
    preempted = f" Requests were preempted for lack of pages {over.preempted:,} times." if over.preempted else ""
    keys = (
        html.key("first", f"decoding {share[0]:.0%}")
        + html.key("fourth", f"in prefill {share[1]:.0%}")
        + html.key("second", f"waiting for a refill or for pages {share[2]:.0%}")
        + html.key("third", f"no row left {share[3]:.0%}")
    )
    figures = [
        html.figure("Tokens a second", pictures.speed(over), f"{counts.capitalize()}.{joined}"),
        html.figure("Use of the slots", pictures.slots(over), f"Slots: places for rows in the batch. {keys}{preempted}"),
    ]
    yield html.grid(figures)


def lengths(stats: JobStats) -> Iterator[str]:
    """Lengths of prompts and completions."""
    figures = []
    for name, found in (("prompt", stats.quality.prompt_lengths), ("completion", stats.quality.completion_lengths)):
        if found is not None and found.longest:  # 0: nothing was decoded
            picture = pictures.histogram(found, x=f"{name} tokens")
            figures.append(html.figure(f"{name.capitalize()} lengths", picture, _percentiles(found)))
    if figures:
        yield html.grid(figures)


def _percentiles(lengths: Lengths) -> str:
    return (
        f"Median {lengths.median:,}, 90 % up to {lengths.p90:,}, 99 % up to {lengths.p99:,}, longest {lengths.longest:,} tokens; "
        "ok and truncated rows."
    )
