"""The sections of the report about what the answers are: labels, scores, JSON objects, tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from batchspec.console.text import MESSAGE_CHARS
from batchspec.job.report import html
from batchspec.job.report.calls import ToolCalls
from batchspec.job.report.json_answers import JsonAnswers
from batchspec.job.report.labels import Labels
from batchspec.job.report.scores import Score
from batchspec.job.report.stats import JobStats

MAX_LINES = 40
MAX_VALUES = 12
"""Values of an enum that are shown."""


def answer_sections(stats: JobStats) -> Iterator[str]:
    """One section for each kind of answers that the job has."""
    if stats.labels is not None:
        yield from _labels(stats.labels)
    if stats.scores:
        yield from _scores(stats.scores)
    if stats.json_answers is not None:
        yield from _fields(stats.json_answers)
    if stats.tool_calls is not None:
        yield from _calls(stats.tool_calls)


def _labels(found: Labels) -> Iterator[str]:
    rated = bool(found.least_certain)
    header = ("label", "rows", "share", *(("mean probability", "mean margin") if rated else ()))
    lines = [
        (
            one.label, f"{one.rows:,}", html.percent(one.rows / found.rows if found.rows else None),
            *((html.number(one.mean_prob), html.number(one.mean_margin)) if rated else ()),
        )
        for one in found.labels[:MAX_LINES]
    ]
    cards = [_card("Labels", html.table(header, lines), _left_out(len(found.labels), "labels"))]
    if rated:
        rows = [(one.request_id, one.label, f"{one.prob:.3f}", f"{one.margin:.3f}") for one in found.least_certain]
        note = "The rows with the smallest margins: differences to the second most probable label."
        table = html.table(("request", "label", "probability", "margin"), rows, names=True)
        cards.append(_card("Least certain rows", table, note))
    yield html.grid(cards)


def _scores(found: Sequence[Score]) -> Iterator[str]:
    lines = [
        (one.label, f"{one.rows:,}", *map(html.number, (one.mean, one.deviation, one.least, one.greatest)))
        for one in found[:MAX_LINES]
    ]
    table = html.table(("label", "rows", "mean", "deviation", "least", "greatest"), lines)
    yield html.grid([_card("Scores", table, _left_out(len(found), "labels"))])


def _fields(found: JsonAnswers) -> Iterator[str]:
    lines = [
        (html.line(one.name), f"{one.present:,}", f"{one.null:,}", html.line(_values(one.values), MESSAGE_CHARS))
        for one in found.fields[:MAX_LINES]
    ]
    table = html.table(("field", "present", "null", "values"), lines, safe=True, texts=True)
    note = f"{found.valid:,} of {found.finished:,} finished answers are valid JSON, {found.objects:,} are objects."
    left_out = _left_out(len(found.fields), "fields")
    yield f'<div class="stack">{_card("Fields of the JSON answers", table, f"{note} {left_out}".strip())}</div>'


def _values(values: Mapping[str, int] | None) -> str:
    if values is None:
        return ""
    shown = ", ".join(f"{value}: {count:,}" for value, count in list(values.items())[:MAX_VALUES])
    return shown + (f", and {len(values) - MAX_VALUES} more values" if len(values) > MAX_VALUES else "")


def _calls(found: ToolCalls) -> Iterator[str]:
    tools = list(found.by_tool.items())
    table = html.table(("tool", "calls"), [(name, f"{count:,}") for name, count in tools[:MAX_LINES]])
    notes = [
        f"{found.calls:,} calls; {found.without:,} of {found.answers:,} answers have none.",
        f"Invalid: {found.bad_arguments:,} calls whose arguments are not a JSON object"
        + ("." if found.unknown_tools is None else f", {found.unknown_tools:,} of a tool that the row does not have."),
        _left_out(len(tools), "tools"),
    ]
    yield html.grid([_card("Tool calls", table if tools else "", " ".join(filter(None, notes)))])


def _card(title: str, content: str, note: str) -> str:
    """`content` is HTML."""
    said = f'<p class="note">{html.line(note, MESSAGE_CHARS)}</p>' if note else ""
    return f'<div class="card"><h3>{html.line(title)}</h3>{content}{said}</div>'


def _left_out(number: int, noun: str) -> str:
    return f"And {number - MAX_LINES:,} more {noun}: batchspec stats --json lists them." if number > MAX_LINES else ""
