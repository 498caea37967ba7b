"""The recurrence of Mamba2 by chunks of 64 positions: prefill. The formula is that of `layout.py`.

    total = cumsum(dt A) in the chunk;   W[i, j] = (C_i . B_j) exp(total_i - total_j) dt_j  for j <= i, else 0
    Y = exp(total) C S' + W X + d X;     S = exp(total_last) S + (exp(total_last - total) dt X)' B

Chunks lie on multiples of 64 from position 0, and after each chunk S is rounded to the dtype in which it is stored (a no-op for
fp32), so a prefill that is cut at multiples of 64 is bitwise equal to one pass. Each program takes the chunks of one row, head
and TILE values of D in order, with its part of the state in registers, and four products a chunk. The product of C and B is the
same for the heads of a group, but every program computes it: a quarter of its operations, in exchange for one launch and no
scratch memory (mamba-ssm takes five launches and a state of each chunk). Operands of products are bf16 where the inputs are:
copies of the state, W, and X times its factors are rounded to it. Sums, and the state itself within a chunk, are fp32. fp32
inputs are multiplied in fp32. Nothing is added up by atomics, so the bits are the same in every run.
Bound by latency with few rows: a row's chunks follow each other, in NH * D / TILE programs. With many by tensor cores.
Source: Dao and Gu 2024 (arXiv 2405.21060), section 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.common.rounding import as_stored
from batchspec.kernels.gated_delta.chunk_products import CHUNK
from batchspec.kernels.gated_delta.convolve import softplus
from batchspec.kernels.gated_delta.layout import row_of, wide
from batchspec.kernels.mamba2.layout import SsmState, SsmWeights, check_scan
from batchspec.kernels.short_conv.short_conv import ConvRows

TILE, WARPS = 32, 4


def stages_of(dtype: torch.dtype) -> int:
    """num_stages of the loop over chunks. With fp32 inputs and N = 128 two stages take 107,008 bytes of shared memory and one
    73,984; an L40S or RTX 3090 has 101,376."""
    return 1 if dtype == torch.float32 else 2


@triton.jit
def scan_chunks_kernel(
    xbc, dt, a_log, dt_bias, d, state, cu_seqlens, positions, slots, live, out, xbc_stride, dt_stride, state_stride,
    NH: tl.constexpr, D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    ACC: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """Program (row, head, TILE values of D). The state is transposed, [DIM, TILE]. Places of a chunk that are not the pass's
    tokens count as dt = 0."""
    DOT: tl.constexpr = ACC if INTERPRETED else xbc.dtype.element_ty
    TILES: tl.constexpr = (D + TILE - 1) // TILE
    head = tl.program_id(0) // TILES % NH
    group = head // (NH // G)
    rate = -tl.exp(tl.load(a_log + head).to(ACC))
    bias, skip = tl.load(dt_bias + head).to(ACC), tl.load(d + head).to(ACC)
    await_earlier(PDL)
    begin, count, first, slot = row_of(tl.program_id(0) // (TILES * NH), cu_seqlens, positions, slots, live)
    if count <= 0:
        return
    lane = tl.arange(0, CHUNK)
    dim = tl.arange(0, DIM)
    line = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    at = state + slot * state_stride + head * (D * N) + (line * N)[None, :] + dim[:, None]
    known = (line < D)[None, :] & (dim < tl.where(first > 0, N, 0))[:, None]
    s = tl.load(at, mask=known, other=0.0).to(ACC)
    for chunk in range(first // CHUNK, tl.cdiv(first + count, CHUNK)):
        index = chunk * CHUNK + lane - first
        exists = (index >= 0) & (index < count)
        token = (begin + index).to(tl.int64)
        own = xbc + (token * xbc_stride)[:, None]
        within = exists[:, None] & (dim < N)[None, :]
        valued = exists[:, None] & (line < D)[None, :]
        b = tl.load(own + (NH * D + group * N) + dim[None, :], mask=within, other=0.0).to(DOT)
        c = tl.load(own + (NH * D + (G + group) * N) + dim[None, :], mask=within, other=0.0).to(DOT)
        x = tl.load(own + head * D + line[None, :], mask=valued, other=0.0)
        step = softplus(tl.load(dt + token * dt_stride + head, mask=exists, other=0.0).to(ACC) + bias)
        step = tl.where(exists, step, 0.0)
        total = tl.cumsum(step * rate, 0)
        last = tl.sum(tl.where(lane == CHUNK - 1, total, 0.0), 0)
        lower = lane[:, None] >= lane[None, :]
        decays = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf"))) * step[None, :]
        weights = tl.dot(c, tl.trans(b), input_precision="ieee", out_dtype=ACC) * decays
        y = tl.dot(c, s.to(DOT), input_precision="ieee", out_dtype=ACC) * tl.exp(total)[:, None]
        y = tl.dot(weights.to(DOT), x.to(DOT), y, input_precision="ieee", out_dtype=ACC) + skip * x.to(ACC)
        tl.store(out + (token * (NH * D) + head * D)[:, None] + line[None, :], y.to(out.dtype.element_ty), mask=valued)
        added = x.to(ACC) * (tl.exp(last - total) * step)[:, None]
        s = tl.dot(tl.trans(b), added.to(DOT), s * tl.exp(last), input_precision="ieee", out_dtype=ACC)
        s = as_stored(s, state.dtype.element_ty, INTERPRETED)
    tl.store(at, s.to(state.dtype.element_ty), mask=(line < D)[None, :] & (dim < N)[:, None])


def scan_chunks(
    xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, rows: ConvRows, out: Tensor, *, interpret: bool = False
) -> None:
    """Write y of a prefill pass's T tokens, and store the state of each of its rows after its last token.

    xbc, dt, out  as of `scan_steps`; fp64 only in the interpreter and on a CPU
    state         the state after each row's tokens before this pass; that of a row that begins at position 0 is zero, whatever
                  the slot holds. `folded` and the rings are neither read nor written

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    check_scan("scan_chunks", xbc, dt, weights, state, rows, out)
    if not (out.is_cuda or interpret):
        scan_chunks_reference(xbc, dt, weights, state, rows, out)
        return
    own = state.sizes
    if num_programs := rows.slots.numel() * own.heads * triton.cdiv(own.head_dim, TILE):
        scan_chunks_kernel[(num_programs,)](
            xbc, dt, weights.a_log, weights.dt_bias, weights.d, state.state, rows.cu_seqlens, rows.positions, rows.slots,
            rows.live, out, xbc.stride(0), dt.stride(0), state.state.stride(0), NH=own.heads, D=own.head_dim, G=own.groups,
            N=own.state_size, DIM=max(16, triton.next_power_of_2(own.state_size)), TILE=TILE,
            ACC=tl.float64 if out.dtype == torch.float64 else tl.float32, INTERPRETED=not out.is_cuda, num_warps=WARPS,
            num_stages=stages_of(out.dtype), **launch_args(out),
        )


def scan_chunks_reference(
    xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, rows: ConvRows, out: Tensor
) -> None:
    """The same in plain torch, row by row and chunk by chunk, with all operands in fp32 (fp64 for fp64)."""
    own, acc, size = state.sizes, wide(out.dtype), CHUNK.value
    rate, bias, skip = -weights.a_log.to(acc).exp(), weights.dt_bias.to(acc), weights.d.to(acc)
    for slot, tokens, first in rows.alive():
        s = state.state[slot].to(acc) if first else torch.zeros_like(state.state[slot], dtype=acc)
        last = first + tokens.stop - tokens.start
        for begin in [first, *range(first - first % size + size, last, size)]:
            end = min(last, begin - begin % size + size)
            chunk = slice(tokens.start + begin - first, tokens.start + end - first)
            x, b, c = xbc[chunk].to(acc).split([own.inner, *[own.groups * own.state_size] * 2], 1)
            x = x.unflatten(1, (own.heads, own.head_dim)).transpose(0, 1)  # [heads, n, ...]
            b, c = (
                part.unflatten(1, (own.groups, own.state_size)).transpose(0, 1).repeat_interleave(own.heads // own.groups, 0)
                for part in (b, c)
            )
            step = F.softplus(dt[chunk].to(acc) + bias).T[..., None]  # [NH, n, 1]
            total = (step * rate[:, None, None]).cumsum(1)
            decays = (total - total.mT).tril().exp().tril() * step.mT
            y = total.exp() * (c @ s.mT) + (c @ b.mT * decays) @ x + skip[:, None, None] * x
            out[chunk] = y.transpose(0, 1).flatten(1).to(out.dtype)
            s = total[:, -1:].exp() * s + ((total[:, -1:] - total).exp() * step * x).mT @ b
            s = s.to(state.state.dtype).to(acc)
        state.state[slot] = s
