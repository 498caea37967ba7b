"""The gated MLP (SwiGLU): down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchspec.model.blocks.base import Gemm, GroupedSpec, ProductSpec, Projection, TensorSpec
from batchspec.model.blocks.forward import BlockSource, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec:
    """The shape of a gated MLP."""

    hidden_size: int
    inner_size: int
    eps: float
    """of its norm"""
    bias: bool = False
    name: str = "mlp"
    norm: str = "post_attention_layernorm"

    @property
    def gate_up(self) -> ProductSpec:
        names = (f"{self.name}.gate_proj", f"{self.name}.up_proj")
        return ProductSpec(tuple(Projection(name, self.inner_size, self.hidden_size, self.bias) for name in names))

    @property
    def down(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.down_proj", self.hidden_size, self.inner_size, self.bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.gate_up, self.down

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        return ()

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{self.norm}.weight", (self.hidden_size,), "norm"),)

    @property
    def activation_size(self) -> int:
        """gate and up, and what they make together."""
        return 3 * self.inner_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        return (
            Gemm(product=self.gate_up, ops=("linear", "swiglu", "norm_swiglu")),
            Gemm(product=self.down, ops=("linear", "linear_add")),
        )

    def build(self, source: BlockSource) -> GatedMlp:
        return GatedMlp(self, source)


class GatedMlp:
    """See the module's docstring."""

    def __init__(self, spec: GatedMlpSpec, source: BlockSource) -> None:
        self._eps = spec.eps
        self._norm = source.vector(f"{spec.norm}.weight")
        self._gate_up, self._down = source.product(spec.gate_up), source.product(spec.down)

    def norms_in_product(self, stream: Stream) -> bool:
        return stream.norms_in_product(self._gate_up, gated=True)

    def __call__(self, stream: Stream, row_ids: Tensor | None, *, add_in_product: bool) -> None:
        inner = stream.project(self._norm, self._eps, self._gate_up, row_ids, gated=True)
        stream.add_product(self._down, inner, row_ids, in_product=add_in_product)
