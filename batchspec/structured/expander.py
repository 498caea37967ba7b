"""Has a process compute states of lazy automata, and check ended rows, one after the other, while the engine goes on."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from batchspec.lazy_automaton import Answer, Ask, Recheck
from batchspec.structured.compile_pool import Died, LimitedProcess

CPU_S = 20
"""CPU limit of one state, in whole seconds. Most take hundredths of a second."""
MEMORY_BYTES = 4 << 30
"""Limit of the process's address space."""


class Expander:
    """Implements `Expanding` for a job. The process starts with the first ask, and ends when this object is collected."""

    def __init__(self, job: Mapping[str, Any], *, cpu_s: int = CPU_S, memory_bytes: int = MEMORY_BYTES) -> None:
        """job: the arguments of `Work`."""
        self._tasks: queue.SimpleQueue[tuple[Ask | Recheck, Future[Any]] | None] = queue.SimpleQueue()
        self._process = _ExpandProcess((dict(job), memory_bytes, cpu_s))
        self._has_thread = False
        weakref.finalize(self, _end, self._tasks, self._process)

    def submit(self, ask: Ask) -> Future[Answer]:
        """As of `Expanding`."""
        return self._answer_to(ask)

    def recheck(self, asked: Recheck) -> Future[int | str]:
        """As of `Expanding`."""
        return self._answer_to(asked)

    def _answer_to(self, asked: Ask | Recheck) -> Future[Any]:
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_serve, args=(self._tasks, self._process), name="expand", daemon=True).start()
        found: Future[Any] = Future()
        self._tasks.put((asked, found))
        return found


class _ExpandProcess(LimitedProcess):
    module = "batchspec.structured.expand_process"
    _epoch = _lost_epoch = -1
    """The newest epoch, and that in which a process died. The next process numbers states anew: asks of that epoch get None."""
    _reads_ahead = True

    def ask(self, ask: Ask) -> Answer:
        if ask.epoch == self._lost_epoch:
            return None
        self._epoch = ask.epoch
        ask = replace(ask, reads_ahead=ask.reads_ahead and self._reads_ahead)
        try:
            found: Answer = self.result(ask)
            return found
        except (Died, RuntimeError) as error:
            self._lost_epoch = ask.epoch
            if (
                ask.reads_ahead
            ):  # a state that no row asked for may have taken too much: the row asks once more, for its own alone
                self._reads_ahead = False
                return None
            return str(error)

    def recheck(self, asked: Recheck) -> int | str:
        why = ""
        for _ in range(2):  # the second process has nothing in its memory but this automaton
            try:
                found: int | str = self.result(asked)
                return found
            except (Died, RuntimeError) as error:
                self._lost_epoch, why = self._epoch, str(error)
        return why


def _serve(tasks: queue.SimpleQueue[Any], process: _ExpandProcess) -> None:
    """The thread: answers until it reads None. It holds no reference to the expander, as in compile_pool.py."""
    while (task := tasks.get()) is not None:
        asked, found = task
        if isinstance(asked, Recheck):
            found.set_result(process.recheck(asked))
        else:
            found.set_result(process.ask(replace(asked, reads_ahead=tasks.empty())))
        del task, asked, found


def _end(tasks: queue.SimpleQueue[Any], process: _ExpandProcess) -> None:
    tasks.put(None)
    process.close()
