"""Heartbeats: what every run of a job reports about itself, for `batchspec status`. One small file a run, rewritten every 10 s.

_batchspec/progress/<attempt>.json   one JSON object, see RunHeartbeat; replaced in one step

Results do not depend on these files. A run that cannot write its file continues; unreadable files are counted and skipped. The
files of ended runs are kept, so that `batchspec status` can report how each ended.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

from batchspec.errors import BatchspecError, Interrupted
from batchspec.runstate.claims import this_process
from batchspec.storage.store import Store

FOLDER = "_batchspec/progress"
FIRST_BEAT_S = 1.0
"""The first interval. It is doubled each time, up to BEAT_S or REMOTE_BEAT_S, so that short jobs have heartbeats too."""
BEAT_S = 10.0
REMOTE_BEAT_S = 30.0
"""On S3: 120 PUTs an hour for each run."""
LAST_BEAT_S = 5.0
"""Maximum time that a run waits at its end for its last heartbeat."""
READ_AT_ONCE = 16
SAID_CHARS = 500


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
    """done, interrupted (a signal, the time limit), failed (an error of batchspec's), crashed; empty while it runs."""
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
        self._store, self._attempt = store, attempt
        self.beat_s = REMOTE_BEAT_S if store.method == "put" else BEAT_S
        self._ended: dict[str, RunHeartbeat] = {}

    def write(self, facts: Mapping[str, Any]) -> None:
        """Raises StorageError."""
        self._store.put(f"{FOLDER}/{self._attempt}.json", json.dumps({"attempt": self._attempt, **facts}).encode())

    def read(self) -> tuple[list[RunHeartbeat], int]:
        """Every run with a readable file, and the number of unreadable files. Files of ended runs are read once."""
        try:
            names = [name for name in self._store.list(FOLDER) if re.fullmatch(r"[0-9a-f]{32}\.json", name)]
        except BatchspecError:  # its path is not a folder
            return [], 1
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            found = list(pool.map(self._read, names))
        return [run for run in found if run is not None], sum(run is None for run in found)

    def _read(self, name: str) -> RunHeartbeat | None:
        if name in self._ended:
            return self._ended[name]
        run = None
        with suppress(BatchspecError):  # deleted since the listing, or not a file
            run = RunHeartbeat.parse(self._store.read(f"{FOLDER}/{name}"))
        if run is not None and run.end:
            self._ended[name] = run
        return run


class HeartbeatWriter:
    """Writes a run's heartbeat within a block: from `begin` on, again after FIRST_BEAT_S, later every `files.beat_s` s, and at
    the end, with how the run ended.

    It has its own thread, so that a slow store does not delay rounds, and a run that hangs still reports (`quiet_s`).
    """

    def __init__(self, files: HeartbeatFiles) -> None:
        self._files = files
        self._facts: Callable[[], Mapping[str, Any]] = dict
        self._who = {**this_process(), "job": _job(), "began_at": round(time.time(), 3), "slots": 0}
        self._over = threading.Event()
        self._last_beat: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)

    def __enter__(self) -> Self:
        return self

    def begin(self, facts: Callable[[], Mapping[str, Any]] = dict, *, slots: int = 0) -> None:
        """Write the heartbeat from now on; called again once there is more to report.

        facts  returns fields of RunHeartbeat; called in the thread
        slots  number of slots of the batch; 0: the run still loads
        """
        self._facts, self._who["slots"] = facts, slots
        if self._thread.ident is None:
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._last_beat = _last_beat(error)
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_BEAT_S)

    def _beat(self) -> None:
        wait_s = min(FIRST_BEAT_S, self._files.beat_s)
        while True:
            over = self._over.is_set()
            with suppress(BatchspecError):  # a failed heartbeat must not fail the job; the next one replaces it
                self._files.write({**self._who, "at": round(time.time(), 3), **self._facts(), **self._last_beat})
            if over:
                return
            self._over.wait(wait_s)
            wait_s = min(2 * wait_s, self._files.beat_s)


def _job() -> str:
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "")


def _last_beat(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"end": "done"}
    if isinstance(error, Interrupted | KeyboardInterrupt):
        end = "interrupted"
    else:
        end = "failed" if isinstance(error, BatchspecError) else "crashed"
    said = str(error) if isinstance(error, BatchspecError) else f"{type(error).__name__}: {error}"
    return {"end": end, "said": " ".join(said.split())[:SAID_CHARS]}
