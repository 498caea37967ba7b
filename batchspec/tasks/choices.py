"""The scores of choices, from an engine that scores prompts: a request with choices becomes a prompt for each of them, and their
scores one completion.

The prompts of a request share the pages of its own prompt, so that this is computed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from batchspec.records import Choice, Completion, Request
from batchspec.request_stream import RequestStream
from batchspec.tasks.base import Runs

ROUNDING = 2.0**-24
"""Relative rounding error of a probability in fp32: of two that differ by less, the difference counts as this share."""


@dataclass(slots=True)
class _Row:
    request: Request
    scores: dict[int, Completion] = field(default_factory=dict)
    """Of each choice, by its number."""


class _Prompts:
    """A `RequestStream` of the same requests, but for one with choices a prompt for each of them."""

    def __init__(self, requests: RequestStream) -> None:
        self._requests = requests
        self._choices: deque[tuple[Request, int]] = deque()
        """A request, and the number of a choice whose prompt is due."""
        self.rows: dict[int, _Row] = {}
        """Rows with choices that are not all scored, by their index."""

    @property
    def num_ready(self) -> int:
        return len(self._choices) + self._requests.num_ready

    @property
    def ended(self) -> bool:
        return not self._choices and self._requests.ended

    def next_ready(self) -> Request | None:
        if not self._choices:
            new = self._requests.next_ready()
            if new is None or not new.choices:
                return new
            self.rows[new.row_index] = _Row(new)
            self._choices += [(new, number) for number in range(len(new.choices))]
        request, number = self._choices.popleft()
        ids = np.concatenate((request.prompt_ids, np.array(request.choices[number].token_ids, np.int32)))
        return replace(request, prompt_ids=ids, sample_index=number, choices=())

    def scored(self, completion: Completion) -> Completion | None:
        """The completion of a row, with that of its last choice; None before. One without choices has its own."""
        row = self.rows.get(completion.row_index)
        if row is None:
            return completion
        row.scores[completion.sample_index] = completion
        if len(row.scores) < len(row.request.choices):
            return None
        del self.rows[completion.row_index]
        return _completion(row)


def steps_with_choices(engine: Runs, requests: RequestStream) -> Generator[list[Completion]]:
    """As `engine.steps`, for requests that may have choices; the engine gets a prompt for each choice instead."""
    prompts = _Prompts(requests)
    with closing(engine.steps(prompts)) as steps:
        for step in steps:
            yield [done for completion in step if (done := prompts.scored(completion)) is not None]


def _completion(row: _Row) -> Completion:
    """The row's completion, with the choice of the largest share as its text; of failed ones the first."""
    request, scores = row.request, [row.scores[number] for number in range(len(row.scores))]
    failed = next((score for score in scores if score.prompt_logprobs is None), None)
    if failed is not None:
        return failed.replace(sample_index=0, prompt_ids=request.prompt_ids)
    begun = [_sum(score, choice) for score, choice in zip(scores, request.choices, strict=True)]
    logprobs = apart(request.choices, begun)
    compared = [value / choice.length for choice, value in zip(request.choices, logprobs, strict=True)]
    stats = scores[0].stats
    return scores[0].replace(
        prompt_ids=request.prompt_ids,
        prompt_logprobs=None,
        finish_reason="stop",
        text=request.choices[int(np.argmax(compared))].text,
        choice_logprobs=tuple((choice.text, value) for choice, value in zip(request.choices, logprobs, strict=True)),
        choice_probs=shares(compared),
        stats=stats and stats.replace(
            num_prefills=sum(score.stats.num_prefills for score in scores if score.stats),
            prefill_s=sum(score.stats.prefill_s for score in scores if score.stats),
        ),
    )


def _sum(score: Completion, choice: Choice) -> float:
    """Log of the probability that the output begins with the choice's tokens: the sum of theirs."""
    assert score.prompt_logprobs is not None
    return float(score.prompt_logprobs[-len(choice.token_ids) :].sum(dtype=np.float64))


def apart(choices: tuple[Choice, ...], begun: list[float]) -> list[float]:
    """Log of the probability that an output begins with a choice's tokens and with those of no longer choice.

    begun  log of the probability that it begins with the choice's tokens, of each choice
    Of the choices 1 and 10, whose tokens are `1` and `1` `0`, an output 10 counts for the second alone.
    """
    found = []
    for own, value in zip(choices, begun, strict=True):
        longer = [other for other in choices if other is not own and _begins(own, other)]
        nearest = [one for one in longer if not any(_begins(other, one) for other in longer if other is not one)]
        inside = sum(float(np.exp(begun[choices.index(one)] - value)) for one in nearest)
        found.append(value + float(np.log1p(-min(inside, 1 - ROUNDING))))
    return found


def shares(scores: list[float]) -> tuple[float, ...]:
    """The softmax of the scores of a row's choices."""
    weights = np.exp(np.array(scores) - max(scores))
    return tuple((weights / weights.sum()).tolist())


def _begins(first: Choice, second: Choice) -> bool:
    """Whether the second's tokens begin with the first's."""
    return second.token_ids[: len(first.token_ids)] == first.token_ids
