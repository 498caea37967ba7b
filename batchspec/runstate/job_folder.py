"""The job of an output folder: its manifest is written once, compared by every later run, and replaced by output.overwrite."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from batchspec.dataset.reader import InputFile
from batchspec.dataset.shard_layout import ShardLayout
from batchspec.errors import OutputError
from batchspec.runstate.claims import REMOTE_STALE_S, STALE_S, Claims
from batchspec.runstate.extensions import MAY_DIFFER as EXTENDED
from batchspec.runstate.extensions import Extension
from batchspec.runstate.footers import ShardFiles
from batchspec.runstate.generations import Change, Generation, Generations, folder_of, unfinished
from batchspec.runstate.manifest import (
    MANIFEST,
    Manifest,
    compared_facts,
    default_shard_rows,
    differences,
    differing,
    first_job_id,
)
from batchspec.runstate.overwrite import READS, check_own, elected, read_manifest, refuse_living, settled, this_command
from batchspec.storage.open_store import open_store
from batchspec.storage.store import Store

TMP = "_batchspec/tmp"


class JobFolder:
    """A folder and the job in it. Nothing is written before `create`.

    path     the folder, as the user wrote it
    attempt  uuid of this run, part of the names of its files
    """

    def __init__(self, path: Path | str) -> None:
        self.attempt = uuid.uuid4().hex
        self._store: Store = open_store(path, TMP)
        self.path = self._store.where
        self._command = this_command()
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
        """The layout with the extensions that other runs have begun since this one read the manifest."""
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
        """Every retry and extension of the job, the latest last, with `manifest` as that left it: another run may have begun one
        since it was read.

        Only before this run works on the job.
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
        written_by = self._number
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
        begun = self._generations.begin(replace(change, job=self.manifest.job))
        self._manifest = None
        return begun

    @property
    def _number(self) -> int:
        """The retry that this run's files belong to; 0: none."""
        return 0 if self.generation is None else self.generation.number

    def is_job(self) -> bool:
        return self._store.exists(MANIFEST)

    def is_untouched(self) -> bool:
        """Whether no run has begun here: the folder is empty or missing."""
        return not self.is_job() and not set(self._store.list("")) - {"_batchspec"}

    def check(
        self,
        *,
        fingerprint: Mapping[str, str],
        num_rows: int,
        shard_rows: int | None,
        overwrite: bool = False,
        may_differ: Container[str] = (),
        advice: Callable[[Manifest], str] = lambda job: "",
    ) -> None:
        """Raise OutputError if `create` with the same arguments would. Keys in `may_differ` may have other values. Writes
        nothing.

        advice  what to do about a job that differs only in keys that an extension may change, for the message; may be empty

        The folder may be missing, empty, or hold a job with the same fingerprint; with `overwrite` it may hold any job that no
        living run works on. A folder that is not a job is never overwritten.
        """
        self._store.check_root()
        self._manifest = None
        other = set(self._store.list("")) - {"_batchspec"}
        if not self.is_job():
            if other:
                raise OutputError(f"output.dir {self.path} exists and is not a batchspec job; empty it or choose another folder")
            return
        if self.begins_anew(overwrite):
            self._refuse_living()
            return
        now = compared_facts(fingerprint, num_rows, shard_rows)
        for _ in range(READS):  # read again: a bit error while reading must not look like another job
            known = self.manifest.fingerprint
            now |= {key: value for key, value in known.items() if key in may_differ}
            changed = differences(known, now)
            if not changed:
                break
            self._manifest = None
        if not changed:
            return
        if later := self._since(now):
            kinds = {Generation: "retried", Extension: "extended"}
            last = {kinds[type(change)]: change for change in later}
            raise OutputError(
                f"output.dir {self.path} holds this job, {' and '.join(last)} since ({'; '.join(changed)}); "
                f"run the command with {' and '.join(map(str, last.values()))}"
            )
        way = advice(self.manifest) if differing(known, now) <= {*EXTENDED} else ""
        raise OutputError(
            f"output.dir {self.path} holds another job ({'; '.join(changed)}); {way}use another output.dir, "
            "or output.overwrite=true to delete that job and start anew"
        )

    def _since(self, fingerprint: Mapping[str, str]) -> list[Change]:
        """The changes since the job had this fingerprint; none if it never had."""
        first = read_manifest(self._store)
        before = [{} if first is None else first.fingerprint, *(change.fingerprint for change in self._changes)]
        same = [place for place, one in enumerate(before) if not differences(one, fingerprint)]
        return self._changes[same[-1] :] if same else []

    def create(
        self,
        *,
        fingerprint: Mapping[str, str],
        config: Mapping[str, Any],
        recorded: Mapping[str, Any],
        num_rows: int,
        shard_rows: int | None,
        files: Sequence[InputFile],
        overwrite: bool = False,
    ) -> Manifest:
        """Create the folder and its manifest, or join the existing job. Raises as `check` does, and StorageError."""
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows, overwrite=overwrite)
        anew = self.begins_anew(overwrite) and elected(self._store, self._command)
        if anew or not self.is_job():
            self._store.probe()
            compared = compared_facts(fingerprint, num_rows, shard_rows)
            manifest = Manifest(
                fingerprint=compared,
                config=config,
                recorded=recorded,
                num_rows=num_rows,
                shard_rows=shard_rows or default_shard_rows(num_rows),
                publish=self._store.method,
                files=tuple(files),
                job=self._command.new_job() if anew else first_job_id(self.path, compared),
                began=self._command.names,
            )
            if anew:
                self._delete_work(manifest)
            else:
                self._store.put_if_absent(MANIFEST, manifest.to_json())
        self._manifest = None  # another process may have written it first: read it again
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows)
        self._store.clean()
        return self.manifest

    def _delete_work(self, new: Manifest) -> None:
        """Replace the old job by a new one. A run of the old job that read the manifest before the first `put` either publishes a
        shard before data/ is deleted, or finds its temporary file deleted.
        """
        self._store.put(MANIFEST, replace(new, ready=False).to_json())
        self._store.discard("part-")
        check_own(self._store, new.job)  # another command may have begun its job here while this process was suspended
        self._generations.delete()
        self._store.delete_tree("data")
        for name, version in self._store.versions("_batchspec").items():
            if name in ("manifest.json", "tmp", "overwrite", "pushed"):
                continue
            if name.endswith(".json"):  # a file
                self._store.delete(f"_batchspec/{name}", version)
            else:
                self._store.delete_tree(f"_batchspec/{name}")
        check_own(self._store, new.job)
        self._store.put(MANIFEST, new.to_json())

    def begins_job(self, overwrite: bool) -> bool:
        """Whether a run with this output.overwrite begins a job, and does not go on with one of an earlier run."""
        return not self.is_job() or self.begins_anew(overwrite)

    def id_of_job(self, *, fingerprint: Mapping[str, str], num_rows: int, shard_rows: int | None, overwrite: bool) -> str:
        """The id of the job that `create` with these arguments would join or begin; empty if it would choose a new one."""
        if not self.begins_job(overwrite):
            return self.manifest.job
        return "" if self.is_job() else first_job_id(self.path, compared_facts(fingerprint, num_rows, shard_rows))

    def begins_anew(self, overwrite: bool) -> bool:
        """Whether a run with this output.overwrite deletes a job: one exists, and it was not begun by this run's command."""
        if not (overwrite and self.is_job()):
            return False
        found = settled(self._store, self._command)
        return found is None or not (found.ready and self._command.began(found))

    def _refuse_living(self) -> None:
        shards: Container[int] = range(10**12)
        try:
            claims, shards = self.claims(), set(range(self.num_shards)) - self.files.listed().keys() | self.to_retry()
        except OutputError:  # the manifest cannot be read
            claims = self._claims(self._store)
        refuse_living(self.path, claims, shards)

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

    def claims(self) -> Claims:
        """The leases on shards."""
        return self._claims(self._work)

    def _claims(self, store: Store) -> Claims:
        return Claims(store, self.attempt, stale_s=REMOTE_STALE_S if self._store.method == "put" else STALE_S)
