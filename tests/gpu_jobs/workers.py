"""Processes that run cases. If one dies or hangs, its case fails, and a new process goes on with the next case."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest

from batchspec.errors import ConfigError
from tests.gpu_jobs.cases import GROUP, Case, draw_case, draw_group
from tests.gpu_jobs.entry_points import ROOT, is_fatal, run_case
from tests.gpu_jobs.plain import Plain

CASE_S = 600
"""A case that takes longer hangs. Fifty long rows in float64, one at a time, take two minutes on a card of their own."""
MOST_LINES = 4
"""Rows that are shown of a failed case."""


@dataclass(kw_only=True)
class Summary:
    cases: int = 0
    rows: int = 0
    tokens: int = 0
    accepted: int = 0
    preempted: int = 0
    resumed: int = 0
    seconds: float = 0
    unfinished: int = 0
    """Cases that were not begun, or not ended, in the time."""
    failures: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"refused {count} x: {text}" for text, count in self.refused.most_common()]
        return "\n".join([
            *lines,
            f"{self.cases} cases, {self.rows:,} rows, {self.tokens:,} tokens, {self.accepted:,} accepted drafts, "
            f"{self.preempted:,} rows prefilled again, {self.resumed} jobs resumed, {self.seconds:.0f} s, "
            f"{self.unfinished} cases not run, {len(self.failures)} failures",
        ])


def hunt(
    cases: Sequence[int], *, seconds: float, workers: int, folder: Path, gpu: bool, ranks: int = 1,
    show: Callable[[str], None] = print,
) -> Summary:
    """Runs the cases and shows a paragraph for each that fails.

    seconds  after which all workers are killed
    folder   of the models, kept for the next time, and of the workers' logs
    ranks    that compute each case together
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for number in dict.fromkeys(case // GROUP for case in cases):
        groups.put([case for case in cases if case // GROUP == number])
    summary, began = Summary(unfinished=len(cases)), time.monotonic()
    crew = [_Worker(index, groups, began + seconds, folder, gpu, ranks, summary, show) for index in range(workers)]
    for worker in crew:
        worker.start()
    for worker in crew:
        worker.join()
    summary.seconds = time.monotonic() - began
    return summary


_SUMMARY_LOCK = threading.Lock()


class _Worker(threading.Thread):
    """Owns one process at a time."""

    def __init__(
        self, index: int, groups: queue.SimpleQueue[list[int]], deadline: float, folder: Path, gpu: bool, ranks: int,
        summary: Summary, show: Callable[[str], None],
    ) -> None:
        super().__init__(daemon=True)
        self._groups, self._deadline, self._summary, self._show = groups, deadline, summary, show
        self._gpu, self._ranks = gpu, ranks
        self._folder, self._log = folder, folder / f"worker{index}.log"
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            while time.monotonic() < self._deadline:
                left = self._groups.get_nowait()
                while left and time.monotonic() < self._deadline:
                    left = self._work(left)
        except queue.Empty:
            pass
        finally:
            self._end()

    def _work(self, cases: list[int]) -> list[int]:
        """Has the process run these cases of one group; returns those that are not run yet, if it died or hung."""
        process = self._process or self._begin()
        assert process.stdin is not None
        process.stdin.write(json.dumps(cases) + "\n")
        process.stdin.flush()
        left, why = list(cases), ""
        while left and not why:
            due = min(self._deadline, time.monotonic() + CASE_S)
            try:
                line = self._lines.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                if time.monotonic() >= self._deadline:
                    return left
                line, why = "", f"no end after {CASE_S} s"
            if line:
                self._note(left.pop(0), json.loads(line))
            elif not why:
                why = f"the process died with {process.wait()}"
        if why:
            self._note(left.pop(0), {"failure": f"{why}: {_end_of(self._log)}"})
        if why or process.poll() is not None:
            self._end()
        return left

    def _note(self, case: int, result: dict[str, Any]) -> None:
        with _SUMMARY_LOCK:
            self._summary.cases += 1
            self._summary.unfinished -= 1
            for name in ("rows", "tokens", "accepted", "preempted", "resumed"):
                setattr(self._summary, name, getattr(self._summary, name) + result.get(name, 0))
            if refused := result.get("refused"):
                self._summary.refused[refused] += 1
            if failure := result.get("failure"):
                text = f"FAIL case {case}: {failure}\n  repeat: python -m tests.gpu_jobs {case} {case + 1}"
                text += f" --ranks {self._ranks}" if self._ranks > 1 else ""
                self._summary.failures.append(text)
                self._show(text)

    def _begin(self) -> subprocess.Popen[str]:
        where = [str(self._folder), "cuda" if self._gpu else "cpu", str(self._ranks)]
        arguments = [sys.executable, "-m", "tests.gpu_jobs", "--work", *where]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=ROOT,
                start_new_session=True,
            )
        own = self._lines = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, own), daemon=True).start()
        return self._process

    def _end(self) -> None:
        """Ends the process and those that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _read(source: TextIO, lines: queue.SimpleQueue[str]) -> None:
    for line in source:
        lines.put(line)
    lines.put("")


def _end_of(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-12:])


def work(folder: Path, *, gpu: bool, ranks: int) -> None:
    """A worker's process: reads lists of cases of a group, one a line; writes a line of JSON about each case."""
    from tests.helpers.runs import make_jobs_quick

    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what jobs print goes to the log
    make_jobs_quick(pytest.MonkeyPatch())
    plain: Plain | None = None
    for line in sys.stdin:
        for number in json.loads(line):
            print(f"==== case {number}", file=sys.stderr, flush=True)
            result: dict[str, Any] = {}
            case: Case | None = None
            fatal = False
            try:
                if plain is None or plain.group.number != number // GROUP:
                    if plain is not None:
                        plain.close()
                    plain = Plain(draw_group(number // GROUP, folder, gpu=gpu, ranks=ranks))
                case = draw_case(number, plain.group)
                outcome = run_case(case, plain)
                result = asdict(outcome)
                if outcome.lines:
                    result["failure"] = _told(case, outcome.lines)
            except ConfigError as error:
                result = {"refused": f"(plain) {error}"}
            except Exception as error:  # whatever it is, the next case is run
                traceback.print_exc()
                fatal = is_fatal(error)
                frame = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__} at {frame.filename}:{frame.lineno}: {error}"
                result = {"failure": text if case is None else _told(case, [text])}
                if plain is not None and "rows" not in plain.__dict__:
                    plain = None  # the reference run itself failed: begin it anew
            print(json.dumps(result), file=results, flush=True)
            if fatal:
                os._exit(1)


def _told(case: Case, lines: list[str]) -> str:
    """A failure, for a reader: rows that differ, what they ask for, and all keys."""
    told = [f"[{case.group.setting}] {case.entry_point}, {len(lines)} rows differ"]
    rows = {row["id"]: row for row in case.group.rows}
    for line in lines[:MOST_LINES]:
        found = next((word.partition("/")[0] for word in line.split() if word.partition("/")[0] in rows), "")
        asks = {name: value for name, value in rows.get(found, {}).items() if value is not None and name != case.group.kind}
        told += [
            f"  {line}",
            *([f"    asks {str(asks)[:500]}, {len(str(rows[found][case.group.kind]))} characters of prompt"] if found else []),
        ]
    plain = {key: value for key, value in case.group.keys.items() if key != "model.path"}
    told += [f"  job {plain}, prompts {case.group.kind}, {len(rows)} rows"]
    return "\n".join([*told, f"  plain {case.group.plain}", f"  run {list(case.runs)}, eager {case.eager}"])
