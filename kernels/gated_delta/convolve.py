"""Inputs of the gated delta rule: a short causal convolution over q, k and v of each channel, and the gates of each value head.

    y[t, c] = silu(sum over w of weight[c, w] * raw[t - (W-1) + w, c])
    k = y / |y|,   q = y / |y| / sqrt(DK) of each head,   v = y
    g = -exp(a_log) * softplus(a + dt_bias),   beta = sigmoid(b)

raw before a row's first flat token is what `conv_inputs` keeps of its earlier positions, and 0 before position 0.
fp32 inside (fp64 for fp64), q, k and v rounded once. The newest P raw inputs of each row go into `conv_inputs`. If one of them
could take the place of an input that another program still reads (long rows, so in prefill only), a second launch writes them.
Bound by memory (bytes: 2 * T * C * itemsize), by launch latency at decode sizes.
Source: models/qwen3_5 of transformers 5.24.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gated_delta.layout import (
    DeltaBatch,
    DeltaColumns,
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    check_batch,
    check_state,
    ring_of,
    row_of,
    wide,
)

TOKENS = 16  # of one program
L2_EPS = tl.constexpr(1e-6)
"""Added to the squared length of a key or query before it is normalised."""


@triton.jit
def head_place(head, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
               DV: tl.constexpr):
    """(column of x, channel, width) where one of 2 HK + HV heads in the order q | k | v begins. Q, K, V: offset and stride."""
    value = head - 2 * HK
    is_value = value >= 0
    key_column = tl.where(head < HK, Q[0] + head * Q[1], K[0] + (head - HK) * K[1])
    column = tl.where(is_value, V[0] + value // (HV // HK) * V[1] + value % (HV // HK) * DV, key_column)
    return column, tl.where(is_value, 2 * HK * DK + value * DV, head * DK), tl.where(is_value, DV, DK)


@triton.jit
def softplus(a):
    """log(1 + exp(a)), and a itself above 20."""
    grown = tl.exp(tl.minimum(a, 20.0))
    raised = 1.0 + grown  # log(1 + x) without the error of the rounded sum: Kahan, see Goldberg 1991, theorem 4
    exact = tl.where(raised == 1.0, grown, tl.log(raised) * (grown / tl.where(raised == 1.0, 1.0, raised - 1.0)))
    return tl.where(a > 20.0, a, exact)


@triton.jit
def gates_of(ba, token, exists, value, a_log, dt_bias, ba_stride, A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr,
             ACC: tl.constexpr):
    """g and beta of one value head at these tokens."""
    place = ba + token * ba_stride + value % GROUP
    a = tl.load(place + A[0] + value // GROUP * A[1], mask=exists, other=0.0).to(ACC) + tl.load(dt_bias + value).to(ACC)
    b = tl.load(place + B[0] + value // GROUP * B[1], mask=exists, other=0.0).to(ACC)
    return -tl.exp(tl.load(a_log + value).to(ACC)) * softplus(a), 1.0 / (1.0 + tl.exp(-b))


@triton.jit(do_not_specialize=["num_tokens"])
def convolve_kernel(
    x, ba, weight, a_log, dt_bias, conv_inputs, keys, values, ring_gates, cu_seqlens, positions, row_ids, slots, live,
    out_q, out_k, out_v, out_gates, num_tokens, x_stride, ba_stride, conv_stride, keys_stride, values_stride, gates_stride,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, B: tl.constexpr, A: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, KEEPS_INPUTS: tl.constexpr,
    KEEPS_RAW: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program (head of q | k | v, tokens). KEEPS_INPUTS: write the rings of keys, values and gates; KEEPS_RAW: of raw inputs."""
    head = tl.program_id(0)
    column, channel, width = head_place(head, Q, K, V, HK, HV, DK, DV)
    lane = tl.arange(0, LANES)
    within = (lane < width)[None, :]
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    await_earlier(PDL)
    row = tl.load(row_ids + token, mask=token < num_tokens, other=0)
    begin = tl.load(cu_seqlens + row)
    exists = token < tl.minimum(tl.load(cu_seqlens + row + 1), num_tokens)  # padding counts as row 0
    if live is not None:
        exists = exists & (tl.load(live + row) != 0)
    position = tl.load(positions + token, mask=exists, other=0)
    slot = tl.load(slots + row).to(tl.int64)
    source = x + column + lane[None, :] + token[:, None] * x_stride
    window = conv_inputs + channel + lane[None, :]
    acc = tl.zeros([TOKENS, LANES], ACC)
    for back in tl.static_range(TAPS - 1, -1, -1):
        own = token - back >= begin
        raw = tl.load(source - back * x_stride, mask=within & (exists & own)[:, None], other=0.0).to(ACC)
        if back > 0:
            older = within & (exists & (token - back < begin) & (position >= back))[:, None]
            kept = slot * conv_stride + (position - back + RING) % RING * (2 * HK * DK + HV * DV)
            raw += tl.load(window + kept[:, None], mask=older, other=0.0).to(ACC)
        tap = tl.load(weight + (channel + lane) * TAPS + (TAPS - 1 - back), mask=lane < width, other=0.0).to(ACC)
        acc += raw * tap[None, :]
    y = acc / (1.0 + tl.exp(-acc))
    if head < 2 * HK:
        inverse = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)
        y = y * tl.where(head < HK, inverse * DK**-0.5, inverse)[:, None]
    y = y.to(out_q.dtype.element_ty)
    exists_here = within & exists[:, None]
    place = position % RING
    if KEEPS_RAW:  # raw of the last tap is the token's own
        kept = slot * conv_stride + place * (2 * HK * DK + HV * DV)
        tl.store(window + kept[:, None], raw.to(conv_inputs.dtype.element_ty), mask=exists_here)
    if head < 2 * HK:
        if head < HK:
            tl.store(out_q + (token * HK + head)[:, None] * DK + lane[None, :], y, mask=exists_here)
        else:
            key = (head - HK) * DK + lane[None, :]
            tl.store(out_k + token[:, None] * (HK * DK) + key, y, mask=exists_here)
            if KEEPS_INPUTS:
                tl.store(keys + (slot * keys_stride + place * (HK * DK))[:, None] + key, y, mask=exists_here)
    else:
        value = head - 2 * HK
        tl.store(out_v + (token * HV + value)[:, None] * DV + lane[None, :], y, mask=exists_here)
        g, beta = gates_of(ba, token, exists, value, a_log, dt_bias, ba_stride, A, B, HV // HK, ACC)
        gate = out_gates + (token * HV + value) * 2
        tl.store(gate, g, mask=exists)
        tl.store(gate + 1, beta, mask=exists)
        if KEEPS_INPUTS:
            kept_value = values + (slot * values_stride + (place * HV + value) * DV)[:, None] + lane[None, :]
            tl.store(kept_value, y, mask=exists_here)
            kept_gate = ring_gates + slot * gates_stride + (place * HV + value) * 2
            tl.store(kept_gate, g, mask=exists)
            tl.store(kept_gate + 1, beta, mask=exists)


@triton.jit
def keep_raw_kernel(
    x, conv_inputs, cu_seqlens, positions, slots, live, x_stride, conv_stride,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    RING: tl.constexpr, PLACES: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    """Program (head of q | k | v, row): writes the raw inputs of the row's newest RING tokens."""
    column, channel, width = head_place(tl.program_id(0), Q, K, V, HK, HV, DK, DV)
    await_earlier(PDL)
    begin, count, first, slot = row_of(tl.program_id(1), cu_seqlens, positions, slots, live)
    index = count - 1 - tl.arange(0, PLACES)
    kept = (index >= tl.maximum(count - RING, 0))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    source = x + (begin + index).to(tl.int64)[:, None] * x_stride + column + lane
    place = slot * conv_stride + ((first + index) % RING)[:, None] * (2 * HK * DK + HV * DV) + channel
    raw = tl.load(source, mask=kept & (lane < width), other=0.0)
    tl.store(conv_inputs + place + lane, raw, mask=kept & (lane < width))


def convolve(
    x: Tensor, ba: Tensor, layer: DeltaWeights, columns: DeltaColumns, state: DeltaState, batch: DeltaBatch, *,
    keeps_inputs: bool, interpret: bool = False,
) -> DeltaInputs:
    """The inputs of the recurrence for the T tokens of a pass; writes the rings of `state`.

    x             fp32, bf16, fp16 or fp64 [T, N] with q, k and v in `columns`; rows may be slices of wider ones
    ba            [T, 2 HV] of the same dtype  rows may be slices of wider ones
    keeps_inputs  a round: keys, values and gates go into their rings too, for the next round to replay. Then a row has at most
                  P / 2 and P - W + 1 tokens

    Returns new tensors, undefined for padding and dead rows, whose rings are not written. Does not synchronise on a GPU. Raises
    ValueError for other shapes, dtypes or strides, and for rows that are too long for the rings.
    """
    (num_tokens, dtype), (_, value_heads, value_dim, key_dim) = (len(x), x.dtype), state.state.shape
    (_, ring, key_heads, _), (_, taps) = state.keys.shape, layer.conv.shape
    check("convolve: x", x, (num_tokens, x.shape[1]), *FLOATS, rows=True)
    check("convolve: ba", ba, (num_tokens, 2 * value_heads), dtype, rows=True)
    check_state("convolve", state, dtype)
    check_batch("convolve", batch, num_tokens)
    check("convolve: conv", layer.conv, (state.conv_inputs.shape[2], taps), dtype)
    check("convolve: a_log", layer.a_log, (value_heads,), dtype, wide(dtype))
    check("convolve: dt_bias", layer.dt_bias, (value_heads,), dtype, wide(dtype))
    together = batch.max_tokens <= ring - taps + 1
    if keeps_inputs and not (together and 2 * batch.max_tokens <= ring):
        raise ValueError(f"convolve: rings of {ring} positions for {batch.max_tokens} tokens of a row and {taps} taps; too few")
    if ring < taps - 1:
        raise ValueError(f"convolve: rings of {ring} positions; must have {taps - 1} for {taps} taps")
    if not (x.is_cuda or interpret):
        return convolve_reference(x, ba, layer, columns, state, batch, keeps_inputs=keeps_inputs)
    out = DeltaInputs(
        q=x.new_empty(num_tokens, key_heads, key_dim), k=x.new_empty(num_tokens, key_heads, key_dim),
        v=x.new_empty(num_tokens, value_heads, value_dim),
        gates=x.new_empty(num_tokens, value_heads, 2, dtype=wide(dtype)),
    )
    if not num_tokens:
        return out
    heads, num_rows = 2 * key_heads + value_heads, batch.slots.numel()
    q, k, v, b, a = ((part.offset, part.stride) for part in (columns.q, columns.k, columns.v, columns.b, columns.a))
    lanes = triton.next_power_of_2(max(key_dim, value_dim))
    convolve_kernel[(heads, triton.cdiv(num_tokens, TOKENS))](
        x, ba, layer.conv, layer.a_log, layer.dt_bias, state.conv_inputs, state.keys, state.values, state.gates,
        batch.cu_seqlens, batch.positions, batch.row_ids, batch.slots, batch.live, out.q, out.k, out.v, out.gates, num_tokens,
        x.stride(0), ba.stride(0), state.conv_inputs.stride(0), state.keys.stride(0), state.values.stride(0),
        state.gates.stride(0), Q=q, K=k, V=v, B=b, A=a, HK=key_heads, HV=value_heads, DK=key_dim, DV=value_dim, TAPS=taps,
        RING=ring, KEEPS_INPUTS=keeps_inputs, KEEPS_RAW=together, TOKENS=TOKENS, LANES=lanes,
        ACC=tl.float64 if dtype == torch.float64 else tl.float32, num_warps=4, **launch_args(x),
    )
    if not together:
        keep_raw_kernel[(heads, num_rows)](
            x, state.conv_inputs, batch.cu_seqlens, batch.positions, batch.slots, batch.live, x.stride(0),
            state.conv_inputs.stride(0), Q=q, K=k, V=v, HK=key_heads, HV=value_heads, DK=key_dim, DV=value_dim, RING=ring,
            PLACES=triton.next_power_of_2(ring), LANES=lanes, num_warps=4, **launch_args(x),
        )
    return out


def convolve_reference(
    x: Tensor, ba: Tensor, layer: DeltaWeights, columns: DeltaColumns, state: DeltaState, batch: DeltaBatch, *,
    keeps_inputs: bool,
) -> DeltaInputs:
    """The same in plain torch, row by row; zeros for padding and dead rows."""
    (_, value_heads, value_dim, key_dim), (_, ring, key_heads, _) = state.state.shape, state.keys.shape
    group, taps, acc = value_heads // key_heads, layer.conv.shape[1], wide(x.dtype)
    parts = ((columns.q, key_dim), (columns.k, key_dim), (columns.v, group * value_dim))
    raw = x[:, torch.cat([columns.part(part, width, x.device) for part, width in parts])]
    y = torch.zeros_like(raw, dtype=acc)
    for slot, own, first in batch.rows():
        before = torch.arange(first - taps + 1, first, device=x.device)
        window = state.conv_inputs[slot, ring_of(before, state.conv_inputs)].where(before[:, None] >= 0, 0.0)
        inputs = torch.cat((window, raw[own])).to(acc)
        count = own.stop - own.start
        summed = sum(inputs[tap : tap + count] * layer.conv[:, tap].to(acc) for tap in range(taps))
        y[own] = F.silu(torch.as_tensor(summed))
    a, b = (ba[:, columns.part(part, group, x.device)].to(acc) for part in (columns.a, columns.b))
    g = -layer.a_log.to(acc).exp() * F.softplus(a + layer.dt_bias.to(acc))
    q, k, v = y.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], 1)
    q, k = (part.unflatten(1, (key_heads, key_dim)) for part in (q, k))
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + L2_EPS.value) for part in (q, k))
    out = DeltaInputs(
        q=(q * key_dim**-0.5).to(x.dtype), k=k.to(x.dtype), v=v.unflatten(1, (value_heads, value_dim)).to(x.dtype).contiguous(),
        gates=torch.stack((g, b.sigmoid()), 2),
    )
    rings = [(state.conv_inputs, raw)]
    rings += [(state.keys, out.k), (state.values, out.v), (state.gates, out.gates)] if keeps_inputs else []
    for slot, own, _ in batch.rows():
        newest = slice(max(own.start, own.stop - ring), own.stop)
        for kept, made in rings:
            kept[slot, ring_of(batch.positions[newest], kept)] = made[newest]
    return out
