"""FP8 weights: e4m3 values times a scale per block of 128 x 128, per row, or for the whole weight.

    NAME.weight         e4m3 [N, K]
    NAME.weight_scale   [ceil(N / 128), ceil(K / 128)], [N, 1] or [1], of any floating-point dtype; some name it weight_scale_inv
    NAME.input_scale    [1], the scale of the activations, if they were calibrated; some name it activation_scale

There are two ways to multiply. Either the weight is converted to the model's dtype at load, and activations are read as they are.
Or the weight stays e4m3, and activations are quantised as the checkpoint says (W8A8, `fp8_products.py`). `Formats.on` chooses.
Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.model.layers.base import GroupedSpec, Projection, Share, TensorSpec
from batchspec.model.layers.forward import GroupedProduct, Product
from batchspec.model.quant.base import Pieces, Slices, Weights, bias_of, joined_bias, shard_bias, shard_matrix
from batchspec.model.quant.fp8_products import BLOCK, Activations, Fp8Experts, Fp8Linear, Fp8Weight, StackedFp8
from batchspec.model.quant.grouped import ROW_BYTES, SeparateExperts, expert_biases, expert_parts
from batchspec.model.quant.ordered import OrderedLinear
from batchspec.model.quant.plain import Linear

_DUMMY_SCALE, _DUMMY_INPUT_SCALE = 2e-4, 0.02

Scales = Literal["block", "row", "tensor"]


@dataclass(frozen=True, slots=True)
class Fp8(SeparateExperts):
    """See the module's docstring."""

    scales: Scales
    made_for: Activations
    """How activations must be quantised for this checkpoint; plain: not at all."""
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"
    quantises: bool = False
    """True: weights stay e4m3, and products quantise activations as `made_for` says. False: weights are converted at load."""
    ordered: bool = False
    """Whether products sum in one order (decode.deterministic)."""

    def with_activations(self) -> Fp8:
        """This format with quantised activations, if the checkpoint says how to quantise them."""
        assert self.made_for != "plain"
        return replace(self, quantises=True)

    def in_one_order(self) -> Fp8:
        """This format with sums in one order. The caller checks that batchspec's kernels compute its products."""
        return replace(self, ordered=True)

    @property
    def kept(self) -> str:
        return "FP8 weights and activations" if self.quantises else ""

    def for_kernels(self) -> Fp8:
        return self  # no kernel multiplies FP8 weights with plain activations

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        shapes: dict[Scales, tuple[tuple[int, ...], ...]] = {
            "block": ((-(-part.rows // BLOCK), -(-part.k // BLOCK)),),
            "row": ((part.rows, 1), (part.rows,)),
            "tensor": ((1,), ()),
        }
        shape, *others = shapes[self.scales]
        weight = TensorSpec(f"{part.name}.weight", (part.rows, part.k), "weight", ("F8_E4M3",))
        scale = TensorSpec(f"{part.name}.{self.scale_name}", shape, "scale", others=tuple(others), typical=_DUMMY_SCALE)
        inputs = TensorSpec(f"{part.name}.{self.input_scale_name}", (1,), "scale", others=((),), typical=_DUMMY_INPUT_SCALE)
        return weight, scale, *((inputs,) if self.made_for == "static" else ()), *bias_of(part)

    def holds(self, spec: GroupedSpec) -> bool:
        return not spec.stacked  # quantisers convert modules, but stacked experts are parameters

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        if not self.quantises:
            return rows * k * dtype.itemsize
        return rows * k + 4 * (-(-rows // BLOCK) * -(-k // BLOCK) if self.scales == "block" else rows)

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        if self.quantises:
            parts = [self._part(weights, name) for name in names]
            own_bias = joined_bias(weights, names) if bias else None
            return Fp8Linear(parts, own_bias, self.made_for, weights.dtype, ordered=self.ordered)
        matrix = torch.cat([self.matrix(weights, name) for name in names])
        return (OrderedLinear if self.ordered else Linear)(matrix, joined_bias(weights, names) if bias else None)

    def matrix(self, weights: Weights, name: str) -> Tensor:
        """The weight [N, K] in the model's dtype."""
        return self._part(weights, name).matrix(weights.dtype)

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        """With calibrated inputs all experts of a layer use the largest of their input scales, as vLLM's fused experts do."""
        if not self.quantises:
            return SeparateExperts.load_grouped(self, weights, spec)
        stacked = StackedFp8(spec, self.scales == "block", weights.device)
        inputs = []
        for expert, place, part in expert_parts(spec):
            own = self._part(weights, part.name)
            stacked.put(expert, place, own)
            inputs += [] if own.input_scale is None else [own.input_scale]
        bias, input_scale = expert_biases(weights, spec), max(inputs, default=None)
        return Fp8Experts(stacked, bias, self.made_for, input_scale, weights.dtype)

    @property
    def block(self) -> int:
        """Of 16 numbers where no scale is of a block: kernels read such rows alone."""
        return BLOCK if self.scales == "block" else ROW_BYTES

    def shard(self, part: Projection, share: Share) -> Slices:
        pieces = shard_matrix(part, share, block=BLOCK if self.scales == "block" else 1)
        scale: dict[Scales, Pieces] = {
            "block": tuple(tuple(slice(own.start // BLOCK, -(-own.stop // BLOCK)) for own in piece) for piece in pieces),
            "row": tuple((rows,) for rows, _ in pieces),
            "tensor": (),
        }
        own = {f"{part.name}.weight": pieces, f"{part.name}.{self.scale_name}": scale[self.scales]}
        if self.made_for == "static":
            own[f"{part.name}.{self.input_scale_name}"] = ()
        return own | shard_bias(part, share)

    def _part(self, weights: Weights, name: str) -> Fp8Weight:
        values, scale = weights.stored(f"{name}.weight"), weights.stored(f"{name}.{self.scale_name}").float()
        if self.scales != "block":
            scale = scale.reshape(-1).expand(values.shape[0]).contiguous()
        input_scale = None
        if self.quantises and self.made_for == "static":
            own = f"{name}.{self.input_scale_name}"
            input_scale = float(weights.stored(own))
            if not 0 < input_scale < float("inf"):
                raise CheckpointError(f"{own} is {input_scale:g}; it must be positive and finite: calibrate the checkpoint again")
        return Fp8Weight(values, scale, input_scale)
