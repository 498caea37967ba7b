"""Flat batches in which every row has the same number of positions, dead rows too: T = R * W, and no prefix sum is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch


class UniformLayout:
    """The constant parts of such batches, for W = 1..max_width positions a row and up to `slots` rows."""

    def __init__(self, slots: int, max_width: int, device: torch.device) -> None:
        rows = torch.arange(slots, dtype=torch.int32, device=device)
        widths = range(1, max_width + 1)
        self._row_ids = [rows.repeat_interleave(width) for width in widths]
        self._cu_seqlens_q = [torch.arange(0, slots * width + 1, width, dtype=torch.int32, device=device) for width in widths]

    def batch(
        self, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, kv_len: Tensor, page_table: Tensor, rows: DeviceBatch
    ) -> FlatBatch:
        """A batch of token_ids int32 [R, W], with positions and slot_mapping int64 [R * W] and kv_len int32 [R]: views alone."""
        num_rows, width = token_ids.shape
        return FlatBatch(
            token_ids=token_ids.view(-1),
            row_ids=self._row_ids[width - 1][: num_rows * width],
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=self._cu_seqlens_q[width - 1][: num_rows + 1],
            kv_len=kv_len,
            page_table=page_table,
            max_q=width,
            max_kv=rows.tokens.shape[1],
        )
