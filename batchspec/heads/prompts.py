"""`batchspec prompts`: let a chat model write varied prompts itself, to train a drafter without a data set.

    batchspec prompts --open MODEL --rows 20000 openings.parquet
    JOB input.path=openings.parquet output.dir=turns decode.temperature=1 decode.max_new_tokens=512
    batchspec prompts --from turns questions.parquet
    JOB input.path=questions.parquet output.dir=answers decode.temperature=0.8 decode.max_new_tokens=512

JOB is python -m batchspec.run model.path=MODEL output=training. Then batchspec train reads input.path=[turns,answers].

In the first job the prompt is only the opening of a user's turn in the model's chat template, so that the model writes what a
user would ask; the second job answers it. With --after answers, the rows are the chats of that job, followed by the opening of
the next turn of the user: repeat the steps for longer chats.
--texts N adds N rows whose question contains a text: each line of --tasks is a task (summarise this, answer from these passages
...). It is the system prompt while the model writes the text, and precedes the text in the question.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.checkpoint.hub import find_model
from batchspec.config.schema import InputConfig
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.target_file import target_file
from batchspec.data.dataset.reader import open_source
from batchspec.errors import CheckpointError, ConfigError, InputError, OutputError
from batchspec.process.local_files import fault_of, open_regular
from batchspec.text.tokenizer import Tokenizer

_MARK = "BATCHSPECUSERTURN"
_CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
Chat = list[dict[str, str]]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print a summary. Raises ConfigError, CheckpointError, InputError, OutputError."""
    parser = ArgumentParser(prog="batchspec prompts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", metavar="FILE.parquet", help="file to write: the input of a job")
    add("--open", metavar="MODEL", dest="model", help="folder or hub id of a chat model: write rows that open a user's turn")
    add("--after", metavar="OUT", dest="chats", help="--open: continue the chats of this job, which has the column messages")
    add("--rows", type=int, default=20000, help="--open: maximum number of rows; default %(default)s")
    add("--texts", type=int, default=0, metavar="N", help="--open: N more rows, whose turns are texts for the tasks")
    add("--tasks", metavar="FILE", default="pkg://tasks", help="--texts: file with one task a line; default %(default)s")
    add("--from", metavar="OUT", dest="output", help="output of a job on such rows: write its finished turns as messages")
    add("--overwrite", action="store_true", help="replace the file if it exists")
    args = parser.parse_args(argv)
    if (args.model is None) == (args.output is None) or sum(map(bool, (args.chats, args.texts, args.output))) > 1:
        parser.error("give --open MODEL [--after OUT or --texts N], or --from OUT")
    if not args.texts:
        parser.refuse(args, ("tasks",), "is read only with --texts")
    if args.output is not None:
        parser.refuse(args, ("rows",), "is read only with --open")
    target = target_file(args.file, args.overwrite, (".parquet",), "a file of prompts")
    if args.output is None:
        terminal.show_line(_open(args.model, args.rows, args.texts, args.tasks, args.chats, target))
    else:
        terminal.show_line(_collect(args.output, target))
    return 0


def _open(model: str, rows: int, texts: int, tasks: str, chats_output: str | None, target: Path) -> str:
    """Write the rows that open a user's turn. Equal prompts get different seeds in a job, because their ids differ."""
    for option, given, least in (("--rows", rows, 0 if texts else 1), ("--texts", texts, 0)):
        if given < least:
            raise ConfigError(f"prompts {option} {given} must be at least {least}; 20000 is usual")
    tokenizer = Tokenizer(find_model(model, key="--open").folder)
    if chats_output is None:
        opening, end = opening_of(tokenizer)
        columns: dict[str, list[object]] = {"id": [f"turn-{i:06}" for i in range(rows)], "prompt_ids": [opening] * rows}
        if texts:
            chosen = _tasks(tasks)
            under = [opening_of(tokenizer, [{"role": "system", "content": task}])[0] for task in chosen]
            columns["id"] += [f"text-{i:06}" for i in range(texts)]
            columns["prompt_ids"] += [under[i % len(chosen)] for i in range(texts)]
            columns["task"] = [*[None] * rows, *(chosen[i % len(chosen)] for i in range(texts))]
    else:
        chats = _chats(chats_output, rows)
        openings = [opening_of(tokenizer, chat) for _, chat in chats]
        end = openings[0][1]
        columns = {"id": [name for name, _ in chats], "prompt_ids": [ids for ids, _ in openings], "turns": [c for _, c in chats]}
    if end is not None:
        columns["stop"] = [[end]] * len(columns["id"])
    types = {
        "id": pa.string(), "prompt_ids": pa.list_(pa.int32()), "turns": _CHAT, "task": pa.string(), "stop": pa.list_(pa.string())
    }
    _write(pa.table({name: pa.array(values, types[name]) for name, values in columns.items()}), target)
    return f"{target}: {len(columns['id']):,} rows that open a user's turn" + ("" if end is None else f", up to {end}")


def opening_of(tokenizer: Tokenizer, chat: Sequence[dict[str, str]] = ()) -> tuple[list[int], str | None]:
    """The tokens that precede the text of a user's turn after `chat`, and the special token that follows the text, or None.

    Raises CheckpointError for a model without a chat template, or with one that drops or changes a user's text.
    """
    try:
        text = tokenizer.render_chat([*chat, {"role": "user", "content": _MARK}])
    except ValueError as error:
        raise CheckpointError(f"prompts --open: {error}") from None
    before, found, after = text.partition(_MARK)
    if not found or not before:
        raise CheckpointError("prompts --open: the chat template does not open a user's turn before its text; take another model")
    special = {index: content for content, index in tokenizer.special_ids.items()}
    return tokenizer.encode_part(before), next((special[i] for i in tokenizer.encode_part(after)[:1] if i in special), None)


def _tasks(source: str) -> list[str]:
    """The lines of a text file that are not blank."""
    shipped = importlib.resources.files("batchspec.conf") / "prompts" / "tasks.txt"
    file = shipped if source == "pkg://tasks" else Path(source)
    try:
        with open_regular(str(file)) as text:
            lines = [line.strip() for line in text.read().decode("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        where = f"--tasks {source}"
        raise fault_of(error, where, InputError(f"{where}: cannot be read as text: {error}")) from None
    if not any(lines):
        raise InputError(f"--tasks {source}: it contains no task; write one a line")
    return [line for line in lines if line]


def _chats(output: str, limit: int) -> list[tuple[str, Chat]]:
    """Chats of a job whose answer ended by itself, each with an id derived from its own."""
    found: list[tuple[str, Chat]] = []
    for request_id, status, messages in _columns(output, "--after", "request_id", "status", "messages"):
        if status == "ok" and messages and not any(turn["content"] is None or turn.get("tool_calls") for turn in messages):
            chat = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
            found.append((f"{request_id}-{len(chat)}-{len(found):06}", chat))
        if len(found) == limit:
            break
    if not found:
        raise InputError(f"--after {output}: no answer ended by itself; raise decode.max_new_tokens")
    return found


def _collect(output: str, target: Path) -> str:
    """Write each distinct turn that the model ended itself, once, with the chat or task before it."""
    has = open_source(InputConfig(path=output)).schema.names
    before = [name for name in ("turns", "task") if name in has]
    seen: dict[str, tuple[str, Chat]] = {}
    total = 0
    for request_id, status, text, *cells in _columns(output, "--from", "request_id", "status", "completion", *before):
        total += 1
        known = dict(zip(before, cells, strict=True))
        task = known.get("task")
        ended = status == "ok" or (status == "truncated" and task)  # the text of a task may be cut off anywhere
        if ended and text is not None and (turn := text.strip()):
            content = f"{task}\n\n{turn}" if task else turn
            seen.setdefault(turn, (request_id, [*(known.get("turns") or []), {"role": "user", "content": content}]))
    if not seen:
        raise InputError(f"--from {output}: none of {total} rows ended by itself; raise decode.max_new_tokens")
    names, chats = zip(*seen.values(), strict=True)
    _write(pa.table({"id": pa.array(names), "messages": pa.array(chats, _CHAT)}), target)
    return f"{target}: {len(seen):,} distinct turns of {total:,}; the others were cut off, empty or repeated"


def _columns(output: str, option: str, *names: str) -> Iterator[tuple[Any, ...]]:
    """The values of these columns, row by row."""
    source = open_source(InputConfig(path=output))
    missing = [name for name in names if name not in source.schema.names]
    if missing:
        raise InputError(
            f"{option} {output}: no column {', '.join(missing)}; give the output folder of a job with output=training"
        )
    return zip(*((cell for piece in source.column(name) for cell in piece.to_pylist()) for name in names), strict=True)


def _write(table: pa.Table, target: Path) -> None:
    scratch = target.with_name(f".{target.name}")
    try:
        pq.write_table(table, scratch, compression="zstd")
        os.replace(scratch, target)
    except OSError as error:
        why = error.strerror or error
        refusal = OutputError(f"{target}: cannot be written: {why}; name a file in a folder that you may write to")
        raise fault_of(error, str(target), refusal) from None
    finally:
        scratch.unlink(missing_ok=True)
