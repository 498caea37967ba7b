"""From the fused QKV product to the inputs of attention, in one launch: q/k norms, RoPE, K and V written to their pages.

    q, k = round(x / sqrt(mean(x^2) + eps)) * weight            (models with q/k norms, over each head)
    v    = round(x / sqrt(mean(x^2) + eps))                     (models whose V is normed, without a weight)
    y[j]       = round(x[j] * cos_j)       - x[j + R/2] * sin_j
    y[j + R/2] = round(x[j + R/2] * cos_j) + x[j] * sin_j       cos_j = round(cos(position * freqs[j]) * attention_factor)

R, twice the number of frequencies, may be below D: the last D - R numbers of each head stay as they are (partial rotary). Or, if
interleaved, 2j is rotated with 2j + 1 (GPT-J, GLM). A token may have positions along several axes, of which each frequency reads
one (mRoPE): where they are equal, its bits are those of that one position.

If K or V of a key is not finite, its K is written as NaN, and the values of its V that are not finite as 0. Queries that attend
to this key get NaN, and no others: for a masked key attention drops the score, but still multiplies V by 0.

V may be computed from the rows of K (`shared_v`), before these are normed and rotated: the product then has no rows of V. Layers
that read the K and V of another one compute only queries (`rotate_queries`).

With scales, K and V are rounded to the tensors' dtype, then stored as e4m3 (`common/e4m3.py`) with one scale per head. Finite
values saturate.

Angles are computed in fp32 from the positions, so that no cos and sin tables of the batch are made or read; rounded to the
tensors' dtype where the torch path rounds (Su et al. 2021, arXiv 2104.09864). Bound by memory at prefill sizes (read and written
once: 2 * T * (NH + 2 * KVH) * D * itemsize), by launch latency at decode sizes. With few tokens each block of heads is a program;
with many, one program takes all heads of a token, so that its angles are computed once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.e4m3 import E4M3, e4m3_bits, magnitude, movable
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.kv_cache.kv_write import kv_write_reference

HEADS = 8
MANY_TOKENS = 1024
"""From this many tokens on, one program per token fills the GPU."""


@triton.jit(do_not_specialize=["axis_stride"])
def rope_write_kernel(
    qkv, positions, freqs, axes, q_norm, k_norm, out_q, kv, scales, slot_mapping, qkv_stride, kv_stride_part, axis_stride,
    EPS: tl.constexpr, FACTOR: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, V_NORM: tl.constexpr, SHARED_V: tl.constexpr,
    HEADS: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    dtype: tl.constexpr = out_q.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    half = lane < HALF
    turns = lane < ROTARY_HALF
    # The two numbers of a head that each lane holds: a pair that is rotated together, or two that are not rotated.
    if INTERLEAVED:
        at_low, at_high = 2 * lane, 2 * lane + 1
    elif ROTARY_HALF == HALF:
        at_low, at_high = lane, HALF + lane
    else:
        at_low, at_high = tl.where(turns, lane, ROTARY_HALF + lane), tl.where(turns, ROTARY_HALF + lane, HALF + lane)
    if q_norm is not None:
        q_low, q_high = tl.load(q_norm + at_low, mask=half)[None, :], tl.load(q_norm + at_high, mask=half)[None, :]
        k_low, k_high = tl.load(k_norm + at_low, mask=half)[None, :], tl.load(k_norm + at_high, mask=half)[None, :]
    freq = tl.load(freqs + lane, mask=turns, other=0.0)
    if axes is not None:
        to_axis = tl.load(axes + lane, mask=turns, other=0) * axis_stride
    await_earlier(PDL)
    if kv is not None:
        cell = kv + tl.load(slot_mapping + t) * (NUM_KV_HEADS * 2 * HALF)
    for block in tl.static_range(BLOCKS_PER_PROGRAM):
        first = (tl.program_id(1) * BLOCKS_PER_PROGRAM + block) * HEADS
        head = first + tl.arange(0, HEADS)[:, None]
        k_head, v_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS
        low_at, high_at = head * (2 * HALF) + at_low[None, :], head * (2 * HALF) + at_high[None, :]
        exists = (v_head < NUM_KV_HEADS) & half[None, :]
        source = qkv + t * qkv_stride
        if SHARED_V:
            source += tl.where(v_head < 0, 0, -NUM_KV_HEADS * 2 * HALF)
        low = tl.load(source + low_at, mask=exists, other=0.0).to(ACC)
        high = tl.load(source + high_at, mask=exists, other=0.0).to(ACC)
        is_k = (k_head >= 0) & (v_head < 0)
        v_low, v_high = tl.zeros_like(low), tl.zeros_like(high)
        if kv is not None and not SHARED_V:
            has_k = (first + HEADS > NUM_HEADS) & (first < NUM_HEADS + NUM_KV_HEADS)
            if has_k:  # V of the same keys, to check that it is finite
                value = qkv + t * qkv_stride + NUM_KV_HEADS * 2 * HALF
                v_low = tl.load(value + low_at, mask=is_k & half[None, :], other=0.0).to(ACC)
                v_high = tl.load(value + high_at, mask=is_k & half[None, :], other=0.0).to(ACC)
        if block == 0:  # after the loads are issued, which do not depend on this
            if axes is None:
                angle = tl.load(positions + t).to(tl.float32) * freq
            else:
                angle = tl.load(positions + to_axis + t).to(tl.float32) * freq
            cos = (tl.cos(angle) * FACTOR).to(dtype).to(ACC)[None, :]
            sin = (tl.sin(angle) * FACTOR).to(dtype).to(ACC)[None, :]
        if q_norm is not None or V_NORM:
            scale = (1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) * (0.5 / HALF) + EPS))[:, None]
        if kv is not None:
            to_v = cell + kv_stride_part + v_head * (2 * HALF)
            stored_low, stored_high = low, high
            if V_NORM:
                stored_low, stored_high = (low * scale).to(dtype).to(ACC), (high * scale).to(dtype).to(ACC)
            stored_low = tl.where(tl.abs(stored_low) < float("inf"), stored_low, 0.0)
            stored_high = tl.where(tl.abs(stored_high) < float("inf"), stored_high, 0.0)
            if scales is None:
                tl.store(to_v + at_low[None, :], stored_low, mask=(v_head >= 0) & exists)
                tl.store(to_v + at_high[None, :], stored_high, mask=(v_head >= 0) & exists)
            else:  # the scales of V follow those of K, as the heads do
                inverse = tl.div_rn(1.0, tl.load(scales + k_head, mask=(k_head >= 0) & (v_head < NUM_KV_HEADS), other=1.0))
                low_bits = e4m3_bits(stored_low, inverse, INTERPRETED)
                high_bits = e4m3_bits(stored_high, inverse, INTERPRETED)
                tl.store(to_v + at_low[None, :], low_bits, mask=(v_head >= 0) & exists)
                tl.store(to_v + at_high[None, :], high_bits, mask=(v_head >= 0) & exists)
        if SHARED_V:
            v_low, v_high = tl.where(is_k, low, 0.0), tl.where(is_k, high, 0.0)
        if q_norm is not None:
            low, high = low * scale, high * scale
            if q_norm.dtype.element_ty == dtype:
                low, high = low.to(dtype).to(ACC), high.to(dtype).to(ACC)
            low = (low * tl.where(k_head < 0, q_low, k_low).to(ACC)).to(dtype).to(ACC)
            high = (high * tl.where(k_head < 0, q_high, k_high).to(ACC)).to(dtype).to(ACC)
        new_low = (low * cos).to(dtype).to(ACC) - high * sin
        new_high = (high * cos).to(dtype).to(ACC) + low * sin
        if ROTARY_HALF < HALF:
            new_low, new_high = tl.where(turns[None, :], new_low, low), tl.where(turns[None, :], new_high, high)
        to_q = out_q + t * (NUM_HEADS * 2 * HALF)
        tl.store(to_q + low_at, new_low, mask=(k_head < 0) & half[None, :])
        tl.store(to_q + high_at, new_high, mask=(k_head < 0) & half[None, :])
        if kv is not None:
            has_k = (first + HEADS > NUM_HEADS) & (first < NUM_HEADS + NUM_KV_HEADS)
            if has_k:
                to_k = cell + k_head * (2 * HALF)
                largest = tl.maximum(magnitude(new_low.to(dtype).to(ACC)), magnitude(new_high.to(dtype).to(ACC)))
                largest = tl.max(tl.maximum(largest, tl.maximum(magnitude(v_low), magnitude(v_high))), 1)[:, None]
                is_whole = largest < float("inf")
                if scales is None:
                    tl.store(to_k + at_low[None, :], tl.where(is_whole, new_low, float("nan")), mask=is_k & half[None, :])
                    tl.store(to_k + at_high[None, :], tl.where(is_whole, new_high, float("nan")), mask=is_k & half[None, :])
                else:
                    low_bits = e4m3_bits(new_low.to(dtype).to(ACC), inverse, INTERPRETED)
                    high_bits = e4m3_bits(new_high.to(dtype).to(ACC), inverse, INTERPRETED)
                    tl.store(to_k + at_low[None, :], tl.where(is_whole, low_bits, 0x7F), mask=is_k & half[None, :])
                    tl.store(to_k + at_high[None, :], tl.where(is_whole, high_bits, 0x7F), mask=is_k & half[None, :])


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    freqs: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    attention_factor: float,
    out_q: Tensor,
    axes: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    v_norm: bool = False,
    shared_v: bool = False,
    scales: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Write the rotated queries of T tokens, and write their rotated keys and their values to the pages of one layer.

    qkv               fp32, bf16, fp16 or fp64 [T, (NH + 2 * KVH) * D], with shared_v [T, (NH + KVH) * D]  rows may be slices of
                      wider ones
    positions         int64 [T], with axes [A, T]
    freqs             fp32 [R/2]  radians a token; the last D - R numbers of each head are not rotated
    kv                [2, P, page_size, KVH, D] of qkv's dtype, with scales e4m3  keys, values; contiguous but for the first
                      dimension
    slot_mapping      int64 [T]  page * page_size + offset, below P * page_size; not checked, which would read the device
    attention_factor  scale of cos and sin (yarn), else 1
    out_q             [T, NH, D] of qkv's dtype, contiguous; NH may be 0, for K and V alone
    axes              int64 [R/2]  the axis whose position each frequency reads, below A; not checked, as slot_mapping
    interleaved       number 2j of a head is rotated with 2j + 1; else j with j + R/2
    q_norm, k_norm    [D] of qkv's dtype, or fp32 (rounded once, after the product): weights of the norms of each head, with
                      `eps`; both of one dtype, or none
    v_norm            V is normed too, with `eps` and without a weight
    shared_v          V is what K is before its norm and rotation
    scales            fp32 [2, KVH]  of K and of V, positive, with an e4m3 cache

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, num_heads, head_dim = out_q.shape
    num_kv_heads = kv.shape[3]
    check(
        "rope_write: qkv", qkv, (num_tokens, (num_heads + (1 if shared_v else 2) * num_kv_heads) * head_dim), *FLOATS, rows=True
    )
    _check_queries("rope_write", positions, freqs, axes, out_q, qkv.dtype, q_norm)
    check("rope_write: kv[0]", kv[0], (*kv.shape[1:3], num_kv_heads, head_dim), qkv.dtype if scales is None else E4M3)
    if scales is not None:
        check("rope_write: scales", scales, (2, num_kv_heads), torch.float32)
    check("rope_write: slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope_write: one of q_norm and k_norm is None; give both or none")
    if q_norm is not None and k_norm is not None:
        check("rope_write: k_norm", k_norm, (head_dim,), q_norm.dtype)
    if not (qkv.is_cuda or interpret):
        rope_write_reference(
            qkv, positions, freqs, kv, slot_mapping, attention_factor=attention_factor, out_q=out_q, axes=axes,
            interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps, v_norm=v_norm, shared_v=shared_v, scales=scales,
        )
    elif num_tokens:
        _launch(
            qkv, positions, freqs, axes, q_norm, k_norm, out_q, movable(kv), scales, slot_mapping, num_kv_heads, EPS=eps,
            FACTOR=attention_factor, INTERLEAVED=interleaved, V_NORM=v_norm, SHARED_V=shared_v,
        )


def rotate_queries(
    q: Tensor, positions: Tensor, freqs: Tensor, *, attention_factor: float, out_q: Tensor, axes: Tensor | None = None,
    interleaved: bool = False, q_norm: Tensor | None = None, eps: float = 0.0, interpret: bool = False,
) -> None:
    """Write the rotated queries of T tokens, as `rope_write` does.

    q  fp32, bf16, fp16 or fp64 [T, NH * D]  rows may be slices of wider ones

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, num_heads, head_dim = out_q.shape
    check("rotate_queries: q", q, (num_tokens, num_heads * head_dim), *FLOATS, rows=True)
    _check_queries("rotate_queries", positions, freqs, axes, out_q, q.dtype, q_norm)
    if not (q.is_cuda or interpret):
        heads = q.unflatten(1, (-1, head_dim))
        heads = heads if q_norm is None else _normed(heads, q_norm, eps)
        out_q.copy_(_rotated(heads, *_angles(positions, freqs, axes, attention_factor, q.dtype), interleaved))
    elif num_tokens:
        _launch(
            q, positions, freqs, axes, q_norm, q_norm, out_q, None, None, None, 0, EPS=eps, FACTOR=attention_factor,
            INTERLEAVED=interleaved, V_NORM=False, SHARED_V=False,
        )


def _check_queries(
    name: str, positions: Tensor, freqs: Tensor, axes: Tensor | None, out_q: Tensor, dtype: torch.dtype, q_norm: Tensor | None
) -> None:
    num_tokens, _, head_dim = out_q.shape
    if axes is not None:
        check(f"{name}: axes", axes, (freqs.numel(),), torch.int64)
    check(f"{name}: positions", positions, (*positions.shape[: 0 if axes is None else 1], num_tokens), torch.int64)
    check(f"{name}: freqs", freqs, (min(max(1, freqs.numel()), head_dim // 2),), torch.float32)
    check(f"{name}: out_q", out_q, tuple(out_q.shape), dtype)
    if q_norm is not None:
        check(f"{name}: q_norm", q_norm, (head_dim,), dtype, torch.promote_types(dtype, torch.float32))


def _launch(
    qkv: Tensor, positions: Tensor, freqs: Tensor, axes: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    out_q: Tensor, kv: Tensor | None, scales: Tensor | None, slot_mapping: Tensor | None, num_kv_heads: int, **constants: object,
) -> None:
    num_tokens, num_heads, head_dim = out_q.shape
    blocks = triton.cdiv(num_heads + 2 * num_kv_heads, HEADS)
    per_program = blocks if num_tokens >= MANY_TOKENS else 1
    lanes = triton.next_power_of_2(head_dim // 2)
    rope_write_kernel[(num_tokens, blocks // per_program)](
        qkv, positions, freqs, axes, q_norm, k_norm, out_q, kv, scales, slot_mapping, qkv.stride(0),
        0 if kv is None else kv.stride(0), positions.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, ROTARY_HALF=freqs.numel(), HEADS=HEADS,
        BLOCKS_PER_PROGRAM=per_program, LANES=lanes, ACC=tl.float64 if qkv.dtype == torch.float64 else tl.float32,
        INTERPRETED=not qkv.is_cuda, num_warps=1 if lanes < 64 else 2 if lanes < 256 else 4, **constants, **launch_args(qkv),
    )


def rope_write_reference(
    qkv: Tensor,
    positions: Tensor,
    freqs: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    attention_factor: float,
    out_q: Tensor,
    axes: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    v_norm: bool = False,
    shared_v: bool = False,
    scales: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    num_heads, head_dim = out_q.shape[1:]
    q, k, *own = qkv.unflatten(1, (-1, head_dim)).split((num_heads, *[kv.shape[3]] * (1 if shared_v else 2)), 1)
    v = k if shared_v else own[0]
    v = _normed(v, None, eps) if v_norm else v
    if q_norm is not None and k_norm is not None:
        q, k = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
    cos, sin = _angles(positions, freqs, axes, attention_factor, qkv.dtype)
    out_q.copy_(_rotated(q, cos, sin, interleaved))
    kv_write_reference(_rotated(k, cos, sin, interleaved), v, kv, slot_mapping, scales)


def _angles(
    positions: Tensor, freqs: Tensor, axes: Tensor | None, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles = (positions[:, None] if axes is None else positions[axes].T).to(torch.float32)[:, None] * freqs
    cos, sin = ((f(angles) * attention_factor).to(dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = heads if heads.dtype == torch.float64 else heads.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is None:
        return normed.to(heads.dtype)
    return normed.to(heads.dtype) * weight if weight.dtype == heads.dtype else (normed * weight).to(heads.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turning, passing = heads.tensor_split([2 * cos.shape[-1]], -1)
    low, high = turning.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)
    pairs = torch.addcmul(low * cos, high, -sin), torch.addcmul(high * cos, low, sin)
    return torch.cat((torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1), passing), -1)
