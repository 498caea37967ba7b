"""The sha256 of each shard as a run committed it, in the format of sha256sum. Each run that publishes a shard has a file for it.

The file is written before the shard is published under its final name, so that every committed shard has a sum. It is emptied if
another run published the shard first.
"""

from __future__ import annotations

import re

from batchspec.data.runstate.footers import part_name, read_shard_file
from batchspec.data.storage.store import Store

FOLDER = "_batchspec/sums"


class ShardSums:
    """The sums of all runs. attempt: uuid of this run, part of the names of its files."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store, self._attempt = store, attempt

    def put(self, index: int, digest: str) -> None:
        """Store the SHA-256 sum, in hexadecimal, of a shard that this run is about to publish. Raises StorageError."""
        self._store.put(_name(index, self._attempt), f"{digest}  data/{part_name(index)}\n".encode())

    def clear(self, index: int) -> None:
        """Empty this run's file for a shard that it did not publish."""
        self._store.put(_name(index, self._attempt), b"")

    def listed(self) -> list[str]:
        """The names of all files."""
        return self._store.list(FOLDER)

    def of(self, index: int, listed: list[str]) -> set[bytes]:
        """What runs stored about a shard: hexadecimal sums, and b"" of emptied files."""
        own = (name for name in listed if name.startswith(f"{part_name(index)}."))
        return {self._store.read(f"{FOLDER}/{name}").split(b" ")[0] for name in own}

    def settle(self) -> None:
        """If several runs published a shard one after another, keep only the sum of the file that is there now."""
        attempts: dict[int, set[str]] = {}
        for name in self.listed():
            if match := re.fullmatch(r"part-(\d{5,18})\.parquet\.(\w+)", name):
                attempts.setdefault(int(match[1]), set()).add(match[2])
        for index in (index for index, found in attempts.items() if len(found) > 1):
            file = read_shard_file(self._store, f"data/{part_name(index)}")
            if file is None or file.attempt not in attempts[index]:
                continue
            for attempt in attempts[index] - {file.attempt}:
                if self._store.read(_name(index, attempt)):
                    self._store.put(_name(index, attempt), b"")


def _name(index: int, attempt: str) -> str:
    return f"{FOLDER}/{part_name(index)}.{attempt}"
