"""A job's output folder: which shards are committed, and the only way to commit one.

data/part-00042.parquet   the rows of shard 42; data/ holds nothing else
README.md, report.html    the dataset card and the report, written at the end
_batchspec/manifest.json  the definition of the job; written first: a folder with a manifest holds a job
_batchspec/tmp            files under construction
_batchspec/logs           run-<attempt>.json: summary of a run; run-<attempt>.timeline.jsonl: its totals over time
_batchspec/journal        rows of shards that are not committed yet, see journal.py
_batchspec/claims         leases on shards, see claims.py
_batchspec/attempts       what runs were computing when they crashed, see attempts.py
_batchspec/sums           sha256 of each shard as a run committed it, see shard_sums.py
_batchspec/progress       what every run reports about itself, see heartbeats.py
_batchspec/kv_scales.json scales of an e4m3 K/V cache, the same for all runs; written once
_batchspec/weights.json   sha256 of every tensor of the model, the same for all runs; written once
_batchspec/retry          retries and extensions of the job, see generations.py
_batchspec/overwrite      which process deleted the folder's previous job, see overwrite.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.data.runstate.attempts import FOLDER as ATTEMPTS
from batchspec.data.runstate.claims import FOLDER as CLAIMS
from batchspec.data.runstate.footers import identity, part_name, read_shard_file
from batchspec.data.runstate.generations import Generation, unfinished
from batchspec.data.runstate.journal import FOLDER as JOURNAL
from batchspec.data.runstate.overwrite import read_manifest
from batchspec.data.runstate.run_folder import RunFolder
from batchspec.data.runstate.scan import scan, scanning
from batchspec.data.runstate.shard_sums import ShardSums
from batchspec.data.runstate.shard_writer import PendingFile, TableFile, UnpublishedFile, WrittenFile
from batchspec.errors import BatchspecError, OutputError, StorageError

MAX_TRIES = 20
"""Maximum number of tries to publish a shard while runs of another job publish it too."""
CheckInput = Callable[[int, int], None]
"""Raises an error if the input rows from the first number up to the second have changed since they were read."""


class OutputFolder(RunFolder):
    """The output of one job: its shards, its card, and the files of its runs under _batchspec/."""

    def __init__(self, path: Path | str, attempt: str | None = None) -> None:
        super().__init__(path, attempt)
        self._sums = ShardSums(self._store, self.attempt)

    def rows_of(self, index: int) -> range:
        """The input rows of a shard."""
        return self.manifest.layout.rows_of(index)

    def scan(self, shards: Iterable[int] | None = None) -> pl.LazyFrame:
        """The rows of committed shards (default all), in the order of the input. Raises OutputError if there is none."""
        done = sorted(self.committed() if shards is None else shards)
        if not done:
            raise OutputError(f"{self.path} has no committed shard yet; run the job first")
        return scan(self._store, [f"data/{part_name(index)}" for index in done])

    def commit(self, index: int, table: pa.Table, metadata: Mapping[str, str] | None = None) -> bool:
        """Write a shard's rows in this process and publish them, once: False if another run was first.

        `metadata` is added to the file's key-value metadata under `batchspec.` names.
        """
        return self.publish(index, TableFile(self.unpublished(index, metadata), table))

    def unpublished(self, index: int, metadata: Mapping[str, str] | None = None) -> UnpublishedFile:
        """This run's file of a shard, under its temporary name."""
        path = self._store.scratch() / f"{unfinished(self.retry_number)}{index:05d}.parquet.{self.attempt}"
        facts = {**(metadata or {}), **identity(self.manifest, self.retry_number, index, self.attempt)}
        return UnpublishedFile(path=path, rows=self.rows_of(index), metadata=facts)

    def publish(self, index: int, file: PendingFile, check: CheckInput = lambda first, end: None) -> bool:
        """Publish a shard's rows, once: False if another run was first (its rows are equivalent, these are dropped).

        file   the shard's `unpublished` file, which this process or another one writes. Only this process gives a file its final
               name, and only a whole and verified one. Written again if an older file, or one of another job, has the name
        check  called once the file is written; if it raises, the file is deleted

        Raises ValueError unless the file holds exactly the shard's rows, by (row_index, sample_index) with samples from 0 on;
        StorageError if writing fails; OutputError if the folder, or the file of that name, is not this job's by now.

        A file under the shard's name is not necessarily a commit: its footer shows which job wrote it. A file of another job, or
        of this job before the present retry, is replaced, unless its version changes in the meantime.
        """
        name = f"data/{part_name(index)}"
        version: str | None = None
        with self._owning():
            for _ in range(MAX_TRIES):
                made = self._checked(index, file.write(), check)
                assert made.path == self.unpublished(index).path, f"{made.path} is not the file of shard {index}"
                if self._published(index, made, version):
                    return True
                present = self.files.read(index)
                if present is not None and not self.files.is_foreign(present) and present.generation >= self.retry_number:
                    return False
                version = None if present is None else present.version
        raise StorageError(f"publishing {self.path}/{name} failed: runs of another job keep publishing it; end them")

    def _checked(self, index: int, made: WrittenFile, check: CheckInput) -> WrittenFile:
        """The file, if the input of its rows is still what was read; otherwise it is deleted."""
        try:
            check(self.rows_of(index).start, self.rows_of(index).stop)
        except BaseException:
            with suppress(OSError):
                made.path.unlink(missing_ok=True)
            raise
        return made

    def written(self, index: int) -> tuple[pa.Table, str]:
        """The rows of a committed shard, and the version of its file for `recommit`."""
        name = f"data/{part_name(index)}"
        version = self._store.version(name)
        data = _in_arrow(self._store.read(name))
        with scanning(f"{self.path}/{name}"):
            return pq.read_table(pa.BufferReader(data)).replace_schema_metadata(None), version

    def recommit(self, index: int, table: pa.Table | None, version: str) -> bool:
        """Finish a shard of a retry: `table` replaces its file atomically; None keeps the file.

        False if the file no longer has this `version`: another run was first. Raises as `publish` does.
        """
        assert self.generation is not None
        if table is not None:
            with self._owning():
                made = self.unpublished(index).write(table)
                if not self._published(index, made, version):
                    return False
        else:
            self._check_current()
        file = self.files.read(index)
        if file is not None and not self.files.is_foreign(file):
            self._generations.mark(self.generation, index, file.generation)
        return True

    @contextmanager
    def _owning(self) -> Iterator[None]:
        """Within, if a temporary file vanishes because the job was deleted, raise the OutputError about the deletion."""
        try:
            yield
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                self._check_current()
            raise

    def _published(self, index: int, made: WrittenFile, version: str | None) -> bool:
        """Publish the file, its sum before it: False unless its name is free or, with `version`, has this version.

        The run may be suspended between the check of the manifest and the publication, so it checks again afterwards.
        """
        self._sums.put(index, made.sha256)
        name, won = f"data/{part_name(index)}", False
        try:
            self._check_current()
            won = self._store.publish(made.path, name) if version is None else self._store.replace(made.path, name, version)
            if won:
                self._check_current()
        except OutputError:
            if won:
                self._withdraw(index)
            with suppress(OSError):
                made.path.unlink(missing_ok=True)
            self._sums.clear(index)
            raise
        if not won:
            self._sums.clear(index)
        return won

    def _check_current(self) -> None:
        """Raise OutputError if the folder holds another job by now, or if a retry has begun to which this run does not belong.
        After an extension this run's shards are still those of the job.
        """
        self.check_own()
        if any(isinstance(change, Generation) for change in self._begun_since()):
            raise OutputError(
                f"the job in {self.path} was complete and a retry of it began while this run worked on it; the run ends and "
                "publishes nothing more"
            )

    def _withdraw(self, index: int) -> None:
        """Delete the file that this run has just published if the folder now holds another job that has no such shard. (If that
        job has such a shard, its own runs replace the file.)
        """
        with suppress(BatchspecError):
            name, now = f"data/{part_name(index)}", read_manifest(self._store)
            file = read_shard_file(self._store, name)
            theirs = now is None or (now.job != self.manifest.job and index >= now.layout.num_shards)
            if file is not None and file.attempt == self.attempt and theirs:
                self._store.delete(name, file.version)

    def damage(self) -> Iterator[str]:
        """Read all files in data/; yields a line for each that is not the job's, or whose bytes have changed since the commit."""
        sums = self._sums.listed()
        faults = dict(self.files.faults())
        for index in sorted(self.files.listed()):
            name = part_name(index)
            data = self._store.read(f"data/{name}")
            if hashlib.sha256(data).hexdigest().encode() not in self._sums.of(index, sums):
                yield (
                    f"{self.path}/data/{name}: its {len(data):,} bytes are not those that were committed; delete the file and "
                    "run the same command again, which computes its rows anew"
                )
            elif index in faults:
                yield str(faults[index])

    def put_report(self, page: str) -> None:
        """Write report.html. Raises OutputError if the folder holds another job by now."""
        self._put_own("report.html", page.encode())

    def tidy(self) -> None:
        """Delete journal, claims and attempts of a complete job, unless an extension of it has begun, whose runs use them. Raises
        OutputError if the folder holds another job by now.
        """
        self.check_own()
        if self.is_extended():
            return
        for store in [self._store, self._work][: 1 if self.generation is None else 2]:
            for name in (JOURNAL, CLAIMS, ATTEMPTS):
                store.delete_tree(name)
        self._sums.settle()

    def has_card(self) -> bool:
        """Whether the card was written, and after the latest retry or extension if there was one."""
        changes = self._changes if self.manifest else []
        return self._store.exists("README.md") and (not changes or self._generations.has_card(changes[-1]))

    def contents(self, names: Sequence[str]) -> Iterator[tuple[str, Path | Callable[[], bytes]]]:
        """Name and content of files: a path on this machine, or a function that reads the file from its store."""
        for name in names:
            yield name, partial(self._store.read, name) if "://" in self.path else Path(self.path, name)

    def card(self) -> bytes:
        """README.md as it is. Raises StorageError."""
        return self._store.read("README.md")

    def has_report(self) -> bool:
        """Whether report.html is there. With the job's card there, it is not older than that."""
        return self._store.exists("report.html")

    def finish(self, card: str) -> None:
        """Write the dataset card, README.md, and delete an older report. Raises as `check_own` does."""
        if old := self._store.versions("").get("report.html"):
            self._store.delete("report.html", old)
        self._put_own("README.md", card.encode())
        if self._changes:
            self._generations.mark_card(self._changes[-1])


def _in_arrow(data: bytes) -> pa.Buffer:
    """The bytes in memory of Arrow: a thread of Arrow may free it while the process exits, and aborts where it needs Python."""
    own = pa.allocate_buffer(len(data))
    memoryview(own).cast("B")[:] = data
    return own
