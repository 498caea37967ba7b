"""What signals do from a program's first line until signals.py is imported, which handles them from then on.

Imports no module that takes time: those that signals.py imports take a tenth of a second.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP)
"""Sent by batch systems before they kill, also for a soft limit of CPU time, by Ctrl-C, and when a terminal closes."""
INTERRUPTED = 75
"""The exit code of errors.Interrupted."""

noted: list[str] = []
"""The names of the signals that came in a batch job of Slurm: its task waits with them until it can be requeued."""


def handle_first() -> None:
    """A signal ends the process with one line; in a batch job of Slurm it is noted."""
    for number in signals_to_handle():
        signal.signal(number, _note if in_batch_task() else _leave)


def signals_to_handle() -> list[int]:
    """SIGNALS without SIGHUP if the process ignores it, as under nohup."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def leave(line: str) -> NoReturn:
    """End the process here, with one line on standard error, and its children with it."""
    try:  # noqa: SIM105 (importing contextlib takes time)
        os.write(2, f"batchspec: {line}\n".encode())  # the main thread may hold the lock of sys.stderr
    except OSError:  # its reader is gone
        pass
    os._exit(INTERRUPTED)


def in_batch_task(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in a batch job of Slurm, and not in an interactive allocation."""
    return "SLURM_JOB_ID" in env and env.get("ENVIRONMENT") == "BATCH"


def _note(number: int, _: FrameType | None) -> None:
    noted.append(signal.Signals(number).name)


def _leave(number: int, _: FrameType | None) -> None:
    leave(f"{signal.Signals(number).name}: stopped during start-up; run the same command again")
