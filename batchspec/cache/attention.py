"""Attention over paged K/V, by whoever serves a batch best."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.flash import fits_flash, plan_flash
from batchspec.cache.layout import LayerKV
from batchspec.cache.padded import TorchPlan
from batchspec.cache.verify import fits_verify, plan_verify


def attend(q: Tensor, kv: LayerKV, batch: FlatBatch, *, scale: float, window: int | None, sink: int = 0) -> Tensor:
    """Causal attention of every token of the batch over its row's pages.

    q       [T, NH, D]
    kv      the layer's pages, the tokens' own K/V written already, by `LayerKV.rope_write` or `LayerKV.write`: V finite
            everywhere, K NaN where a key was not; a query that sees such a key gets NaN, no other one
    window  a query at position p sees keys p-window+1 .. p; None: 0 .. p
    sink    with a window: keys 0 .. sink-1 are seen too (StreamingLLM, arXiv 2309.17453)
    Returns [T, NH, D]; zeros for rows with kv_len 0. Exact: softmax in fp32 (fp64 for fp64).

    Many layers of one batch share the work that does not depend on q: `plan_attention` once, then `.attend`.
    On a GPU nothing is read back for rows of at most 64 queries, nor for longer ones in bf16 or fp16; the plain path, which
    fp64 and what else is left take, synchronises.
    """
    return plan_attention(batch, kv, num_heads=q.shape[1], window=window, sink=sink).attend(q, kv, scale)


def plan_attention(batch: FlatBatch, kv: LayerKV, *, num_heads: int, window: int | None, sink: int = 0) -> AttentionPlan:
    """What attention of this batch needs in every layer with this window, by who serves it. `kv` is any layer's."""
    if kv.pages.is_cuda and fits_verify(batch, kv.layout.dtype):
        return plan_verify(batch, kv, num_heads=num_heads, window=window, sink=sink, shared=batch.shared)
    if fits_flash(batch, kv, sink):
        return plan_flash(batch, kv, num_heads=num_heads, window=window)
    return TorchPlan(batch, num_heads, window, sink)


class AttentionPlan(Protocol):
    """See `plan_attention`."""

    def attend(
        self, q: Tensor, kv: LayerKV, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """As the function `attend`, for one layer.

        sink_logits  fp32 (fp64 for fp64) [NH]: one more key of each head, with this logit and the value 0 (gpt-oss); not `sink`,
                     which are real keys
        positions  int64 [T] later ones than the batch's, each row's below its kv_len: the steps of a draft chain share a plan
        """
