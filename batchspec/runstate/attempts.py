"""What runs were at when they died: how a row that kills its process is found.

_batchspec/attempts/shard-00042-<attempt>.json  that run died while it held shard 42, says the one that took the shard over
_batchspec/attempts/rows-<attempt>.json         rows of such a shard that this run computes now, or computed when it died

A healthy run records nothing: its claims tell which shards it held. Only the rows of those shards are recorded, by the run that
computes them again, each before it is touched; a run ends by clearing its record, unless it dies. A record counts once its run
is known to have died with the shard: those of living runs do not.

A row that is suspect is tried: computed alone, on purpose, and its record says how far it got. Kills from outside come at any
moment, and the row is further the next time; one that kills its process never gets beyond that place. A run that stands still
before such a row says that too: who dies then was killed from outside.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchspec.storage.store import Store

FOLDER = "_batchspec/attempts"


class Attempts:
    """The records of one job as one run, `attempt`, sees and writes them. Every method may raise StorageError."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store, self._attempt = store, attempt
        self._record: dict[str, Any] = {}

    def suspect(self, shard: int, died: str) -> None:
        """The run `died` ended without a word while it held the shard."""
        self._store.put_if_absent(f"{FOLDER}/shard-{shard:05d}-{died}.json", b"{}")

    def suspected(self) -> set[int]:
        """Shards that a run died with; committed ones may be among them."""
        found = (re.fullmatch(r"shard-(\d+)-\w+\.json", name) for name in self._store.list(FOLDER))
        return {int(match[1]) for match in found if match}

    def enter(self, shard: int, rows: Sequence[int]) -> None:
        """From now on just these input rows of the shard are computed."""
        self._put({"shard": shard, "rows": list(rows)})

    def stand_still(self, shard: int, row: int) -> None:
        """From now on nothing is computed: this input row will be tried."""
        self._put({"shard": shard, "rows": [row], "still": True})

    def enter_trial(self, shard: int, row: int) -> None:
        """From now on this input row is computed, alone because it is suspect."""
        self._put({"shard": shard, "rows": [row], "reached": 0})

    def reached(self, tokens: int) -> None:
        """The row that is tried has so many output tokens."""
        self._put(self._record | {"reached": tokens})

    def clear(self) -> None:
        """No row is computed any more."""
        if self._record:
            self._put({})

    def strikes(self, shard: int) -> dict[int, int]:
        """Rows of a shard that runs died with; how many of those that tried a row died at the furthest place that any got to,
        less those that died while they stood still before it.
        """
        tried: dict[int, list[int]] = {}
        still: Counter[int] = Counter()
        names = self._store.list(FOLDER)
        dead = (match[1] for name in names if (match := re.fullmatch(rf"shard-{shard:05d}-(\w+)\.json", name)))
        for name in (f"rows-{attempt}.json" for attempt in dead if attempt != self._attempt):
            record = _parse(self._store.read(f"{FOLDER}/{name}")) if name in names else {}
            if record.get("shard") == shard:
                for row in record["rows"]:
                    tried.setdefault(row, []).extend([record["reached"]] if "reached" in record else [])
                    still[row] += "still" in record
        return {row: max(0, places.count(max(places, default=0)) - still[row]) for row, places in tried.items()}

    def _put(self, record: dict[str, Any]) -> None:
        self._record = record
        self._store.put(f"{FOLDER}/rows-{self._attempt}.json", json.dumps(record).encode())


def _parse(data: bytes) -> dict[str, Any]:
    """A record; an empty one where a disk kept other bytes, which costs another death at worst."""
    try:
        record = json.loads(data)
        sound = all(isinstance(number, int) for number in [*record["rows"], record.get("reached", 0)])
        return record if sound else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
