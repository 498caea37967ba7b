"""Grouped products of experts with bf16 weights, on rows in the order of the list of pairs.

As `experts.py`, but rows of one expert follow each other (`sort_rows.py`), so a unit's tokens are one block that TMA loads, and a
unit of few pairs is multiplied with a narrower tile, chosen on the GPU. The order of sums over K is the same as there.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.operands import DTYPES
from batchspec.kernels.moe.experts import add_bias_and_gate, check_launch, load_rows
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.sorted_mxfp4 import blocks_of, load_tokens, store_rows
from batchspec.kernels.moe.tiles import ExpertTile
from batchspec.kernels.moe.units import Routing, program_place


@triton.jit
def multiply(
    x, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N rows of W (gated: and as many of up) by BLOCK_T rows of x."""
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    w_rows = 2 * n if GATED else n
    for at in range(0, k, BLOCK_K):
        tokens = tl.trans(load_tokens(x, begin, count, at, num_rows, k, BLOCK_T, BLOCK_K, TMA)).to(DOT)
        a = load_rows(w, expert, first, w_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        acc = tl.dot(a.to(DOT), tokens, acc, input_precision="ieee")
        if GATED:
            b = load_rows(w, expert, n + first, w_rows, at, k, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            up = tl.dot(b.to(DOT), tokens, up, input_precision="ieee")
    acc = add_bias_and_gate(acc, up, bias, expert, first, n, GATED, LIMIT, ALPHA, BLOCK_N)
    store_rows(acc, out, pairs, begin, count, first, n, SCATTER, BLOCK_T, BLOCK_N)


@triton.jit(do_not_specialize=["num_units", "num_rows"])
def sorted_plain_kernel(
    x16, x32, x64, x128, x256, w, bias, pairs, units, out, num_units, num_rows, n, k,
    SCATTER: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    LOW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x16 to x256: x [num_rows, k] with blocks of so many rows, None where LOW to BLOCK_T does not include it."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else out.dtype.element_ty
    unit, tile = program_place(num_units, tl.cdiv(n, BLOCK_N), GROUP)
    await_earlier(PDL)
    expert = tl.load(units + unit * 4)
    begin = tl.load(units + unit * 4 + 1)
    count = tl.load(units + unit * 4 + 2)
    first = tile * BLOCK_N
    if LOW <= 16 and ((count > 0) & (count <= 16)):
        multiply(x16, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k, SCATTER, GATED, LIMIT, ALPHA,
                 16, BLOCK_N, BLOCK_K, TMA, EVEN_K, DOT)  # fmt: skip
    if LOW <= 32 and BLOCK_T >= 32 and ((count > (16 if LOW < 32 else 0)) & (count <= 32)):
        multiply(x32, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k, SCATTER, GATED, LIMIT, ALPHA,
                 32, BLOCK_N, BLOCK_K, TMA, EVEN_K, DOT)  # fmt: skip
    if LOW <= 64 and BLOCK_T >= 64 and ((count > (32 if LOW < 64 else 0)) & (count <= 64)):
        multiply(x64, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k, SCATTER, GATED, LIMIT, ALPHA,
                 64, BLOCK_N, BLOCK_K, TMA, EVEN_K, DOT)  # fmt: skip
    if LOW <= 128 and BLOCK_T >= 128 and ((count > (64 if LOW < 128 else 0)) & (count <= 128)):
        multiply(x128, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k, SCATTER, GATED, LIMIT, ALPHA,
                 128, BLOCK_N, BLOCK_K, TMA, EVEN_K, DOT)  # fmt: skip
    if BLOCK_T >= 256 and ((count > (128 if LOW < 256 else 0)) & (count <= 256)):
        multiply(x256, w, bias, pairs, out, expert, begin, count, first, num_rows, n, k, SCATTER, GATED, LIMIT, ALPHA,
                 256, BLOCK_N, BLOCK_K, TMA, EVEN_K, DOT)  # fmt: skip


def launch(
    kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, tile: ExpertTile, out: Tensor, *,
    gate: Gate | None = None, low: int = 16, compile_only: bool = False,
) -> None:  # fmt: skip
    """Check the arguments and start the kernel, unless `compile_only`. See `sorted_mxfp4.launch`; out has the dtype of x."""
    num_pairs, (num_experts, w_rows, k) = routing.expert_ids.numel(), weight.shape
    n = w_rows if gate is None else w_rows // 2
    check(f"{kernel}: x", x, (num_pairs, k), *DTYPES)
    check(f"{kernel}: weight", weight, (num_experts, w_rows, k), x.dtype)
    check(f"{kernel}: out", out, (num_pairs, n), x.dtype)
    if bias is not None:
        check(f"{kernel}: bias", bias, (num_experts, w_rows), x.dtype)
    check_launch(kernel, routing, tile, num_experts)
    if not len(routing.units):
        return
    tma = tile.tma and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and k * weight.itemsize % 16 == 0
    flat = weight.view(num_experts * w_rows, k)
    low = min(low, tile.block_t)
    xs = blocks_of(x, low, tile, tma)
    grid = (len(routing.units) * triton.cdiv(n, tile.block_n),)
    start = partial(sorted_plain_kernel.warmup, grid=grid) if compile_only else sorted_plain_kernel[grid]
    start(
        *xs, TensorDescriptor.from_tensor(flat, [tile.block_n, tile.block_k]) if tma else weight, bias,
        routing.pairs, routing.units, out, len(routing.units), num_pairs, n, k,
        SCATTER=gate is None, GATED=gate is not None, LIMIT=gate and gate.limit, ALPHA=gate and gate.alpha,
        LOW=low, BLOCK_T=tile.block_t, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, TMA=tma,
        EVEN_K=k % tile.block_k == 0, INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages, **launch_args(x),
    )  # fmt: skip
