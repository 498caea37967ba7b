"""Compiles schemas, regexes, choices and grammars in processes of their own, several at a time, and caches the results.

Each distinct text is compiled once while its result is in the cache, which is keyed by a fingerprint of kind and text.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from batchspec.automata.lazy_automaton import LazyAutomaton
from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.errors import OneLine
from batchspec.process.limited_process import num_processes
from batchspec.structured.compile_pool import Answer, CompilePool

CPU_S = 20
"""CPU limit of one constraint, and of all together that have no finite automaton, in whole seconds. Most take hundredths of a
second."""
MEMORY_BYTES = 4 << 30
"""Limit of the address space of each process."""
KEPT_BYTES = 1 << 30
"""Size of the cache in bytes; the least recently used automata are evicted."""


class BadConstraint(OneLine, ValueError):
    """A constraint without an automaton.

    code       bad_schema, unsupported_schema, impossible or large_schema
    retryable  the machine or other constraints are the cause, not this one
    """

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code, self.retryable = code, retryable


Compiled = TokenAutomaton | LazyAutomaton | BadConstraint


@dataclass(slots=True)
class CompileStats:
    """Counts over the distinct constraints that were compiled."""

    num_compiled: int = 0
    seconds: float = 0.0
    """CPU time of all constraints together; `longest_s` is that of the slowest."""
    longest_s: float = 0.0
    num_weaker: int = 0
    """Constraints whose automata allow more than they do, finite and lazy ones."""
    most_states: int = 0
    largest_bytes: int = 0
    lazy: Counter[str] = field(default_factory=Counter)
    """Number of constraints that became lazy automata, by the reason."""


@dataclass(eq=False)
class Compiler:
    """The automata of a job's constraints over its vocabulary. Any thread may use it.

    end_ids    tokens that end a row
    thinks     an answer may follow a thought, which may begin with a token if may_begin
    channels   instead, an answer is a message in the final channel of harmony
    checks     finished answers are checked by whole schemas, so that automata may allow more
    It can be pickled: the copy has an empty cache and starts its own processes.
    """

    vocabulary: TokenSymbols
    end_ids: tuple[int, ...]
    thinks: bool
    may_begin: bool
    channels: bool = False
    checks: bool = False
    cpu_s: int = CPU_S
    memory_bytes: int = MEMORY_BYTES
    stats: CompileStats = field(default_factory=CompileStats)
    _pool: CompilePool | None = None
    _owner: int = 0
    _kept: OrderedDict[bytes, Future[Compiled]] = field(default_factory=OrderedDict)
    """By fingerprint, including those that are still compiled; the least recently used first."""
    _sizes: dict[bytes, int] = field(default_factory=dict)
    """Size in bytes of those that have been compiled, by fingerprint."""
    _kept_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiler, (*self.job.values(), self.checks, self.cpu_s, self.memory_bytes)

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of `compiled` and of `Work` that are the same for all constraints."""
        names = ("vocabulary", "end_ids", "thinks", "may_begin", "channels")
        return {name: getattr(self, name) for name in names}

    def compile(self, kind: str, source: str) -> TokenAutomaton | LazyAutomaton:
        """The automaton of a constraint: kind schema or choice (JSON text), regex or grammar. Waits for it.

        Raises BadConstraint, and RuntimeError if no process can be started.
        """
        found = self.begin(kind, source).result()
        if isinstance(found, BadConstraint):
            # Another one each time: a traceback grows when it is raised again.
            raise BadConstraint(found.code, str(found), retryable=found.retryable)
        return found

    def begin(self, kind: str, source: str) -> Future[Compiled]:
        """As `compile`, without waiting. A BadConstraint is the result of the future, not raised by it."""
        key = fingerprint(kind, source)
        with self._lock:
            if self._owner != os.getpid():  # a fork has no threads, and may have copied futures that no thread will finish
                self._pool, self._owner = None, os.getpid()
                self._kept = OrderedDict((key, found) for key, found in self._kept.items() if key in self._sizes)
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            if self._pool is None:
                self._pool = CompilePool(num_processes(), (self.job | {"checks": self.checks}, self.memory_bytes, self.cpu_s))
            found = self._kept[key] = Future()
            answer = self._pool.submit(kind, source)
        answer.add_done_callback(partial(self._take, key, kind, source, found))
        return found

    def _take(self, key: bytes, kind: str, source: str, found: Future[Compiled], answer: Future[Answer]) -> None:
        """The answer of a process, in the thread that asked it."""
        try:
            made = self._made(answer.result(), kind, source)
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(made)
            self._keep(key, made.nbytes if isinstance(made, TokenAutomaton) else len(str(made)))

    def _made(self, answer: Answer, kind: str, source: str) -> Compiled:
        retryable = answer.get("retryable", False)
        if "error" in answer:
            return BadConstraint(answer["code"], answer["error"], retryable=retryable)
        with self._lock:
            self.stats.num_weaker += answer["is_weaker"]
        if "lazy" in answer:
            with self._lock:
                self.stats.lazy[answer["lazy"]] += 1
            return LazyAutomaton(kind, source, retryable=retryable, is_weaker=answer["is_weaker"])
        seconds = answer.pop("seconds")
        made, stats = TokenAutomaton(**answer, vocabulary=self.vocabulary), self.stats
        with self._lock:
            stats.num_compiled, stats.seconds = stats.num_compiled + 1, stats.seconds + seconds
            stats.longest_s = max(stats.longest_s, seconds)
            stats.most_states, stats.largest_bytes = (
                max(stats.most_states, made.num_states),
                max(stats.largest_bytes, made.nbytes),
            )
        return made

    def _keep(self, key: bytes, nbytes: int) -> None:
        with self._lock:
            self._sizes[key] = nbytes
            self._kept_bytes += nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._sizes) > 1:
                oldest = next(key for key in self._kept if key in self._sizes)
                self._kept_bytes -= self._sizes.pop(oldest)
                del self._kept[oldest]


def fingerprint(kind: str, source: str) -> bytes:
    """A key of 16 bytes for a constraint: equal for equal kind and text."""
    return hashlib.blake2b(f"{kind}:{source}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
