"""What latent attention keeps of each token: one vector of R + P numbers, the latent and the rotated part of the keys.

The latent may be in e4m3, with a scale of its own (`kernels/latent/e4m3_latents.py`).

Latents are finite, so that a masked one adds 0. Of a token that is not finite the rotated part is NaN: queries that attend to it
get NaN, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.cache.page_format import LayerPages
from batchspec.kernels.latent.e4m3_latents import Fp8Latents, token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """The `PageFormat` of one layer."""

    dtype: torch.dtype
    """In which the model computes the vectors, and in which attention reads them."""
    fp8: bool = False
    """Whether latents are stored as e4m3."""
    size: int
    """R + P"""
    rope_dim: int
    """P"""
    page_size: int
    """Tokens."""

    @property
    def latent_dim(self) -> int:
        """R"""
        return self.size - self.rope_dim

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.latent_dim, self.rope_dim, self.dtype) if self.fp8 else self.read_bytes

    @property
    def read_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def allocate(self, num_layers: int, num_pages: int, device: torch.device) -> Tensor:
        """Zeroed pages [num_layers, 1, P, page_size, R + P]; of e4m3 uint8 [num_layers, 1, P, page_size, token_bytes]."""
        width, dtype = (self.token_bytes, torch.uint8) if self.fp8 else (self.size, self.dtype)
        return torch.zeros(num_layers, 1, num_pages, self.page_size, width, dtype=dtype, device=device)

    def open(self, pages: Tensor, scales: Tensor | None) -> LatentPages:
        assert scales is None
        vectors = Fp8Latents.of(pages[0], self.latent_dim, self.rope_dim, self.dtype) if self.fp8 else pages[0]
        return LatentPages(pages, self, vectors)

    def unit_scales(self, device: torch.device) -> None:
        return None

    def plans_by_bounds(self, max_q: int) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """One layer's pages."""

    pages: Tensor
    """[1, P, page_size, ...] as `LatentLayout.allocate` makes them"""
    layout: LatentLayout
    vectors: Tensor | Fp8Latents
    """The same for kernels: [P, page_size, R + P], or in e4m3."""

    @staticmethod
    def of(pages: LayerPages | None) -> LatentPages:
        """The pages of a layer that keeps latents."""
        assert isinstance(pages, LatentPages), pages
        return pages

    def write(self, latents: Tensor, rotated: Tensor, slot_mapping: Tensor) -> None:
        """Write latents [T, R] and rotated parts [T, P] to the slots int64 [T], as the kernel `write_latents` does."""
        finite = (latents.isfinite().all(-1) & rotated.isfinite().all(-1))[:, None]
        latents, rotated = latents.where(latents.isfinite(), 0.0), rotated.where(finite, torch.nan)
        if isinstance(self.vectors, Fp8Latents):
            self.vectors.write(latents, rotated, slot_mapping)
        else:
            self.vectors.flatten(0, 1)[slot_mapping] = torch.cat((latents, rotated), 1)

    def read(self, page_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Latents [num_tokens, R] and rotated parts [num_tokens, P], the first in these pages, int64."""
        if isinstance(self.vectors, Fp8Latents):
            tokens = torch.arange(num_tokens, device=page_ids.device)
            page_size = self.layout.page_size
            return self.vectors.read(page_ids[tokens // page_size] * page_size + tokens % page_size)
        return self._parts(self.vectors.index_select(0, page_ids).flatten(0, 1)[:num_tokens])

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [N, R] and rotated parts [N, P] at slots int64 [N]."""
        if isinstance(self.vectors, Fp8Latents):
            return self.vectors.read(slots)
        return self._parts(self.vectors.flatten(0, 1).index_select(0, slots))

    def _parts(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        latents, rotated = vectors.split((self.layout.latent_dim, self.layout.rope_dim), -1)
        return latents, rotated
