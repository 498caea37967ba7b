"""Retries of a job (resume.retry): each is a generation, which replaces the files of the shards that have rows to retry.

_batchspec/retry/00001.json                 the definition of the first retry; written by the run that begins it
_batchspec/retry/00001/done/00042-1-<job>   its shard 42 is done: the file is that of retry 1 (0: of the job before any retry)
_batchspec/retry/00001/card                 its card is written
_batchspec/retry/00001/_batchspec/          its own claims, journal and attempts

Each file names the job: files from runs of a job that was overwritten in the meantime are ignored.

A retry begins when the job, and the retry before it, is complete; its shards are listed once. If a run dies after it published a
shard's new file but before it wrote the mark, the next run finds nothing to retry in the shard and writes the mark.
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
    """Prefix of the temporary files of a retry's shards; 0 is the job before any retry."""
    return f"part-g{number}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    number: int
    """From 1."""
    retry: str
    """error or length."""
    again: int
    """resume.retry_id: a retry is done once for each value."""
    fingerprint: Mapping[str, str]
    """The job's fingerprint, with the keys that the retry changed."""
    config: Mapping[str, Any]
    shards: tuple[int, ...]
    """Shards with rows to retry."""
    job: str = ""
    """The job's id; empty in a retry that an earlier version of batchspec began."""

    @property
    def identity(self) -> tuple[str, int, str]:
        """Commands with the same identity belong to the same retry."""
        return self.retry, self.again, self.fingerprint["decode.max_new_tokens"]

    @property
    def folder(self) -> str:
        return f"{FOLDER}/{self.number:05d}"

    def __str__(self) -> str:
        """The command-line overrides of this retry."""
        again = "" if self.again == 1 else f" resume.retry_id={self.again}"
        return f"resume={self.retry} decode.max_new_tokens={self.identity[2]}{again}"

    def of(self, first: Manifest) -> Manifest:
        """The job's manifest with the changes of this retry."""
        return replace(first, fingerprint=self.fingerprint, config=self.config)


class Generations:
    """The retries in one output folder. Every method may raise StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self, job: str) -> list[Generation]:
        """Every retry that was begun of this job, the latest last. Raises OutputError for a damaged file."""
        names = [name for name in self._store.list(FOLDER) if re.fullmatch(r"\d{5,}\.json", name)]
        return [found for name in sorted(names) if (found := self._read(f"{FOLDER}/{name}")).job in ("", job)]

    def begin(self, generation: Generation) -> Generation:
        """Record the retry under its number; returns the recorded one, which may be another run's if that was first."""
        name, data = f"{generation.folder}.json", json.dumps(asdict(generation), indent=1).encode()
        if not self._store.put_if_absent(name, data) and self._read(name).job not in ("", generation.job):
            self._store.put(name, data)
        self._store.discard(unfinished(generation.number - 1))  # suspended runs would publish them later
        return self._read(name)

    def missing(self, generation: Generation) -> set[int]:
        """Shards of the retry that are not done."""
        return set(generation.shards) - self._done(generation).keys()

    def written(self, job: str) -> dict[int, int]:
        """Shard -> the latest retry of the job that is known to have written it."""
        return {shard: number for one in self.all(job) for shard, number in self._done(one).items() if number}

    def mark(self, generation: Generation, shard: int, number: int) -> None:
        """Mark a shard as done; its file is that of retry `number`."""
        self._store.put_if_absent(f"{generation.folder}/done/{shard:05d}-{number}-{generation.job}", b"")

    def _done(self, generation: Generation) -> dict[int, int]:
        """Shard that is done -> the retry that wrote its file; 0 if no retry did, or if the mark does not name one."""
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
            assert found.identity  # raises if a field is missing
            return found
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OutputError(f"{self._store.where}/{name} is damaged ({error}); restore it or use another output.dir") from error
