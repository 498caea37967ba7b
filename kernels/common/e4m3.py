"""Numbers of 8 bits, e4m3fn: 4 bits of exponent, 3 of mantissa, at most 448, no infinities. Rounding to them and reading them.

    stored = round(limit(x / scale, -448 .. 448))     x is about stored * scale

x / scale is x * (1 / scale), both in fp32 (fp64 of fp64), so that torch and Triton give the same bits. A number above 448 * scale
saturates; NaN stays NaN. Source: Micikevicius et al. 2022 ("FP8 Formats for Deep Learning", arXiv 2209.05433).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


@triton.jit
def magnitude(x):
    """|x|, and inf for NaN, which tl.max would ignore. A scale computed from NaN is then inf, and products with it are NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def round_to_e4m3(x, INTERPRETED: tl.constexpr):
    """fp32 -> e4m3, saturating; NaN becomes some number."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERPRETED:  # its cast drops the carry of a rounding up to the next power of two
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, rounded)  # subnormals: multiples of 2^-9
    return x.to(tl.float8e4nv)


@triton.jit
def e4m3_bits(x, inverse, INTERPRETED: tl.constexpr):
    """x * inverse as the bits of e4m3, uint8, saturating; the result for NaN is some number. x fp32 or fp64."""
    scaled = (x * inverse.to(x.dtype)).to(tl.float32)
    return round_to_e4m3(scaled, INTERPRETED).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_values(stored, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """e4m3 -> dtype (fp16, bf16 or fp32), which is exact."""
    values = stored.to(dtype)
    if INTERPRETED:  # it reads NaN as 480
        nan = (stored.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
        values = tl.where(nan, float("nan"), values).to(dtype)
    return values


_FOUR_TO_BF16 = tl.constexpr("""{
    .reg .b16 low, high, half<4>;
    .reg .b32 lows, highs;
    .reg .f32 wide<4>;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 lows, low;
    cvt.rn.f16x2.e4m3x2 highs, high;
    mov.b32 {half0, half1}, lows;
    mov.b32 {half2, half3}, highs;
    cvt.f32.f16 wide0, half0;
    cvt.f32.f16 wide1, half1;
    cvt.f32.f16 wide2, half2;
    cvt.f32.f16 wide3, half3;
    cvt.rn.bf16x2.f32 $0, wide1, wide0;
    cvt.rn.bf16x2.f32 $1, wide3, wide2;
}""")
"""Converts four e4m3 numbers to bf16 by way of fp32, because converting fp16 to bf16 directly takes several times as long."""


@triton.jit
def e4m3_operand(stored, INTERPRETED: tl.constexpr):
    """e4m3 -> bf16, exactly, for an operand whose product sums over K in the same order as with operands loaded in bf16.

    If Triton knows that an operand of mma.sync was converted from 8 bits, it gives each thread four neighbours of K instead of
    two (kWidth 4): the first instruction then sums numbers 0, 1, 4, 5, .. 29 of 32 and the second the others. wgmma sums 0 to 15
    and then 16 to 31, so the two would give different bits. Inline assembly that may have side effects hides the conversion.
    """
    if INTERPRETED:
        return e4m3_values(stored, tl.bfloat16, True)
    return tl.inline_asm_elementwise(_FOUR_TO_BF16, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=False, pack=4)


def to_e4m3(x: Tensor, scales: Tensor) -> Tensor:
    """x, of any floating-point dtype, to e4m3; scales fp32, broadcast to it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * scales.reciprocal().to(wide)).clamp_(-LARGEST, LARGEST).to(E4M3)


def from_e4m3(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """stored * scales, rounded once to `dtype`; scales fp32, broadcast to `stored`."""
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scales.to(wide)).to(dtype)


def movable(stored: Tensor) -> Tensor:
    """e4m3 as uint8, any other dtype as it is, over the same memory: some torch operations that copy do not support e4m3."""
    return stored.view(torch.uint8) if stored.dtype is E4M3 else stored
