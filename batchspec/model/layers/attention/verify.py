"""Verify attention of a flat batch on a GPU: the plan that all layers of a round share. Making it reads nothing back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.settings import DTYPES, MAX_QUERIES
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.verify_attention import verify_attention
from batchspec.kernels.attention.work_list import AttentionWork, SharedPrefixes
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.tuning.policy import attention_shape

if TYPE_CHECKING:
    from batchspec.batch.flat_batch import FlatBatch


def fits_verify(batch: FlatBatch, dtype: torch.dtype) -> bool:
    """Whether `plan_verify` supports this batch: short rows, and a dtype that the kernel supports."""
    return batch.max_q <= MAX_QUERIES and dtype in DTYPES


def plan_verify(
    batch: FlatBatch,
    kv: LayerKV,
    *,
    num_heads: int,
    window: int | None,
    sink: int = 0,
    shared: SharedPrefixes | None = None,
    interpret: bool = False,
) -> VerifyPlan:
    """The work list of a batch whose rows have at most 64 flat tokens each, and memory for partial results.

    kv          that of any layer with this window
    window      a query at position p attends to keys p-window+1 .. p; None: 0 .. p
    sink        with a window: also to keys 0 .. sink-1
    shared      groups of rows with a shared prefix, whose K/V are read once for the group; ignored with a window

    If batch.kv_len is larger than the batch's positions need, `attend` can take later positions without a new plan.
    Does not synchronise on a GPU; on a CPU the reference is used unless `interpret`.
    """
    layout = kv.layout
    shape = attention_shape(
        num_rows=batch.kv_len.shape[0],
        max_q=batch.max_q,
        max_kv=batch.max_kv,
        num_heads=num_heads,
        kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        dtype=layout.dtype,
        fp8=layout.fp8,
        device=kv.pages.device,
        window=window,
        sink=sink,
    )
    shared = None if window else shared
    work = split_kv_schedule(batch.cu_seqlens_q, batch.kv_len, batch.positions, shape=shape, shared=shared, interpret=interpret)
    ancestors = None if batch.tree is None else batch.tree.within(window, batch)
    return VerifyPlan(batch, work, layout.head_dim, ancestors, interpret)


class VerifyPlan:
    """See `plan_verify`."""

    def __init__(
        self,
        batch: FlatBatch,
        work: AttentionWork,
        head_dim: int,
        ancestors: Tensor | None,
        interpret: bool,
    ) -> None:
        self._batch, self._work, self._interpret = batch, work, interpret
        self._partials = partials_of(work, head_dim)
        self._ancestors = ancestors
        self._tail_start = None if batch.tree is None else batch.tree.start
        self._listed = False  # True once a layer has run: other launches are then between the work list and the next attention

    def attend(
        self, q: Tensor, kv: LayerKV, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """Attention of q [T, NH, D], whose rows may be slices of wider ones -> [T, NH, D]; zeros for dead rows and padding.

        kv          this layer's, with the queries' own K/V already written
        positions   int64 [T] instead of the batch's, each row's below its kv_len
        sink_logits fp32 [NH]: see `AttentionPlan`
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        verify_attention(
            q,
            kv.pages,
            self._batch.page_table,
            self._batch.positions if positions is None else positions,
            self._work,
            self._partials,
            scale=scale,
            out=out,
            ancestors=self._ancestors,
            tail_start=self._tail_start,
            sink_logits=sink_logits,
            scales=kv.scales,
            early=self._listed,
            interpret=self._interpret,
        )
        self._listed = True
        return out
