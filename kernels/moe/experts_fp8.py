"""Grouped products of experts with FP8 weights and activations (W8A8).

    block scales   y = sum over blocks b of 128 columns: (sum over b of x8 * w8) * x_scale[row, b] * w_scale[block of 128 rows, b]
    row scales     y = (sum over K of x8 * w8) * x_scale[row] * w_scale[row of W, or one for the whole expert]

x8 and w8 are the e4m3 values of activations and weights, K the reduction dimension. Tensor cores keep about 14 bits of a sum of
e4m3 products, so partial sums over 128 of K are added up in fp32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
Programs, tiles and order of sums are as in `experts.py`. `experts_fp8_up_quantised` rounds its result to bf16 and quantises it in
the same launch; the bits equal those of `quantise_rows` on the bf16 result of `experts_fp8_up`.
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
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.experts import add_bias_and_gate, check_launch, load_rows, write_pairs
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows, magnitude, quantise_rows_reference, to_e4m3
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place, unit_pairs


class Fp8Weight(NamedTuple):
    """The weights of all experts."""

    values: Tensor
    """e4m3 [E, N, K], contiguous. In a gated product N = 2I, gate rows before up rows"""
    scales: Tensor
    """fp32, contiguous, one per block: [E, ceil(N / 128), ceil(K / 128)], gated [E, 2 * ceil(I / 128), ceil(K / 128)]; one per
    row: [E, N]; or one per expert: [E]"""


@triton.jit
def scale_at(scales, expert, tile_row, num_rows, block, num_blocks):
    """The scale of a block of 128 rows and 128 columns of an expert's weight; 0 past the last block of columns."""
    return tl.load(scales + (expert * num_rows + tile_row) * num_blocks + block, mask=block < num_blocks, other=0.0)


@triton.jit(do_not_specialize=["num_units", "num_rows"])
def experts_fp8_kernel(
    x, x_scales, w, w_scales, bias, pairs, units, out, out_scales, num_units, num_rows, n, k, scale_stride,
    SLOTS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCKED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """num_rows: rows of x, read only without routing. scale_stride: 1 if each row of W has a scale, 0 if an expert has one.
    It is not read with block scales. SLOTS: number of pairs that read one row of x."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    unit, tile = program_place(num_units, tl.cdiv(n, BLOCK_N), GROUP)
    await_earlier(PDL)
    expert, pair, exists, count = unit_pairs(pairs, units, unit, num_rows, BLOCK_T)
    if count == 0:
        return
    num_blocks = tl.cdiv(k, BLOCK_K)
    row = pair // SLOTS
    depth = tl.arange(0, BLOCK_K)
    first = tile * BLOCK_N
    w_rows = 2 * n if GATED else n
    scale_rows = tl.cdiv(n, 128) * (2 if GATED else 1)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    AHEAD: tl.constexpr = BLOCKED and BLOCK_T <= 32
    if AHEAD:  # load scales one block ahead: Triton does not pipeline them. Wider tiles have no registers left for this
        x_scale = tl.load(x_scales + row * num_blocks)
        scale = scale_at(w_scales, expert, first // 128, scale_rows, 0, num_blocks)
        up_scale = scale_at(w_scales, expert, tl.cdiv(n, 128) + first // 128, scale_rows, 0, num_blocks) if GATED else scale
    for block in range(0, num_blocks):
        at = block * BLOCK_K
        a = load_rows(w, expert, first, w_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        places = x + (row * k)[None, :] + (at + depth)[:, None]
        if EVEN_K:
            tokens = tl.load(places)
        else:
            tokens = tl.load(places, mask=(at + depth < k)[:, None], other=0.0)
        if AHEAD:
            next_x_scale = tl.load(x_scales + row * num_blocks + tl.minimum(block + 1, num_blocks - 1))
            next_scale = scale_at(w_scales, expert, first // 128, scale_rows, block + 1, num_blocks)
        elif BLOCKED:
            x_scale = tl.load(x_scales + row * num_blocks + block)
            scale = scale_at(w_scales, expert, first // 128, scale_rows, block, num_blocks)
            up_scale = (
                scale_at(w_scales, expert, tl.cdiv(n, 128) + first // 128, scale_rows, block, num_blocks) if GATED else scale
            )
        part = tl.dot(a.to(DOT), tokens.to(DOT), input_precision="ieee")
        acc += part * x_scale[None, :] * scale if BLOCKED else part
        if GATED:
            b = load_rows(w, expert, n + first, w_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            part = tl.dot(b.to(DOT), tokens.to(DOT), input_precision="ieee")
            up += part * x_scale[None, :] * up_scale if BLOCKED else part
            if AHEAD:
                up_scale = scale_at(w_scales, expert, tl.cdiv(n, 128) + first // 128, scale_rows, block + 1, num_blocks)
        if AHEAD:
            x_scale = next_x_scale
            scale = next_scale
    if not BLOCKED:
        x_scale = tl.load(x_scales + row)[None, :]
        rows = tl.minimum(first + tl.arange(0, BLOCK_N), n - 1) * scale_stride
        own = w_scales + expert * (w_rows * scale_stride + 1 - scale_stride)
        acc = acc * x_scale * tl.load(own + rows)[:, None]
        if GATED:
            up = up * x_scale * tl.load(own + n * scale_stride + rows)[:, None]
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    if out_scales is None:
        write_pairs(acc, out, first, pair, exists, n, BLOCK_N)
    else:
        y = tl.where((first + tl.arange(0, BLOCK_N) < n)[:, None], acc, 0.0).to(tl.bfloat16).to(tl.float32)
        y, scales = to_e4m3(y, tl.max(magnitude(y), 0)[None, :], INTERPRETED)
        write_pairs(y, out, first, pair, exists, n, BLOCK_N)
        tl.store(out_scales + (pair * tl.cdiv(n, 128) + tile)[None, :], scales, mask=exists[None, :])


def experts_fp8_up(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The gated first product of each pair.

    x        [T, H], from `quantise_rows`: one scale per 128 values if the weight has block scales, else one per row
    weight   [E, 2I, H]
    bias     bf16 or fp32 [E, 2I], or None
    routing  from `route` with unit_pairs=tile.block_t
    tile     block_k is 128; with block scales block_n divides 128
    dtype    of the result: bf16 or fp32; on a CPU any float dtype

    Returns [P, I] in pair order. Does not synchronise on a GPU. The launch raises ValueError for other shapes, dtypes or strides.
    """
    num_pairs, width = routing.expert_ids.numel(), weight.values.shape[1] // 2
    if not (x.values.is_cuda or interpret):
        return experts_fp8_reference(x, weight, bias, routing.expert_ids, gate=gate).to(dtype)
    out = x.values.new_empty(num_pairs, width, dtype=dtype)
    launch("experts_fp8_up", x, weight, bias, routing, tile, out, gate=gate)
    return out


def experts_fp8_up_quantised(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    interpret: bool = False,
) -> Fp8Rows:  # fmt: skip
    """`experts_fp8_up` in bf16 and `quantise_rows` on its result, in one launch.

    tile.block_n must be 128: a program then holds the 128 values of each scale that it writes.
    Returns [P, I] in pair order with one scale per 128 values.
    """
    num_pairs, width = routing.expert_ids.numel(), weight.values.shape[1] // 2
    if not (x.values.is_cuda or interpret):
        return quantise_rows_reference(experts_fp8_reference(x, weight, bias, routing.expert_ids, gate=gate).bfloat16())
    if tile.block_n != GROUP:
        raise ValueError(f"experts_fp8_up_quantised: block_n is {tile.block_n}; a tile must hold the {GROUP} values of a scale")
    out = Fp8Rows(x.values.new_empty(num_pairs, width), x.scales.new_empty(num_pairs, -(-width // GROUP)))
    launch("experts_fp8_up_quantised", x, weight, bias, routing, tile, out.values, gate=gate, out_scales=out.scales)
    return out


def experts_fp8_down(
    h: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing, *, tile: ExpertTile,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The second product of each pair: h [P, I] in pair order, weight [E, H, I] -> [P, H]. See `experts_fp8_up`."""
    if not (h.values.is_cuda or interpret):
        return experts_fp8_reference(h, weight, bias, routing.expert_ids).to(dtype)
    out = h.values.new_empty(h.values.shape[0], weight.values.shape[1], dtype=dtype)
    launch("experts_fp8_down", h, weight, bias, routing, tile, out)
    return out


def launch(
    kernel: str, x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, routing: Routing | None, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, out_scales: Tensor | None = None, compile_only: bool = False,
) -> None:  # fmt: skip
    """Check the arguments and start the kernel, or only compile it. routing None: one expert multiplies every row of x."""
    num_experts, w_rows, k = weight.values.shape
    num_rows, n = x.values.shape[0], w_rows if gate is None else w_rows // 2
    blocked = _check_scales(kernel, x, weight, gate is not None, tile)
    check(f"{kernel}: out", out, (out.shape[0], n), torch.bfloat16, torch.float32, E4M3)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), torch.bfloat16, torch.float32)
    slots, num_units = 1, -(-num_rows // tile.block_t)
    if routing is not None:
        check_launch(kernel, routing, tile, num_experts)
        slots, num_units = (1 if gate is None else routing.expert_ids.shape[1]), len(routing.units)
    if out.shape[0] != num_rows * slots:
        raise ValueError(f"{kernel}: {num_rows} rows of x with {slots} pairs each, but out has {out.shape[0]} rows")
    if not num_units:
        return
    tma = tile.tma and weight.values.data_ptr() % 16 == 0 and k % 16 == 0
    flat = weight.values.view(num_experts * w_rows, k)
    grid = (num_units * triton.cdiv(n, tile.block_n),)
    start = partial(experts_fp8_kernel.warmup, grid=grid) if compile_only else experts_fp8_kernel[grid]
    start(
        x.values, x.scales, TensorDescriptor.from_tensor(flat, [tile.block_n, tile.block_k]) if tma else weight.values,
        weight.scales, bias, routing and routing.pairs, routing and routing.units, out, out_scales, num_units, num_rows, n, k,
        int(weight.scales.dim() == 2), SLOTS=slots, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        BLOCKED=blocked, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, TMA=tma,
        EVEN_K=k % tile.block_k == 0, INTERPRETED=not out.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        **launch_args(out),
    )  # fmt: skip


def _check_scales(kernel: str, x: Fp8Rows, weight: Fp8Weight, gated: bool, tile: ExpertTile) -> bool:
    """Whether the weight has block scales. Raises ValueError unless x, weight, their scales and the tile fit each other."""
    (num_experts, w_rows, k), num_rows = weight.values.shape, x.values.shape[0]
    check(f"{kernel}: x", x.values, (num_rows, k), E4M3)
    check(f"{kernel}: weight", weight.values, (num_experts, w_rows, k), E4M3)
    blocked = weight.scales.dim() == 3
    num_blocks = -(-k // GROUP) if blocked else 1
    row_blocks = 2 * -(-w_rows // (2 * GROUP)) if gated else -(-w_rows // GROUP)
    shape = (num_experts, row_blocks, num_blocks) if blocked else (num_experts, w_rows)[: weight.scales.dim()]
    check(f"{kernel}: scales of x", x.scales, (num_rows, num_blocks), torch.float32)
    check(f"{kernel}: scales of weight", weight.scales, shape, torch.float32)
    if tile.block_k != GROUP or (blocked and GROUP % tile.block_n):
        raise ValueError(f"{kernel}: {tile}; block_k must be {GROUP}; with block scales block_n must divide {GROUP}")
    return blocked


def experts_fp8_reference(
    x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, expert_ids: Tensor, *, gate: Gate | None = None
) -> Tensor:
    """The product of each pair in plain torch: [P, N], with a gate [P, N / 2], in the dtype of x.scales (fp32 or fp64).

    With a gate row t of x is the input of the k pairs of token t; without, row p is the input of pair p.
    """
    slots = 1 if gate is None else expert_ids.shape[1]
    flat = expert_ids.flatten().long()
    rows = torch.arange(len(flat), device=flat.device) // slots
    y = torch.empty(len(flat), weight.values.shape[1], dtype=x.scales.dtype, device=flat.device)
    for expert in flat.unique().tolist():
        own = (flat == expert).nonzero()[:, 0]
        # Indexed as uint8: some torch versions cannot index e4m3.
        picked = Fp8Rows(x.values.view(torch.uint8)[rows[own]].view(E4M3), x.scales[rows[own]])
        y[own] = fp8_product_reference(picked, weight.values[expert], weight.scales[expert], gated=gate is not None)
        if bias is not None:
            y[own] += bias[expert].to(y.dtype)
    return y if gate is None else gate(*y.chunk(2, dim=-1))


def fp8_product_reference(x: Fp8Rows, values: Tensor, scales: Tensor, *, gated: bool) -> Tensor:
    """R rows times one weight, in plain torch: [R, N] in the dtype of x.scales (fp32 or fp64).

    values  e4m3 [N, K]
    scales  [row blocks, ceil(K / 128)] of blocks, [N] of rows, or [] of the whole weight
    gated   gate rows and up rows have blocks of scales of their own
    """
    (num_rows, k), wide = values.shape, x.scales.dtype
    if scales.dim() < 2:
        return x.values.to(wide) @ values.to(wide).T * x.scales * scales.to(wide)
    parts = 2 if gated else 1
    of_row = torch.arange(num_rows // parts, device=values.device) // GROUP
    of_row = torch.cat([of_row + part * (len(scales) // parts) for part in range(parts)])
    y = torch.zeros(len(x.values), num_rows, dtype=wide, device=values.device)
    for block in range(-(-k // GROUP)):
        part = slice(block * GROUP, (block + 1) * GROUP)
        dot = x.values[:, part].to(wide) @ values[:, part].to(wide).T
        y += dot * x.scales[:, block, None] * scales[of_row, block].to(wide)
    return y


if __name__ == "__main__":
    from batchspec.kernels.benchmarks.moe_bench import main

    main()
