"""A causal convolution of each of C channels: between two gates in a short convolution layer, before SiLU in a Mamba2 layer.

    u[t] = b[t] * x[t]                                             b | c | x are the columns of `inputs`
    y[t] = c[t] * (bias + sum over w of weight[w] * u[t - (W-1) + w])

    u[t] = inputs[t]                                               without gates
    y[t] = silu(bias + sum over w of weight[w] * u[t - (W-1) + w])

u before a row's first flat token is what `ring` keeps of its earlier positions, and 0 before position 0. The ring of a slot holds
u of position p at p % P. A round writes u of its K + 1 positions, of which the next round may reject some. That one begins after
the accepted positions, overwrites the rejected ones, and reads the W - 1 before its first, which with P >= K + W are still there:
nothing is undone.

No bit depends on where passes and rounds end: u is rounded to the model's dtype, in which the ring keeps it, and a sum is a chain
of fused multiply-adds from the oldest tap on, in fp32 (fp64 for fp64), whatever tile computes it. It is rounded once.

Rows of a round have few tokens (`ROUND_TOKENS`): a tile then has as few tokens and more channels, and one program computes all of
a row's tokens, which are also what it writes into the ring. A pass has tiles of `TOKENS`. The first program of a row is the only
one that reads the row's ring, and it writes the ring afterwards, so one launch serves rows of any length. So W is at most TOKENS.
Bound by memory. Bytes: 4 * T * C * itemsize, without gates 2; in a round W - 1 more reads of the ring and a write for each row.
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

TOKENS = 16
"""Of a program of a pass."""
ROUND_TOKENS = 8
"""Rows of at most so many tokens are computed by one program each, for a number of channels."""
TILE, MAX_LANES = 2048, 1024
"""Numbers of a tile, 16 a thread: two loads of 16 bytes if they are bf16; and the most channels, 16 bytes a thread."""


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
    """u of these tokens and channels, rounded as the ring keeps it; 0 for tokens that do not exist."""
    place = inputs + token[:, None] * stride + channel[None, :]
    mask = exists[:, None] & (channel < CHANNELS)[None, :]
    u = tl.load(place, mask=mask, other=0.0)
    if GATED:
        x = tl.load(place + 2 * CHANNELS, mask=mask, other=0.0).to(ACC)
        u = (u.to(ACC) * x).to(inputs.dtype.element_ty)
    return u


@triton.jit
def keep(own_ring, u, first, index, count, within, CHANNELS: tl.constexpr, RING: tl.constexpr):
    """Write u of the tokens with these indices in the row, if they are among its newest RING, into the row's ring."""
    keeps = (index < count) & (index >= tl.maximum(count - RING, 0))
    tl.debug_barrier()  # other threads of the program have read their part of the ring
    tl.store(own_ring + ((first + index) % RING * CHANNELS)[:, None], u, mask=keeps[:, None] & within[None, :])


@triton.jit
def short_conv_kernel(
    inputs, weight, bias, ring, cu_seqlens, positions, slots, live, out, inputs_stride, ring_stride,
    GATED: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr,
    PLACES: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program (channels, row, tokens of the row). WHOLE: no row has more tokens than a program; else TOKENS is at least TAPS."""
    channel = tl.program_id(0) * LANES + tl.arange(0, LANES)
    within = channel < CHANNELS
    row, tile = tl.program_id(1), tl.program_id(2)
    await_earlier(PDL)
    begin = tl.load(cu_seqlens + row).to(tl.int64)
    count = tl.load(cu_seqlens + row + 1).to(tl.int64) - begin
    count = tl.where(tl.load(live + row) != 0, count, 0).to(tl.int32)
    if tile * TOKENS < count:
        first = tl.load(positions + begin).to(tl.int32)
        own_ring = ring + tl.load(slots + row).to(tl.int64) * ring_stride + channel[None, :]
        index = tile * TOKENS + tl.arange(0, TOKENS)
        exists = index < count
        place = channel[None, :] + tl.zeros([TOKENS, 1], tl.int32)
        both = tl.broadcast_to(within[None, :], [TOKENS, LANES])
        acc = tl.zeros([TOKENS, LANES], ACC)
        if bias is not None:
            acc = tl.load(bias + place, mask=both, other=0.0).to(ACC)
        for back in tl.static_range(TAPS - 1, -1, -1):
            at = index - back
            if back < TOKENS:  # otherwise all inputs of this tap are in the ring
                u = input_of(inputs, begin + at, exists & (at >= 0), channel, inputs_stride, GATED, CHANNELS, ACC)
            if back > 0:
                older = exists & (at < 0) & (first + at >= 0)
                earlier = own_ring + ((first + at + RING) % RING * CHANNELS)[:, None]
                before = tl.load(earlier, mask=older[:, None] & within[None, :], other=0.0)
                u = tl.where((at < 0)[:, None], before, u) if back < TOKENS else before
            tap = tl.load(weight + (TAPS - 1 - back) * CHANNELS + place, mask=both, other=0.0).to(ACC)
            acc = tl.fma(u.to(ACC), tap, acc)  # said, not left to the compiler: all tiles give the same bits
        exists_here = exists[:, None] & within[None, :]
        if GATED:
            c = inputs + (begin + index)[:, None] * inputs_stride + CHANNELS + channel[None, :]
            y = acc * tl.load(c, mask=exists_here, other=0.0).to(ACC)
        else:
            y = acc / (1.0 + tl.exp(-acc))
        place = out + (begin + index)[:, None] * CHANNELS + channel[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=exists_here)
        if WHOLE:  # u is the input of the last tap, the tokens' own
            keep(own_ring, u, first, index, count, within, CHANNELS, RING)
        elif tile == 0:
            newest = count - 1 - tl.arange(0, PLACES)
            of_ring = newest >= tl.maximum(count - RING, 0)
            kept = input_of(inputs, begin + newest, of_ring, channel, inputs_stride, GATED, CHANNELS, ACC)
            keep(own_ring, kept, first, newest, count, within, CHANNELS, RING)


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
    if not taps <= min(places, TOKENS):
        raise ValueError(
            f"short_conv: {taps} taps and rings of {places} positions; must be at most {TOKENS} taps, and as many positions"
        )
    if not (inputs.is_cuda or interpret):
        return short_conv_reference(inputs, weight, bias, ring, rows, gated=gated)
    out = inputs.new_empty(num_tokens, channels)
    if num_tokens:
        whole = rows.max_tokens <= ROUND_TOKENS
        tokens = triton.next_power_of_2(max(1, rows.max_tokens)) if whole else TOKENS
        lanes = min(MAX_LANES, TILE // tokens)
        grid = (triton.cdiv(channels, lanes), num_rows, triton.cdiv(rows.max_tokens, tokens))
        short_conv_kernel[grid](
            inputs, weight, bias, ring, rows.cu_seqlens, rows.positions, rows.slots, rows.live, out, inputs.stride(0),
            ring.stride(0), GATED=gated, CHANNELS=channels, TAPS=taps, RING=places, TOKENS=tokens,
            PLACES=triton.next_power_of_2(places), LANES=lanes, WHOLE=whole,
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
