"""The recurrence of Mamba2, position by position: rounds, and the tail of a prefill that must have the bits of rounds.

    dt = softplus(dt + dt_bias);   S = exp(dt A) S + (dt x) B';   y = S C + d x          S [D, N] of each head (`layout.py`)

A program loads its part of the state once, replays positions folded .. n-1 from the rings, goes on with the row's own tokens n,
n+1, ... and stores the state once: after position n-1, or with `commits` after the last token. A round also writes the inputs of
its tokens into the rings, at places that no program of the row reads, for the next round to replay. One loop of one compiled
kernel does all of it in fp32 (fp64 for fp64), and at every position S is rounded to the dtype in which it is stored. So no bit of
an output depends on how many tokens a round has, on how many positions it replays or on when S is stored. (The same sums as small
matrix products over the round's tokens would be fewer instructions, in an order that depends on K.)
Bound by memory (bytes of a row: 2 * NH * D * N * itemsize of the state), with many positions by instructions. A tile of the state
is cut among threads as in `gated_delta/delta_steps.py`, where this was measured.
Source: Dao and Gu 2024 (arXiv 2405.21060); of replaying inputs see `delta_steps.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.common.rounding import as_stored
from batchspec.kernels.gated_delta.convolve import softplus
from batchspec.kernels.gated_delta.delta_steps import LANE_BYTES, REGISTERS, SIDE, TILE, WARPS
from batchspec.kernels.gated_delta.layout import row_of, wide
from batchspec.kernels.mamba2.layout import Sizes, SsmState, SsmWeights, check_scan
from batchspec.kernels.short_conv.short_conv import ConvRows


@triton.jit
def load_position(
    position, first, own_inputs, own_dt, kept_inputs, kept_dt, inputs_stride, dt_stride, head, group, line, column,
    NH: tl.constexpr, D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, RING: tl.constexpr,
):
    """Loads (x, B, C, dt) of one position of a row: those of the row's tokens from `first` on, which come with the launch, or
    those before it, from the row's rings, which hold no C.

    own_*   pointers to position 0 of the row's tokens, as if all of them came with the launch
    kept_*  pointers to the row's rings
    """
    own = position >= first
    place = tl.where(own, position, position % RING).to(tl.int64)
    base = tl.where(own, own_inputs, kept_inputs) + place * tl.where(own, inputs_stride, NH * D + G * N)
    at = group * N + column
    x = tl.load(base + head * D + line, mask=line < D, other=0.0)
    b = tl.load(base + NH * D + at, mask=column < N, other=0.0)
    c = tl.load(base + NH * D + G * N + at, mask=column < tl.where(own, N, 0), other=0.0)
    dt = tl.load(tl.where(own, own_dt, kept_dt) + place * tl.where(own, dt_stride, NH) + head)
    return x, b, c, dt


@triton.jit(do_not_specialize=["commits"])
def scan_steps_kernel(
    xbc, dt, a_log, dt_bias, d, state, inputs, steps, folded, cu_seqlens, positions, slots, live, out, commits,
    xbc_stride, dt_stride, state_stride, inputs_stride, steps_stride,
    NH: tl.constexpr, D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, RING: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """Program (row, head, TILE lines of its state). They are [SIDE, PARTS, SIDE, LANES] as in `delta_steps_kernel`: lines are
    (SIDE, SIDE), and N is (PARTS, LANES). The first program of a head writes dt, the first one of a group B."""
    TILE: tl.constexpr = SIDE * SIDE
    TILES: tl.constexpr = (D + TILE - 1) // TILE
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % NH
    group = head // (NH // G)
    rate = -tl.exp(tl.load(a_log + head).to(ACC))
    bias, skip = tl.load(dt_bias + head).to(ACC), tl.load(d + head).to(ACC)
    await_earlier(PDL)
    begin, count, first, slot = row_of(tl.program_id(0) // (TILES * NH), cu_seqlens, positions, slots, live)
    if count <= 0:
        return
    start = tl.where(commits != 0, first, tl.minimum(tl.load(folded + slot), first))
    stored = first + tl.where(commits != 0, count, 0)  # the state is stored before this position
    column = tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    line = tile * TILE + tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    at = state + slot * state_stride + head * (D * N) + (line * N)[:, None, :, None] + column[None, :, None, :]
    exists = (line < D)[:, None, :, None] & (column < N)[None, :, None, :]
    s = tl.load(at, mask=exists & (column < tl.where(start > 0, N, 0))[None, :, None, :], other=0.0).to(ACC)
    last = first + count - 1
    token = (begin - first).to(tl.int64)  # where position 0 would be; the row's tokens are those from `first` on
    own_inputs, own_dt = xbc + token * xbc_stride, dt + token * dt_stride
    kept_inputs, kept_dt = inputs + slot * inputs_stride, steps + slot * steps_stride
    out_at = out + begin.to(tl.int64) * (NH * D) + head * D + line
    next_x, next_b, next_c, next_dt = load_position(
        start, first, own_inputs, own_dt, kept_inputs, kept_dt, xbc_stride, dt_stride, head, group, line, column, NH, D, G, N,
        RING,
    )
    for position in range(start, first + count):
        x, b, c, raw = next_x, next_b, next_c, next_dt
        next_x, next_b, next_c, next_dt = load_position(
            tl.minimum(position + 1, last), first, own_inputs, own_dt, kept_inputs, kept_dt, xbc_stride, dt_stride, head, group,
            line, column, NH, D, G, N, RING,
        )
        step = softplus(raw.to(ACC) + bias)
        wide_x = x.to(ACC)
        s = s * tl.exp(step * rate) + (step * wide_x)[:, None, :, None] * b.to(ACC)[None, :, None, :]
        s = as_stored(s, state.dtype.element_ty, INTERPRETED)
        if position >= first:
            y = tl.sum(tl.sum(s * c.to(ACC)[None, :, None, :], 1), 2) + skip * wide_x
            tl.store(out_at, y.to(out.dtype.element_ty), mask=line < D)
            out_at += NH * D
            if commits == 0:
                place = kept_inputs + position % RING * (NH * D + G * N)
                tl.store(place + head * D + line, x, mask=line < D)
                if tile == 0:
                    tl.store(kept_dt + position % RING * NH + head, raw)
                    if head % (NH // G) == 0:
                        tl.store(place + NH * D + group * N + column, b, mask=column < N)
        if position + 1 == stored:
            tl.store(at, s.to(state.dtype.element_ty), mask=exists)


def scan_steps(
    xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, rows: ConvRows, out: Tensor, *, commits: bool,
    interpret: bool = False,
) -> None:
    """Write y of a pass's T tokens, and store the state of each of its rows.

    xbc      fp32, bf16, fp16 or fp64 [T, NH D + 2 G N]  after the convolution and SiLU; rows may be slices of wider ones
    dt       [T, NH] of the same dtype  before its bias; rows may be slices of wider ones
    state    the state, the rings and `folded`; the state of a row that begins at position 0 is zero, whatever the slot holds
    out      [T, NH D] of the same dtype, contiguous; not written for padding and dead rows
    commits  False, a round: a row has at most P / 2 tokens, whose inputs go into the rings; at most P / 2 positions before its
             first one are replayed, and its state is stored before its first position. True: nothing is replayed (`folded` is not
             read), the rings stay, and the state is stored after its last token

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides, and for rows too long for the rings.
    """
    check_scan("scan_steps", xbc, dt, weights, state, rows, out)
    own, ring = state.sizes, state.inputs.shape[1]
    if not commits and 2 * rows.max_tokens > ring:
        raise ValueError(f"scan_steps: rings of {ring} positions for {rows.max_tokens} tokens of a row; too few")
    if not (out.is_cuda or interpret):
        scan_steps_reference(xbc, dt, weights, state, rows, out, commits=commits)
        return
    lanes = LANE_BYTES // state.state.element_size()
    if num_programs := rows.slots.numel() * own.heads * triton.cdiv(own.head_dim, TILE):
        scan_steps_kernel[(num_programs,)](
            xbc, dt, weights.a_log, weights.dt_bias, weights.d, state.state, state.inputs, state.steps, state.folded,
            rows.cu_seqlens, rows.positions, rows.slots, rows.live, out, int(commits), xbc.stride(0), dt.stride(0),
            state.state.stride(0), state.inputs.stride(0), state.steps.stride(0), NH=own.heads, D=own.head_dim, G=own.groups,
            N=own.state_size, RING=ring, PARTS=triton.next_power_of_2(triton.cdiv(own.state_size, lanes)), LANES=lanes,
            ACC=tl.float64 if out.dtype == torch.float64 else tl.float32, INTERPRETED=not out.is_cuda, num_warps=WARPS,
            maxnreg=None if out.dtype == torch.float64 else REGISTERS, **launch_args(out),
        )


def scan_steps_reference(
    xbc: Tensor, dt: Tensor, weights: SsmWeights, state: SsmState, rows: ConvRows, out: Tensor, *, commits: bool
) -> None:
    """The same in plain torch, row by row. One position at a time: torch may compute exp of a tensor of another
    length by other code, with other bits."""
    own, ring, acc = state.sizes, state.inputs.shape[1], wide(out.dtype)
    x_and_b = own.inner + own.groups * own.state_size
    rate, bias, skip = -weights.a_log.to(acc).exp(), weights.dt_bias.to(acc), weights.d.to(acc)
    for slot, tokens, first in rows.alive():
        start = first if commits else min(int(state.folded[slot]), first)
        last = first + tokens.stop - tokens.start
        s = state.state[slot].to(acc) if start else torch.zeros_like(state.state[slot], dtype=acc)
        for position in range(start, last):
            token, place = tokens.start + position - first, position % ring
            is_own = position >= first
            values, raw = (xbc[token], dt[token]) if is_own else (state.inputs[slot, place], state.steps[slot, place])
            step = F.softplus(raw.to(acc) + bias)
            x = values[: own.inner].to(acc).view(own.heads, own.head_dim)
            b, c = of_heads(values[own.inner : x_and_b], own), values[x_and_b:]
            s = s * (step * rate).exp()[:, None, None] + (step[:, None] * x)[:, :, None] * b
            s = s.to(state.state.dtype).to(acc)
            if is_own:
                y = (s * of_heads(c, own)).sum(-1) + skip[:, None] * x
                out[token] = y.flatten()
                if not commits:
                    state.inputs[slot, place], state.steps[slot, place] = values[:x_and_b], raw
            if position + 1 == (last if commits else first):
                state.state[slot] = s


def of_heads(values: Tensor, sizes: Sizes) -> Tensor:
    """B or C of all groups [G N] -> of each head [NH, 1, N], in fp32 (fp64 for fp64)."""
    of_groups = values.to(wide(values.dtype)).view(sizes.groups, sizes.state_size)
    return of_groups.repeat_interleave(sizes.heads // sizes.groups, 0)[:, None]
