"""Has processes compute states of lazy automata and check ended rows while the engine goes on, one request of an automaton after
the other."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from batchspec.automata.lazy_automaton import Answer, Ask, MachineError, Recheck
from batchspec.process.limited_process import OUT_OF_MEMORY, TOO_MANY_STATES, Died, Full, Killed, LimitedProcess, num_processes
from batchspec.process.own_process import finalize_here
from batchspec.process.threads import start_thread
from batchspec.structured.lazy_dfa import MAX_STATES

CPU_S = 20
"""CPU limit of one state, in whole seconds. Most take hundredths of a second."""
MEMORY_BYTES = 4 << 30
"""Limit of the address space of each process."""
FAILURES = (Died, RuntimeError, OSError)
"""OSError: no process can be started."""


class Expander:
    """Implements `Expanding` for a job. Processes start with the first asks, and end when this object is collected.

    An automaton stays with one process, which numbers its states: the one with the fewest automata at its first ask.
    """

    def __init__(
        self, job: Mapping[str, Any], *, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES, num: int | None = None
    ) -> None:
        """job: the arguments of `Work`; num: maximum number of processes, None: as many as compile."""
        made = (_Lane(_ExpandProcess((dict(job), memory_bytes, cpu_s))) for _ in range(num or num_processes()))
        self._lanes = tuple(made)
        self._lane_of: dict[int, _Lane] = {}
        """By the hash of the automaton: equal hashes only share a process, and long texts are not kept."""
        finalize_here(self, _end, self._lanes)

    def submit(self, ask: Ask) -> Future[Answer]:
        """See `Expanding`."""
        return self._answer_to(ask)

    def recheck(self, asked: Recheck) -> Future[int | str]:
        """See `Expanding`."""
        return self._answer_to(asked)

    def _answer_to(self, asked: Ask | Recheck) -> Future[Any]:
        key = hash(asked.automaton)
        lane = self._lane_of.get(key)
        if lane is None:
            lane = self._lane_of[key] = min(self._lanes, key=lambda lane: lane.num_automata)
            lane.num_automata += 1
        if not lane.has_thread:
            lane.has_thread = True
            start_thread(partial(_serve, lane.tasks, lane.process), "expand")
        found: Future[Any] = Future()
        lane.tasks.put((asked, found))
        return found


class _ExpandProcess(LimitedProcess):
    """A row becomes an error row only if its own states exceed a limit: a request that fails in a process with the states of
    other rows is repeated in a new process without them.

    The states of a process are lost when it ends, so later asks of that epoch get None and come again in a new epoch. A new
    process computes its first ask with no other states in memory and reads nothing ahead. So each epoch answers at least one
    ask, if it can be answered at all, and the rows make progress.
    """

    module = "batchspec.structured.expand_process"
    does = "computes states of constraints"
    limits: ClassVar[Mapping[int, str]] = {
        OUT_OF_MEMORY: "its states take more than {gib:g} GiB of memory",
        TOO_MANY_STATES: f"its texts take more than {MAX_STATES:,} states",
    }
    too_long = "one of its states takes more than {cpu_s} s to compute"
    _epoch, _lost_epoch = -1, -2
    """The newest epoch, and the one whose states were lost with a process. The next process numbers states anew."""
    _reads_ahead = True

    def ask(self, ask: Ask) -> Answer:
        if ask.epoch == self._lost_epoch:
            return None
        if self._epoch == self._lost_epoch:
            self.end()  # the process in which the failed ask was repeated
        self._epoch = ask.epoch
        reads_ahead = ask.reads_ahead and self._reads_ahead and self.pid is not None
        try:
            found: Answer = self.result(replace(ask, reads_ahead=reads_ahead))
            return found
        except FAILURES as error:
            self._lost_epoch = ask.epoch
            # A state that no row had asked for may have taken the time: read no more of them ahead.
            self._reads_ahead &= not reads_ahead or isinstance(error, Full | Killed)
        if not ask.from_beginning:
            return None
        found = self._alone(replace(ask, reads_ahead=False))
        return found if isinstance(found, str) else None

    def recheck(self, asked: Recheck) -> int | str:
        try:
            found: int | str = self.result(asked)
        except FAILURES:
            self._lost_epoch = self._epoch
            found = self._alone(asked)
        return found

    def _alone(self, asked: Ask | Recheck) -> Any:
        """The answer of a process that holds nothing else, or the reason why there is none."""
        try:
            return self.result_alone(asked)
        except (Killed, RuntimeError, OSError) as error:
            return MachineError(error)
        except Died as died:
            return str(died)


@dataclass(slots=True, eq=False)
class _Lane:
    """A process, and the queue of its requests."""

    process: _ExpandProcess
    tasks: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    has_thread: bool = False
    num_automata: int = 0


def _serve(tasks: queue.SimpleQueue[Any], process: _ExpandProcess) -> None:
    """The thread: answers until it reads None. It holds no reference to the expander, as in compile_pool.py."""
    while (task := tasks.get()) is not None:
        asked, found = task
        try:
            if isinstance(asked, Recheck):
                found.set_result(process.recheck(asked))
            else:
                found.set_result(process.ask(replace(asked, reads_ahead=tasks.empty())))
        except Exception as error:  # a row would wait for ever for an answer that never comes
            found.set_exception(error)
        del task, asked, found


def _end(lanes: tuple[_Lane, ...]) -> None:
    for lane in lanes:
        lane.tasks.put(None)
        lane.process.close()
