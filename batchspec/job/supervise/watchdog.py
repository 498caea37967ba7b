"""The watchdog: when no round ends for a long time, the process prints its stacks, saves its work and exits with 75.

It does the same if loading the model makes no progress for a long time (`load_progress.py`); loading as a whole has no limit. And
it does the same if another rank of its group has ended and the main thread waits for it: on a GPU it would wait for ever.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

from batchspec.console import terminal
from batchspec.errors import BatchspecError, Interrupted
from batchspec.process import load_progress
from batchspec.process.load_progress import WINDOW_S, Activity
from batchspec.process.threads import start_thread

NUM_CHECKS = 20
"""Minimum number of checks within the limit."""
LOAD_FACTOR = 3.0
"""While the model loads, the limit is this many times as long as for a round: compiling a large kernel, or starting a
communication library, takes longer than a round."""
LOST_S = 10.0
"""Seconds in which the main thread may end by itself after a rank is gone."""
SAVE_S = 180.0
"""Time limit of saving, longer than the time-outs of a store. If saving hangs too, the process ends without it."""
NCCL_S = 600.0
"""torch's own time limit of an exchange over NCCL. It is long enough for a rank that compiles kernels while the others wait."""
_STDERR = 2  # not sys.stderr, which is no file in a notebook


def limit_s(own: float | None, *, gpu: bool) -> float:
    """Seconds without a round after which a run counts as hung; 0 means never. own: the key cluster.watchdog_s."""
    return own if own is not None else 600.0 if gpu else 3600.0


def nccl_s(watchdog_s: float) -> float:
    """Seconds after which torch aborts the process because of an exchange over NCCL that hangs. watchdog_s: the watchdog's limit;
    0: there is none, and the result is infinite.

    The watchdog must end the process first, because it saves the run's work. torch counts from the launch of the exchange, the
    watchdog from the last finished round, which may be later by up to its own limit: so the result is at least twice that limit,
    and the time of saving. While the model is loaded either may be first, as there is nothing to save.
    """
    return max(NCCL_S, 2 * watchdog_s + SAVE_S) if watchdog_s else math.inf


class LoadChannel(Protocol):
    """By which the ranks of a group tell each other that their loading makes progress."""

    def tell_load_progress(self, number: int) -> None:
        """Tell the others how many times this rank has found progress."""

    def load_progress(self) -> list[int]:
        """That number of each rank."""


class Watchdog:
    """Ends the process if it makes no progress. It has its own thread, because a hanging thread cannot end itself.

    Rounds report progress by `beat`. While the process loads, the thread looks for progress, of this process or of another rank
    of its group, for which this one may wait. At first, and after `pause`, no progress is expected.

    A process that was stopped gets its whole limit again when it continues (PAUSE_S), with one exception: a process without
    parent that was stopped for longer than its limit, 5 % of it and SAVE_S together may end at once when it continues (SIGCONT,
    `fg`), with its stacks and exit code 1; the same command resumes the run. For calls that hold the GIL there is a timer, which
    runs while the process is stopped and may expire before the watchdog's thread runs. While the machine is suspended it does not
    run.
    """

    def __init__(
        self, limit_s: float, *, lost: Callable[[], bool] | None = None, loads: LoadChannel | None = None,
        has_parent: bool = False, advice: str = "run the same command again to go on",
    ) -> None:
        """
        limit_s     seconds without a round; LOAD_FACTOR times as many without progress in loading; 0: no limit
        lost        whether a rank of this process's group is gone; None: there is no group
        loads       the channel of the group
        has_parent  its parent ends this process if the interpreter does not run (`distributed/silent_ranks.py`)
        advice      the end of its last message
        """
        self.save = _nothing_to_save
        """Called before the process ends, while the main thread hangs; saves rows and says how many are saved in all."""
        self._limit_s, self._lost, self._loads, self._has_parent, self._advice = limit_s, lost, loads, has_parent, advice
        self._expected = (math.inf, False)
        """Time of the last beat by the monotonic clock, infinite if none is expected, and whether the process loads."""
        self._over = threading.Event()

    def beat(self) -> None:
        self._expected = (time.monotonic(), False)

    def begin_loading(self) -> None:
        """The process loads from now on, until the next call of `beat` or `pause`."""
        self._expected = (time.monotonic(), True)

    def pause(self) -> None:
        """Expect no progress until the next call of `beat` or `begin_loading`."""
        self._expected = (math.inf, False)

    def close(self) -> None:
        """Watch no longer, and forget `save`, by which this object holds the run. May be called several times."""
        self._over.set()
        self.save = _nothing_to_save

    @contextmanager
    def watching(self) -> Iterator[Self]:
        """Watch within this block, until `close`."""
        if not self._limit_s:
            yield self
            return
        self._end_without_gil(self._limit_s * LOAD_FACTOR)  # not by the thread: a call may hold the GIL before its first check
        thread = start_thread(self._watch, "watchdog")
        try:
            yield self
        finally:
            self.close()
            thread.join()

    def _watch(self) -> None:
        every_s = min(self._limit_s / NUM_CHECKS, WINDOW_S if self._lost is None else 1.0)
        progress, looked_at, progress_at, lost_at = _LoadProgress(self._loads), time.monotonic(), 0.0, math.inf
        while not self._over.wait(every_s):
            now = time.monotonic()
            if now - looked_at > every_s + load_progress.PAUSE_S:
                progress_at, lost_at = now, math.inf
            looked_at, (beaten_at, loading) = now, self._expected
            limit_s = self._limit_s * (LOAD_FACTOR if loading else 1.0)
            self._end_without_gil(limit_s)
            if loading and progress.found():
                progress_at = now
            if now - max(beaten_at, progress_at) >= limit_s:
                self._end(_why(limit_s, loading=loading))
            if self._lost is not None and self._lost():
                lost_at = min(lost_at, now)
                if now - lost_at >= LOST_S:
                    self._end("a rank of this group is gone, and this one waits for it")
        if not self._has_parent:
            faulthandler.cancel_dump_traceback_later()

    def _end_without_gil(self, limit_s: float) -> None:
        """Set the timer that ends the process if it is not set again in time, nor cancelled.

        Code that hangs while it holds the GIL stops this thread too; faulthandler's timer is a thread without Python. It cannot
        tell a hang from a stopped process, see the class's docstring.
        """
        if not self._has_parent:
            faulthandler.dump_traceback_later(limit_s + limit_s / NUM_CHECKS + SAVE_S, exit=True, file=_STDERR)

    def _end(self, why: str) -> None:
        faulthandler.dump_traceback_later(SAVE_S, exit=True, file=_STDERR)
        faulthandler.dump_traceback(all_threads=True, file=_STDERR)
        try:
            saved = self.save()
        except BatchspecError as error:
            saved = str(error)
        terminal.fail(f"{why}; the stacks above show where it hangs; {saved}; {self._advice}")
        os._exit(Interrupted.exit_code)


def _nothing_to_save() -> str:
    return "of the other shards no completions are saved"


def _why(limit_s: float, *, loading: bool) -> str:
    if loading:
        return f"loading made no progress for {limit_s:g} s ({LOAD_FACTOR:g} times cluster.watchdog_s)"
    return f"no round ended for {limit_s:g} s (cluster.watchdog_s)"


class _LoadProgress:
    """Finds progress in loading: of this process, and of the other ranks of its group, which tell their own."""

    def __init__(self, loads: LoadChannel | None) -> None:
        self._loads, self._activity = loads, Activity()
        self._num_steps, self._number, self._of_all = -1, 0, list[int]()

    def found(self) -> bool:
        """Whether there was progress since the last call."""
        num_steps = load_progress.num_steps()
        own = self._activity.made_progress() or num_steps != self._num_steps
        self._num_steps = num_steps
        self._number += own
        if self._loads is None:
            return own
        if own:
            self._loads.tell_load_progress(self._number)
        before, self._of_all = self._of_all, self._loads.load_progress()
        return self._of_all != before
