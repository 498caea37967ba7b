"""Weights in the model's own dtype: bf16, fp32 or fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.gemm import linear as kernels
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.fused import rms_norm, silu_and_mul
from batchspec.model.layers.base import GroupedSpec, Projection, Share, TensorSpec
from batchspec.model.layers.forward import GroupedProduct, Product
from batchspec.model.quant.base import Slices, Weights, bias_of, joined_bias, shard_bias, shard_matrix
from batchspec.model.quant.grouped import (
    SeparateExperts,
    load_stacked,
    shard_stacked,
    shard_stacked_bias,
    stacked_bias,
)
from batchspec.tuning.policy import gemm_tile


class Plain(SeparateExperts):
    """`NAME.weight` [N, K] of any floating-point dtype; loading converts it to the model's dtype."""

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        return TensorSpec(f"{part.name}.weight", (part.rows, part.k), "weight"), *bias_of(part)

    def matrix(self, weights: Weights, name: str) -> Tensor:
        return weights.stored(f"{name}.weight")

    def holds(self, spec: GroupedSpec) -> bool:
        return True

    def grouped_tensors(self, spec: GroupedSpec) -> tuple[TensorSpec, ...]:
        """Stacked experts are stored transposed, [E, k, rows], as transformers saves gpt-oss."""
        if not spec.stacked:
            return super().grouped_tensors(spec)
        shape = (spec.num_experts, spec.k, spec.rows)
        return TensorSpec(spec.of(0).parts[0].name, shape, "weight"), *stacked_bias(spec)

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        if not spec.stacked:
            return super().load_grouped(weights, spec)
        return load_stacked(weights, spec, lambda expert: weights.entry(spec.of(0).parts[0].name, expert).t())

    def shard_grouped(self, spec: GroupedSpec, share: Share) -> Slices:
        if not spec.stacked:
            return super().shard_grouped(spec, share)
        (rows, columns), experts = shard_stacked(spec, share), slice(0, spec.num_experts)
        return {spec.of(0).parts[0].name: ((experts, columns, rows),), **shard_stacked_bias(spec, share, rows)}

    @property
    def kept(self) -> str:
        return ""

    def for_kernels(self) -> Plain:
        return self

    def in_one_order(self) -> Plain:
        return self

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        return rows * k * dtype.itemsize

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        weight = torch.cat([weights.tensor(f"{name}.weight") for name in names])
        return Linear(weight, joined_bias(weights, names) if bias else None)

    @property
    def block(self) -> int:
        return 1

    def shard(self, part: Projection, share: Share) -> Slices:
        return {f"{part.name}.weight": shard_matrix(part, share)} | shard_bias(part, share)


PLAIN = Plain()


class Linear(Product):
    """x [T, in] -> x @ weight.T + bias [T, out].

    On a CPU an fp32 or bf16 weight is kept in oneDNN's blocked layout: 1.3x (40 tokens) to 2.5x (8 tokens, fp32) faster than
    F.linear, which reorders it in every call. Otherwise the weight is kept as it is. On a GPU in bf16, a Triton kernel computes
    the product if it measured faster than the library (`batchspec.tuning`). Before a product is captured in a CUDA graph, it must
    have run once with the same number of tokens.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = _packed(weight) if self._packed else weight

    def rewrite(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Replace weight and bias by others of the same shapes. On a GPU addresses stay: captured graphs read the new numbers."""
        if self._packed:
            self._weight = _packed(weight)
        else:
            self._weight.copy_(weight)
        if self._bias is not None:
            assert bias is not None
            self._bias.copy_(bias)

    def weight_rows(self, ids: Tensor) -> Tensor:
        """A copy of the rows of the weight at ids int64 [n]."""
        weight = self._weight.to_dense() if self._packed else self._weight
        return weight.index_select(0, ids)

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return out
        tile = self.tile("linear", x)
        return F.linear(x, self._weight, self._bias) if tile is None else kernels.linear(x, self._weight, self._bias, tile=tile)

    def rows_from(self, first: int) -> Product:
        weight = self._weight.to_dense() if self._packed else self._weight
        return Linear(weight[first:], None if self._bias is None else self._bias[first:])

    def tile(self, op: str, x: Tensor) -> Tile | None:
        """The tile with which the Triton kernel computes `op` (`batchspec.tuning`) on x; None: use the library's product."""
        if not (x.is_cuda and x.dtype is torch.bfloat16):
            return None
        return gemm_tile(op, x.shape[0], self._weight.shape[0], self._weight.shape[1], x.device)

    def swiglu(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        tile = self.tile("swiglu", x)
        return silu_and_mul(self(x)) if tile is None else kernels.swiglu(x, self._weight, self._bias, tile=tile)

    def norms_input(self, x: Tensor, *, gated: bool) -> bool:
        return self.tile("norm_swiglu" if gated else "norm_linear", x) is not None

    def of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None = None) -> Tensor:
        tile = self.tile("norm_linear", x) if norm.dtype is x.dtype else None
        if tile is None:
            return self(rms_norm(x, norm, eps))
        return kernels.norm_linear(x, norm, self._weight, self._bias, eps=eps, tile=tile)

    def swiglu_of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None = None) -> Tensor:
        tile = self.tile("norm_swiglu", x) if norm.dtype is x.dtype else None
        if tile is None:
            return self.swiglu(rms_norm(x, norm, eps))
        return kernels.norm_swiglu(x, norm, self._weight, self._bias, eps=eps, tile=tile)

    def add_to(self, residual: Tensor, x: Tensor, lora: LoraTokens | None = None) -> Tensor | None:
        tile = self.tile("linear_add", x)
        if tile is None:
            return self(x)
        kernels.linear_add(x, self._weight, self._bias, residual=residual, tile=tile)
        return None


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _packed(weight: Tensor) -> Tensor:
    # oneDNN chooses the layout by the number of rows of x, here 64; every number above 1 gives the same layout.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
    return packed
