"""Grouped products of experts with FP8 weights and activations (W8A8).

    block scales   y = sum over blocks b of 128 columns: (sum over b of x8 * w8) * x_scale[row, b] * w_scale[block of 128 rows, b]
    row scales     y = (sum over K of x8 * w8) * x_scale[row] * w_scale[row of W, or one for the whole expert]

x8 and w8 are the e4m3 values of activations and weights, K the reduction dimension. Tensor cores keep about 14 bits of a sum of
e4m3 products, so partial sums over 128 of K are added up in fp32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
Programs, order of rows and order of sums are as in `experts_plain.py`. `experts_fp8_up_quantised` rounds its result to bf16 and
quantises it in the same launch; the bits equal those of `quantise_rows` on the bf16 result of `experts_fp8_up`.
Block scales of a gated product: ceil(I / 128) rows for the gate, then ceil(I / 128) rows for up.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3, magnitude
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.blocks import add_bias_and_gate, blocks_of, check_launch, narrowest, rows_of_tokens, store_rows
from batchspec.kernels.moe.fp8_steps import apply_row_scales, fp8_product_reference, sum_blocks, sum_blocks_of_tokens
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows, quantise_rows_reference, to_e4m3
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place, rows_by_expert


class Fp8Weight(NamedTuple):
    """The weights of all experts."""

    values: Tensor
    """e4m3 [E, N, K], contiguous. In a gated product N = 2I, gate rows before up rows"""
    scales: Tensor
    """fp32, contiguous, one per block: [E, ceil(N / 128), ceil(K / 128)], gated [E, 2 * ceil(I / 128), ceil(K / 128)]; one per
    row: [E, N]; or one per expert: [E]"""


@triton.jit
def multiply(
    x, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, tile, x_rows, num_rows, n, k,
    scale_stride,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCKED: tl.constexpr,
    TURNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):
    """One tile of BLOCK_N rows of W (gated: and as many of up) by BLOCK_T rows of x.

    TURNED: the tile is two blocks of rows of W, and from 64 tokens on the tokens are the first operand (M).
    """
    HALF: tl.constexpr = BLOCK_N // 2 if TURNED and not GATED else BLOCK_N
    TWO: tl.constexpr = TURNED or GATED
    first = tile * BLOCK_N
    w_rows = 2 * n if GATED else n
    scale_rows = tl.cdiv(n, 128) * (2 if GATED else 1)
    second = n + first if GATED else first + BLOCK_N - HALF
    second_scale_row = tl.cdiv(n, 128) + first // 128 if GATED else tl.minimum(second // 128, scale_rows - 1)
    lane = tl.arange(0, BLOCK_T)
    own_scales = x_scales + begin + (tl.minimum(lane, count - 1) if TURNED and BLOCK_T >= 64 else lane)
    if TOP_K:
        x = rows_of_tokens(x, pairs, begin, count, k, TOP_K, BLOCK_T)
        own_scales = x_scales + tl.load(pairs + begin + tl.minimum(lane, count - 1)) // TOP_K
    if TURNED and BLOCK_T >= 64:
        acc, other = sum_blocks_of_tokens(
            x, own_scales, w, w_scales, expert, begin, count, first, second, first // 128, second_scale_row, x_rows, w_rows,
            scale_rows, k, BLOCKED, BLOCK_T, HALF, TMA, TOP_K, EVEN_K, DOT,
        )
    else:
        acc, other = sum_blocks(
            x, own_scales, w, w_scales, expert, begin, count, first, second, first // 128, second_scale_row, x_rows, w_rows,
            scale_rows, k, 0, tl.cdiv(k, 128), TWO, BLOCKED, BLOCK_T, HALF, TMA, TOP_K, EVEN_K, DOT, STAGES,
        )
    if not BLOCKED:
        acc = apply_row_scales(acc, own_scales, w_scales, expert, count, first, w_rows, n - 1, scale_stride, HALF)
        if TWO:
            other = apply_row_scales(other, own_scales, w_scales, expert, count, second, w_rows, w_rows - 1, scale_stride, HALF)
    if TWO and not GATED:
        other = add_bias_and_gate(other, other, bias, expert, second, n, False, None, ALPHA, HALF)
        store_rows(other, out, pairs, begin, count, second, n, SCATTER, BLOCK_T, HALF)
    acc = add_bias_and_gate(acc, other, bias, expert, first, n, GATED, LIMIT, ALPHA, HALF)
    if out_scales is None:
        store_rows(acc, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, HALF)
    else:
        y = tl.where((first + tl.arange(0, HALF) < n)[:, None], acc, 0.0).to(tl.bfloat16).to(tl.float32)
        y, scales = to_e4m3(y, tl.max(magnitude(y), 0)[None, :], INTERPRETED)
        store_rows(y, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, HALF)
        tl.store(out_scales + tile.to(tl.int64) * num_rows + (begin + lane)[None, :], scales, mask=(lane < count)[None, :])


@triton.jit(do_not_specialize=["x_rows", "num_rows"])
def experts_fp8_kernel(
    x16, x32, x64, x128, x256, x_scales, w, w_scales, bias, pairs, units, out, out_scales, x_rows, num_rows, n,
    k, scale_stride,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCKED: tl.constexpr,
    TURNED: tl.constexpr, LOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, TOP_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x16 to x256: x [x_rows, k] with blocks of that many rows, None if LOW to BLOCK_T does not include it. num_rows: rows of
    out.

    TOP_K: experts per token, if x has a row of each token; 0: rows are in the order of the list.
    scale_stride: 1 if each row of W has a scale, 0 if an expert has one. It is not read with block scales.
    """
    DOT: tl.constexpr = tl.float32 if INTERPRETED else tl.float8e4nv
    await_earlier(PDL)
    expert, begin, count, tile = program_place(units, tl.cdiv(n, BLOCK_N), BLOCK_T)
    blocks = (x16, x32, x64, x128, x256)
    for step in tl.static_range(5):  # unrolled
        if 16 << step >= LOW and 16 << step <= BLOCK_T and narrowest(count, 16 << step, LOW):
            multiply(blocks[step], x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, tile, x_rows,
                     num_rows, n, k, scale_stride, SCATTER, GATED, LIMIT, ALPHA, BLOCKED, TURNED, 16 << step, BLOCK_N, TMA,
                     TOP_K, EVEN_K, INTERPRETED, DOT, STAGES)


def experts_fp8_up(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    dtype: torch.dtype = torch.bfloat16, by_token: bool = False, interpret: bool = False,
) -> Tensor:
    """The gated first product of each pair.

    x        [P, H] in the order of the list of pairs, from `quantise_rows`: one scale per 128 values if the weight has block
             scales, else one per row
    weight   [E, 2I, H], without a gate [E, I, H]
    bias     bf16 or fp32 [E, 2I], or [E, I], or None
    routing  from `route` with unit_pairs=tile.block_t
    tile     block_k is 128; with block scales block_n divides 128
    dtype    of the result: bf16 or fp32; on a CPU any float dtype
    by_token  x has a row of each token, [R, H] with R >= T, which programs gather: for few pairs faster than to sort rows before

    Returns [P, I] in the order of the list. Does not synchronise on a GPU. The launch raises ValueError for other shapes,
    dtypes or strides.
    """
    if not (x.values.is_cuda or interpret):
        rows = rows_of_pairs(x, routing) if by_token else x
        return experts_fp8_up_reference(rows, weight, bias, routing, gate=gate).to(dtype)
    out = x.values.new_empty(len(routing.pairs), weight.values.shape[1] // gate.parts, dtype=dtype)
    launch("experts_fp8_up", x, weight, bias, routing, tile, out, gate=gate, by_token=by_token)
    return out


def experts_fp8_up_quantised(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    by_token: bool = False, interpret: bool = False,
) -> Fp8Rows:
    """`experts_fp8_up` in bf16 and `quantise_rows` on its result, in one launch.

    tile.block_n must be 128, and without a gate the tile not turned: a program then holds the 128 values of each scale that it
    writes.
    Returns [P, I] in the order of the list with one scale per 128 values.
    """
    if not (x.values.is_cuda or interpret):
        rows = rows_of_pairs(x, routing) if by_token else x
        return quantise_rows_reference(experts_fp8_up_reference(rows, weight, bias, routing, gate=gate).bfloat16())
    num_pairs, width = len(routing.pairs), weight.values.shape[1] // gate.parts
    out = Fp8Rows(x.values.new_empty(num_pairs, width), x.scales.new_empty(-(-width // GROUP), num_pairs))
    launch(
        "experts_fp8_up_quantised", x, weight, bias, routing, tile, out.values, gate=gate, out_scales=out.scales,
        by_token=by_token,
    )
    return out


def rows_of_pairs(x: Fp8Rows, routing: Routing) -> Fp8Rows:
    """Rows of tokens [R, K] in the order of the list of pairs, in plain torch."""
    tokens = routing.pairs.long() // routing.expert_ids.shape[1]
    return Fp8Rows(x.values.view(torch.uint8)[tokens].view(E4M3), x.scales[:, tokens].contiguous())


def experts_fp8_down(
    h: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:
    """The second product of each pair: h [P, I] in the order of the list, weight [E, H, I] -> [P, H] in pair order.

    See `experts_fp8_up`.
    """
    if not (h.values.is_cuda or interpret):
        return experts_fp8_down_reference(h, weight, bias, routing).to(dtype)
    out = h.values.new_empty(len(h.values), weight.values.shape[1], dtype=dtype)
    launch("experts_fp8_down", h, weight, bias, routing, tile, out)
    return out


def launch(
    kernel: str, x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, out_scales: Tensor | None = None, by_token: bool = False, compile_only: bool = False,
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`.

    out_scales  fp32 [ceil(N / 128), P]: out is e4m3 with one scale per 128 values; None: out is bf16 or fp32
    """
    num_experts, w_rows, k = weight.values.shape
    gated = gate is not None and gate.parts == 2
    half = tile.block_n if gated or not tile.turned else tile.block_n // 2
    num_rows, n = len(routing.pairs), w_rows // 2 if gated else w_rows
    top_k, x_rows = (routing.expert_ids.shape[1], len(x.values)) if by_token else (0, num_rows)
    if x_rows < num_rows // (top_k or 1):
        raise ValueError(f"{kernel}: {x_rows} rows of x; a routing of {num_rows // top_k} tokens")
    blocked = _check_scales(kernel, x, x_rows, weight, gated, tile)
    if out_scales is None:
        check(f"{kernel}: out", out, (num_rows, n), torch.bfloat16, torch.float32)
    else:
        check(f"{kernel}: out", out, (num_rows, n), E4M3)
        check(f"{kernel}: out_scales", out_scales, (-(-n // GROUP), num_rows), torch.float32)
        if tile.block_n != GROUP or half != GROUP:
            raise ValueError(f"{kernel}: block_n is {tile.block_n}; a tile must hold the {GROUP} values of a scale")
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if not len(routing.units):
        return
    tma = tile.tma and x.values.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0 and k % 16 == 0
    flat = weight.values.view(num_experts * w_rows, k)
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_fp8_kernel.warmup, grid=grid) if compile_only else experts_fp8_kernel[grid]
    start(
        *blocks_of(x.values, tile, tma and not by_token), x.scales,
        TensorDescriptor.from_tensor(flat, [half, GROUP]) if tma else flat,
        weight.scales, bias, routing.pairs, routing.units, out, out_scales, x_rows, num_rows, n, k,
        int(weight.scales.dim() == 2), SCATTER=gate is None, GATED=gated,
        LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha, BLOCKED=blocked, TURNED=tile.turned, LOW=tile.low,
        BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, TMA=tma, TOP_K=top_k, EVEN_K=k % GROUP == 0,
        STAGES=tile.stages, INTERPRETED=not out.is_cuda, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        **launch_args(out),
    )


def _check_scales(kernel: str, x: Fp8Rows, num_rows: int, weight: Fp8Weight, gated: bool, tile: ExpertTile) -> bool:
    """Whether the weight has block scales. Raises ValueError unless x, weight, their scales and the tile fit each other."""
    num_experts, w_rows, k = weight.values.shape
    check(f"{kernel}: x", x.values, (num_rows, k), E4M3)
    check(f"{kernel}: weight", weight.values, (num_experts, w_rows, k), E4M3)
    blocked = weight.scales.dim() == 3
    num_blocks = -(-k // GROUP) if blocked else 1
    row_blocks = 2 * -(-w_rows // (2 * GROUP)) if gated else -(-w_rows // GROUP)
    shape = (num_experts, row_blocks, num_blocks) if blocked else (num_experts, w_rows)[: weight.scales.dim()]
    check(f"{kernel}: scales of x", x.scales, (num_blocks, num_rows), torch.float32)
    check(f"{kernel}: scales of weight", weight.scales, shape, torch.float32)
    rows = tile.block_n // 2 if tile.turned and not gated else tile.block_n
    if tile.block_k != GROUP or (blocked and GROUP % rows):
        raise ValueError(
            f"{kernel}: {tile}; block_k must be {GROUP}; with block scales block_n, or its half, must divide {GROUP}"
        )
    return blocked


def experts_fp8_up_reference(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, gate: Gate = SWIGLU
) -> Tensor:
    """`experts_fp8_up` in plain torch: [P, I] in the order of the list, in the dtype of x.scales (fp32 or fp64)."""
    return gate.of(_product(x, weight, bias, routing, gated=gate.parts == 2))


def experts_fp8_down_reference(h: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing) -> Tensor:
    """`experts_fp8_down` in plain torch: [P, H] in pair order, in the dtype of h.scales."""
    y = _product(h, weight, bias, routing, gated=False)
    return torch.empty_like(y).index_copy_(0, routing.pairs.long(), y)


def _product(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, gated: bool) -> Tensor:
    """[P, N] in the order of the list: each row of x times the weights of its expert."""
    y = torch.empty(len(x.values), weight.values.shape[1], dtype=x.scales.dtype, device=x.scales.device)
    for expert, own in rows_by_expert(routing):
        picked = Fp8Rows(x.values[own], x.scales[:, own])
        y[own] = fp8_product_reference(picked, weight.values[expert], weight.scales[expert], gated=gated)
        if bias is not None:
            y[own] += bias[expert].to(y.dtype)
    return y
