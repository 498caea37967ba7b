"""Weights W [N, K] of four bits, INT4 or NVFP4, in the form that their kernels read. One form for all checkpoints.

    INT4   W[n, k] = q[n, k] * s[n, j] - z[n, j] * s[n, j]     codes q, zero points z in 0 .. 15, scales s, j the group of k
    NVFP4  W[n, k] = e2m1(q[n, k]) * s[n, j] * g[n]    groups of 16 columns, row scales g; `nvfp4.py` defines their bits

Computed in fp32, in a model of fp64 in fp64, and rounded once to the model's dtype. In a model of bf16 the scales of INT4 weights
are bf16: those of a file in fp16 are rounded to it at load, as by other engines. z * s is rounded to bf16 there too, because a
subtraction of z would take a further instruction for every two numbers. With z = 8, as in symmetric weights, it is exact; others
change a weight by at most 2^-9 of z * s, where rounding to four bits has changed it by up to s / 2. MXFP4 weights, which only
experts have, are in another form (`moe/mxfp4.py`).

The order in memory is that in which the kernels read (`gemm/four_bit_steps.py`). Blocks of 128 columns lie one after another, so
a tile of rows is contiguous. The 128 codes of a row are 32 words of 16 bits; word j holds columns j, 32 + j, 64 + j and 96 + j
of the block, the first in its lowest bits. So code i of all words is one block of 32 columns, and a tile of words is unpacked to
the operand of a tensor core without moving a number between registers. Of 16 rows, thread l of a warp needs words 2 (l % 4) + 8 i
and the next ones (i = 0 .. 3) of rows l / 4 and 8 + l / 4: its 16 bytes of the first row follow those of thread l - 1, and the
second rows of all threads come after the first ones. Scales and shifts of 16 rows are in the order 0, 8, 1, 9, .. 7, 15:
those of the two rows of a thread make 32 bits. Rows are padded to a multiple of 16, and columns to one of 128, which are
multiplied by zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.common.fp4 import GROUP, in_nibbles, numbers_of, scales_of

BLOCK = 128
"""Columns of a block."""
WORDS = 32
"""Words of a block of a row."""
ROWS = 16
"""Number of rows whose words and scales are interleaved. Slices of rows begin at multiples of it."""
MIDDLE = 8
"""The zero point of symmetric weights."""
SIZE = 256.0
"""Kernels multiply numbers that are smaller than the weights by this factor (`gemm/four_bit_steps.py`)."""


@dataclass(frozen=True, slots=True, eq=False)
class FourBitWeight:
    """See the module's docstring. NVFP4 if it has row scales, otherwise INT4. N' is N rounded up to a multiple of 16; scales past
    N are unspecified."""

    words: Tensor
    """int16 [ceil(K / 128), N' / 16, 512] codes; contiguous but in its first dimension"""
    scales: Tensor
    """[G, N'] s; contiguous but in its first dimension. Groups of 32 or 64 columns: those of whole blocks, also past K.
    NVFP4: int16, two scales each, G for groups of 32"""
    shifts: Tensor | None
    """[G, N'] -z * s / SIZE, bf16 in a model of bf16, otherwise exact; None: all z are 8"""
    num_rows: int
    """N"""
    k: int
    group_size: int
    """Number of columns of a group; the last one may have fewer."""
    columns: Tensor | None = None
    """int32 [K] the column of the projection that is stored as each column, in act order; None: they are stored in order."""
    groups: Tensor | None = None
    """int32 [K] the group of each column; None: that of column k is k // group_size. With it no kernel reads the weight."""
    row_scales: Tensor | None = None
    """fp32 [1, N'], in order: NVFP4 weights, in groups of 16; None: INT4"""

    @property
    def kernel_group(self) -> int | None:
        """The size of the groups as the kernels take it, 0 if a row is one group, 16 if it is NVFP4; None if they cannot read
        them."""
        if self.row_scales is not None:
            return GROUP
        if self.groups is not None:
            return None
        if self.scales.shape[0] == 1:
            return 0
        return self.group_size if is_readable(self.group_size) else None

    def rows(self, own: slice) -> FourBitWeight:
        """Some rows of it, without copies. The first one must be a multiple of 16."""
        assert own.start % ROWS == 0
        blocks = slice(own.start // ROWS, -(-own.stop // ROWS))
        rows = slice(own.start, blocks.stop * ROWS)
        shifts, row_scales = (None if values is None else values[:, rows] for values in (self.shifts, self.row_scales))
        words, scales, num_rows = self.words[:, blocks], self.scales[:, rows], own.stop - own.start
        return replace(self, words=words, scales=scales, shifts=shifts, row_scales=row_scales, num_rows=num_rows)

    def has_columns_of(self, other: FourBitWeight) -> bool:
        """Whether both divide their columns in the same way. Synchronises on a GPU."""
        pairs = ((self.columns, other.columns), (self.groups, other.groups))
        same = all(one is two if one is None or two is None else torch.equal(one, two) for one, two in pairs)
        return same and self.group_size == other.group_size


def is_readable(group_size: int) -> bool:
    """Whether the kernels read groups of so many columns, several in a row."""
    return group_size in (32, 64) or group_size % BLOCK == 0


def in_rows(x: Tensor) -> Tensor:
    """A copy whose dimensions of size 1 have the usual strides too, which `contiguous` does not ensure and `view` needs."""
    return x.clone(memory_format=torch.contiguous_format)


def interleaved(words: Tensor) -> Tensor:
    """int32 [N, K / 8] of eight codes each -> int16 [ceil(K / 128), N' / 16, 512]."""
    octets = in_rows(words).view(torch.uint8)  # columns 2 b and 2 b + 1 in octet b
    octets = F.pad(octets, (0, -octets.shape[1] % (BLOCK // 2), 0, -octets.shape[0] % ROWS)).unflatten(1, (-1, 2, 2, WORDS // 2))
    low, high = octets[:, :, :, 0], octets[:, :, :, 1]  # [N', blocks, octet of a word, 16] of the columns in its low nibble
    found = torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 0xF0)), -1)  # [N', blocks, octet of a word, 16, 2]
    found = found.unflatten(3, (4, 4)).unflatten(0, (-1, 2, 8))  # [N' / 16, 2, 8, blocks, octet of a word, 4, thread, 2]
    in_order: Tensor = found.permute(3, 0, 1, 2, 6, 5, 7, 4).contiguous().view(torch.int16).flatten(2)
    return in_order


def padded(values: Tensor, group_size: int, k: int, groups: Tensor | None) -> Tensor:
    """Of scales or shifts [N, G] those in memory: [G, N']; small groups up to the end of a block."""
    missing = 0
    if groups is None and group_size < BLOCK and BLOCK % group_size == 0 and values.shape[1] > 1:
        missing = -(-k // BLOCK) * (BLOCK // group_size) - values.shape[1]
    values = F.pad(values.t(), (0, -values.shape[0] % ROWS, 0, missing))
    in_order: Tensor = values.unflatten(1, (-1, 2, ROWS // 2)).transpose(2, 3).flatten(1)
    return in_order


def dequantise(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in a model's dtype, columns in the order of the projection. Does not synchronise. Temporaries take about 9 bytes
    for each number."""
    wide = torch.promote_types(dtype, torch.float32)
    if weight.row_scales is not None:
        numbers = numbers_of(_codes(weight, in_nibbles(weight.words)), wide)
        numbers.mul_(_of_columns(weight, scales_of(weight.scales, wide)))
        return numbers.mul_(weight.row_scales[0, : weight.num_rows, None].to(wide)).to(dtype)
    codes = _codes(weight, weight.words).to(wide)
    if weight.shifts is None:
        codes -= MIDDLE
    stored = codes.mul_(_of_columns(weight, weight.scales.to(wide)))
    if weight.shifts is not None:
        stored += _of_columns(weight, weight.shifts.to(wide) * SIZE)
    stored = stored.to(dtype)
    return stored if weight.columns is None else torch.empty_like(stored).index_copy_(1, weight.columns.long(), stored)


def multiplied(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """`dequantise` with the numbers that kernels multiply, in fp32 or fp64: those of INT4 weights are rounded to bf16."""
    return dequantise(weight, torch.bfloat16 if weight.row_scales is None else dtype).to(dtype)


def scale_dtype(row_scales: Tensor | None) -> torch.dtype:
    """Of the scales of a weight that kernels read. row_scales: those of the weight"""
    return torch.bfloat16 if row_scales is None else torch.int16


def pairs_of(values: Tensor | None) -> Tensor | None:
    """Scales or shifts [..., N'] of 16 bits, if there are any, as int32 [..., N' / 2] of two rows each."""
    return None if values is None else values.view(torch.int32)


def _codes(weight: FourBitWeight, words: Tensor) -> Tensor:
    """uint8 [N, K] of words whose lowest bits are the first of their codes."""
    octets = words.contiguous().view(torch.uint8).unflatten(2, (2, 8, 4, 4, 2, 2))
    parts = torch.stack((octets & 15, octets >> 4), -1)  # [blocks, N' / 16, 2, 8, thread, 4, 2, octet of a word, nibble]
    return parts.permute(1, 2, 3, 0, 7, 8, 5, 4, 6).flatten(3).flatten(0, 2)[: weight.num_rows, : weight.k]


def _of_columns(weight: FourBitWeight, values: Tensor) -> Tensor:
    """Values [G, N'] of groups -> [N, K] of columns."""
    values = values.unflatten(1, (-1, ROWS // 2, 2)).transpose(2, 3).flatten(1)[:, : weight.num_rows].t()
    if weight.groups is not None:
        return values.index_select(1, weight.groups)
    return values.repeat_interleave(weight.group_size, 1)[:, : weight.k]
