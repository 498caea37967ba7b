"""Codes and scales of NVFP4 as kernels read them (`nvfp4.py`): how bits are placed, in plain torch."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.moe.mxfp4 import PLACES, VALUES

GROUP = 16
"""Number of columns that share a scale."""
_NIBBLES = tuple(tuple(4 * code + bit for bit in (3, 2, 1, 0)) for code in range(4))
"""`PLACES` of words whose lowest bits are the first code."""
_SIZE, _LEADING, _LOWEST = 2.0**-118, 0x7000, 106 << 3
"""A stored scale, with these leading bits of bf16, is too large by 2^118; of a scale in bf16, without its last four bits, the
stored one is less by _LOWEST: 2^-21 would be 0."""


def in_places(words: Tensor) -> Tensor:
    """int16 words whose lowest bits are the first of four codes -> words of `moe/mxfp4.py`. Takes three times their memory."""
    return _looked_up(words, _tables(words.device)[0])


def in_nibbles(words: Tensor) -> Tensor:
    """The inverse of `in_places`."""
    return _looked_up(words, _tables(words.device)[1])


def _looked_up(words: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, words.flatten().int() + 2**15).view(words.shape)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What becomes of each word: experts are thousands of projections, and moving their bits takes a hundred launches."""
    with torch.inference_mode(False):
        words = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
        return _moved(words, _NIBBLES, PLACES), _moved(words, PLACES, _NIBBLES)


def _moved(words: Tensor, sources: tuple[tuple[int, ...], ...], targets: tuple[tuple[int, ...], ...]) -> Tensor:
    found = torch.zeros_like(words)
    for source, target in zip(sum(sources, ()), sum(targets, ()), strict=True):
        found |= (words >> source & 1) << target
    return found


def numbers_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 codes [N, K] -> e2m1 of each."""
    return F.embedding(codes.int(), _values(codes.device, dtype)).squeeze(-1)


@cache
def _values(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[16, 1]. Kept, since a CUDA graph that is captured can copy nothing from the host."""
    with torch.inference_mode(False):
        return torch.tensor(VALUES, dtype=dtype, device=device)[:, None]


def stored_scales(scales: Tensor) -> Tensor:
    """e4m3 [..., G], not negative -> uint8 [..., G]: exponent + 21 in five bits, mantissa in three; 0 of a scale of 0."""
    bits = (scales.bfloat16().view(torch.int16) >> 4) - _LOWEST
    return bits.clamp_(min=0).to(torch.uint8)


def scales_of(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """int16 [G, N], two stored scales each, the first in the low half -> [2 G, N]."""
    octets = torch.stack((pairs & 0xFF, pairs >> 8 & 0xFF), 1).flatten(0, 1)
    return (octets << 4 | _LEADING).view(torch.bfloat16).to(dtype).mul_(_SIZE)
