"""A mixture of experts: each token goes through the k gated MLPs that its router prefers.

    x = norm(stream)
    logits = x Wr' + b                                in fp32, or fp64 in a model of fp64; Wr [E, H] is the router's matrix
    ids, weights = route(logits)                      k of E experts per token, `kernels/moe/route.py`
    stream += sum over the k slots, in order, of weight * down_e(act(gate_e(x), up_e(x))), e the expert of the slot
    stream += sigmoid(x g') down_s(silu(gate_s(x)) * up_s(x))    where there is a shared expert s, which all tokens go through;
                                                                 if it has no gate, without the sigmoid
    stream += out(sum over the k slots ... of experts on into(x))    where the experts are narrower than the stream (`Narrow`);
                                                                     router and shared expert read x

The experts of a layer are two grouped products (`forward.GroupedProduct`), each in its weight format. The next norm of the stream
computes the sum over the slots and adds it (`Stream.add_pairs`). The gate g of the shared expert is one more row of the router's
matrix in memory, so that one product computes both.
Source: transformers, models/qwen3_moe (Qwen3MoeTopKRouter, Qwen3MoeExperts), models/qwen3_next (Qwen3NextSparseMoeBlock).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.moe.route import MAX_EXPERTS, MAX_TOP_K, Scoring, num_read, route, route_reference
from batchspec.kernels.moe.router import router_logits, router_logits_reference
from batchspec.kernels.moe.units import Routing
from batchspec.model.fused import sigmoid_gated
from batchspec.model.layers.base import (
    PLAIN_NORM,
    ExpertsSpec,
    Gemm,
    GroupedSpec,
    NormForm,
    ProductSpec,
    Projection,
    Shard,
    Share,
    TensorSpec,
    whole_shares,
)
from batchspec.model.layers.forward import BlockSource, Stream
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec, GatedProducts
from batchspec.tuning.policy import expert_pass_sizes, expert_unit_pairs, has_fast_experts, largest_units_first


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The shape of a router. No weight format changes its tensors."""

    name: str
    """Name of its matrix [E, H] in the checkpoint, without `.weight`."""
    top_k: int
    """Number of experts per token."""
    scoring: Scoring = "softmax"
    norm_topk: bool = True
    """The weights of a token's experts are made to sum to 1. With softmax they are then the softmax over the chosen logits."""
    sum_eps: float = 0.0
    """Added to the sum by which norm_topk divides the weights."""
    bias: bool = False
    selection_bias: str | None = None
    """Name of a vector [E] that is added to the sigmoid scores when experts are chosen, but not to their weights."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: tuple[int, int] = (1, 1)
    """Number of groups of neighbouring experts, and how many of them, the best by their sigmoid scores, a token's experts are
    chosen from."""
    factors: str | None = None
    """Name of a vector [E] with which the weights of the experts are multiplied in the end."""
    input_scale: str | None = None
    """Name of a vector [H]: the router does not read what the experts read, but the stream normed without a weight, times this
    vector and H^-0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """The shape of an expert that every token goes through, and of its gate, if it has one. Its products come before those of the
    others."""

    mlp: GatedMlpSpec
    """Its input and output are not normed."""
    gate: str | None
    """Name of the matrix [1, H] of its gate in the checkpoint, without `.weight`; no weight format changes it. None: it has no
    gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """The shape of the products around experts that are narrower than the stream. Every rank has all of both."""

    hidden_size: int
    """H of the stream; the experts have their own, smaller one"""
    into: str
    """Name of the first product, relative to the layer."""
    out: str
    """Name of the second one, of the sum over the slots."""

    def products(self, size: int) -> tuple[ProductSpec, ProductSpec]:
        """size: of the experts"""
        into = ProductSpec((Projection(self.into, size, self.hidden_size),))
        return into, ProductSpec((Projection(self.out, self.hidden_size, size),))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The shape of a mixture of experts."""

    router: RouterSpec
    experts: ExpertsSpec
    shared: SharedExpert | None = None
    eps: float
    """Epsilon of `norm`."""
    norm: str = "post_attention_layernorm"
    """Name of the norm before router and experts."""
    norms: NormForm = PLAIN_NORM
    narrow: Narrow | None = None
    """None: the experts read and write vectors of the stream."""

    @property
    def hidden_size(self) -> int:
        return self.experts.hidden_size if self.narrow is None else self.narrow.hidden_size

    @property
    def around(self) -> tuple[ProductSpec, ...]:
        """The products around narrow experts."""
        return () if self.narrow is None else self.narrow.products(self.experts.hidden_size)

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return *(() if self.shared is None else self.shared.mlp.products), *self.around

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        return self.experts.gate_up, self.experts.down

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """The norm's weight, and the router's matrix and biases, with the shared expert's gate; all but the norm's are kept in
        fp32 at least."""
        router, num_experts = self.router, self.experts.num_experts
        biases = [f"{router.name}.bias"] if router.bias else []
        biases += [router.selection_bias] if router.selection_bias else []
        scales = {router.factors: num_experts, router.input_scale: self.hidden_size}
        matrices = {router.name: num_experts} | dict.fromkeys(self.gates, 1)
        return (
            self.norms.tensor(self.norm, self.hidden_size),
            *(TensorSpec(f"{name}.weight", (rows, self.hidden_size), "weight", wide=True) for name, rows in matrices.items()),
            *(TensorSpec(name, (num_experts,), "bias", wide=True) for name in biases),
            *(TensorSpec(name, (size,), "scale", wide=True) for name, size in scales.items() if name is not None),
        )

    @property
    def num_sums(self) -> int:
        return 1 if self.narrow is None or self.shared is None else 2

    @property
    def gates(self) -> tuple[str, ...]:
        """The name of the shared expert's gate, if there is one."""
        return () if self.shared is None or self.shared.gate is None else (self.shared.gate,)

    @property
    def inner_size(self) -> int:
        return self.router.top_k * self.experts.expert_size + (0 if self.shared is None else self.shared.mlp.inner_size)

    @property
    def activation_size(self) -> int:
        """Numbers per token of temporary tensors, as an upper bound for kernels and plain torch:

        fp32 scores of the experts and their order; for each of the k pairs the result of the first product, the same quantised,
        its row of x or the result of the second product, and its entries in the lists of pairs; gate, up and their product of
        one expert; the fp32 sum over the slots and one of its terms; what the shared expert computes.
        """
        own, top_k = self.experts, self.router.top_k
        pairs = top_k * (2 * own.expert_size + own.hidden_size + 8)
        shared = 0 if self.shared is None else self.shared.mlp.activation_size + self.hidden_size
        around = 0 if self.narrow is None else 2 * (own.hidden_size + self.hidden_size)
        return 8 * own.num_experts + pairs + 3 * own.expert_size + 4 * own.hidden_size + shared + around

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        """The router's and the experts' products over T tokens.

        T tokens that choose k of E experts independently of each other read E (1 - (1 - k/E)^T) experts on average.
        """
        num_experts, top_k = self.experts.num_experts, self.router.top_k
        read = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
        router = ProductSpec((Projection(self.router.name, num_experts, self.hidden_size),), quantisable=False)
        experts = (
            Gemm(product=spec.of(0), ops=(), stored=num_experts, read=read, active=top_k, grouped=True) for spec in self.grouped
        )
        shared = () if self.shared is None else self.shared.mlp.gemms(tokens)
        around = (Gemm(product=product, ops=("linear",)) for product in self.around)
        return Gemm(product=router, ops=()), *shared, *around, *experts

    def _inner(self, shard: Shard, unit: int) -> slice:
        return shard.of("the size of an expert", self.experts.expert_size, unit)

    def sharded(self, shard: Shard, unit: int) -> MoeSpec:
        """Every rank holds a part of every expert: their work differs by a block at most, whatever tokens choose."""
        inner = self._inner(shard, unit)
        shared = None if self.shared is None else replace(self.shared, mlp=self.shared.mlp.sharded(shard, unit))
        return replace(self, experts=replace(self.experts, expert_size=inner.stop - inner.start), shared=shared)

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        """The router is whole on every rank, so that all ranks route alike without an exchange."""
        inner = self._inner(shard, unit)
        gate_up, down = (spec.of(0).parts[0].name for spec in self.grouped)
        shared = {} if self.shared is None else self.shared.mlp.shares(shard, unit)
        own = {gate_up: Share("columns", (inner,)), down: Share("rows", (inner,), shard.rank == 0)}
        return {**own, **shared, **whole_shares(self.around)}

    def build(self, source: BlockSource) -> Moe:
        return Moe(self, source)


class Moe:
    """See the module's docstring."""

    def __init__(self, spec: MoeSpec, source: BlockSource) -> None:
        self._spec, router = spec, spec.router
        self._norm = source.vector(f"{spec.norm}.weight")
        self._router = _narrowed(torch.cat([source.vector(f"{name}.weight") for name in (router.name, *spec.gates)]))
        self._bias = source.vector(f"{router.name}.bias") if router.bias else None
        self._selection_bias = source.vector(router.selection_bias) if router.selection_bias else None
        self._factors = source.vector(router.factors) if router.factors else None
        self._router_norm = source.vector(router.input_scale) * spec.hidden_size**-0.5 if router.input_scale else None
        self._shared = None if spec.shared is None else GatedProducts(spec.shared.mlp, source)
        self._around = [source.product(product) for product in spec.around]
        self._gate_up, self._down = source.grouped(spec.experts.gate_up), source.grouped(spec.experts.down)
        # int32 [1]: the number of experts that had tokens in the newest call, dead tokens left out.
        self.num_experts_read = torch.zeros(1, dtype=torch.int32, device=self._router.device)

    def pass_sizes(self, most: int) -> Sequence[int]:
        return expert_pass_sizes(self._spec.router.top_k, self._spec.experts.num_experts, self._gate_up.weight_dtype, most)

    def norms_in_product(self, stream: Stream) -> bool:
        return False

    def __call__(self, stream: Stream, lora: LoraTokens | None, *, add_in_product: bool) -> None:
        values, weights, shared = self.pairs(stream, lora)
        if not self._around:
            stream.add_pairs(values, weights, shared)
            return
        # Summed over the ranks first: a calibrated scale of the product's activations is that of the whole sum.
        out: Tensor = self._around[1](stream.reduced(stream.combined(values, weights)), lora)
        stream.add(out if shared is None else out + stream.reduced(shared))

    def pairs(self, stream: Stream, lora: LoraTokens | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `Stream.add_pairs` adds: the outputs of the experts and their weights, and that of the shared expert, if there is
        one."""
        x = stream.normed(self._norm, self._spec.eps)
        of_router = x if self._router_norm is None else stream.normed(self._router_norm, self._spec.eps)
        of_experts: Tensor = self._around[0](x, lora) if self._around else x
        routing, gate = self._route(of_experts, of_router, stream.live)
        shared = None if self._shared is None else self._shared(x, lora)
        if shared is not None and self._spec.gates:
            shared = sigmoid_gated(shared, gate)
        inner = self._gate_up.up(of_experts, routing, self._spec.experts.gating, quantise=self._down.reads_groups)
        return self._down.down(inner, routing), routing.weights, shared

    def _route(self, x: Tensor, of_router: Tensor, live: Tensor | None) -> tuple[Routing, Tensor]:
        """Experts, weights and work list for x [T, H], of which the router reads `of_router` [T, H], and the logits of the shared
        expert's gate [T, 1], or [T, 0] without one.

        Tokens that are not `live` get no expert. Does not synchronise.
        """
        router, num_experts, dtype = self._spec.router, self._spec.experts.num_experts, self._gate_up.weight_dtype
        unit_pairs = expert_unit_pairs(x.shape[0], router.top_k, num_experts, dtype)
        how: dict[str, Any] = {
            "scoring": router.scoring, "norm_topk": router.norm_topk, "sum_eps": router.sum_eps, "scale": router.scale,
            "groups": router.groups, "bias": self._selection_bias, "factors": self._factors, "unit_pairs": unit_pairs,
            "largest_first": largest_units_first(unit_pairs, dtype), "live": live,
        }
        has_kernels = has_fast_experts(x.device, x.dtype) and num_experts <= MAX_EXPERTS and router.top_k <= MAX_TOP_K
        if has_kernels and not x.requires_grad:  # gradients flow through plain torch only
            logits = router_logits(of_router, self._router, self._bias, interpret=not x.is_cuda)
            routing = route(
                logits[:, :num_experts], router.top_k, out_num_read=self.num_experts_read,
                rows_of=x if self._gate_up.reads_rows else None, interpret=not x.is_cuda, **how,
            )
        else:
            with torch.autocast(x.device.type, enabled=False):
                logits = router_logits_reference(of_router, self._router, self._bias)
            routing = route_reference(logits[:, :num_experts], router.top_k, **how)
            self.num_experts_read.copy_(num_read(routing))
        return routing, logits[:, num_experts:]


def _narrowed(router: Tensor) -> Tensor:
    """On a GPU the matrix in bf16, if bf16 holds every number exactly, as from a bf16 checkpoint; else the matrix as it is.

    The product of bf16 with bf16 takes one pass of the tensor cores; with fp32 it takes three.
    """
    if not router.is_cuda or router.requires_grad:
        return router
    narrow = router.bfloat16()
    return narrow if torch.equal(narrow.to(router.dtype), router) else router
