"""The process that compiles schemas, regexes, choices and grammars, which come from the input: with limits of time and memory.

It reads pickles from its input and answers with pickles: first (arguments of `compiled`, memory in bytes, CPU seconds), then an
`Attempt` for each constraint. The answer is a dictionary: the tables of the automaton, or `later`, `lazy`, or `error` and `code`.
With too little memory the process ends with OUT_OF_MEMORY instead.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import resource
import sys
import time
from typing import Any

from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.process.child_process import OutOfTime, limit_cpu, stopped_after
from batchspec.process.limited_process import OUT_OF_MEMORY
from batchspec.process.machine import lower_limit
from batchspec.process.refusals import refusal
from batchspec.structured.compile_pool import Attempt
from batchspec.structured.dfa import dfa_of
from batchspec.structured.json_schema.leaves import BadSchema
from batchspec.structured.network import Network
from batchspec.structured.parse import AFTER_THOUGHT, rules_of, single_bytes
from batchspec.structured.regex import BadRegex
from batchspec.structured.regular import Impossible, TooLarge
from batchspec.structured.rules import BadGrammar, Rules
from batchspec.structured.token_masks import over_tokens
from batchspec.structured.unsupported import UnsupportedSchema

MAX_RECURSION = 20_000
FIELDS = ("classes", "table", "masks", "answer", "thought", "either")


class Recursive(ValueError):
    """There is no finite automaton."""


def compiled(
    rules: Rules, vocabulary: TokenSymbols, end_ids: tuple[int, ...], *, thinks: bool, may_begin: bool, channels: bool = False
) -> TokenAutomaton:
    """The automaton over tokens of a constraint.

    end_ids    tokens that end a row
    thinks     an answer may follow a thought, which may begin with a token if may_begin
    channels   instead, an answer is a message in the final channel of harmony
    Raises Impossible, TooLarge; Recursive where there is no finite automaton.
    """
    node = rules.inlined()
    if node is None:
        raise Recursive("it is recursive")
    dfa = dfa_of(node, AFTER_THOUGHT, single_bytes(vocabulary))
    return over_tokens(
        dfa, vocabulary, end_ids, thinks=thinks, may_begin=may_begin, channels=channels, calls=rules.of_channel_call
    )


def answer(attempt: Attempt, **job: Any) -> dict[str, Any]:
    """The process's answer about one constraint. `seconds` is the CPU time that it took, and with it comes one of:

    FIELDS           of a finite automaton; with these and with `lazy` also `is_weaker`
    lazy             why it has none: it can be followed as a lazy automaton
    later            the time is over, and this is not the last attempt
    code and error   why it cannot be followed at all
    `out_of_time` comes with `lazy` and `error` if more time might change them. Raises MemoryError.
    """
    began = time.process_time()
    limit_cpu(math.ceil(attempt.cpu_s + 2 * attempt.check_s) + 1)  # ends what does not return to Python
    try:
        found = _found(attempt, **job)
    except OutOfTime:
        said = f"reading it takes more than {attempt.check_s:g} s"
        found = {"code": "large_schema", "error": said, "out_of_time": True} if attempt.is_last else {"later": True}
    except UnsupportedSchema as error:
        found = {"code": "unsupported_schema", "error": str(error)}
    except (BadSchema, BadGrammar, BadRegex) as error:
        found = {"code": "bad_schema", "error": str(error)}
    except Impossible as error:
        found = {"code": "impossible", "error": f"{error} that the tokenizer can write; correct it or drop the row"}
    except UnicodeEncodeError as error:  # JSON can write "\ud800"
        half = ascii(error.object[error.start])
        said = f"it holds {half}, half of a surrogate pair, which UTF-8 cannot write; correct it"
        found = {"code": "bad_schema", "error": said}
    except (TooLarge, RecursionError) as error:
        found = {"code": "large_schema", "error": why(error)}
    except MemoryError:
        raise
    except Exception as error:  # a defect here must not end the job: the row becomes an error row
        found = {"code": "bad_schema", "error": unexpected(error)}
    return found | {"seconds": time.process_time() - began}


def _found(attempt: Attempt, *, checks: bool = False, **job: Any) -> dict[str, Any]:
    """A finite automaton, or why the constraint becomes a lazy one. It is parsed once for both.

    Raises as `compiled` and `Network`, and OutOfTime if it is not known in time whether the constraint can be followed.
    """
    with stopped_after(attempt.check_s):
        rules = rules_of(attempt.kind, attempt.source, job["vocabulary"].marks, checks=checks)
    weaker = {"is_weaker": rules.is_weaker}
    late = not attempt.cpu_s
    try:
        if not late:
            with stopped_after(attempt.cpu_s):
                made = compiled(rules, **job)
                return weaker | {name: getattr(made, name) for name in FIELDS}
        reason = attempt.too_long
    except OutOfTime:
        if not attempt.is_last:
            raise
        late, reason = True, attempt.too_long
    except (TooLarge, RecursionError, Recursive) as error:
        reason = why(error)
    with stopped_after(attempt.check_s):  # after the handlers, which keep what was built
        Network(rules, AFTER_THOUGHT, single_bytes(job["vocabulary"]))
    return weaker | {"lazy": reason, "out_of_time": late}


def why(error: Exception) -> str:
    """The error as a message about the constraint."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def unexpected(error: Exception) -> str:
    """The message of an error that no check foresaw."""
    if (refused := refusal(error)) is not None:
        return f"it cannot be compiled: {refused}"
    return f"it cannot be compiled because of an error in batchspec ({type(error).__name__}: {error}); report it with its text"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(MAX_RECURSION)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    job, memory_bytes, cpu_s = pickle.load(read)
    lower_limit(resource.RLIMIT_AS, memory_bytes)
    answer(Attempt("choice", '["a"]', cpu_s, cpu_s), **job)  # what all constraints share takes time, too: it is made before
    gc.freeze()
    gc.disable()  # while an automaton is made, nearly nothing is garbage: looking for it takes a sixth of the time
    while True:
        try:
            pickle.dump(answer(pickle.load(read), **job), write)
            write.flush()
        except EOFError:
            return
        except MemoryError:  # also while it writes an answer, which is then incomplete: no other one may follow it
            os._exit(OUT_OF_MEMORY)
        gc.collect()


if __name__ == "__main__":
    main()
