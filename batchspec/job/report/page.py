"""report.html: a self-contained page about a job, with pictures. It needs the extra `report` (matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence

from batchspec.console.text import MESSAGE_CHARS, for_shell, for_terminal
from batchspec.data.runstate.manifest import Manifest
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import ConfigError
from batchspec.job.report import html
from batchspec.job.report.about import input_rows, last_part, sampling, when
from batchspec.job.report.answer_sections import answer_sections
from batchspec.job.report.error_rows import Failed, first_errors
from batchspec.job.report.quality import Quality
from batchspec.job.report.stats import JobStats, job_stats
from batchspec.job.report.status import RunStatus, StatusReader
from batchspec.job.report.style import STYLE
from batchspec.job.report.summary import DECODED
from batchspec.job.report.texts import Shown
from batchspec.job.report.thumbnails import Thumbnails
from batchspec.job.report.timeline import Course, course, parse_run

MAX_CODES = 12

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
MORE = """<p class="note"><code>batchspec stats OUT</code> has these numbers as text, and more on drafts;
<code>batchspec status OUT</code> has every run; README.md in OUT, written at the end of a job, its settings.</p>"""
NEEDS_EXTRA = "report.html needs matplotlib: pip install 'matplotlib>=3.9', then batchspec report {out}"


def can_draw() -> bool:
    """Whether the extra `report` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(
    output: OutputFolder, images_of: Callable[[Sequence[Shown]], Thumbnails], stats: JobStats | None = None
) -> None:
    """Write report.html into the output folder.

    images_of  the images of the rows that are shown
    stats      result of `job_stats` for this output, if it is known; None computes it
    Raises ConfigError without the extra, OutputError without a committed shard, StorageError.
    """
    if not can_draw():
        raise ConfigError(NEEDS_EXTRA.format(out=for_shell(output.path)))
    if stats is None:
        stats = job_stats(output.path)
    runs = [run for text in output.logs(".timeline.jsonl") if (run := parse_run(text)) is not None]
    states = StatusReader(output).read().runs
    errors = first_errors(output) if stats.by_status.get("error") else {}  # it reads all shards again
    images = images_of(stats.quality.samples)
    output.put_report(report_page(output.manifest, stats, errors, course(runs), states, images, name=output.path))


def report_page(
    manifest: Manifest,
    stats: JobStats,
    errors: Mapping[str, Sequence[Failed]],
    over_time: Course | None,
    states: Sequence[RunStatus],
    images: Thumbnails,
    *,
    name: str,
) -> str:
    """The page as HTML.

    over_time  the job over time; None if no run recorded a timeline
    states     the status of every run
    images     those of the random samples
    """
    from batchspec.job.report import figures  # needs the extra `report`

    model = manifest.config.get("model", {}).get("path")
    body = [
        f"<header><h1>{html.line(last_part(model))}: {_size(stats)}</h1>",
        html.facts(_about(manifest, stats, over_time, states, name)) + "</header>",
        "<h2>Is the data good?</h2>",
        _tiles(_of_data(stats)),
        *answer_sections(stats),
        *figures.lengths(stats),
        *_errors(stats, errors),
        *_samples(stats.quality, images),
        "<h2>Speed</h2>",
        _tiles(_of_speed(stats)),
        *figures.over_time(over_time, DECODED if stats.speed is None else stats.speed.counts),
        *_drafts(stats),
        MORE,
    ]
    # In case a part was not escaped: no control character gets onto the page.
    return for_terminal(PAGE.format(title=html.line(f"batchspec: {name}"), style=STYLE, body="\n".join(body)))


def _size(stats: JobStats) -> str:
    count = stats.completions
    if count and stats.by_status.get("error", 0) == count:
        return f"{count:,} row{'s' * (count != 1)}, all of them errors"
    return f"{count:,} completion{'s' * (count != 1)}"


def _about(
    manifest: Manifest, stats: JobStats, over_time: Course | None, states: Sequence[RunStatus], name: str
) -> dict[str, str]:
    model = manifest.config.get("model", {})
    facts = {
        "Model": str(model.get("path")) + (f" at {model['revision']}" if model.get("revision") else ""),
        "Sampling": sampling(manifest.config),
        "Input": input_rows(manifest),
        "Drafter": stats.drafter,
        **when(states, over_time),
        "Output": f"{name}, {stats.shards:,} of {stats.shards_total:,} shards",
    }
    return {fact: value for fact, value in facts.items() if value}


def _tiles(tiles: Mapping[str, str]) -> str:
    """Label -> value, both HTML."""
    cells = (f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in tiles.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def _of_data(stats: JobStats) -> dict[str, str]:
    good, total = stats.quality, stats.completions
    status = stats.by_status.get
    tiles, decoded = {"ok": _share(status("ok", 0), total)}, stats.completion_tokens > 0
    if decoded:
        repeated = stats.by_finish_reason.get("repetition", 0)
        tiles["truncated" + (f", {repeated:,} at a repetition" if repeated else "")] = _share(status("truncated", 0), total)
    errors = status("error", 0)
    tiles["error rows"] = f'<span class="error">{_share(errors, total)}</span>' if errors else "0"
    if status("invalid", 0):
        tiles["violate their schema"] = _share(status("invalid", 0), total)
    if status("skipped", 0):
        tiles["skipped, prompt too long"] = _share(status("skipped", 0), total)
    if good.answers and decoded:
        tiles["empty answers"] = _share(good.empty, good.answers)
        tiles["answers that end in a loop"] = _share(good.loops, good.answers)
    if good.mean_distinct is not None and good.mean_answers is not None:
        requests = f"{good.all_equal:,} of {good.sampled_requests:,} requests"
        tiles[f"distinct answers per request; all equal in {requests}"] = f"{good.mean_distinct:.1f} of {good.mean_answers:.1f}"
    if stats.reasoning_tokens:
        tiles["thoughts cut off"] = f"{stats.reasoning_truncated:,}"
    return tiles


def _share(part: int, whole: int) -> str:
    return f"{part:,} <small>{html.percent(part / whole)}</small>" if part else "0"


def _of_speed(stats: JobStats) -> dict[str, str]:
    speed = stats.speed
    tiles = {} if speed is None else {f"{speed.counts} a second": f"{speed.tok_s:,.1f}"}
    if stats.completion_tokens:
        tiles["tokens in completions"] = f"{stats.completion_tokens:,}"
    return tiles | {"tokens in prompts": f"{stats.prompt_tokens:,}"}


def _drafts(stats: JobStats) -> Iterator[str]:
    """What drafts brought, in one sentence. Nothing without a drafter."""
    if stats.drafter != "none":
        length, rate = html.number(stats.overall.mean_acceptance_length), html.percent(stats.overall.acceptance_rate)
        yield (
            f"<p>Drafts ({html.line(stats.drafter)}): a round of the model gave a row {length} tokens instead of 1; {rate} of "
            "the draft tokens were accepted.</p>"
        )
    if stats.trained_head is not None and (line := stats.trained_head.line()):
        yield f"<p>The job trained a head for its model: {html.line(line, MESSAGE_CHARS)}.</p>"


def _errors(stats: JobStats, errors: Mapping[str, Sequence[Failed]]) -> Iterator[str]:
    """Error rows by code: the first rows of each code with their reasons."""
    if not errors:
        return
    yield '<h3 id="errors">Error rows</h3>'
    cards = []
    for code, count in list(stats.by_error.items())[:MAX_CODES]:
        rows = errors.get(code, ())
        lines = [(html.line(row.request_id), f"{row.row_index:,}", html.line(row.message, MESSAGE_CHARS)) for row in rows]
        more = f" (the first {len(rows)})" if count > len(rows) else ""
        table = html.table(("request", "row", "reason"), lines, safe=True, texts=True)
        cards.append(f'<div class="card"><h4>{html.line(code)}: {count:,} row{"s" * (count != 1)}{more}</h4>{table}</div>')
    yield f'<div class="stack">{"".join(cards)}</div>'
    if len(stats.by_error) > MAX_CODES:
        yield f'<p class="note">And {len(stats.by_error) - MAX_CODES} more codes.</p>'


def _samples(good: Quality, images: Thumbnails) -> Iterator[str]:
    """Random answers."""
    if good.samples:
        yield '<h3>Random samples</h3><p class="note">Truncated; <code>batchspec inspect OUT ID</code> shows one in full.</p>'
        if images.note:
            yield f'<p class="note">{html.line(images.note, MESSAGE_CHARS)}</p>'
        yield f'<div class="texts">{"".join(_article(row, images.html(row.row_index)) for row in good.samples)}</div>'


def _article(row: Shown, images: str) -> str:
    """images: HTML"""
    label = html.line(row.request_id) + (f" sample {row.sample_index}" if row.sample_index else "")
    facts = f"{row.status}: {row.prompt_tokens:,} prompt tokens, {row.tokens:,} tokens"
    prompt = "" if row.prompt is None else f'<p class="note">prompt</p><pre>{html.text(row.prompt)}</pre>'
    return (
        f'<article class="card"><h3>{label}</h3><p class="note">{html.line(facts)}</p>{images}{prompt}'
        f'<p class="note">completion</p><pre>{html.text(row.completion)}</pre></article>'
    )
