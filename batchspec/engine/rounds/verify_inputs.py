"""The inputs of a round's verification: its flat batch, and the buffers that proposals are written to.

Nothing is read back to the host. Legend: R rows, K draft_len, S = K + 1, T flat positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.kernels.rounds.prepare_ragged_inputs import prepare_ragged_inputs
from batchspec.kernels.rounds.prepare_verify_inputs import prepare_verify_inputs


class VerifyInputs:
    """Buffers at fixed addresses, which captured rounds read; all row buckets and draft lengths are views of them."""

    def __init__(self, slots: int, max_draft_len: int, page_size: int, device: torch.device) -> None:
        width, self._page_size = max_draft_len + 1, page_size
        self._lengths, self._kv_len, self._cu_seqlens_q, self._row_ids, self._token_ids = (
            torch.zeros(size, dtype=torch.int32, device=device)
            for size in (slots, slots, slots + 1, slots * width, slots * width)
        )
        self._positions, self._slots = torch.zeros(2, slots * width, dtype=torch.int64, device=device)
        self._layout = UniformLayout(slots, range(1, width + 1), device)
        self._ids = [torch.zeros(slots, places, dtype=torch.int32, device=device) for places in range(1, width + 1)]

    def ids(self, num_rows: int, draft_len: int) -> Tensor:
        """int32 [R, S] newest token, then the drafts, in the layout in which they are verified."""
        return self._ids[draft_len][:num_rows]

    def lengths(self, num_rows: int) -> Tensor:
        """int32 [R] number of drafts of each row."""
        return self._lengths[:num_rows]

    def uniform(self, rows: DeviceBatch, draft_len: int) -> FlatBatch:
        """S flat tokens for every row, dead or not: no prefix sum, one launch. Writes lengths and the newest tokens."""
        page_table, *more_tables = rows.page_tables
        num_rows = rows.live.shape[0]
        ids, kv_len = self.ids(num_rows, draft_len), self._kv_len[:num_rows]
        positions, slots = self._positions[: ids.numel()], self._slots[: ids.numel()]
        prepare_verify_inputs(
            rows.tokens, rows.num_tokens, rows.limit, rows.live, page_table, page_size=self._page_size, out_ids=ids,
            out_draft_len=self.lengths(num_rows), out_positions=positions, out_slot_mapping=slots, out_kv_len=kv_len,
        )
        batch = self._layout.batch(ids, positions, slots, kv_len, page_table, rows.max_kv)
        batch.tokens = "drafts"
        return batch.add_groups(more_tables, self._page_size)

    def limit_lengths(self, rows: DeviceBatch, draft_len: int) -> None:
        """Cut the lengths, of at most `draft_len` drafts, at the rows' limits; 0 for dead rows."""
        lengths = self.lengths(rows.live.shape[0])
        if not draft_len:
            lengths.zero_()
        torch.minimum(lengths, rows.limit - rows.num_tokens - 1, out=lengths)
        lengths.clamp_(min=0).mul_(rows.live)

    def ragged(self, rows: DeviceBatch, draft_len: int, num_positions: int | None = None) -> FlatBatch:
        """The newest token and the drafts of every live row, as many as `lengths` says, concatenated.

        num_positions  T, which is enough for these lengths; None: R * S
        On a CPU, where reading a length costs nothing, T is exact; on a GPU the rest is padding.
        """
        page_table, *more_tables = rows.page_tables
        num_rows = rows.live.shape[0]
        lengths, is_cuda = self.lengths(num_rows), rows.live.is_cuda
        num_flat_tokens = num_positions or num_rows * (draft_len + 1)
        if not is_cuda:
            num_flat_tokens = int(((lengths + 1) * rows.live).sum())
        token_ids, row_ids, positions, slots = (
            x[:num_flat_tokens] for x in (self._token_ids, self._row_ids, self._positions, self._slots)
        )
        cu_seqlens_q, kv_len = self._cu_seqlens_q[: num_rows + 1], self._kv_len[:num_rows]
        prepare_ragged_inputs(
            rows.tokens, rows.num_tokens, rows.live, self.ids(num_rows, draft_len)[:, 1:], lengths, page_table,
            page_size=self._page_size, out_ids=token_ids, out_row_ids=row_ids, out_positions=positions, out_slot_mapping=slots,
            out_cu_seqlens_q=cu_seqlens_q, out_kv_len=kv_len,
        )
        return FlatBatch(
            token_ids=token_ids,
            row_ids=row_ids,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=cu_seqlens_q,
            kv_len=kv_len,
            page_table=page_table,
            max_q=draft_len + 1,
            max_kv=rows.max_kv if is_cuda else int(kv_len.max()),
            tokens="drafts",
        ).add_groups(more_tables, self._page_size)
