"""Automata for tests: a vocabulary of 31 tokens over a few letters, and what each may follow, found byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from batchspec.automata.token_automaton import BEGIN_THOUGHT, END_THOUGHT, OTHER, TokenAutomaton, TokenSymbols
from batchspec.model.target import Target
from batchspec.records import Request
from batchspec.structured.dfa import Dfa, dfa_of
from batchspec.structured.regex import regex_node
from batchspec.structured.regular import Repeat, text
from batchspec.structured.token_masks import over_tokens
from tests.helpers.engines import VOCAB, _draw, full_logits, tiny_target

EOS, BEGIN, END = 0, 1, 2
WORDS = [
    "a", "b", "c", "d", "ab", "ba", "bb", "abc", "cab", "aa", "cc", "abab", "é", "dd", "bcd", "ca", "\n", "da", "aab", "cba",
    "bab", "ddd", "acc", "bca", "cd", "dab",
]
TOKENS: list[bytes | int] = [OTHER, BEGIN_THOUGHT, END_THOUGHT, *(word.encode() for word in WORDS), b"\xc3", b"\xa9"]
assert len(TOKENS) == VOCAB
PATTERNS_OF_LETTERS = (
    "(ab|c)*d", "[a-d]{3,9}", "a?b?c?d?", "abcab", "(a|bb)+(cd)?", "\\n?[^a]*a", "é+d", "(abc|dab){2,3}", "d|dd|ddd", "[ab]*",
)
VOCABULARY = TokenSymbols.of(TOKENS)


def finite(made: object) -> TokenAutomaton:
    """What was compiled, which has a table of all its states."""
    assert isinstance(made, TokenAutomaton), made
    return made


def written(tokens: Sequence[int]) -> bytes:
    """The bytes of tokens that are text."""
    return b"".join(piece for token in tokens if isinstance(piece := TOKENS[token], bytes))


@cache
def dfa(pattern: str, breaks: int = 1) -> Dfa:
    """breaks: maximum number of line breaks between thought and answer."""
    present = np.zeros(256, bool)
    present[[token[0] for token in TOKENS if isinstance(token, bytes) and len(token) == 1]] = True
    return dfa_of(regex_node(pattern), Repeat(text("\n"), 0, breaks), present)


@cache
def automaton(pattern: str, *, thinks: bool = False, breaks: int = 1) -> TokenAutomaton:
    return over_tokens(dfa(pattern, breaks), VOCABULARY, (EOS,), thinks=thinks, may_begin=thinks)


def state_after(pattern: str, data: bytes, *, after_thought: bool = False) -> int:
    """State of the automaton over bytes; 0: no text begins with these."""
    found = dfa(pattern)
    state = found.starts[after_thought]
    for byte in data:
        state = int(found.next[state, found.classes[byte]])
    return state


def may_follow(pattern: str, out: Sequence[int], token: int, *, thought: bool | None = None) -> bool:
    """Whether `token` may follow the output, by the definition. thought: the output begins in one; None: it has none."""
    inside, answer, after = thought is True, list[int](), False
    for one in (*out, token):
        if one == END and inside:
            inside, after = False, True
        elif one == BEGIN and thought is not None and not inside and not answer and not after:
            inside = True
        elif not inside:
            answer.append(one)
        elif one == EOS:
            return False
    if answer and answer[-1] == EOS:
        state = state_after(pattern, written(answer[:-1]), after_thought=after)
        return bool(dfa(pattern).final[state])
    return not {EOS, BEGIN, END} & set(answer) and state_after(pattern, written(answer), after_thought=after) > 0


def constrained_tokens(
    req: Request, pattern: str | None, *, thought: bool | None = None, window: int | None = 5, target: Target | None = None
) -> list[int]:
    """The definition of an output that follows a pattern."""
    if pattern is None:
        return tokens_that_may_follow(req, lambda *_: True, target or tiny_target(window=window))
    return tokens_that_may_follow(
        req, lambda out, token: may_follow(pattern, out, token, thought=thought), target or tiny_target(window=window)
    )


@lru_cache(maxsize=1 << 15)
def _logits(target: Target, ids: tuple[int, ...]) -> Tensor:
    """`full_logits`, which many tests ask for after the same tokens. Not to be written to."""
    return full_logits(target, ids)


@torch.inference_mode()
def tokens_that_may_follow(req: Request, may: Callable[[Sequence[int], int], bool], target: Target) -> list[int]:
    """The definition of a constrained output: one token at a time, the logits of all others than those allowed are -inf. Before
    min_new_tokens a stop id is not allowed either, unless nothing else is."""
    prompt, params = req.prompt_ids.tolist(), req.sampling
    out: list[int] = []
    while len(out) < req.max_new_tokens:
        logits = _logits(target, (*prompt, *out)).clone()
        for token in {*prompt, *out}:
            value = logits[token]
            logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        allowed = [token for token in range(VOCAB) if may(out, token)]
        if len(out) < req.min_new_tokens and set(allowed) - set(req.stop_ids):
            allowed = [token for token in allowed if token not in req.stop_ids]
        logits[[token for token in range(VOCAB) if token not in allowed]] = -torch.inf
        out.append(_draw(logits, params, req.seed, len(prompt) + len(out)))
        if out[-1] in req.stop_ids:
            break
    return out
