"""How much of each row's logits lies at or above each of 16 thresholds: their number, or their mass at a temperature.

    out[t, j] = sum over ids with key(logits[t, id]) >= low[t] + j * 2^shift of w
    w = 1, or exp((logit - top[t]) / temperature[t])

key() maps fp32 to int32 in the same order. Eight launches, of 4 bits each, find the smallest logit that top-k or top-p keeps,
also if each process has a part of the logits and the sums of all are added up. Nothing is read back.
The sums of a token have a fixed order and do not depend on the rest of the batch. Larger thresholds never give larger sums, since
the sums have the same order. Bound by arithmetic: 16 comparisons a logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

THRESHOLDS = 16
BLOCK = 1024
NUM_WARPS = 8
LOWEST = -(2**31)
"""Below the key of every number."""


@triton.jit
def threshold_masses_kernel(
    logits, low, top, temperature, out, stride_row, vocab, shift, MASS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    place = tl.arange(0, 16)
    await_earlier(PDL)
    thresholds = tl.load(low + row) + (place << shift)
    largest, inverse = 0.0, 1.0
    if MASS:
        largest, inverse = tl.load(top + row), 1.0 / tl.load(temperature + row)
    total = tl.zeros([16], tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + lanes
        x = tl.load(logits + row * stride_row + ids, mask=ids < vocab, other=float("-inf")) + 0.0  # -0 becomes 0
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        weight = tl.where(tl.abs(x) < float("inf"), 1.0, 0.0)
        if MASS:
            weight = tl.where(weight > 0, tl.exp((x - largest) * inverse), 0.0)
        total += tl.sum(tl.where(key[:, None] >= thresholds[None, :], weight[:, None], 0.0), 0)
    tl.store(out + row * 16 + place, total)


def threshold_masses(
    logits: Tensor, low: Tensor, shift: int, *, out: Tensor, top: Tensor | None = None, temperature: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Write the sums above 16 thresholds of each row.

    logits       fp32 [T, V]  values that are not finite are not counted; rows may be slices of wider ones
    low          int32 [T]  the key of the first threshold of each row
    shift        0..28: thresholds are 2^shift apart
    out          fp32 [T, 16]
    top          fp32 [T]: the logit whose mass is 1; None: sums are numbers of logits
    temperature  fp32 [T] above 0; needed if `top` is given

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, vocab = logits.shape
    check("threshold_masses: logits", logits, (num_tokens, vocab), torch.float32, rows=True)
    check("threshold_masses: low", low, (num_tokens,), torch.int32)
    check("threshold_masses: out", out, (num_tokens, THRESHOLDS), torch.float32)
    if top is not None and temperature is not None:
        check("threshold_masses: top", top, (num_tokens,), torch.float32)
        check("threshold_masses: temperature", temperature, (num_tokens,), torch.float32)
    if not (logits.is_cuda or interpret):
        threshold_masses_reference(logits, low, shift, out=out, top=top, temperature=temperature)
    elif num_tokens:
        threshold_masses_kernel[(num_tokens,)](
            logits, low, top, temperature, out, logits.stride(0), vocab, shift, MASS=top is not None,
            BLOCK=min(BLOCK, max(16, triton.next_power_of_2(vocab))), num_warps=NUM_WARPS, **launch_args(logits),
        )


def keys_of(x: Tensor) -> Tensor:
    """int32 in the order of the numbers, fp32, that are not NaN; -0 is 0."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def values_of(keys: Tensor) -> Tensor:
    """fp32 of int32 keys; -inf of LOWEST."""
    values = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(keys == LOWEST, -torch.inf, values)


def threshold_masses_reference(
    logits: Tensor, low: Tensor, shift: int, *, out: Tensor, top: Tensor | None = None, temperature: Tensor | None = None
) -> None:
    """The same in plain torch."""
    weights = logits.isfinite().float()
    if top is not None and temperature is not None:
        weights = torch.where(weights > 0, ((logits - top[:, None]) / temperature[:, None]).exp(), 0.0)
    keys = keys_of(logits)
    for place in range(THRESHOLDS):
        out[:, place] = torch.where(keys >= (low + (place << shift))[:, None], weights, 0.0).sum(1)
