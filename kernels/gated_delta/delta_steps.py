"""The gated delta rule, position by position: rounds, and the tail of a prefill that must have the bits of rounds.

    S = exp(g) S;   d = beta (v - S k);   S = S + d k';   o = S q          S [DV, DK] of each value head

`convolve` gives k of length 1 and q of length 1 / sqrt(DK). Value head h has k and q of key head h // G.

A program loads its part of the state once, replays positions folded .. n-1 from the rings, goes on with the row's own tokens
n, n+1, ... and stores the state once: after position n-1, or with `commits` after the last token. One loop of one compiled kernel
does all of it in fp32 (fp64 for fp64). At every position S + d k' is rounded to the dtype in which S is stored, which changes
nothing in fp32. So no bit of an output depends on how many tokens a round has, on how many positions it replays or on when S is
stored.
Bound by memory (bytes of a row: 2 * HV * DV * DK * itemsize of the state) with two positions, at 93 to 97 % of an H100's copy
bandwidth, and with eight by instructions, 466 of a warp for each (Triton 3.6, sm_90; 315 of them are arithmetic in fp32). The DV
lines of a state are independent, and a program has 16 of them. A thread has 16 of every 128 bytes of a line: most of a sum over
DK is within threads, and the rest takes 3 shuffles. The inputs of a position are loaded, and converted before the threads
exchange them, while the one before it is computed.
Source: models/qwen3_5 of transformers 5.24; Yang et al. 2024 (arXiv 2412.06464). To replay inputs: batchspec's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.common.rounding import as_stored
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState, check_inputs, row_of, wide

WARPS = 1  # a program of one warp waits for no other
REGISTERS = 128
"""Of a thread, so that a multiprocessor has 16 programs: left to itself, the compiler takes 165 where rows may be dead."""
LANE_BYTES = 128
"""Of neighbours of DK in the last dimension of a tile: 8 threads load 16 bytes each."""
SIDE = tl.constexpr(4)
"""A program has SIDE * SIDE lines of a state."""
TILE = SIDE.value**2


@triton.jit
def load_position(
    position, first, own_key, own_value, own_gate, kept_key, kept_value, kept_gate, own_query, column, line,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, ACC: tl.constexpr,
):
    """Loads (k, q, v, g, beta) of one position of a row: those of the row's tokens from `first` on, which come with the launch,
    or those before it, from the row's rings.

    own_*   pointers to position 0 of the row's tokens, as if all of them came with the launch
    kept_*  pointers to the row's rings, which hold no q
    """
    own = position >= first
    place = tl.where(own, position, position % RING).to(tl.int64)
    key = tl.load(tl.where(own, own_key, kept_key) + place * (HK * DK) + column, mask=column < DK, other=0.0)
    query = tl.load(own_query + place * (HK * DK) + column, mask=column < tl.where(own, DK, 0), other=0.0)
    value = tl.load(tl.where(own, own_value, kept_value) + place * (HV * DV) + line, mask=line < DV, other=0.0)
    gate = tl.where(own, own_gate, kept_gate) + place * (HV * 2)
    return key.to(ACC), query.to(ACC), value.to(ACC), tl.load(gate), tl.load(gate + 1)


@triton.jit(do_not_specialize=["commits"])
def delta_steps_kernel(
    q, k, v, gates, state, keys, values, ring_gates, folded, cu_seqlens, positions, slots, live, out, commits,
    state_stride, keys_stride, values_stride, gates_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr,
    PARTS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """Program (row, value head, TILE lines of its state). They are [SIDE, PARTS, SIDE, LANES]: lines are (SIDE, SIDE), and DK is
    (PARTS, LANES). Triton divides LANES among 8 threads, and then the first dimension (Triton 3.6) or the last but one (3.9)
    among 4: either way a thread has all PARTS of its lines."""
    TILE: tl.constexpr = SIDE * SIDE
    TILES: tl.constexpr = (DV + TILE - 1) // TILE
    head = tl.program_id(0) // TILES % HV
    key_head = head // (HV // HK)
    await_earlier(PDL)
    begin, count, first, slot = row_of(tl.program_id(0) // (TILES * HV), cu_seqlens, positions, slots, live)
    if count <= 0:
        return
    start = tl.where(commits != 0, first, tl.minimum(tl.load(folded + slot), first))
    stored = first + tl.where(commits != 0, count, 0)  # the state is stored before this position
    column = tl.arange(0, PARTS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    line = tl.program_id(0) % TILES * TILE + tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    at = state + slot * state_stride + head * (DV * DK) + (line * DK)[:, None, :, None] + column[None, :, None, :]
    exists = (line < DV)[:, None, :, None] & (column < DK)[None, :, None, :]
    s = tl.load(at, mask=exists & (column < tl.where(start > 0, DK, 0))[None, :, None, :], other=0.0).to(ACC)
    last = first + count - 1
    token = (begin - first).to(tl.int64)  # where position 0 would be; the row's tokens are those from `first` on
    own_key, own_query = k + (token * HK + key_head) * DK, q + (token * HK + key_head) * DK
    own_value, own_gate = v + (token * HV + head) * DV, gates + (token * HV + head) * 2
    kept_key, kept_value = keys + slot * keys_stride + key_head * DK, values + slot * values_stride + head * DV
    kept_gate = ring_gates + slot * gates_stride + head * 2
    out_at = out + (begin.to(tl.int64) * HV + head) * DV + line
    next_key, next_query, next_value, next_gate, next_beta = load_position(
        start, first, own_key, own_value, own_gate, kept_key, kept_value, kept_gate, own_query, column, line, HK, HV, DK, DV,
        RING, ACC,
    )
    for position in range(start, first + count):
        key, query, value, gate, beta = next_key, next_query, next_value, next_gate, next_beta
        next_key, next_query, next_value, next_gate, next_beta = load_position(
            tl.minimum(position + 1, last), first, own_key, own_value, own_gate, kept_key, kept_value, kept_gate, own_query,
            column, line, HK, HV, DK, DV, RING, ACC,
        )
        decay = tl.exp(gate)
        key = key[None, :, None, :]
        delta = beta * (value - decay * tl.sum(tl.sum(s * key, 1), 2))
        s = s * decay + delta[:, None, :, None] * key
        s = as_stored(s, state.dtype.element_ty, INTERPRETED)
        if position >= first:
            o = tl.sum(tl.sum(s * query[None, :, None, :], 1), 2)
            tl.store(out_at, o, mask=line < DV)
            out_at += HV * DV
        if position + 1 == stored:
            tl.store(at, s, mask=exists)


def delta_steps(
    inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor, *, commits: bool, interpret: bool = False
) -> None:
    """Write o of a pass's T tokens, and store the state of each of its rows.

    inputs   of the T tokens, from `convolve`
    state    the state, the rings and `folded`; the state of a row that begins at position 0 is zero, whatever the slot holds
    out      [T, HV, DV] of the inputs' dtype, contiguous; not written for padding and dead rows
    commits  False, a round: at most P - K - 1 positions before a row's first one are replayed, and its state is stored before its
             first position. True: nothing is replayed (`folded` is not read), and the state is stored after its last token

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    check_inputs("delta_steps", inputs, state, batch, out)
    if not (out.is_cuda or interpret):
        delta_steps_reference(inputs, state, batch, out, commits=commits)
        return
    (_, value_heads, value_dim, key_dim), (_, ring, key_heads, _) = state.state.shape, state.keys.shape
    lanes = LANE_BYTES // state.state.element_size()
    if num_programs := batch.slots.numel() * value_heads * triton.cdiv(value_dim, TILE):
        delta_steps_kernel[(num_programs,)](
            inputs.q, inputs.k, inputs.v, inputs.gates, state.state, state.keys, state.values, state.gates, state.folded,
            batch.cu_seqlens, batch.positions, batch.slots, batch.live, out, int(commits), state.state.stride(0),
            state.keys.stride(0), state.values.stride(0), state.gates.stride(0), HK=key_heads, HV=value_heads, DK=key_dim,
            DV=value_dim, RING=ring, PARTS=triton.next_power_of_2(triton.cdiv(key_dim, lanes)), LANES=lanes,
            ACC=tl.float64 if out.dtype == torch.float64 else tl.float32, INTERPRETED=not out.is_cuda, num_warps=WARPS,
            maxnreg=None if out.dtype == torch.float64 else REGISTERS, **launch_args(out),
        )


def delta_steps_reference(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, out: Tensor, *, commits: bool) -> None:
    """The same in plain torch, row by row. Operations of one shape for each position: a vector of another length may have its
    exponentials computed by other code."""
    group, acc = state.state.shape[1] // state.keys.shape[2], wide(out.dtype)
    for slot, own, first in batch.rows():
        start = first if commits else min(int(state.folded[slot]), first)
        last = first + own.stop - own.start
        s = state.state[slot].to(acc) if start else torch.zeros_like(state.state[slot], dtype=acc)
        for position in range(start, last):
            token, place = own.start + position - first, position % state.keys.shape[1]
            if position >= first:
                k, v, gates = inputs.k[token], inputs.v[token], inputs.gates[token]
            else:
                k, v, gates = state.keys[slot, place], state.values[slot, place], state.gates[slot, place]
            k = k.to(acc).repeat_interleave(group, 0)[:, None]
            s = s * gates[:, :1, None].exp()
            delta = gates[:, 1:] * (v.to(acc) - (s * k).sum(-1))
            s = (s + delta[:, :, None] * k).to(state.state.dtype).to(acc)
            if position >= first:
                out[token] = (s * inputs.q[token].to(acc).repeat_interleave(group, 0)[:, None]).sum(-1)
            if position + 1 == (last if commits else first):
                state.state[slot] = s
