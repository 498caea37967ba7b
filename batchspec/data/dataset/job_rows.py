"""The output of an earlier job as the input of another one (input.from_job).

request_id    the row's id: the earlier request_id, with #sample_index appended if the request has several completions
<prefix>NAME  the earlier job's own columns of KEPT, and copied columns that have the name of a column that a job may write
NAME          its other copied columns: the earlier input's, and those that it took from a job before it

The prefix is the name of the earlier job's folder and `_`, as a Jinja variable may be called. Names do not depend on the keys of
the new job, so that its templates can rely on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from batchspec.config.checks import check_statuses
from batchspec.config.schema import InputConfig
from batchspec.console.text import listed
from batchspec.data.dataset.columns import IMAGES, TYPES
from batchspec.data.dataset.files import DataFile, ParquetFile
from batchspec.data.dataset.in_memory import table_of
from batchspec.data.dataset.job_file import ID, Flags, JobFile, prefix_of
from batchspec.data.dataset.reader import OPENED_AT_ONCE, Source, open_files, source_of
from batchspec.data.dataset.row_expressions import RowExpression
from batchspec.data.dataset.schema import DIGEST
from batchspec.data.storage.places import place_of
from batchspec.errors import ConfigError, InputError
from batchspec.records import ANSWERED
from batchspec.tasks.registry import saved_task

_MARKS = ("request_id", "row_index", "sample_index", "status")
"""Columns of every output, which say what becomes of its rows."""


@dataclass(frozen=True, slots=True)
class JobOutput:
    """The answers of an earlier job as the rows of a call from Python: what input.from_job is for a job.

    source  its output folder, or what `generate` returned; you may remove rows and add columns
    name    for the names of its columns, with `_` after it; only for rows in memory: that of a folder is its own
    status, where  as input.from_status and input.from_where
    """

    source: Any
    name: str | None = None
    status: Sequence[str] = ("ok", "truncated")
    where: str | None = None

    @property
    def folder(self) -> str | None:
        """The output folder; None: the rows are in memory."""
        return os.fspath(self.source) if isinstance(self.source, str | os.PathLike) else None

    def keys(self, input: InputConfig) -> InputConfig:
        """The keys of `input` with those that say the same. Raises ConfigError."""
        if (self.folder is None) == (not self.name):
            raise ConfigError(
                "batchspec.JobOutput of rows in memory needs a name for their columns, JobOutput(rows, name='answers')"
                if self.folder is None
                else f"batchspec.JobOutput({self.folder!r}, name={self.name!r}): the folder's own name is taken; remove the name"
            )
        if input.from_job is not None:
            raise ConfigError(f"input.from_job={input.from_job} beside batchspec.JobOutput, which says the same; remove one")
        check_statuses(self.status)
        return replace(input, from_job=self.folder or self.name, from_status=list(self.status), from_where=self.where)

    def table(self) -> pa.Table:
        """The rows in memory. Raises InputError if they are no output."""
        table = table_of(self.source)
        if missing := [name for name in _MARKS if name not in table.column_names]:
            raise InputError(f"batchspec.JobOutput: the rows have no column {missing[0]!r}; keep {', '.join(_MARKS)}")
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """The rows of an earlier job, as an input."""

    source: Source
    input: InputConfig
    """The keys of `input` with input.columns for these rows."""
    note: str
    """How many rows are taken and left out, for the user."""


def open_job_files(paths: Sequence[str]) -> list[DataFile]:
    """The files of a job, at these paths or URLs. Raises InputError for one that cannot be read, StorageError."""
    found = {PurePath(path).name: place_of(path) for path in paths}
    return list(open_files(found, lambda name, place, share: ParquetFile(place, name, share)))


def rows_of_job(files: Sequence[DataFile], of_job: Mapping[str, Any], input: InputConfig) -> JobRows:
    """The rows of the files of the job input.from_job that input.from_status and input.from_where take.

    of_job  its configuration; empty if it is not known
    Raises InputError if no row is taken, if the rows hold no chats and input.columns hides none, or for a damaged file;
    ConfigError if nothing says what follows the answers, for chats whose images nothing gives, or for a condition that
    cannot be computed; StorageError.
    """
    assert input.from_job is not None
    where, prefix = f"input.from_job={input.from_job}", prefix_of(input.from_job, files[0].schema.names)
    taken, several, counts = _taken_rows(files, input)
    if not taken.any():
        raise InputError(f"{where}: {counts}; take others by input.from_status or input.from_where")
    ends = np.cumsum([sum(part.num_rows for part in file.parts) for file in files])[:-1]
    flags = zip(np.split(taken, ends), np.split(several, ends), strict=True)
    made = [JobFile(file, prefix, *of_file) for file, of_file in zip(files, flags, strict=True)]
    source, columns = source_of(made, input.limit), columns_of(prefix, input.columns)
    if "messages" not in input.columns and (name := columns["messages"]) is not None:
        _check_chats(source, name, of_job, input)
    if columns["messages"] is not None and columns[IMAGES] is None:
        _check_no_images(files, taken, where)
    note = f"{where}: {counts}; its answers are the column {prefix}completion"
    return JobRows(source=source, input=replace(input, columns=columns), note=note)


def columns_of(prefix: str, own: Mapping[str, str | None]) -> dict[str, str | None]:
    """input.columns for the rows of a job: id and chat, and no option of a row, because its options were those of its answer.

    own  what the user says, which has precedence; a prompt, or a text of one, takes the place of the chat
    """
    has_prompt = any(column for name, column in own.items() if name in ("prompt", "prompt_ids") or name not in TYPES)
    return {**dict.fromkeys(TYPES), "id": ID, "messages": None if has_prompt else f"{prefix}messages", **own}


def _check_chats(source: Source, name: str, of_job: Mapping[str, Any], input: InputConfig) -> None:
    """Raises InputError if the column does not hold chats that end with the answers, ConfigError if nothing follows these."""
    where = f"input.from_job={input.from_job}"
    hide = "set input.columns.messages=null, so that input.prompt makes whole prompts"
    if name not in source.schema.names:
        raise InputError(f"{where}: its output has no messages; {hide}")
    if of_job.get("output", {}).get("messages") == "prompt":
        raise InputError(f"{where}: its messages lack the answers (output.messages=prompt); {hide}")
    if not any(values.null_count < len(values) for values in source.column(name)):
        raise InputError(f"{where}: its messages are null, as its prompts were prompt_ids; {hide}")
    answers = saved_task(of_job).has_answers and not set(ANSWERED).isdisjoint(input.from_status)
    if answers and input.prompt is None and input.final_assistant == "error" and not input.columns.get("final_assistant"):
        raise ConfigError(
            f"{where}: its chats end with the answers; input.prompt=TEMPLATE makes the next user turn, "
            "input.final_assistant=continue goes on with the answer, drop answers once more, and task=reward scores it"
        )


def _check_no_images(files: Sequence[DataFile], taken: Flags, where: str) -> None:
    """Raises ConfigError if rows that are taken had images: their chats have marks in place of these."""
    if DIGEST not in files[0].schema.names:
        return
    digests = pl.concat([_columns(file, [DIGEST]) for file in files])[DIGEST]
    if count := int((digests.is_not_null() & pl.Series(taken)).sum()):
        raise ConfigError(
            f"{where}: {count} of its rows had images, which its chats do not hold; give them in a column "
            "(input.columns.images=COLUMN), or set input.columns.messages=null, so that input.prompt makes whole prompts"
        )


def _taken_rows(files: Sequence[DataFile], input: InputConfig) -> tuple[Flags, Flags, str]:
    """Of each row of the files: whether it is taken, and whether its request has several. And the numbers of rows, in words."""
    condition = None
    if input.from_where is not None:
        condition = RowExpression(input.from_where, f"input.from_where={input.from_where}", files[0].schema.names)
    names = list(dict.fromkeys([*_MARKS[1:], *(condition.names if condition is not None else ())]))
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        rows = pl.concat(pool.map(lambda file: _columns(file, names), files))
    wanted = rows["status"].is_in(input.from_status)
    taken = wanted.to_numpy().copy()
    if condition is not None:
        taken[taken] = condition.condition(rows.filter(wanted)).to_numpy()
    left_out = _by_status(rows, ~wanted)
    if condition is not None:
        left_out["by input.from_where"] = int(wanted.sum() - taken.sum())
    counts = f"{listed(_by_status(rows, pl.Series(taken))) or 'no row'}; left out: {listed(left_out) or 'none'}"
    several = rows.select((pl.len().over("row_index") > 1) | (pl.col("sample_index") > 0)).to_series()
    return taken, several.to_numpy(), counts


def _columns(file: DataFile, names: list[str]) -> pl.DataFrame:
    tables = [pa.Table.from_batches([batch]) for part in file.parts for batch in file.read(part, names)]
    frame = pl.from_arrow(pa.concat_tables(tables))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _by_status(rows: pl.DataFrame, which: pl.Series) -> dict[str, int]:
    """How many of these rows have each status."""
    return dict(sorted(rows.filter(which)["status"].value_counts().iter_rows()))
