"""Writes the heartbeat of a run, from its start to its end.

A run that begins has its heartbeat before it imports torch if the folder holds a job, and else once its checks have passed; the
job begins when the model is loaded. A run that is refused, or finds nothing to compute, deletes its heartbeat.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from batchspec.data.runstate.claims import this_process
from batchspec.data.runstate.heartbeats import SAID_CHARS, HeartbeatFiles
from batchspec.data.storage.open_store import open_store
from batchspec.data.storage.store import TMP
from batchspec.errors import BatchspecError, Interrupted, RankLost
from batchspec.process.threads import start_thread

FIRST_BEAT_S = 1.0
"""The first interval. It is doubled each time, up to BEAT_S or REMOTE_BEAT_S, so that short jobs have heartbeats too."""
REFUSED = 2
"""Exit code of errors that are not the machine's."""
LAST_BEAT_S = 5.0
"""Maximum time that a run waits at its end for its last heartbeat."""


class HeartbeatWriter:
    """Writes a run's heartbeat: from `start` on if the folder holds a job, else from `begin` on; again after FIRST_BEAT_S, later
    every `files.beat_s` s. At the end of the block in which the run works on the job, it writes how the run ended.

    It has its own thread, so that a slow store does not delay rounds, and a run that hangs still reports (`quiet_s`).
    """

    def __init__(self, files: HeartbeatFiles) -> None:
        self._files, self._begun = files, False
        self._facts: Callable[[], Mapping[str, Any]] = dict
        self._who = {**this_process(), "job": _job(), "began_at": round(time.time(), 3), "slots": 0}
        self._over, self._woken = threading.Event(), threading.Event()
        self._last_beat: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    @property
    def attempt(self) -> str:
        """The id of the run."""
        return self._files.attempt

    def start(self) -> None:
        """Write the heartbeat from now on if the folder holds a job."""
        if self._thread is None:
            self._thread = start_thread(self._beat, "progress")

    def withdraw(self) -> None:
        """Delete the heartbeat of a run that has not begun to work on the job."""
        if not self._begun:
            self._stop()
            self._files.withdraw()

    def __enter__(self) -> Self:
        return self

    def begin(self, facts: Callable[[], Mapping[str, Any]] = dict, *, slots: int = 0) -> None:
        """Write the heartbeat from now on; called again once there is more to report.

        facts  returns fields of RunHeartbeat; called in the thread
        slots  number of slots of the batch; 0: the run still loads
        """
        self._facts, self._who["slots"], self._begun = facts, slots, True
        self._woken.set()
        self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._last_beat = _last_beat(error)
        self._stop()
        refused = isinstance(error, RankLost) or (isinstance(error, BatchspecError) and error.exit_code == REFUSED)
        if refused and not self._files.is_job():  # a rank that refuses ends, and says why
            self._files.withdraw()  # a new job that is refused while it loads leaves no file

    def _stop(self) -> None:
        self._over.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join(LAST_BEAT_S)

    def _beat(self) -> None:
        wait_s = min(FIRST_BEAT_S, self._files.beat_s)
        while True:
            self._woken.clear()
            over = self._over.is_set()
            with suppress(BatchspecError):  # a failed heartbeat must not fail the job; the next one replaces it
                if self._begun or (not over and self._files.is_job()):
                    self._files.write({**self._who, "at": round(time.time(), 3), **self._facts(), **self._last_beat})
            if over:
                return
            woken = self._woken.wait(wait_s)
            wait_s = min(FIRST_BEAT_S if woken else 2 * wait_s, self._files.beat_s)


@contextmanager
def starting(path: str) -> Iterator[HeartbeatWriter]:
    """The heartbeat of a run that begins with its imports; deleted at the end unless the run worked on the job.

    path  its output folder
    """
    writer = HeartbeatWriter(HeartbeatFiles(open_store(path, TMP), uuid.uuid4().hex))
    writer.start()
    try:
        yield writer
    finally:
        writer.withdraw()


def mark_requeued(path: str, requeued: bool) -> None:
    """Let `batchspec status` say that the batch system starts this task again, or that it does not. path: the output folder."""
    with suppress(BatchspecError):  # the task ends as it would without this note
        HeartbeatFiles(open_store(path, TMP), "").mark_requeued(requeued=requeued)


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
    if isinstance(error, BatchspecError):
        said = str(error)
    else:
        said = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    return {"end": end, "said": " ".join(said.split())[:SAID_CHARS]}
