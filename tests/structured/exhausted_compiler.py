"""Stands in for the process that compiles constraints, and reaches a limit at a given place.

Run it with `python -m tests.structured.exhausted_compiler`. The text of the constraint is the place, a number of
`tests/structured/exhausted_expander.py`. Lazy automata never reach a limit.
"""

from __future__ import annotations

from typing import Any

from batchspec.structured import compile_process
from batchspec.structured.compile_pool import Attempt
from tests.structured.exhausted_expander import limited


def _answer(attempt: Attempt, **job: object) -> Any:
    made = {"lazy": attempt.too_long}
    return limited(int(attempt.source), made) if attempt.cpu_s and attempt.source.isdigit() else made


if __name__ == "__main__":
    compile_process.answer = _answer
    compile_process.main()
