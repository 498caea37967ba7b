"""Renders templates in a separate process: one that loops, takes too much memory or crashes fails its row, not the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.nodes import Name

from batchspec.config.schema import TEMPLATE_DATE
from batchspec.errors import BatchspecError, CapacityError, CheckpointError, OneLine, RendererKilled
from batchspec.process.child_process import start_module
from batchspec.process.own_process import finalize_here
from batchspec.text import template_process
from batchspec.text.template_process import Limit
from batchspec.text.text_bytes import LongText

CPU_S = 3
"""CPU limit of one text, in whole seconds; a chat of 100,000 tokens takes hundredths of a second."""
MEMORY_BYTES = 1 << 30
KILLED = "it was killed, probably because the machine has too little memory"


class NullValue(OneLine, ValueError):
    """A template of rows needs the value of a null; the message is its place in the row."""


class Templates:
    """The templates of a checkpoint, by name. `where` is the prefix of error messages, `date` what they take for today."""

    strict = False
    """As `template_process.environment` has it."""

    def __init__(self, sources: Mapping[str, str], where: str, *, date: str = TEMPLATE_DATE) -> None:
        """Raises CheckpointError if one is not valid Jinja. Templates are compiled by `check`, or before the first chat."""
        self._sources, self._where, self._date = dict(sources), where, date
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._lock = 0, threading.Lock()
        self._compiled = False
        """Whether all templates compiled in some process: if they do not in another one, the machine is the cause."""
        self.variables = set[str]()
        """Every name that one of them reads, its own variables included."""
        self.reads: dict[str, list[str]] = {}
        """Of each strict template, once compiled: the variables that it must be given, and the functions that it calls."""
        for name, source in self._sources.items():
            try:
                parsed = template_process.environment(date, strict=self.strict).parse(source)
                self.variables |= {node.name for node in parsed.find_all(Name) if node.ctx == "load"}
            except TemplateSyntaxError as error:
                raise self._bad(name, f", line {error.lineno}: {error.message}") from None
            except RecursionError:
                raise self._bad(name, ": it is nested too deeply") from None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has a rendering process of its own."""
        return {**self.__dict__, "_process": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __bool__(self) -> bool:
        return bool(self._sources)

    def check(self) -> None:
        """Compile all templates. Raises CheckpointError if one does not compile, and CapacityError if the process is killed."""
        with self._lock:
            try:
                self._ensure_running()
            except RendererKilled as error:
                raise CapacityError(
                    f"{self._where}: the process that renders templates could not start ({error}); look for a lack of memory, "
                    f"try `python -m {template_process.__name__}`, and run the same command again"
                ) from None

    def source(self, name: str) -> str:
        return self._sources[name]

    def render(self, name: str, variables: Mapping[str, Any], limit: Limit | None = None) -> str:
        """The rendered text, or only its end if the limit asks for that.

        Raises ValueError if the template refuses the chat or takes too much time or memory, NullValue if a strict one needs the
        value of a null, RendererKilled if the machine has too little memory, and LongText if the text exceeds the limit.
        """
        request = {"name": name, "variables": dict(variables), "limit": (limit or Limit()).facts()}
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            for _ in range(2):
                self._ensure_running()
                answer = self._ask(line)
                if not answer.get("killed"):
                    break
        if "error" in answer:
            raise (RendererKilled if answer.get("killed") else ValueError)(answer["error"])
        if "null" in answer:
            raise NullValue(answer["null"])
        if "too_long" in answer:
            assert limit is not None
            raise LongText(limit.message(answer["too_long"]))
        return str(answer["text"])

    def _running(self) -> bool:
        return self._process is not None and self._owner == os.getpid()

    def _ensure_running(self) -> None:
        """Start the process if there is none, and once more if the machine ends it.

        Raises RendererKilled if it ends that one too, and CheckpointError if a template does not compile.
        """
        if self._running():
            return
        try:
            self._start()
        except RendererKilled:
            self._start()

    def _start(self) -> None:
        self._process = start_module(template_process.__name__)
        self._owner = os.getpid()
        finalize_here(self, self._process.kill)
        begun = self._answer()
        if "error" in begun:
            raise RendererKilled(f"at its start {begun['error']}")
        request = {
            "sources": self._sources, "date": self._date, "strict": self.strict, "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES,
        }
        answer = self._ask(json.dumps(request).encode() + b"\n")
        errors = answer["errors"] if "errors" in answer else {"/".join(self._sources): answer["error"]}
        for name, problem in errors.items():
            if self._process is not None:
                self._end()
            if answer.get("killed") or self._compiled:
                raise RendererKilled(problem)
            raise self._bad(name, f": {problem}")
        self._compiled, self.reads = True, answer.get("reads", {})

    def _ask(self, line: bytes) -> dict[str, Any]:
        """The answer of the process; {"error": reason, "killed": whether by SIGKILL} if it dies."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died, and writes no answer
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        answer = process.stdout.readline()
        if answer.endswith(b"\n"):  # else it died while it wrote
            found: dict[str, Any] = json.loads(answer)
            return found
        code = self._end()
        why = {-signal.SIGXCPU: f"it computes for more than {CPU_S} s", -signal.SIGKILL: KILLED}
        return {"error": why.get(code, f"its process ended with {code}"), "killed": code == -signal.SIGKILL}

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # close() writes what the process has not read
                    pipe.close()
        return process.wait()

    def _bad(self, name: str, problem: str) -> BatchspecError:
        return CheckpointError(f"{self._where}: chat template {name!r}{problem}; set model.chat_template to a valid Jinja file")
