"""One block of keys of latent attention: its loads, and the step of the online softmax that adds it (see
`attention/softmax_step.py`).

On Hopper the products are arranged for its tensor cores, which multiply 64 rows at once and read one operand, or both, from
shared memory. KEYS, the axis of keys in the scores, says how:

    1  scores [lines, keys] = q c', sums [lines, columns] += p c       with 64 lines; elsewhere with any number
    0  scores [keys, lines] = c q', sums [columns, lines] += c' p'     with 16 or 32, which then need no padding to 64

Latents in e4m3 are converted to the dtype of queries, exactly in bf16, and have keys second: Triton takes the first operand of a
product from registers if it is not just what was loaded, and then does not load it ahead.

Columns of c are loaded in slices (`settings.py`), each an element of the tuples c, q_latent and acc. What a step takes from the
first product to the last is serial if one program fills a multiprocessor: so the loads of the next block must come first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.common.e4m3 import e4m3_values


@triton.jit
def weights_of(
    q_latent, q_rope, c, r, peak, mass, key, end, position, scale, WINDOW: tl.constexpr, SINK: tl.constexpr, KEYS: tl.constexpr
):
    """The weights of a block of keys, and (peak, mass, factor of earlier sums) with them."""
    if KEYS == 0:
        s = tl.dot(r, q_rope, input_precision="ieee")
        for i in tl.static_range(len(c)):
            s = tl.dot(c[i], q_latent[i], s, input_precision="ieee")
        s *= scale
    else:  # each part is scaled, so that Triton computes none on top of another: see `add_block`
        s = tl.dot(q_rope, r, input_precision="ieee") * scale
        for i in tl.static_range(len(c)):
            s += tl.dot(q_latent[i], tl.trans(c[i]), input_precision="ieee") * scale
    key, last = tl.expand_dims(key, 1 - KEYS), tl.expand_dims(position, KEYS)
    seen = key <= tl.minimum(last, end - 1)
    if WINDOW > 0:
        seen = seen & ((key > last - WINDOW) | (key < SINK))
    s = tl.where(seen, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, KEYS))
    shrink = tl.exp2(peak - new_peak)
    weights = tl.exp2(s - tl.expand_dims(new_peak, KEYS))
    return new_peak, mass * tl.expand_dims(shrink, KEYS) + weights, shrink, weights


@triton.jit
def add_block(
    q_latent, q_rope, c, r, peak, mass, acc, key, end, position, scale, WINDOW: tl.constexpr, SINK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(peak, mass, acc) with a block of keys added."""
    if mass.shape[0] < 64 or KEYS == 0:
        peak, mass, shrink, p = weights_of(q_latent, q_rope, c, r, peak, mass, key, end, position, scale, WINDOW, SINK, KEYS)
    else:
        # Where Triton sees that a product feeds another one, it gives each warp whole lines: with 64 lines two warp groups would
        # then compute the same scores. As the result of a branch, which is always taken, weights hide where they come from.
        p = tl.zeros_like(mass)
        shrink = tl.zeros_like(peak)
        if end > 0:
            peak, mass, shrink, p = weights_of(q_latent, q_rope, c, r, peak, mass, key, end, position, scale, WINDOW, SINK, KEYS)
    p = p.to(c[0].dtype)
    shrink = tl.expand_dims(shrink, KEYS)
    sums = ()
    for i in tl.static_range(len(c)):
        if KEYS == 0:
            sums += (tl.dot(tl.trans(c[i]), p, acc[i] * shrink, input_precision="ieee"),)  # type: ignore[assignment]
        else:
            sums += (tl.dot(p, c[i], acc[i] * shrink, input_precision="ieee"),)  # type: ignore[assignment]
    return peak, mass, sums


@triton.jit
def attend_latents(
    q_latent, q_rope, peak, mass, acc, page, key, end, listed, latents, rotated, scales, position, scale, page_stride,
    rope_stride, scale_stride, WINDOW: tl.constexpr, SINK: tl.constexpr, PAGE_SIZE: tl.constexpr, LATENT: tl.constexpr,
    SLICE: tl.constexpr, ROPE: tl.constexpr, ROPE_DIM: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One step of the online softmax: (peak, mass, acc) with the keys `key` below `end` added.

    listed  any number above 0
    """
    e, exists = tl.arange(0, ROPE_DIM), key < end
    if scales is None:
        # Page and place are multiplied apart. Of a multiple of their sum, Triton 3.6 assumes that each key is the first of a page
        # where `key` begins with one, as at the sinks: then 16 bytes are loaded at once, even of rows of 60 or 120.
        at = latents + page.to(tl.int64) * (PAGE_SIZE * (LATENT + ROPE)) + (key % PAGE_SIZE) * (LATENT + ROPE)
        of_rope = at + LATENT
    else:
        at = latents + page.to(tl.int64) * page_stride + (key % PAGE_SIZE) * LATENT
        of_rope = rotated + page.to(tl.int64) * rope_stride + (key % PAGE_SIZE) * ROPE
        of_key = tl.load(scales + page.to(tl.int64) * scale_stride + key % PAGE_SIZE, mask=exists, other=0.0)
    c = ()
    for i in tl.static_range(len(q_latent)):
        d = i * SLICE + tl.arange(0, SLICE)
        inside = exists[:, None] if LATENT % SLICE == 0 else exists[:, None] & (d < LATENT)[None, :]
        own = tl.load(at[:, None] + d[None, :], mask=inside, other=0)
        if scales is not None:  # here, and not of scores and weights: their layout would load the scales 16 times in each thread
            stored = own.to(tl.float8e4nv, bitcast=True)
            own = (e4m3_values(stored, tl.float32, INTERPRETED) * of_key[:, None]).to(q_latent[0].dtype)
        c += (own.to(tl.float32) if WIDE else own,)  # type: ignore[assignment]
    if KEYS == 0:
        inside = exists[:, None] if ROPE == ROPE_DIM else exists[:, None] & (e < ROPE)[None, :]
        r = tl.load(of_rope[:, None] + e[None, :], mask=inside, other=0.0)
    else:  # transposed by its addresses: Triton would keep one more buffer of a block that is only used transposed
        inside = exists[None, :] if ROPE == ROPE_DIM else exists[None, :] & (e < ROPE)[:, None]
        r = tl.load(of_rope[None, :] + e[:, None], mask=inside, other=0.0)
    if WIDE:
        r = r.to(tl.float32)
    if mass.shape[0] < 64:
        peak, mass, acc = add_block(q_latent, q_rope, c, r, peak, mass, acc, key, end, position, scale, WINDOW, SINK, KEYS)
    elif listed > 0:
        # Triton issues the loads of a later block after the products of a step, but before a branch: so the buffer that the last
        # step has freed is filled while this one computes. The branch within, of another condition, would otherwise be removed.
        peak, mass, acc = add_block(q_latent, q_rope, c, r, peak, mass, acc, key, end, position, scale, WINDOW, SINK, KEYS)
    return peak, mass, acc


@triton.jit
def load_lines(at, inside, d, LIMIT: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr):
    """Columns d of the queries at these addresses, transposed if keys are the first axis."""
    q = tl.load(at[:, None] + d[None, :], mask=inside[:, None] & (d < LIMIT)[None, :], other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    return tl.trans(q) if KEYS == 0 else q
