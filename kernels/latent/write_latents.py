"""Between products and scores of latent attention, in one launch: the norm of latents, RoPE, and the write to their pages.

    c = round(x / sqrt(mean(x^2) + eps)) * weight       the first R numbers of a token's row, x
    r = the last P numbers, rotated by the token's position (see `norm_rope/rope_write.py`)
    page[slot] = c | r                                  and the last P numbers of each head of q are rotated in place

Pages of `e4m3_latents.py` get c in e4m3 with its scale, computed of c as it is rounded to the dtype.

If c or r is not finite, r is written as NaN, and the values of c that are not finite as 0: queries that attend to this token get
NaN, and no others. The score of a masked key is dropped, but its latent is still multiplied by 0.
Bound by memory at prefill sizes (bytes a token: 2 (R + P + NH P) itemsize), by launch latency at decode sizes. Of a token
program 0 has the latent, each other one some heads of its query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.e4m3 import e4m3_bits, magnitude
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.latent.e4m3_latents import Fp8Latents, check_pages, scale_of, strides

HEADS = 16


@triton.jit
def turned(low, high, cos, sin, dtype: tl.constexpr, ACC: tl.constexpr):
    """The two numbers of each pair, rotated, rounded where torch rounds."""
    new_low = (low * cos).to(dtype).to(ACC) - high * sin
    new_high = (high * cos).to(dtype).to(ACC) + low * sin
    return new_low.to(dtype).to(ACC), new_high.to(dtype).to(ACC)


@triton.jit
def write_latents_kernel(
    rows, q, positions, freqs, weight, pages, rotated, scales, slot_mapping, row_stride, page_stride, rope_stride, scale_stride,
    EPS: tl.constexpr, FACTOR: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LATENT: tl.constexpr,
    LATENT_DIM: tl.constexpr, HALF: tl.constexpr, HALF_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    ACC: tl.constexpr, PAGE_SIZE: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    dtype: tl.constexpr = rows.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_DIM)
    exists = pair < HALF
    freq = tl.load(freqs + pair, mask=exists, other=0.0)
    if INTERLEAVED:
        at_low, at_high = 2 * pair, 2 * pair + 1
    else:
        at_low, at_high = pair, HALF + pair
    await_earlier(PDL)
    angle = tl.load(positions + t).to(tl.float32) * freq
    cos = (tl.cos(angle) * FACTOR).to(dtype).to(ACC)
    sin = (tl.sin(angle) * FACTOR).to(dtype).to(ACC)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, LATENT_DIM)
        within = lane < LATENT
        row = rows + t * row_stride
        x = tl.load(row + lane, mask=within, other=0.0).to(ACC)
        low = tl.load(row + LATENT + at_low, mask=exists, other=0.0).to(ACC)
        high = tl.load(row + LATENT + at_high, mask=exists, other=0.0).to(ACC)
        normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) * (1.0 / LATENT) + EPS))
        if weight.dtype.element_ty == dtype:
            normed = normed.to(dtype).to(ACC)
        c = (normed * tl.load(weight + lane, mask=within, other=0.0).to(ACC)).to(dtype)
        low, high = turned(low, high, cos, sin, dtype, ACC)
        largest = tl.maximum(tl.max(magnitude(low), 0), tl.max(magnitude(high), 0))
        largest = tl.maximum(largest, tl.max(magnitude(c.to(ACC)), 0))
        is_whole = largest < float("inf")
        slot = tl.load(slot_mapping + t)
        c = tl.where(tl.abs(c.to(ACC)) < float("inf"), c, 0.0)
        if scales is None:
            cell = pages + slot * (LATENT + 2 * HALF)
            of_rope = cell + LATENT
            tl.store(cell + lane, c, mask=within)
        else:
            page, place = slot // PAGE_SIZE, slot % PAGE_SIZE
            of_rope = rotated + page * rope_stride + place * (2 * HALF)
            scale = scale_of(tl.max(tl.abs(c.to(ACC)), 0))
            bits = e4m3_bits(c.to(ACC), 1.0 / scale, INTERPRETED)
            tl.store(pages + page * page_stride + place * LATENT + lane, bits, mask=within)
            tl.store(scales + page * scale_stride + place, scale)
        tl.store(of_rope + at_low, tl.where(is_whole, low, float("nan")), mask=exists)
        tl.store(of_rope + at_high, tl.where(is_whole, high, float("nan")), mask=exists)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        own = q + (t * NUM_HEADS + head) * HEAD_DIM + (HEAD_DIM - 2 * HALF)
        mask = (head < NUM_HEADS)[:, None] & exists[None, :]
        q_low = tl.load(own[:, None] + at_low[None, :], mask=mask, other=0.0).to(ACC)
        q_high = tl.load(own[:, None] + at_high[None, :], mask=mask, other=0.0).to(ACC)
        q_low, q_high = turned(q_low, q_high, cos[None, :], sin[None, :], dtype, ACC)
        tl.debug_barrier()  # other threads of the program have read the numbers that are replaced
        tl.store(own[:, None] + at_low[None, :], q_low, mask=mask)
        tl.store(own[:, None] + at_high[None, :], q_high, mask=mask)


def write_latents(
    rows: Tensor, q: Tensor, positions: Tensor, freqs: Tensor, weight: Tensor, pages: Tensor | Fp8Latents, slot_mapping: Tensor,
    *, eps: float, attention_factor: float, interleaved: bool, interpret: bool = False,
) -> None:
    """Write the latents of T tokens to the pages of one layer, and rotate their queries in place.

    rows              fp32, bf16, fp16 or fp64 [T, R + P]  latents before their norm, and keys; rows may be slices of wider ones
    q                 the same dtype [T, NH, D], contiguous: the last P numbers of each head are rotated
    positions         int64 [T]
    freqs             fp32 [P/2]  radians a token
    weight            [R] of the same dtype, or fp32 (rounded once, after the product): of the norm, with `eps`
    pages             the same dtype [pages, page_size, R + P], contiguous; or in e4m3
    slot_mapping      int64 [T]  page * page_size + offset; not checked, which would read the device
    attention_factor  scale of cos and sin (yarn), else 1
    interleaved       number 2j is rotated with 2j + 1; else j with j + P/2

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, size), (_, num_heads, head_dim), half = rows.shape, q.shape, freqs.numel()
    check("write_latents: rows", rows, (num_tokens, size), *FLOATS, rows=True)
    check("write_latents: q", q, (num_tokens, num_heads, head_dim), rows.dtype)
    check("write_latents: positions", positions, (num_tokens,), torch.int64)
    check("write_latents: freqs", freqs, (min(max(1, half), min(head_dim, size - 1) // 2),), torch.float32)
    check("write_latents: weight", weight, (size - 2 * half,), rows.dtype, torch.promote_types(rows.dtype, torch.float32))
    parts = check_pages("write_latents", pages, size - 2 * half, 2 * half, rows.dtype)
    check("write_latents: slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    if not (rows.is_cuda or interpret):
        write_latents_reference(
            rows, q, positions, freqs, weight, pages, slot_mapping, eps=eps, attention_factor=attention_factor,
            interleaved=interleaved,
        )
    elif num_tokens:
        write_latents_kernel[(num_tokens, 1 + triton.cdiv(num_heads, HEADS))](
            rows, q, positions, freqs, weight, *parts, slot_mapping, rows.stride(0), *strides(parts), EPS=eps,
            FACTOR=attention_factor, NUM_HEADS=num_heads, HEAD_DIM=head_dim, LATENT=size - 2 * half,
            LATENT_DIM=triton.next_power_of_2(size - 2 * half), HALF=half, HALF_DIM=triton.next_power_of_2(half),
            INTERLEAVED=interleaved, HEADS=HEADS, ACC=tl.float64 if rows.dtype == torch.float64 else tl.float32,
            PAGE_SIZE=parts[0].shape[1], INTERPRETED=not rows.is_cuda, num_warps=2, **launch_args(rows),
        )


def write_latents_reference(
    rows: Tensor, q: Tensor, positions: Tensor, freqs: Tensor, weight: Tensor, pages: Tensor | Fp8Latents, slot_mapping: Tensor,
    *, eps: float, attention_factor: float, interleaved: bool,
) -> None:
    """The same in plain torch."""
    dtype, half = rows.dtype, freqs.numel()
    wide = torch.promote_types(dtype, torch.float32)
    x, keys = rows[:, : -2 * half].to(wide), rows[:, -2 * half :]
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)
    c = ((normed.to(dtype) if weight.dtype == dtype else normed) * weight).to(dtype)
    angles = positions.float()[:, None] * freqs
    cos, sin = ((turn(angles) * attention_factor).to(dtype)[:, None] for turn in (torch.cos, torch.sin))

    def rotated(heads: Tensor) -> Tensor:
        pairs = heads.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else heads.chunk(2, -1)
        low, high = (pair.to(wide) for pair in pairs)
        found = (low * cos).to(dtype) - high * sin, (high * cos).to(dtype) + low * sin
        return (torch.stack(found, -1).flatten(-2) if interleaved else torch.cat(found, -1)).to(dtype)

    r = rotated(keys[:, None])[:, 0]
    finite = torch.cat((c, r), 1).isfinite().all(1, keepdim=True)
    c, r = c.where(c.isfinite(), 0.0), r.where(finite, torch.nan)
    if isinstance(pages, Fp8Latents):
        pages.write(c, r, slot_mapping)
    else:
        pages.flatten(0, 1)[slot_mapping] = torch.cat((c, r), 1)
    q[..., -2 * half :] = rotated(q[..., -2 * half :])
