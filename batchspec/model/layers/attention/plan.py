"""Attention over paged K/V: chooses the backend that is fastest for a batch."""

from __future__ import annotations

from typing import Protocol, TypedDict

from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.model.layers.attention.flash import fits_flash, plan_flash
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.ordered import plan_ordered
from batchspec.model.layers.attention.padded import TorchPlan
from batchspec.model.layers.attention.verify import fits_verify, plan_verify


def attend(q: Tensor, kv: LayerKV, batch: FlatBatch, *, scale: float, window: int | None, sink: int = 0) -> Tensor:
    """Causal attention of every token of the batch over its row's pages.

    q       [T, NH, D]
    kv      the layer's pages, with the tokens' own K/V already written by `LayerKV.rope_write` or `LayerKV.write`: V is finite
            everywhere, and a key that was not finite is NaN in K; only queries that attend to such a key get NaN
    window  a query at position p attends to keys p-window+1 .. p; None: 0 .. p; `FlatBatch.last_keys` gives later last ones
    sink    with a window: also to keys 0 .. sink-1 (StreamingLLM, arXiv 2309.17453)
    Returns [T, NH, D]; zeros for rows with kv_len 0. Exact: softmax in fp32 (fp64 for fp64).

    Layers of one batch share the work that does not depend on q: call `plan_attention` once, then `.attend` for each layer.
    On a GPU this does not synchronise for rows of at most 64 queries, nor for longer rows in bf16 or fp16. All other cases, such
    as fp64, take the plain torch path, which synchronises.
    """
    return plan_attention(batch, kv, num_heads=q.shape[1], window=window, sink=sink).attend(q, kv, scale)


def plan_attention(batch: FlatBatch, kv: LayerKV, *, num_heads: int, window: int | None, sink: int = 0) -> AttentionPlan:
    """The plan that all layers with this window share for this batch. `kv` may be that of any of these layers.

    If its layout is `ordered`, the plan is a batch-invariant one. Only drafts use a sink, and no output token depends on drafts.
    """
    if kv.layout.ordered and not sink:
        assert batch.last_keys is None, "jobs with images are not batch-invariant (job/images.py)"
        return plan_ordered(batch, kv, num_heads=num_heads, window=window)
    if batch.last_keys is None and kv.pages.is_cuda and fits_verify(batch, kv.layout.dtype):
        return plan_verify(batch, kv, num_heads=num_heads, window=window, sink=sink, shared=batch.shared)
    if fits_flash(batch, kv, sink):
        return plan_flash(batch, kv, num_heads=num_heads, window=window)
    return TorchPlan(batch, num_heads, window, sink)


class Range(TypedDict):
    """Arguments of `plan_attention`."""

    window: int | None
    sink: int


def narrowed(own: int | None, window: int | None, sink: int) -> Range:
    """The keys that a layer with its own window reads if `window` and `sink` are asked for."""
    if window is None or (own is not None and own <= window):
        return {"window": own, "sink": 0}
    return {"window": window, "sink": sink if own is None else 0}


class AttentionPlan(Protocol):
    """See `plan_attention`."""

    def attend(
        self, q: Tensor, kv: LayerKV, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        """As the function `attend`, for one layer.

        positions    int64 [T] to use instead of the batch's: not earlier, and below the row's kv_len. This lets the steps of a
                     draft chain share a plan
        sink_logits  fp32 (fp64 for fp64) [NH]: one more key of each head, with this logit and the value 0 (gpt-oss); `sink`
                     counts real keys
        """
