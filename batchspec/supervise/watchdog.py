"""The watchdog: when no round ends for a long time, the process prints its stacks, saves its work and exits with 75.

It does the same if another rank of its group is gone and the main thread waits for it: on a GPU it would wait for ever.
"""

from __future__ import annotations

import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchspec import terminal
from batchspec.errors import BatchspecError, Interrupted

NUM_CHECKS = 20
"""Number of checks within the limit."""
LOST_S = 10.0
"""Seconds in which the main thread may end by itself after a rank is gone."""
SAVE_S = 180.0
"""Time limit of saving, longer than the time-outs of a store. If saving hangs too, the process ends without it."""
NCCL_S = 600.0
"""torch's own time limit of an exchange over NCCL. It is long enough for a rank that compiles kernels while the others wait."""


def limit_s(own: float | None, *, gpu: bool) -> float:
    """Seconds without a round after which a run counts as hung; 0 means never. own: the key cluster.watchdog_s."""
    return own if own is not None else 600.0 if gpu else 3600.0


def nccl_s(watchdog_s: float) -> float:
    """Seconds after which torch aborts the process because of an exchange over NCCL that hangs. watchdog_s: the watchdog's limit;
    0: there is none, and the result is infinite.

    The watchdog must end the process first, because it saves the run's work. torch counts from the launch of the exchange, the
    watchdog from the last finished round, which may be later by up to its own limit: so the result is at least twice that limit,
    and the time of saving. Before the first round only torch counts.
    """
    return max(NCCL_S, 2 * watchdog_s + SAVE_S) if watchdog_s else math.inf


class Watchdog:
    """Ends the process if `beat`, which reports progress, is not called in time. It has its own thread, because a hanging thread
    cannot end itself."""

    def __init__(
        self, limit_s: float, save: Callable[[], object], lost: Callable[[], bool] | None = None, *,
        advice: str = "run the same command again to go on",
    ) -> None:  # fmt: skip
        """
        limit_s  seconds without `beat`; 0 is off
        save     called before the process ends, while the main thread hangs
        lost     whether a rank of this process's group is gone; None: there is no group
        advice   the end of its last message
        """
        self._limit_s, self._save, self._lost, self._advice = limit_s, save, lost, advice
        self._beaten_at, self._lost_at = math.inf, math.inf

    def beat(self) -> None:
        self._beaten_at = time.monotonic()

    def pause(self) -> None:
        """Expect no beat until the next call of `beat`."""
        self._beaten_at = math.inf

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self._limit_s:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), daemon=True, name="watchdog")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        # Code that hangs while it holds the GIL stops this thread too. faulthandler's timer, reset at each check, ends the
        # process then.
        late_s, every_s = self._limit_s + self._limit_s / NUM_CHECKS + SAVE_S, self._limit_s / NUM_CHECKS
        while not over.wait(every_s if self._lost is None else min(1.0, every_s)):
            faulthandler.dump_traceback_later(late_s, exit=True)
            if time.monotonic() - self._beaten_at >= self._limit_s:
                self._end(f"no round ended for {self._limit_s:g} s (cluster.watchdog_s)")
            if self._lost is not None and self._lost():
                self._lost_at = min(self._lost_at, time.monotonic())
                if time.monotonic() - self._lost_at >= LOST_S:
                    self._end("a rank of this group is gone, and this one waits for it")
        faulthandler.cancel_dump_traceback_later()

    def _end(self, why: str) -> None:
        faulthandler.dump_traceback_later(SAVE_S, exit=True)
        faulthandler.dump_traceback(all_threads=True)
        try:
            saved = f"{self._save()} more rows are saved"
        except BatchspecError as error:
            saved = str(error)
        terminal.fail(f"{why}; the stacks above show where it hangs; {saved}; {self._advice}")
        os._exit(Interrupted.exit_code)
