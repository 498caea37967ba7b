"""Child processes of a run. A signal that is sent to all processes of a job does not end them; they end with the run.

Those that compute from input, which may be hostile, get no credentials, and limit their own CPU time and memory.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Signals that a batch system or a terminal sends to all processes of a job."""
PASSED_ENVIRONMENT = ("PATH", "TZ", "PYTHON", "LD_LIBRARY_PATH", "LANG", "LC_")
"""Prefixes of the environment variables that a process that computes from input gets: credentials are not passed on."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started within this block have BLOCKED_SIGNALS blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # a child process inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_module(module: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start `python -m module`, which computes from input, with pipes to its input and output.

    It imports modules from where this process does, and has `environment` besides the variables of PASSED_ENVIRONMENT.
    """
    environ = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ENVIRONMENT)}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environ | environment,
        )  # fmt: skip


def limit_cpu(cpu_s: int) -> None:
    """From now on this process has at least `cpu_s` seconds of CPU time, and at most two more; then the system ends it with
    SIGXCPU."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + cpu_s, resource.RLIM_INFINITY))
