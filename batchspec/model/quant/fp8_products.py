"""Products with FP8 weights and activations (W8A8): in bf16 on Ada or newer Triton kernels and the library, else plain torch.

    q = x / s, clamped to -448 .. 448, rounded to e4m3 (to nearest even). The checkpoint says how the scale s is found:
        token   one per row: max(largest |x| of the row, 1e-10) / 448
        group   one per 128 values of a row, by the same formula
        static  one calibrated scale, stored in the checkpoint
    y = (sum over K of q * weight) * s * weight scale, in fp32 (fp64 in a model of fp64). If the weight has block scales, this is
        computed for each 128 of K with the scales of that block, and the results are added.

Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3); vLLM's per_token_group_quant_fp8 for the smallest scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.gemm.fp8_linear import fp8_linear, fp8_linear_reference
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_tokens
from batchspec.kernels.gemm.scaled_mm import library_scales, scaled_mm
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.moe import experts_fp8 as kernels
from batchspec.kernels.moe.fp8_steps import fp8_product_reference
from batchspec.kernels.moe.quantise import Fp8Rows, quantise_rows, quantise_rows_reference
from batchspec.kernels.moe.units import Routing
from batchspec.model.fused import norm_quantised, rms_norm
from batchspec.model.layers.base import Gating, GroupedSpec
from batchspec.model.layers.forward import Product
from batchspec.model.quant.grouped import ROW_BYTES, PlainExperts, gate_of, tile_of
from batchspec.tuning.policy import fp8_tile, gathers_rows, has_fast_fp8, has_scaled_mm, ordered_fp8_tile

BLOCK = 128

Activations = Literal["plain", "token", "group", "static"]
"""How activations are quantised. plain: not at all, products read the model's dtype; the others: see the module's docstring."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """The weight of one projection, in the same form for all FP8 checkpoints."""

    values: Tensor
    """e4m3 [N, K]"""
    scale: Tensor
    """fp32 [ceil(N / 128), ceil(K / 128)] of blocks, or [N] of rows"""
    input_scale: float | None = None
    """The scale of the activations if they are `static`, else None."""

    @property
    def blocked(self) -> bool:
        return self.scale.dim() == 2

    @property
    def spread(self) -> Tensor:
        """Scales that broadcast against `values`: [N, K] from block scales, [N, 1] from row scales."""
        if not self.blocked:
            return self.scale[:, None]
        rows, k = self.values.shape
        return self.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K]: values are multiplied by their scales in fp32, then rounded once."""
        return (self.values.float() * self.spread).to(dtype)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a weight's rows that one FP8 product can compute: its scales are whole blocks, and it has one input scale."""

    rows: slice
    scales: slice
    """The rows of the weight's scales that belong to `rows`."""
    input_scale: float | None


def pieces(parts: Sequence[Fp8Weight]) -> list[Piece]:
    """Divide the concatenated rows of several projections of one input into as few FP8 products as possible.

    Two neighbouring parts join if they have the same input scale and, with block scales, the second begins at a multiple of 128
    rows of the joined piece, so that every block still has its own scale.
    """
    found: list[Piece] = []
    row, scale = 0, 0
    for part in parts:
        own = Piece(slice(row, row + len(part.values)), slice(scale, scale + len(part.scale)), part.input_scale)
        row, scale = own.rows.stop, own.scales.stop
        last = found[-1] if found else None
        whole = not part.blocked or (last is not None and (last.rows.stop - last.rows.start) % BLOCK == 0)
        if last is not None and whole and last.input_scale == own.input_scale:
            found[-1] = replace(last, rows=slice(last.rows.start, row), scales=slice(last.scales.start, scale))
        else:
            found.append(own)
    return found


class Fp8Linear(Product):
    """x [T, K] -> y + bias [T, N] in x's dtype, y as in the module's docstring.

    x is quantised once for all parts; with calibrated scales once for each different one. In bf16 on Ada or newer a product is
    the library's or a Triton kernel (`tuning.policy.fp8_tile`); elsewhere it is plain torch.

    dtype    of x
    ordered  a token's bits do not depend on the number of tokens (decode.deterministic), so the library's product is never used
    """

    def __init__(
        self, parts: Sequence[Fp8Weight], bias: Tensor | None, activations: Activations, dtype: torch.dtype = torch.bfloat16, *,
        ordered: bool = False,
    ) -> None:
        self._values, self._scales = torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts])
        self._bias, self._dtype, self._pieces, self._ordered = bias, dtype, pieces(parts), ordered
        self._forms = {piece.input_scale: form_of(activations, piece.input_scale) for piece in self._pieces}
        self._fast = has_fast_fp8(self._values.device, dtype) and self._values.shape[1] % ROW_BYTES == 0
        self._library = [self._library_scales(piece) for piece in self._pieces]

    def _library_scales(self, piece: Piece) -> Tensor | None:
        """The scales of a piece as the library reads them; None if the library cannot multiply it."""
        weight, scales = self._values[piece.rows], self._scales[piece.scales]
        if self._ordered or not self._fast or self._bias is not None:
            return None
        if not has_scaled_mm(weight.device, self._dtype, blocked=scales.dim() == 2):
            return None
        return library_scales(scales, *weight.shape)

    @property
    def fp8_form(self) -> Fp8Form | None:
        forms = list(self._forms.values())
        return forms[0] if self._fast and len(forms) == 1 else None

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        quantise = partial(quantise_tokens, interpret=not x.is_cuda) if self._fast else _quantise_plainly
        rows = {scale: quantise(x, form) for scale, form in self._forms.items()}
        return self._product([rows[piece.input_scale] for piece in self._pieces], x.dtype)

    def of_fp8(self, x: Fp8Tokens) -> Tensor:
        return self._product([x] * len(self._pieces), self._dtype)

    def of_norm(self, x: Tensor, norm: Tensor, eps: float, lora: LoraTokens | None = None) -> Tensor:
        form = self.fp8_form
        return self(rms_norm(x, norm, eps)) if form is None else self.of_fp8(norm_quantised(None, x, norm, eps, form))

    def _product(self, rows: Sequence[Fp8Tokens], dtype: torch.dtype) -> Tensor:
        """rows: those that each piece reads."""
        own = zip(rows, self._pieces, self._library, strict=True)
        outs = [self._multiply(x, piece, library, dtype) for x, piece, library in own]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    def _multiply(self, x: Fp8Tokens, piece: Piece, library: Tensor | None, dtype: torch.dtype) -> Tensor:
        weight, scales = self._values[piece.rows], self._scales[piece.scales]
        bias = None if self._bias is None else self._bias[piece.rows]
        if not self._fast:
            return fp8_linear_reference(x, weight, scales, bias).to(dtype)
        if self._ordered:
            tile: Fp8Tile | None = ordered_fp8_tile(x.num_tokens)
        else:
            tile = fp8_tile(x.num_tokens, weight.shape[0], weight.shape[1], weight.device, library=library is not None)
        if tile is None:
            assert library is not None
            return scaled_mm(x, weight, library, blocked=scales.dim() == 2)
        return fp8_linear(x, weight, scales, bias, tile=tile, dtype=dtype, interpret=not weight.is_cuda)


def form_of(activations: Activations, input_scale: float | None) -> Fp8Form:
    assert activations != "plain"
    return Fp8Form(whole=activations != "group", scale=input_scale)


def _quantise_plainly(x: Tensor, form: Fp8Form) -> Fp8Tokens:
    return Fp8Tokens(quantise_rows_reference(x, whole=form.whole, scale=form.scale), len(x))


def product_of_ones(size: int, device: torch.device) -> Fp8Linear:
    """The product with a weight [size, size] of ones with block scales, to be timed."""
    scale = torch.ones(-(-size // BLOCK), -(-size // BLOCK), device=device)
    return Fp8Linear([Fp8Weight(torch.ones(size, size, device=device).to(E4M3), scale)], None, "group")


class StackedFp8:
    """The weights of all experts of a grouped product, in one allocation that is filled one projection at a time."""

    def __init__(self, spec: GroupedSpec, blocked: bool, device: torch.device) -> None:
        self.values = torch.empty((spec.num_experts, spec.rows, spec.k), dtype=E4M3, device=device)
        self._part_rows, self._part_scales = spec.part_rows, -(-spec.part_rows // BLOCK) if blocked else spec.part_rows
        columns = (-(-spec.k // BLOCK),) if blocked else ()
        self.scales = torch.empty((spec.num_experts, len(spec.parts) * self._part_scales, *columns), device=device)
        self.gated = len(spec.parts) == 2

    def put(self, expert: int, rows: slice, part: Fp8Weight) -> None:
        """Copy a projection and its scales. rows: the projection's rows in the matrix of its expert."""
        self.values[expert, rows].copy_(part.values)
        first = rows.start // self._part_rows * self._part_scales
        self.scales[expert, first : first + self._part_scales].copy_(part.scale)


class Fp8Experts(PlainExperts):
    """A GroupedProduct with FP8 weights and activations."""

    weight_dtype = E4M3
    reads_rows = False

    def __init__(
        self, weight: StackedFp8, bias: Tensor | None, activations: Activations, input_scale: float | None, dtype: torch.dtype
    ) -> None:
        self.weight, self._bias, self._gated = kernels.Fp8Weight(weight.values, weight.scales), bias, weight.gated
        self._activations, self._input_scale, self._dtype, self.rows = activations, input_scale, dtype, weight.values.shape[1]
        self._fast = has_fast_fp8(weight.values.device, dtype) and weight.values.shape[2] % ROW_BYTES == 0

    @property
    def reads_groups(self) -> bool:
        """True only in bf16: the kernel that quantises its result rounds it to bf16 first."""
        return self._fast and self._activations == "group" and self._dtype is torch.bfloat16

    def up(self, x: Tensor, routing: Routing, gating: Gating, *, quantise: bool) -> Tensor | Fp8Rows:
        if not self._fast:
            return self.plain_up(x, routing, gating)
        by_token = gathers_rows(routing.unit_pairs, E4M3, gated=self._gated)
        rows = quantised(x, self._activations, self._input_scale, None if by_token else routing)
        tile, gate, interpret = tile_of(routing, gated=self._gated, dtype=E4M3), gate_of(gating), not x.is_cuda
        if quantise and tile.block_n == BLOCK and (self._gated or not tile.turned):
            return kernels.experts_fp8_up_quantised(
                rows, self.weight, self._bias, routing, tile=tile, gate=gate, by_token=by_token, interpret=interpret
            )
        return kernels.experts_fp8_up(
            rows, self.weight, self._bias, routing, tile=tile, gate=gate, dtype=x.dtype, by_token=by_token, interpret=interpret
        )

    def down(self, inner: Tensor | Fp8Rows, routing: Routing) -> Tensor:
        if not self._fast:
            assert isinstance(inner, Tensor)
            return self.plain_down(inner, routing)
        rows = self._quantised(inner) if isinstance(inner, Tensor) else inner
        tile = tile_of(routing, gated=False, dtype=E4M3)
        return kernels.experts_fp8_down(
            rows, self.weight, self._bias, routing, tile=tile, dtype=self._dtype, interpret=not rows.values.is_cuda
        )

    def product(self, expert: int, x: Tensor) -> Tensor:
        values, scales = self.weight.values[expert], self.weight.scales[expert]
        out = fp8_product_reference(self._quantised(x), values, scales, gated=self._gated)
        return (out if self._bias is None else out + self._bias[expert]).to(x.dtype)

    def _quantised(self, x: Tensor) -> Fp8Rows:
        return quantised(x, self._activations, self._input_scale)


def quantised(x: Tensor, activations: Activations, input_scale: float | None = None, routing: Routing | None = None) -> Fp8Rows:
    """x [T, K] -> e4m3 [T, K] with scales [ceil(K / 128), T] for `group`, else [1, T], fp32 or for fp64 x fp64.

    With a routing the rows are those of its pairs, in the order of the list.

    Does not synchronise.
    """
    form = form_of(activations, input_scale)
    if has_fast_fp8(x.device, x.dtype) and x.shape[1] % ROW_BYTES == 0:
        return quantise_rows(x, routing, whole=form.whole, scale=form.scale, interpret=not x.is_cuda)
    return quantise_rows_reference(x, routing, whole=form.whole, scale=form.scale)
