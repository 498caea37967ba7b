"""A row's thought, from its tokens alone: inside or outside, what its budget forces, and its parts at the end.

`ThoughtTracker` is the rule; everything else that asks about thoughts pushes tokens through one. A thought that has used its
budget is closed: before the next token would be drawn, the closing tokens are put there instead. So the tokens depend on the row
alone, as everywhere: what rounds emitted after that place is thrown away.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from batchspec.records import Thinking


class Kind(Enum):
    """What a token is."""

    THOUGHT = "thought"
    ANSWER = "answer"
    BEGIN = "begin"
    """The mark that begins a thought."""
    END = "end"
    """The mark that ends one."""
    END_OF_OUTPUT_SO_FAR = "end of output so far"
    """An end mark without a begin, in the prompt neither: all tokens before it were a thought."""


class ThoughtTracker:
    """Says of each token of an output, in order, whether it is thought, answer or a mark between them."""

    def __init__(self, thinking: Thinking) -> None:
        self._begin_id, self._end_id = thinking.begin_id, thinking.end_id
        self.inside = thinking.opened is True
        self._unknown = thinking.opened is None
        """The prompt does not say whether the output begins with a thought, and no mark has come yet."""

    def push(self, token: int) -> Kind:
        """The next token."""
        if token == self._begin_id:
            self.inside, self._unknown = True, False
            return Kind.BEGIN
        if token == self._end_id:
            kind = Kind.END_OF_OUTPUT_SO_FAR if self._unknown else Kind.END
            self.inside = self._unknown = False
            return kind
        return Kind.THOUGHT if self.inside else Kind.ANSWER


class ThinkingBudget:
    """Follows a growing list of output tokens and says when the tokens that close a thought must come."""

    def __init__(self, thinking: Thinking, stop_ids: Collection[int]) -> None:
        self._budget, self._closing, self._stop_ids = thinking.budget, thinking.closing, stop_ids
        self._tracker = ThoughtTracker(thinking)
        self._num_read = self._num_used = 0
        self.closed_a_thought = False

    def forced(self, tokens: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """How many of the tokens are kept, and what must follow them; None where they keep to the budget.

        `tokens` are those of the last call, as far as they were kept, and more.
        """
        closing = self._closing
        while True:
            if self._tracker.inside and self._budget is not None and self._num_used >= self._budget:
                there = tokens[self._num_read : self._num_read + len(closing)]
                same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(there, closing, strict=False))))
                if same < len(closing):
                    return self._num_read + same, closing[same:]
                for token in closing:
                    self._push(token)
                self.closed_a_thought = True
            elif self._num_read == len(tokens) or tokens[self._num_read] in self._stop_ids:
                return None
            else:
                self._push(tokens[self._num_read])

    def _push(self, token: int) -> None:
        self._num_read += 1
        self._num_used += self._tracker.push(token) is Kind.THOUGHT

    @property
    def left(self) -> int | None:
        """Tokens until the budget can be used up; None outside of a thought and without a budget."""
        return None if self._budget is None or not self._tracker.inside else max(0, self._budget - self._num_used)


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
    """The thoughts and the answer of an output, its stop id left out."""
    tracker, parts = ThoughtTracker(thinking), Parts()
    if tracker.inside:
        parts.thoughts.append([])
    for token in tokens:
        was_inside = tracker.inside
        match tracker.push(token):
            case Kind.BEGIN:
                if not was_inside:
                    parts.thoughts.append([])
            case Kind.END_OF_OUTPUT_SO_FAR:
                parts.thoughts, parts.answer = [parts.answer], []
            case Kind.THOUGHT:
                parts.thoughts[-1].append(token)
            case Kind.ANSWER:
                parts.answer.append(token)
    parts.inside = tracker.inside
    return parts
