"""The process that checks answers by whole schemas, with limits of time and memory: a pattern of a schema may take any time.

It reads pickles from its input and answers with pickles: first (None, memory in bytes, CPU seconds), then a `Question` for each
answer. The reply is a `Verdict`, or None if the answer is valid. With too little memory the process ends with OUT_OF_MEMORY.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from collections import Counter

from batchspec.process.child_process import OutOfTime, limit_cpu, stopped_after
from batchspec.process.limited_process import OUT_OF_MEMORY
from batchspec.process.machine import lower_limit
from batchspec.structured.answer_checker import Question, Verdict
from batchspec.structured.schema_check import violation

MAX_OUT_OF_TIME = 3
"""Number of answers whose check takes too long, after which those of the same schema are not checked."""


class Checks:
    """The checks of a process. cpu_s: CPU seconds of one."""

    def __init__(self, cpu_s: int) -> None:
        self._cpu_s = cpu_s
        self._out_of_time: Counter[str] = Counter()

    def verdict(self, asked: Question) -> Verdict | None:
        """What is wrong with an answer; None: it is valid. Raises MemoryError."""
        if self._out_of_time[asked.source] >= MAX_OUT_OF_TIME:
            return Verdict(False, f"the checks of {MAX_OUT_OF_TIME} answers by this schema took more than {self._cpu_s} s each")
        limit_cpu(2 * self._cpu_s)  # ends what does not return to Python
        try:
            with stopped_after(self._cpu_s):
                said = _violation(asked)
        except OutOfTime:
            self._out_of_time[asked.source] += 1
            return Verdict(False, f"its check takes more than {self._cpu_s} s")
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except RecursionError:
            return Verdict(False, "it is nested too deeply, or its schema refers to itself without an end")
        except BaseException as error:  # also what packages in Rust raise, which is no Exception
            return Verdict(False, f"{type(error).__name__}: {error}")
        return None if said is None else Verdict(True, said)


def _violation(asked: Question) -> str | None:
    if asked.kind == "schema":
        return violation(asked.source, asked.answer)
    schemas = {tool["name"]: json.dumps(tool["parameters"]) for tool in json.loads(asked.source)["tools"] if tool["parameters"]}
    for call in json.loads(asked.answer):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in schemas and (said := violation(schemas[name], arguments)) is not None:
            return f"tool {name!r}: {said}"
    return None


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    read, write = sys.stdin.buffer, sys.stdout.buffer
    _, memory_bytes, cpu_s = pickle.load(read)
    lower_limit(resource.RLIMIT_AS, memory_bytes)
    checks = Checks(cpu_s)
    while True:
        try:
            pickle.dump(checks.verdict(pickle.load(read)), write)
            write.flush()
        except EOFError:
            return
        except MemoryError:  # also while it writes an answer, which is then incomplete
            os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
