"""A row's thought, from its tokens alone: where it stands, what its budget asks for, and its parts at the end.

A thought that has used its budget is closed: before the next token would be drawn, the closing tokens are put there instead. So
the tokens depend on the row alone, as everywhere: what rounds emitted behind that place is thrown away.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from batchspec.records import Thinking


class Walk:
    """Follows a growing list of output tokens: inside a thought or not, and how much of the budget is used."""

    def __init__(self, thinking: Thinking, stop_ids: Collection[int]) -> None:
        self._thinking, self._stop_ids = thinking, stop_ids
        self.inside = thinking.opened is True
        self.used = 0
        self.closed_by_budget = False
        self._at = 0

    def forced(self, tokens: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """How many of the tokens stand, and what must follow them; None where they keep to the budget.

        `tokens` are those of the last call, as far as they stood, and more.
        """
        thinking, closing = self._thinking, self._thinking.closing
        while True:
            if self.inside and thinking.budget is not None and self.used >= thinking.budget:
                there = tokens[self._at : self._at + len(closing)]
                same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(there, closing, strict=False))))
                if same < len(closing):
                    return self._at + same, closing[same:]
                self._at += len(closing)
                self.used += len(closing) - 1
                self.inside, self.closed_by_budget = False, True
            elif self._at == len(tokens) or tokens[self._at] in self._stop_ids:
                return None
            else:
                self._step(tokens[self._at])

    def _step(self, token: int) -> None:
        self._at += 1
        if token in (self._thinking.begin_id, self._thinking.end_id):
            self.inside = token == self._thinking.begin_id
        elif self.inside:
            self.used += 1

    @property
    def left(self) -> int | None:
        """Tokens until the budget can be used up; None outside of a thought and without a budget."""
        budget = self._thinking.budget
        return None if budget is None or not self.inside else max(0, budget - self.used)


@dataclass(slots=True)
class Parts:
    """An output without the tokens that begin and end thoughts."""

    thoughts: list[list[int]] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    inside: bool = False
    """It ended in the middle of a thought."""

    @property
    def num_reasoning(self) -> int:
        return sum(map(len, self.thoughts))


def split_thoughts(tokens: Sequence[int], thinking: Thinking) -> Parts:
    """The thoughts and the answer of an output, its stop id left out.

    An end that no begin came before, in the prompt neither, ends a thought that began with the output.
    """
    parts = Parts(inside=thinking.opened is True)
    if parts.inside:
        parts.thoughts.append([])
    unsaid = thinking.opened is None
    for token in tokens:
        if token == thinking.begin_id:
            if not parts.inside:
                parts.thoughts.append([])
            parts.inside, unsaid = True, False
        elif token == thinking.end_id:
            if unsaid:
                parts.thoughts, parts.answer = [parts.answer], []
            parts.inside = unsaid = False
        else:
            (parts.thoughts[-1] if parts.inside else parts.answer).append(token)
    return parts
