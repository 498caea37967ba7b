"""The process that compiles schemas, regexes, choices and grammars, which come from the input: with limits of time and memory.

It reads pickles from its input and answers with pickles: first (arguments of `compiled`, memory in bytes, CPU seconds), then for
each constraint (kind, text). The answer is a dictionary: the tables of the automaton, or `error` and `code`. With too little
memory the process ends with OUT_OF_MEMORY instead.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import sys
import time
from typing import Any

from batchspec.child_process import limit_cpu
from batchspec.structured.compile_pool import LAZY, OUT_OF_MEMORY
from batchspec.structured.dfa import dfa_of
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.parse import AFTER_THOUGHT, network_of, rules_of, single_bytes
from batchspec.structured.regex import BadRegex
from batchspec.structured.regular import Impossible, TooLarge
from batchspec.structured.rules import BadGrammar
from batchspec.structured.token_masks import over_tokens
from batchspec.token_automaton import TokenAutomaton, TokenSymbols

MAX_RECURSION = 20_000
FIELDS = ("classes", "table", "masks", "answer", "thought", "either")


class Recursive(ValueError):
    """There is no finite automaton."""


def compiled(
    kind: str, source: str, vocabulary: TokenSymbols, end_ids: tuple[int, ...], *, thinks: bool, may_begin: bool,
    channels: bool = False,
) -> TokenAutomaton:  # fmt: skip
    """The automaton of a constraint; kind and source as for `rules_of`, the others as for `over_tokens`.

    Raises BadSchema, BadGrammar, BadRegex, Impossible, TooLarge; Recursive where there is no finite automaton.
    """
    node = rules_of(kind, source).inlined()
    if node is None:
        raise Recursive("it is recursive")
    dfa = dfa_of(node, AFTER_THOUGHT, single_bytes(vocabulary))
    return over_tokens(dfa, vocabulary, end_ids, thinks=thinks, may_begin=may_begin, channels=channels)


def answer(kind: str, source: str, cpu_s: int, **job: Any) -> dict[str, Any]:
    """The process's answer about one constraint. A kind that begins with LAZY asks only whether it can be followed at all.

    Returns FIELDS and `seconds` (CPU time) of a finite automaton, `lazy` (why it has none), or `code` and `error`. Raises
    MemoryError.
    """
    limit_cpu(cpu_s)
    began = time.process_time()
    try:
        if kind.startswith(LAZY):
            return _lazily(kind.removeprefix(LAZY), source, "", job["vocabulary"])
        try:
            made = compiled(kind, source, **job)
        except (TooLarge, RecursionError, Recursive) as error:
            return _lazily(kind, source, why(error), job["vocabulary"])
    except (BadSchema, BadGrammar, BadRegex) as error:
        return {"code": "bad_schema", "error": str(error)}
    except Impossible as error:
        return {"code": "impossible", "error": f"{error} that the tokenizer can write; correct it or drop the row"}
    except UnicodeEncodeError as error:  # JSON can write "\ud800"
        half = ascii(error.object[error.start])
        return {"code": "bad_schema", "error": f"it holds {half}, half of a surrogate pair, which UTF-8 cannot write; correct it"}
    except (TooLarge, RecursionError) as error:
        return {"code": "large_schema", "error": why(error)}
    except MemoryError:
        raise
    except Exception as error:  # a defect here must not end the job: the row becomes an error row
        return {"code": "bad_schema", "error": unexpected(error)}
    return {name: getattr(made, name) for name in FIELDS} | {"seconds": time.process_time() - began}


def why(error: Exception) -> str:
    """The error as a message about the constraint."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def unexpected(error: Exception) -> str:
    """The message of an error that no check foresaw."""
    return f"it cannot be compiled because of an error in batchspec ({type(error).__name__}: {error}); report it with its text"


def _lazily(kind: str, source: str, reason: str, vocabulary: TokenSymbols) -> dict[str, Any]:
    """The answer about a constraint that becomes a lazy automaton for this reason; raises as `network_of`."""
    network_of(kind, source, vocabulary)
    return {"lazy": reason}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(MAX_RECURSION)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    job, memory_bytes, cpu_s = pickle.load(read)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes,) * 2)
    gc.freeze()
    gc.disable()  # while an automaton is made, nearly nothing is garbage: looking for it takes a sixth of the time
    while True:
        try:
            kind, source = pickle.load(read)
            pickle.dump(answer(kind, source, cpu_s, **job), write)
            write.flush()
        except EOFError:
            return
        except MemoryError:  # also while it writes an answer, which is then incomplete: no other one may follow it
            os._exit(OUT_OF_MEMORY)
        gc.collect()


if __name__ == "__main__":
    main()
