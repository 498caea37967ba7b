"""A gated MLP and a mixture of experts side by side: both read the stream, and the outputs of both are normed and added up.

    y = norm_1(mlp(norm(stream))) + norm_2(experts(norm'(stream)))    of each token the experts that its router chooses
    stream += norm_3(y)                                               times a number of the layer, if it has one

Source: transformers, models/gemma4 (Gemma4TextDecoderLayer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.fused import add_norm, rms_norm
from batchspec.model.layers.base import Gemm, GroupedSpec, ProductSpec, Shard, Share, TensorSpec
from batchspec.model.layers.forward import BlockSource, Stream
from batchspec.model.layers.mlp.gated_mlp import GatedMlpSpec
from batchspec.model.layers.mlp.moe import MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMoeSpec:
    """The shapes of both."""

    mlp: GatedMlpSpec
    """Its output is normed."""
    moe: MoeSpec
    experts_norm: str
    """Name of the norm of the experts' output."""
    post_norm: str
    """Name of the norm of the sum."""
    out_factor: str | None = None
    """Name of a number [1] with which the stream is multiplied in the end; None: it is not multiplied."""

    def __post_init__(self) -> None:
        assert self.mlp.post_norm is not None
        assert self.moe.shared is None

    @property
    def hidden_size(self) -> int:
        return self.mlp.hidden_size

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.mlp.products

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        return self.moe.grouped

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        norms = (self.moe.norms.tensor(name, self.hidden_size) for name in (self.experts_norm, self.post_norm))
        factor = () if self.out_factor is None else (TensorSpec(self.out_factor, (1,), "scale"),)
        return *self.mlp.vectors, *self.moe.vectors, *norms, *factor

    @property
    def inner_size(self) -> int:
        return self.mlp.inner_size + self.moe.inner_size

    @property
    def num_sums(self) -> int:
        return self.mlp.num_sums + self.moe.num_sums

    @property
    def activation_size(self) -> int:
        """The larger of both; the output of the MLP is kept while the experts are computed."""
        return max(self.mlp.activation_size, self.moe.activation_size) + 2 * self.hidden_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        return *self.mlp.gemms(tokens), *self.moe.gemms(tokens)

    def sharded(self, shard: Shard, unit: int) -> ParallelMoeSpec:
        return replace(self, mlp=self.mlp.sharded(shard, unit), moe=self.moe.sharded(shard, unit))

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        return {**self.mlp.shares(shard, unit), **self.moe.shares(shard, unit)}

    def build(self, source: BlockSource) -> ParallelMoe:
        return ParallelMoe(self, source)


class ParallelMoe:
    """See the module's docstring."""

    def __init__(self, spec: ParallelMoeSpec, source: BlockSource) -> None:
        self._eps, self._mlp, self._moe = spec.moe.eps, spec.mlp.build(source), spec.moe.build(source)
        self._experts_norm, self._post_norm = (source.vector(f"{name}.weight") for name in (spec.experts_norm, spec.post_norm))
        self._out_factor = None if spec.out_factor is None else source.vector(spec.out_factor)

    @property
    def num_experts_read(self) -> Tensor:
        return self._moe.num_experts_read

    def pass_sizes(self, most: int) -> Sequence[int]:
        return self._moe.pass_sizes(most)

    def norms_in_product(self, stream: Stream) -> bool:
        return False

    def __call__(self, stream: Stream, lora: LoraTokens | None, *, add_in_product: bool) -> None:
        dense = self._mlp.output(stream, lora)
        values, weights, _ = self._moe.pairs(stream, lora)
        experts = rms_norm(stream.reduced(stream.combined(values, weights)), self._experts_norm, self._eps)
        stream.add(add_norm(experts, dense, self._post_norm, self._eps), self._out_factor)
