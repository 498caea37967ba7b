"""Extensions of a job (resume=extend): rows that come after all its rows in input order, from further files or a higher
input.limit, become rows of the same job.

An extension is one record among the changes of a job (generations.py), written once. Nothing else is written to begin it: the
added rows are new shards, numbered after the old ones, and the old shards keep their rows, numbers and files. Shards that were
not committed before it stay missing and are computed by its runs, with the claims and the journal of the runs before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from batchspec.data.dataset.reader import InputFile, Source
from batchspec.data.dataset.untyped_columns import mark_of
from batchspec.data.runstate.manifest import Manifest, default_shard_rows

EXTENSION_MAY_CHANGE = ("input.files", "input.limit", "input.rows", "output.shard_rows")
"""Keys of the fingerprint that an extension may change."""
SORT_LAST = "name new files so that they sort last, or run them as a job of their own in another output.dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    number: int
    """Of the change, from 1."""
    fingerprint: Mapping[str, str]
    """That of a job that begins with all these rows."""
    config: Mapping[str, Any]
    num_rows: int
    """Input rows of the job, those before the extension included."""
    shard_rows: int
    """Rows a shard, of the added rows."""
    files: tuple[InputFile, ...]
    """All input files."""
    job: str
    """The job's id."""

    def of(self, before: Manifest) -> Manifest:
        """The job's manifest with the added rows. Raises ValueError if the job had more rows."""
        return replace(
            before, fingerprint=self.fingerprint, config=self.config, num_rows=self.num_rows, files=self.files,
            extended=before.layout.extended(self.num_rows, self.shard_rows),
        )

    def __str__(self) -> str:
        """The command-line overrides and the input of the job since this extension, for a message."""
        last = self.files[-1].name
        files = f"the {len(self.files):,} input files up to {last}" if len(self.files) > 1 else f"input file {last}"
        size = int(self.fingerprint["output.shard_rows"])
        shards = "" if size == default_shard_rows(self.num_rows) else f" output.shard_rows={size}"
        return f"input.limit={self.fingerprint.get('input.limit')}{shards} and {files}"

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Extension:
        """The inverse of `asdict`. Raises KeyError, TypeError or ValueError."""
        found = cls(**(values | {"files": tuple(InputFile(**file) for file in values["files"])}))
        if not (found.num_rows > 0 < found.shard_rows and isinstance(found.job, str) and found.files):
            raise ValueError("a field of another type")
        return found


def shard_rows_of(before: Manifest, compared: Mapping[str, str], num_rows: int) -> int:
    """Rows a shard of the rows that an extension adds: output.shard_rows if it was set, otherwise by their number.

    It follows from `compared_facts` alone, so that all runs that begin an extension at the same time agree.
    """
    given = int(compared["output.shard_rows"])
    return default_shard_rows(num_rows - before.num_rows) if given == default_shard_rows(num_rows) else given


def obstacle(before: Manifest, source: Source) -> str:
    """Why the input is not that of the job with rows added at its end, and what to do; empty if it is."""
    assert before.files, "a job's manifest names its input files"
    alone = source.alone(len(before.files))
    why = _other_files(before.files, source.files, alone.files) or _other_columns(alone.schema, source.schema)
    if not why and source.num_rows < before.num_rows:
        limit = before.fingerprint.get("input.limit", "null")
        why = (
            f"the input has {source.num_rows:,} rows, fewer than the {before.num_rows:,} of the job; run the command with "
            f"input.limit={limit}{'' if limit == 'null' else ' or a higher one'}"
        )
    return why


def _other_files(old: Sequence[InputFile], new: Sequence[InputFile], alone: Sequence[InputFile]) -> str:
    """What is wrong with the first file that is not the job's. `alone`: as many of the new files, as if there were no others."""
    names, known = {file.name for file in new}, {file.name for file in old}
    for was, found in zip(old, [*alone, None], strict=False):
        if was.name not in names:
            return (
                f"the job has read input file {was.name}, which is not in input.path (names are paths below the folder that all "
                "input files have in common); put the file back, and new files beside the old ones"
            )
        if found is not None and found.name not in known:
            return f"input file {found.name} is new and comes before {was.name}, which the job has read; {SORT_LAST}"
        if found is not None and found.identity != was.identity:
            return (
                f"input file {was.name} has changed since the job read it ({_what_changed(was, found)}); put the old file back, "
                "with added rows in files of their own"
            )
    return ""


def _what_changed(was: InputFile, now: InputFile) -> str:
    if was.num_rows != now.num_rows:
        return f"{was.num_rows:,} rows -> {now.num_rows:,}"
    return f"{was.size_bytes:,} bytes -> {now.size_bytes:,}" if was.size_bytes != now.size_bytes else "other bytes"


def _other_columns(old: pa.Schema, new: pa.Schema) -> str:
    """What the new files change about the columns of the job's own files."""
    for name in dict.fromkeys((*old.names, *new.names)) if old.names else ():
        was, now = (schema.field(name) if name in schema.names else None for schema in (old, new))
        if was is None or now is None or mark_of(was) != mark_of(now):
            kinds = [f"{field.type}{' (JSON of any kind)' * mark_of(field)[1]}" if field else "missing" for field in (was, now)]
            return (
                f"column {name!r} is {kinds[0]} in the files that the job has read and {kinds[1]} with the new ones; "
                "give the new files the same columns, or run them as another job"
            )
    return ""
