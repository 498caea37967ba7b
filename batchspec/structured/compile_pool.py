"""Processes that compile constraints at the same time, each asked by a thread of its own: cheap constraints first.

The first attempt to compile a constraint has SLICE_S. If it needs more, it is tried again with the full limit when no first
attempt waits. What attempts may spend without finding a finite automaton is one budget of the pool. When it is spent, constraints
that need more than a first attempt become lazy automata.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from batchspec.process.limited_process import OUT_OF_MEMORY, Died, Killed, LimitedProcess
from batchspec.process.own_process import finalize_here
from batchspec.process.threads import start_thread

SLICE_S = 0.5
"""CPU limit of each step of a first attempt, in seconds: reading the constraint, and making its automaton. Nine of ten schemas of
JSONSchemaBench need less."""
SHORT_S = 0.05
"""The same when first attempts have used up their time. Half of the schemas of JSONSchemaBench need less."""
CHECK_S = 5
"""CPU limit in seconds of reading a constraint when the budget is spent; 250 schemas of JSONSchemaBench took 0.7 at most."""
_FIRST, _AGAIN, _END = range(3)
Answer = dict[str, Any]
"""See `answer` of compile_process.py. `retryable`: the cause is the machine or other constraints, not this one."""


class Attempt(NamedTuple):
    """A request: compile a constraint.

    kind          schema, grammar, regex or choice
    source        its text; of schema and choice as JSON
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
    """CPU time for constraints without a finite automaton. All first attempts together have as many seconds as one constraint may
    take, and as many as finite automata took; so have all second attempts. Any thread may use it.

    cpu_s  limit of one constraint
    """

    cpu_s: int
    _made_s: float = 0.0
    """CPU time of finite automata."""
    _lost_s: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """CPU time of first and of second attempts without one."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def attempt(self, kind: str, source: str, *, is_again: bool) -> Attempt:
        """The next attempt for a constraint. The budget decides whether it becomes a finite or a lazy automaton, which have the
        same masks. An error depends on it only where reading the constraint takes more than CHECK_S."""
        first_left_s, left_s = (self.cpu_s + self._made_s - self._lost_s[again] for again in (False, True))
        if not is_again:
            cpu_s = SLICE_S if first_left_s > 0 else SHORT_S
            return Attempt(kind, source, cpu_s, cpu_s, is_last=False)
        if left_s >= self.cpu_s:
            return Attempt(kind, source, self.cpu_s, self.cpu_s, f"compiling it takes more than {self.cpu_s} s")
        too_long = f"compiling it takes more than {SLICE_S} s, and other constraints have used up the time for such ones"
        had_slice = first_left_s > 0
        cpu_s = left_s if left_s > SLICE_S else 0 if had_slice else SLICE_S
        return Attempt(kind, source, cpu_s, min(CHECK_S, self.cpu_s), too_long)

    def book(self, attempt: Attempt, answer: Answer) -> None:
        """Count the CPU time of an answer, and mark one that would be another one with the full limit."""
        with self._lock:
            if "table" in answer:
                self._made_s += answer["seconds"]
            elif attempt.is_last or "later" in answer:
                self._lost_s[attempt.is_last] += answer["seconds"]
        if answer.get("out_of_time") and attempt.cpu_s < self.cpu_s:
            answer["retryable"] = True


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
            start_thread(partial(_serve, self._tasks, process, budget), "compile")
        self.close = finalize_here(self, _end, self._tasks, self.processes)
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
            budget.book(attempt, found)
            if "later" in found:
                tasks.put((_AGAIN, number, work))
            else:
                work.answer.set_result(found)
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
    does = "compiles constraints"
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
                return {"later": True, "seconds": attempt.cpu_s}
            first = died
        try:
            found = self.result_alone(attempt._replace(too_long=str(first), cpu_s=0))
        except Died as died:
            first, found = died, {"code": "large_schema", "error": str(died)}
        return found | {"seconds": attempt.cpu_s or attempt.check_s, "retryable": isinstance(first, Killed)}
