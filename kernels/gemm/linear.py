"""Matrix products of a decode round: y = x @ weight.T, 16 to 1024 tokens, with the operations before and after them fused in.

    linear        y = x W' + b                                   T tokens, K inputs, N outputs, W [N, K]; fp32 sums, rounded once
    linear_add    residual += x W' + b                           in place
    swiglu        y = silu(x Wg' + bg) * (x Wu' + bu)            W = [Wg; Wu], not copied: rows n and N + n in one program
    norm_linear   linear of rms_norm(x), norm_swiglu likewise    squares are summed in the K loop, 1 / rms multiplies the sum

Bound by the weights' bytes at 64 tokens, by tensor cores from about 256. There, cuBLAS's 128 x 256 tiles fill a quarter of the
SMs, so the work can be split along K too. The work is a list of units, one K block of one output tile each, K fastest, then
tokens (programs that run together share a weight tile, and x fits into the L2 cache at these sizes); program p computes units
p * U .. (p+1) * U - 1. U = K blocks of a tile: one tile for each program; a fraction of it: split-K; all units / SMs: stream-K
(Osama et al. 2023, arXiv 2301.03598). A tile that several programs share is summed by the last one to finish, in the order of K:
results are the same bits in every run, and no program waits.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.operands import DTYPES, operands, read_block
from batchspec.kernels.gemm.split_k import MAX_TILES, counters, join_parts
from batchspec.kernels.gemm.tiles import Tile

INTERPRETED_SMS = 3


@triton.jit
def write_tile(
    bias, norm, residual, out, acc, up, squares, m, col, num_tokens, n, k, stride_out, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
):
    """The epilogue on one tile of the product: norm, bias, SwiGLU, residual sum."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    rows = m + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    if norm is not None:
        scale = tl.rsqrt(squares / k + eps)
        acc *= scale[:, None]
        up *= scale[:, None]
    if bias is not None:
        acc += tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + n + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
    # Rounded as separate kernels would round: after the product, the activation, the multiplication and the addition.
    y = acc.to(DTYPE)
    if GATED:
        gate = y.to(tl.float32)
        y = (gate / (1 + tl.exp(-gate))).to(DTYPE)
        y = (y.to(tl.float32) * up.to(DTYPE).to(tl.float32)).to(DTYPE)
    places = rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
    inside = (rows < num_tokens)[:, None] & (cols < n)[None, :]
    if residual is not None:
        y = (tl.load(residual + places, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(DTYPE)
    tl.store(out + places, y, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "units_per_program"])  # no recompilation for other token counts
def linear_kernel(
    x, w, bias, norm, residual, out, partials, arrived, num_tokens, n, k, units_per_program, stride_x, stride_w, stride_out, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, SPLIT: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    DOT: tl.constexpr = tl.float32 if INTERPRETED else DTYPE  # the interpreter multiplies the bits of bf16 as integers
    program = tl.program_id(0)
    k_blocks = tl.cdiv(k, BLOCK_K)
    m_tiles = tl.cdiv(num_tokens, BLOCK_M)
    w_rows = 2 * n if GATED else n
    begin = program * units_per_program
    end = tl.minimum(begin + units_per_program, m_tiles * tl.cdiv(n, BLOCK_N) * k_blocks)
    await_earlier(PDL)
    for tile in range(begin // k_blocks, tl.cdiv(end, k_blocks)):
        m = (tile % m_tiles) * BLOCK_M
        col = (tile // m_tiles) * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for block in range(tl.maximum(begin - tile * k_blocks, 0), tl.minimum(end - tile * k_blocks, k_blocks)):
            at = block * BLOCK_K
            a = read_block(x, m, at, num_tokens, k, stride_x, BLOCK_M, BLOCK_K, TMA, EVEN_K)
            if norm is not None:
                columns = at + tl.arange(0, BLOCK_K)
                wide = a.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                gain = tl.load(norm + columns, mask=columns < k, other=0.0).to(tl.float32)
                a = (wide * gain[None, :]).to(DTYPE)
            b = read_block(w, col, at, w_rows, k, stride_w, BLOCK_N, BLOCK_K, TMA, EVEN_K)
            acc = tl.dot(a.to(DOT), b.to(DOT).T, acc, input_precision="ieee")
            if GATED:
                c = read_block(w, n + col, at, w_rows, k, stride_w, BLOCK_N, BLOCK_K, TMA, EVEN_K)
                up = tl.dot(a.to(DOT), c.to(DOT).T, up, input_precision="ieee")

        complete = True
        if SPLIT:
            complete, acc, up = join_parts(
                partials, arrived, tile, program, k_blocks, units_per_program, acc, up, BLOCK_M, BLOCK_N, GATED
            )
        if complete:
            write_tile(
                bias, norm, residual, out, acc, up, squares, m, col, num_tokens, n, k, stride_out, eps, BLOCK_M, BLOCK_N, GATED
            )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile, out: Tensor | None = None, interpret: bool = False
) -> Tensor:
    """x @ weight.T + bias, as torch.nn.functional.linear up to the order of summation.

    x       bf16 or fp32 [T, K]  rows may be slices of wider ones
    weight  same dtype [N, K], contiguous
    bias    same dtype [N], or None
    tile    how the work is split (`batchspec.kernels.gemm.tiles.candidates`); the result's bits depend on it
    out     same dtype [T, N], contiguous; None: a new tensor

    Returns out. Does not synchronise. Call it once before it is captured in a CUDA graph: the first call allocates counters.
    Graphs captured on one stream must not run at the same time. Raises ValueError for other shapes, dtypes or strides.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, out=out, tile=tile)
    else:
        out.copy_(F.linear(x, weight, bias))
    return out


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor, tile: Tile, interpret: bool = False
) -> None:
    """residual [T, N] += x @ weight.T + bias, the product rounded first; contiguous, same dtype. See `linear`."""
    if x.is_cuda or interpret:
        launch(x, weight, bias, residual=residual, out=residual, tile=tile)
    else:
        residual.add_(F.linear(x, weight, bias))


def swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile, out: Tensor | None = None, interpret: bool = False
) -> Tensor:
    """silu(gate) * up of gate_up = x @ weight.T + bias, weight [2 * N, K] with the gate's rows first -> [T, N]. See `linear`."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, gated=True, out=out, tile=tile)
    else:
        out.copy_(swiglu_reference(x, weight, bias))
    return out


def norm_linear(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    eps: float, tile: Tile, out: Tensor | None = None, interpret: bool = False,
) -> Tensor:
    """linear(rms_norm(x) * norm) with norm [K], for tiles that are not split along K. See `linear`.

    x * norm is rounded once and 1 / rms multiplies the fp32 sum; `norm_reference` rounds x / rms and again the product with norm.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, norm=norm, eps=eps, out=out, tile=tile)
    else:
        out.copy_(F.linear(norm_reference(x, norm, eps), weight, bias))
    return out


def norm_swiglu(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    eps: float, tile: Tile, out: Tensor | None = None, interpret: bool = False,
) -> Tensor:
    """swiglu(rms_norm(x) * norm). See `norm_linear` and `swiglu`."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, norm=norm, eps=eps, gated=True, out=out, tile=tile)
    else:
        out.copy_(swiglu_reference(norm_reference(x, norm, eps), weight, bias))
    return out


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor, tile: Tile, norm: Tensor | None = None,
    residual: Tensor | None = None, gated: bool = False, eps: float = 0.0, compile_only: bool = False,
) -> None:
    """Check the arguments and launch the kernel of any of the products above; `compile_only` compiles without a launch."""
    (num_tokens, k), dtype = x.shape, x.dtype
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    check("linear: x", x, (num_tokens, k), *DTYPES, rows=True)
    check("linear: weight", weight, (2 * n if gated else n, k), dtype)
    check("linear: out", out, (num_tokens, n), dtype)
    if bias is not None:
        check("linear: bias", bias, (weight.shape[0],), dtype)
    if norm is not None:
        check("linear: norm", norm, (k,), dtype)
    if not num_tokens:
        return
    work = tile.work(num_tokens, n, k, num_sms(x.device))
    if work.split and norm is not None:
        raise ValueError(f"linear: {tile} splits K; the norm needs whole rows: use split=1, per_sm=0")
    if work.split and work.num_tiles > MAX_TILES:
        raise ValueError(f"linear: {work.num_tiles} tiles split along K; at most {MAX_TILES}: use larger tiles or split=1")
    slot = tile.block_m * tile.block_n * (2 if gated else 1)
    partials = x.new_empty(work.num_slots * slot, dtype=torch.float32) if work.split else None
    grid = (work.num_programs,)
    start = partial(linear_kernel.warmup, grid=grid) if compile_only else linear_kernel[grid]
    x_operand, w_operand, tma = operands(x, weight, tile)
    start(
        x_operand, w_operand, bias, norm, residual, out, partials, counters(x.device) if work.split else None,
        num_tokens, n, k, work.units_per_program, x.stride(0), k, n, eps,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, TMA=tma, EVEN_K=k % tile.block_k == 0,
        GATED=gated, SPLIT=work.split, INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        **launch_args(x),
    )


def num_sms(device: torch.device) -> int:
    return INTERPRETED_SMS if device.type != "cuda" else card_of(device).num_sms


def norm_reference(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded, times norm, rounded."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * norm


def swiglu_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up
