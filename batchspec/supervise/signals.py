"""Signals that ask a run to end. While rows are decoded, the first one lets the run finish its round and save its work, and a
second Ctrl-C ends it at once. When all rows are committed, the first one ends the run at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Sent by batch systems before they kill, and by Ctrl-C."""


class EndSignals:
    """What the signals of SIGNALS do, from the first call of `stop_with` or `interrupt` until the end of the `with` block.

    Only the main thread can handle signals: in other threads nothing is changed.
    """

    name: str | None = None
    """The first signal that came; None if none did."""

    def __init__(self) -> None:
        self._handle: Callable[[int], None] = _nothing
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._handle = _nothing  # so that this object holds no engine

    def stop_with(self, stop: Callable[[], None]) -> None:
        """The first signal calls `stop`; a second SIGINT raises KeyboardInterrupt."""

        def handle(number: int) -> None:
            if self.name is None:
                self.name = signal.Signals(number).name
                stop()
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        self._install(handle)

    def interrupt(self) -> None:
        """The next signal raises KeyboardInterrupt; those after it are ignored."""

        def handle(number: int) -> None:
            self.ignore()
            self.name = signal.Signals(number).name
            raise KeyboardInterrupt

        self._install(handle)

    def ignore(self) -> None:
        """Signals do nothing from now on."""
        self._install(_nothing)

    def _install(self, handle: Callable[[int], None]) -> None:
        self._handle = handle
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handled) for number in SIGNALS}

    def _handled(self, number: int, _: FrameType | None) -> None:
        self._handle(number)


def _nothing(_: int) -> None:
    """What an ignored signal does."""
