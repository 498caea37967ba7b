"""The gated MLP (SwiGLU): down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.model.blocks.base import Gemm, ProductSpec, Projection, TensorSpec


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
