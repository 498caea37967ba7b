"""Rounding of fp32 numbers that stay in registers as fp32."""

from __future__ import annotations

import triton
import triton.language as tl

_TWO = tl.constexpr("""{
    .reg .b32 both;
    cvt.rn.bf16x2.f32 both, $3, $2;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xFFFF0000;
}""")
"""Two numbers, rounded together: three instructions. Alone each takes an instruction of a sixteenth of the rate of others."""


@triton.jit
def as_stored(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """x, fp32 or fp64, as it is read after it was stored as DTYPE. Source of the rates: CUDA Programming Guide, "Arithmetic
    Instructions", compute capability 9.0."""
    if INTERPRETED or tl.bfloat16 != DTYPE:
        stored = x.to(DTYPE).to(x.dtype)
    else:
        stored = tl.inline_asm_elementwise(_TWO, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return stored
