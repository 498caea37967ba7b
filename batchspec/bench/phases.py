"""Progress messages of `batchspec bench` on stderr until it has figures: each phase when it begins, repeatedly, and at SIGTERM.

Making 30 GB of weights, compiling some hundred kernels and capturing as many graphs takes a minute or two, in which a silent
command would look like one that hangs.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from batchspec.console import terminal
from batchspec.errors import Interrupted
from batchspec.job.report.start_up import age_clock
from batchspec.process.threads import start_thread

REPEAT_S = 30.0
"""Seconds after which a phase that still lasts is reported again."""
GRACE_S = 5.0
"""Seconds that the main thread has to end after SIGTERM; it cannot end while it waits for a device that hangs."""


class Phases:
    """Names the phases of a command; a phase ends when the next one begins.

    age_s  a clock of the seconds since the process began
    """

    def __init__(self, age_s: Callable[[], float] | None = None) -> None:
        self._age_s = age_s or age_clock()
        self._name, self._began_s = "imports", 0.0

    def begin(self, name: str) -> None:
        self._name, self._began_s = name, self._age_s()
        self.say(name)

    def say(self, what: str) -> None:
        """Print a line on stderr, after the seconds since the process began."""
        terminal.say(f"{self._age_s():7.1f} s  {what}")

    def state(self) -> str:
        """The present phase and its seconds so far."""
        return f"{self._name}: {self._age_s() - self._began_s:.1f} s so far"

    @contextmanager
    def watched(self, *, repeat_s: float = REPEAT_S, grace_s: float = GRACE_S) -> Iterator[None]:
        """Within this block, a phase that lasts is reported again, and SIGTERM raises Interrupted with the name of the phase.

        If the main thread does not return from a call, the process reports that and ends. In other threads this does nothing,
        because only the main thread can handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        fd = signal.set_wakeup_fd(writer)  # Python writes the signal's number to it at once, whatever the main thread does
        handler = signal.signal(signal.SIGTERM, self._interrupt)
        thread = start_thread(lambda: self._watch(reader, repeat_s, grace_s), "phases")
        try:
            yield
        finally:
            os.write(writer, bytes([_OVER]))
            thread.join()
            signal.signal(signal.SIGTERM, handler)
            signal.set_wakeup_fd(fd)
            os.close(reader)
            os.close(writer)

    def _interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(f"SIGTERM during {self.state()}; nothing was written")

    def _watch(self, reader: int, repeat_s: float, grace_s: float) -> None:
        ends = False
        while True:
            ready, _, _ = select.select([reader], [], [], grace_s if ends else repeat_s)
            if not ready and ends:
                terminal.fail(f"SIGTERM during {self.state()}, which does not return; nothing was written")
                os._exit(Interrupted.exit_code)
            if not ready:
                self.say(self.state())
                continue
            numbers = os.read(reader, 64)
            if _OVER in numbers:
                return
            ends = ends or signal.SIGTERM in numbers


_OVER = 0
"""No signal has this number."""
