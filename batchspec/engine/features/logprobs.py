"""Log-probabilities of output tokens (`output.logprobs`): log-softmax of the target's logits before any rule is applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchspec.engine.rounds.records import RoundLog, RoundResult, Slots
from batchspec.engine.rounds.vocabulary import Vocabulary
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.records import NO_LOGPROBS, Completion


@dataclass(frozen=True, slots=True)
class LogprobReader:
    """Reads log-probabilities on the device. num_top: N, the number of likeliest tokens that are read too."""

    num_top: int

    def read(self, raw: Tensor, ids: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
        """float32 [T] of the tokens ids; if N is not 0 also int32 and float32 [T, N] ids and values of the likeliest, in
        order."""
        normaliser = vocabulary.log_normaliser(raw)
        chosen = (vocabulary.logit_of(raw, ids) - normaliser).float()
        if not self.num_top:
            return (chosen,)
        top_ids, top = vocabulary.largest(raw, self.num_top)
        return chosen, top_ids, (top - normaliser.unsqueeze(1)).float()


class Logprobs(RowFeature):
    """Keeps them by place in the row's output: tokens that a feature puts in have none. All of a row come from one run. They are
    read of all rows of a round, and kept of those that ask for them."""

    continues = False

    def __init__(self, slots: SlotTable, num_top: int) -> None:
        self._slots, self._num_top = slots, num_top
        self._rows: dict[RequestState, _Kept] = {}

    def arrive(self, state: RequestState) -> bool:
        if state.request.num_logprobs == NO_LOGPROBS:
            return False
        self._rows[state] = _Kept(self._num_top)
        return True

    def read(self, launch: UnreadLaunch, result: RoundResult, slots: Slots, log: RoundLog) -> None:
        if not result.read:  # no token was emitted
            return
        chosen, *top = (values.numpy() for values in result.read)
        num_before = (self._slots.num_tokens - self._slots.prompt_len)[slots]
        for slot, first, count in zip(slots.tolist(), num_before.tolist(), log.num_kept.tolist(), strict=True):
            if (kept := self._rows.get(self._slots.at(slot))) is not None:
                kept.put(first, [chosen[slot, :count], *(values[slot, :count] for values in top)])

    def finish(self, state: RequestState, done: Completion) -> Completion:
        kept = self._rows.pop(state)
        if done.token_ids is None:
            return done
        logprobs, *top = kept.of(len(done.token_ids), forced=state.forced)
        most = self._num_top if state.request.num_logprobs is None else state.request.num_logprobs
        return done.replace(logprobs=logprobs, top_logprobs=(top[0][:, :most], top[1][:, :most]) if top and most else None)


class _Kept:
    """Of one row: float32 [tokens], and int32 and float32 [tokens, N] if N is not 0."""

    def __init__(self, num_top: int) -> None:
        self._none = [np.full(1, np.nan, np.float32)]
        if num_top:
            self._none += [np.full((1, num_top), -1, np.int32), np.full((1, num_top), np.nan, np.float32)]
        self._parts: list[tuple[int, list[NDArray[Any]]]] = []
        """Index of the first token, and the values, in the order in which they were read: later ones count."""

    def put(self, first: int, values: list[NDArray[Any]]) -> None:
        self._parts.append((first, [part.copy() for part in values]))

    def of(self, count: int, forced: Sequence[range]) -> list[NDArray[Any]]:
        """The values of the first `count` tokens; none (NaN, ids of -1) for tokens that the model did not choose."""
        found = [np.repeat(none, count, axis=0) for none in self._none]
        for first, values in self._parts:
            for field, part in zip(found, values, strict=True):
                field[first : first + len(part)] = part[: max(0, count - first)]
        for span in forced:
            for field, none in zip(found, self._none, strict=True):
                field[span.start : span.stop] = none
        return found
