"""Attention of one layer over pages of K and V: what it writes before the scores, and what it reads. T tokens, NH query heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan
from batchspec.model.layers.attention.rope import Rope
from batchspec.model.layers.attention.rope_write import rope_write, rotated_queries


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStore:
    """Stores K and V of one layer in pages, or rotates the queries of a layer that reads those of another one."""

    rope: Rope
    slot_mapping: Tensor
    """int64 [T]"""
    kv: LayerKV
    lora: LoraTokens | None = None
    norm_ranks: Collectives | None = None
    """The ranks that share the heads over which q and k are normed; None: this process norms alone."""

    def rotate_and_store(
        self, qkv: Any, *, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, v_norm: bool = False, shared_v: bool = False
    ) -> Tensor:
        if self.norm_ranks is not None and q_norm is not None and k_norm is not None:
            self.norm_ranks.norm_heads(qkv, q_norm, k_norm, eps)
            q_norm = k_norm = None
        q = rope_write(
            qkv, self.rope, self.kv, self.slot_mapping, q_norm=q_norm, k_norm=k_norm, eps=eps, v_norm=v_norm, shared_v=shared_v
        )
        return self._grown(q)

    def rotate(self, q: Tensor, *, q_norm: Tensor | None, eps: float) -> Tensor:
        return self._grown(rotated_queries(q, self.rope, head_dim=self.kv.layout.head_dim, q_norm=q_norm, eps=eps))

    def _grown(self, q: Tensor) -> Tensor:
        return q if self.rope.query_factors is None else q.mul_(self.rope.query_factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttend:
    """Attention of one layer over pages."""

    kv: LayerKV
    plan: AttentionPlan
    lora: LoraTokens | None = None
    positions: Tensor | None = None
    """int64 [T] positions of the queries if they are later than the plan's"""

    def __call__(self, q: Tensor, scale: float, sink_logits: Tensor | None = None) -> Tensor:
        return self.plan.attend(q, self.kv, scale, self.positions, sink_logits).flatten(1)
