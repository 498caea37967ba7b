"""The watchdog: when no round ends for a long time, the process prints its stacks, saves its work and exits with 75."""

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

LOOKS = 20
"""Checks during the limit."""
SAVE_S = 180.0
"""Longer than a store is waited for. Saving may hang as well: then the process ends without it."""


class Watchdog:
    """`beat` reports that the run makes progress. A hanging thread cannot end itself, so another thread ends the process."""

    def __init__(self, limit_s: float, save: Callable[[], object]) -> None:
        """save     called before the end, while the other thread hangs
        limit_s  seconds without `beat`; 0 is off
        """
        self._limit_s, self._save = limit_s, save
        self._beaten_at = math.inf

    def beat(self) -> None:
        self._beaten_at = time.monotonic()

    def pause(self) -> None:
        """Do not expect a beat until the next one."""
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
        # Code that hangs with the GIL held stops this thread too; faulthandler's own timer, reset at each check, ends that.
        late_s = self._limit_s + self._limit_s / LOOKS + SAVE_S
        while not over.wait(self._limit_s / LOOKS):
            faulthandler.dump_traceback_later(late_s, exit=True)
            if time.monotonic() - self._beaten_at >= self._limit_s:
                self._end()
        faulthandler.cancel_dump_traceback_later()

    def _end(self) -> None:
        faulthandler.dump_traceback_later(SAVE_S, exit=True)
        faulthandler.dump_traceback(all_threads=True)
        try:
            saved = f"{self._save()} more rows are saved"
        except BatchspecError as error:
            saved = str(error)
        terminal.fail(
            f"no round ended for {self._limit_s:g} s (cluster.watchdog_s), and the stacks above say where it hangs; "
            f"{saved}; run the same command again to go on"
        )
        os._exit(Interrupted.exit_code)
