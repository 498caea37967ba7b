"""RoPE for training, of heads in the layout of the projections: out = x * cos + roll(x, D / 2) * sin, by position.

The backward pass is the same function with sin rolled by D / 2, so one kernel serves both. Bound by memory; plain torch takes six
passes. N flat tokens in rows of L, H heads, D head_dim. Source: Su et al. 2021, RoFormer (arXiv 2104.09864), half-split form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check

ROWS = 32


@triton.jit(do_not_specialize=("num_heads", "length"))
def rope_train_kernel(
    x, cos, sin, out, num_heads, length, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, HALF)
    exists = (row < num_heads)[:, None] & (lane < D // 2)[None, :]
    index = row[:, None] * D + lane[None, :]
    entry = (row // HEADS % length)[:, None] * D + lane[None, :]
    low, high = tl.load(x + index, mask=exists, other=0.0).to(ACC), tl.load(x + index + D // 2, mask=exists, other=0.0).to(ACC)
    cos_low, cos_high = tl.load(cos + entry, mask=exists, other=0.0), tl.load(cos + entry + D // 2, mask=exists, other=0.0)
    sin_low, sin_high = tl.load(sin + entry, mask=exists, other=0.0), tl.load(sin + entry + D // 2, mask=exists, other=0.0)
    tl.store(out + index, low * cos_low + high * sin_low, mask=exists)
    tl.store(out + index + D // 2, high * cos_high + low * sin_high, mask=exists)


def rope_train(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write x rotated by the angle of each position.

    x    fp32, bf16, fp16 or fp64 [N, H, D]  N a multiple of L: concatenated rows of L positions
    cos  fp32 (fp64 for fp64) [L, D]
    sin  like cos; its first half is negated in the forward pass
    out  like x

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, heads, size = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    check("rope_train: x", x, (num_tokens, heads, size), *FLOATS)
    check("rope_train: cos", cos, (len(cos), size), wide)
    check("rope_train: sin", sin, (len(cos), size), wide)
    check("rope_train: out", out, (num_tokens, heads, size), x.dtype)
    if size % 2 or (num_tokens % len(cos) if len(cos) else num_tokens):
        raise ValueError(
            f"rope_train: x has {num_tokens} tokens of {size} values; must be a multiple of {len(cos)} tokens, with an even "
            "number of values each"
        )
    if not (x.is_cuda or interpret):
        rope_train_reference(x, cos, sin, out=out)
    elif num_tokens:
        rope_train_kernel[(triton.cdiv(num_tokens * heads, ROWS),)](
            x, cos, sin, out, num_tokens * heads, len(cos), HEADS=heads, D=size, HALF=triton.next_power_of_2(size // 2),
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, ROWS=ROWS, num_warps=4,
        )


def rope_train_reference(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """The same in plain torch."""
    rows = x.view(-1, len(cos), *x.shape[1:]).to(cos.dtype)
    rotated = rows * cos.unsqueeze(1) + rows.roll(x.shape[2] // 2, -1) * sin.unsqueeze(1)
    out.copy_(rotated.view(x.shape))
