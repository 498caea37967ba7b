"""How a job changed after it began: by retries of its rows (resume.retry) and by extensions of its input (extensions.py).

A retry is a generation, which replaces the files of the shards that have rows to retry. Retries and extensions share their
numbers, so that the order of all changes is known and only one of two that begin at the same time takes place.

_batchspec/retry/00001.json                 the definition of the first change; written once, by the run that begins it
_batchspec/retry/00001/done/00042-1-<job>   its shard 42 is done: the file is that of retry 1 (0: of the job before any retry)
_batchspec/retry/00001/card                 its card is written
_batchspec/retry/00001/concluded            a run wrote all that follows its last row: card, report, answers, the push to a hub
_batchspec/retry/00001/_batchspec/          its own claims, journal and attempts, if it is a retry

Each file names the job: files from runs of a job that was overwritten in the meantime are ignored.

A retry begins when the job, and the change before it, is complete; its shards are listed once. If a run dies after it published a
shard's new file but before it wrote the mark, the next run finds nothing to retry in the shard and writes the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchspec.data.runstate.extensions import Extension
from batchspec.data.runstate.manifest import Manifest
from batchspec.data.storage.store import Store
from batchspec.errors import OutputError

FOLDER = "_batchspec/retry"


def folder_of(change: Change) -> str:
    return f"{FOLDER}/{change.number:05d}"


def unfinished(number: int) -> str:
    """Prefix of the temporary files of a retry's shards; 0 is the job before any retry."""
    return f"part-g{number}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    number: int
    """From 1."""
    retry: str
    """error, length or repetition."""
    began: tuple[str, ...] = ()
    """Names of the command that began the retry, see overwrite.py."""
    fingerprint: Mapping[str, str]
    """The job's fingerprint, with the keys that the retry changed."""
    config: Mapping[str, Any]
    shards: tuple[int, ...]
    """Shards with rows to retry."""
    job: str = ""
    """The job's id."""

    @property
    def identity(self) -> tuple[str, str]:
        """Commands with the same identity belong to the same retry while that is not complete."""
        return self.retry, self.fingerprint["decode.max_new_tokens"]

    def __str__(self) -> str:
        """The command-line overrides of this retry."""
        off = " decode.repetition_detection.max_pattern_size=0" if self.retry == "repetition" else ""
        return f"resume={self.retry} decode.max_new_tokens={self.identity[1]}{off}"

    def of(self, before: Manifest) -> Manifest:
        """The job's manifest with the changes of this retry."""
        return replace(before, fingerprint=self.fingerprint, config=self.config)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Generation:
        """The inverse of `asdict`. Raises KeyError, TypeError or ValueError."""
        found = cls(**(values | {"shards": tuple(map(int, values["shards"])), "began": tuple(values["began"])}))
        assert found.identity  # raises if a field is missing
        return found


Change = Generation | Extension


class Generations:
    """The retries and extensions in one output folder. Every method may raise StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self, job: str) -> list[Change]:
        """Every change of this job that was begun, the latest last. Raises OutputError for a damaged file."""
        names = [name for name in self._store.list(FOLDER) if re.fullmatch(r"\d{5,}\.json", name)]
        return [found for name in sorted(names) if (found := self._read(f"{FOLDER}/{name}")).job == job]

    def manifest(self, before: Manifest, changes: Sequence[Change]) -> Manifest:
        """The job's manifest after these changes. Raises OutputError if one of them cannot follow the one before it."""
        for change in changes:
            try:
                before = change.of(before)
            except ValueError as error:
                raise self._damaged(f"{folder_of(change)}.json", error) from error
        return before

    def has(self, number: int) -> bool:
        """Whether a change of this number is recorded, of this job or of an earlier one."""
        return self._store.exists(f"{FOLDER}/{number:05d}.json")

    def begin(self, change: Change) -> Change:
        """Record the change under its number; returns the recorded one, which may be another run's if that was first."""
        name, data = f"{folder_of(change)}.json", json.dumps(asdict(change), indent=1).encode()
        if not self._store.put_if_absent(name, data) and self._read(name).job != change.job:
            self._store.put(name, data)
        return self._read(name)

    def missing(self, generation: Generation) -> set[int]:
        """Shards of the retry that are not done."""
        return set(generation.shards) - self._done(generation).keys()

    def written(self, job: str) -> dict[int, int]:
        """Shard -> the latest retry of the job that is known to have written it."""
        retries = (one for one in self.all(job) if isinstance(one, Generation))
        return {shard: number for one in retries for shard, number in self._done(one).items() if number}

    def mark(self, generation: Generation, shard: int, number: int) -> None:
        """Mark a shard as done; its file is that of retry `number`."""
        self._store.put_if_absent(f"{folder_of(generation)}/done/{shard:05d}-{number}-{generation.job}", b"")

    def _done(self, generation: Generation) -> dict[int, int]:
        """Shard that is done -> the retry that wrote its file; 0 if no retry did."""
        names = self._store.list(f"{folder_of(generation)}/done")
        marks = [match for name in names if (match := re.fullmatch(r"(\d{5,18})-(\d{1,9})-(\w+)", name))]
        return {int(mark[1]): int(mark[2]) for mark in marks if mark[3] == generation.job}

    def has_card(self, change: Change) -> bool:
        """Whether the card was written after this change."""
        return self._store.exists(f"{folder_of(change)}/card")

    def mark_card(self, change: Change) -> None:
        self._store.put_if_absent(f"{folder_of(change)}/card", b"")

    def is_concluded(self, change: Change) -> bool:
        """Whether a run has done all that follows the last row of this change."""
        return self._store.exists(f"{folder_of(change)}/concluded")

    def mark_concluded(self, change: Change) -> None:
        self._store.put_if_absent(f"{folder_of(change)}/concluded", b"")

    def delete(self) -> None:
        self._store.delete_tree(FOLDER)

    def _read(self, name: str) -> Change:
        try:
            values = json.loads(self._store.read(name))
            return Extension.from_values(values) if "files" in values else Generation.from_values(values)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, error: Exception) -> OutputError:
        return OutputError(f"{self._store.where}/{name} is damaged ({error}); restore it or use another output.dir")
