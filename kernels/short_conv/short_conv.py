"""A causal convolution of each of C channels: between two gates in a short convolution layer, before SiLU in a Mamba2 layer.

    u[t] = b[t] * x[t]                                             b | c | x are the columns of `inputs`
    y[t] = c[t] * (bias + sum over w of weight[w] * u[t - (W-1) + w])

    u[t] = inputs[t]                                               without gates
    y[t] = silu(bias + sum over w of weight[w] * u[t - (W-1) + w])

u before a row's first flat token is what `ring` keeps of its earlier positions, and 0 before position 0. The ring of a slot holds
u of position p at p % P. A round writes u of its K + 1 positions, of which the next round may reject some. That one begins after
the accepted positions, overwrites the rejected ones, and reads the W - 1 before its first, which with P >= K + W are still there:
nothing is undone.

A program computes some tokens of a row, one after another, for as many channels as threads load 8 bytes at a time: it loads what
the ring or the row has before the first token, then each token once. In a round, whose rows have few tokens, one program has all
tokens of a row, which are also what the ring keeps. Of a longer row the first program alone reads the ring, and writes it
afterwards, so one launch serves rows of any length.

No bit depends on where passes and rounds end: u is rounded to the model's dtype, in which the ring keeps it, and each token takes
the same instructions, a chain of fused multiply-adds from the oldest tap on, in fp32 (fp64 for fp64). It is rounded once.
Bound by memory. Bytes: 4 * T * C * itemsize, without gates 2; in a round also W - 1 reads a row and a write a token.
Source: models/lfm2 and models/nemotron_h of transformers 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

TOKENS, MAX_TAPS = 8, 16
"""The most tokens of a program, if there are no more taps than that, and the most taps."""
TILE_BYTES = 1024
"""A token's channels of a program: 8 bytes a thread. With 16, passes of 1,024 tokens a row take 1.38 times as long (H200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvRows:
    """The flat tokens of a pass. Row r has tokens cu_seqlens[r] .. cu_seqlens[r+1]-1, at consecutive positions; from
    cu_seqlens[R] on there is padding."""

    cu_seqlens: Tensor
    """int32 [R+1]"""
    positions: Tensor
    """int64 [T]"""
    slots: Tensor
    """int32 [R] the slot of each row; no slot twice among rows that are not dead"""
    live: Tensor
    """int32 [R]; 0 is a dead row, whose ring is neither read nor written, as that of a row without tokens"""
    max_tokens: int
    """No row has more tokens than this (host bound)."""

    def alive(self) -> list[tuple[int, slice, int]]:
        """(slot, flat tokens, position of the first) of each row that has tokens and is not dead. Synchronises on a GPU."""
        bounds = pairwise(self.cu_seqlens.tolist())
        return [
            (slot, slice(begin, end), int(self.positions[begin]))
            for slot, (begin, end), lives in zip(self.slots.tolist(), bounds, self.live.tolist(), strict=True)
            if lives and end > begin
        ]

    def check(self, kernel: str, num_tokens: int) -> None:
        """`check` the tensors of a pass of T tokens. Raises ValueError."""
        num_rows = self.slots.numel()
        check(f"{kernel}: cu_seqlens", self.cu_seqlens, (num_rows + 1,), torch.int32)
        check(f"{kernel}: positions", self.positions, (num_tokens,), torch.int64)
        check(f"{kernel}: slots", self.slots, (num_rows,), torch.int32)
        check(f"{kernel}: live", self.live, (num_rows,), torch.int32)


@triton.jit
def input_of(inputs, token, exists, channel, stride, GATED: tl.constexpr, CHANNELS: tl.constexpr, ACC: tl.constexpr):
    """u of a token's channels, rounded as the ring keeps it; 0 if the token does not exist."""
    mask = channel < tl.where(exists, CHANNELS, 0)
    u = tl.load(inputs + token * stride + channel, mask=mask, other=0.0)
    if GATED:
        x = tl.load(inputs + token * stride + 2 * CHANNELS + channel, mask=mask, other=0.0).to(ACC)
        u = (u.to(ACC) * x).to(inputs.dtype.element_ty)
    return u


@triton.jit
def keep(own_ring, u, first, at, count, channel, CHANNELS: tl.constexpr, RING: tl.constexpr):
    """Write u of the row's token `at` into its ring, if it is among the newest RING."""
    keeps = (at >= tl.maximum(count - RING, 0)) & (at < count)
    place = own_ring + (first + at + RING) % RING * CHANNELS
    tl.store(place + channel, u, mask=channel < tl.where(keeps, CHANNELS, 0))


@triton.jit
def keep_newest(
    own_ring, inputs, row_begin, first, count, channel, stride, GATED: tl.constexpr, CHANNELS: tl.constexpr, RING: tl.constexpr,
    ACC: tl.constexpr,
):
    """Write u of the newest RING tokens of a row into its ring, four at a time."""
    for done in range(0, tl.minimum(count, RING), 4):
        u: tl.tuple = ()
        for t in tl.static_range(4):
            at = count - 1 - done - t
            u += (input_of(inputs, row_begin + at, at >= 0, channel, stride, GATED, CHANNELS, ACC),)
        for t in tl.static_range(4):
            keep(own_ring, u[t], first, count - 1 - done - t, count, channel, CHANNELS, RING)


@triton.jit
def short_conv_kernel(
    inputs, weight, bias, ring, cu_seqlens, positions, slots, live, out, inputs_stride, ring_stride,
    GATED: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr,
    LANES: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program (channels, row, tokens of the row). WHOLE: no row has more tokens than a program; else TOKENS is at least TAPS."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    row, begins = tl.program_id(1), tl.program_id(2) * TOKENS
    await_earlier(PDL)
    row_begin = tl.load(cu_seqlens + row).to(tl.int64)
    count = (tl.load(cu_seqlens + row + 1) - row_begin).to(tl.int32)
    count = tl.where(tl.load(live + row) != 0, count, 0)
    if begins < count:
        first = tl.load(positions + row_begin).to(tl.int32)
        own_ring = ring + tl.load(slots + row).to(tl.int64) * ring_stride
        window: tl.tuple = ()  # u of the TAPS - 1 tokens before the first, and of all tokens of the program
        taps: tl.tuple = ()
        gates: tl.tuple = ()
        for back in tl.static_range(TAPS - 1, 0, -1):
            at = begins - back
            kept = channel < tl.where((at < 0) & (first + at >= 0), CHANNELS, 0)
            u = tl.load(own_ring + (first + at + RING) % RING * CHANNELS + channel, mask=kept, other=0.0)
            if not WHOLE:
                own = input_of(inputs, row_begin + at, at >= 0, channel, inputs_stride, GATED, CHANNELS, ACC)
                u = tl.where(at < 0, u, own)
            window += (u,)
        for t in tl.static_range(TOKENS):
            at = begins + t
            window += (input_of(inputs, row_begin + at, at < count, channel, inputs_stride, GATED, CHANNELS, ACC),)
            if GATED:
                c = inputs + (row_begin + at) * inputs_stride + CHANNELS + channel
                gates += (tl.load(c, mask=channel < tl.where(at < count, CHANNELS, 0), other=0.0),)
        for w in tl.static_range(TAPS):
            taps += (tl.load(weight + w * CHANNELS + channel, mask=channel < CHANNELS, other=0.0).to(ACC),)
        added = tl.zeros([LANES], ACC)
        if bias is not None:
            added = tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(ACC)
        for t in tl.static_range(TOKENS):
            acc = added
            for w in tl.static_range(TAPS):
                acc = tl.fma(window[t + w].to(ACC), taps[w], acc)  # fused by name: no compiler decides it for a number of tokens
            y = acc * gates[t].to(ACC) if GATED else acc / (1.0 + tl.exp(-acc))
            place = out + (row_begin + begins + t) * CHANNELS + channel
            tl.store(place, y.to(out.dtype.element_ty), mask=channel < tl.where(begins + t < count, CHANNELS, 0))
        tl.debug_barrier()  # other threads of the program have read their part of the ring
        if WHOLE:
            for t in tl.static_range(TOKENS):
                keep(own_ring, window[TAPS - 1 + t], first, t, count, channel, CHANNELS, RING)
        elif begins == 0:
            keep_newest(own_ring, inputs, row_begin, first, count, channel, inputs_stride, GATED, CHANNELS, RING, ACC)


def short_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows, *, gated: bool = True,
    interpret: bool = False,
) -> Tensor:
    """y [T, C]; see the module's docstring.

    inputs  [T, 3 C], without gates [T, C], any float dtype  rows may be slices of wider ones
    weight  [W, C] of the same dtype, W up to 16; the last tap is that of the token itself
    bias    [C] of the same dtype, or None
    ring    [slots, P, C] of the same dtype, each slot contiguous; P >= W

    Returns a new tensor, undefined for padding and dead rows, whose rings are not written. Does not synchronise on a GPU. Raises
    ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, dtype), (taps, channels) = (len(inputs), inputs.dtype), weight.shape
    num_rows, (_, places, _) = rows.slots.numel(), ring.shape
    check("short_conv: inputs", inputs, (num_tokens, (3 if gated else 1) * channels), *FLOATS, rows=True)
    check("short_conv: weight", weight, (taps, channels), dtype)
    if bias is not None:
        check("short_conv: bias", bias, (channels,), dtype)
    check("short_conv: ring[0]", ring[0], (places, channels), dtype)
    rows.check("short_conv", num_tokens)
    if not taps <= min(places, MAX_TAPS):
        raise ValueError(
            f"short_conv: {taps} taps and rings of {places} positions; must be at most {MAX_TAPS} taps, and as many positions"
        )
    if not (inputs.is_cuda or interpret):
        return short_conv_reference(inputs, weight, bias, ring, rows, gated=gated)
    out = inputs.new_empty(num_tokens, channels)
    if num_tokens:
        tokens, lanes = max(TOKENS, triton.next_power_of_2(taps)), TILE_BYTES // inputs.element_size()
        if whole := rows.max_tokens <= tokens:
            tokens = triton.next_power_of_2(max(1, rows.max_tokens))
        grid = (triton.cdiv(channels, lanes), num_rows, triton.cdiv(rows.max_tokens, tokens))
        short_conv_kernel[grid](
            inputs, weight, bias, ring, rows.cu_seqlens, rows.positions, rows.slots, rows.live, out, inputs.stride(0),
            ring.stride(0), GATED=gated, CHANNELS=channels, TAPS=taps, RING=places, TOKENS=tokens, LANES=lanes, WHOLE=whole,
            ACC=tl.float64 if dtype == torch.float64 else tl.float32, num_warps=4, **launch_args(inputs),
        )
    return out


def short_conv_reference(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: ConvRows, *, gated: bool = True
) -> Tensor:
    """The same in plain torch, row by row; zeros for padding and dead rows."""
    (taps, channels), places = weight.shape, ring.shape[1]
    acc = torch.promote_types(inputs.dtype, torch.float32)
    u, c = inputs, inputs
    if gated:
        b, c, x = inputs.split(channels, 1)
        u = b * x
    out = torch.zeros_like(u, memory_format=torch.contiguous_format)
    for slot, own, first in rows.alive():
        before = torch.arange(first - taps + 1, first, device=ring.device)
        kept = ring[slot, before % places].where(before[:, None] >= 0, 0.0)
        near = torch.cat((kept, u[own])).to(acc)
        summed = near.new_zeros(channels) if bias is None else bias.to(acc)
        for tap in range(taps):
            summed = summed + near[tap : tap + own.stop - own.start] * weight[tap].to(acc)
        out[own] = (summed * c[own].to(acc) if gated else F.silu(summed)).to(out.dtype)
        newest = slice(max(own.start, own.stop - places), own.stop)
        ring[slot, rows.positions[newest] % places] = u[newest]
    return out
