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
"""CPU limit of each step of a first attempt, in seconds: reading the constraint, and making its automaton. Nine of ten schemas of
JSONSchemaBench need less."""
CHECK_S = 5
"""CPU limit in seconds of reading a constraint when the budget is spent; 250 schemas of JSONSchemaBench took 0.7 at most."""
_FIRST, _AGAIN, _END = range(3)
Answer = dict[str, Any]
"""See `answer` of compile_process.py. `retryable`: the cause is the machine or other constraints, not this one."""


class Attempt(NamedTuple):
    """A request: compile a constraint.

    kind, source  as for `rules_of`
    cpu_s         CPU seconds for making a finite automaton; 0: only check whether it can be a lazy one
    check_s       CPU seconds for reading it, and again for that check
    too_long      why it becomes a lazy automaton if `cpu_s` is not enough
    is_last       whether it does then; if not, the answer is `later`
    """

    kind: str
    source: str
    cpu_s: float
    check_s: float
    too_long: str = ""
    is_last: bool = True


@dataclass(slots=True)
class Budget:
    """CPU time for second attempts that find no finite automaton: as many seconds for all of them as one may take, and as many as
    finite automata took. So hostile constraints can at most double the time that a job compiles. Any thread may use it.

    cpu_s  limit of one constraint
    """

    cpu_s: int
    left_s: float
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attempt(self, kind: str, source: str, *, is_again: bool) -> Attempt:
        """The next attempt for a constraint. The budget decides whether it becomes a finite or a lazy automaton, which have the
        same masks. An error depends on it only where reading the constraint takes more than CHECK_S."""
        if not is_again:
            return Attempt(kind, source, SLICE_S, SLICE_S, is_last=False)
        if self.left_s >= self.cpu_s:
            return Attempt(kind, source, self.cpu_s, self.cpu_s, f"compiling it takes more than {self.cpu_s} s")
        too_long = f"compiling it takes more than {SLICE_S} s, and other constraints have used up the time for such ones"
        return Attempt(kind, source, self.left_s if self.left_s > SLICE_S else 0, min(CHECK_S, self.cpu_s), too_long)

    def book(self, attempt: Attempt, answer: Answer) -> Answer:
        """Count the CPU time of an answer, and mark one that would be another one with the full limit."""
        with self._lock:
            if "table" in answer:
                self.left_s += answer["seconds"]
            elif attempt.is_last:
                self.left_s -= answer["seconds"]
        if answer.get("out_of_time") and attempt.cpu_s < self.cpu_s:
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
        budget = Budget(cpu_s=first_message[2], left_s=first_message[2])
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
                work.answer.set_result(budget.book(attempt, found))
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
        self.too_long = f"reading it takes more than {attempt.check_s:g} s"  # what takes `cpu_s` alone is stopped, not killed
        try:
            found: Answer = self.result(attempt)
            return found
        except Died as died:
            if not attempt.is_last:
                return {"later": True}
            first = died
        try:
            found = self.result_alone(attempt._replace(too_long=str(first), cpu_s=0))
        except Died as died:
            first, found = died, {"code": "large_schema", "error": str(died)}
        return found | {"seconds": attempt.cpu_s or attempt.check_s, "retryable": isinstance(first, Killed)}
