"""Grouped products of a mixture of experts: the row of every pair p = (token, slot) times the weights of its expert e.

    experts_up    h[p] = gate(x[token of p] Wg[e]' + bg[e], x[token of p] Wu[e]' + bu[e])     W [E, 2I, H]: gate rows, up rows
    experts_down  y[p] = h[p] W[e]' + b[e]                                                    W [E, H, I]

Each program multiplies one tile of rows of W with the pairs of one unit (`units.py`). A tensor-core instruction takes at least 64
rows of its first operand (M) and as few as 8 of its second (N). At decode an expert has few tokens, so W is the first operand and
the tokens are the second: acc [rows of W, pairs]. Token rows are gathered by pointers, weights are loaded by TMA descriptors.
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
from batchspec.kernels.moe.gate import SWIGLU, Gate, apply_gate
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, check_routing, program_place, unit_pairs


@triton.jit
def load_rows(w, expert, first, num_rows, at, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
              EVEN_K: tl.constexpr):  # fmt: skip
    """The block [BLOCK_N, BLOCK_K] of an expert's weights [num_rows, k] that begins at row `first` and column `at`.

    Columns past the last one are 0. Rows past the last one have unspecified numbers, which `write_pairs` leaves out.
    """
    if TMA:
        block = w.load([expert * num_rows + first, at])
    else:
        rows = expert.to(tl.int64) * num_rows + tl.minimum(first + tl.arange(0, BLOCK_N), num_rows - 1)
        columns = at + tl.arange(0, BLOCK_K)
        places = w + rows[:, None] * k + columns[None, :]
        if EVEN_K:
            block = tl.load(places)
        else:
            block = tl.load(places, mask=columns[None, :] < k, other=0.0)
    return block


@triton.jit
def add_bias_and_gate(acc, up, bias, expert, first, n, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
                      BLOCK_N: tl.constexpr):  # fmt: skip
    """Add the bias to the fp32 sums of a tile [BLOCK_N, pairs]; if GATED, apply the gate to acc and up."""
    column = first + tl.arange(0, BLOCK_N)
    inside = column < n
    if bias is not None:
        own = bias + expert.to(tl.int64) * n * (2 if GATED else 1) + column
        acc += tl.load(own, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(own + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = apply_gate(acc, up, LIMIT, ALPHA)
    return acc


@triton.jit
def write_pairs(y, out, first, pair, exists, n, BLOCK_N: tl.constexpr):
    """Store a tile [BLOCK_N, pairs] transposed: column by column to the rows of its pairs in out [P, n]."""
    column = first + tl.arange(0, BLOCK_N)
    places = out + pair[:, None] * n + column[None, :]
    tl.store(places, tl.trans(y.to(out.dtype.element_ty)), mask=exists[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["num_units"])
def experts_kernel(
    x, w, bias, pairs, units, out, num_units, n, k, stride_x,
    SLOTS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SLOTS: number of pairs that read one row of x: top_k in the first product, 1 in the second."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty  # Triton's interpreter holds bf16 as integers
    unit, tile = program_place(num_units, tl.cdiv(n, BLOCK_N), GROUP)
    await_earlier(PDL)
    expert, pair, exists, count = unit_pairs(pairs, units, unit, 0, BLOCK_T)
    if count == 0:
        return
    rows = x + (pair // SLOTS * stride_x)[None, :]
    depth = tl.arange(0, BLOCK_K)
    first = tile * BLOCK_N
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    num_rows = 2 * n if GATED else n
    for at in range(0, k, BLOCK_K):
        a = load_rows(w, expert, first, num_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        if EVEN_K:
            tokens = tl.load(rows + (at + depth)[:, None])
        else:
            tokens = tl.load(rows + (at + depth)[:, None], mask=(at + depth < k)[:, None], other=0.0)
        acc = tl.dot(a.to(DOT), tokens.to(DOT), acc, input_precision="ieee")
        if GATED:
            b = load_rows(w, expert, n + first, num_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            up = tl.dot(b.to(DOT), tokens.to(DOT), up, input_precision="ieee")
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    write_pairs(acc, out, first, pair, exists, n, BLOCK_N)


def experts_up(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, gate: Gate = SWIGLU,
    out: Tensor | None = None, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The gated first product of each pair.

    x        bf16 or fp32 [T, H], on a CPU also fp64  rows may be slices of wider rows; on a GPU they begin at 16-byte boundaries
    weight   same dtype [E, 2I, H], contiguous, gate rows before up rows
    bias     same dtype [E, 2I], or None
    routing  from `route` with unit_pairs=tile.block_t
    out      same dtype or fp32 [P, I], contiguous, in pair order; None: a new tensor of x's dtype

    Returns out. Does not synchronise on a GPU. The launch raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, num_experts, width = x.shape[0], weight.shape[0], weight.shape[1] // 2
    out = x.new_empty(num_tokens * routing.expert_ids.shape[1], width) if out is None else out
    if x.is_cuda or interpret:
        launch("experts_up", x, weight, bias, routing, tile, out, gate=gate)
    else:
        check_routing("experts_up", routing, num_tokens, num_experts)
        out.copy_(experts_up_reference(x, weight, bias, routing.expert_ids, gate=gate))
    return out


def experts_down(
    h: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, tile: ExpertTile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The second product of each pair: h [P, I] in pair order, weight [E, H, I], bias [E, H] -> [P, H]. See `experts_up`.

    out may be fp32 while h is bf16.
    """
    out = h.new_empty(h.shape[0], weight.shape[1]) if out is None else out
    if h.is_cuda or interpret:
        launch("experts_down", h, weight, bias, routing, tile, out)
    else:
        check_routing("experts_down", routing, routing.expert_ids.shape[0], weight.shape[0])
        out.copy_(experts_down_reference(h, weight, bias, routing.expert_ids))
    return out


def launch(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, compile_only: bool = False,
) -> None:  # fmt: skip
    """Check the arguments and start the kernel, unless `compile_only`."""
    (num_tokens, top_k), (num_experts, num_rows, k) = routing.expert_ids.shape, weight.shape
    n, slots = (num_rows, 1) if gate is None else (num_rows // 2, top_k)
    check(f"{kernel}: x", x, (num_tokens * top_k // slots, k), *DTYPES, rows=True)
    check(f"{kernel}: weight", weight, (num_experts, num_rows, k), x.dtype)
    check(f"{kernel}: out", out, (num_tokens * top_k, n), x.dtype, torch.float32)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, num_rows), x.dtype)
    check_launch(kernel, routing, tile, num_experts)
    if not len(routing.units):
        return
    tma = tile.tma and weight.data_ptr() % 16 == 0 and k * weight.itemsize % 16 == 0
    flat = weight.view(num_experts * num_rows, k)
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(experts_kernel.warmup, grid=grid) if compile_only else experts_kernel[grid]
    start(
        x, TensorDescriptor.from_tensor(flat, [tile.block_n, tile.block_k]) if tma else weight, bias,
        routing.pairs, routing.units, out, len(routing.units), n, k, x.stride(0),
        SLOTS=slots, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, TMA=tma,
        EVEN_K=k % tile.block_k == 0, INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages, **launch_args(x),
    )  # fmt: skip


def check_launch(kernel: str, routing: Routing, tile: ExpertTile, num_experts: int) -> None:
    """Raise ValueError unless the work list was made for this tile and these experts."""
    check_routing(kernel, routing, routing.expert_ids.shape[0], num_experts)
    if tile.block_t != routing.unit_pairs:
        raise ValueError(f"{kernel}: a tile of {tile.block_t} pairs, but the routing's units have {routing.unit_pairs}")


def experts_up_reference(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, *, gate: Gate = SWIGLU) -> Tensor:
    """`experts_up` in plain torch: products and gate in fp32 at least, rounded once."""
    tokens = torch.arange(len(x), device=x.device).repeat_interleave(expert_ids.shape[1])
    both = _product(x, tokens, weight, bias, expert_ids)
    return gate(*both.chunk(2, dim=-1)).to(x.dtype)


def experts_down_reference(h: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor) -> Tensor:
    """`experts_down` in plain torch."""
    return _product(h, torch.arange(len(h), device=h.device), weight, bias, expert_ids).to(h.dtype)


def _product(x: Tensor, row_ids: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor) -> Tensor:
    """[P, N]: row row_ids[p] of x times the weights of the expert of pair p; fp32, or fp64 if x is fp64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty(len(row_ids), weight.shape[1], dtype=dtype, device=x.device)
    flat = expert_ids.flatten()
    for expert in flat.unique().tolist():
        own = (flat == expert).nonzero()[:, 0]
        out[own] = x[row_ids[own]].to(dtype) @ weight[expert].to(dtype).T
        if bias is not None:
            out[own] += bias[expert].to(dtype)
    return out


if __name__ == "__main__":
    from batchspec.kernels.benchmarks.moe_bench import main

    main()
