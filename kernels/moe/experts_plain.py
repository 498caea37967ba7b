"""Grouped products of experts with bf16 weights: the row of every pair p = (token, slot) times the weights of its expert e.

    up    h[i] = gate(x[i] Wg[e]' + bg[e], x[i] Wu[e]' + bu[e])     W [E, 2I, H]: gate rows, up rows
    down  y[p] = h[i] W[e]' + b[e]                                  W [E, H, I]          i: place of p in the list of pairs

Rows of x and h are in the order of the list of pairs (`sort_rows.py`), those of y in pair order. Rows of x may also be those of
tokens, which the programs gather: for few pairs of an expert that takes less time than a launch that sorts them.
Each program multiplies one tile of rows of W with the pairs of one unit (`units.py`). A tensor-core instruction takes at least 64
rows of its first operand (M) and as few as 8 of its second (N). At decode an expert has few tokens, so W is the first operand and
the tokens are the second: acc [rows of W, pairs]. The program takes the narrowest tile that holds the unit's pairs: only the GPU
knows their number, so one kernel holds the code of several widths. TMA loads weights, and tokens that are not gathered.
Sums over K are in fp32 and rounded once; their order depends on neither the tile nor the number of tokens.
Bound by memory (the weights of the experts that have tokens) up to about 200 tokens per expert, then by the tensor cores.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.operands import DTYPES
from batchspec.kernels.moe.blocks import (
    add_bias_and_gate,
    blocks_of,
    check_launch,
    load_row_blocks,
    load_rows,
    load_tokens,
    narrowest,
    rows_of_tokens,
    store_rows,
)
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.sort_rows import sort_rows_reference
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place, rows_by_expert


@triton.jit
def multiply(
    x, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    DOT: tl.constexpr, TOP_K: tl.constexpr,
):
    """One tile of BLOCK_N rows of W (gated: and as many of up) by BLOCK_T rows of x. TOP_K: see `experts_plain_kernel`."""
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    w_rows = 2 * n if GATED else n
    rows = rows_of_tokens(x, pairs, begin, count, k, TOP_K, BLOCK_T) if TOP_K else x
    for at in range(0, k, BLOCK_K):
        a = load_rows(w, expert, first, w_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)  # first: needs no pairs
        if TOP_K:
            tokens = tl.trans(load_row_blocks(rows, at, k, BLOCK_K)).to(DOT)
        else:
            tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, BLOCK_K, TMA)).to(DOT)
        acc = tl.dot(a.to(DOT), tokens, acc, input_precision="ieee")
        if GATED:
            b = load_rows(w, expert, n + first, w_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            up = tl.dot(b.to(DOT), tokens, up, input_precision="ieee")
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    store_rows(acc, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows"])
def experts_plain_kernel(
    x16, x32, x64, x128, x256, w, bias, pairs, units, out, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    LOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, TOP_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """x16 to x256: x [num_rows, k] with blocks of that many rows, None if LOW to BLOCK_T does not include it.

    TOP_K: experts per token, if x has a row of each token; 0: rows are in the order of the list.
    """
    DOT: tl.constexpr = tl.float32 if INTERPRETED else out.dtype.element_ty
    await_earlier(PDL)
    expert, begin, count, tile = program_place(units, tl.cdiv(n, BLOCK_N), BLOCK_T)
    first = tile * BLOCK_N
    blocks = (x16, x32, x64, x128, x256)
    for step in tl.static_range(5):  # unrolled
        if 16 << step >= LOW and 16 << step <= BLOCK_T and narrowest(count, 16 << step, LOW):
            multiply(blocks[step], w, bias, pairs, out, expert, begin, count, first, num_rows, n, k, SCATTER, GATED, LIMIT,
                     ALPHA, 16 << step, BLOCK_N, BLOCK_K, TMA, EVEN_K, DOT, TOP_K)


def experts_plain_up(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    by_token: bool = False, out: Tensor | None = None, interpret: bool = False,
) -> Tensor:
    """The gated first product of each pair.

    x        bf16 or fp32 [P, H], on a CPU also fp64, in the order of the list of pairs
    weight   same dtype [E, 2I, H], contiguous, gate rows before up rows; without a gate [E, I, H]
    bias     same dtype [E, 2I], or [E, I], or None
    routing  from `route` with unit_pairs=tile.block_t
    by_token  x has a row of each token, [T, H], which programs gather: for few pairs faster than to sort rows before
    out      same dtype [P, I], contiguous; None: a new tensor

    Returns out, in the order of the list. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    out = x.new_empty(len(routing.pairs), weight.shape[1] // gate.parts) if out is None else out
    if x.is_cuda or interpret:
        launch("experts_plain_up", x, weight, bias, routing, tile, out, gate=gate, by_token=by_token)
        return out
    x = sort_rows_reference(x, routing) if by_token else x
    return out.copy_(experts_plain_up_reference(x, weight, bias, routing, gate=gate))


def experts_plain_down(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """The second product of each pair: h [P, I] in the order of the list, weight [E, H, I], bias [E, H] -> [P, H] in pair order.

    See `experts_plain_up`.
    """
    out = h.new_empty(len(h), weight.shape[1]) if out is None else out
    if h.is_cuda or interpret:
        launch("experts_plain_down", h, weight, bias, routing, tile, out)
        return out
    return out.copy_(experts_plain_down_reference(h, weight, bias, routing))


def launch(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, by_token: bool = False, compile_only: bool = False,
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`."""
    top_k = routing.expert_ids.shape[1] if by_token else 0
    num_pairs, (num_experts, w_rows, k) = routing.expert_ids.numel(), weight.shape
    gated = gate is not None and gate.parts == 2
    n = w_rows // 2 if gated else w_rows
    check(f"{kernel}: x", x, (num_pairs // (top_k or 1), k), *DTYPES)
    check(f"{kernel}: weight", weight, (num_experts, w_rows, k), x.dtype)
    check(f"{kernel}: out", out, (num_pairs, n), x.dtype)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), x.dtype)
    check_launch(kernel, routing, tile, num_experts)
    if not len(routing.units):
        return
    tma = tile.tma and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and k * weight.itemsize % 16 == 0
    flat = weight.view(num_experts * w_rows, k)
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_plain_kernel.warmup, grid=grid) if compile_only else experts_plain_kernel[grid]
    start(
        *blocks_of(x, tile, tma and not by_token),
        TensorDescriptor.from_tensor(flat, [tile.block_n, tile.block_k]) if tma else weight, bias,
        routing.pairs, routing.units, out, num_pairs, n, k,
        SCATTER=gate is None, GATED=gated, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        LOW=tile.low, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, TMA=tma,
        EVEN_K=k % tile.block_k == 0, TOP_K=top_k, INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        **launch_args(x),
    )


def experts_plain_up_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, gate: Gate = SWIGLU
) -> Tensor:
    """`experts_plain_up` in plain torch: products and gate in fp32 at least, rounded once."""
    return gate.of(_product(x, weight, bias, routing)).to(x.dtype)


def experts_plain_down_reference(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """`experts_plain_down` in plain torch."""
    y = _product(h, weight, bias, routing)
    return torch.empty_like(y).index_copy_(0, routing.pairs.long(), y).to(h.dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """[P, N] in the order of the list: each row of x times the weights of its expert; fp32, or fp64 if x is fp64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(len(x), weight.shape[1], dtype=dtype, device=x.device)
    for expert, own in rows_by_expert(routing):
        out[own] = x[own].to(dtype) @ weight[expert].to(dtype).T
        if bias is not None:
            out[own] += bias[expert].to(dtype)
    return out
