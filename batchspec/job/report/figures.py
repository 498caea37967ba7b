"""The sections of the report that show pictures: acceptance, the job over time, lengths. They need the extra `report`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from batchspec.job.report import html, pictures
from batchspec.job.report.acceptance import Acceptance
from batchspec.job.report.quality import Lengths
from batchspec.job.report.stats import JobStats
from batchspec.job.report.timeline import Course

MAX_GROUPS = 12
"""Maximum number of groups in a picture; tables list up to MAX_LINES."""
MAX_LINES = 40


def drafts(stats: JobStats, by: str | None, over: Course | None) -> Iterator[str]:
    """What drafts brought, in one sentence; folded, how they were accepted. Nothing without a drafter."""
    if stats.drafter == "none":
        return
    length, rate = html.number(stats.overall.mean_acceptance_length), html.percent(stats.overall.acceptance_rate)
    yield (
        f"<p>Drafts ({html.line(stats.drafter)}): a round of the model gave a row {length} tokens instead of 1; {rate} of the "
        "draft tokens were accepted.</p><details><summary>Acceptance of drafts</summary>"
    )
    yield from _acceptance(stats, by, over)
    yield "</details>"


def _acceptance(stats: JobStats, by: str | None, over: Course | None) -> Iterator[str]:
    """Acceptance by position, by round and by prompt length, over time, and by the output column `by` if given."""
    rounds = sum(stats.histogram)
    positions = [str(position.position) for position in stats.by_position]
    figures = [
        html.figure(
            "Acceptance by position",
            pictures.bars(positions, [p.rate for p in stats.by_position], x="position in the draft", top=1.1),
            "Share of the draft tokens at each position that were accepted.",
        ),
        html.figure(
            "Rounds by accepted draft tokens",
            pictures.bars(
                [str(j) for j in range(len(stats.histogram))],
                [count / rounds if rounds else None for count in stats.histogram],
                x="accepted draft tokens",
            ),
            f"Share of {rounds:,} rounds. A round emits its accepted draft tokens and one token more.",
        ),
        html.figure(
            "Acceptance length by prompt length",
            pictures.bars(
                [group.name for group in stats.by_prompt_tokens],
                [group.mean_acceptance_length for group in stats.by_prompt_tokens],
                x="prompt tokens",
                counts=[group.completions for group in stats.by_prompt_tokens],
            ),
            "Tokens per round, every round weighted equally; number of completions in brackets.",
        ),
    ]
    if over is not None:
        caption = html.key("second", "draft tokens per round") + html.key("first", "tokens per round (acceptance length)")
        caption += "Means over the decoding rows. Draft tokens are those that were verified; of a tree, its levels."
        picture = pictures.two_lines(over, first=over.acceptance_length, second=over.draft_len)
        figures.append(html.figure("Draft length and acceptance length", picture, caption))
        caption = html.key("first", "verified") + html.key("second", "rows x (K + 1)")
        caption += "Positions of a round, of all its decoding rows: newest tokens and drafts, of a tree its nodes."
        picture = pictures.two_lines(over, first=over.positions, second=over.full_positions)
        figures.append(html.figure("Positions per round", picture, caption))
    if stats.calibration:
        drafts = sum(one.drafts for one in stats.calibration)
        caption = (
            f"Expected and measured share of accepted drafts, equal on the dotted line: {drafts:,} drafts, by the drafter's "
            "confidence. A larger point is more drafts. Rounds verify the drafts with the largest expected share."
        )
        figures.append(html.figure("Calibration", pictures.calibration(stats.calibration), caption))
    if by is not None:
        figures.append(_acceptance_by(stats, by))
    yield html.grid(figures)
    tables = [_groups("prompt tokens", stats.by_prompt_tokens)]
    if by is not None:
        tables.append(_groups(by, stats.by_column[:MAX_LINES]))
    yield html.grid(f'<div class="card">{table}</div>' for table in tables)


def _acceptance_by(stats: JobStats, by: str) -> str:
    """The acceptance length of the most frequent values of the output column `by`."""
    shown = stats.by_column[:MAX_GROUPS]
    groups = {group.name: group.mean_acceptance_length or 0.0 for group in shown}
    few = f"The {MAX_GROUPS} most frequent of {len(stats.by_column):,} values." if len(stats.by_column) > MAX_GROUPS else ""
    picture = pictures.rows(groups, form=".2f", counts=[group.completions for group in shown])
    return html.figure(f"Acceptance length by {by}", picture, f"Tokens per round; number of completions in brackets. {few}")


def _groups(name: str, groups: Iterable[Acceptance]) -> str:
    lines = [
        (g.name, f"{g.completions:,}", html.number(g.mean_acceptance_length), html.percent(g.acceptance_rate)) for g in groups
    ]
    return html.table((name, "completions", "tokens per round", "accepted"), lines)


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
    """Lengths of prompts and completions, and finish reasons if there are several."""
    reasons = stats.by_finish_reason | {f"error: {code}": count for code, count in stats.by_error.items()}
    figures = []
    for name, found in (("prompt", stats.quality.prompt_lengths), ("completion", stats.quality.completion_lengths)):
        if found is not None and found.longest:  # 0: nothing was decoded
            picture = pictures.histogram(found, x=f"{name} tokens")
            figures.append(html.figure(f"{name.capitalize()} lengths", picture, _percentiles(found)))
    if len(reasons) > 1:
        ends = pictures.rows(dict(list(reasons.items())[:MAX_GROUPS]))
        figures.append(html.figure("Finish reasons", ends, "Completions by finish reason."))
    if figures:
        yield html.grid(figures)


def _percentiles(lengths: Lengths) -> str:
    return (
        f"Median {lengths.median:,}, 90 % up to {lengths.p90:,}, 99 % up to {lengths.p99:,}, longest {lengths.longest:,} tokens; "
        "ok and truncated rows."
    )
