"""Matrix products of dense models with FP8 weights and activations (W8A8): y = x @ weight.T + bias, few tokens or odd shapes.

The formula is that of `batchspec.kernels.moe.experts_fp8`, whose loop over K this kernel runs. W is the first operand (M) of the
tensor cores' products. A tile of the output can be shared by several programs, each of which sums whole blocks of 128 of K. The
last one to finish adds their sums in the order of K (`split_k.py`), so the bits are the same in every run.
Bound by memory (the weights) up to about 175 tokens, then by the tensor cores, for which `scaled_mm.py` is faster.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile
from batchspec.kernels.gemm.fp8_tokens import Fp8Tokens
from batchspec.kernels.gemm.split_k import MAX_TILES, counters, join_parts
from batchspec.kernels.moe.blocks import add_bias_and_gate, store_rows
from batchspec.kernels.moe.fp8_steps import apply_row_scales, fp8_product_reference, sum_blocks
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows


@triton.jit
def place_of(tile, num_blocks, num_columns, GROUP: tl.constexpr):
    """The block of tokens of a tile of the output, and its column.

    Tiles run in this order: groups of GROUP blocks of tokens; in a group, columns; in a column, the group's blocks. So
    neighbouring programs read the same weights, and the tokens of a group stay in the L2 cache.
    """
    first = tile // (GROUP * num_columns) * GROUP
    width = tl.minimum(num_blocks - first, GROUP)
    within = tile % (GROUP * num_columns)
    return first + within % width, within // width


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "split"])
def fp8_linear_kernel(
    x, x_scales, w, w_scales, bias, out, partials, arrived, num_tokens, num_rows, n, k, split, scale_stride,
    BLOCKED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """num_rows: rows of x, of which num_tokens are multiplied. split: programs of a tile, 1 unless SPLIT.

    scale_stride: 1 if each row of W has a scale, 0 if there is one; not read with block scales.
    """
    DOT: tl.constexpr = tl.float32 if INTERPRETED else tl.float8e4nv
    program = tl.program_id(0)
    tile = program // split
    unit, column = place_of(tile, tl.cdiv(num_tokens, BLOCK_T), tl.cdiv(n, BLOCK_N), GROUP)
    first, begin = column * BLOCK_N, unit * BLOCK_T
    count = tl.minimum(num_tokens - begin, BLOCK_T)
    num_blocks = tl.cdiv(k, 128)
    part_blocks = tl.cdiv(num_blocks, split)
    start = program % split * part_blocks
    expert = tile * 0
    await_earlier(PDL)
    own_scales = x_scales + begin + tl.arange(0, BLOCK_T)
    acc, up = sum_blocks(
        x, own_scales, w, w_scales, expert, begin, count, first, first, first // 128, first // 128, num_rows, n, tl.cdiv(n, 128),
        k, start, tl.minimum(start + part_blocks, num_blocks), False, BLOCKED, BLOCK_T, BLOCK_N, TMA, 0, EVEN_K, DOT,
        STAGES,
    )
    complete = True
    AHEAD: tl.constexpr = 4 if BLOCK_N * BLOCK_T <= 4096 else 2  # without spilling registers
    if SPLIT:
        complete, acc, up = join_parts(
            partials, arrived, tile, program, split * part_blocks, part_blocks, acc, up, BLOCK_N, BLOCK_T, False, AHEAD
        )
    if complete:
        if not BLOCKED:
            acc = apply_row_scales(acc, own_scales, w_scales, expert, count, first, n, n - 1, scale_stride, BLOCK_N)
        acc = add_bias_and_gate(acc, up, bias, expert, first, n, False, None, None, BLOCK_N)
        store_rows(acc, out, out, begin, count, first, n, False, BLOCK_T, BLOCK_N)


def fp8_linear(
    x: Fp8Tokens, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, tile: Fp8Tile,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:
    """x @ weight.T + bias.

    x       one scale per 128 values if the weight has block scales, else one per row
    weight  e4m3 [N, K], contiguous
    scales  fp32, contiguous: [ceil(N / 128), ceil(K / 128)] of blocks, [N] of rows, or [] of the whole weight
    bias    bf16 or fp32 [N], or None
    tile    how the work is divided; the last bits depend on its split. With `fp8_tiles.ordered_fp8_tile` they depend on a token's
            row of x and the weight alone
    dtype   of the result: bf16 or fp32; on a CPU any float dtype

    Returns [T, N]. Does not synchronise on a GPU. Call it once before it is captured in a CUDA graph: the first call allocates
    the counters of split products. Raises ValueError for other shapes, dtypes or strides.
    """
    if not (x.rows.values.is_cuda or interpret):
        return fp8_linear_reference(x, weight, scales, bias).to(dtype)
    out = x.rows.values.new_empty(x.num_tokens, len(weight), dtype=dtype)
    launch(x, weight, scales, bias, tile, out)
    return out


def launch(
    x: Fp8Tokens, weight: Tensor, scales: Tensor, bias: Tensor | None, tile: Fp8Tile, out: Tensor, *, compile_only: bool = False
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`."""
    values, x_scales = x.rows
    (n, k), num_rows, num_tokens = weight.shape, len(values), x.num_tokens
    blocked, num_tiles = scales.dim() == 2, -(-num_tokens // tile.block_t) * -(-n // tile.block_n)
    _check(x, weight, scales, bias, tile, out, blocked)
    if not num_tokens:
        return
    if tile.split > 1 and num_tiles > MAX_TILES:
        raise ValueError(f"fp8_linear: {num_tiles} tiles split along K; at most {MAX_TILES}: use larger tiles or split=1")
    split, grid = tile.split > 1, (num_tiles * tile.split,)
    slots = (num_tiles + grid[0]) * tile.block_n * tile.block_t
    partials = values.new_empty(slots, dtype=torch.float32) if split else None
    tma = tile.tma and values.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and k % 16 == 0
    start = partial(fp8_linear_kernel.warmup, grid=grid) if compile_only else fp8_linear_kernel[grid]
    start(
        TensorDescriptor.from_tensor(values, [tile.block_t, GROUP]) if tma else values, x_scales,
        TensorDescriptor.from_tensor(weight, [tile.block_n, GROUP]) if tma else weight, scales, bias, out, partials,
        counters(values.device) if split else None, num_tokens, num_rows, n, k, tile.split, scales.dim(),
        BLOCKED=blocked, SPLIT=split, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, GROUP=tile.group, TMA=tma,
        EVEN_K=k % GROUP == 0, STAGES=tile.stages, INTERPRETED=not values.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False, **launch_args(values),
    )


def _check(x: Fp8Tokens, weight: Tensor, scales: Tensor, bias: Tensor | None, tile: Fp8Tile, out: Tensor, blocked: bool) -> None:
    """Raise ValueError unless the arguments fit each other."""
    (n, k), num_rows = weight.shape, len(x.rows.values)
    num_blocks = -(-k // GROUP) if blocked else 1
    check("fp8_linear: x", x.rows.values, (num_rows, k), E4M3)
    check("fp8_linear: scales of x", x.rows.scales, (num_blocks, num_rows), torch.float32)
    check("fp8_linear: weight", weight, (n, k), E4M3)
    shape = (-(-n // GROUP), num_blocks) if blocked else (n,)[: scales.dim()]
    check("fp8_linear: scales of weight", scales, shape, torch.float32)
    check("fp8_linear: out", out, (x.num_tokens, n), torch.bfloat16, torch.float32)
    if bias is not None:
        check("fp8_linear: bias", bias, (n,), torch.bfloat16, torch.float32)
    if x.num_tokens > num_rows:
        raise ValueError(f"fp8_linear: {x.num_tokens} tokens in {num_rows} rows of x")
    if blocked and GROUP % tile.block_n:
        raise ValueError(f"fp8_linear: {tile}; with block scales block_n must divide {GROUP}")


def fp8_linear_reference(x: Fp8Tokens, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`fp8_linear` in plain torch: in the dtype of the scales of x (fp32 or fp64)."""
    live = Fp8Rows(x.rows.values[: x.num_tokens], x.rows.scales[:, : x.num_tokens])
    y = fp8_product_reference(live, weight, scales, gated=False)
    return y if bias is None else y + bias.to(y.dtype)
