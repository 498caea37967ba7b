"""`batchspec inspect OUT ID`: one request in full: its rows in output and input, prompt, completion, speculation and error."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.text import listed, one_line, quoted
from batchspec.data.dataset.reader import locate
from batchspec.data.runstate.footers import part_name
from batchspec.data.runstate.manifest import Manifest
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.errors import OutputError

Row = Mapping[str, Any]

NUM_NEAREST = 5
FACT_CHARS = 10_000
"""Maximum number of characters shown of a copied column; the Parquet file has the whole value."""
SHOWN_APART = {
    "request_id", "row_index", "sample_index", "status", "messages", "completion", "reasoning", "tool_calls", "prompt_ids",
    "token_ids", "logprobs", "top_logprobs", "usage", "error", "spec_decode", "perf",
}
"""Output columns that have a section of their own, or are too long for one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the request. Raises OutputError if the folder holds no job, or the job has no such request or sample."""
    parser = ArgumentParser(prog="batchspec inspect", description="One request of a job in full.")
    parser.add_argument("out", metavar="OUT", help="the job's output.dir")
    parser.add_argument("id", metavar="ID", help="request_id")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="index of the sample, from 0")
    args = parser.parse_args(argv)
    terminal.show(inspect(OutputFolder(args.out), args.id, args.sample))
    return 0


def inspect(output: OutputFolder, request_id: str, sample: int = 0) -> str:
    """The request as text. Reads the ids of the committed shards until it is found, and then its shard in full. Raises
    OutputError if there is none."""
    done = sorted(output.committed())
    for index in done:
        ids = _collected(output, output.scan([index]).select("request_id", "sample_index"))
        found = ids.with_row_index("row").filter(pl.col("request_id") == request_id)
        if not found.height:
            continue
        samples = found["sample_index"].to_list()
        if sample not in samples:
            there = ", ".join(map(str, samples))
            raise OutputError(f"{request_id} has no sample {sample}; --sample may be {there}")
        number = found["row"][samples.index(sample)]
        table, _ = output.written(index)  # read by Arrow: polars refuses or changes values of some types
        row = {name: _value(table.column(name).slice(number, 1)) for name in table.column_names}
        return "\n\n".join(_blocks(row, samples, f"data/{part_name(index)} row {number}", output.manifest))
    among = f"{len(done)} of {output.num_shards} shards are committed"
    among += "" if len(done) == output.num_shards else ", the others not written yet"
    near = _nearest(output, done, request_id)
    hint = f"the most similar ids are {', '.join(near)}" if near else f"no id is similar{_example(output, done)}"
    raise OutputError(f"{output.path} has no request {quoted(request_id)} ({among}); {hint}")


def _value(cell: pa.ChunkedArray) -> Any:
    """The Python value of a column with one row; Arrow's text of it if Python cannot represent it, such as nanoseconds or
    dates after the year 9999."""
    try:
        return cell[0].as_py()
    except (ValueError, OverflowError):
        text: str = cell.combine_chunks().to_string(window=FACT_CHARS, skip_new_lines=True)
        return text.removeprefix("[").removesuffix("]")


def _nearest(output: OutputFolder, shards: list[int], request_id: str) -> list[str]:
    """The NUM_NEAREST ids most similar to the one asked for."""
    near: list[str] = []
    for index in shards:
        ids = _collected(output, output.scan([index]).select(pl.col("request_id").unique(maintain_order=True)))
        near = difflib.get_close_matches(request_id, [*near, *ids["request_id"]], NUM_NEAREST)
    return near


def _example(output: OutputFolder, shards: list[int]) -> str:
    if not shards:
        return ""
    ids = _collected(output, output.scan(shards[:1]).select("request_id").head(1))["request_id"].to_list()
    return "".join(f"; the first one is {each!r}" for each in ids)


def _collected(output: OutputFolder, rows: pl.LazyFrame) -> pl.DataFrame:
    with scanning(output.path):
        return rows.collect()


def _blocks(row: Row, samples: list[int], where: str, manifest: Manifest) -> Iterator[str]:
    yield _listed(_facts(row, samples, where, manifest))
    if row["error"] is not None:
        yield "error\n" + _listed({name: value for name, value in row["error"].items() if value is not None}, indent="  ")
    prompt = list(row.get("messages") or [])
    if prompt and row["completion"] is not None and manifest.config.get("output", {}).get("messages", "full") == "full":
        prompt.pop()
    for turn in prompt:
        yield f"{one_line(turn['role'])}\n{terminal.indented(turn['content'] or turn.get('tool_calls') or '')}"
    for name in ("reasoning", "completion", "tool_calls"):
        if row.get(name) is not None:
            yield f"{name}\n{terminal.indented(row[name])}"
    if row["spec_decode"] is not None:
        yield _speculation(row["spec_decode"])
    if row["perf"] is not None:
        known = {name: _number(value) for name, value in row["perf"].items() if value is not None}
        yield "this run\n" + _listed(known, indent="  ")


def _facts(row: Row, samples: list[int], where: str, manifest: Manifest) -> dict[str, object]:
    facts: dict[str, object] = {"request": row["request_id"]}
    if len(samples) > 1:
        facts["sample"] = f"{row['sample_index']} of {len(samples)} (--sample N shows another)"
    facts |= {"status": row["status"], "output": where, "input": f"row {row['row_index']}"}
    if manifest.files:
        file, file_row = locate(manifest.files, row["row_index"])
        facts["input"] = f"row {row['row_index']}: {file} row {file_row}"
    if row["usage"] is not None:
        counts = {name.removesuffix("_tokens"): count for name, count in row["usage"].items() if count is not None}
        facts["tokens"] = listed(counts)
    # Copies of the id and prompt columns are not shown again.
    shown = [row["request_id"], *(turn["content"] for turn in row.get("messages") or [])]
    return facts | {k: v for k, v in row.items() if k not in SHOWN_APART and v is not None and v not in shown}


def _speculation(spec: Row) -> str:
    names = {
        "drafter": spec["drafter"],
        "rounds": spec["num_spec_steps"],
        "draft tokens": f"{spec['num_draft_tokens']:,} verified, {spec['num_accepted_draft_tokens']:,} accepted, "
        f"{spec['num_discarded_tokens']:,} emitted after the stop",
        "prefills": spec["num_prefills"],
        "mean acceptance length": _number(spec["mean_acceptance_length"]),
        "acceptance rate": _number(spec["draft_acceptance_rate"]),
    }
    lines = ["  accepted   rounds      position  drafted  rate"]
    positions = list(zip(spec["drafted_per_position"], spec["acceptance_per_position"], strict=True))
    for j, rounds in enumerate(spec["acceptance_histogram"]):
        drafted, rate = positions[j] if j < len(positions) else (None, None)
        right = "" if drafted is None else f"{j:>14}{drafted:>9,}{_number(rate):>7}"
        lines.append(f"{j:>10}{rounds:>9,}{right}")
    return "speculation\n" + _listed(names, indent="  ") + "\n\n" + "\n".join(lines)


def _listed(facts: Mapping[str, object], indent: str = "") -> str:
    return "\n".join(terminal.facts(facts, indent=indent, limit=FACT_CHARS))


def _number(value: object) -> object:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else value
