"""Records of what runs were computing when they crashed, from which rows that crash their process (poison rows) are found.

_batchspec/attempts/shard-00042-<attempt>.json  run <attempt> crashed or was killed while it held shard 42: the shard is suspect.
                                                Written by the run that took the shard over, or by the crashing run itself.
_batchspec/attempts/rows-<attempt>.json         what run <attempt> computes of a suspect shard, or computed when it crashed:
    {"shard": 42, "rows": [84, 85]}                 a batch retry of these input rows
    {"shard": 42, "rows": [84], "still": true}      the cooldown before an isolated retry: nothing is computed
    {"shard": 42, "rows": [84], "reached": 16}      an isolated retry that has reached 16 output tokens
    {}                                              nothing: the run ended by itself

A run records nothing for shards that are not suspect: its claims show which shards it held. A record counts only if its run is
known to have crashed while it held the shard, so records of living runs do not count. The rules are in
`job/supervise/poison_rows.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from batchspec.data.storage.store import Store

FOLDER = "_batchspec/attempts"


class Attempts:
    """The records of one job, as the run `attempt` reads and writes them. Every method may raise StorageError."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store, self._attempt = store, attempt
        self._record: dict[str, Any] = {}

    def add_crash(self, shard: int, attempt: str) -> None:
        """Record that run `attempt` crashed or was killed while it held the shard."""
        self._store.put_if_absent(f"{FOLDER}/shard-{shard:05d}-{attempt}.json", b"{}")

    def suspect_shards(self) -> set[int]:
        """Shards that were held by a run that crashed; some of them may be committed by now."""
        found = (re.fullmatch(r"shard-(\d+)-\w+\.json", name) for name in self._store.list(FOLDER))
        return {int(match[1]) for match in found if match}

    def begin_batch_retry(self, shard: int, rows: Sequence[int]) -> None:
        """Record that from now on this run computes these input rows of the shard and no others."""
        self._put({"shard": shard, "rows": list(rows)})

    def begin_cooldown(self, shard: int, row: int) -> None:
        """Record that from now on this run computes nothing; an isolated retry of this input row follows."""
        self._put({"shard": shard, "rows": [row], "still": True})

    def begin_isolated_retry(self, shard: int, row: int) -> None:
        """Record that from now on this run computes only this input row."""
        self._put({"shard": shard, "rows": [row], "reached": 0})

    def reached(self, num_tokens: int) -> None:
        """Record that the isolated row has this number of output tokens, over all its samples."""
        self._put(self._record | {"reached": num_tokens})

    def clear(self) -> None:
        """Record that this run no longer computes a row of a suspect shard."""
        if self._record:
            self._put({})

    def crash_counts(self, shard: int) -> dict[int, int]:
        """The crash count of each input row of the shard that was in flight when a run crashed.

        It is the number of isolated retries of the row that crashed at the furthest output position that any of them reached,
        minus the number of crashes during its cooldowns, at least 0.
        """
        positions: dict[int, list[int]] = {}
        cooldowns: Counter[int] = Counter()
        names = self._store.list(FOLDER)
        crashed = (match[1] for name in names if (match := re.fullmatch(rf"shard-{shard:05d}-(\w+)\.json", name)))
        for name in (f"rows-{attempt}.json" for attempt in crashed if attempt != self._attempt):
            record = _parse(self._store.read(f"{FOLDER}/{name}")) if name in names else {}
            if record.get("shard") == shard:
                for row in record["rows"]:
                    positions.setdefault(row, []).extend([record["reached"]] if "reached" in record else [])
                    cooldowns[row] += "still" in record
        return {row: max(0, found.count(max(found, default=0)) - cooldowns[row]) for row, found in positions.items()}

    def _put(self, record: dict[str, Any]) -> None:
        self._record = record
        self._store.put(f"{FOLDER}/rows-{self._attempt}.json", json.dumps(record).encode())


def _parse(data: bytes) -> dict[str, Any]:
    """A record; {} if its bytes are damaged: at worst, the row is retried once more."""
    try:
        record = json.loads(data)
        sound = all(isinstance(number, int) for number in [*record["rows"], record.get("reached", 0)])
        return record if sound else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
