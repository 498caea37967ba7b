"""Latents in e4m3 with one scale for each token: how they lie in pages, and how they are rounded and read.

    scale    the smallest power of two, at least 2^-100, for which no number of the latent is above 448 scale
    stored   e4m3(c / scale);  c is about stored * scale

Divisions by a power of two and products with one are exact: a number differs by its rounding to e4m3 alone, at most by a 16th of
it, or by scale / 1024 where that is more. A page holds its tokens' rotated parts, then their scales, then their latents, so that
with 16 tokens a page and the sizes of models each part can be read in vectors of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3, LARGEST, from_e4m3, to_e4m3

SMALLEST_SCALE = 2.0**-100


@triton.jit
def scale_of(largest):
    """The scale of a latent whose largest magnitude is this."""
    least = tl.maximum(largest.to(tl.float32) * (1.0 / 448.0), 7.888609052210118e-31)
    return ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


def scales_of(latents: Tensor) -> Tensor:
    """fp32 [T] of finite latents [T, R]."""
    least = (latents.abs().amax(-1).float() * (1 / LARGEST)).clamp_(min=SMALLEST_SCALE)
    return ((least.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def token_bytes(latent_dim: int, rope_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a token: rope_dim numbers of `dtype`, an fp32 scale, and latent_dim numbers of e4m3. They are rounded up so that a
    page of any number of tokens is a whole number of values of each type."""
    unit = max(4, dtype.itemsize)
    return -(-(rope_dim * dtype.itemsize + 4 + latent_dim) // unit) * unit


def _part_bytes(page_bytes: int, page_size: int, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> list[int]:
    """Of a page: rotated parts, scales, latents, and what is left."""
    parts = [page_size * rope_dim * dtype.itemsize, page_size * 4, page_size * latent_dim]
    return [*parts, page_bytes - sum(parts)]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Latents:
    """The pages of one layer. Each tensor is contiguous within a page."""

    latents: Tensor
    """uint8 [pages, page_size, R], the bits of e4m3"""
    rotated: Tensor
    """[pages, page_size, P] in the dtype of the model"""
    scales: Tensor
    """fp32 [pages, page_size]"""

    @classmethod
    def of(cls, pages: Tensor, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> Fp8Latents:
        """Views of pages uint8 [pages, page_size, token_bytes], contiguous."""
        page_size, whole = pages.shape[1], pages.flatten(1)
        sizes = _part_bytes(whole.shape[1], page_size, latent_dim, rope_dim, dtype)
        rotated, scales, latents, _ = whole.split_with_sizes(sizes, 1)
        return cls(
            latents.unflatten(1, (page_size, latent_dim)), rotated.view(dtype).unflatten(1, (page_size, rope_dim)),
            scales.view(torch.float32),
        )

    def write(self, latents: Tensor, rotated: Tensor, slots: Tensor) -> None:
        """Finite latents [T, R] and rotated parts [T, P] to slots int64 [T]."""
        at, scales = self._places(slots), scales_of(latents)
        self.latents[at] = to_e4m3(latents, scales[:, None]).view(torch.uint8)
        self.rotated[at], self.scales[at] = rotated, scales

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [N, R] and rotated parts [N, P] of slots int64 [N], in the dtype of the model."""
        at = self._places(slots)
        return from_e4m3(self.latents[at].view(E4M3), self.scales[at][:, None], self.rotated.dtype), self.rotated[at]

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The page of each slot, and the place in it."""
        page_size = self.scales.shape[1]
        return slots // page_size, slots % page_size


Parts = tuple[Tensor, Tensor | None, Tensor | None]


def check_pages(where: str, pages: Tensor | Fp8Latents, latent_dim: int, rope_dim: int, dtype: torch.dtype) -> Parts:
    """What a kernel reads of pages: [pages, page_size, R + P] of `dtype`, or the latents, rotated parts and scales of e4m3.

    Raises ValueError for others.
    """
    if not isinstance(pages, Fp8Latents):
        check(f"{where}: pages", pages, (*pages.shape[:2], latent_dim + rope_dim), dtype)
        return pages, None, None
    shape = pages.scales.shape
    check(f"{where}: latents", pages.latents, (*shape, latent_dim), torch.uint8, rows=True)
    check(f"{where}: rotated parts", pages.rotated, (*shape, rope_dim), dtype, rows=True)
    check(f"{where}: scales", pages.scales, (*shape,), torch.float32, rows=True)
    return pages.latents, pages.rotated, pages.scales


def strides(parts: Parts) -> tuple[int, int, int]:
    """Numbers from page to page in each part; 0 for those that there are not."""
    pages, rotated, scales = (0 if part is None else part.stride(0) for part in parts)
    return pages, rotated, scales
