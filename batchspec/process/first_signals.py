"""What signals do from a program's first line until signals.py is imported, which handles them from then on.

Imports only `signal` and `os`: the modules that signals.py imports take a tenth of a second.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP)
"""Sent by batch systems before they kill, also for a soft limit of CPU time, by Ctrl-C, and when a terminal closes. SIGHUP that
nohup ignores stays ignored."""
INTERRUPTED = 75
"""The exit code of errors.Interrupted."""

noted: list[str] = []
"""The names of the signals that came in a batch job of Slurm: its task waits with them until it can be requeued."""


def handle_first() -> None:
    """A signal ends the process with one line; in a batch job of Slurm it is noted."""
    handler = _note if in_batch_task() else _leave
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def in_batch_task(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in a batch job of Slurm, and not in an interactive allocation."""
    return "SLURM_JOB_ID" in env and env.get("ENVIRONMENT") == "BATCH"


def _note(number: int, _: FrameType | None) -> None:
    noted.append(signal.Signals(number).name)


def _leave(number: int, _: FrameType | None) -> None:
    try:  # noqa: SIM105 (contextlib is not imported yet)
        os.write(2, f"batchspec: {signal.Signals(number).name}: stopped during start-up; run the same command again\n".encode())
    except OSError:  # nobody reads it
        pass
    os._exit(INTERRUPTED)
