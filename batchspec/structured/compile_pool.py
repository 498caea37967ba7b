"""Processes that compile constraints at the same time, each asked by a thread of its own: cheap constraints first.

The first attempt to compile a constraint has SLICE_S. If it needs more, it is tried again with the full limit when no first
attempt waits. What second attempts may spend without finding a finite automaton is one budget of the pool. When it is spent,
constraints that need more than SLICE_S become lazy automata.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from batchspec.structured.limited_process import OUT_OF_MEMORY, Died, Killed, LimitedProcess

SLICE_S = 0.5
"""CPU limit of a first attempt, in seconds. SLICE_REASON"""
_FIRST, _AGAIN, _END = range(3)
Answer = dict[str, Any]
"""See `answer` of compile_process.py. `retryable`: the cause is the machine or the spent budget, not the constraint."""


class Attempt(NamedTuple):
    """A request: compile a constraint within `cpu_s` seconds of CPU time. The check whether it can be lazy has as much again.

    kind, source  as for `rules_of`
    too_long      why it becomes a lazy automaton if it takes longer
    is_last       whether it does then; if not, the answer is `later`
    is_finite     look for a finite automaton; if not, only check whether it can be a lazy one
    """

    kind: str
    source: str
    cpu_s: float
    too_long: str
    is_last: bool = True
    is_finite: bool = True


@dataclass(slots=True)
class Budget:
    """CPU seconds for second attempts that find no finite automaton: as many for all of them as one may take. Any thread may use
    it."""

    cpu_s: int
    _spent_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attempt(self, kind: str, source: str, *, is_again: bool) -> Attempt:
        """The next attempt for a constraint."""
        left = self.cpu_s - self._spent_s
        cpu_s = max(SLICE_S, left) if is_again else SLICE_S
        too_long = f"compiling it takes more than {self.cpu_s} s"
        if cpu_s < self.cpu_s:
            too_long = f"compiling it takes more than {SLICE_S} s, and a run's {self.cpu_s} s for such constraints are spent"
        return Attempt(kind, source, cpu_s, too_long, is_last=is_again or left <= 0)

    def book(self, attempt: Attempt, answer: Answer) -> Answer:
        """The answer to a last attempt, whose CPU time is spent if it has no finite automaton."""
        if "table" not in answer:
            with self._lock:
                self._spent_s += answer["seconds"]
        if attempt.cpu_s < self.cpu_s and attempt.too_long in (answer.get("lazy"), answer.get("error")):
            answer["retryable"] = True
        return answer


class _Work(NamedTuple):
    kind: str
    source: str
    answer: Future[Answer]


_Tasks = queue.PriorityQueue[tuple[int, int, _Work | None]]
"""_FIRST, _AGAIN or _END, a number in order of arrival, and the work; None: the thread ends."""


class CompilePool:
    """`num` processes. first_message is the first one that each gets: (arguments of `compiled`, memory in bytes, CPU seconds)."""

    def __init__(self, num: int, first_message: tuple[Any, int, int]) -> None:
        self._tasks: _Tasks = queue.PriorityQueue()
        self._numbers = itertools.count()
        self.processes = [CompileProcess(first_message) for _ in range(num)]
        budget = Budget(first_message[2])
        for process in self.processes:
            threading.Thread(target=_serve, args=(self._tasks, process, budget), name="compile", daemon=True).start()
        self.close = weakref.finalize(self, _end, self._tasks, self.processes)
        """Ends the processes and what they compile at present; called with the pool's end too."""

    def submit(self, kind: str, source: str) -> Future[Answer]:
        """The answer about a constraint. The future raises RuntimeError if no process can be started."""
        answer: Future[Answer] = Future()
        self._tasks.put((_FIRST, next(self._numbers), _Work(kind, source, answer)))
        return answer


def _serve(tasks: _Tasks, process: CompileProcess, budget: Budget) -> None:
    """The main function of a thread: answers tasks until it reads None.

    It holds no reference to the pool, so that the pool is collected, and its processes end, with the last user's reference.
    """
    while True:
        turn, number, work = tasks.get()
        if work is None:
            return
        attempt = budget.attempt(work.kind, work.source, is_again=turn == _AGAIN)
        try:
            found = process.ask(attempt)
        except BaseException as error:
            work.answer.set_exception(error)
        else:
            if "later" in found:
                tasks.put((_AGAIN, number, work))
            else:
                work.answer.set_result(budget.book(attempt, found) if attempt.is_last else found)
            del found
        del work, attempt


def _end(tasks: _Tasks, processes: list[CompileProcess]) -> None:
    for number in range(len(processes)):
        tasks.put((_END, number, None))
    for process in processes:
        process.close()


class CompileProcess(LimitedProcess):
    """The process of compile_process.py."""

    module = "batchspec.structured.compile_process"
    limits: ClassVar[Mapping[int, str]] = {OUT_OF_MEMORY: "compiling it takes more than {gib:g} GiB of memory"}

    def ask(self, attempt: Attempt) -> Answer:
        """The answer of the process. If it dies in the last attempt, another one checks whether the constraint can be lazy;
        `error` and `code` if that one dies too."""
        self.too_long = attempt.too_long
        try:
            found: Answer = self.result(attempt)
            return found
        except Died as died:
            if not attempt.is_last:
                return {"later": True}
            first = died
        try:
            found = self.result_alone(attempt._replace(too_long=str(first), is_finite=False))
        except Died as died:
            first, found = died, {"code": "large_schema", "error": str(died)}
        return found | {"seconds": attempt.cpu_s, "retryable": isinstance(first, Killed)}
