"""Write a shard's table as a Parquet file, fsync it, and verify it by reading it back with its checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from batchspec.data.dataset.writer import write_parquet
from batchspec.data.storage.exact_files import parquet_file
from batchspec.data.storage.store import storing
from batchspec.errors import StorageError
from batchspec.process.refusals import raise_refusal

RowId = tuple[int, int, str]
"""row_index, sample_index and request_id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A verified file under its temporary name, and the SHA-256 sum of its bytes in hexadecimal."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishedFile:
    """A shard's file before it gets its final name. Another process of this machine may write it.

    path      its temporary name
    rows      the input rows that it must hold
    metadata  becomes its key-value metadata, under `batchspec.` names
    """

    path: Path
    rows: range
    metadata: Mapping[str, str]

    def write(self, table: pa.Table) -> WrittenFile:
        """Write the file, fsync it, read it back with its checksums and compare.

        Raises ValueError unless the table holds exactly these rows, by (row_index, sample_index) with samples from 0 on;
        StorageError if writing fails, and then leaves no file.
        """
        ids = row_ids(table)
        _check_rows(ids, self.rows)
        with storing(f"writing {self.path}"):
            try:
                self.path.unlink(missing_ok=True)
                write_parquet(table, self.path, {f"batchspec.{key}": value for key, value in self.metadata.items()})
                _verify(self.path, ids)
                with self.path.open("rb") as file:
                    return WrittenFile(path=self.path, sha256=hashlib.file_digest(file, "sha256").hexdigest())
            except BaseException:
                with suppress(OSError):
                    self.path.unlink(missing_ok=True)
                raise


class PendingFile(Protocol):
    """The unpublished file of a shard, with the rows that are to be written to it."""

    def write(self) -> WrittenFile:
        """Write and verify the file, or wait until a worker process has done so; a later call writes it anew.

        Raises as `UnpublishedFile.write`.
        """


@dataclass(frozen=True, slots=True)
class TableFile:
    """The `PendingFile` of a table that this process has."""

    file: UnpublishedFile
    table: pa.Table

    def write(self) -> WrittenFile:
        return self.file.write(self.table)


def row_ids(table: pa.Table) -> list[RowId]:
    """The ids of an output table's rows, in order."""
    names = ("row_index", "sample_index", "request_id")
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def _check_rows(ids: list[RowId], rows: range) -> None:
    places = [(row, sample) for row, sample, _ in ids]
    samples: dict[int, int] = dict.fromkeys(rows, 0)
    for row, sample in places:
        if samples.get(row) != sample:
            raise ValueError(f"row {row}, sample {sample} is out of order in the shard of rows {rows.start} .. {rows.stop - 1}")
        samples[row] += 1
    missing = [row for row, count in samples.items() if not count]
    if missing or places != sorted(places):
        raise ValueError(f"the shard of rows {rows.start} .. {rows.stop - 1} lacks rows {missing[:3]} or is out of order")


def _verify(path: Path, ids: list[RowId]) -> None:
    try:
        with parquet_file(path, page_checksum_verification=True) as file:
            found = [row for i in range(file.num_row_groups) for row in row_ids(file.read_row_group(i))]
    except (pa.ArrowException, OSError) as error:
        raise_refusal(error)
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).splitlines()[0]
        raise StorageError(f"{path} reads back damaged ({reason}); check the disk and run the same command again") from error
    if found != ids:
        raise StorageError(f"{path} reads back with other rows; check the disk and run the same command again")
