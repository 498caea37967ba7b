"""Stands in for the process that compiles constraints, and reaches a limit at a given place.

Run it with `python -m tests.exhausted_compiler`. The text of the constraint is the place, a number of
`tests/exhausted_expander.py`. Lazy automata never reach a limit.
"""

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
