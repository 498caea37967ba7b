"""NVFP4 weights W [N, K]: codes of 4 bits, an e4m3 scale s for each 16 columns of a row, and an fp32 scale g of the row.

    W[n, k] = e2m1(q[n, k]) * s[n, k // 16] * g[n]        or / g[n]: ModelOpt stores g, compressed-tensors its inverse

e2m1(q) is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, negative if bit 3 of q is set. A file has one g for a projection. Here each row has
its own, so that projections that are multiplied as one matrix keep theirs. e2m1 * s has six significant bits and is exact in
every dtype. With g it is rounded once to fp32, in a model of fp64 to fp64, and then to the model's dtype.

For kernels (`arranged`) weights have the form of INT4 weights in groups of 32 (`four_bit.py`), and the same kernels read them:
columns are in the same words, and two scales of 8 bits in the place of one. Only bits differ. The four codes of a word lie as
those of MXFP4 (`moe/mxfp4.py`), so that a masked word is e2m1 * 2^-126 in bf16. Code i of the 32 words of 128 columns is a block
of 32 columns: words 0 to 15 are one group, words 16 to 31 the next, so each step of 16 columns of the tensor cores has one scale
a row. Scales are not kept as e4m3, whose smallest numbers are subnormal, but with five bits of exponent and no sign, which is
always positive: a shift, a mask and a constant make 2^118 s in bf16. Times this, a number is e2m1 * s * 2^-8, exact in bf16.
Scales in bf16 would save one instruction in twelve, but take a ninth more memory, which bounds products of few tokens.
2^8 and g belong to the fp32 sums. So kernels round no weight: their products differ from those of weights that `dequantise`
rounded to bf16 by up to 2^-9 of each x * W. Codes of a group whose scale is 0 become 0. Of files that divide by g the form has
1 / g, rounded to fp32.
Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.common.four_bit import BLOCK, ROWS, FourBitWeight, interleaved, padded
from batchspec.kernels.common.fp4 import GROUP, in_places, stored_scales
from batchspec.kernels.moe.mxfp4 import VALUES


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


def arranged(weight: Nvfp4Weight) -> FourBitWeight:
    """The form that kernels read. Does not synchronise. Temporaries take about four times the memory of the codes."""
    rows, k = weight.num_rows, 2 * weight.codes.shape[1]
    codes = weight.codes.view(*weight.scales.shape, GROUP // 2).masked_fill((weight.scales.view(torch.uint8) == 0)[..., None], 0)
    words = in_places(interleaved(codes.flatten(1).view(torch.int32)))
    scales = F.pad(stored_scales(weight.scales), (0, -weight.scales.shape[1] % (BLOCK // GROUP))).view(torch.int16)
    g = weight.row_scales.reciprocal() if weight.divides else weight.row_scales
    row_scales = F.pad(g, (0, -rows % ROWS))[None]
    return FourBitWeight(words, padded(scales, 2 * GROUP, k, None), None, rows, k, GROUP, row_scales=row_scales)


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
