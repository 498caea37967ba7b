"""Counter-based random numbers: integer words from (row key, position, token id), bit for bit equal in Triton and torch.

    z = mix64(mix64(key + GOLDEN) + position)     s0, s1 = low, high half of z
    h = mix32(mix32(id + s0) ^ s1)

There is no generator state: a draw depends only on its row and position, not on the rest of the batch (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"). mix64 is the finalizer of splitmix64 (Steele, Lea, Flood 2014; constants of
Vigna's public-domain splitmix64.c, https://prng.di.unimi.it/splitmix64.c); mix32 is lowbias32
(https://github.com/skeeto/hash-prospector).
Torch has no unsigned arithmetic on the CPU: the references compute in signed integers, which wrap around to the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def position_words(key, position):
    """Two uint32 words of an int64 key and an int64 position."""
    z = mix64(key.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    z = mix64(z + position.to(tl.uint64, bitcast=True))
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def uniform(word0, word1):
    """fp32 in [0, 1), a multiple of 2**-24. It never rounds to 1: `uniform < rate` always holds at rate 1, never at 0."""
    h = mix32(mix32(word0) ^ word1)
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


def _signed(word: int, bits: int) -> int:
    return word - (1 << bits) if word >= 1 << (bits - 1) else word


def _xor_shifted(x: Tensor, shift: int, bits: int, scratch: Tensor) -> Tensor:
    """x ^= x >> shift without sign extension, in place."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (bits - shift)) - 1)
    return x.bitwise_xor_(scratch)


def mix32_reference(x: Tensor) -> Tensor:
    """mix32 of int32 values, in place: x is overwritten."""
    scratch = torch.empty_like(x)
    _xor_shifted(x, 16, 32, scratch).mul_(_signed(0x7FEB352D, 32))
    _xor_shifted(x, 15, 32, scratch).mul_(_signed(0x846CA68B, 32))
    return _xor_shifted(x, 16, 32, scratch)


def mix64_reference(x: Tensor) -> Tensor:
    """mix64 of int64 values, in place: x is overwritten."""
    scratch = torch.empty_like(x)
    _xor_shifted(x, 30, 64, scratch).mul_(_signed(0xBF58476D1CE4E5B9, 64))
    _xor_shifted(x, 27, 64, scratch).mul_(_signed(0x94D049BB133111EB, 64))
    return _xor_shifted(x, 31, 64, scratch)


def position_words_reference(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Words s0, s1 as int32, for keys int64 and positions int64 that broadcast to one shape."""
    z = mix64_reference(mix64_reference(keys + _signed(0x9E3779B97F4A7C15, 64)) + positions)
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def uniform_reference(keys: Tensor, positions: Tensor) -> Tensor:
    """fp32 in [0, 1) for each (key, position), bit for bit that of the kernel."""
    word0, word1 = position_words_reference(keys, positions)
    h = mix32_reference(mix32_reference(word0).bitwise_xor_(word1))
    return (h >> 8).bitwise_and_(0xFFFFFF).to(torch.float32) * 2.0**-24
