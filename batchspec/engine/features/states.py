"""What tasks make of hidden states: values of the state after each prompt's last token, from prefill passes without rounds.

A row's values are computed in the pass in which its prompt ends. Earlier tokens matter by their K and V alone, so rows share
pages as rows that decode do, and layers after the last one that keeps something compute the last tokens alone.

N rows of a pass, H hidden, D values of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import PagePools
from batchspec.engine.features.scoring import end_log, padded_end_log
from batchspec.engine.prefill.padded import PaddedBatch, PaddedPass
from batchspec.engine.prefill.passes import Prefilled, PrefillPass, flat_batch, prefilling
from batchspec.engine.rounds.records import RoundLog, RoundResult, Slots
from batchspec.engine.rounds.round import Round
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.open_requests import NON_FINITE
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import Features, RowFeature
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.step import Segment
from batchspec.model.target import Target
from batchspec.model.vocabulary import token_logits_of_ranks
from batchspec.packed_batch import SCORED_TOKENS
from batchspec.records import Completion, RowError

SUMMED = 2048
"""Tokens whose states are added at a time: as many are copied to fp32."""
ValuesOf = Callable[[Target, Tensor], Tensor]
"""Hidden states [N, H] -> values float32 [N, D] (float64 of a float64 model), the same on every rank."""


def last_states(target: Target, hidden: Tensor) -> Tensor:
    """A `ValuesOf`: the states themselves, [N, H]."""
    return hidden.to(torch.float64 if hidden.dtype is torch.float64 else torch.float32)


def token_logits(token_ids: Sequence[int], target: Target, hidden: Tensor) -> Tensor:
    """A `ValuesOf` once token_ids is bound: the logits of these tokens, [N, tokens]. A rank computes the logits of its whole
    part of the vocabulary for at most SCORED_TOKENS rows at a time, and exchanges only those of these tokens."""
    first, parts = target.spec.vocab_part.start, hidden.split(SCORED_TOKENS) if len(hidden) else (hidden,)
    return torch.cat([token_logits_of_ranks(logits, first, token_ids, target.ranks) for logits in map(target.logits, parts)])


class StateFeatures(Features):
    """The features of a job that reads values of each row's last hidden state and decodes nothing."""

    def __init__(self, values_of: ValuesOf) -> None:
        self._values_of = values_of

    @property
    def prefill_pass(self) -> PrefillPass:
        return partial(state_pass, self._values_of)

    @property
    def padded_pass(self) -> PaddedPass:
        return partial(padded_state_pass, self._values_of)

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        return (StateValues(slots),)


class StateValues(RowFeature):
    """Every row ends with its prefill, and has the values of its last state."""

    continues = False

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._values: dict[RequestState, NDArray[np.float32]] = {}

    def arrive(self, state: RequestState) -> bool:
        return True

    def read(self, launch: UnreadLaunch, result: RoundResult, slots: Slots, log: RoundLog) -> None:
        """Keep the values of rows that end in the pass and have not left their slots since it was launched."""
        (values,) = (tensor.numpy() for tensor in result.read)
        for segment, own in zip(launch.segments, values, strict=True):
            if segment.last and launch.owners[segment.slot] == self._slots.owner[segment.slot]:
                self._values[self._slots.at(segment.slot)] = own.astype(np.float32)

    def leave(self, state: RequestState) -> None:
        """A row with a value that is not finite fails. A row that is preempted is prefilled again, and gets its values then."""
        if state in self._values and not np.isfinite(self._values[state]).all():
            message = "the model's values for this row hold NaN or inf; check the weights and model.dtype, or drop the row"
            state.fail(RowError(code=NON_FINITE, stage="decode", message=message, retryable=True))

    def finish(self, state: RequestState, done: Completion) -> Completion:
        values = self._values.pop(state, None)
        if done.token_ids is None:
            return done
        assert values is not None, "a row ended without a pass in which its prompt did"
        return done.replace(status="ok", finish_reason="stop", text=None, state_values=values)


class MeanFeatures(Features):
    """The features of a job that averages the hidden states of each row and decodes nothing."""

    @property
    def prefill_pass(self) -> PrefillPass:
        return sum_pass

    @property
    def padded_pass(self) -> PaddedPass:
        return padded_sum_pass

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        return (MeanStates(slots),)


class MeanStates(StateValues):
    """Every row ends with its prefill, and has the mean of its states. It shares no page: all its states are needed."""

    def arrive(self, state: RequestState) -> bool:
        state.prefix_hashes = []
        return True

    def read(self, launch: UnreadLaunch, result: RoundResult, slots: Slots, log: RoundLog) -> None:
        """Add up the parts of rows that have not left their slots since the pass was launched."""
        (sums,) = (tensor.numpy() for tensor in result.read)
        for segment, own in zip(launch.segments, sums, strict=True):
            if launch.owners[segment.slot] != self._slots.owner[segment.slot]:
                continue
            state = self._slots.at(segment.slot)
            share = own.astype(np.float32) / np.float32(len(state.request.prompt_ids))
            self._values[state] = share if segment.begin == 0 else self._values[state] + share


def sum_pass(round_: Round, rows: DeviceBatch, segments: Sequence[Segment], mode: SamplingMode) -> Prefilled:
    """A `PrefillPass` whose result has the sum of each segment's states, float32 [segments, H] (float64 of a float64 model). No
    row emits a token. Does not synchronise."""
    batch, _ = flat_batch(rows, segments, round_.cache.page_size)
    with prefilling(round_), torch.inference_mode():
        hidden, _ = round_.target.forward(batch, round_.cache)
        sums = _sums(round_.target, hidden, batch.row_ids, len(segments))
        log = end_log(round_, rows, segments, hidden)
    return Prefilled(RoundResult(log, (sums,)), None)


def padded_sum_pass(round_: Round, rows: DeviceBatch, inputs: PaddedBatch, mode: SamplingMode) -> Prefilled:
    """`sum_pass` as a `PaddedPass`."""
    batch, num_rows = inputs.batch, inputs.slot_ids.shape[0]
    hidden, _ = round_.target.forward(batch, round_.cache)
    # tokens after the last row are of none, and go to one more; their `row_ids` are 0
    places = torch.arange(len(hidden), device=hidden.device)
    sums = _sums(round_.target, hidden, torch.where(places < batch.cu_seqlens_q[-1], batch.row_ids, num_rows), num_rows + 1)
    return Prefilled(RoundResult(padded_end_log(inputs.emits), (sums,)), None)


def _sums(target: Target, hidden: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    """The sum of the states of each row, [num_rows, H]. hidden [T, H], row_ids [T]."""
    sums = last_states(target, hidden[:0]).new_zeros((num_rows, hidden.shape[1]))
    for first in range(0, len(hidden), SUMMED):
        part = slice(first, first + SUMMED)
        sums.index_add_(0, row_ids[part], last_states(target, hidden[part]))
    return sums


def state_pass(
    values_of: ValuesOf, round_: Round, rows: DeviceBatch, segments: Sequence[Segment], mode: SamplingMode
) -> Prefilled:
    """A `PrefillPass` whose result has the values of each segment's last state; only those of rows that end here mean something.
    No row emits a token. Does not synchronise."""
    batch, _ = flat_batch(rows, segments, round_.cache.page_size)
    with prefilling(round_), torch.inference_mode():
        hidden, _ = round_.target.forward(batch, round_.cache, ends_only=True)
        values = values_of(round_.target, hidden)
        log = end_log(round_, rows, segments, hidden)
    return Prefilled(RoundResult(log, (values,)), None)


def padded_state_pass(
    values_of: ValuesOf, round_: Round, rows: DeviceBatch, inputs: PaddedBatch, mode: SamplingMode
) -> Prefilled:
    """`state_pass` as a `PaddedPass`."""
    hidden, _ = round_.target.forward(inputs.batch, round_.cache, ends_only=True)
    return Prefilled(RoundResult(padded_end_log(inputs.emits), (values_of(round_.target, hidden),)), None)
