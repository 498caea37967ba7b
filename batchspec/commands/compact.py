"""`batchspec compact OUT FOLDER`: write the rows of a finished job to a new folder, as a few large Parquet files.

OUT is only read: its shards stay, and it can be resumed, retried and verified as before. FOLDER appears under its name only after
every file in it has been read back with its checksums and holds the job's rows in order. It contains data/ and the dataset card,
ready to be published.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.console.text import counted
from batchspec.data.runstate.footers import part_name
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.shard_writer import row_ids
from batchspec.data.storage.exact_files import exact_path, parquet_file
from batchspec.data.storage.store import LONGEST_NAME, storing
from batchspec.errors import OutputError, StorageError
from batchspec.process.local_files import unusable_name

FILE_MB = 500
GROUP_BYTES = 128 << 20
GROUP_ROWS = 8192


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder and print a summary. Raises OutputError if the job is not complete or the folder exists."""
    parser = ArgumentParser(prog="batchspec compact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="the output.dir of a finished job")
    parser.add_argument("folder", metavar="FOLDER", help="a local folder that does not exist yet")
    parser.add_argument(
        "--file-mb", type=int, default=FILE_MB, metavar="MB", help="size of a file, in 1e6 bytes; default %(default)s"
    )
    args = parser.parse_args(argv)
    if args.file_mb < 1:
        parser.error(f"--file-mb {args.file_mb}: must be at least 1")
    output, target = OutputFolder(args.out), new_folder(args.folder, args.out)
    files, rows = compact(output, target, args.file_mb * 1_000_000)
    terminal.show_line(f"{target}: {counted(rows, 'row')} of {counted(output.num_shards, 'shard')} in {counted(files, 'file')}")
    return 0


def new_folder(name: str, out: str) -> Path:
    """The folder to write. Raises OutputError if it cannot be made or lies inside the job's own folder."""
    if "://" in name:
        raise OutputError(f"{name}: compact writes a local folder; give a path, and copy the folder where you need it")
    target = Path(name).absolute()
    if why := unusable_name(target, LONGEST_NAME):
        raise OutputError(f"{name!r} cannot be written: {why}; give another name")
    if os.path.lexists(target):
        raise OutputError(f"{name} exists; compact writes a new folder: give another name")
    if not target.parent.is_dir():
        raise OutputError(f"{name}: its parent {target.parent} is not a folder; make it first")
    if "://" not in out and target.is_relative_to(Path(out).absolute()):
        raise OutputError(f"{name} lies inside the job's own folder {out}; give a folder outside it")
    return target


def compact(output: OutputFolder, target: Path, file_bytes: int) -> tuple[int, int]:
    """Write the rows of a complete job to `target`, about `file_bytes` a file; returns the numbers of files and rows.

    Raises OutputError if shards are missing, and StorageError if a shard is damaged or a written file reads back with other
    rows; no folder is left then.
    """
    if missing := output.missing():
        raise OutputError(
            f"{output.path}: {len(missing):,} of {output.num_shards:,} shards are missing; run the job to its end before compact"
        )
    if damage := next(output.damage(), None):
        raise StorageError(damage)
    with _finished(target) as temporary:
        written = _Files(temporary / "data", file_bytes, {"batchspec.job": output.manifest.job, "batchspec.compacted": "true"})
        for index in range(output.num_shards):
            table, _ = output.written(index)
            written.add(table)
        written.close()
        if output.has_card():
            (temporary / "README.md").write_bytes(output.card())
        return written.num_files, written.num_rows


class _Files:
    """Writes Parquet files of one schema, one after another; each is read back and compared when it is full."""

    def __init__(self, folder: Path, file_bytes: int, metadata: dict[str, str]) -> None:
        self._folder, self._file_bytes, self._metadata = folder, file_bytes, metadata
        self._waiting: list[pa.Table] = []
        self._path: Path | None = None
        self._writer: pq.ParquetWriter | None = None
        self._groups: list[bytes] = []
        """Of each row group of the file a digest of its rows' ids: the ids of millions of short rows would be gigabytes."""
        self.num_files = self.num_rows = 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        if sum(t.num_rows for t in self._waiting) >= GROUP_ROWS or sum(t.nbytes for t in self._waiting) >= GROUP_BYTES:
            self._flush()
            if self._path is not None and self._path.stat().st_size >= self._file_bytes:
                self._end_file()

    def close(self) -> None:
        self._flush()
        self._end_file()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        self.num_rows += table.num_rows
        if self._writer is None:
            self._path = self._folder / part_name(self.num_files)
            schema = table.schema.with_metadata(self._metadata)
            self._writer = pq.ParquetWriter(
                exact_path(self._path),
                schema,
                compression="zstd",
                compression_level=3,
                write_page_checksum=True,
                write_page_index=True,
            )
        rows = max(1, min(GROUP_ROWS, table.num_rows * GROUP_BYTES // max(1, table.nbytes)))
        self._writer.write_table(table.replace_schema_metadata(self._metadata), row_group_size=rows)
        self._groups += [_digest(table.slice(first, rows)) for first in range(0, table.num_rows, rows)]

    def _end_file(self) -> None:
        if self._writer is None or self._path is None:
            return
        self._writer.close()
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())
        with parquet_file(self._path, page_checksum_verification=True) as read:
            found = [_digest(read.read_row_group(i)) for i in range(read.num_row_groups)]
        if found != self._groups:
            raise StorageError(f"{self._path} reads back with other rows; check the disk and run compact again")
        self.num_files += 1
        self._writer, self._path, self._groups = None, None, []


def _digest(rows: pa.Table) -> bytes:
    """Of the ids of the rows, in order."""
    return hashlib.sha256(repr(row_ids(rows)).encode("utf-8", "surrogatepass")).digest()


@contextmanager
def _finished(target: Path) -> Iterator[Path]:
    """A temporary folder next to the target: renamed to it if the block succeeds, deleted if it fails."""
    temporary = target.with_name(f".batchspec-{uuid.uuid4().hex}")
    with storing(f"writing {target}"):
        try:
            (temporary / "data").mkdir(parents=True)
            yield temporary
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
