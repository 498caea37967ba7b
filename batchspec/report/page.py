"""report.html: one page that needs nothing else, with pictures of what a job did; the extra `report` draws them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from batchspec.errors import ConfigError
from batchspec.io.manifest import Manifest
from batchspec.io.shards import OutputFolder
from batchspec.report.requests import Requests, Shown, read_requests
from batchspec.report.stats import Acceptance, JobStats, job_stats
from batchspec.report.style import STYLE
from batchspec.report.timeline import Course, course, parse_run

MAX_GROUPS = 12
"""Values of a column that are pictured; a table lists more."""
MAX_LINES = 40

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
NEEDS_EXTRA = "report.html needs matplotlib: pip install 'batchspec[report]', then batchspec report {out}"


def can_draw() -> bool:
    """The extra `report` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(output: OutputFolder, by: str | None = None, stats: JobStats | None = None) -> None:
    """Write report.html into the output folder; `by` names a column to show acceptance by, `stats` is what `job_stats` gave.

    Raises ConfigError without the extra, OutputError without a committed shard or such a column, StorageError.
    """
    if not can_draw():
        raise ConfigError(NEEDS_EXTRA.format(out=output.path))
    if by is not None or stats is None:
        stats = job_stats(output.path, by)
    runs = [run for text in output.logs(".timeline.jsonl") if (run := parse_run(text)) is not None]
    speeds = [json.loads(text) for text in output.logs(".json")]
    output.put_report(report_page(output.manifest, stats, read_requests(output), course(runs), speeds, name=output.path, by=by))


def report_page(
    manifest: Manifest,
    stats: JobStats,
    requests: Requests,
    over_time: Course | None,
    speeds: Sequence[Mapping[str, float]],
    *,
    name: str,
    by: str | None = None,
) -> str:
    """The page as HTML.

    over_time  what the runs recorded; None where nothing was
    speeds     what each run that ended said of itself (RunSummary.facts)
    """
    model = str(manifest.config.get("model", {}).get("path"))
    body = [
        f"<header><h1>{escape(model)}: {stats.completions:,} completions</h1>",
        f'<p class="note">{escape(name)} &middot; drafter {escape(stats.drafter)} &middot; '
        f"{stats.shards:,} of {stats.shards_total:,} shards</p></header>",
        _tiles(stats, speeds),
        *(_acceptance(stats, by) if stats.drafter != "none" else ()),
        *_over_time(over_time, drafted=stats.drafter != "none"),
        *_outcome(stats, requests),
        *_requests(requests),
        *_settings(manifest, speeds),
    ]
    return PAGE.format(title=escape(f"batchspec: {name}"), style=STYLE, body="\n".join(body))


def _tiles(stats: JobStats, speeds: Sequence[Mapping[str, float]]) -> str:
    errors = stats.by_status.get("error", 0)
    seconds = sum(run["seconds"] for run in speeds)
    tiles = {
        "tokens in completions": f"{stats.completion_tokens:,}",
        "tokens in prompts": f"{stats.prompt_tokens:,}",
        "tokens a second": f"{sum(run['tokens'] for run in speeds) / seconds:,.0f}" if seconds else "-",
        "mean acceptance length": _number(stats.overall.mean_acceptance_length),
        "draft tokens accepted": _percent(stats.overall.acceptance_rate),
        "error rows": f'<b class="error">{errors:,}</b>' if errors else "0",
    }
    if stats.drafter == "none":
        del tiles["mean acceptance length"], tiles["draft tokens accepted"]
    cells = (f'<div class="tile"><b>{value}</b><span>{said}</span></div>' for said, value in tiles.items())
    return f'<div class="tiles">{"".join(cells)}</div>'


def _acceptance(stats: JobStats, by: str | None) -> Iterator[str]:
    from batchspec.report import pictures

    rounds = sum(stats.histogram)
    positions = [str(position.position) for position in stats.by_position]
    figures = [
        _figure(
            "Acceptance by position",
            pictures.bars(positions, [p.rate for p in stats.by_position], x="position in the draft", top=1.1),
            "Share of the draft tokens at a position that were accepted, of all that were drafted there.",
        ),
        _figure(
            "Rounds by accepted draft tokens",
            pictures.bars(
                [str(j) for j in range(len(stats.histogram))],
                [count / rounds if rounds else None for count in stats.histogram],
                x="accepted draft tokens",
            ),
            f"Share of {rounds:,} rounds. A round gives its accepted draft tokens and one token more.",
        ),
        _figure(
            "Acceptance length by prompt length",
            pictures.bars(
                [group.name for group in stats.by_prompt_tokens],
                [group.mean_acceptance_length for group in stats.by_prompt_tokens],
                x="prompt tokens",
            ),
            "Tokens a round, each round counted alike.",
        ),
    ]
    if by is not None:
        groups = {group.name: group.mean_acceptance_length or 0.0 for group in stats.by_column[:MAX_GROUPS]}
        few = f"The {MAX_GROUPS} most frequent of {len(stats.by_column):,} values." if len(stats.by_column) > MAX_GROUPS else ""
        figures.append(_figure(f"Acceptance length by {by}", pictures.rows(groups, form=".2f"), f"Tokens a round. {few}"))
    yield "<h2>Acceptance</h2>"
    yield _grid(figures)
    tables = [_groups("prompt tokens", stats.by_prompt_tokens)]
    if by is not None:
        tables.append(_groups(by, stats.by_column[:MAX_LINES]))
    yield "<details><summary>As numbers</summary>" + _grid(f'<div class="card">{table}</div>' for table in tables) + "</details>"


def _groups(name: str, groups: Iterable[Acceptance]) -> str:
    lines = [(g.name, f"{g.completions:,}", _number(g.mean_acceptance_length), _percent(g.acceptance_rate)) for g in groups]
    return _table((name, "completions", "tokens a round", "accepted"), lines)


def _over_time(over: Course | None, *, drafted: bool) -> Iterator[str]:
    from batchspec.report import pictures

    yield "<h2>Over time</h2>"
    if over is None:
        yield '<p class="note">No run recorded its course.</p>'
        return
    runs = len(over.starts_s)
    joined = f" {runs} runs, the pauses between them cut out; a dotted line marks where one began." if runs > 1 else ""
    share = [float(part.sum() / max(over.slots, 1) / len(part)) for part in (over.live_rows, over.waiting, over.ending)]
    back = f" Rows were set back for want of pages {over.set_back:,} times." if over.set_back else ""
    keys = (
        _key("first", f"live {share[0]:.0%}")
        + _key("second", f"waiting for a refill or for pages {share[1]:.0%}")
        + _key("third", f"no row left {share[2]:.0%}")
    )
    figures = [
        _figure("Tokens a second", pictures.speed(over), f"Completion tokens.{joined}"),
        _figure("Slots", pictures.slots(over), keys + back),
    ]
    if drafted:
        said = _key("first", "tokens a round") + _key("second", "draft tokens a round") + "Means over live rows."
        figures.append(_figure("Drafting", pictures.drafting(over), said))
    yield _grid(figures)


def _outcome(stats: JobStats, requests: Requests) -> Iterator[str]:
    from batchspec.report import pictures

    reasons = {f"error: {code}": count for code, count in stats.by_error.items()}
    reasons = {reason: count for reason, count in stats.by_finish_reason.items() if reason != "error"} | reasons
    said = f"Of {int(requests.output_lens.sum()):,} completions."
    yield "<h2>Lengths and ends</h2>"
    yield _grid(
        [
            _figure("Prompt lengths", pictures.histogram(requests.prompt_lens, x="prompt tokens"), said),
            _figure("Completion lengths", pictures.histogram(requests.output_lens, x="completion tokens"), said),
            _figure("Finish reasons", pictures.rows(dict(list(reasons.items())[:MAX_GROUPS])), "Completions by what ended them."),
        ]
    )


def _requests(requests: Requests) -> Iterator[str]:
    if not requests.shown:
        return
    yield "<h2>Requests</h2>"
    yield _grid(f'<div class="card"><h3>{title}</h3>{_shown(rows)}</div>' for title, rows in requests.shown.items())
    texts = {(row.row_index, row.sample_index): row for rows in requests.shown.values() for row in rows}
    yield '<h2>Their text</h2><p class="note">Cut short; <code>batchspec inspect OUT ID</code> shows one in full.</p>'
    yield _grid(_article(texts[key]) for key in sorted(texts))


def _shown(rows: Iterable[Shown]) -> str:
    lines = [
        (f'<a href="#{_anchor(row)}">{_label(row)}</a>', f"{row.prompt_tokens:,}", f"{row.tokens:,}", _number(row.mean_length))
        for row in rows
    ]
    return _table(("request", "prompt", "tokens", "a round"), lines, safe=True)


def _article(row: Shown) -> str:
    ratio = "" if row.mean_length is None else f", {row.mean_length:.2f} tokens a round"
    facts = f"{row.prompt_tokens:,} prompt tokens, {row.tokens:,} tokens, {row.finish_reason}{ratio}"
    prompt = "" if row.prompt is None else f'<p class="note">prompt</p><pre>{_text(row.prompt)}</pre>'
    return (
        f'<article class="card" id="{_anchor(row)}"><h3>{_label(row)}</h3><p class="note">{escape(facts)}</p>{prompt}'
        f'<p class="note">completion</p><pre>{_text(row.completion)}</pre></article>'
    )


def _anchor(row: Shown) -> str:
    return f"r{row.row_index}-{row.sample_index}"


def _label(row: Shown) -> str:
    return _text(row.request_id) + (f" sample {row.sample_index}" if row.sample_index else "")


def _settings(manifest: Manifest, speeds: Sequence[Mapping[str, float]]) -> Iterator[str]:
    yield "<h2>Runs and settings</h2>"
    cards = [f'<div class="card"><h3>Made with</h3>{_facts(manifest.recorded)}</div>'] if manifest.recorded else []
    if speeds:
        names = {"tok_s": "tok/s", "seconds": "seconds", "start_up_s": "start-up s", "mean_live_rows": "live rows"}
        lines = [[f"{run.get(name, 0):,.1f}" for name in names] for run in speeds]
        cards.insert(0, f'<div class="card"><h3>Runs that ended</h3>{_table(list(names.values()), lines)}</div>')
    yield _grid(cards)
    yield "<details><summary>Every setting</summary>" + _grid(
        f'<div class="card"><h3>{escape(str(group))}</h3>{_facts(_flat(values))}</div>'
        for group, values in manifest.config.items()
        if isinstance(values, Mapping) and values
    )
    yield f'<div class="card">{_facts({k: v for k, v in manifest.config.items() if not isinstance(v, Mapping)})}</div></details>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of nested mappings joined with dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def _facts(facts: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        return _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))

    return "<dl>" + "".join(f"<dt>{escape(str(name))}</dt><dd>{shown(value)}</dd>" for name, value in facts.items()) + "</dl>"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]], *, safe: bool = False) -> str:
    """`safe`: the cells are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell if safe else _text(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _figure(title: str, svg: str, said: str) -> str:
    """`said` is HTML."""
    named = svg.replace('role="img"', f'role="img" aria-label="{escape(title)}"', 1)
    return f"<figure><h3>{escape(title)}</h3>{named}<figcaption>{said}</figcaption></figure>"


def _grid(parts: Iterable[str]) -> str:
    cards = list(parts)
    pairs = " pairs" if len(cards) == 4 else ""  # three and one alone look like a mistake
    return f'<div class="grid{pairs}">{"".join(cards)}</div>'


def _key(colour: str, said: str) -> str:
    return f'<span class="key"><i style="background: var(--{colour})"></i>{said}</span> '


def _text(text: str) -> str:
    """Text as HTML, with control characters, those that turn the direction of writing among them, written out."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
