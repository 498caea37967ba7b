"""The products that `experts.py` times: shapes of models, and random weights of each format with one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.four_bit import BLOCK, ROWS, WORDS, dequantise
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.moe import experts_four_bit, experts_fp8, experts_mxfp4, experts_plain
from batchspec.kernels.moe.experts_four_bit import StackedFourBit
from batchspec.kernels.moe.experts_fp8 import Fp8Weight
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.mxfp4 import Mxfp4Weight, dequantise_mxfp4, mxfp4_shapes
from batchspec.kernels.moe.quantise import quantise_rows
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing

FORMATS = ("bf16", "fp8", "mxfp4", "int4", "nvfp4")

INT4_GROUP = 128
"""Columns that share a scale."""


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The sizes of a model's experts, their gate and biases, and the formats worth timing."""

    experts: int
    top_k: int
    hidden: int
    width: int
    gate: Gate = SWIGLU
    bias: bool = False
    formats: tuple[str, ...] = ("bf16", "fp8")


MODELS = {
    "gpt-oss-120b": MoeShape(128, 4, 2880, 2880, Gate(7.0), True, ("mxfp4", "bf16")),
    "gpt-oss-20b": MoeShape(32, 4, 2880, 2880, Gate(7.0), True, ("mxfp4",)),
    "qwen3-30b": MoeShape(128, 8, 2048, 768, formats=("bf16", "fp8", "int4", "nvfp4")),
    "minimax-m2": MoeShape(256, 8, 3072, 1536, formats=("fp8",)),
    "tiny": MoeShape(4, 2, 128, 128, Gate(7.0), True, FORMATS),
}
"""`tiny` is for tests."""

KERNELS = {"bf16": experts_plain, "fp8": experts_fp8, "mxfp4": experts_mxfp4, "int4": experts_four_bit, "nvfp4": experts_four_bit}


@dataclass(slots=True)
class Product:
    """The first (gated) or second product of a layer, with random weights of one format."""

    shape: MoeShape
    form: str
    gated: bool
    weight: Any
    bias: Tensor | None
    device: torch.device
    wide: Tensor | None
    """MXFP4, INT4 and NVFP4 weights dequantised, bf16"""

    @property
    def rows(self) -> int:
        return 2 * self.shape.width if self.gated else self.shape.hidden

    @property
    def k(self) -> int:
        return self.shape.hidden if self.gated else self.shape.width

    @property
    def dtype(self) -> torch.dtype:
        own = {"bf16": torch.bfloat16, "fp8": E4M3, "mxfp4": torch.uint8}
        return own.get(self.form, torch.int32)

    @property
    def tolerance(self) -> float:
        """bf16 outputs; the tensor cores' sums of e4m3 hold about 14 bits."""
        return 6e-3 if self.form == "fp8" else 4e-3

    @property
    def expert_bytes(self) -> float:
        parts = (self.weight,) if isinstance(self.weight, Tensor) else self.weight
        return sum(part.nbytes for part in parts if isinstance(part, Tensor)) / self.shape.experts

    def inputs(self, tokens: int) -> Tensor:
        """bf16 rows of tokens; of the second product, of pairs in pair order."""
        return torch.randn(tokens if self.gated else tokens * self.shape.top_k, self.k, device=self.device).bfloat16()

    def rows_of(self, x: Tensor, routing: Routing) -> Any:
        """x as the product reads it: in the order of the list of pairs, FP8 quantised."""
        if not self.gated:  # as if each pair were a token of its own
            routing = routing._replace(expert_ids=routing.expert_ids.view(-1, 1))
        return quantise_rows(x, routing) if self.form == "fp8" else sort_rows(x, routing)

    def rows_bytes(self, rows: Any) -> int:
        return sum(part.nbytes for part in rows) if self.form == "fp8" else rows.nbytes

    def empty(self, pairs: int) -> Tensor:
        return torch.empty(pairs, self.rows // 2 if self.gated else self.rows, dtype=torch.bfloat16, device=self.device)

    def run(self, rows: Any, routing: Routing, tile: ExpertTile, out: Tensor, **how: bool) -> None:
        """how: `by_token` and `compile_only` of the kernels' `launch`."""
        module: Any = KERNELS[self.form]
        gate = self.shape.gate if self.gated else None
        module.launch("experts", rows, self.weight, self.bias, routing, tile, out, gate=gate, **how)

    def result(self, x: Tensor, routing: Routing, tile: ExpertTile) -> Tensor:
        """The product in pair order; NaN for values that were not written."""
        out = self.empty(len(routing.pairs)).fill_(torch.nan)
        self.run(self.rows_of(x, routing), routing, tile, out)
        return self.by_pair(out, routing)

    def by_pair(self, out: Tensor, routing: Routing) -> Tensor:
        """What `run` wrote, in pair order."""
        return torch.empty_like(out).index_copy_(0, routing.pairs.long(), out) if self.gated else out

    def reference(self, x: Tensor, routing: Routing) -> Tensor:
        """fp32 [P, N] in pair order"""
        rows, weight = self.rows_of(x, routing), self.weight if self.wide is None else self.wide
        module: Any = experts_fp8 if self.form == "fp8" else experts_plain
        name = f"{module.__name__.rsplit('.', 1)[-1]}_{'up' if self.gated else 'down'}_reference"
        gate = {"gate": self.shape.gate} if self.gated else {}
        out: Tensor = getattr(module, name)(rows, weight, self.bias, routing, **gate).float()
        return self.by_pair(out, routing)


def make_products(shape: MoeShape, form: str, device: torch.device) -> tuple[Product, Product]:
    """Both products of a layer."""
    products = []
    for gated, rows, k in ((True, 2 * shape.width, shape.hidden), (False, shape.hidden, shape.width)):
        bias = torch.randn(shape.experts, rows, device=device).bfloat16() if shape.bias else None
        weight = _random_weight(form, shape.experts, rows, k, gated, device)
        wide = None
        if form in ("mxfp4", "int4", "nvfp4"):
            wide = torch.empty(shape.experts, rows, k, dtype=torch.bfloat16, device=device)
            for expert, own in enumerate(wide):  # one by one: the intermediate numbers take far more memory
                own.copy_(_dequantised(weight, expert))
        products.append(Product(shape, form, gated, weight, bias, device, wide))
    return products[0], products[1]


def _dequantised(weight: Mxfp4Weight | StackedFourBit, expert: int) -> Tensor:
    if isinstance(weight, StackedFourBit):
        return dequantise(weight.expert(expert), torch.bfloat16)
    return dequantise_mxfp4(weight.expert(expert), torch.bfloat16)


def _random_weight(form: str, num_experts: int, rows: int, k: int, gated: bool, device: torch.device) -> Any:
    if form == "bf16":
        return torch.empty(num_experts, rows, k, dtype=torch.bfloat16, device=device).normal_(std=k**-0.5)
    if form == "fp8":
        values = torch.empty(num_experts, rows, k, dtype=E4M3, device=device)
        for expert in values:
            expert.copy_((torch.randn(rows, k, device=device) * 100).clamp(-448, 448))  # the cast gives NaN beyond
        blocks = 2 * -(-rows // 256) if gated else -(-rows // 128)
        scales = torch.rand(num_experts, blocks, -(-k // 128), device=device) + 0.5
        return Fp8Weight(values, scales * (0.01 * k**-0.5))
    if form in ("int4", "nvfp4"):
        size = (num_experts, -(-k // BLOCK), rows // ROWS, ROWS * WORDS)
        words = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device=device)
        if form == "nvfp4":  # scales of 0.5 to 1.9, two in 16 bits
            octets = torch.randint(20 << 3, 22 << 3, (num_experts, 4 * size[1], 2 * rows), dtype=torch.uint8, device=device)
            row_scales = (torch.rand(num_experts, 1, rows, device=device) + 0.5) * (k**-0.5 / 3)
            return StackedFourBit(words, octets.view(torch.int16), None, k, GROUP, row_scales)
        scales = (torch.rand(num_experts, -(-k // INT4_GROUP), rows, device=device) + 0.5) * (k**-0.5 / 4.6)
        return StackedFourBit(words, scales.bfloat16(), None, k, INT4_GROUP if k > INT4_GROUP else 0)
    words_shape, scales_shape = mxfp4_shapes(rows, k)
    words = torch.randint(0, 256, (num_experts, *words_shape), dtype=torch.uint8, device=device)
    exponents = torch.randint(118 + 126, 124 + 126, (num_experts, *scales_shape), dtype=torch.uint8, device=device)
    return Mxfp4Weight(words, exponents, rows, k, gated)
