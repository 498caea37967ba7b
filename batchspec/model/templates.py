"""Chat templates, rendered in a process of their own: one that loops, grows or crashes costs its chat, not the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from batchspec.errors import CheckpointError
from batchspec.model import template_process
from batchspec.model.template_process import Limit
from batchspec.model.text_bytes import LongText

CPU_S = 3
"""Of one chat, in whole seconds; a chat of 100,000 tokens takes hundredths of one."""
MEMORY_BYTES = 1 << 30
NOT_ITS_OWN = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}
"""Signals that a batch system or a terminal sends to every process: this one ends when the run does."""
NEEDED = ("PATH", "TZ", "PYTHON", "LD_LIBRARY_PATH", "LANG", "LC_")
"""Beginnings of the environment's names that the process gets: credentials are none of its business."""


class Templates:
    """The templates of a checkpoint, by name. `where` begins what is said of them."""

    def __init__(self, sources: Mapping[str, str], where: str) -> None:
        """Raises CheckpointError where one is not Jinja. They are compiled when the first chat is rendered, or by `check`."""
        self._sources, self._where = dict(sources), where
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._lock = 0, threading.Lock()
        for name, source in self._sources.items():
            try:
                template_process.environment().parse(source)
            except TemplateSyntaxError as error:
                raise self._bad(name, f", line {error.lineno}: {error.message}") from None
            except RecursionError:
                raise self._bad(name, ": it is nested too deeply") from None

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def __bool__(self) -> bool:
        return bool(self._sources)

    def check(self) -> None:
        """Raises CheckpointError where one does not compile."""
        with self._lock:
            if not self._running():
                self._start()

    def source(self, name: str) -> str:
        return self._sources[name]

    def render(self, name: str, variables: Mapping[str, Any], limit: Limit | None = None) -> str:
        """The text. Raises ValueError where the template refuses, or takes too much time or memory, and LongText where the text
        exceeds the limit: what is not wanted of it stays in the process.
        """
        asked = {"name": name, "variables": dict(variables), "limit": (limit or Limit()).facts()}
        line = json.dumps(asked, default=str).encode() + b"\n"
        with self._lock:
            if not self._running():
                self._start()
            answer = self._ask(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        if "too_long" in answer:
            assert limit is not None
            raise LongText(limit.said(answer["too_long"]))
        return str(answer["text"])

    def _running(self) -> bool:
        return self._process is not None and self._owner == os.getpid()

    def _start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if name.startswith(NEEDED)}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_ITS_OWN)  # a new process has its maker's mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(template_process.__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._owner = os.getpid()
        weakref.finalize(self, self._process.kill)
        asked = {"sources": self._sources, "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}
        answer = self._ask(json.dumps(asked).encode() + b"\n")
        errors = answer["errors"] if "errors" in answer else {"/".join(self._sources): answer["error"]}
        for name, said in errors.items():
            if self._process is not None:
                self._end()
            raise self._bad(name, f": {said}")

    def _ask(self, line: bytes) -> dict[str, Any]:
        """The answer; where the process dies of it, why."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        code = self._end()
        why = {-signal.SIGXCPU: f"it computes for more than {CPU_S} s", -signal.SIGKILL: "the machine has too little memory"}
        return {"error": why.get(code, f"its process ended with {code}")}

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.wait()

    def _bad(self, name: str, said: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: chat template {name!r}{said}; set model.chat_template to a valid Jinja file")
