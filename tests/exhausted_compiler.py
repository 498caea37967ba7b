"""The process that compiles constraints as it reaches its limits, unless only a lazy automaton is asked for: `python -m
tests.exhausted_compiler`. The text of the constraint says where."""

from __future__ import annotations

from typing import Any

from batchspec.structured import compile_process
from batchspec.structured.compile_pool import LAZY
from tests.exhausted_expander import limited


def _answer(kind: str, source: str, cpu_s: int, **job: object) -> Any:
    made = {"lazy": kind}
    return made if kind.startswith(LAZY) else limited(int(source), made)


if __name__ == "__main__":
    compile_process.answer = _answer
    compile_process.main()
