"""A padded prefill pass: what it launches, which depends on its shape alone, so that a CUDA graph can hold it, and its inputs,
in a buffer at a fixed address that graphs read.

The padding is dead rows of one token, up to the shape's number of rows, and after them tokens of no row: they write K/V to slot 0
of page 0, which no row reads, go through no expert and no adapter, and emit nothing. R rows, T tokens, both with the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.upload import upload
from batchspec.engine.prefill.passes import Prefilled, emit, lay_out, prefill_drafter
from batchspec.engine.prefill.shapes import PassShape
from batchspec.engine.rounds.round import Round
from batchspec.engine.step import Segment


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


_ALIGNED = 4
"""Each field of the buffer begins at a multiple of this many numbers: a kernel is compiled anew if 16 does not divide an
address."""


class PassInputs:
    """Inputs of a padded pass: one buffer at a fixed address; each field is one line of it. R rows of the shape.

    slot_ids   int32 [R] the slots of the pass: if rows emit tokens, first those that do, in order, then the others; a dead row
               has a slot that is not in the pass, so that no two rows have the same
    begins     int32 [R] position of the row's first token; 0 for a dead row
    q_len      int32 [R] number of its tokens; 1 for a dead row
    kv_len     int32 [R] keys that its last token attends to; 0 marks a dead row
    emits      int32 [slots] 1 for the slots whose tokens end in the pass; if rows emit tokens, the pass sets 0 for those that
               end with this one
    emit_ids   int32 [slots + 1] number of emitting slots before this one: the row of slot r in the pass, if it emits
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, width = num_slots, -(-(num_slots + 1) // _ALIGNED) * _ALIGNED
        self._buffer = torch.zeros(6, width, dtype=torch.int32, device=device)
        self.slot_ids, self.begins, self.q_len, self.kv_len, emits, emit_ids = self._buffer.unbind()
        self.emits, self.emit_ids = emits[:num_slots], emit_ids[: num_slots + 1]

    def fill(self, segments: Sequence[Segment], num_rows: int) -> None:
        """Upload the inputs of this pass in stream order; the host does not wait. segments: if rows emit tokens, in the order of
        `emitting_first`."""
        lines, count, slots = np.zeros(self._buffer.shape, np.int32), len(segments), [s.slot for s in segments]
        free_slots = np.setdiff1d(np.arange(self._num_slots, dtype=np.int32), slots)[: num_rows - count]
        assert count + len(free_slots) == num_rows, "a slot occurs twice in a pass"
        slot_ids, begins, q_len, kv_len, emits, emit_ids = lines
        slot_ids[:num_rows] = [*slots, *free_slots]
        begins[:count] = [s.begin for s in segments]
        q_len[:num_rows] = 1
        q_len[:count] = [s.end - s.begin for s in segments]
        kv_len[:count] = [s.end for s in segments]
        emits[[s.slot for s in segments if s.last]] = 1
        np.cumsum(emits[: self._num_slots], out=emit_ids[1 : self._num_slots + 1])
        self._buffer.copy_(upload(lines, torch.int32, self._buffer.device))

    def batch(self, shape: PassShape, rows: DeviceBatch, *, page_size: int) -> tuple[FlatBatch, Tensor]:
        """The rows of the buffer as a flat batch of this shape, and the slot of each, int64 [R]. Does not synchronise."""
        slot_ids, begins, q_len, kv_len = (x[: shape.num_rows] for x in (self.slot_ids, self.begins, self.q_len, self.kv_len))
        slot_ids = slot_ids.long()
        # A dead row may name the slot of a live one: its token must not write to that row's pages.
        alive = (kv_len > 0).int().unsqueeze(1)
        batch = lay_out(
            rows, slot_ids, [table[slot_ids] * alive for table in rows.page_tables], begins, q_len, kv_len,
            num_tokens=shape.num_tokens, max_q=shape.max_q, max_kv=shape.max_kv, page_size=page_size,
        )
        batch.max_keys = shape.max_keys
        return batch, slot_ids


def emitting_first(segments: Sequence[Segment]) -> list[Segment]:
    """The segments that emit a token first, ordered by slot: `accept` looks up the choice of each by its index among them."""
    return sorted(segments, key=lambda s: (not s.last, s.slot))
