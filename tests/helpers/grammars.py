"""Grammars for tests, over the letters of `tests.helpers.automata`, and what they derive by the definition: Earley's
recogniser."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

from batchspec.automata.lazy_automaton import Answer, Ask, LazyAutomaton, Recheck
from batchspec.model.target import Target
from batchspec.process.limited_process import Defect, Died, Full
from batchspec.records import Request
from batchspec.structured.expand_process import Work
from batchspec.structured.expander import _ExpandProcess
from batchspec.structured.lazy_dfa import TooManyStates
from tests.helpers.automata import BEGIN, END, EOS, TOKENS, VOCABULARY, tokens_that_may_follow, written
from tests.helpers.engines import tiny_target


def _quoted(char: str) -> str:
    return '"\\n"' if char == "\n" else f'"{char}"'


@dataclass(frozen=True)
class Grammar:
    """Rules of capital letters, each with its alternatives as strings of letters and names of rules; S is the start."""

    rules: dict[str, tuple[str, ...]]

    @property
    def gbnf(self) -> str:
        ways = {name: " | ".join(" ".join(map(self._part, way)) or '""' for way in found) for name, found in self.rules.items()}
        return "\n".join(f"{'root' if name == 'S' else name} ::= {found}" for name, found in ways.items())

    @property
    def lark(self) -> str:
        """Names of rules are small letters there, and a rule may not be called as a letter of the text."""
        ways = {name: " | ".join(" ".join(map(self._lark_part, way)) for way in found) for name, found in self.rules.items()}
        return "\n".join(f"{'start' if name == 'S' else f'r_{name.lower()}'}: {found}" for name, found in ways.items())

    def _part(self, one: str) -> str:
        return "root" if one == "S" else one if one in self.rules else _quoted(one)

    def _lark_part(self, one: str) -> str:
        return "start" if one == "S" else f"r_{one.lower()}" if one in self.rules else _quoted(one)

    def __hash__(self) -> int:
        return hash(tuple(self.rules.items()))


GRAMMARS = (
    Grammar({"S": ("aSb", "c")}),
    Grammar({"S": ("aSa", "bSb", "c", "")}),
    Grammar({"S": ("", "PS"), "P": ("aSb", "cSd")}),
    Grammar({"S": ("SaT", "T"), "T": ("cSd", "b", "bb")}),
    Grammar({"S": ("SaS", "SbS", "cSd", "d")}),
    Grammar({"S": ("AB",), "A": ("aAb", ""), "B": ("cBd", "é", "\n")}),
    Grammar({"S": ("aS", "bT"), "T": ("cT", "dS", "d")}),
)
"""Brackets, palindromes, two kinds of brackets, left recursion, ambiguity, empty rules, recursion at the end alone."""


Item = tuple[str, str, int, int]
"""A rule's name, one of its alternatives, how much of that was read, and at which length of the text it began."""


@cache
def _items(grammar: Grammar, text: str) -> frozenset[Item]:
    """What may have been read of which rules at the end of the text (Earley 1970); nothing if no text begins so."""
    at = len(text)
    if at:
        before = _items(grammar, text[:-1])
        here = {(name, way, dot + 1, begin) for name, way, dot, begin in before if way[dot : dot + 1] == text[-1]}
    else:
        here = {("S", way, 0, 0) for way in grammar.rules["S"]}
    size = -1
    while len(here) != size:
        size = len(here)
        for name, way, dot, begin in list(here):
            if dot == len(way):
                callers = here if begin == at else _items(grammar, text[:begin])
                here |= {(n, w, d + 1, b) for n, w, d, b in callers if w[d : d + 1] == name}
            elif way[dot] in grammar.rules:
                here |= {(way[dot], other, 0, at) for other in grammar.rules[way[dot]]}
    return frozenset(here)


def _last(grammar: Grammar, text: str) -> tuple[bool, bool]:
    """Whether some text of the grammar begins with this one, and whether it is one. Every rule has a text."""
    items = _items(grammar, text)
    return bool(items), any(name == "S" and dot == len(way) and not begin for name, way, dot, begin in items)


def is_begun(grammar: Grammar, data: bytes) -> bool:
    """Whether a text begins with these bytes."""
    try:
        return _last(grammar, data.decode())[0]
    except UnicodeDecodeError:  # é is two bytes, of which the first alone is there
        return data.endswith(b"\xc3") and is_begun(grammar, data[:-1] + "é".encode())


def is_text(grammar: Grammar, data: bytes) -> bool:
    try:
        return _last(grammar, data.decode())[1]
    except UnicodeDecodeError:
        return False


def may_follow(grammar: Grammar, out: Sequence[int], token: int, *, thought: bool | None = None) -> bool:
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
    ends, data = bool(answer) and answer[-1] == EOS, written(answer)
    if not all(isinstance(TOKENS[one], bytes) for one in answer[: len(answer) - ends]):
        return False
    skipped = {data[count:] for count in range(3 if after else 1) if data[:count] == b"\n" * count}
    return any((is_text if ends else is_begun)(grammar, one) for one in skipped)


def grammar_tokens(
    req: Request, grammar: Grammar, *, thought: bool | None = None, window: int | None = 5, target: Target | None = None
) -> list[int]:
    """The definition of an output that follows a grammar."""
    return tokens_that_may_follow(
        req, lambda out, token: may_follow(grammar, out, token, thought=thought), target or tiny_target(window=window)
    )


def lazy(grammar: Grammar) -> LazyAutomaton:
    return LazyAutomaton("grammar", grammar.gbnf)


def work(*, thinks: bool = False, channels: bool = False) -> Work:
    return Work(VOCABULARY, (EOS,), thinks=thinks, may_begin=thinks, channels=channels)


class LateAnswer(Future[Any]):
    """An answer that is there only when it was asked for a few times."""

    polls = 0

    def done(self) -> bool:
        self.polls -= 1
        return self.polls < 0


class ScarceProcess(_ExpandProcess):
    """Computes in this process. It is full as soon as all automata together have more than `most` states, or at a real limit."""

    def __init__(self, most: int = 1 << 30, *, thinks: bool = False, channels: bool = False) -> None:
        self.most, self.num_started, self._thinks, self._channels = most, 0, thinks, channels
        self._work: Work | None = None

    @property
    def pid(self) -> int | None:
        return None if self._work is None else 1

    def end(self) -> None:
        self._work = None

    def result(self, request: object) -> Any:
        if self._work is None:
            self._work = work(thinks=self._thinks, channels=self._channels)
            self.num_started += 1
        assert isinstance(request, Ask | Recheck)
        try:
            found = self._work.recheck(request) if isinstance(request, Recheck) else self._work.answer(request)
        except (MemoryError, TooManyStates):
            self._work = None
            raise Full("full") from None
        if isinstance(found, Defect):
            self._work = None
            raise Died(found.text)
        if sum(known.dfa.num_states for known in self._work._known.values()) > self.most:
            self._work = None
            raise Full("full")
        return found


class ExpandScarcely:
    """Two processes that are full with more than `most` states each. Answers come late."""

    def __init__(self, seed: int, most: int = 1 << 30, **options: bool) -> None:
        self._random, self.processes = random.Random(seed), [ScarceProcess(most, **options) for _ in range(2)]

    def submit(self, ask: Ask) -> Future[Answer]:
        return self._late(self._process(ask).ask(ask))

    def recheck(self, asked: Recheck) -> Future[int | str]:
        return self._late(self._process(asked).recheck(asked))

    def _process(self, asked: Ask | Recheck) -> ScarceProcess:
        return self.processes[len(asked.automaton.source) % 2]

    def _late(self, answer: object) -> Future[Any]:
        found = LateAnswer()
        found.polls = self._random.randint(0, 4)
        found.set_result(answer)
        return found


class ExpandLate:
    """In this process. Answers come late; now and then the states are lost, as if a process had ended."""

    def __init__(self, seed: int, *, most_polls: int = 4, lost: float = 0.0, thinks: bool = False) -> None:
        self._work, self._random, self._most, self._lost = work(thinks=thinks), random.Random(seed), most_polls, lost
        self._lost_epoch, self.num_asks = -1, 0

    def submit(self, ask: Ask) -> Future[Answer]:
        self.num_asks += 1
        found = LateAnswer()
        found.polls = self._random.randint(0, self._most)
        if self._random.random() < self._lost:
            self._lost_epoch = ask.epoch
        found.set_result(None if ask.epoch == self._lost_epoch else self._work.answer(ask))
        return found

    def recheck(self, asked: Recheck) -> Future[int | str]:
        found = LateAnswer()
        found.polls = self._random.randint(0, self._most)
        found.set_result(self._work.recheck(asked))
        return found
