"""A row's thoughts, from its tokens alone: which tokens are thought, what the budget forces, and the parts of the output.

`tracker_of` returns the one tracker that tells thoughts from answers; all code about thoughts pushes tokens through it. A thought
that has used up its budget is closed: the closing tokens take the place of the next token. What rounds have emitted after that
place is discarded, so the tokens depend on the row alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from batchspec.engine.features.channels import ChannelTracker
from batchspec.engine.features.token_kinds import Header, Kind, Tracker
from batchspec.engine.slots.request_state import NEVER, NO_TOKEN, RequestState, Watch
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.records import Completion, Request, Thinking


class ThinkingBudgets(RowFeature):
    """Closes thoughts that have used up their budget."""

    def __init__(self) -> None:
        self._rows: dict[RequestState, ThinkingBudget] = {}

    def arrive(self, state: RequestState) -> bool:
        request = state.request
        if request.thinking is None:
            return False
        budget = self._rows[state] = _budget_of(request)
        state.forced = budget.closings
        return True

    def keep(self, state: RequestState, tokens: Sequence[int]) -> Sequence[int]:
        """If an earlier run's smaller limit cut off some of the last closing tokens, the others are removed too: all of them are
        forced again, and counted once."""
        forced = _budget_of(state.request).forced(tokens)  # the row's own reads none of them: another feature may not keep them
        return tokens if forced is None else tokens[: forced[0]]

    def examine(self, state: RequestState) -> Watch | None:
        budget, thinking = self._rows[state], state.request.thinking
        assert thinking is not None
        if (forced := budget.forced(state.tokens)) is not None:
            state.replace(*forced)
            budget.forced(state.tokens)  # it reads the closing tokens
        if thinking.budget is None:
            return None
        left = budget.left
        begin_id = NO_TOKEN if thinking.begin_id is None else thinking.begin_id
        return Watch(NEVER if left is None else len(state.tokens) + left, begin_id)

    def finish(self, state: RequestState, done: Completion) -> Completion:
        budget = self._rows.pop(state)
        if done.token_ids is None:
            return done
        budget.forced(state.tokens)
        closed = any(closing.start < len(state.tokens) for closing in budget.closings)  # not one that a stop string cut off
        return done.replace(reasoning_truncated=closed)


def _budget_of(request: Request) -> ThinkingBudget:
    assert request.thinking is not None
    return ThinkingBudget(request.thinking, request.stop_ids, request.device_limit)


class ThoughtTracker(Tracker):
    """The tracker for a pair of think tokens."""

    def __init__(self, thinking: Thinking) -> None:
        super().__init__()
        self._begin_id, self._end_id = thinking.begin_id, thinking.end_id
        self.inside = thinking.opened is True
        self._unknown = thinking.opened is None
        """Whether the prompt does not say if the output begins with a thought, and no think token has come yet."""

    def push(self, token: int) -> Kind:
        """The kind of the next token."""
        if token == self._begin_id:
            self.inside, self._unknown = True, False
            return Kind.BEGIN
        if token == self._end_id:
            kind = Kind.END_OF_OUTPUT_SO_FAR if self._unknown else Kind.END
            self.inside = self._unknown = False
            return kind
        return Kind.THOUGHT if self.inside else Kind.ANSWER


def tracker_of(thinking: Thinking) -> Tracker:
    """The tracker of a row's output tokens: by a pair of think tokens, or by harmony's channels."""
    return ThoughtTracker(thinking) if thinking.channels is None else ChannelTracker(thinking.channels, thinking.header)


class ThinkingBudget:
    """Follows a growing list of output tokens and tells when the tokens that close a thought must come."""

    def __init__(self, thinking: Thinking, stop_ids: Collection[int], limit: int) -> None:
        """limit: maximum number of output tokens of the row."""
        self._budget, self._closing, self._stop_ids, self._limit = thinking.budget, thinking.closing, stop_ids, limit
        self._tracker = tracker_of(thinking)
        self._num_read = self._num_used = 0
        self._is_cut = False
        """Whether the row ended before the last closing token."""
        self.closings: list[range] = []
        """Positions of the closing tokens of each thought that used up the budget, whether they were forced or drawn. Tokens
        after the end of the row are left out."""

    def forced(self, tokens: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """The number of tokens to keep, and the tokens that must follow them, up to the end of the row. None while the budget is
        not used up, or if these tokens follow already.

        `tokens` begin with the kept tokens of the last call. Once the row has ended they may be fewer, if a stop string cut some.
        """
        while True:
            if self._is_cut:
                return None
            if self._tracker.inside and self._budget is not None and self._num_used >= self._budget:
                closing = self._closing_here()
                there = range(self._num_read, self._num_read + len(closing))
                if tuple(tokens[there.start : there.stop]) != closing:
                    return self._num_read, closing
                self.closings.append(there)
                self._is_cut = len(closing) < len(self._closing)
                for token in closing:
                    self._push(token)
            elif self._num_read >= len(tokens) or tokens[self._num_read] in self._stop_ids:
                return None
            else:
                self._push(tokens[self._num_read])

    def _closing_here(self) -> tuple[int, ...]:
        """The closing tokens after those read so far, up to the row's limit or to a stop id among them."""
        closing = self._closing[: max(0, self._limit - self._num_read)]
        ends = (index + 1 for index, token in enumerate(closing) if token in self._stop_ids)
        return closing[: next(ends, len(closing))]

    def _push(self, token: int) -> None:
        self._num_read += 1
        self._num_used += self._tracker.push(token) is Kind.THOUGHT

    @property
    def left(self) -> int | None:
        """Number of tokens until the budget can be used up; None outside of a thought and without a budget."""
        return None if self._budget is None or not self._tracker.inside else max(0, self._budget - self._num_used)


def num_closing_tokens(request: Request, tokens: Sequence[int]) -> int:
    """Number of closing tokens in `tokens`, the whole output of the row. Only thoughts that used up the budget have any."""
    if request.thinking is None:
        return 0
    budget = ThinkingBudget(request.thinking, request.stop_ids, len(tokens))
    budget.forced(tokens)
    return sum(map(len, budget.closings))


@dataclass(slots=True)
class Call:
    """A tool call, or any other message with a recipient."""

    header: list[int]
    """The header's tokens, special tokens included."""
    arguments: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Parts:
    """An output split into thoughts, answer and tool calls, without the tokens that begin and end them."""

    thoughts: list[list[int]] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    inside: bool = False
    """Whether the output ended inside a thought."""
    breaks: list[int] = field(default_factory=list)
    """Indices in `answer` at which a new message begins."""
    calls: list[Call] = field(default_factory=list)

    @property
    def num_reasoning(self) -> int:
        return sum(map(len, self.thoughts))

    def answers(self) -> list[list[int]]:
        """The messages of the answer; one empty message if there is none."""
        bounds = [0, *self.breaks, len(self.answer)]
        found = [self.answer[begin:end] for begin, end in itertools.pairwise(bounds) if begin < end]
        return found or [[]]


def split_thoughts(tokens: Sequence[int], thinking: Thinking) -> Parts:
    """The thoughts, the answer and the tool calls of an output, its stop id left out."""
    tracker, parts = tracker_of(thinking), Parts()
    if tracker.inside:
        parts.thoughts.append([])
    if tracker.in_call:  # the prompt begins the call
        parts.calls.append(Call(tracker.header))
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
            case Kind.HEADER:
                parts.breaks.append(len(parts.answer))
            case Kind.BEGIN_CALL:
                parts.calls.append(Call(tracker.header))
            case Kind.CALL:
                parts.calls[-1].arguments.append(token)
        _add_unfinished(parts, tracker.take_dropped())
    parts.inside = tracker.inside
    _add_unfinished(parts, tracker.finish())
    return parts


def _add_unfinished(parts: Parts, header: Header | None) -> None:
    """Add a header whose message never began: with a recipient it is a call; otherwise what is not part of a header is text."""
    if header is None:
        return
    if header.is_call:
        parts.calls.append(Call(header.tokens))
    elif header.text:
        parts.breaks.append(len(parts.answer))
        parts.answer += header.text
        parts.breaks.append(len(parts.answer))
