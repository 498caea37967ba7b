"""Signals that ask a run to end: after the first it finishes its round and saves its work; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Sent by batch systems before they kill, and by Ctrl-C."""


@dataclass(slots=True)
class Asked:
    """The first signal that asked the run to end; None if none came."""

    name: str | None = None


@contextmanager
def ending(stop: Callable[[], None]) -> Iterator[Asked]:
    """Within, SIGTERM, SIGUSR1, SIGUSR2 and SIGINT call `stop` once; a second SIGINT raises KeyboardInterrupt.

    Only the main thread can handle signals: in other threads this does nothing.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, _: FrameType | None) -> None:
        if asked.name is None:
            asked.name = signal.Signals(number).name
            stop()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
