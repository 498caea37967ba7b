"""What a program of batchspec does first and last, whatever started it: a shell, a batch system, a container's process 1."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import NoReturn, TextIO

from batchspec.console import terminal
from batchspec.process.first_signals import SIGNALS, in_batch_task
from batchspec.process.refusals import refusal
from batchspec.process.signals import program


def begin_program() -> None:
    """Handle signals from now on; undo what a parent may have closed, blocked or ignored. Call it before other imports. Ends the
    process with one line if the system refuses that."""
    try:
        _begin()
    except OSError as error:
        if (refused := refusal(error)) is None:
            raise
        terminal.fail(refused)
        sys.exit(refused.exit_code)


def end_program(code: int) -> NoReturn:
    """End the process without freeing what it holds: all is written, and to free modules, torch and CUDA takes seconds, or hangs.

    The functions registered with `atexit` are called. Threads are not waited for.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        drop_unwritable(stream)
    os._exit(code)


def _begin() -> None:
    _open_streams()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # then every child seems to have ended with 0
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program.begin(waits=in_batch_task())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def drop_unwritable(stream: TextIO) -> None:
    """Flush the stream; what cannot be written is dropped, because with it the interpreter would exit with 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Open those of the first three file descriptors that are closed: else a data file gets the number of standard error, and
    what a library prints there is written into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
