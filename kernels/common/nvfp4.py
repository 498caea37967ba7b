"""NVFP4 weights W [N, K]: codes of 4 bits, an e4m3 scale s for each 16 columns of a row, and an fp32 scale g of the row.

    W[n, k] = e2m1(q[n, k]) * s[n, k // 16] * g[n]        or / g[n]: ModelOpt stores g, compressed-tensors its inverse

e2m1(q) is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, negative if bit 3 of q is set. A file has one g for a projection. Here each row has
its own, so that projections that are multiplied as one matrix keep theirs. e2m1 * s has six significant bits and is exact in
every dtype. With g it is rounded once to fp32, in a model of fp64 to fp64, and then to the model's dtype.

For kernels: the words of `kernels/moe/mxfp4.py` can hold these codes too, as they say nothing of scales. Value i of the 32 words
of 128 columns is a block of 32 columns: words 0 to 15 are one group of 16, words 16 to 31 the next. So each step of 16 columns of
a bf16 product of the tensor cores has one scale a row, and 128 columns have eight scales in place of four. A word gives
e2m1 * 2^-126; times s * 2^118, which bf16 holds (448 * 2^118 < 2^127), it is e2m1 * s * 2^-8, exact in bf16. 2^8 and g belong to
the fp32 sums of a row.
Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.moe.mxfp4 import VALUES

GROUP = 16
"""Number of columns that share a scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Weight:
    """See the module's docstring. It takes K / 2 + K / 16 + 4 bytes a row."""

    codes: Tensor
    """uint8 [N, K / 2] q of two neighbouring columns, the first in the low half"""
    scales: Tensor
    """e4m3 [N, K / 16] s"""
    row_scales: Tensor
    """fp32 [N] g"""
    divides: bool
    """Whether numbers are divided by g."""

    @property
    def num_rows(self) -> int:
        return self.codes.shape[0]

    def rows(self, own: slice) -> Nvfp4Weight:
        """Some rows of it, without copies."""
        return replace(self, codes=self.codes[own], scales=self.scales[own], row_scales=self.row_scales[own])


def joined(parts: Sequence[Nvfp4Weight]) -> Nvfp4Weight:
    """Weights of one layout as one, their rows one after another."""
    first, *others = parts
    assert all(part.divides == first.divides for part in others)
    if not others:
        return first
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Nvfp4Weight(codes, scales, torch.cat([part.row_scales for part in parts]), first.divides)


def dequantise(weight: Nvfp4Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in a model's dtype, on any device. Does not synchronise. Temporaries take about 6 bytes for each number."""
    wide = torch.promote_types(dtype, torch.float32)
    numbers = F.embedding(weight.codes.int(), _pairs(weight.codes.device, wide)).view(*weight.scales.shape, GROUP)
    numbers *= weight.scales.to(wide)[..., None]
    row_scales = weight.row_scales.to(wide)[:, None, None]
    return (numbers.div_(row_scales) if weight.divides else numbers.mul_(row_scales)).flatten(1).to(dtype)


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2] the two numbers of each byte. Kept, since a CUDA graph that is captured can copy nothing from the host."""
    with torch.inference_mode(False):
        numbers = torch.tensor(VALUES, dtype=dtype, device=device)
        return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1)
