"""Signals that ask a program to end, from its first line to its last. What they do depends on the stage:

before the imports      the program ends, with one line                               first_signals.py
before the first row    the program ends, with one line that names the stage              `EndSignals.interrupt`
 of a task of Slurm     they wait until its workers can get them: the task is requeued    `EndSignals.begin`
while rows are decoded  the run finishes its round and saves its work                     `EndSignals.stop_with`
after the last row      the run ends at once                                              `EndSignals.interrupt`
at its end              nothing: the exit code is decided                                 `EndSignals.ignore`

Only programs call `begin_program` (program.py): where batchspec is imported, signals are the importing program's business until
it runs a job.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from batchspec.errors import Interrupted
from batchspec.process.first_signals import SIGNALS, leave, noted, signals_to_handle

AGAIN_S = 0.05
"""Seconds until the next attempt to interrupt a job that imports a module."""
LATE_S = 15.0
"""Seconds after a signal at which a job without rows ends whatever it does. Batch systems kill after 30 s."""


class EndSignals:
    """What SIGNALS do within a `with` block. They do nothing until another method is called.

    Only the main thread can handle signals: in other threads nothing is changed.
    """

    name: str | None = None
    """The first signal that came; None if none did."""

    def __init__(self) -> None:
        self._handle: Callable[[int], None] = self._note
        self._before: dict[int, Any] = {}
        self._stage: str | None = None
        self._raised = False
        self._late_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The exit code is decided: from now on signals change nothing. Raises Interrupted in place of a signal's
        KeyboardInterrupt, unless it came after the last row."""
        program.ignore()
        self.ignore()  # so that this object holds no engine
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, KeyboardInterrupt) and self._has_raised:
            raise Interrupted(self.line()) from None

    @contextmanager
    def as_interrupted(self) -> Iterator[None]:
        """Raises Interrupted in place of a signal's KeyboardInterrupt, unless it came after the last row."""
        try:
            yield
        except KeyboardInterrupt:
            if self._has_raised:
                raise Interrupted(self.line()) from None
            raise

    @property
    def _has_raised(self) -> bool:
        return self._raised and self._stage is not None

    @property
    def installed(self) -> bool:
        """Whether signals call this object."""
        return bool(self._before)

    def begin(self, *, waits: bool = False) -> None:
        """Of a program, before it imports its modules: a signal ends the process at once.

        waits  signals are only noted, until another method is called
        """
        self._stage = "during start-up"
        self._install(self._note if waits else self._note_and_leave)
        for name in noted:  # between the first line and this one
            self._handle(signal.Signals[name])

    def interrupt(self, stage: str | None = None) -> None:
        """The next signal raises KeyboardInterrupt in the main thread; those after it do nothing.

        stage  what the program does before its rows, for the message. A signal that came earlier then counts too; a second
               Ctrl-C, or LATE_S seconds, end the process if the exception does not. None: after the last row

        An exception in the middle of an import may be lost, or crash the process: a job waits for the end of the import, and a
        program that has not opened its job, so that it has nothing to clean up, ends at once.
        """
        self._stage, self._raised = stage, False
        self._install(self._interrupt)
        if stage is not None and self.name is not None:
            self._raise()

    def stop_with(self, stop: Callable[[], None]) -> None:
        """The first signal calls `stop`; a second Ctrl-C raises KeyboardInterrupt, a third one ends the process at once."""
        self._stage, self._raised = "in the middle of a round", False

        def handle(number: int) -> None:
            if self.name is None:
                self._note(number)
                stop()
            elif number == signal.SIGINT and self._raised:
                self._leave()
            elif number == signal.SIGINT:
                self._raised = True
                raise KeyboardInterrupt

        self._install(handle)

    def pass_to(self, handle: Callable[[int], None]) -> None:
        """Each signal calls `handle` with its number, one that the program has noted too."""
        self._install(handle)
        if program.name is not None:
            handle(signal.Signals[program.name])

    def ignore(self) -> None:
        """Signals do nothing from now on; the first one is noted."""
        self._handle = self._note

    def end(self) -> None:
        """Of a program that is about to end: signals do nothing, not even while the interpreter shuts down."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def line(self) -> str:
        """The message of a program that a signal has ended."""
        return f"{self.name}: stopped{self._stage and f' {self._stage}'}; run the same command again"

    def _install(self, handle: Callable[[int], None]) -> None:
        self._handle = handle
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in signals_to_handle():
            self._before[number] = signal.signal(number, self._handled)

    def _handled(self, number: int, _: FrameType | None) -> None:
        self._handle(number)

    def _note(self, number: int) -> None:
        if self.name is None and number in SIGNALS:
            self.name, self._late_at = signal.Signals(number).name, time.monotonic() + LATE_S

    def _interrupt(self, number: int) -> None:
        is_late = number == signal.SIGALRM and time.monotonic() >= self._late_at
        if self._stage is not None and (is_late or (number == signal.SIGINT and self.name is not None)):
            self._leave()
        self._note(number)
        self._raise()

    def _raise(self) -> None:
        if self._raised:
            return
        if _importing():
            if self is program:
                self._leave()
            self._handle_again(AGAIN_S)
            return
        self._raised = True
        self._handle_again(LATE_S)
        raise KeyboardInterrupt

    def _handle_again(self, after_s: float) -> None:
        if signal.SIGALRM not in self._before:
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._handled)
        signal.setitimer(signal.ITIMER_REAL, after_s)

    def _note_and_leave(self, number: int) -> None:
        self._note(number)
        self._leave()

    def _leave(self) -> NoReturn:
        leave(self.line())


program = EndSignals()
"""The signals of the whole process, if it is a program of batchspec. While it runs a job, the job's own object handles them."""


def program_does(stage: str) -> None:
    """Tell what the program does now, before its rows or instead of rows. Nothing happens unless the program has begun."""
    if program.installed:
        program.interrupt(stage)


def _importing() -> bool:
    """Whether the caller's thread imports a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
