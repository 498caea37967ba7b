"""`batchspec export`: convert a job's output to training data or OpenAI batch responses, or OpenAI batch requests to an input.

chat               {"messages": [...]}: the prompt's turns and the answer; .jsonl or .parquet
prompt_completion  {"prompt": [turns], "completion": [the answer's turn]}; .jsonl or .parquet
openai             one line a request, its samples as choices; rows without a completion become `error`; .jsonl

TRL's trainers read chat and prompt_completion directly: all rows have the same format, lists of turns, and by default status ok.

Shards are converted one at a time, so that memory does not grow with the job. The file appears under its name when complete.
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec import terminal
from batchspec.arguments import ArgumentParser
from batchspec.dataset.lines import LongLine, lines_of
from batchspec.dataset.messages import THINKING_FIELD
from batchspec.dataset.openai_requests import Line, filled, parse_request, request_row, request_schema
from batchspec.dataset.openai_responses import response_line
from batchspec.errors import ConfigError, InputError, OutputError
from batchspec.local_files import open_regular, unusable_name
from batchspec.runstate.output_folder import OutputFolder
from batchspec.runstate.scan import scanning
from batchspec.storage.store import storing
from batchspec.text import counted, for_shell

FORMATS = ("chat", "prompt_completion", "openai")
SUFFIXES = {
    "chat": (".jsonl", ".parquet"), "prompt_completion": (".jsonl", ".parquet"), "openai": (".jsonl",),
    "openai's requests": (".parquet",),
}  # fmt: skip
STATUSES = ("ok", "truncated", "error", "skipped")
GROUP_ROWS = 8192


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print what it contains and leaves out. Raises OutputError, InputError, ConfigError, StorageError."""
    parser = ArgumentParser(prog="batchspec export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", metavar="OUT FILE", nargs="+", help="output folder, FILE to write; --from-openai: OUT.parquet")
    parser.add_argument("--to", choices=FORMATS, help="format of FILE")
    parser.add_argument("--from-openai", metavar="FILE.jsonl", type=Path, help="OpenAI batch requests to convert to an input")
    parser.add_argument("--status", help=f"rows to write, comma-separated: {', '.join(STATUSES)}; default ok, openai: all")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--drop", metavar="KEYS", action="append", default=[], help="--from-openai: ignore these keys, comma-separated"
    )
    args = parser.parse_intermixed_args(argv)
    source, paths = args.from_openai, args.paths
    if (args.to is None) == (source is None) or len(paths) != (2 if source is None else 1):
        parser.error("give OUT --to FORMAT FILE.jsonl, or --from-openai FILE.jsonl OUT.parquet")
    unread, reads = ("drop", "--from-openai") if source is None else ("status", "--to")
    parser.refuse(args, (unread,), f"is read only with {reads}")
    form = "openai's requests" if source is not None else args.to
    target = target_file(paths[-1], args.overwrite, SUFFIXES[form], form)
    if source is not None:
        terminal.show_line(from_openai(source, target, [key for keys in args.drop for key in keys.split(",")]))
    else:
        terminal.show_line(export(OutputFolder(paths[0]), target, args.to, _statuses(args.status, args.to)))
    return 0


def target_file(name: str, overwrite: bool, suffixes: Sequence[str], form: str) -> Path:
    """The file to write. Raises OutputError if it is not a possible file name, exists already, or has another suffix."""
    if "://" in name:
        raise OutputError(f"{name}: export writes a local file; give a path, and copy the file where you need it")
    target = Path(name)
    if why := unusable_name(target):
        raise OutputError(f"{name!r} cannot be written: {why}; give another name")
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"lies in {target.parent}, which is not a folder"
        raise OutputError(f"{name} {what}; give the name of a file in a folder that exists")
    if target.exists() and not overwrite:
        raise OutputError(f"{name} exists; give another name, or --overwrite to replace it")
    if target.suffix not in suffixes:
        raise OutputError(f"{name}: {form} is written as {' or '.join(suffixes)}; give a file name with such a suffix")
    return target


def _statuses(wish: str | None, form: str) -> set[str]:
    statuses = set(wish.split(",")) if wish is not None else set(STATUSES if form == "openai" else ["ok"])
    if unknown := statuses - set(STATUSES):
        raise ConfigError(f"--status {wish}: {', '.join(sorted(unknown))} is not a status; choose from {', '.join(STATUSES)}")
    return statuses


def export(output: OutputFolder, target: Path, form: str, statuses: set[str]) -> str:
    """Write the committed rows with one of the statuses; returns a line that says what was written and left out.

    Raises OutputError if there is no such row to write, or `target` is in data/.
    """
    done = sorted(output.committed())
    if not done:
        raise OutputError(f"{output.path} has no committed shard yet; run the job first")
    if target.absolute().is_relative_to(Path(output.path, "data").absolute()):
        raise OutputError(f"{target}: data/ may only hold shards, as readers take every file in it; write elsewhere")
    config = output.manifest.config
    kept = config.get("output", {}).get("messages", "full")
    if config.get("decode", {}).get("score") == "prompts":
        raise OutputError(f"{output.path} holds scores of prompts and no answer; read its data/")
    if form != "openai" and kept == "none":
        raise OutputError(f"{output.path} holds no prompts, which --to {form} needs; run the job with output.messages=full")
    left_out: Counter[str] = Counter()

    def wanted(row: Line) -> bool:
        good = row["status"] in statuses and (form == "openai" or (row["completion"] is not None and bool(row["messages"])))
        left_out[row["status"]] += not good
        return good

    model = str(config.get("model", {}).get("path"))
    rows = filter(wanted, _rows(output, done, form))
    if form == "openai":
        lines = (response_line(list(samples), model) for _, samples in groupby(rows, itemgetter("row_index")))
    else:
        given, whole = config.get("input", {}).get("final_assistant") == "continue", kept == "full"
        thinks = config.get("output", {}).get("reasoning_in_messages", False)
        lines = (
            _training_line(row, form, whole=whole, goes_on=whole and (given or (not thinks and _goes_on(row)))) for row in rows
        )
        if target.suffix == ".jsonl":
            lines = ({name: [_as_openai(turn) for turn in turns] for name, turns in line.items()} for line in lines)
    if target.suffix == ".parquet":
        with scanning(output.path):
            turns = output.scan(done[:1]).select("messages").head(0).collect().to_arrow().schema.field("messages").type
        names = ("messages",) if form == "chat" else ("prompt", "completion")
        count = _write_rows(lines, target, pa.schema([(name, turns) for name in names]))
    else:
        count = _write_lines(lines, target)
    if len(done) < output.num_shards:
        terminal.say(f"{len(done)} of {output.num_shards} shards are committed; the others are not in the file")
    missing = ", ".join(f"{number:,} {status}" for status, number in sorted(left_out.items()) if number)
    what = counted(count, "row" if target.suffix == ".parquet" else "line")
    return f"{target}: {what}" + (f"; rows left out: {missing}" if missing else "")


def _rows(output: OutputFolder, shards: list[int], form: str) -> Iterator[Line]:
    names = ["request_id", "row_index", "sample_index", "status", "completion"]
    names += ["finish_reason", "reasoning", "usage", "error", "perf"] if form == "openai" else ["messages"]
    for index in shards:
        with scanning(output.path):
            rows = output.scan([index])
            there = [*names, "tool_calls"] if "tool_calls" in rows.collect_schema() else names
            shard = rows.select(there).collect()
        yield from shard.iter_rows(named=True)


def _training_line(row: Line, form: str, *, whole: bool, goes_on: bool) -> dict[str, Any]:
    """One row of training data.

    whole    `messages` ends with the answer's turn, which is cut off
    goes_on  the answer may continue a final assistant turn of the prompt: then the last message is the complete answer
    """
    prompt = row["messages"][:-1] if whole else row["messages"]
    answer = row["messages"][-1:] if goes_on else [_answer(row, whole)]
    if not whole and prompt[-1]["role"] == "assistant":  # a row has an answer only if it continues this turn
        begun, (rest,) = prompt[-1], answer
        prompt, answer = prompt[:-1], [begun | rest | {"content": f"{begun['content']}{rest['content']}"}]
    return {"messages": prompt + answer} if form == "chat" else {"prompt": prompt, "completion": answer}


def _goes_on(row: Line) -> bool:
    """Whether the answer continues a turn of the prompt, by the column final_assistant."""
    said: str = row["messages"][-1].get("content") or ""
    return len(said) > len(row["completion"]) and said.endswith(row["completion"])


def _answer(row: Line, whole: bool) -> dict[str, Any]:
    answer = {"role": "assistant", "content": row["completion"]}
    if row.get("tool_calls") is not None:
        answer["tool_calls"] = row["tool_calls"]
    if whole and (thought := row["messages"][-1].get(THINKING_FIELD)) is not None:
        answer[THINKING_FIELD] = thought
    return answer


def _as_openai(turn: Line) -> dict[str, Any]:
    """The turn as OpenAI's chat format has it: tool calls as a list, and no null fields."""
    turn = {name: value for name, value in turn.items() if value is not None or name == "content"}
    return turn | ({"tool_calls": json.loads(turn["tool_calls"])} if "tool_calls" in turn else {})


def from_openai(source: Path, target: Path, drop: Sequence[str] = ()) -> str:
    """Convert a file of request lines to the Parquet input of a job. The file is read twice; the first pass checks every line.

    Only columns that some line fills are written. Raises InputError for the first line that batchspec cannot follow.
    """
    used: set[str] = set()
    count = 0
    for row in _requests(source, drop):
        used |= filled(row)
        count += 1
    if not count:
        raise InputError(f"{source}: no request in it; give a file of OpenAI's batch requests")
    schema = request_schema(used)
    _write_rows((request_row(row, schema) for row in _requests(source, drop)), target, schema)
    return f"{target}: {count:,} rows with {', '.join(schema.names)}; run it with input.path={for_shell(target)}"


def _requests(source: Path, drop: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(source) as file:
            for number, line in enumerate(lines_of(file), 1):
                where = f"{source} line {number}"
                if isinstance(line, LongLine):
                    raise InputError(f"{where}: {line.problem}; leave it out")
                if line.strip():
                    yield parse_request(line.decode("utf-8"), where, drop)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{source}: cannot be read ({why}); give a file of JSON lines in UTF-8") from error


def _write_rows(rows: Iterator[Line], target: Path, schema: pa.Schema) -> int:
    count = 0
    with (
        _finished(target) as path, path.open("xb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer
    ):  # fmt: skip
        while group := list(islice(rows, GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema))
            count += len(group)
    return count


def _write_lines(lines: Iterator[dict[str, Any]], target: Path) -> int:
    count = 0
    with _finished(target) as path, path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count


@contextmanager
def _finished(target: Path) -> Iterator[Path]:
    """A temporary path next to the target: renamed to it if the block succeeds, deleted if it fails."""
    path = target.with_name(f".batchspec-{uuid.uuid4().hex}")
    with storing(f"writing {target}"):
        try:
            yield path
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(path, target)
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
