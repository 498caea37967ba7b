"""Heartbeats: what every run of a job reports about itself, for `batchspec status`. One small file a run, rewritten every 10 s.

_batchspec/progress/<attempt>.json   one JSON object, see RunHeartbeat; replaced in one step

Results do not depend on these files. A run that cannot write its file continues; unreadable files are counted and skipped. The
files of ended runs are kept, so that `batchspec status` can report how each ended.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from batchspec.data.runstate.claims import owner_is_gone, this_process
from batchspec.data.runstate.manifest import MANIFEST
from batchspec.data.storage.store import Store
from batchspec.errors import BatchspecError

FOLDER = "_batchspec/progress"
BEAT_S = 10.0
REMOTE_BEAT_S = 30.0
"""On S3: 120 PUTs an hour for each run."""
SILENT_S = 300.0
"""Seconds since its last heartbeat after which a run counts as ended for `others`: ten heartbeats on S3, or a clock that is
minutes off."""
READ_AT_ONCE = 16
SAID_CHARS = 500
"""Maximum length of the message that a run ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeartbeat:
    """One run, as it last reported. Counts are of this run alone; times are by its machine's clock."""

    attempt: str = ""
    host: str = ""
    pid: int = 0
    space: str = ""
    """The namespace in which `pid` is unique, as in claims."""
    started: str = ""
    """When the process began, as in claims; empty if unknown."""
    task: str = ""
    """The batch system's task, as in claims; empty outside a batch system."""
    job: str = ""
    """The job id in the batch system's list: 17_3 is task 3 of array 17."""
    restart: int = 0
    began_at: float = 0.0
    at: float = 0.0
    """When this was written; like `began_at` seconds since 1970."""
    end: str = ""
    """done, interrupted (a signal, the time limit), requeued (interrupted, and the batch system starts its task again), failed
    (by an error of batchspec's), crashed; empty while it runs."""
    said: str = ""
    """The message that the run ended with."""
    expected: int = 0
    """Completions of the whole job, estimated."""
    shards: int = 0
    """Shards that it committed."""
    completions: int = 0
    """Rows that it finished, error rows included."""
    errors: int = 0
    """Error rows in the shards that it committed."""
    replaced_errors: int = 0
    """Error rows of earlier runs that it computed anew (resume=error), in the shards that it committed."""
    skipped: int = 0
    """Rows with the status skipped (input.on_overlong=skip), likewise."""
    open_shards: tuple[tuple[int, int], ...] = ()
    """(shard, finished completions) for each uncommitted shard that the run holds, completions of earlier runs included."""
    tokens: int = 0
    accepted: int = 0
    rounds: int = 0
    """Rounds, summed over the live rows of each."""
    live_rows: int = 0
    slots: int = 0
    tok_s: float = 0.0
    """Tokens a second over the last minute."""
    quiet_s: float = 0.0
    """Seconds since its last result: a round, a token from prefill, or a row that finished."""
    mean_output: float = 0.0
    """Expected tokens of a completion."""
    in_flight_tokens: int = 0
    """Tokens of rows that are not finished."""

    @property
    def name(self) -> str:
        """A name for people: the job id in the batch system, or else machine and process."""
        name = f"job {self.job}" if self.job else f"{self.host}:{self.pid}"
        return " ".join(name.split()) + (f" start {self.restart + 1}" if self.restart else "")

    @classmethod
    def parse(cls, data: bytes) -> RunHeartbeat | None:
        """A heartbeat; None if the bytes are not one: not valid JSON, a field of another type, or a number out of range."""
        try:
            values = json.loads(data)
            known = {item.name: _typed(values[item.name], item.default) for item in fields(cls) if item.name in values}
            return cls(**known) if known.get("attempt") else None
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


def _typed(value: Any, like: object) -> Any:
    if isinstance(like, str):
        if not isinstance(value, str):
            raise TypeError
        return value[:SAID_CHARS]
    if isinstance(like, tuple):
        return tuple((int(shard), int(_typed(count, 0))) for shard, count in value)
    number = float(value) if isinstance(value, int | float) else math.nan
    if isinstance(value, bool) or not 0 <= number < 1e15:
        raise ValueError
    return number if isinstance(like, float) else int(value)


class HeartbeatFiles:
    """The heartbeat files of one job; the run `attempt` writes its own."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store, self.attempt = store, attempt
        self.beat_s = REMOTE_BEAT_S if store.method == "put" else BEAT_S
        self._ended: dict[str, RunHeartbeat] = {}
        self._wrote = False

    def write(self, facts: Mapping[str, Any]) -> None:
        """Raises StorageError."""
        self._wrote = True
        self._store.put(f"{FOLDER}/{self.attempt}.json", json.dumps({"attempt": self.attempt, **facts}).encode())

    def is_job(self) -> bool:
        """Whether the folder holds a job. Raises StorageError."""
        return self._store.exists(MANIFEST)

    def withdraw(self) -> None:
        """Delete this run's file, if it wrote one, and of a folder without a job what was made for it."""
        name = f"{FOLDER}/{self.attempt}.json"
        with suppress(BatchspecError):
            if self._wrote:
                self._store.delete(name, self._store.version(name))
                if not self.is_job():
                    self._store.delete_empty_folders()

    def mark_requeued(self, *, requeued: bool) -> None:
        """Note of the interrupted runs of this start of the batch task that the task is started again, or that it is not."""
        own, ends = this_process(), ("interrupted", "requeued") if requeued else ("requeued", "interrupted")
        for run in self.read()[0]:
            if run.end == ends[0] and run.task == own["task"] and run.restart == own["restart"]:
                with suppress(BatchspecError):
                    self._store.put(f"{FOLDER}/{run.attempt}.json", json.dumps(asdict(replace(run, end=ends[1]))).encode())

    def read(self) -> tuple[list[RunHeartbeat], int]:
        """Every run with a readable file, and the number of unreadable files. Files of ended runs are read once."""
        try:
            names = [name for name in self._store.list(FOLDER) if re.fullmatch(r"[0-9a-f]{32}\.json", name)]
        except BatchspecError:  # its path is not a folder
            return [], 1
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            found = list(pool.map(self._read, names))
        return [run for run in found if run is not None], sum(run is None for run in found)

    def others(self, now: float) -> list[RunHeartbeat]:
        """The other runs that live, as far as this machine can tell. now: seconds since 1970"""
        own = this_process()
        return [
            run for run in self.read()[0]
            if run.attempt != self.attempt and not run.end and now - run.at < SILENT_S and not owner_is_gone(asdict(run), own)
        ]

    def finished_by_others(self) -> int:
        """Rows that all other runs of the job have finished so far, those that have ended included."""
        return sum(run.completions for run in self.read()[0] if run.attempt != self.attempt)

    def _read(self, name: str) -> RunHeartbeat | None:
        if name in self._ended:
            return self._ended[name]
        run = None
        with suppress(BatchspecError):  # deleted since the listing, or not a file
            run = RunHeartbeat.parse(self._store.read(f"{FOLDER}/{name}"))
        if run is not None and run.end and not (run.task and run.end in ("interrupted", "requeued")):  # one may become the other
            self._ended[name] = run
        return run
