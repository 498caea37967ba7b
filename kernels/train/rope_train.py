"""RoPE of heads laid out as projections leave them, for training: out = x * cos + roll(x, D / 2) * sin, by place.

The way back is the same with sin rolled by D / 2, so one kernel serves both. Bound by memory; in torch it is six passes.
N places of rows of L, H heads, D head_dim. Source: Su et al. 2021, RoFormer (arXiv 2104.09864), in the half-split form.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import FLOATS, check

ROWS = 32


@triton.jit(do_not_specialize=("num_heads", "length"))
def rope_train_kernel(
    x, cos, sin, out, num_heads, length, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, HALF)
    exists = (row < num_heads)[:, None] & (lane < D // 2)[None, :]
    at = row[:, None] * D + lane[None, :]
    table = (row // HEADS % length)[:, None] * D + lane[None, :]
    low, high = tl.load(x + at, mask=exists, other=0.0).to(ACC), tl.load(x + at + D // 2, mask=exists, other=0.0).to(ACC)
    cos_low, cos_high = tl.load(cos + table, mask=exists, other=0.0), tl.load(cos + table + D // 2, mask=exists, other=0.0)
    sin_low, sin_high = tl.load(sin + table, mask=exists, other=0.0), tl.load(sin + table + D // 2, mask=exists, other=0.0)
    tl.store(out + at, low * cos_low + high * sin_low, mask=exists)
    tl.store(out + at + D // 2, high * cos_high + low * sin_high, mask=exists)


def rope_train(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write x turned by the angle of each place.

    x    fp32, bf16, fp16 or fp64 [N, H, D]  N a multiple of L: rows of L places end to end
    cos  fp32 (fp64 for fp64) [L, D]
    sin  the same, its first half negated on the way there
    out  like x

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    places, heads, size = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    check("rope_train: x", x, (places, heads, size), *FLOATS)
    check("rope_train: cos", cos, (len(cos), size), wide)
    check("rope_train: sin", sin, (len(cos), size), wide)
    check("rope_train: out", out, (places, heads, size), x.dtype)
    if size % 2 or (places % len(cos) if len(cos) else places):
        raise ValueError(
            f"rope_train: {places} places of {size} values are no rows of {len(cos)} places with an even number of values"
        )
    if not (x.is_cuda or interpret):
        rope_train_reference(x, cos, sin, out=out)
    elif places:
        rope_train_kernel[(triton.cdiv(places * heads, ROWS),)](
            x, cos, sin, out, places * heads, len(cos), HEADS=heads, D=size, HALF=triton.next_power_of_2(size // 2),
            ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, ROWS=ROWS, num_warps=4,
        )  # fmt: skip


def rope_train_reference(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """The same in plain torch."""
    rows = x.view(-1, len(cos), *x.shape[1:]).to(cos.dtype)
    turned = rows * cos.unsqueeze(1) + rows.roll(x.shape[2] // 2, -1) * sin.unsqueeze(1)
    out.copy_(turned.view(x.shape))


def main() -> None:
    bench = Bench("turn")
    for rows, length, heads, size in ((64, 512, 9, 64), (64, 512, 3, 64), (16, 1024, 32, 128)):
        xs = [torch.randn(rows * length, heads, size, device=bench.device).bfloat16() for _ in range(bench.num_copies)]
        cos, sin = torch.randn(2, length, size, device=bench.device)
        out = torch.empty_like(xs[0])
        bench.row(
            f"N={rows * length} H={heads} D={size} bfloat16",
            [partial(rope_train, x, cos, sin, out=out) for x in xs],
            [partial(rope_train_reference, x, cos, sin, out=out) for x in xs],
            num_bytes=2 * out.nbytes,
        )


if __name__ == "__main__":
    main()
