"""A job's rows as the response lines of OpenAI's batches: `batchspec export --to openai`, and output.openai of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import polars as pl

from batchspec.config.schema import RunConfig
from batchspec.data.dataset.input_paths import check_apart, entries_of
from batchspec.data.dataset.openai_responses import NAMES, OPTIONAL, response_line
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.scan import scanning
from batchspec.data.storage.new_file import write_lines
from batchspec.errors import OutputError
from batchspec.process.local_files import unusable_name
from batchspec.records import TokenText

Row = Mapping[str, Any]
NO_TOKEN_IDS = "the job has no column token_ids; output.token_ids=true writes it"
"""Why response lines have no log-probabilities, which name the tokens of an answer."""
Picked = Callable[[pl.LazyFrame, range], pl.LazyFrame]
"""Rows of a shard, and the input rows that it holds -> those rows that are picked."""


def write_answers(
    output: OutputFolder, target: Path, *, token_text: TokenText | None,
    wanted: Callable[[Iterator[Row]], Iterator[Row]] = lambda rows: rows, of: Picked | None = None,
) -> int:
    """Write a line for each input row of the committed shards; returns their number.

    token_text  to write log-probabilities; None: they are left out
    wanted      those of the rows, which are samples of input rows, that are written
    of          picks rows of a shard, and adds columns; None: all rows
    """
    model = str(output.manifest.config.get("model", {}).get("path"))
    rows = wanted(rows_of(output, sorted(output.committed()), NAMES, OPTIONAL, of=of))
    lines = (response_line(list(samples), model, token_text) for _, samples in groupby(rows, itemgetter("row_index")))
    return write_lines(lines, target)


def rows_of(
    output: OutputFolder, shards: Sequence[int], names: Sequence[str], optional: Sequence[str] = (), *, of: Picked | None = None
) -> Iterator[Row]:
    """The rows of these shards, one shard in memory at a time.

    optional  columns that a job may lack
    of        picks rows of a shard, and adds columns; None: all rows
    """
    for index in shards:
        with scanning(output.path):
            rows = output.scan([index]) if of is None else of(output.scan([index]), output.rows_of(index))
            there = set(rows.collect_schema().names())
            shard = rows.select([*names, *(name for name in optional if name in there)]).collect()
        yield from shard.iter_rows(named=True)


def check_not_in_data(target: Path, folder: str, given: str) -> None:
    """Raises OutputError for a file in data/ of an output folder. given: how the message calls the file."""
    if target.absolute().is_relative_to(Path(folder, "data").absolute()):
        raise OutputError(f"{given}: data/ may only hold shards, as readers take every file in it; write elsewhere")


def check_answers_file(config: RunConfig, *, is_new: bool) -> None:
    """Raises OutputError if output.openai is no file that this job may write. is_new: the job begins."""
    name = config.output.openai
    if name is None:
        return
    target, given = Path(name), f"output.openai={name}"
    if why := unusable_name(target):
        raise OutputError(f"{given} cannot be written: {why}; give another name")
    if target.suffix != ".jsonl" or "://" in name:
        raise OutputError(
            f"{given} must be a local file with the suffix .jsonl; of a remote output write it later: "
            "batchspec export OUT --to openai FILE.jsonl"
        )
    if target.is_dir() or any(parent.exists() and not parent.is_dir() for parent in target.parents):
        raise OutputError(f"{given} is a folder, or lies in a file; give the name of a file")
    own = config.output.dir is not None and target.absolute().is_relative_to(Path(config.output.dir).absolute())
    if config.output.dir is not None:
        check_not_in_data(target, config.output.dir, given)
    if config.input.path:
        check_apart(entries_of(config.input.path), name, key="output.openai", file=())
    if target.exists() and is_new and not own and not config.output.overwrite:
        raise OutputError(f"{given} exists; give another name, or delete it")
