"""Grouped products of experts with FP8 weights and activations (W8A8), on rows in the order of the list of pairs.

As `experts_fp8.py`, but rows of one expert follow each other (`sort_rows.py`), so a unit's tokens are one block that TMA loads
and the scales of a block of K are one vector. A unit of few pairs is multiplied with a narrower tile, chosen on the GPU.
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
from batchspec.kernels.moe.experts import add_bias_and_gate, check_launch, load_rows
from batchspec.kernels.moe.experts_fp8 import Fp8Weight, scale_at
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows, magnitude, to_e4m3
from batchspec.kernels.moe.sorted_mxfp4 import blocks_of, load_tokens, store_rows
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place


@triton.jit
def multiply(
    x, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, first, tile, num_rows, n, k, scale_stride,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N rows of W (gated: and as many of up) by BLOCK_T rows of x. x_scales [blocks of K, num_rows]."""
    num_blocks = tl.cdiv(k, 128)
    w_rows = 2 * n if GATED else n
    scale_rows = tl.cdiv(n, 128) * (2 if GATED else 1)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    lane = tl.arange(0, BLOCK_T)
    own_scales = x_scales + begin + lane
    if BLOCKED:  # loaded one block ahead: Triton does not pipeline loads of scalars
        scale = scale_at(w_scales, expert, first // 128, scale_rows, 0, num_blocks)
        up_scale = scale_at(w_scales, expert, tl.cdiv(n, 128) + first // 128, scale_rows, 0, num_blocks) if GATED else scale
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        at = block * 128
        tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, 128, TMA)).to(DOT)
        a = load_rows(w, expert, first, w_rows, at, k, BLOCK_N, 128, TMA, EVEN_K)
        if BLOCKED:
            x_scale = tl.load(own_scales + block * num_rows, mask=lane < count, other=0.0)
            next_scale = scale_at(w_scales, expert, first // 128, scale_rows, block + 1, num_blocks)
        part = tl.dot(a.to(DOT), tokens, input_precision="ieee")
        acc += part * (x_scale * scale)[None, :] if BLOCKED else part
        if GATED:
            b = load_rows(w, expert, n + first, w_rows, at, k, BLOCK_N, 128, TMA, EVEN_K)
            part = tl.dot(b.to(DOT), tokens, input_precision="ieee")
            up += part * (x_scale * up_scale)[None, :] if BLOCKED else part
            if BLOCKED:
                up_scale = scale_at(w_scales, expert, tl.cdiv(n, 128) + first // 128, scale_rows, block + 1, num_blocks)
        if BLOCKED:
            scale = next_scale
    if not BLOCKED:
        x_scale = tl.load(own_scales, mask=lane < count, other=0.0)[None, :]
        rows = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1) * scale_stride
        own = w_scales + expert * (w_rows * scale_stride + 1 - scale_stride)
        acc = acc * x_scale * tl.load(own + rows)[:, None]
        if GATED:
            up = up * x_scale * tl.load(own + n * scale_stride + rows)[:, None]
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    if out_scales is None:
        store_rows(acc, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, BLOCK_N)
    else:
        y = tl.where((first + tl.arange(0, BLOCK_N) < n)[:, None], acc, 0.0).to(tl.bfloat16).to(tl.float32)
        y, scales = to_e4m3(y, tl.max(magnitude(y), 0)[None, :], INTERPRETED)
        store_rows(y, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, BLOCK_N)
        tl.store(out_scales + tile.to(tl.int64) * num_rows + (begin + lane)[None, :], scales, mask=(lane < count)[None, :])


@triton.jit(do_not_specialize=["num_units", "num_rows"])
def sorted_fp8_kernel(
    x16, x32, x64, x128, x256, x_scales, w, w_scales, bias, pairs, units, out, out_scales, num_units, num_rows, n, k,
    scale_stride,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCKED: tl.constexpr,
    LOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x16 to x256: x [num_rows, k] with blocks of so many rows, None where LOW to BLOCK_T does not include it."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else tl.float8e4nv
    unit, tile = program_place(num_units, tl.cdiv(n, BLOCK_N), GROUP)
    await_earlier(PDL)
    expert = tl.load(units + unit * 4)
    begin = tl.load(units + unit * 4 + 1)
    count = tl.load(units + unit * 4 + 2)
    first = tile * BLOCK_N
    if LOW <= 16 and ((count > 0) & (count <= 16)):
        multiply(x16, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, first, tile, num_rows, n, k,
                 scale_stride, SCATTER, GATED, LIMIT, ALPHA, BLOCKED,
                 16, BLOCK_N, TMA, EVEN_K, INTERPRETED, DOT, STAGES)  # fmt: skip
    if LOW <= 32 and BLOCK_T >= 32 and ((count > (16 if LOW < 32 else 0)) & (count <= 32)):
        multiply(x32, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, first, tile, num_rows, n, k,
                 scale_stride, SCATTER, GATED, LIMIT, ALPHA, BLOCKED,
                 32, BLOCK_N, TMA, EVEN_K, INTERPRETED, DOT, STAGES)  # fmt: skip
    if LOW <= 64 and BLOCK_T >= 64 and ((count > (32 if LOW < 64 else 0)) & (count <= 64)):
        multiply(x64, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, first, tile, num_rows, n, k,
                 scale_stride, SCATTER, GATED, LIMIT, ALPHA, BLOCKED,
                 64, BLOCK_N, TMA, EVEN_K, INTERPRETED, DOT, STAGES)  # fmt: skip
    if LOW <= 128 and BLOCK_T >= 128 and ((count > (64 if LOW < 128 else 0)) & (count <= 128)):
        multiply(x128, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, first, tile, num_rows, n, k,
                 scale_stride, SCATTER, GATED, LIMIT, ALPHA, BLOCKED,
                 128, BLOCK_N, TMA, EVEN_K, INTERPRETED, DOT, STAGES)  # fmt: skip
    if BLOCK_T >= 256 and ((count > (128 if LOW < 256 else 0)) & (count <= 256)):
        multiply(x256, x_scales, w, w_scales, bias, pairs, out, out_scales, expert, begin, count, first, tile, num_rows, n, k,
                 scale_stride, SCATTER, GATED, LIMIT, ALPHA, BLOCKED,
                 256, BLOCK_N, TMA, EVEN_K, INTERPRETED, DOT, STAGES)  # fmt: skip


def launch(
    kernel: str, x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, out_scales: Tensor | None = None, low: int = 16, compile_only: bool = False,
) -> None:  # fmt: skip
    """Check the arguments and start the kernel, unless `compile_only`. See `sorted_mxfp4.launch`.

    x           values [P, K] in the order of the list of pairs, scales [blocks of K, P] or [1, P], from `sort_fp8_rows`
    out_scales  fp32 [ceil(N / 128), P]: out is e4m3 with one scale per 128 values; None: out is bf16 or fp32
    """
    (num_experts, w_rows, k), num_pairs = weight.values.shape, routing.expert_ids.numel()
    n, blocked = w_rows if gate is None else w_rows // 2, weight.scales.dim() == 3
    check(f"{kernel}: x", x.values, (num_pairs, k), E4M3)
    check(f"{kernel}: scales of x", x.scales, (-(-k // GROUP) if blocked else 1, num_pairs), torch.float32)
    check(f"{kernel}: weight", weight.values, (num_experts, w_rows, k), E4M3)
    check(f"{kernel}: out", out, (num_pairs, n), torch.bfloat16, torch.float32, E4M3)
    if out_scales is not None:
        check(f"{kernel}: out_scales", out_scales, (-(-n // GROUP), num_pairs), torch.float32)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), torch.bfloat16, torch.float32)
    check_launch(kernel, routing, tile, num_experts)
    if tile.block_k != GROUP or (blocked and GROUP % tile.block_n) or (out_scales is not None and tile.block_n != GROUP):
        raise ValueError(f"{kernel}: {tile}; block_k must be {GROUP}, and block_n divide it, or equal it to quantise the result")
    if not len(routing.units):
        return
    tma = tile.tma and x.values.data_ptr() % 16 == 0 and weight.values.data_ptr() % 16 == 0 and k % 16 == 0
    flat = weight.values.view(num_experts * w_rows, k)
    low = min(low, tile.block_t)
    xs = blocks_of(x.values, low, tile, tma)
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(sorted_fp8_kernel.warmup, grid=grid) if compile_only else sorted_fp8_kernel[grid]
    start(
        *xs, x.scales, TensorDescriptor.from_tensor(flat, [tile.block_n, GROUP]) if tma else weight.values, weight.scales, bias,
        routing.pairs, routing.units, out, out_scales, len(routing.units), num_pairs, n, k, int(weight.scales.dim() == 2),
        SCATTER=gate is None, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha, BLOCKED=blocked,
        LOW=low, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, GROUP=tile.group, TMA=tma, EVEN_K=k % GROUP == 0, STAGES=tile.stages,
        INTERPRETED=not out.is_cuda, num_warps=tile.warps, num_stages=tile.stages, **launch_args(out),
    )  # fmt: skip
