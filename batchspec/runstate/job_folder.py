"""Which job an output folder holds: its manifest is made once, compared by every later run, and replaced by output.overwrite."""

from __future__ import annotations

import json
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchspec.dataset.reader import InputFile
from batchspec.errors import OutputError
from batchspec.runstate.claims import REMOTE_STALE_S, STALE_S, Claims
from batchspec.runstate.footers import ShardFiles
from batchspec.runstate.generations import Generation, Generations
from batchspec.runstate.manifest import MANIFEST, Manifest, differences
from batchspec.runstate.overwrite import READS, check_own, elected, read_manifest, refuse_living, settled, this_command
from batchspec.storage.open_store import open_store
from batchspec.storage.store import Store

TMP = "_batchspec/tmp"
MANY_SHARDS = 2048
MAX_SHARD_ROWS = 8192


def default_shard_rows(num_rows: int) -> int:
    """Rows a shard when output.shard_rows is not set: depends on the input alone, so that every run cuts alike.

    Shards grow with the input: up to a million rows to 512, then so that there are about MANY_SHARDS of them, up to
    MAX_SHARD_ROWS, which a run holds in memory several at a time. A kill does not cost a shard: its finished rows are journaled.
    """
    few = min(max(num_rows // 256, 16), 512)
    return max(few, min(-(-num_rows // MANY_SHARDS), MAX_SHARD_ROWS))


class JobFolder:
    """A folder and the job in it. Nothing is made or changed in it before `create`.

    path     the folder, as the user names it
    attempt  uuid of this run; temporary files carry it
    """

    def __init__(self, path: Path | str) -> None:
        self.attempt = uuid.uuid4().hex
        self._store: Store = open_store(path, TMP)
        self.path = self._store.where
        self._command = this_command()
        self._generations = Generations(self._store)
        self._manifest: Manifest | None = None
        self._files: ShardFiles | None = None
        self._generation: Generation | None = None

    @property
    def manifest(self) -> Manifest:
        """The job's manifest. Raises OutputError where the folder holds no job."""
        if self._manifest is None:
            first = read_manifest(self._store)
            if first is None:
                self._store.check_bucket()
                raise OutputError(f"{self.path} holds no batchspec job; give the output.dir of a run")
            if not first.ready:
                raise OutputError(
                    f"{self.path}: a run with output.overwrite=true deletes the job that was there, or died at it; if none is at "
                    "it, run it again, with output.overwrite=true"
                )
            self._store.method = first.publish
            retries = self._generations.all(first.job)
            self._generation = retries[-1] if retries else None
            self._manifest = first if self._generation is None else self._generation.of(first)
            self._files = ShardFiles(self._store, first, lambda: self._generations.written(first.job))
        return self._manifest

    @property
    def files(self) -> ShardFiles:
        """The files in data/."""
        assert self.manifest
        assert self._files is not None
        return self._files

    @property
    def generation(self) -> Generation | None:
        """The job's latest retry, done or not; None where there was none."""
        if self._manifest is None and not self.is_job():
            return None
        return self._generation if self.manifest else None

    @property
    def _work(self) -> Store:
        """Where claims, journal and attempts are: each retry has its own."""
        if self.generation is None:
            return self._store
        store = open_store(f"{self.path}/{self.generation.folder}", TMP)
        store.method = self.manifest.publish
        return store

    def retries(self) -> list[Generation]:
        """Every retry of the job, the latest last."""
        return self._generations.all(self.manifest.job)

    def retry(self, generation: Generation) -> None:
        """Begin a retry, or join in where another run began the same. Raises OutputError where it began another one, and as
        `check_own`.
        """
        self._store.probe_replace()
        self.check_own()
        begun = self._generations.begin(replace(generation, job=self.manifest.job))
        self._manifest = None
        if begun.identity != generation.identity:
            raise OutputError(f"{self.path}: another run began a retry; run the command with {begun} to its end first")

    def is_job(self) -> bool:
        return self._store.exists(MANIFEST)

    def is_untouched(self) -> bool:
        """Nothing is there: no run has begun."""
        return not self.is_job() and not set(self._store.list("")) - {"_batchspec"}

    def check(
        self,
        *,
        fingerprint: Mapping[str, str],
        num_rows: int,
        shard_rows: int | None,
        overwrite: bool = False,
        may_differ: Container[str] = (),
    ) -> None:
        """Raise OutputError where `create` with the same arguments would, or with other values of the keys in `may_differ`;
        leaves nothing behind.

        The folder may be absent, empty, or a job with the same fingerprint; with `overwrite` any job that no living run works
        on. What is not a job is never overwritten.
        """
        self._store.check_root()
        self._manifest = None
        other = set(self._store.list("")) - {"_batchspec"}
        if not self.is_job():
            if other:
                raise OutputError(f"output.dir {self.path} exists and is no batchspec job; empty it or choose another folder")
            return
        if self.begins_anew(overwrite):
            self._refuse_living()
            return
        now = _compared(fingerprint, num_rows, shard_rows)
        for _ in range(READS):  # a bit that flips on the way from a disk is no other job
            known = self.manifest.fingerprint
            now |= {key: value for key, value in known.items() if key in may_differ}
            changed = differences(known, now)
            if not changed:
                break
            self._manifest = None
        if changed and self.generation is not None and self._was_before_a_retry(now):
            raise OutputError(
                f"output.dir {self.path} holds this job, retried since ({'; '.join(changed)}); "
                f"run the command with {self.generation}"
            )
        if changed:
            raise OutputError(
                f"output.dir {self.path} holds another job ({'; '.join(changed)}); use another output.dir, "
                "or output.overwrite=true to delete that job and start anew"
            )

    def _was_before_a_retry(self, fingerprint: Mapping[str, str]) -> bool:
        """Whether the job was this one once."""
        first = read_manifest(self._store)
        before = [{} if first is None else first.fingerprint, *(retry.fingerprint for retry in self.retries()[:-1])]
        return any(not differences(one, fingerprint) for one in before)

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
        """Make the folder and its manifest, or go on with the job that is there. Raises as `check` does, and StorageError."""
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows, overwrite=overwrite)
        anew = self.begins_anew(overwrite) and elected(self._store, self._command)
        if anew or not self.is_job():
            self._store.probe()
            compared = _compared(fingerprint, num_rows, shard_rows)
            manifest = Manifest(
                fingerprint=compared,
                config=config,
                recorded=recorded,
                num_rows=num_rows,
                shard_rows=shard_rows or default_shard_rows(num_rows),
                publish=self._store.method,
                files=tuple(files),
                job=self._command.new_job() if anew else _first_job(self.path, compared),
                began=self._command.names,
            )
            if anew:
                self._delete_work(manifest)
            else:
                self._store.put_if_absent(MANIFEST, manifest.to_json())
        self._manifest = None  # another process may have made it first: read what is there
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows)
        self._store.clean()
        return self.manifest

    def _delete_work(self, new: Manifest) -> None:
        """Put a new job in the place of the one that is there. A run of that one which has looked at the manifest before the
        first `put` publishes a shard before data/ is deleted, or finds the shard's file gone.
        """
        self._store.put(MANIFEST, replace(new, ready=False).to_json())
        self._store.discard("part-")
        check_own(self._store, new.job)  # who stands still here may find the job of another command, and its work
        self._generations.delete()
        self._store.delete_tree("data")
        for name in self._store.list("_batchspec"):
            if name not in ("manifest.json", "tmp", "overwrite"):
                self._store.delete_tree(f"_batchspec/{name}")
        check_own(self._store, new.job)
        self._store.put(MANIFEST, new.to_json())

    def begins_anew(self, overwrite: bool) -> bool:
        """Whether a run with output.overwrite as given deletes a job: there is one, and not of the command that it belongs to."""
        if not (overwrite and self.is_job()):
            return False
        found = settled(self._store, self._command)
        return found is None or not (found.ready and self._command.began(found))

    def _refuse_living(self) -> None:
        shards: Container[int] = range(10**12)
        try:
            claims, shards = self.claims(), set(range(self.num_shards)) - self.files.listed().keys() | self._to_retry()
        except OutputError:  # nobody can read the manifest
            claims = self._claims(self._store)
        refuse_living(self.path, claims, shards)

    def check_own(self) -> None:
        """Raise OutputError where the folder's job is not the one that this run began or joined any more. StorageError."""
        check_own(self._store, self.manifest.job)

    @property
    def num_shards(self) -> int:
        return self.manifest.num_shards

    def committed(self) -> set[int]:
        """Shards that are done, as the footers of their files say. Raises OutputError for a file in data/ that is no shard of
        this job, StorageError for one whose footer cannot be read.
        """
        return self.files.committed()

    def missing(self) -> set[int]:
        """Shards that are not committed, or that a retry has still to write anew. Raises as `committed`."""
        return set(range(self.num_shards)) - self.committed() | self._to_retry()

    def is_done(self, index: int) -> bool:
        """Whether the shard needs no work, by a look at it alone."""
        return self.files.is_committed(index) and index not in self._to_retry()

    def _to_retry(self) -> set[int]:
        return set() if self.generation is None else self._generations.missing(self.generation)

    def finished(self) -> set[int]:
        """Shards that need no work."""
        return set(range(self.num_shards)) - self.missing()

    def claims(self) -> Claims:
        """Which run works on which shard."""
        return self._claims(self._work)

    def _claims(self, store: Store) -> Claims:
        return Claims(store, self.attempt, stale_s=REMOTE_STALE_S if self._store.method == "put" else STALE_S)


def _first_job(path: str, compared: Mapping[str, str]) -> str:
    """The id of a job in a folder that holds none. Runs that begin it at once give it the same one: where names are taken by a
    rename that replaces, either manifest may stay.
    """
    return uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([path, compared], sort_keys=True)).hex


def _compared(fingerprint: Mapping[str, str], num_rows: int, shard_rows: int | None) -> dict[str, str]:
    """The fingerprint with the two numbers that decide which rows a shard holds."""
    rows = str(shard_rows or default_shard_rows(num_rows))
    return {**fingerprint, "input.rows": str(num_rows), "output.shard_rows": rows}
