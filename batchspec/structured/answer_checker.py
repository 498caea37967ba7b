"""Checks finished answers by whole schemas, where their automata obeyed weaker ones. This module does not import torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from batchspec.process.limited_process import OUT_OF_MEMORY, Died, LimitedProcess
from batchspec.process.own_process import finalize_here
from batchspec.records import SCHEMA_UNCHECKED, SCHEMA_VIOLATED, Completion, RowError

CPU_S = 2
"""CPU limit of one check, in whole seconds. Most take less than a thousandth."""
MEMORY_BYTES = 2 << 30
"""Limit of the address space of the process."""


class Question(NamedTuple):
    """Is an answer valid?

    kind, source  its constraint: schema, or tool_choice as `forced_calls.call_rules` reads it
    answer        a JSON text: the answer, or the list of its tool calls
    """

    kind: str
    source: str
    answer: str


class Verdict(NamedTuple):
    """What is wrong with an answer: it violates the schema, or it could not be checked."""

    is_checked: bool
    said: str


class AnswerChecker:
    """Any thread may use it. Its process starts with the first answer. It can be pickled: the copy starts its own process."""

    def __init__(self) -> None:
        self._process: _CheckProcess | None = None
        self._owner, self._lock = 0, threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerChecker, ()

    def checked(self, completion: Completion) -> Completion:
        """The completion; with status `invalid`, and `error` saying why, if its answer ended by itself and violates its schema
        or cannot be checked. Raises RuntimeError if no process can be started."""
        if completion.unchecked is None or completion.num_undecoded is not None:
            return completion
        (kind, source), done = completion.unchecked, completion.replace(unchecked=None)
        answer = done.text if kind == "schema" else done.tool_calls
        if not done.has_whole_answer or answer is None:
            return done
        verdict = self._verdict(Question(kind, source, answer))
        if verdict is None:
            return done
        code = SCHEMA_VIOLATED if verdict.is_checked else SCHEMA_UNCHECKED
        said = verdict.said if verdict.is_checked else f"the answer could not be checked by its schema: {verdict.said}"
        return done.replace(
            status="invalid", error=RowError(code=code, stage="check", message=f"{kind}: {said}", retryable=False)
        )

    def _verdict(self, question: Question) -> Verdict | None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # a fork must not write to its parent's process
                self._process, self._owner = _CheckProcess((None, MEMORY_BYTES, CPU_S)), os.getpid()
                finalize_here(self, self._process.close)
            try:
                found: Verdict | None = self._process.result(question)
            except Died as died:
                return Verdict(False, str(died))
            return found


class _CheckProcess(LimitedProcess):
    module = "batchspec.structured.check_process"
    does = "checks answers"
    limits: ClassVar[Mapping[int, str]] = {OUT_OF_MEMORY: "its check takes more than {gib:g} GiB of memory"}
    too_long = "its check takes more than {cpu_s} s"
