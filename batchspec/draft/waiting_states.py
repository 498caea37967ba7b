"""The target's states of a row's newest positions, while a head has not computed its K and V there: rounds without drafts put
them off, because one pass over the positions of several rounds reads the head's weights once.

The states of position p are in place p % PLACES of the row, with p beside them. They count only while p is one of the row's
newest PLACES positions, so rounds with drafts need not say what they have computed. A prefill pass empties the places of its
rows.
R rows, T flat positions, W values of the target's states for each position.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.layer_state import RowTensor
from batchspec.cache.pages import KVCache
from batchspec.draft.reader import zeros_on
from batchspec.kernels.drafting.keep_states import keep_states
from batchspec.kernels.drafting.prepare_block_draft_inputs import prepare_block_draft_inputs
from batchspec.kernels.rounds.write_rows import write_rows

PLACES = 8
"""Most positions of a row that wait: weights are read an eighth as often, and the states are small beside a row's K and V."""


class WaitingStates:
    """Buffers for up to `slots` rows. What waits is in `KVCache.draft_rows`: positions int64 [slots, PLACES], and states
    [slots, PLACES, W]."""

    def __init__(self, slots: int, device: torch.device) -> None:
        zeros, count = partial(zeros_on, device), slots * PLACES
        self._layout = UniformLayout(slots, (PLACES,), device)
        self._ids, (self._start, self._kv_len, self._lengths) = zeros(count), zeros(3, slots)
        self._positions, self._slots, self._seen = zeros(3, count, dtype=torch.int64)
        self._nothing = torch.full((1, PLACES), -1, device=device)

    @staticmethod
    def row_tensors(width: int, made: int, dtype: torch.dtype) -> tuple[RowTensor, ...]:
        """made: values that the head makes at once of the states of a position, when `take` has gathered them"""
        taken = PLACES * (width + made) * dtype.itemsize
        return RowTensor((PLACES,), torch.int64), RowTensor((PLACES, width), dtype, temporary_bytes=taken)

    def enter(self, slot_ids: Tensor, kv_len: Tensor, cache: KVCache) -> None:
        """Nothing waits of the rows of a prefill pass: arguments as of `KVCache.enter`."""
        write_rows(cache.draft_rows[0], slot_ids, kv_len, self._nothing.expand(len(slot_ids), PLACES))

    def put(self, batch: FlatBatch, states: Tensor, cache: KVCache) -> None:
        """Let the positions of a round with one for each row wait, with their states [T, W]."""
        positions, kept = cache.draft_rows
        keep_states(states, batch.row_ids, batch.positions, batch.slot_mapping, out_states=kept, out_positions=positions)

    def take(self, rows: DeviceBatch, cache: KVCache) -> tuple[FlatBatch, Tensor]:
        """All that waits of live rows, as their newest PLACES positions, and its states [R * PLACES, W]; the slot of other
        positions is 0."""
        num_rows, page_table = len(rows.live), cache.draft_table(rows)
        ids, positions, slots, seen = (x[: num_rows * PLACES] for x in (self._ids, self._positions, self._slots, self._seen))
        start, kv_len, lengths = (x[:num_rows] for x in (self._start, self._kv_len, self._lengths))
        first = (rows.num_tokens - 1 - PLACES).clamp(min=0)
        prepare_block_draft_inputs(
            rows.tokens, first + 1, rows.num_tokens, rows.live, page_table, mask_id=0, draft_len=0, page_size=cache.page_size,
            out_ids=ids, out_positions=positions, out_slot_mapping=slots, out_start=start, out_kv_len=kv_len, out_seen=seen,
            out_draft_len=lengths,
        )
        batch = self._layout.batch(ids.view(num_rows, PLACES), positions, slots, kv_len, page_table, rows.max_kv).read_rows(rows)
        places, (kept, states) = batch.row_ids * PLACES + positions % PLACES, cache.draft_rows
        slots.mul_(kept.view(-1).index_select(0, places) == positions)
        return batch, states.view(-1, states.shape[2]).index_select(0, places)
