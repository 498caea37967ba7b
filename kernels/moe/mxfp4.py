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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
SCALE_BLOCK = 32
LARGEST_SCALE = 128
PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (11, 10, 14, 13))
"""For values 0, 1, 2 and 3 of a word: its bits that hold sign, exponent, exponent, mantissa."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4Weight(NamedTuple):
    """Weights in the layout that the module's docstring describes. E is any number of leading dimensions, such as the experts."""

    words: Tensor
    """uint8 [E, N, ceil(K / 128) * 64], contiguous"""
    scales: Tensor
    """uint8 [E, ceil(K / 128), N, 4], contiguous; u + 126 of the four blocks of 32 in each 128 values"""


def mxfp4_shapes(num_rows: int, k: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of the words and of the scales of one expert."""
    num_blocks = -(-k // BLOCK)
    return (num_rows, num_blocks * BLOCK // 2), (num_blocks, num_rows, BLOCK // SCALE_BLOCK)


def shuffle_mxfp4(blocks: Tensor, scales: Tensor) -> Mxfp4Weight:
    """Convert weights from a checkpoint's order.

    blocks  uint8 [..., N, K / 32, 16]
    scales  uint8 [..., N, K / 32]

    Raises ValueError for other shapes or dtypes and for a scale above 2. Synchronises on a GPU.
    Convert one expert at a time, because temporaries take several times the memory of the blocks; and convert on the GPU, because
    the conversion makes about fifty passes over them.
    """
    *lead, num_rows, num_scales = scales.shape
    if blocks.shape != (*scales.shape, 16) or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"shuffle_mxfp4: blocks {list(blocks.shape)} and scales {list(scales.shape)}; must be uint8 "
                         f"[..., N, K / 32, 16] and [..., N, K / 32]")
    if scales.numel() and int(scales.max()) > LARGEST_SCALE:
        raise ValueError(f"shuffle_mxfp4: a scale is 2^{int(scales.max()) - 127}; at most 2^1 is supported")
    pad = -num_scales % 4
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [..., N, K / 32, 32], in the order of K
    nibbles = torch.nn.functional.pad(nibbles, (0, 0, 0, pad)).view(*lead, num_rows, -1, 4, 32).to(torch.int16)
    words = torch.zeros_like(nibbles[..., 0, :])
    for part, places in enumerate(PLACES):
        for bit, place in enumerate(places):
            words |= (nibbles[..., part, :] >> (3 - bit) & 1) << place
    exponents = torch.nn.functional.pad(scales, (0, pad)) + 126
    return Mxfp4Weight(
        words.view(*lead, num_rows, -1).view(torch.uint8), exponents.view(*lead, num_rows, -1, 4).transpose(-3, -2).contiguous()
    )


def unshuffle_mxfp4(weight: Mxfp4Weight, k: int) -> tuple[Tensor, Tensor]:
    """Convert back to a checkpoint's blocks and scales; k, the number of columns, is a multiple of 32."""
    *lead, num_rows, _ = weight.words.shape
    words = weight.words.view(torch.int16).view(*lead, num_rows, -1, 32)
    parts = [sum((words >> place & 1) << (3 - bit) for bit, place in enumerate(places)) for places in PLACES]
    nibbles = torch.stack([torch.as_tensor(part) for part in parts], -2).to(torch.uint8).view(*lead, num_rows, -1, 16, 2)
    blocks = (nibbles[..., 0] | nibbles[..., 1] << 4)[..., : k // SCALE_BLOCK, :]
    scales = (weight.scales - 126).transpose(-3, -2).reshape(*lead, num_rows, -1)[..., : k // SCALE_BLOCK]
    return blocks.contiguous(), scales.contiguous()


def dequantise_mxfp4(weight: Mxfp4Weight, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights as numbers [..., N, K], in plain torch; exact in bf16, fp32 and fp64."""
    return dequantise_blocks(*unshuffle_mxfp4(weight, k)).to(dtype)


def dequantise_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """A checkpoint's uint8 [..., N, K / 32, 16] and uint8 [..., N, K / 32] -> fp32 [..., N, K]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    values = torch.tensor(VALUES, device=blocks.device)[codes]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


@triton.jit
def unpack(words, scales, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Value PART (0 to 3) of each word, times its scale: [N, 32], bf16; fp32 in Triton's interpreter.

    words   int16 [N, 32]
    scales  int32 [N]; byte PART is the stored scale of that value's block
    """
    both = (scales << 7 if PART % 2 == 0 else scales >> 1) & 0x7F807F80  # the exponents of parts 0 and 2, or 1 and 3
    scale = (both if PART < 2 else both >> 16).to(tl.int16)
    return times_scale(words, tl.broadcast_to(scale[:, None], words.shape), PART, INTERPRETED)


@triton.jit
def times_scale(words, scale, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Value PART of each word * 2^-126 * its scale, rounded to bf16; fp32 in Triton's interpreter.

    words  int16 [N, 32]
    scale  int16 [N, 32]; the bits of numbers of bf16. As wide as words, so each of the two numbers of an instruction has its own,
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
