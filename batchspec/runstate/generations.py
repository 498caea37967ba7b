"""Retries of a job: each is a generation that writes the shards concerned anew, in the place of their files.

_batchspec/retry/00001.json         what the first retry is; made first, by whichever run came first
_batchspec/retry/00001/done/00042-1-<job>   its shard 42 is done: its file is that of retry 1 (0: of the job before any retry)
_batchspec/retry/00001/card         so is the card
_batchspec/retry/00001/_batchspec/  its claims, journal and attempts: those of the job before it mean nothing to it

Each names the job: a run of a job that was overwritten since may still write one, which means nothing then.

A retry begins when the job, and the retry before it, is complete; its shards are listed once. Whoever dies between a shard's new
file and its mark leaves a shard in which nothing is left to retry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchspec.config.renamed import upgraded, upgraded_keys
from batchspec.errors import OutputError
from batchspec.runstate.manifest import Manifest
from batchspec.storage.store import Store

FOLDER = "_batchspec/retry"


def unfinished(number: int) -> str:
    """How the names of files begin that runs of a retry are making; 0 is the job before any retry."""
    return f"part-g{number}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    number: int
    """From 1."""
    retry: str
    """error or length."""
    again: int
    """resume.retry_id: the same retry is done once for each."""
    fingerprint: Mapping[str, str]
    """The job's, with what the retry changed."""
    config: Mapping[str, Any]
    shards: tuple[int, ...]
    """Those with rows to retry."""
    job: str = ""
    """Whose retry it is; empty in one that an earlier version of batchspec began."""

    @property
    def identity(self) -> tuple[str, int, str]:
        """Two commands with the same one ask for the same retry."""
        return self.retry, self.again, self.fingerprint["decode.max_new_tokens"]

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.number:05d}"

    def __str__(self) -> str:
        """The words of its command that ask for it."""
        again = "" if self.again == 1 else f" resume.retry_id={self.again}"
        return f"resume={self.retry} decode.max_new_tokens={self.identity[2]}{again}"

    def of(self, first: Manifest) -> Manifest:
        """The job's manifest since this retry."""
        return replace(first, fingerprint=self.fingerprint, config=self.config)


class Generations:
    """The retries in one output folder. Every method may raise StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self, job: str) -> list[Generation]:
        """Every one that was begun of this job, the latest last. Raises OutputError for a damaged one."""
        names = [name for name in self._store.list(FOLDER) if re.fullmatch(r"\d{5,}\.json", name)]
        return [found for name in sorted(names) if (found := self._read(f"{FOLDER}/{name}")).job in ("", job)]

    def begin(self, generation: Generation) -> Generation:
        """Record it under its number; what another run of this job recorded there first, where one did."""
        name, data = f"{generation.folder}.json", json.dumps(asdict(generation), indent=1).encode()
        if not self._store.put_if_absent(name, data) and self._read(name).job not in ("", generation.job):
            self._store.put(name, data)
        self._store.discard(unfinished(generation.number - 1))  # of runs that stood still: they would undo what it writes
        return self._read(name)

    def missing(self, generation: Generation) -> set[int]:
        """Its shards that are not done."""
        return set(generation.shards) - self._done(generation).keys()

    def written(self, job: str) -> dict[int, int]:
        """Shards that a retry of the job is known to have written, each with the latest one that did."""
        return {shard: number for one in self.all(job) for shard, number in self._done(one).items() if number}

    def mark(self, generation: Generation, shard: int, number: int) -> None:
        """The shard is done; its file is that of retry `number`."""
        self._store.put_if_absent(f"{generation.folder}/done/{shard:05d}-{number}-{generation.job}", b"")

    def _done(self, generation: Generation) -> dict[int, int]:
        """Shards that are done, each with the retry that wrote its file; 0 where none did or nobody says."""
        names = self._store.list(f"{generation.folder}/done")
        marks = [match for name in names if (match := re.fullmatch(r"(\d{5,18})(?:-(\d{1,9})-(\w*))?", name))]
        return {int(mark[1]): int(mark[2] or 0) for mark in marks if mark[3] in (None, generation.job)}

    def has_card(self, generation: Generation) -> bool:
        return self._store.exists(f"{generation.folder}/card")

    def mark_card(self, generation: Generation) -> None:
        self._store.put_if_absent(f"{generation.folder}/card", b"")

    def delete(self) -> None:
        self._store.delete_tree(FOLDER)

    def _read(self, name: str) -> Generation:
        try:
            values = json.loads(self._store.read(name))
            values["config"], values["fingerprint"] = upgraded(values["config"]), upgraded_keys(values["fingerprint"])
            found = Generation(**(values | {"shards": tuple(map(int, values["shards"]))}))
            assert found.identity  # its parts are there
            return found
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OutputError(f"{self._store.where}/{name} is damaged ({error}); restore it or use another output.dir") from error
