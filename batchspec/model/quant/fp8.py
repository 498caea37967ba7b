"""FP8 weights: e4m3 with a fp32 scale of each block of 128 x 128, of each row, or of the whole, by which they are multiplied.

    NAME.weight         e4m3 [N, K]
    NAME.weight_scale   [ceil(N / 128), ceil(K / 128)], [N, 1] or [1], of any floating-point dtype (`weight_scale_inv` in some)
    NAME.input_scale    [1], where activations were calibrated

A product either converts the weight to the model's dtype at load and reads activations as they are, or quantises them too (W8A8):

    q = x / s, limited to -448 .. 448 and rounded to e4m3 (to nearest even); the scale s is, by the checkpoint,
        token   max(largest |x|, 1e-10) / 448 over the row
        group   the same over each 128 values of the row
        static  input_scale
    y = sum of q * weight over K, times both scales, in fp32 (fp64 in a model of fp64); where the weight's scales are of blocks,
        the sum over each 128 of K is multiplied by its own scales and added

Both are plain torch, on any device: the references for kernels.
Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3); vLLM's per_token_group_quant_fp8 for the smallest scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from batchspec.errors import CheckpointError, ConfigError
from batchspec.kernels.common.e4m3 import E4M3, LARGEST
from batchspec.kernels.moe.quantise import quantise_rows_reference
from batchspec.model.blocks.base import GroupedSpec, Projection, TensorSpec
from batchspec.model.blocks.forward import Product
from batchspec.model.quant.base import Cut, Slices, Weights, bias_of, joined_bias, shard_bias, shard_matrix
from batchspec.model.quant.grouped import GroupedLinear, SeparateExperts
from batchspec.model.quant.plain import Linear

BLOCK = 128
_DUMMY_SCALE, _DUMMY_INPUT_SCALE = 2e-4, 0.02

Scales = Literal["block", "row", "tensor"]
Activations = Literal["plain", "token", "group", "static"]
"""plain: products read them in the model's dtype; the others: see the module's docstring."""


@dataclass(frozen=True, slots=True)
class Fp8(SeparateExperts):
    """See the module's docstring."""

    scales: Scales
    made_for: Activations
    """How the checkpoint says that activations are quantised."""
    scale_name: str = "weight_scale"
    quantises: bool = False
    """Products quantise activations as `made_for` says; else they are plain."""

    def with_activations(self) -> Fp8:
        """The same with activations quantised. Raises ConfigError where the checkpoint says nothing of them."""
        if self.made_for == "plain":
            raise ConfigError("model.activations=fp8: the checkpoint has FP8 weights for activations that are not; use dtype")
        return replace(self, quantises=True)

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        shapes: dict[Scales, tuple[tuple[int, ...], ...]] = {
            "block": ((-(-part.rows // BLOCK), -(-part.k // BLOCK)),),
            "row": ((part.rows, 1), (part.rows,)),
            "tensor": ((1,), ()),
        }
        shape, *others = shapes[self.scales]
        weight = TensorSpec(f"{part.name}.weight", (part.rows, part.k), "weight", ("F8_E4M3",))
        scale = TensorSpec(f"{part.name}.{self.scale_name}", shape, "scale", others=tuple(others), typical=_DUMMY_SCALE)
        inputs = TensorSpec(f"{part.name}.input_scale", (1,), "scale", others=((),), typical=_DUMMY_INPUT_SCALE)
        return weight, scale, *((inputs,) if self.made_for == "static" else ()), *bias_of(part)

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        if not self.quantises:
            return rows * k * dtype.itemsize
        return rows * k + 4 * (-(-rows // BLOCK) * -(-k // BLOCK) if self.scales == "block" else rows)

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        if self.quantises:
            parts = [self._part(weights, name) for name in names]
            return Fp8Linear(joined(parts), joined_bias(weights, names) if bias else None, self.made_for)
        matrix = torch.cat([self.matrix(weights, name) for name in names])
        return Linear(matrix, joined_bias(weights, names) if bias else None)

    def matrix(self, weights: Weights, name: str) -> Tensor:
        """The weight [N, K] in the model's dtype, each number times its scale in fp32 and rounded once."""
        part = self._part(weights, name)
        return (part.values.float() * part.spread).to(weights.dtype)

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedLinear:
        if self.quantises:
            raise ConfigError("model.activations=fp8 is not built for experts; use dtype")
        return SeparateExperts.load_grouped(self, weights, spec)

    def shard(self, part: Projection, cut: Cut, rank: int, ranks: int) -> Slices:
        rows, columns = shard_matrix(part, cut, rank, ranks, multiple=BLOCK if self.scales == "block" else 1)
        scale: dict[Scales, tuple[slice, ...]] = {
            "block": tuple(slice(own.start // BLOCK, -(-own.stop // BLOCK)) for own in (rows, columns)),
            "row": (rows,),
            "tensor": (),
        }
        own = {f"{part.name}.weight": (rows, columns), f"{part.name}.{self.scale_name}": scale[self.scales]}
        if self.made_for == "static":
            own[f"{part.name}.input_scale"] = ()
        return own | shard_bias(part, cut, rank, ranks)

    def _part(self, weights: Weights, name: str) -> Fp8Weight:
        values, scale = weights.stored(f"{name}.weight"), weights.stored(f"{name}.{self.scale_name}").float()
        if self.scales != "block":
            scale = scale.reshape(-1, 1).expand(values.shape[0], 1).contiguous()
        input_scale = None
        if self.quantises and self.made_for == "static":
            input_scale = float(weights.stored(f"{name}.input_scale"))
            if not 0 < input_scale < float("inf"):
                raise CheckpointError(f"{name}.input_scale is {input_scale:g}; it must be positive: calibrate the checkpoint")
        return Fp8Weight(values, scale, self.scales == "block", input_scale)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight in memory: one form for all checkpoints."""

    values: Tensor
    """e4m3 [N, K]"""
    scale: Tensor
    """fp32 [ceil(N / 128), ceil(K / 128)] of blocks, or [N, 1] of rows"""
    blocked: bool
    input_scale: float | None = None
    """static: of the activations"""

    @property
    def spread(self) -> Tensor:
        """The scale of each number, [N, K], or of each row, [N, 1]."""
        if not self.blocked:
            return self.scale
        rows, k = self.values.shape
        return self.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]


def joined(parts: Sequence[Fp8Weight]) -> list[Fp8Weight]:
    """Weights of one input as one, their rows one after another, where every number keeps its scale; else as they are."""
    whole = all(not part.blocked or part.values.shape[0] % BLOCK == 0 for part in parts[:-1])
    if not whole or len({(part.blocked, part.input_scale) for part in parts}) > 1:
        return list(parts)
    values, scale = torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts])
    return [replace(parts[0], values=values, scale=scale)]


class Fp8Linear(Product):
    """x [T, K] -> q(x) q(w)' with both scales, + bias [T, N], rounded to x's dtype at the end. See the module's docstring."""

    def __init__(self, parts: Sequence[Fp8Weight], bias: Tensor | None, activations: Activations) -> None:
        self._parts, self._bias, self._activations = parts, bias, activations

    def __call__(self, x: Tensor, row_ids: Tensor | None = None) -> Tensor:
        out = torch.cat([self._product(x, part) for part in self._parts], -1)
        return (out if self._bias is None else out + self._bias).to(x.dtype)

    def _product(self, x: Tensor, part: Fp8Weight) -> Tensor:
        values, scale = quantised(x, self._activations, part.input_scale)
        wide = torch.promote_types(x.dtype, torch.float32)
        if not part.blocked:
            return values.to(wide) @ part.values.to(wide).T * scale * part.scale.to(wide).T
        out = x.new_zeros(x.shape[0], part.values.shape[0], dtype=wide)
        scale = scale.expand(-1, part.scale.shape[1])
        rows = part.scale.repeat_interleave(BLOCK, 0)[: part.values.shape[0]].to(wide)
        for block in range(part.scale.shape[1]):
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            sums = values[:, own].to(wide) @ part.values[:, own].to(wide).T
            out += sums * scale[:, block : block + 1] * rows[:, block]
        return out


def quantised(x: Tensor, activations: Activations, input_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] -> e4m3 [T, K] and scales, fp32 (fp64 of fp64): group [T, ceil(K / 128)], else [T, 1]. Does not synchronise."""
    if activations != "static":
        assert activations in ("token", "group")
        return quantise_rows_reference(x, whole=activations == "token")
    assert input_scale is not None
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.new_full((x.shape[0], 1), input_scale)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale
