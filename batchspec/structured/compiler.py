"""Compiles schemas, regexes and choices in a process of its own, and keeps what it made: each distinct text is compiled once."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from batchspec.token_automaton import TokenAutomaton, TokenSymbols

CPU_S = 20
"""CPU limit of one constraint, in whole seconds. Most take hundredths of a second."""
MEMORY_BYTES = 4 << 30
KEPT_BYTES = 1 << 30
"""Automata that no request uses are kept up to so many bytes."""
BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Signals that a batch system or a terminal sends to all processes of a job. The compiler blocks them; it ends with the run."""
PASSED_ENVIRONMENT = ("PATH", "TZ", "PYTHON", "LD_LIBRARY_PATH", "LANG", "LC_")


class BadConstraint(ValueError):
    """A constraint without an automaton. code: bad_schema, impossible or large_schema."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class CompileStats:
    """Of the distinct constraints that were compiled."""

    num_compiled: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    most_states: int = 0
    largest_bytes: int = 0


@dataclass(eq=False)
class Compiler:
    """The automata of a job's constraints over its vocabulary.

    end_ids    tokens that end a row
    thinks     an answer may follow a thought, which may begin with a token if may_begin
    """

    vocabulary: TokenSymbols
    end_ids: tuple[int, ...]
    thinks: bool
    may_begin: bool
    cpu_s: int = CPU_S
    memory_bytes: int = MEMORY_BYTES
    stats: CompileStats = field(default_factory=CompileStats)
    _process: subprocess.Popen[bytes] | None = None
    _owner: int = 0
    _kept: OrderedDict[tuple[str, str], TokenAutomaton | BadConstraint] = field(default_factory=OrderedDict)
    _kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def compile(self, kind: str, source: str) -> TokenAutomaton:
        """The automaton of a constraint: kind schema or choice (JSON text), or regex. Raises BadConstraint."""
        with self._lock:
            found = self._kept.get((kind, source))
            if found is None:
                found = self._compiled(kind, source)
                self._keep((kind, source), found)
            self._kept.move_to_end((kind, source))
        if isinstance(found, BadConstraint):
            raise BadConstraint(found.code, str(found))
        return found

    def _keep(self, key: tuple[str, str], found: TokenAutomaton | BadConstraint) -> None:
        self._kept[key] = found
        self._kept_bytes += _size(key, found)
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _size(*self._kept.popitem(last=False))

    def _compiled(self, kind: str, source: str) -> TokenAutomaton | BadConstraint:
        answer = self._ask((kind, source))
        if "error" in answer:
            return BadConstraint(answer["code"], answer["error"])
        seconds = answer.pop("seconds")
        made, stats = TokenAutomaton(**answer, vocabulary=self.vocabulary), self.stats
        stats.num_compiled, stats.seconds = stats.num_compiled + 1, stats.seconds + seconds
        stats.longest_s = max(stats.longest_s, seconds)
        stats.most_states, stats.largest_bytes = max(stats.most_states, made.num_states), max(stats.largest_bytes, made.nbytes)
        return made

    def _ask(self, request: tuple[str, str]) -> dict[str, Any]:
        """The answer of the process; one that died has used up its time or its memory."""
        if self._process is None or self._owner != os.getpid():
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            found: dict[str, Any] = pickle.load(process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            code = self._end()
            if code >= 0:  # it never ends by itself while it is asked
                raise RuntimeError(
                    f"the process that compiles schemas ended with {code}; try python -m batchspec.structured.compile_process"
                ) from None
            why = {
                -signal.SIGXCPU: f"compiling it takes more than {self.cpu_s} s",
                -signal.SIGKILL: "the machine has too little memory",
            }
            found = {"code": "large_schema", "error": why.get(code, f"the process that compiles it ended with {code}")}
        return found

    def _start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ENVIRONMENT)}
        environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # each thread reserves memory
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)  # a child process inherits the mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "batchspec.structured.compile_process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._owner = os.getpid()
        weakref.finalize(self, self._process.kill)
        job = {
            "vocabulary": self.vocabulary, "end_ids": self.end_ids, "thinks": self.thinks, "may_begin": self.may_begin
        }  # fmt: skip
        assert self._process.stdin is not None
        pickle.dump((job, self.memory_bytes, self.cpu_s), self._process.stdin)

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        return process.wait()


def _size(key: tuple[str, str], found: TokenAutomaton | BadConstraint) -> int:
    return len(key[1]) + (found.nbytes if isinstance(found, TokenAutomaton) else len(str(found)))
