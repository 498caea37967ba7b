"""`batchspec prompts`: varied prompts that a chat model writes itself, to train a drafter on without a data set.

    batchspec prompts --open MODEL --rows 20000 openings.parquet
    JOB input.path=openings.parquet output.dir=turns decode.temperature=1 decode.max_new_tokens=384
    batchspec prompts --from turns questions.parquet
    JOB input.path=questions.parquet output.dir=answers decode.temperature=0.8 decode.max_new_tokens=512

with JOB for python -m batchspec.run model.path=MODEL output=training; batchspec train reads input.path=[turns,answers].
Behind the bare opening of a user's turn in its own chat template the model writes what users ask; the second job answers it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.commands.export import target_file
from batchspec.config import InputConfig
from batchspec.errors import CheckpointError, ConfigError, InputError
from batchspec.io.reader import open_source
from batchspec.model.hub import resolve_model
from batchspec.model.tokenizer import Tokenizer

_MARK = "BATCHSPECUSERTURN"
_TURN = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and say what is in it. Raises ConfigError, CheckpointError, InputError, OutputError."""
    parser = argparse.ArgumentParser(
        prog="batchspec prompts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", metavar="FILE.parquet", help="what to write: the input of a job")
    add("--open", metavar="MODEL", dest="model", help="folder or hub id of a chat model: rows that open a user's turn")
    add("--rows", type=int, default=20000, help="--open: how many; default %(default)s")
    add("--from", metavar="OUT", dest="output", help="output of the job over such rows: its finished turns as messages")
    add("--overwrite", action="store_true", help="replace the file where it exists")
    args = parser.parse_args(argv)
    if (args.model is None) == (args.output is None):
        parser.error("give --open MODEL or --from OUT")
    target = target_file(args.file, args.overwrite)
    print(_open(args.model, args.rows, target) if args.output is None else _collect(args.output, target))
    return 0


def _open(model: str, rows: int, target: Path) -> str:
    """Rows of one prompt; jobs draw each by a seed of its own, because their ids differ."""
    if rows < 1:
        raise ConfigError(f"prompts --rows {rows} must be at least 1; 20000 is usual")
    opening, end = opening_of(Tokenizer(resolve_model(model, key="--open")))
    columns = {
        "id": pa.array([f"turn-{i:06}" for i in range(rows)]),
        "prompt_ids": pa.array([opening] * rows, pa.list_(pa.int32())),
    }
    if end is not None:
        columns["stop"] = pa.array([[end]] * rows, pa.list_(pa.string()))
    _write(pa.table(columns), target)
    return f"{target}: {rows:,} rows that open a user's turn with {len(opening)} tokens" + (
        "" if end is None else f", up to {end}"
    )


def opening_of(tokenizer: Tokenizer) -> tuple[list[int], str | None]:
    """What stands before the text of a first user's turn, in tokens, and the special token behind it, None where there is none.

    Raises CheckpointError for a model without a chat template, or with one that leaves a user's text out or changes it.
    """
    try:
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
    except ValueError as error:
        raise CheckpointError(f"prompts --open: {error}") from None
    before, found, behind = text.partition(_MARK)
    if not found or not before:
        raise CheckpointError("prompts --open: the chat template does not open a user's turn before its text; take another model")
    special = {index: content for content, index in tokenizer.special_ids.items()}
    return tokenizer.encode_part(before), next((special[i] for i in tokenizer.encode_part(behind)[:1] if i in special), None)


def _collect(output: str, target: Path) -> str:
    """Each different turn that the model ended itself, once."""
    source = open_source(InputConfig(path=output))
    missing = [name for name in ("id", "status", "completion") if name not in source.schema.names]
    if missing:
        raise InputError(f"--from {output}: no column {', '.join(missing)}; give the output folder of a job")
    seen: dict[str, str] = {}
    total = 0
    rows = zip(*(_values(source.column(name)) for name in ("id", "status", "completion")), strict=True)
    for request_id, status, text in rows:
        total += 1
        if status == "ok" and text is not None and (turn := text.strip()):
            seen.setdefault(turn, request_id)
    if not seen:
        raise InputError(f"--from {output}: none of {total} rows ended by itself; raise decode.max_new_tokens")
    messages = [[{"role": "user", "content": turn}] for turn in seen]
    _write(pa.table({"id": pa.array(list(seen.values())), "messages": pa.array(messages, _TURN)}), target)
    return f"{target}: {len(seen):,} different turns of {total:,}; the others were cut off, empty or the same"


def _values(pieces: Iterator[pa.ChunkedArray]) -> Iterator[str | None]:
    for piece in pieces:
        yield from piece.to_pylist()


def _write(table: pa.Table, target: Path) -> None:
    scratch = target.with_name(f".{target.name}")
    pq.write_table(table, scratch, compression="zstd")
    os.replace(scratch, target)
