"""MXFP4 weights in the order in which the grouped products read them.

A checkpoint stores each row in blocks of 32 values: 16 bytes, low nibble first, and one scale byte u that means 2^(u - 127).
A nibble has a sign bit, two exponent bits and one mantissa bit: +-{0, .5, 1, 1.5, 2, 3, 4, 6} (OCP Microscaling Formats 1.0).

Here a row is padded with zeros to a multiple of 128 values. Each 128 values are 32 words of 16 bits; word j holds values j,
32 + j, 64 + j and 96 + j as its values 0, 1, 2 and 3. So value i of all words is one block of 32 values with one scale per row: a
tile of words is the operand of four dots, one after another, and no value moves between registers.

    bit of the word         15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    belongs to value         0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2

In bf16, bit 15 is the sign, bits 8 and 7 are the lowest bits of the exponent, and bit 6 is the highest bit of the mantissa. So a
word with a nibble in these four bits and zeros elsewhere, read as bf16, is value * 2^-126. Value 0 needs a mask to get there;
values 1 and 2 a shift and a mask; value 3 a shift, a mask, a multiplication that spreads its bits, and a mask (`PLACES` lists the
bits of each value, sign first). A scale is stored as the byte u + 126, which is the bf16 exponent of 2^(u - 1), so that one
multiplication gives value * 2^(u - 127). u + 126 must be less than 255: scales above 2 (u > 128) are refused.

Rows are in blocks of 64, and blocks in pairs: block i of the gate and block i of up in a gated product, blocks 2i and 2i + 1 in
others. Rows of zeros fill the last block, that of the gate and that of up. A last pair whose rows need one block only has one: a
single block, or in a gated product up to 32 rows of the gate as its first half and as many of up as its second.

What a program reads of a pair in a step of the loop over K, 128 columns, lies together, in the order in which four warps hold the
operand M of the tensor cores (A of mma.m16n8k16, and of wgmma in registers): thread `lane` of warp w has row 16 w + lane // 4 and
the row 8 below it of each block, and of each row the words 2 (lane % 4) + {0, 1, 8, 9, 16, 17, 24, 25} of 32. So words go from
memory to the registers in which they are unpacked, 16 bytes at a time, without shared memory.

    words   [pair, 128 columns, block of the pair, warp, upper or lower 8 rows, lane, 8 words]
    scales  [pair, 128 columns, warp, lane // 4, block of the pair, upper or lower 8 rows, 4 bytes], 16 bytes a thread; those of a
            last pair in one block as if it had two
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
SCALE_BLOCK = 32
ROWS = 64
"""Rows of a block."""
LARGEST_SCALE = 128
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (11, 10, 14, 13))
"""For values 0, 1, 2 and 3 of a word: its bits that hold sign, exponent, exponent, mantissa."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4Weight(NamedTuple):
    """Weights [N, K] in the order that the module's docstring describes. E is any number of leading dimensions, such as the
    experts."""

    words: Tensor
    """uint8 [E, ceil(N / 64), ceil(K / 128) * 4096], contiguous; a pair is two rows of this tensor, one after another"""
    scales: Tensor
    """uint8 [E, ceil(N / 128), ceil(K / 128), 512], contiguous; u + 126 of the four blocks of 32 in each 128 values"""
    num_rows: int
    """N; of a gated product those of the gate and of up"""
    k: int
    gated: bool
    """Whether the first half of the rows is the gate's and the second up's: a pair of blocks has one of each."""

    def expert(self, index: int) -> Mxfp4Weight:
        """The weight of an expert, without copies."""
        return self._replace(words=self.words[index], scales=self.scales[index])


def mxfp4_shapes(num_rows: int, k: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of the words and of the scales of one expert, in bytes. num_rows: even if the weight is gated."""
    blocks, steps = -(-num_rows // ROWS), -(-k // BLOCK)
    return (blocks, steps * ROWS * BLOCK // 2), (-(-blocks // 2), steps, 2 * ROWS * BLOCK // SCALE_BLOCK)


def shuffle_mxfp4(blocks: Tensor, scales: Tensor, *, gated: bool) -> Mxfp4Weight:
    """Convert weights from a checkpoint's order.

    blocks  uint8 [..., N, K / 32, 16]; gated: gate rows before up rows
    scales  uint8 [..., N, K / 32]

    Raises ValueError for other shapes or dtypes and for a scale above 2. Synchronises on a GPU.
    Convert one expert at a time, because temporaries take several times the memory of the blocks; and convert on the GPU, because
    the conversion makes about forty passes over them.
    """
    if blocks.shape != (*scales.shape, 16) or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"shuffle_mxfp4: blocks {list(blocks.shape)} and scales {list(scales.shape)}; must be uint8 "
                         f"[..., N, K / 32, 16] and [..., N, K / 32]")
    *lead, num_rows, num_scales = scales.shape
    if gated and num_rows % 2:
        raise ValueError(f"shuffle_mxfp4: {num_rows} rows of gate and up; must be even")
    if scales.numel() and int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"shuffle_mxfp4: a scale is 2^{int(scales.max()) - 127}; at most 2^1 is supported")
    k = num_scales * SCALE_BLOCK
    words_shape, scales_shape = mxfp4_shapes(num_rows, k)
    found = words_of(_in_pairs(blocks.flatten(-2), BLOCK // 2, gated=gated))  # [..., P, 2, 64, B, 32]
    # Rows as [warp, half, lane // 4], words as [h, b, lane % 4, e].
    pairs = _moved(found.unflatten(-1, (2, 2, 4, 2)).unflatten(-6, (4, 2, 8)), (-10, -5, -9, -8, -7, -6, -2, -4, -3, -1))
    words = torch.empty(*lead, *words_shape, dtype=torch.uint8, device=blocks.device)
    for place, own in _places(words, pairs, gated=gated):
        place.copy_(own)
    exponents = (_in_pairs(scales, 4, gated=gated) + 126).unflatten(-3, (4, 2, 8))  # [..., P, 2, warp, half, lane // 4, B, 4]
    exponents = _moved(exponents, (-7, -2, -5, -3, -6, -4, -1)).contiguous().view(*lead, *scales_shape)
    return Mxfp4Weight(words, exponents, num_rows, k, gated)


def _places(words: Tensor, pairs: Tensor, *, gated: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the `words` of a weight, each with the view of the same words among pairs
    [..., P, B, block, warp, half, lane // 4, lane % 4, h, b, e]."""
    blocks, own = words.view(torch.int16), pairs.shape[-8:]
    whole = words.shape[-2] // 2
    yield blocks[..., : 2 * whole, :].flatten(-2).unflatten(-1, (whole, pairs.shape[-9], *own)), pairs.narrow(-10, 0, whole)
    if words.shape[-2] % 2:
        one, last = blocks[..., -1, :].unflatten(-1, (pairs.shape[-9], *own[1:])), pairs.select(-10, -1)
        yield (one.unflatten(-7, (2, 2)), last.narrow(-7, 0, 2)) if gated else (one, last.select(-8, 0))


def _in_pairs(rows: Tensor, width: int, *, gated: bool) -> Tensor:
    """Rows [..., N, C] -> [..., P, 2, 64, ceil(C / width), width]: pairs of blocks of rows, zeros where there are none."""
    *lead, num_rows, columns = rows.shape
    pairs, parts = -(-num_rows // (2 * ROWS)), 2 if gated else 1
    short = 2 * ROWS * pairs // parts - num_rows // parts
    rows = F.pad(rows.reshape(*lead, parts, num_rows // parts, columns), (0, -columns % width, 0, short))
    if gated:
        return rows.view(*lead, 2, pairs, ROWS, -1, width).transpose(-5, -4)
    return rows.view(*lead, pairs, 2, ROWS, -1, width)


def words_of(octets: Tensor) -> Tensor:
    """Two nibbles in each of the 64 bytes of 128 values, uint8 [..., 64] -> the 32 words int16 of these values [..., 32]."""
    nibbles = torch.stack((octets & 15, octets >> 4), -1).flatten(-2).unflatten(-1, (4, 32))
    words = torch.zeros_like(nibbles[..., 0, :], dtype=torch.int16, memory_format=torch.contiguous_format)
    for part, places in enumerate(PLACES):
        own, masks = nibbles[..., part, :].to(torch.int16), dict[int, int]()  # by how far bits move
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            masks[place - bit] = masks.get(place - bit, 0) | 1 << bit
        for shift, mask in masks.items():
            words |= (own & mask) << shift
    return words


def _moved(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x with its last dimensions in this order."""
    return x.permute(*range(x.dim() - len(dims)), *(x.dim() + dim for dim in dims))


def unshuffle_mxfp4(weight: Mxfp4Weight) -> tuple[Tensor, Tensor]:
    """Convert back to a checkpoint's blocks and scales."""
    lead, shape = weight.words.shape[:-2], (*weight.scales.shape[-3:-1], 2, 4, 2, 8, 4, 2, 2, 2)
    pairs = torch.zeros(*lead, *shape, dtype=torch.int16, device=weight.words.device)
    for place, own in _places(weight.words, pairs, gated=weight.gated):
        own.copy_(place)
    words = _moved(pairs, (-10, -8, -7, -6, -5, -9, -3, -2, -4, -1)).flatten(-4).flatten(-5, -3)  # [..., P, 2, 64, B, 32]
    parts = [sum((words >> place & 1) << (3 - bit) for bit, place in enumerate(places)) for places in PLACES]
    nibbles = torch.stack([torch.as_tensor(part) for part in parts], -2).to(torch.uint8).unflatten(-1, (16, 2))
    blocks = _in_rows((nibbles[..., 0] | nibbles[..., 1] << 4).flatten(-2), weight, weight.k // 2)
    scales = weight.scales.unflatten(-1, (4, 8, 2, 2, 4)) - 126
    scales = _moved(scales, (-7, -3, -5, -2, -4, -6, -1)).flatten(-5, -3)
    return blocks.unflatten(-1, (-1, 16)), _in_rows(scales, weight, weight.k // SCALE_BLOCK)


def _in_rows(pairs: Tensor, weight: Mxfp4Weight, columns: int) -> Tensor:
    """The inverse of `_in_pairs`: the rows [..., N, columns] of a weight."""
    parts = 2 if weight.gated else 1
    rows: Tensor = (pairs.transpose(-5, -4) if weight.gated else pairs).flatten(-2).flatten(-4, -2)
    rows = rows.unflatten(-2, (parts, -1))[..., : weight.num_rows // parts, :columns]
    return rows.flatten(-3, -2).contiguous()


def dequantise_mxfp4(weight: Mxfp4Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights as numbers [..., N, K], in plain torch; exact in bf16, fp32 and fp64."""
    blocks, scales = unshuffle_mxfp4(weight)
    return dequantise_blocks(blocks, scales).to(dtype)


def dequantise_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """A checkpoint's uint8 [..., N, K / 32, 16] and uint8 [..., N, K / 32] -> fp32 [..., N, K]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    values = torch.tensor(VALUES, device=blocks.device)[codes]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


@triton.jit
def unpack(words, scales, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Value PART (0 to 3) of each word, times its scale: [N, 8], bf16; fp32 in Triton's interpreter.

    words   int16 [N, 8]
    scales  int32 [N]; byte PART is the stored scale of that value's block
    """
    both = (scales << 7 if PART % 2 == 0 else scales >> 1) & 0x7F807F80  # the exponents of parts 0 and 2, or 1 and 3
    scale = (both if PART < 2 else both >> 16).to(tl.int16)
    return times_scale(words, tl.broadcast_to(scale[:, None], words.shape), PART, INTERPRETED)


@triton.jit
def times_scale(words, scale, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Value PART of each word * 2^-126 * its scale, rounded to bf16; fp32 in Triton's interpreter.

    words  int16 [N, W]
    scale  int16 [N, W]; the bits of numbers of bf16. As wide as words, so each of the two numbers of an instruction has its own,
           wherever Triton's layout places the second
    """
    if INTERPRETED:
        word = words.to(tl.int32) & 0xFFFF
        if PART < 3:
            bits = (word << (3 * PART)) & 0x81C0
        else:
            bits = (((word >> 7) & 0xD8) * 2081) & 0x81C0
        y = (bits << 16).to(tl.float32, bitcast=True) * (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # each instruction works on two words
        # v * scale - 0 in place of v * scale, which only Hopper's PTX has: ptxas makes the same instruction of both.
        if PART == 0:
            y = tl.inline_asm_elementwise(
                "{ .reg .b32 v, z; and.b32 v, $1, 0x81C081C0; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, v, $2, z; }",
                "=r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )
        elif PART == 1:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 v, z; shl.b32 v, $1, 3; and.b32 v, v, 0x81C081C0;
                mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, v, $2, z; }""",
                "=r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )
        elif PART == 2:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 v, z; shl.b32 v, $1, 6; and.b32 v, v, 0x81C081C0;
                mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, v, $2, z; }""",
                "=r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )
        else:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 v, z; shr.u32 v, $1, 7; and.b32 v, v, 0x00D800D8; mul.lo.u32 v, v, 2081;
                and.b32 v, v, 0x81C081C0; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, v, $2, z; }""",
                "=r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )
    return y
