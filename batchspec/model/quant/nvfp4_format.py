"""NVFP4 weights of ModelOpt and of compressed-tensors (nvfp4-pack-quantized): their tensors, bytes, loading and cuts over ranks.

    ModelOpt              compressed-tensors
    NAME.weight           NAME.weight_packed        uint8 [N, K / 2]   codes of two columns each, the first in the low half
    NAME.weight_scale     NAME.weight_scale         e4m3 [N, K / 16]
    NAME.weight_scale_2   NAME.weight_global_scale  fp32 [] or [1]     ModelOpt's multiplies, that of compressed-tensors divides
    NAME.input_scale      NAME.input_global_scale   fp32 [] or [1]     of activations in FP4, not read; not in all files

`kernels/common/nvfp4.py` defines the numbers. Projections that are multiplied as one matrix, such as gate and up, may have
different global scales: each row keeps its own. In bf16 on a GPU weights have the form that kernels read (`arranged`).
Source: https://github.com/NVIDIA/Model-Optimizer (torch/quantization/qtensor/nvfp4_tensor.py, torch/export/unified_export_hf.py);
https://github.com/vllm-project/compressed-tensors (compressors/nvfp4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.errors import CheckpointError
from batchspec.kernels.common.four_bit import BLOCK, ROWS, WORDS
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.common.nvfp4 import Nvfp4Weight, arranged, dequantise
from batchspec.model.layers.base import GroupedSpec, Projection, Share, TensorSpec
from batchspec.model.layers.forward import GroupedProduct, Product
from batchspec.model.quant.base import Slices, Weights, bias_of, check_size, joined_bias, shard_bias, shard_matrix
from batchspec.model.quant.four_bit import FourBitLinear
from batchspec.model.quant.four_bit_experts import load_experts
from batchspec.model.quant.grouped import SeparateExperts, expert_biases, expert_parts
from batchspec.model.quant.nvfp4 import Nvfp4Experts, Nvfp4Linear, StackedNvfp4

FORMAT = "nvfp4-pack-quantized"
_TYPICAL = 7e-3
"""Global scale of dummy weights, whose other scales are 1: their standard deviation is then 0.02."""
_FIRST_BAD = 0x7F
"""Of the bytes of e4m3 from here on, one is NaN and the others are negative or NaN."""

UNPACKING = 4 / 3
"""Time to unpack a weight, relative to INT4. Counted, not timed: for 128 x 128 weights a step of the compiled kernel has 400
instructions of four warps, that of INT4 270 to 300."""


@dataclass(frozen=True, slots=True)
class Nvfp4(SeparateExperts):
    """A layout of NVFP4 weights; see the module's docstring."""

    codes: str
    """The names of three tensors of a projection, after its own name: codes, global scale, scale of activations."""
    global_scale: str
    input_scale: str
    divides: bool
    """Whether numbers are divided by the global scale."""
    fast: bool = False
    """Whether weights are kept as kernels read them (`FourBitWeight`)."""
    ordered: bool = False
    """Whether these products sum in one order (decode.deterministic)."""

    @property
    def kept(self) -> str:
        return "NVFP4 weights"

    def unpacking(self, *, grouped: bool) -> float | None:
        return UNPACKING if self.fast else None

    def for_kernels(self) -> Nvfp4:
        return replace(self, fast=True)

    def in_one_order(self) -> Nvfp4:
        return replace(self, ordered=True)

    def holds(self, spec: GroupedSpec) -> bool:
        return not spec.stacked  # quantisers convert modules, but stacked experts are parameters

    def tensors(self, part: Projection) -> tuple[TensorSpec, ...]:
        check_size(part, part.k, "inputs", GROUP, "NVFP4")
        typical = 1 / _TYPICAL if self.divides else _TYPICAL
        return (
            TensorSpec(f"{part.name}.{self.codes}", (part.rows, part.k // 2), "weight", ("U8",)),
            TensorSpec(f"{part.name}.weight_scale", (part.rows, part.k // GROUP), "scale", ("F8_E4M3",)),
            TensorSpec(f"{part.name}.{self.global_scale}", (1,), "scale", others=((),), typical=typical, wide=True),
            *bias_of(part),
        )

    def spares(self, part: Projection) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{part.name}.{self.input_scale}", (1,), "scale", others=((),)),)

    def nbytes(self, rows: int, k: int, dtype: torch.dtype) -> int:
        if self.fast:
            return -(-rows // ROWS) * ROWS * (-(-k // BLOCK) * (2 * WORDS + BLOCK // GROUP) + torch.float32.itemsize)
        return rows * (k // 2 + k // GROUP + torch.float32.itemsize)

    def kernel_group(self, k: int) -> int:
        """The size of the groups as the kernels take it (`FourBitWeight.kernel_group`)."""
        return GROUP

    def weight(self, weights: Weights, name: str) -> Nvfp4Weight:
        """Read the projection of this name. Its scales are still to be checked."""
        codes, scales = weights.stored(f"{name}.{self.codes}"), weights.stored(f"{name}.weight_scale")
        factor = weights.stored(f"{name}.{self.global_scale}").float().reshape(1)
        return Nvfp4Weight(codes, scales, factor.expand(len(codes)).contiguous(), self.divides)

    def load(self, weights: Weights, names: Sequence[str], *, bias: bool) -> Product:
        parts = [self._checked(weights, name) for name in names]
        own = joined_bias(weights, names) if bias else None
        if self.fast:
            return FourBitLinear([arranged(part) for part in parts], own, ordered=self.ordered)
        return Nvfp4Linear(parts, own)

    def matrix(self, weights: Weights, name: str) -> Tensor:
        return dequantise(self._checked(weights, name), weights.dtype)

    def load_grouped(self, weights: Weights, spec: GroupedSpec) -> GroupedProduct:
        if self.fast:
            parts = ((expert, rows, spec.name, arranged(part)) for expert, rows, part in self._experts(weights, spec))
            return load_experts(weights, spec, parts, act_order=False)
        stacked = StackedNvfp4(spec, divides=self.divides, device=weights.device)
        for expert, rows, part in self._experts(weights, spec):
            stacked.put(expert, rows, part)
        return Nvfp4Experts(stacked, expert_biases(weights, spec))

    def _experts(self, weights: Weights, spec: GroupedSpec) -> Iterator[tuple[int, slice, Nvfp4Weight]]:
        """Every projection of every expert, with its rows in the expert's matrix. After the last one raises CheckpointError for
        scales that no tool writes: a check of each would wait for the device."""
        wrong = torch.zeros((), dtype=torch.bool, device=weights.device)
        for expert, rows, part in expert_parts(spec):
            own = self.weight(weights, part.name)
            right = (own.row_scales > 0) & own.row_scales.isfinite()
            wrong |= (own.scales.view(torch.uint8) >= _FIRST_BAD).any() | ~right.all()
            yield expert, rows, own
        if wrong:
            for _, _, part in expert_parts(spec):
                self._checked(weights, part.name)

    @property
    def block(self) -> int:
        return GROUP

    def shard(self, part: Projection, share: Share) -> Slices:
        pieces = shard_matrix(part, share, block=1 if share.cut == "columns" else GROUP)
        return {
            f"{part.name}.{self.codes}": tuple((rows, _units(columns, 2)) for rows, columns in pieces),
            f"{part.name}.weight_scale": tuple((rows, _units(columns, GROUP)) for rows, columns in pieces),
            f"{part.name}.{self.global_scale}": (),
        } | shard_bias(part, share)

    def _checked(self, weights: Weights, name: str) -> Nvfp4Weight:
        """`weight`. Raises CheckpointError for scales that no tool writes. Synchronises on a GPU."""
        found, problem = self.weight(weights, name), ""
        low, high = (float(limit) for limit in found.row_scales.aminmax())
        if int(found.scales.view(torch.uint8).max()) >= _FIRST_BAD:
            problem = "weight_scale holds NaN or negative numbers, and scales must be finite and not negative"
        elif not 0 < low <= high < float("inf"):
            problem = f"{self.global_scale} is {low if not low > 0 else high:g}, and it must be positive and finite"
        if problem:
            raise CheckpointError(f"{name}.{problem}; download the file again, or quantise again")
        return found


MODELOPT = Nvfp4("weight", "weight_scale_2", "input_scale", divides=False)
COMPRESSED = Nvfp4("weight_packed", "weight_global_scale", "input_global_scale", divides=True)


def _units(own: slice, size: int) -> slice:
    """The bytes, or scales, of a range of columns that begins and ends with one."""
    return slice(own.start // size, own.stop // size)


def read_scheme(weights: ConfigReader, inputs: ConfigReader | None) -> Nvfp4 | str:
    """`config_groups.NAME` of compressed-tensors -> the layout, or a text that names what of it is not supported.

    inputs  how activations are quantised on hardware that multiplies FP4; None: not at all. Here they never are
    """
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
    right = weights.integer("num_bits", 8) == 4 and weights.text("type", "int") == "float" and weights.flag("symmetric", True)
    right = right and weights.text("strategy", "tensor_group") == "tensor_group" and weights.integer("group_size", -1) == GROUP
    if not right or weights.flag("dynamic"):
        shown = ", ".join(weights.shown(key, prefix=False) for key in keys)
        return f"compressed-tensors {FORMAT} with weights of {shown}"
    if weights.differs("scale_dtype", None, "torch.float8_e4m3fn"):
        return f"compressed-tensors {FORMAT} with {weights.shown('scale_dtype')}"
    if inputs is not None and (inputs.text("type", "int") != "float" or inputs.integer("num_bits", 8) not in (4, 8)):
        shown = ", ".join(inputs.shown(key, prefix=False) for key in keys[:2])
        return f"compressed-tensors {FORMAT} with activations of {shown}"
    return COMPRESSED
