"""A mixture of experts: each token goes through the k gated MLPs that its router prefers.

    logits = norm(x) Wg' + b                          in fp32 at least
    weights, ids = routing (`blocks/routing.py`)
    sum over the slots of weight * down_e(act(gate_e(x), up_e(x)))

The experts of a layer are two grouped products (`forward.GroupedProduct`), each in its weight format.
Source: transformers, models/qwen3_moe (Qwen3MoeTopKRouter, Qwen3MoeExperts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from batchspec.model.blocks.base import PLAIN_NORM, ExpertsSpec, Gemm, GroupedSpec, NormForm, ProductSpec, Projection, TensorSpec
from batchspec.model.blocks.forward import BlockSource, Stream
from batchspec.model.blocks.routing import Routing, combine, routing_of, sigmoid_topk, softmax_topk, topk_softmax

Scoring = Literal["softmax_topk", "topk_softmax"]
"""A function of `blocks/routing.py`; `sigmoid_topk` is that of a router with a selection bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The shape of a router. No weight format changes its tensors."""

    name: str
    """of its matrix [E, H], without `.weight`"""
    top_k: int
    """Experts of a token."""
    scoring: Scoring = "softmax_topk"
    norm_topk: bool = True
    """softmax_topk: the weights of a token's experts sum to 1, as they always do in the others."""
    bias: bool = False
    selection_bias: str | None = None
    """Name of a vector [E], with which experts are chosen, by `sigmoid_topk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The shape of a mixture of experts."""

    router: RouterSpec
    experts: ExpertsSpec
    eps: float
    """of its norm"""
    norm: str = "post_attention_layernorm"
    norms: NormForm = PLAIN_NORM

    @property
    def hidden_size(self) -> int:
        return self.experts.hidden_size

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return ()

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        return self.experts.gate_up, self.experts.down

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """The norm, and all of the router, in fp32."""
        router, num_experts = self.router, self.experts.num_experts
        biases = [f"{router.name}.bias"] if router.bias else []
        biases += [router.selection_bias] if router.selection_bias else []
        return (
            self.norms.tensor(self.norm, self.hidden_size),
            TensorSpec(f"{router.name}.weight", (num_experts, self.hidden_size), "weight", wide=True),
            *(TensorSpec(name, (num_experts,), "bias", wide=True) for name in biases),
        )

    @property
    def inner_size(self) -> int:
        return self.router.top_k * self.experts.expert_size

    @property
    def activation_size(self) -> int:
        """fp32 scores and their order; of all pairs what is between the products and what comes out; of one expert gate, up and
        their product; the fp32 sum and what is added to it."""
        own = self.experts
        pairs = self.router.top_k * (own.expert_size + own.hidden_size)
        return 8 * own.num_experts + pairs + 3 * own.expert_size + 4 * own.hidden_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        """Experts that are read: E (1 - (1 - k/E)^T), as if each token chose independently of the others."""
        num_experts, top_k = self.experts.num_experts, self.router.top_k
        read = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
        router = ProductSpec((Projection(self.router.name, num_experts, self.hidden_size),))
        experts = (Gemm(product=spec.of(0), ops=(), stored=num_experts, read=read, active=top_k) for spec in self.grouped)
        return Gemm(product=router, ops=()), *experts

    def build(self, source: BlockSource) -> Moe:
        return Moe(self, source)


class Moe:
    """See the module's docstring."""

    def __init__(self, spec: MoeSpec, source: BlockSource) -> None:
        self._spec, router = spec, spec.router
        self._norm = source.vector(f"{spec.norm}.weight")
        self._router = source.vector(f"{router.name}.weight")
        self._bias = source.vector(f"{router.name}.bias") if router.bias else None
        self._selection_bias = source.vector(router.selection_bias) if router.selection_bias else None
        self._gate_up, self._down = source.grouped(spec.experts.gate_up), source.grouped(spec.experts.down)

    def norms_in_product(self, stream: Stream) -> bool:
        return False

    def __call__(self, stream: Stream, row_ids: Tensor | None, *, add_in_product: bool) -> None:
        x = stream.normed(self._norm, self._spec.eps)
        routing = self._route(x)
        inner = self._gate_up.up(x, routing, self._spec.experts.clamp)
        stream.add(combine(self._down.down(inner, routing), routing.weights))

    def _route(self, x: Tensor) -> Routing:
        router = self._spec.router
        logits = F.linear(x.to(self._router.dtype), self._router, self._bias)
        if self._selection_bias is not None:
            found = sigmoid_topk(logits, self._selection_bias, router.top_k)
        elif router.scoring == "topk_softmax":
            found = topk_softmax(logits, router.top_k)
        else:
            found = softmax_topk(logits, router.top_k, norm_topk=router.norm_topk)
        return routing_of(*found, self._spec.experts.num_experts)
