"""Processes with limits of CPU time and memory, because what they compute from comes from the input.

One that exceeds a limit dies alone, and the next request starts a new one.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from batchspec.errors import CapacityError
from batchspec.process.child_process import start_module
from batchspec.process.machine import num_cpus

MOST_PROCESSES = 8
MAX_KILLS = 3
"""Number of processes that may be killed from outside, one after another, until their request is given up."""
OUT_OF_MEMORY, TOO_MANY_STATES = 12, 13
"""Exit codes of a process that has reached a limit. It ends, because what it holds would make later requests fail too."""


class Defect(NamedTuple):
    """An answer: the process met an error in batchspec, so that what it holds may be wrong."""

    text: str


def num_processes() -> int:
    """Half of the CPUs that this process may use, at least one and at most MOST_PROCESSES."""
    return min(MOST_PROCESSES, max(1, num_cpus() // 2))


class Died(Exception):
    """The process has reached a limit, or was killed; the message says which."""


class Full(Died):
    """It has reached a limit on all that it holds, of this request and of earlier ones."""


class TooLong(Died):
    """The request has taken the limit of CPU time."""


class Killed(Died):
    """It was killed from outside, probably because the machine's memory ran out. Its request need not be the cause."""


class CannotStart(CapacityError, RuntimeError):
    """It ended by itself; the machine or the installation is the cause, and no request."""


class LimitedProcess:
    """A process with limits that answers pickled requests. The first request, and the first after it died, starts it.

    One thread at a time may call `result`.
    """

    module: ClassVar[str]
    does: ClassVar[str]
    """What it does, in the singular, for messages: "compiles constraints"."""
    limits: ClassVar[Mapping[int, str]]
    """The error message of each exit code; {gib}: the limit of memory in GiB."""
    too_long: str
    """The error message of the limit of CPU time; {cpu_s}: the limit in seconds."""

    pass_fds: tuple[int, ...] = ()
    """Open files that it inherits, under the same numbers."""

    def __init__(self, first_message: tuple[Any, int, int]) -> None:
        """first_message: what its work needs, its limit of memory in bytes and its limit of CPU time for a request in seconds."""
        self._first_message, self._cpu_s = first_message, first_message[2]
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered, self._killed_because = False, ""
        self._lock, self._closed = threading.Lock(), False

    @property
    def pid(self) -> int | None:
        """None before the first request, and after the process has died."""
        return None if self._process is None else self._process.pid

    def result(self, request: object) -> Any:
        """The answer of the process. Raises Died, also for a Defect, RuntimeError if it was closed, and CannotStart."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            code = self._code()
            if code in self.limits:
                raise Full(self.limits[code].format(gib=self._first_message[1] / 2**30)) from None
            if self._closed:
                raise RuntimeError(f"the process that {self.does} was closed") from None
            if code >= 0:  # it never ends by itself while it is asked
                when = "while it worked" if self._has_answered else "at its start"
                raise CannotStart(
                    f"the process that {self.does} ended with {code} {when}; look for a lack of memory, try "
                    f"`python -m {self.module}`, and run the same command again"
                ) from None
            if code == -signal.SIGKILL:
                why = self._killed_because or "its process was killed, probably because the machine has too little memory"
                raise Killed(why) from None
            if code == -signal.SIGXCPU:
                raise TooLong(self.too_long.format(cpu_s=self._cpu_s)) from None
            raise Died(f"its process ended with {code}") from None
        self._has_answered = True
        if isinstance(answer, Defect):
            self.end()
            raise Died(answer.text)
        return answer

    def result_alone(self, request: object) -> Any:
        """As `result`, from a new process, which holds nothing of earlier requests. Raises Killed after MAX_KILLS killed ones."""
        for kills_left in reversed(range(MAX_KILLS)):
            self.end()
            try:
                return self.result(request)
            except Killed:
                if not kills_left:
                    raise
        raise AssertionError

    def kill(self, why: str) -> None:
        """Kill the process if it runs; its request is then `Killed`, with `why` as its message. Any thread may call this."""
        with self._lock:
            if self._process is not None:
                self._killed_because = why
                self._process.kill()

    def close(self) -> None:
        """Kill the process at once. No other one is started."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """Kill the process and so drop all that it holds; the next request starts another one."""
        if self._process is not None:
            self._process.kill()
            self._code()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the process that {self.does} was closed")
            # Each thread of a library reserves memory.
            process = start_module(self.module, pass_fds=self.pass_fds, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
            self._process, self._has_answered, self._killed_because = process, False, ""
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # found again, with its code, when it is asked
            pickle.dump(self._first_message, process.stdin)
        return process

    def _code(self) -> int:
        """The exit code of the process that has died; negative: the signal."""
        with self._lock:
            process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        return process.wait()
