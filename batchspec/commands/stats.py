"""`batchspec stats OUT`: whether the data is good, how fast it was made, and how drafts were accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.text import MESSAGE_CHARS, listed, one_line
from batchspec.job.report.acceptance import Acceptance
from batchspec.job.report.calls import ToolCalls
from batchspec.job.report.json_answers import JsonAnswers
from batchspec.job.report.labels import Labels
from batchspec.job.report.scores import Score
from batchspec.job.report.stats import JobStats, job_stats
from batchspec.job.report.texts import Shown

MAX_GROUPS, MAX_FIELDS, MAX_RUNS, SAMPLE_CHARS = 20, 40, 6, 100


def main(argv: Sequence[str] | None = None) -> int:
    """Print the statistics of the job in OUT. Raises OutputError if there are none."""
    parser = ArgumentParser(prog="batchspec stats", description="Statistics of a job's committed output.")
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument("--by", metavar="COLUMN", help="also show acceptance by the values of this output column")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    stats = job_stats(args.out, args.by)
    if args.json:
        terminal.show_json(asdict(stats), indent=1)
    else:
        terminal.show(render(stats, args.by))
    return 0


def render(stats: JobStats, by: str | None = None) -> str:
    """The statistics as plain text: first what the data is like, then the speed, then the acceptance of drafts."""
    blocks = [_data(stats)]
    if stats.labels is not None:
        blocks += _labels(stats.labels)
    if stats.scores:
        blocks.append(_scores(stats.scores))
    if stats.json_answers is not None:
        blocks += _fields(stats.json_answers)
    if stats.tool_calls is not None:
        blocks += _calls(stats.tool_calls)
    if stats.quality.samples:
        blocks.append(_samples(stats.quality.samples))
    blocks.append(_speed(stats))
    if stats.start_ups:
        blocks.append(_start_ups(stats.start_ups))
    if stats.drafter != "none":
        blocks.append(_acceptance(stats))
        positions = [(p.position, f"{p.drafted:,}", f"{p.accepted:,}", _number(p.rate)) for p in stats.by_position]
        blocks.append(_table("acceptance by position", ("position", "drafted", "accepted", "rate"), positions))
        rounds = sum(stats.histogram)
        shares = [(j, f"{count:,}", _number(count / rounds if rounds else None)) for j, count in enumerate(stats.histogram)]
        blocks.append(_table("rounds by accepted draft tokens", ("accepted", "rounds", "share"), shares))
        if stats.calibration:
            by_confidence = [(f"{one.drafts:,}", _number(one.expected), _number(one.accepted)) for one in stats.calibration]
            blocks.append(_table("drafts by the drafter's confidence", ("drafts", "expected rate", "rate"), by_confidence))
    if by is not None:
        blocks.append(_groups(f"by {by}", stats.by_column))
    return "\n\n".join(blocks)


def _data(stats: JobStats) -> str:
    good = stats.quality
    facts = {
        "shards": f"{stats.shards:,} of {stats.shards_total:,}",
        "completions": f"{stats.completions:,} ({_listed(stats.by_status)})",
        "copies of equal rows": _share(stats.copied, stats.completions),
        "finish reasons": _listed(stats.by_finish_reason),
        "errors": _listed(stats.by_error),
        "empty answers": _share(good.empty, good.answers),
        "end in a loop": _share(good.loops, good.answers),
    }
    if good.mean_distinct is not None and good.mean_answers is not None:
        facts["distinct answers"] = (
            f"{good.mean_distinct:.2f} of {good.mean_answers:.2f} per request; all equal in "
            f"{_share(good.all_equal, good.sampled_requests)} requests"
        )
    for name, lengths in (("prompt length", good.prompt_lengths), ("completion length", good.completion_lengths)):
        if lengths is not None and lengths.longest:  # 0: nothing was decoded
            facts[name] = (
                f"median {lengths.median:,}, 90 % up to {lengths.p90:,}, 99 % up to {lengths.p99:,}, "
                f"longest {lengths.longest:,} tokens"
            )
    if not stats.copied:
        del facts["copies of equal rows"]
    if not good.answers or not stats.completion_tokens:
        del facts["empty answers"], facts["end in a loop"]
    return "\n".join(terminal.facts(facts))


def _labels(found: Labels) -> Iterator[str]:
    def share(rows: int) -> str:
        return f"{rows / found.rows:.1%}" if found.rows else "-"

    rated = bool(found.least_certain)
    lines: list[tuple[object, ...]] = []
    for one in found.labels[:MAX_GROUPS]:
        ratings = (_number(one.mean_prob), _number(one.mean_margin)) if rated else ()
        lines.append((one.label, f"{one.rows:,}", share(one.rows), *ratings))
    more = found.rows - sum(one.rows for one in found.labels[:MAX_GROUPS])
    if more:
        lines.append(("(other labels)", f"{more:,}", share(more), *(["", ""] if rated else ())))
    yield _table("labels", ("", "rows", "share", *(("mean probability", "mean margin") if rated else ())), lines)
    if rated:
        rows = [(one.request_id, one.label, _number(one.prob), _number(one.margin)) for one in found.least_certain]
        title = "least certain rows (margin: to the second most probable label)"
        yield _table(title, ("request", "label", "probability", "margin"), rows, left=2)


def _scores(found: Sequence[Score]) -> str:
    lines: list[tuple[object, ...]] = [
        (one.label, f"{one.rows:,}", *map(_number, (one.mean, one.deviation, one.least, one.greatest)))
        for one in found[:MAX_GROUPS]
    ]
    if len(found) > MAX_GROUPS:
        lines.append((f"({len(found) - MAX_GROUPS:,} more labels)", *[""] * 5))
    return _table("scores", ("label", "rows", "mean", "deviation", "least", "greatest"), lines)


def _fields(found: JsonAnswers) -> Iterator[str]:
    valid = f"{_share(found.valid, found.finished)} of the finished answers"
    yield "\n".join(terminal.facts({"valid JSON": valid, "JSON objects": _share(found.objects, found.finished)}))
    shown = {one.name: f"in {one.present:,}, null in {one.null:,}{_values(one.values)}" for one in found.fields[:MAX_FIELDS]}
    if shown:
        lines = terminal.facts(shown, indent="  ")
        yield "\n".join(["fields of the objects", *lines]) + _more(len(found.fields), MAX_FIELDS, "fields")


def _values(values: Mapping[str, int] | None) -> str:
    return "" if values is None else f"; {', '.join(f'{value}: {count:,}' for value, count in values.items())}"


def _calls(found: ToolCalls) -> Iterator[str]:
    facts = {
        "tool calls": f"{found.calls:,} in {found.answers - found.without:,} of {found.answers:,} answers",
        "answers without a call": _share(found.without, found.answers),
        "invalid calls": f"{found.bad_arguments:,} with arguments that are not a JSON object"
        + ("" if found.unknown_tools is None else f", {found.unknown_tools:,} of a tool that the row does not have"),
    }
    yield "\n".join(terminal.facts(facts))
    tools = list(found.by_tool.items())
    if tools:
        lines = [(name, f"{count:,}") for name, count in tools[:MAX_GROUPS]]
        yield _table("calls by tool", ("", "calls"), lines) + _more(len(tools), MAX_GROUPS, "tools")


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else "0"


def _samples(samples: Sequence[Shown]) -> str:
    lines = ["random samples, in the order of the input (batchspec inspect OUT ID shows one in full)"]
    for row in samples:
        name = f"{row.request_id} sample {row.sample_index}" if row.sample_index else row.request_id
        lines.append(f"  {one_line(name)}, {row.status}, {row.tokens:,} tokens")
        if row.prompt is not None:
            shown = row.prompt[-SAMPLE_CHARS:]
            lines.append(f"    {one_line(shown if shown == row.prompt else f'... {shown}', MESSAGE_CHARS)}")
        lines.append(f"    > {one_line(row.completion, SAMPLE_CHARS)}")
    return "\n".join(lines)


def _speed(stats: JobStats) -> str:
    facts = {
        "prompt tokens": f"{stats.prompt_tokens:,} ({stats.cached_tokens:,} from shared prefixes)",
        "completion tokens": f"{stats.completion_tokens:,}"
        + (f" ({stats.copied_tokens:,} of copies, which the speed leaves out)" if stats.copied_tokens else ""),
    }
    if stats.weights:
        facts["weights"] = stats.weights
    if stats.reasoning_tokens:
        facts["reasoning tokens"] = f"{stats.reasoning_tokens:,} of these, {stats.reasoning_truncated:,} thoughts truncated"
    if stats.speed is not None:
        facts["speed"] = f"{stats.speed.tok_s:,.1f} tok/s: {stats.speed.counts}, start-up and interrupted runs left out"
    if stats.trained_head is not None and (line := stats.trained_head.line()):
        facts["trained head"] = line
    return "\n".join(terminal.facts(facts))


def _acceptance(stats: JobStats) -> str:
    every = stats.overall
    facts = {
        "drafter": stats.drafter,
        "rounds": f"{every.rounds:,}",
        "draft tokens": f"{every.drafted:,} verified, {every.accepted:,} accepted, {every.discarded:,} emitted after a stop",
        "mean acceptance length": f"{_number(every.mean_acceptance_length)} "
        f"(mean over requests {_number(every.mean_length_over_requests)})",
        "acceptance rate": f"{_number(every.acceptance_rate)} (mean over requests {_number(every.mean_rate_over_requests)})",
    }
    return "\n".join(terminal.facts(facts))


def _listed(counts: Mapping[str, int]) -> str:
    return listed(counts) or "none"


def _groups(title: str, groups: Sequence[Acceptance]) -> str:
    """Lengths of the answers, and how drafts were accepted, by group; columns that are empty in all groups are left out."""
    decoded, drafted = any(group.tokens for group in groups), any(group.rounds for group in groups)
    header = ["", "completions"]
    header += ["completion tokens", "tokens per completion"] if decoded else []
    header += ["tokens per round", "drafts accepted"] if drafted else []
    lines = []
    for group in groups[:MAX_GROUPS]:
        cells = [group.name, f"{group.completions:,}"]
        cells += [f"{group.tokens:,}", _number(group.tokens / group.completions, 1)] if decoded else []
        cells += [_number(group.mean_acceptance_length), _number(group.acceptance_rate)] if drafted else []
        lines.append(cells)
    return _table(title, header, lines) + _more(len(groups), MAX_GROUPS, "groups")


def _start_ups(runs: Sequence[Mapping[str, float]]) -> str:
    shown = runs[:MAX_RUNS]
    phases = dict.fromkeys(phase for run in shown for phase in run)
    lines = [(phase, *(_number(run.get(phase), 1) for run in shown)) for phase in phases]
    lines.append(("in all", *(_number(sum(run.values()), 1) for run in shown)))
    header = ("", *(f"run {i + 1}" for i in range(len(shown))))
    return _table("from the command to the first token, seconds", header, lines) + _more(len(runs), MAX_RUNS, "runs")


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    return "\n".join([one_line(title), *terminal.table([header, *rows], left=left)])


def _more(number: int, shown: int, noun: str) -> str:
    """What a table leaves out."""
    return f"\n... and {number - shown} more {noun} (--json shows all)" if number > shown else ""


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
