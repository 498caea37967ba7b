"""INT4 weights W [N, K]: groups of the columns of a row share a scale s and a zero point z. One form for all checkpoints.

    W[n, k] = (q[n, k] - z[n, g]) * s[n, g]     q and z in 0 .. 15, g the group of column k

Computed in fp32, in a model of fp64 in fp64, and rounded once to the model's dtype. If s is fp16 or bf16, as in published
checkpoints, the product is exact before that: q - z has 4 bits and a sign.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

CODES = 8
"""Number of codes q in a word."""
MIDDLE = 8
"""The zero point of symmetric weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """See the module's docstring. It takes K / 2 + 2 G or 3 G bytes a row."""

    words: Tensor
    """int32 [N, K / 8] q, eight in a word; that of the lowest k is in the lowest bits"""
    scales: Tensor
    """[N, G] s, in the floating-point dtype of the file"""
    zeros: Tensor | None
    """uint8 [N, G] z; None: all are 8"""
    group_size: int
    """Number of columns of a group; the last one may have fewer."""
    groups: Tensor | None = None
    """int32 [K] the group of each column; None: that of column k is k // group_size."""

    @property
    def num_rows(self) -> int:
        return self.words.shape[0]

    def rows(self, own: slice) -> Int4Weight:
        """Some rows of it, without copies."""
        return replace(
            self, words=self.words[own], scales=self.scales[own], zeros=None if self.zeros is None else self.zeros[own]
        )

    def has_groups_of(self, other: Int4Weight) -> bool:
        """Whether both divide their columns in the same way. Synchronises on a GPU."""
        if self.groups is None or other.groups is None:
            return self.groups is other.groups and self.group_size == other.group_size
        return torch.equal(self.groups, other.groups)


def unpack(words: Tensor) -> Tensor:
    """words int32 [..., W] -> codes uint8 [..., 8 W]."""
    octets = _in_rows(words).view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """codes uint8 [..., 8 W], all below 16 -> words int32 [..., W]."""
    return _in_rows(codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int32)


def _in_rows(x: Tensor) -> Tensor:
    """A copy whose dimensions of size 1 have the usual strides too, which `contiguous` does not ensure and `view` needs."""
    return x.clone(memory_format=torch.contiguous_format)


def dequantise(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in a model's dtype. Does not synchronise. Temporaries take about 9 bytes for each number."""
    wide = torch.promote_types(dtype, torch.float32)
    codes = unpack(weight.words).to(wide)
    codes -= MIDDLE if weight.zeros is None else _of_columns(weight, weight.zeros.to(wide))
    return codes.mul_(_of_columns(weight, weight.scales.to(wide))).to(dtype)


def _of_columns(weight: Int4Weight, values: Tensor) -> Tensor:
    """Values [N, G] of groups -> [N, K] of columns."""
    if weight.groups is not None:
        return values.index_select(1, weight.groups)
    return values.repeat_interleave(weight.group_size, 1)[:, : weight.words.shape[1] * CODES]
