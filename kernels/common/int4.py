"""INT4 weights as checkpoints pack them, in words of 32 bits, and how they become `FourBitWeight`."""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.kernels.common.four_bit import SIZE, FourBitWeight, in_rows, interleaved, padded

CODES = 8
"""Number of codes in a word of a checkpoint, 32 bits."""
LARGEST_SCALE = 8.0
"""Limit of the scales in a model of bf16: the kernels multiply subnormal numbers by scale * 2^125."""
SMALLEST_SCALE = 2.0**-100
"""Smaller scales in a model of bf16, such as 0, become this: the kernels compute their exponents as integers."""


def unpack(words: Tensor) -> Tensor:
    """words int32 [..., W] of a checkpoint -> codes uint8 [..., 8 W]."""
    octets = in_rows(words).view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """codes uint8 [..., 8 W], all below 16 -> words int32 [..., W]; those of the lowest columns are in the lowest bits."""
    return in_rows(codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int32)


def arrange(
    words: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, groups: Tensor | None = None, *,
    dtype: torch.dtype | None = None,
) -> FourBitWeight:
    """The form in memory of a weight.

    words   int32 [N, K / 8] as `pack` gives them
    scales  [N, G], zeros uint8 [N, G] or None
    groups  int32 [K] the group of each column in act order; None: they are in order. Synchronises on a GPU if it is given
    dtype   of the model; None: that of the scales

    Temporaries take about three times the memory of the words; in act order sixteen times.
    """
    k, columns = words.shape[1] * CODES, None
    if groups is not None:
        in_order = torch.arange(k, device=groups.device) // group_size
        order = groups.argsort(stable=True)
        if torch.equal(groups[order].long(), in_order):
            columns, groups = order.int(), None
            words = pack(unpack(words).index_select(1, order))
    shifts = None if zeros is None else padded(_shifts(scales, zeros, dtype or scales.dtype), group_size, k, groups)
    own = padded(scales, group_size, k, groups)
    return FourBitWeight(interleaved(words), own, shifts, len(words), k, group_size, columns, groups)


def _shifts(scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """-z * s / SIZE: rounded in a model of bf16, otherwise exact for scales of 16 bits."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    shifts = zeros.to(wide) * scales.to(wide) / -SIZE
    return shifts.bfloat16() if dtype is torch.bfloat16 else shifts


def bf16_scales(scales: Tensor) -> Tensor:
    """Scales of a file as a model of bf16 has them. Raises ValueError if one is not below 8 in size. Synchronises on a GPU."""
    rounded = scales.to(torch.bfloat16, copy=True)
    sizes = rounded.abs()
    largest = float(sizes.amax())
    if not largest < LARGEST_SCALE:
        raise ValueError(f"a scale of {largest:g}; below {LARGEST_SCALE:g} is supported")
    return rounded.masked_fill_(sizes < SMALLEST_SCALE, SMALLEST_SCALE)
