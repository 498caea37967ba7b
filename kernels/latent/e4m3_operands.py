"""Operands of latent attention over latents in e4m3: stored numbers and queries in fp16.

fp16 holds every e4m3 number, and one instruction converts two (bf16 takes three more).
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchspec.kernels.common.e4m3 import e4m3_values


@triton.jit
def converted(bits, dtype: tl.constexpr, address, listed, FIRST: tl.constexpr, INTERPRETED: tl.constexpr):
    """uint8 bits of e4m3 as an operand of products, the first one or the second.

    listed: any number above 0; address: any pointer, from which nothing is read

    Triton 3.6 reads the first operand of a product from shared memory if a load returns it. Else it writes the operand to
    registers, here twice, since the second product has it transposed, and there is no room for it. So the first operand is what
    a load returns whose mask is false, which Triton cannot know.
    """
    numbers = e4m3_values(bits.to(tl.float8e4nv, bitcast=True), dtype, INTERPRETED)
    if FIRST:
        row = address.to(tl.pointer_type(dtype), bitcast=True) + tl.arange(0, bits.shape[1])
        nothing = tl.zeros([bits.shape[0], 1], tl.int32)
        numbers = tl.load(row[None, :] + nothing, mask=nothing > listed, other=numbers)
    return numbers


@triton.jit
def narrowed_lines(q_latent, q_rope, scale):
    """(q_latent, q_rope, softmax scale) with q_latent in fp16; as they are if they are fp32. If q_latent has numbers of
    2^15 or more, all lines of both parts are divided by the same power of two, and the scale is multiplied by it."""
    narrow = q_latent
    if q_rope.dtype != tl.float32:
        largest = 1.0
        for i in tl.static_range(len(q_latent)):
            size = tl.abs(q_latent[i].to(tl.float32))
            largest = tl.maximum(largest, tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0))
        excess = tl.maximum(tl.floor(tl.log2(largest)) - 14.0, 0.0)
        narrow = ()
        for i in tl.static_range(len(q_latent)):
            narrow += ((q_latent[i].to(tl.float32) * tl.exp2(-excess)).to(tl.float16),)
        q_rope = (q_rope.to(tl.float32) * tl.exp2(-excess)).to(q_rope.dtype)
        scale *= tl.exp2(excess)
    return narrow, q_rope, scale
