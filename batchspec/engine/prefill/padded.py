"""What a padded prefill pass launches, which depends on its shape alone, so that a CUDA graph can hold it.

R rows, T tokens, both with the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill.passes import Prefilled, emit, prefill_drafter
from batchspec.engine.rounds.round import Round


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """The inputs of a padded pass, on the device. `PassInputs` says what the fields without a comment are."""

    batch: FlatBatch
    slot_ids: Tensor
    """int64 [R]"""
    emits: Tensor
    emit_ids: Tensor


PaddedPass = Callable[[Round, DeviceBatch, PaddedBatch, SamplingMode], Prefilled]
"""Launches a padded pass; neither reads back nor uploads anything. The tensors of its result include the padding."""


def padded_chunk(round_: Round, rows: DeviceBatch, inputs: PaddedBatch, mode: SamplingMode) -> Prefilled:
    """`prefill_chunk` as a `PaddedPass`."""
    batch = inputs.batch
    hidden, aux_hidden_states = round_.target.forward(batch, round_.cache, round_.drafter.aux_layer_ids, ends_only=True)
    logit_rows = LogitRows(inputs.slot_ids.int(), batch.kv_len.long())
    result = emit(round_, rows, hidden, logit_rows, inputs.emit_ids, inputs.emits, mode)
    prefill_drafter(round_, rows, batch, inputs.slot_ids, aux_hidden_states, mode)
    return Prefilled(result, inputs.emits)
