"""Batch-invariant attention (decode.deterministic): plans for rounds and prefill that sum in the same order in every batch.

Both give a query the same bits. On a CPU, only tests run the kernels, in Triton's interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.ordered_attention import ordered_attention
from batchspec.kernels.attention.ordered_prefill import ordered_prefill
from batchspec.kernels.attention.settings import MAX_QUERIES
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.work_list import AttentionWork
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.tuning.policy import ordered_attention_shape

if TYPE_CHECKING:
    from batchspec.batch.flat_batch import FlatBatch


def plan_ordered(batch: FlatBatch, kv: LayerKV, *, num_heads: int, window: int | None) -> OrderedPlan | OrderedPrefillPlan:
    """The plan of a batch for all layers with this window. Does not synchronise on a GPU.

    Rows with many queries are a prefill. Trees are not supported: the keys of a path would have other positions than a chain's.
    Nor are images whose tokens attend to each other.
    """
    assert batch.tree is None
    assert batch.last_keys is None
    if batch.max_q > MAX_QUERIES:
        return OrderedPrefillPlan(batch, window)
    layout = kv.layout
    shape = ordered_attention_shape(
        num_rows=batch.kv_len.shape[0], max_q=batch.max_q, max_kv=batch.max_kv, num_heads=num_heads,
        kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, page_size=layout.page_size, device=kv.pages.device, window=window,
    )
    work = split_kv_schedule(
        batch.cu_seqlens_q, batch.kv_len, batch.positions, shape=shape, shared=None if window else batch.shared,
        interpret=not kv.pages.is_cuda,
    )
    return OrderedPlan(batch, work, layout.head_dim)


class OrderedPlan:
    """Plan for rows of at most 64 queries, some of which may be dead."""

    def __init__(self, batch: FlatBatch, work: AttentionWork, head_dim: int) -> None:
        self._batch, self._work, self._partials = batch, work, partials_of(work, head_dim)
        self._listed = False  # True once a layer has run: other launches are then between the work list and the next attention

    def attend(
        self, q: Tensor, kv: LayerKV, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """As `AttentionPlan.attend`; zeros for dead rows and padding."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ordered_attention(
            q, kv.pages, self._batch.page_table, self._batch.positions if positions is None else positions, self._work,
            self._partials, scale=scale, out=out, sink_logits=sink_logits, scales=kv.scales, early=self._listed,
            interpret=not q.is_cuda,
        )
        self._listed = True
        return out


class OrderedPrefillPlan:
    """Plan for rows of any number of queries, none of them dead."""

    def __init__(self, batch: FlatBatch, window: int | None) -> None:
        self._batch, self._window = batch, window

    def attend(
        self, q: Tensor, kv: LayerKV, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """As `AttentionPlan.attend`; only for the positions of the batch."""
        assert positions is None
        own, out = self._batch, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ordered_prefill(
            q, kv.pages, own.page_table, own.positions, own.cu_seqlens_q, own.kv_len, scale=scale, max_q=own.max_q,
            max_kv=own.max_kv, out=out, window=self._window or 0, sink_logits=sink_logits, scales=kv.scales,
            interpret=not q.is_cuda,
        )
        return out
