"""A causal convolution over each block of S queries whose taps depend on the query, as in a DFlash2 head:

    out[t, c] = sum over a of (base[a, c] + delta[t, a, c // GROUP]) * x[t - a, c]        t - a in the block of t

GROUP channels that follow one another share a delta. Row r has queries r * S .. r * S + S - 1, and what is before them is 0: no
query reads one of another row or a later one, so a block may be cut. Sums are in fp32 (fp64 for fp64) and rounded once.
Bound by launch latency at decode sizes (bytes: about 2 * T * C * itemsize; x comes from the L2 cache for all taps but one).
Source: DFlash2 (https://github.com/z-lab/dflash, dflash/model.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

MOST_TAPS = 16
TOKENS, LANES = 4, 512  # of one program


@triton.jit(do_not_specialize=["num_tokens", "block"])
def block_conv_kernel(
    x, delta, base, out, num_tokens, block, delta_stride, CHANNELS: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr,
    TOKENS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """Program (queries, channels)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * LANES + tl.arange(0, LANES)
    within, place = channel < CHANNELS, token % block
    await_earlier(PDL)
    acc = tl.zeros([TOKENS, LANES], ACC)
    for tap in tl.static_range(TAPS):
        reads = ((token < num_tokens) & (place >= tap))[:, None] & within[None, :]
        value = tl.load(x + (token - tap)[:, None] * CHANNELS + channel[None, :], mask=reads, other=0.0).to(ACC)
        groups = delta + token[:, None] * delta_stride + tap * (CHANNELS // GROUP) + (channel // GROUP)[None, :]
        own = tl.load(groups, mask=reads, other=0.0).to(ACC)
        acc += (tl.load(base + tap * CHANNELS + channel, mask=within, other=0.0).to(ACC)[None, :] + own) * value
    exists = (token < num_tokens)[:, None] & within[None, :]
    tl.store(out + token[:, None] * CHANNELS + channel[None, :], acc.to(out.dtype.element_ty), mask=exists)


def block_conv(x: Tensor, delta: Tensor, base: Tensor, block: int, *, interpret: bool = False) -> Tensor:
    """out [T, C]; see the module's docstring.

    x      [T, C], any float dtype: whole blocks, one after another
    delta  [T, A * C / GROUP] of the same dtype, those of the query's own tap first; rows may be slices of wider ones
    base   [A, C] of the same dtype, A up to 16
    block  S, number of queries of a block

    Returns a new tensor. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, channels), taps = x.shape, base.shape[0]
    check("block_conv: x", x, (num_tokens, channels), *FLOATS)
    check("block_conv: base", base, (taps, channels), x.dtype)
    check("block_conv: delta", delta, (num_tokens, delta.shape[1]), x.dtype, rows=True)
    if not 1 <= taps <= MOST_TAPS:
        raise ValueError(f"block_conv: {taps} taps; must be 1..{MOST_TAPS}")
    if block < 1 or num_tokens % block:
        raise ValueError(f"block_conv: {num_tokens} queries are no whole blocks of {block}")
    if not delta.shape[1] or delta.shape[1] % taps or channels % (delta.shape[1] // taps):
        raise ValueError(f"block_conv: delta has {delta.shape[1]} columns; must be {taps} times a divisor of {channels}")
    if not (x.is_cuda or interpret):
        return block_conv_reference(x, delta, base, block)
    out = torch.empty_like(x)
    if num_tokens:
        block_conv_kernel[triton.cdiv(num_tokens, TOKENS), triton.cdiv(channels, LANES)](
            x, delta, base, out, num_tokens, block, delta.stride(0), CHANNELS=channels, GROUP=channels * taps // delta.shape[1],
            TAPS=taps, TOKENS=TOKENS, LANES=LANES, ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=4,
            **launch_args(x),
        )
    return out


def block_conv_reference(x: Tensor, delta: Tensor, base: Tensor, block: int) -> Tensor:
    """The same in plain torch."""
    acc, taps = torch.promote_types(x.dtype, torch.float32), base.shape[0]
    wide = x.to(acc).unflatten(0, (-1, block))
    groups = delta.shape[1] // taps
    own = delta.to(acc).unflatten(1, (taps, groups)).repeat_interleave(x.shape[1] // groups, 2).unflatten(0, (-1, block))
    out = torch.zeros_like(wide)
    for tap in range(min(taps, block)):
        out[:, tap:] += (base[tap].to(acc) + own[:, tap:, tap]) * wide[:, : block - tap]
    return out.flatten(0, 1).to(x.dtype)
