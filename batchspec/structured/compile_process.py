"""The process that compiles schemas, regexes and choices, which come from the input: with limits on CPU time and memory.

It reads pickles from its input and answers with pickles: first (arguments of `compiled`, memory in bytes, CPU seconds), then for
each constraint (kind, text). The answer is a dictionary: the tables of the automaton, or `error` and `code`.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchspec.structured.json_schema import schema_node
from batchspec.structured.merge import BadSchema
from batchspec.structured.regex import BadRegex, regex_node
from batchspec.structured.regular import Alt, Impossible, Node, Repeat, TooLarge, dfa_of, text
from batchspec.structured.token_masks import over_tokens
from batchspec.token_automaton import TokenAutomaton, TokenSymbols

AFTER_THOUGHT = Repeat(text("\n"), 0, 2)
"""White space that models write between a thought and the answer."""
MAX_RECURSION = 20_000
FIELDS = ("classes", "table", "masks", "answer", "thought", "either")


def node_of(kind: str, source: str) -> Node:
    """The texts of a constraint: kind schema (JSON text), regex, or choice (JSON text of a list of strings)."""
    if kind == "regex":
        return regex_node(source)
    if kind == "choice":
        return Alt(tuple(text(choice) for choice in json.loads(source)))
    return schema_node(json.loads(source))


def single_bytes(vocabulary: TokenSymbols) -> NDArray[np.bool_]:
    """Which bytes are tokens by themselves. A text of these can always be gone on with, whatever tokens came before."""
    lengths = np.diff(vocabulary.starts)
    symbols = vocabulary.symbols[vocabulary.starts[:-1][lengths == 1]]
    found = np.zeros(256, bool)
    found[symbols[symbols < 256]] = True
    return found


def compiled(
    kind: str, source: str, vocabulary: TokenSymbols, end_ids: tuple[int, ...], *, thinks: bool, may_begin: bool,
    channels: bool = False,
) -> TokenAutomaton:  # fmt: skip
    """Raises BadSchema, BadRegex, Impossible, TooLarge."""
    dfa = dfa_of(node_of(kind, source), AFTER_THOUGHT, single_bytes(vocabulary))
    return over_tokens(dfa, vocabulary, end_ids, thinks=thinks, may_begin=may_begin, channels=channels)


def answer(kind: str, source: str, cpu_s: int, **job: Any) -> dict[str, Any]:
    """What the process says about one constraint."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + cpu_s, resource.RLIM_INFINITY))
    began = time.process_time()
    try:
        made = compiled(kind, source, **job)
    except (BadSchema, BadRegex) as error:
        return {"code": "bad_schema", "error": str(error)}
    except Impossible as error:
        return {"code": "impossible", "error": f"{error} that the tokenizer can write; correct it or drop the row"}
    except (TooLarge, RecursionError, MemoryError) as error:
        known = {RecursionError: "it is nested too deeply", MemoryError: "compiling it takes more memory than allowed"}
        return {"code": "large_schema", "error": known.get(type(error), str(error))}
    return {name: getattr(made, name) for name in FIELDS} | {"seconds": time.process_time() - began}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(MAX_RECURSION)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    job, memory_bytes, cpu_s = pickle.load(read)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes,) * 2)
    while True:
        try:
            kind, source = pickle.load(read)
        except EOFError:
            return
        pickle.dump(answer(kind, source, cpu_s, **job), write)
        write.flush()


if __name__ == "__main__":
    main()
