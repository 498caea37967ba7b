"""Flat batches in which every row has the same number of positions, dead rows too: T = R * W, and no prefix sum is needed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, TreeTail


class UniformLayout:
    """The constant parts of such batches, with W positions per row and up to `slots` rows."""

    def __init__(self, slots: int, widths: Iterable[int], device: torch.device) -> None:
        """widths: each W that a batch may have."""
        rows, found = torch.arange(slots, dtype=torch.int32, device=device), tuple(widths)
        self._row_ids = {width: rows.repeat_interleave(width) for width in found}
        self._cu_seqlens_q = {
            width: torch.arange(0, slots * width + 1, width, dtype=torch.int32, device=device) for width in found
        }

    def batch(
        self, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, kv_len: Tensor, page_table: Tensor, max_kv: int,
        tree: TreeTail | None = None,
    ) -> FlatBatch:
        """A batch of token_ids int32 [R, W], with positions and slot_mapping int64 [R * W] and kv_len int32 [R]; its fields are
        views.

        max_kv  upper bound of kv_len
        tree    set if the last keys of each row are nodes of a tree
        """
        num_rows, width = token_ids.shape
        return FlatBatch(
            token_ids=token_ids.view(-1),
            row_ids=self._row_ids[width][: num_rows * width],
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=self._cu_seqlens_q[width][: num_rows + 1],
            kv_len=kv_len,
            page_table=page_table,
            max_q=width,
            max_kv=max_kv,
            tree=tree,
        )
