"""What the job of an output folder is now: its manifest with its retries and extensions, and which of its shards are done."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.data.runstate.extensions import Extension
from batchspec.data.runstate.footers import ShardFiles
from batchspec.data.runstate.generations import Change, Generation, Generations, folder_of, unfinished
from batchspec.data.runstate.manifest import MANIFEST, Manifest
from batchspec.data.runstate.overwrite import check_own, read_manifest
from batchspec.data.storage.open_store import open_store
from batchspec.data.storage.store import TMP, Store
from batchspec.errors import OutputError

SETTLE_S = 1.0
"""Seconds in which a run that began at the same moment may replace a file that all runs share, if the store has no hard links."""


class JobState:
    """A folder and what the job in it is now.

    path     the folder, as the user wrote it
    attempt  uuid of this run, part of the names of its files; None: a new one
    """

    def __init__(self, path: Path | str, attempt: str | None = None) -> None:
        self.attempt = attempt or uuid.uuid4().hex
        self._store: Store = open_store(path, TMP)
        self.path = self._store.where
        self._generations = Generations(self._store)
        self._manifest: Manifest | None = None
        self._files: ShardFiles | None = None
        self._changes: list[Change] = []

    @property
    def manifest(self) -> Manifest:
        """The job's manifest. Raises OutputError if the folder holds no job."""
        if self._manifest is None:
            first = read_manifest(self._store)
            if first is None:
                self._store.check_bucket()
                raise OutputError(f"{self.path} holds no batchspec job; give the output.dir of a run")
            if not first.ready:
                raise OutputError(
                    f"{self.path}: a run with output.overwrite=true is deleting the old job, or died while it did; if none is "
                    "running, run the command again with output.overwrite=true"
                )
            self._store.method = first.publish
            self._changes = self._generations.all(first.job)
            manifest = self._generations.manifest(first, self._changes)
            written = partial(self._generations.written, first.job)
            self._manifest, self._files = manifest, ShardFiles(self._store, manifest, written, self._present_layout)
        return self._manifest

    def _present_layout(self) -> ShardLayout:
        """The layout with the extensions that other runs have begun since this run read the manifest."""
        return self._generations.manifest(self.manifest, self._begun_since()).layout

    def _begun_since(self) -> list[Change]:
        """Changes of the job that began after this run read its manifest."""
        job, known = self.manifest.job, len(self._changes)
        return self._generations.all(job)[known:] if self._generations.has(known + 1) else []

    def is_extended(self) -> bool:
        """Whether an extension of the job began after this run read its manifest: this run does not have all its rows."""
        return any(isinstance(change, Extension) for change in self._begun_since())

    @property
    def files(self) -> ShardFiles:
        """The files in data/."""
        assert self.manifest
        assert self._files is not None
        return self._files

    @property
    def generation(self) -> Generation | None:
        """The job's latest retry, done or not; None if there was none."""
        if self._manifest is None and not self.is_job():
            return None
        assert self.manifest
        return next((change for change in reversed(self._changes) if isinstance(change, Generation)), None)

    @property
    def _work(self) -> Store:
        """The store of claims, journal and attempts: each retry has its own."""
        if self.generation is None:
            return self._store
        store = open_store(f"{self.path}/{folder_of(self.generation)}", TMP)
        store.method = self.manifest.publish
        return store

    def latest_changes(self) -> list[Change]:
        """Every retry and extension of the job, the latest last. If another run began one since `manifest` was read, reads the
        manifest again, so this must not be called while this run computes shards.
        """
        assert self.manifest
        if self._begun_since():
            self._manifest = None
        return [*self._changes] if self.manifest else []

    def retry(self, generation: Generation) -> None:
        """Begin a retry, or join it if another run began the same one. Raises OutputError if another run began another change,
        and as `check_own`.
        """
        self._store.probe_replace()
        written_by = self.retry_number
        begun = self._begin(generation)
        if not isinstance(begun, Generation) or begun.identity != generation.identity:
            raise OutputError(f"{self.path}: another run began another change; run the command with {begun} to its end first")
        self._store.discard(unfinished(written_by))  # suspended runs would publish them later

    def extend(self, extension: Extension) -> None:
        """Begin an extension, or join it if another run began the same one. Raises as `retry`."""
        begun = self._begin(extension)
        if not isinstance(begun, Extension) or begun.fingerprint != extension.fingerprint:
            raise OutputError(f"{self.path}: another run changed the job at the same time; run the command with {begun}")

    def _begin(self, change: Change) -> Change:
        self.check_own()
        change = replace(change, job=self.manifest.job)
        begun = self._generations.begin(change)
        if self._store.method == "rename":
            time.sleep(SETTLE_S)
            begun = self._generations.begin(change)  # reads the record again, which another run may have replaced
        self._manifest = None
        return begun

    @property
    def retry_number(self) -> int:
        """The retry that this run's files belong to; 0: none."""
        return 0 if self.generation is None else self.generation.number

    def is_job(self) -> bool:
        return self._store.exists(MANIFEST)

    def is_untouched(self) -> bool:
        """Whether no run has begun here: the folder is empty or missing."""
        return not self.is_job() and not set(self._store.list("")) - {"_batchspec"}

    def check_own(self) -> None:
        """Raise OutputError if the folder no longer holds the job that this run began or joined; StorageError."""
        check_own(self._store, self.manifest.job)

    @property
    def num_shards(self) -> int:
        return self.manifest.layout.num_shards

    def committed(self) -> set[int]:
        """Shards that are committed, by the footers of their files. Raises OutputError for a file in data/ that is not a shard of
        this job, StorageError for one whose footer cannot be read.
        """
        return self.files.committed()

    def missing(self) -> set[int]:
        """Shards that are not committed, or that the present retry has not done yet. Raises as `committed`."""
        return set(range(self.num_shards)) - self.committed() | self.to_retry()

    def is_done(self, index: int) -> bool:
        """Whether the shard needs no work, by its own file and mark alone."""
        return self.files.is_committed(index) and index not in self.to_retry()

    def to_retry(self) -> set[int]:
        """Shards that the latest retry has not done yet."""
        return set() if self.generation is None else self._generations.missing(self.generation)

    def finished(self) -> set[int]:
        """Shards that need no work."""
        return set(range(self.num_shards)) - self.missing()

    def is_concluded(self) -> bool:
        """Whether a run has done all that follows the last row of the latest retry or extension; True if there was none."""
        changes = self._changes if self.manifest else []
        return not changes or self._generations.is_concluded(changes[-1])

    def mark_concluded(self) -> None:
        """Note that this run has done all that follows the last row. Raises as `check_own`."""
        if self.manifest and self._changes:
            self.check_own()
            self._generations.mark_concluded(self._changes[-1])
