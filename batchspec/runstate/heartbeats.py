"""What every run of a job says of itself while it lasts, for `batchspec status`: one small file a run, written anew now and then.

_batchspec/progress/<attempt>.json   one JSON object, see RunHeartbeat; replaced in one step

A file is advice: nothing that a run computes depends on one. A run that cannot write its file goes on, a file that cannot be read
is counted and passed over. Ended runs keep theirs, so that a job tells what became of each.
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
"""Doubled up to one of the next two: a short job is seen too."""
BEAT_S = 10.0
REMOTE_BEAT_S = 30.0
"""On S3: 120 PUTs an hour for each run."""
LAST_WORD_S = 5.0
"""A store that does not answer must not keep a run from ending."""
READ_AT_ONCE = 16
SAID_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeartbeat:
    """One run, as it last said. Counts are of this run alone; times are of its machine's clock."""

    attempt: str = ""
    host: str = ""
    pid: int = 0
    space: str = ""
    """In which the number means that process, as claims name it."""
    started: str = ""
    """When the process began, as claims name it; empty where the machine does not say."""
    task: str = ""
    """As claims name it; empty outside a batch system."""
    job: str = ""
    """As the batch system lists it: 17_3 is task 3 of array 17."""
    restart: int = 0
    began_at: float = 0.0
    at: float = 0.0
    """Seconds since 1970 when it said this."""
    end: str = ""
    """done, interrupted (a signal, the time limit), failed (an error of batchspec's), crashed; empty while it runs."""
    said: str = ""
    """The message that it ended with."""
    expected: int = 0
    """Completions of the whole job, as it estimates them."""
    shards: int = 0
    """It committed."""
    completions: int = 0
    """It finished, error rows among them."""
    errors: int = 0
    """Error rows in the shards it committed."""
    open_shards: tuple[tuple[int, int], ...] = ()
    """Shards that it has not committed, and the completions of each that are there, those of earlier runs among them."""
    tokens: int = 0
    accepted: int = 0
    rounds: int = 0
    """Rounds times the rows that lived in them."""
    live_rows: int = 0
    slots: int = 0
    tok_s: float = 0.0
    """Over the last minute."""
    quiet_s: float = 0.0
    """Since its last round."""
    mean_output: float = 0.0
    """Tokens that it expects of a completion."""
    in_flight_tokens: int = 0
    """Of rows that are not finished."""

    @property
    def name(self) -> str:
        """For people: the job where a batch system started it, else machine and process."""
        name = f"job {self.job}" if self.job else f"{self.host}:{self.pid}"
        return " ".join(name.split()) + (f" start {self.restart + 1}" if self.restart else "")

    @classmethod
    def parse(cls, data: bytes) -> RunHeartbeat | None:
        """None for what no run wrote: not JSON, another type somewhere, a number out of any range."""
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
    """The progress files of one job; `attempt` names the one that this run writes."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store, self._attempt = store, attempt
        self.beat_s = REMOTE_BEAT_S if store.method == "put" else BEAT_S
        self._ended: dict[str, RunHeartbeat] = {}

    def write(self, facts: Mapping[str, Any]) -> None:
        """Raises StorageError."""
        self._store.put(f"{FOLDER}/{self._attempt}.json", json.dumps({"attempt": self._attempt, **facts}).encode())

    def read(self) -> tuple[list[RunHeartbeat], int]:
        """Every run that left a readable file, and how many files are not readable. Ended runs are read once."""
        try:
            names = [name for name in self._store.list(FOLDER) if re.fullmatch(r"[0-9a-f]{32}\.json", name)]
        except BatchspecError:  # something of another's stands in the place of the folder
            return [], 1
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            found = list(pool.map(self._read, names))
        return [run for run in found if run is not None], sum(run is None for run in found)

    def _read(self, name: str) -> RunHeartbeat | None:
        if name in self._ended:
            return self._ended[name]
        run = None
        with suppress(BatchspecError):  # it may be gone since it was listed, or be no file at all
            run = RunHeartbeat.parse(self._store.read(f"{FOLDER}/{name}"))
        if run is not None and run.end:
            self._ended[name] = run
        return run


class HeartbeatWriter:
    """Writes a run's progress file while the block lasts, soon at first, then every `files.beat_s` s, and how it ended.

    From a thread of its own: a slow store delays no round, and a run that is stuck still says so (`quiet_s`).

    facts  what to say, called in that thread: fields of RunHeartbeat
    slots  places of the batch
    """

    def __init__(self, files: HeartbeatFiles, facts: Callable[[], Mapping[str, Any]], *, slots: int) -> None:
        self._files, self._facts = files, facts
        self._who = {**this_process(), "job": _job(), "began_at": round(time.time(), 3), "slots": slots}
        self._over = threading.Event()
        self._last_word: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._last_word = _last_word(error)
        self._over.set()
        self._thread.join(LAST_WORD_S)

    def _beat(self) -> None:
        wait_s = min(FIRST_BEAT_S, self._files.beat_s)
        while True:
            over = self._over.is_set()
            with suppress(BatchspecError):  # no status is worth a job; the next beat says it all again
                self._files.write({**self._who, "at": round(time.time(), 3), **self._facts(), **self._last_word})
            if over:
                return
            self._over.wait(wait_s)
            wait_s = min(2 * wait_s, self._files.beat_s)


def _job() -> str:
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "")


def _last_word(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"end": "done"}
    if isinstance(error, Interrupted | KeyboardInterrupt):
        end = "interrupted"
    else:
        end = "failed" if isinstance(error, BatchspecError) else "crashed"
    said = str(error) if isinstance(error, BatchspecError) else f"{type(error).__name__}: {error}"
    return {"end": end, "said": " ".join(said.split())[:SAID_CHARS]}
