"""The job of an output folder: its manifest is written once, compared by every later run, and replaced by output.overwrite."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchspec.data.dataset.reader import InputFile
from batchspec.data.runstate.claims import REMOTE_STALE_S, STALE_S, Claims
from batchspec.data.runstate.extensions import Extension
from batchspec.data.runstate.generations import Change, Generation
from batchspec.data.runstate.job_state import JobState
from batchspec.data.runstate.manifest import (
    MANIFEST,
    Manifest,
    compared_facts,
    default_shard_rows,
    differences,
    differing,
    files_that_differ,
    first_job_id,
)
from batchspec.data.runstate.overwrite import READS, check_own, elected, read_manifest, refuse_living, settled, this_command
from batchspec.data.storage.store import Store
from batchspec.errors import OutputError


class JobFolder(JobState):
    """A folder and the job in it. Nothing is written before `create`."""

    def __init__(self, path: Path | str, attempt: str | None = None) -> None:
        super().__init__(path, attempt)
        self.command = this_command()

    def check(
        self,
        *,
        fingerprint: Mapping[str, str],
        num_rows: int,
        shard_rows: int | None,
        files: Sequence[InputFile],
        overwrite: bool = False,
        may_differ: Container[str] = (),
        advice: Callable[[Manifest], str] = lambda job: "",
    ) -> None:
        """Raise OutputError if `create` with the same arguments would. Keys in `may_differ` may have other values. Writes
        nothing.

        advice  a way to go on with this other job, for the message; may be empty

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
            changed = differences(known, now, {"input.files": files_that_differ(self.manifest.files, files)})
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
        raise OutputError(
            f"output.dir {self.path} holds another job ({'; '.join(changed)}); {advice(self.manifest)}use another output.dir, "
            "or output.overwrite=true to delete that job and start anew"
        )

    def _since(self, fingerprint: Mapping[str, str]) -> list[Change]:
        """The changes since the job had this fingerprint, or had it with input.files of any of its changes: a pattern in
        input.path matches new files also in the old command. Empty if it never had.
        """
        first = read_manifest(self._store)
        before = [{} if first is None else first.fingerprint, *(change.fingerprint for change in self._changes)]
        files = {"input.files"} if fingerprint.get("input.files") in {one.get("input.files") for one in before} else set()
        same = [place for place, one in enumerate(before) if not differing(one, fingerprint) - files]
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
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows, files=files, overwrite=overwrite)
        anew = self.begins_anew(overwrite) and elected(self._store, self.command)
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
                job=self.command.new_job() if anew else first_job_id(self.path, compared),
                began=self.command.names,
            )
            if anew:
                self._delete_work(manifest)
            else:
                self._store.put_if_absent(MANIFEST, manifest.to_json())
        self._manifest = None  # another process may have written it first: read it again
        self.check(fingerprint=fingerprint, num_rows=num_rows, shard_rows=shard_rows, files=files)
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
        found = settled(self._store, self.command)
        return found is None or not (found.ready and self.command.began(found))

    def _refuse_living(self) -> None:
        shards: Container[int] = range(10**12)
        try:
            claims, shards = self.claims(), set(range(self.num_shards)) - self.files.listed().keys() | self.to_retry()
        except OutputError:  # the manifest cannot be read
            claims = self._claims(self._store)
        refuse_living(self.path, claims, shards)

    def claims(self) -> Claims:
        """The leases on shards."""
        return self._claims(self._work)

    def _claims(self, store: Store) -> Claims:
        return Claims(store, self.attempt, stale_s=REMOTE_STALE_S if self._store.method == "put" else STALE_S)
