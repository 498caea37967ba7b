"""MXFP4 weights in the order in which the grouped products read them.

A checkpoint holds, of each row, blocks of 32 values: 16 bytes, low nibble first, and one scale 2^(u - 127). A nibble is sign, two
bits of exponent, one of mantissa: +-{0, .5, 1, 1.5, 2, 3, 4, 6} (OCP Microscaling Formats 1.0).
Here 128 values of a row, padded with zeros at the end, are 32 words of 16 bits, and word j holds the values j, 32 + j, 64 + j and
96 + j. So one tile of words serves four dots of 32 values, each with one scale a row, and no value moves between registers.

    bit of a word  15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    of value        0  3  3  1  3  3  2  0  0  0  1  1  1  2  2  2

Bits 15 and 8 to 6 are where bf16 has its sign, the end of its exponent and the first of its mantissa, and read as value * 2^-126:
value 0 takes one mask, values 1 and 2 a shift before it, value 3 a shift, a mask, a multiplication that moves its bits apart, and
a mask (`PLACES` names the bits, the sign first). Bytes of the scales are u + 126, the bf16 exponent of 2^(u - 1), so that
one multiplication gives value * 2^(u - 127). Hence scales above 2 (u > 128) are refused.
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
"""Bits of a word that hold value 0, 1, 2 and 3."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Mxfp4Weight(NamedTuple):
    """The weights of all experts, shuffled; E any leading dimensions."""

    words: Tensor
    """uint8 [E, N, ceil(K / 128) * 64], contiguous"""
    scales: Tensor
    """uint8 [E, ceil(K / 128), N, 4], contiguous"""


def mxfp4_shapes(num_rows: int, k: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Shapes of the words and of the scales of one expert."""
    num_blocks = -(-k // BLOCK)
    return (num_rows, num_blocks * BLOCK // 2), (num_blocks, num_rows, BLOCK // SCALE_BLOCK)


def shuffle_mxfp4(blocks: Tensor, scales: Tensor) -> Mxfp4Weight:
    """From a checkpoint's order.

    blocks  uint8 [..., N, K / 32, 16]
    scales  uint8 [..., N, K / 32]

    Raises ValueError where a scale is above 2. Synchronises on a GPU. Leading dimensions are free: take one expert at a time, for
    the intermediate numbers fill several times the memory of the blocks, and on the GPU, for it is some fifty passes over them.
    """
    *lead, num_rows, num_scales = scales.shape
    if blocks.shape != (*scales.shape, 16) or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"shuffle_mxfp4: blocks {list(blocks.shape)} and scales {list(scales.shape)}; must be uint8 "
                         f"[..., N, K / 32, 16] and [..., N, K / 32]")  # fmt: skip
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
    """The checkpoint's blocks and scales again; k is a multiple of 32."""
    *lead, num_rows, _ = weight.words.shape
    words = weight.words.view(torch.int16).view(*lead, num_rows, -1, 32)
    parts = [sum((words >> place & 1) << (3 - bit) for bit, place in enumerate(places)) for places in PLACES]
    nibbles = torch.stack([torch.as_tensor(part) for part in parts], -2).to(torch.uint8).view(*lead, num_rows, -1, 16, 2)
    blocks = (nibbles[..., 0] | nibbles[..., 1] << 4)[..., : k // SCALE_BLOCK, :]
    scales = (weight.scales - 126).transpose(-3, -2).reshape(*lead, num_rows, -1)[..., : k // SCALE_BLOCK]
    return blocks.contiguous(), scales.contiguous()


def dequantise_mxfp4(weight: Mxfp4Weight, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., N, K] in plain torch; exact in bf16, fp32 and fp64."""
    return dequantise_blocks(*unshuffle_mxfp4(weight, k)).to(dtype)


def dequantise_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """A checkpoint's uint8 [..., N, K / 32, 16] and uint8 [..., N, K / 32] -> fp32 [..., N, K]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    values = torch.tensor(VALUES, device=blocks.device)[codes]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


@triton.jit
def unpack(words, scales, PART: tl.constexpr, INTERPRETED: tl.constexpr):
    """Values [N, 32] PART of int16 words, times their scales: int32 [N], a byte a part. bf16, interpreted fp32."""
    if INTERPRETED:
        word = words.to(tl.int32) & 0xFFFF
        if PART < 3:
            bits = (word << (3 * PART)) & 0x81C0
        else:
            bits = (((word >> 7) & 0xD8) * 2081) & 0x81C0
        exponent = (scales >> (8 * PART)) & 0xFF
        y = (bits << 16).to(tl.float32, bitcast=True) * (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    else:  # two words at once
        scale = tl.inline_asm_elementwise(  # byte PART, as exponent of both halves
            "{ .reg .b32 e, i; mov.b32 i, $2; prmt.b32 e, $1, 0, i; shr.u32 $0, e, 1; }", "=r,r,r",
            [scales, 0x0404 + PART * 0x1010], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        scale = tl.broadcast_to(scale[:, None], words.shape)
        if PART == 0:
            y = tl.inline_asm_elementwise(
                "{ .reg .b32 v; and.b32 v, $1, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }",
                "=r,r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif PART == 1:
            y = tl.inline_asm_elementwise(
                "{ .reg .b32 v; shl.b32 v, $1, 3; and.b32 v, v, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }",
                "=r,r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif PART == 2:
            y = tl.inline_asm_elementwise(
                "{ .reg .b32 v; shl.b32 v, $1, 6; and.b32 v, v, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }",
                "=r,r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            y = tl.inline_asm_elementwise(
                """{ .reg .b32 v; shr.u32 v, $1, 7; and.b32 v, v, 0x00D800D8; mul.lo.u32 v, v, 2081;
                and.b32 v, v, 0x81C081C0; mul.rn.bf16x2 $0, v, $2; }""",
                "=r,r,r,r", [words, scale], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    return y
