"""Attention with grouped K/V heads and rotary embedding: NH query heads and KVH key/value heads of D numbers."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.model.blocks.base import Gemm, ProductSpec, Projection, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The shape of an attention block."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """of its norms"""
    window: int | None = None
    """Keys that a query sees at most, itself included; None: all."""
    input_size: int | None = None
    """Width of what q, k and v are made of, where it is not the normed residual stream [H]; None: it is."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """q and k are normed, each head by itself, before they are rotated."""
    name: str = "self_attn"
    norm: str = "input_layernorm"

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of K of one token, and as many of V."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv(self) -> ProductSpec:
        sizes, k = {"q": self.inner_size, "k": self.kv_size, "v": self.kv_size}, self.input_size or self.hidden_size
        return ProductSpec(tuple(Projection(f"{self.name}.{x}_proj", rows, k, self.qkv_bias) for x, rows in sizes.items()))

    @property
    def kv(self) -> ProductSpec:
        """The part of `qkv` that makes K and V."""
        return ProductSpec(self.qkv.parts[1:])

    @property
    def out(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.o_proj", self.hidden_size, self.inner_size, self.o_bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.qkv, self.out

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        norms = [(self.norm, self.hidden_size)]
        norms += [(f"{self.name}.{x}_norm", self.head_dim) for x in "qk"] if self.qk_norm else []
        return tuple(TensorSpec(f"{name}.weight", (size,), "norm") for name, size in norms)

    @property
    def activation_size(self) -> int:
        """q, k and v before and after the rotation, and the attended values."""
        return 2 * self.qkv.rows + self.inner_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        return (
            Gemm(product=self.qkv, ops=("linear", "norm_linear")),
            Gemm(product=self.out, ops=("linear", "linear_add")),
        )
