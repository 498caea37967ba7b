"""A mixture of experts: each token goes through the k gated MLPs that its router prefers.

    p = softmax(x Wg')           in fp32 at least, over all E experts
    the k largest p              the lowest id of equals; divided by their sum with norm_topk
    sum of p_e * down_e(silu(gate_e(x)) * up_e(x))

The plain path, for any device and dtype, a reference for kernels. On a CPU an expert sees its own tokens; on a GPU, where that
would need their number on the host and a CUDA graph could not hold it, it sees all of them and the rest is masked.
Source: transformers, models/qwen3_moe (Qwen3MoeTopKRouter, Qwen3MoeExperts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.blocks.base import Gemm, ProductSpec, Projection, TensorSpec
from batchspec.model.blocks.forward import BlockSource, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The shape of a mixture of experts."""

    hidden_size: int
    expert_size: int
    """Numbers between the two products of one expert."""
    num_experts: int
    top_k: int
    """Experts of a token."""
    norm_topk: bool
    """The weights of a token's experts sum to 1."""
    eps: float
    """of its norm"""
    name: str = "mlp"
    norm: str = "post_attention_layernorm"

    def gate_up(self, expert: int) -> ProductSpec:
        names = (f"{self.name}.experts.{expert}.{x}_proj" for x in ("gate", "up"))
        return ProductSpec(tuple(Projection(name, self.expert_size, self.hidden_size) for name in names))

    def down(self, expert: int) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.experts.{expert}.down_proj", self.hidden_size, self.expert_size),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return tuple(make(expert) for expert in range(self.num_experts) for make in (self.gate_up, self.down))

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """The norm, and the router, which no weight format changes."""
        return (
            TensorSpec(f"{self.norm}.weight", (self.hidden_size,), "norm"),
            TensorSpec(f"{self.name}.gate.weight", (self.num_experts, self.hidden_size), "weight"),
        )

    @property
    def inner_size(self) -> int:
        return self.top_k * self.expert_size

    @property
    def activation_size(self) -> int:
        """Probabilities and their order; gate, up and their product of one expert; its output and the sum."""
        return 4 * self.num_experts + 3 * self.expert_size + 2 * self.hidden_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        """Experts that are read: E (1 - (1 - k/E)^T), as if each token chose independently of the others."""
        read = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)
        router = ProductSpec((Projection(f"{self.name}.gate", self.num_experts, self.hidden_size),))
        experts = (
            Gemm(product=product, ops=(), stored=self.num_experts, read=read, active=self.top_k)
            for product in (self.gate_up(0), self.down(0))
        )
        return Gemm(product=router, ops=()), *experts

    def build(self, source: BlockSource) -> Moe:
        return Moe(self, source)


class Moe:
    """See the module's docstring."""

    def __init__(self, spec: MoeSpec, source: BlockSource) -> None:
        self._spec = spec
        self._norm, self._router = (source.vector(vector.name) for vector in spec.vectors)
        self._experts = [
            (source.product(spec.gate_up(expert)), source.product(spec.down(expert))) for expert in range(spec.num_experts)
        ]

    def norms_in_product(self, stream: Stream) -> bool:
        return False

    def __call__(self, stream: Stream, row_ids: Tensor | None, *, add_in_product: bool) -> None:
        x = stream.normed(self._norm, self._spec.eps)
        weights, expert_ids = route(F.linear(x, self._router), self._spec.top_k, norm_topk=self._spec.norm_topk)
        combine = self._all_tokens if x.is_cuda else self._own_tokens
        stream.add(combine(x, row_ids, weights.to(x.dtype), expert_ids))

    def _expert(self, expert: int, x: Tensor, row_ids: Tensor | None) -> Tensor:
        gate_up, down = self._experts[expert]
        out: Tensor = down(gate_up.swiglu(x, row_ids), row_ids)
        return out

    def _own_tokens(self, x: Tensor, row_ids: Tensor | None, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Each expert on the tokens that chose it; their number is read on the host."""
        out = torch.zeros_like(x)
        for expert in range(self._spec.num_experts):
            tokens, choice = (expert_ids == expert).nonzero(as_tuple=True)
            if len(tokens):
                rows = None if row_ids is None else row_ids[tokens]
                out.index_add_(0, tokens, self._expert(expert, x[tokens], rows) * weights[tokens, choice].unsqueeze(1))
        return out

    def _all_tokens(self, x: Tensor, row_ids: Tensor | None, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Each expert on all tokens; nothing is read on the host."""
        out = torch.zeros_like(x)
        for expert in range(self._spec.num_experts):
            chosen = expert_ids == expert
            weight = (weights * chosen).sum(1, keepdim=True)
            values = self._expert(expert, x, row_ids) * weight
            out += torch.where(chosen.any(1, keepdim=True), values, 0)
        return out


def route(logits: Tensor, top_k: int, *, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] -> the weights of each token's experts [T, k], fp32 (fp64 of fp64), and their ids int64 [T, k].

    Falling weights, the lowest id first of equals. Does not synchronise.
    """
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, expert_ids = ordered.values[:, :top_k], ordered.indices[:, :top_k]
    return weights / weights.sum(-1, keepdim=True) if norm_topk else weights, expert_ids
