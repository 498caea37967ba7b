"""Batch-invariant products y = x @ weight.T: one order of sums at every number of tokens, so that a row's bits are its own.

    K is cut into `segments` equal parts, a number of the weight alone:
    y[t, n] = (p_0 + p_1) + p_2 ...        p_s = the sum over part s, in steps of 16 as the tensor cores take them, from its start

A tile determines only which program computes which part of y: all segments of a tile in one program, or one program for each. In
the second case the last program to finish adds up the parts in order (`split_k.py`). Few tokens need it to fill the GPU.
Tiles have at least 64 tokens: Triton multiplies fewer with other instructions, and the bits of those products were not compared.
One kernel gives y in x's dtype, SwiGLU of it, or logits in fp32. `tests/gpu/test_gpu_deterministic.py` compares the bits of all
tiles, `python -m batchspec.kernels.benchmarks ordered --sweep` times them.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.linear import swiglu_reference, write_tile
from batchspec.kernels.gemm.operands import DTYPES, operands, read_block
from batchspec.kernels.gemm.split_k import MAX_TILES, counters, join_parts
from batchspec.kernels.gemm.tiles import Tile

GROUP = 16
"""Tiles of tokens that run together with all tiles of the weight, so that x stays in the L2 cache during prefill."""
MIN_BLOCK_M = 64


@triton.jit
def sum_segment(
    x, w, m, col, first, num_blocks, num_tokens, n, k, w_rows, stride_x, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """The sum of a tile's products over K blocks first .. first + num_blocks - 1, which starts at 0."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    tl.assume(num_blocks > 0)  # else each instruction of a tile of 128 x 256 waits for the one before, as below
    for block in range(first, first + num_blocks):
        at = block * BLOCK_K
        a = read_block(x, m, at, num_tokens, k, stride_x, BLOCK_M, BLOCK_K, TMA, EVEN_K)
        b = read_block(w, col, at, w_rows, k, stride_w, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
        if GATED:
            c = read_block(w, n + col, at, w_rows, k, stride_w, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            if INTERPRETED:
                c = c.to(tl.float32)
            up = tl.dot(a, c.T, up, input_precision="ieee")
    return acc, up


@triton.jit(do_not_specialize=["num_tokens", "segment_blocks"])  # a loop of a known single step would be rewritten: other sums
def ordered_kernel(
    x, w, bias, out, partials, arrived, num_tokens, n, k, segment_blocks, stride_x, stride_w, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPLIT: a program for each segment of each tile; else one for each tile."""
    program = tl.program_id(0)
    tile = program // SEGMENTS if SPLIT else program
    m_tiles = tl.cdiv(num_tokens, BLOCK_M)
    per_group = GROUP * tl.cdiv(n, BLOCK_N)
    first_tile = tile // per_group * GROUP
    num_m = tl.minimum(m_tiles - first_tile, GROUP)
    m = (first_tile + tile % per_group % num_m) * BLOCK_M
    col = tile % per_group // num_m * BLOCK_N
    w_rows = 2 * n if GATED else n
    await_earlier(PDL)
    complete = True
    if SEGMENTS == 1 or SPLIT:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # One step: without this loop ptxas (CUDA 12.8) lets each tensor core instruction of 8 warps wait for the one before.
        for segment in range(program % SEGMENTS, program % SEGMENTS + 1):
            acc, up = sum_segment(
                x, w, m, col, segment * segment_blocks, segment_blocks, num_tokens, n, k, w_rows, stride_x, stride_w,
                BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_K, GATED, INTERPRETED,
            )
        if SPLIT:
            complete, acc, up = join_parts(partials, arrived, tile, program, SEGMENTS, 1, acc, up, BLOCK_M, BLOCK_N, GATED)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for segment in range(SEGMENTS):
            part, up_part = sum_segment(
                x, w, m, col, segment * segment_blocks, segment_blocks, num_tokens, n, k, w_rows, stride_x, stride_w,
                BLOCK_M, BLOCK_N, BLOCK_K, TMA, EVEN_K, GATED, INTERPRETED,
            )
            acc += part
            up += up_part
    if complete:
        write_tile(bias, None, None, out, acc, up, acc, m, col, num_tokens, n, k, stride_out, 0.0, BLOCK_M, BLOCK_N, GATED)


def ordered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, segments: int, tile: Tile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """x @ weight.T + bias; a token's bits depend only on its row of x, the weight and `segments`.

    x         bf16 or fp32 [T, K]  rows may be slices of wider ones
    weight    same dtype [N, K], contiguous
    bias      same dtype [N], or None
    segments  parts of K with sums of their own (`segments_of`); K must be a multiple of segments * tile.block_k, unless it is 1
    tile      how y is divided among programs: block_m at least 64, split 1 or `segments`, per_sm 0. No bit depends on it
    out       x's dtype or fp32 [T, N], contiguous; None: a new tensor of x's dtype

    Returns out. Does not synchronise. As for `linear`, run it once before it is captured in a CUDA graph.
    Raises ValueError for other shapes, dtypes, strides or tiles.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, segments=segments, tile=tile, out=out)
        return out
    return out.copy_(ordered_linear_reference(x, weight, bias, segments=segments, dtype=out.dtype))


def ordered_swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, segments: int, tile: Tile, interpret: bool = False
) -> Tensor:
    """silu(gate) * up of gate_up = x @ weight.T + bias, weight [2 * N, K] with the gate's rows first -> [T, N].

    See `ordered_linear`. Rounds as a product and `silu_and_mul` do.
    """
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    if x.is_cuda or interpret:
        launch(x, weight, bias, segments=segments, tile=tile, out=out, gated=True)
        return out
    return out.copy_(swiglu_reference(x, weight, bias))


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, segments: int, tile: Tile, out: Tensor, gated: bool = False,
    compile_only: bool = False,
) -> None:
    """Check the arguments and launch the kernel; `compile_only` compiles without a launch."""
    (num_tokens, k), dtype = x.shape, x.dtype
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    check("ordered_linear: x", x, (num_tokens, k), *DTYPES, rows=True)
    check("ordered_linear: weight", weight, (2 * n if gated else n, k), dtype)
    check("ordered_linear: out", out, (num_tokens, n), dtype, torch.float32)
    if bias is not None:
        check("ordered_linear: bias", bias, (weight.shape[0],), dtype)
    if tile.block_m < MIN_BLOCK_M or tile.per_sm or tile.split not in (1, segments):
        raise ValueError(f"ordered_linear: {tile} with {segments} segments; use block_m >= 64, per_sm=0, split 1 or {segments}")
    if segments > 1 and k % (segments * tile.block_k):
        raise ValueError(f"ordered_linear: K is {k}; must be a multiple of {segments} segments * block_k {tile.block_k}")
    if not num_tokens:
        return
    split = segments > 1 and tile.split == segments
    num_tiles = triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(n, tile.block_n)
    if split and num_tiles > MAX_TILES:
        raise ValueError(f"ordered_linear: {num_tiles} tiles split along K; at most {MAX_TILES}: use larger tiles or split=1")
    programs = num_tiles * (segments if split else 1)
    slot = tile.block_m * tile.block_n * (2 if gated else 1)
    partials = x.new_empty((num_tiles + programs) * slot, dtype=torch.float32) if split else None
    start = partial(ordered_kernel.warmup, grid=(programs,)) if compile_only else ordered_kernel[(programs,)]
    x_operand, w_operand, tma = operands(x, weight, tile)
    start(
        x_operand, w_operand, bias, out, partials, counters(x.device) if split else None, num_tokens, n, k,
        triton.cdiv(k, tile.block_k) // segments, x.stride(0), k, n, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, SEGMENTS=segments, SPLIT=split, GROUP=GROUP, TMA=tma, EVEN_K=k % tile.block_k == 0, GATED=gated,
        INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages, **launch_args(x),
    )


def ordered_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, *, segments: int, dtype: torch.dtype) -> Tensor:
    """The same in plain torch, in fp32, rounded once; its bits do depend on the number of tokens."""
    wide, matrix = x.float(), weight.float()
    y = sum(a @ b.T for a, b in zip(wide.chunk(segments, 1), matrix.chunk(segments, 1), strict=True))
    assert isinstance(y, Tensor)
    return (y if bias is None else y + bias.float()).to(dtype)
