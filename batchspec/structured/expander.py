"""Asks for states of lazy automata in a process of its own, one after the other, while the engine goes on."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from batchspec.lazy_automaton import Answer, Ask
from batchspec.structured.compile_pool import Died, LimitedProcess

CPU_S = 20
"""CPU limit of one state, in whole seconds. Most take hundredths of a second."""
MEMORY_BYTES = 4 << 30


class Expander:
    """What knows the states of a job's lazy automata (`Expanding`). The process starts with the first ask, and ends with this."""

    def __init__(self, job: Mapping[str, Any], *, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        """job: the arguments of `Work`."""
        self._tasks: queue.SimpleQueue[tuple[Ask, Future[Answer]] | None] = queue.SimpleQueue()
        self._process = _ExpandProcess((dict(job), memory_bytes, cpu_s))
        self._has_thread = False
        weakref.finalize(self, _end, self._tasks, self._process)

    def submit(self, ask: Ask) -> Future[Answer]:
        """As of `Expanding`."""
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_serve, args=(self._tasks, self._process), name="expand", daemon=True).start()
        found: Future[Answer] = Future()
        self._tasks.put((ask, found))
        return found


class _ExpandProcess(LimitedProcess):
    module = "batchspec.structured.expand_process"
    _lost_epoch = -1
    """In which a process died: the next one numbers its states otherwise."""

    def ask(self, ask: Ask) -> Answer:
        if ask.epoch == self._lost_epoch:
            return None
        try:
            found: Answer = self.result(ask)
            return found
        except (Died, RuntimeError) as error:
            self._lost_epoch = ask.epoch
            return str(error)


def _serve(tasks: queue.SimpleQueue[Any], process: _ExpandProcess) -> None:
    """A thread: answers until there is a None. It holds no reference to the expander, which therefore ends with its user."""
    while (task := tasks.get()) is not None:
        ask, found = task
        found.set_result(process.ask(ask))
        del task, ask, found


def _end(tasks: queue.SimpleQueue[Any], process: _ExpandProcess) -> None:
    tasks.put(None)
    process.close()
