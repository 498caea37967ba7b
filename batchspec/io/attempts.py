"""What runs were at when they died: how a row that kills its process is found.

_batchspec/attempts/shard-00042-<attempt>.json  that run died while it held shard 42, says the one that took the shard over
_batchspec/attempts/rows-<attempt>.json         rows of such a shard that this run computes now, or computed when it died

A healthy run records nothing: its claims tell which shards it held. Only the rows of those shards are recorded, by the run that
computes them again, each before it is touched; a run ends by clearing its record, unless it dies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from batchspec.io.store import Store

FOLDER = "_batchspec/attempts"


class Attempts:
    """The records of one job as one run, `attempt`, sees and writes them. Every method may raise StorageError."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store, self._attempt = store, attempt
        self._recorded = False

    def suspect(self, shard: int, died: str) -> None:
        """The run `died` ended without a word while it held the shard."""
        self._store.put_if_absent(f"{FOLDER}/shard-{shard:05d}-{died}.json", b"{}")

    def suspected(self) -> set[int]:
        """Shards that a run died with; committed ones may be among them."""
        found = (re.fullmatch(r"shard-(\d+)-\w+\.json", name) for name in self._store.list(FOLDER))
        return {int(match[1]) for match in found if match}

    def enter(self, shard: int, rows: Sequence[int]) -> None:
        """From now on just these input rows of the shard are computed."""
        self._recorded = True
        self._put({"shard": shard, "rows": list(rows)})

    def clear(self) -> None:
        """No row is computed any more."""
        if self._recorded:
            self._put({})
            self._recorded = False

    def strikes(self, shard: int) -> dict[int, int]:
        """Rows of a shard that runs died with, and how often each of them was the only one. For the owner of the shard alone."""
        found: dict[int, int] = {}
        for name in self._store.list(FOLDER):
            if not name.startswith("rows-") or self._attempt in name:
                continue
            record = _parse(self._store.read(f"{FOLDER}/{name}"))
            if record.get("shard") == shard:
                for row in record["rows"]:
                    found[row] = found.get(row, 0) + (len(record["rows"]) == 1)
        return found

    def delete(self) -> None:
        """The job is complete."""
        self._store.delete_tree(FOLDER)

    def _put(self, record: dict[str, Any]) -> None:
        self._store.put(f"{FOLDER}/rows-{self._attempt}.json", json.dumps(record).encode())


def _parse(data: bytes) -> dict[str, Any]:
    """A record; an empty one where a disk kept other bytes, which costs another death at worst."""
    try:
        record = json.loads(data)
        return record if isinstance(record["rows"], list) else {}
    except (ValueError, KeyError, TypeError):
        return {}
