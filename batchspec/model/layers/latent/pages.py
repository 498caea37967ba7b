"""What latent attention keeps of each token: one vector of R + P numbers, the latent and the rotated part of the keys.

Latents are finite, so that a masked one adds 0. Of a token that is not finite the rotated part is NaN: queries that attend to it
get NaN, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.cache.page_format import LayerPages


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """The `PageFormat` of one layer."""

    dtype: torch.dtype
    size: int
    """R + P"""
    rope_dim: int
    """P"""
    page_size: int
    """Tokens."""

    @property
    def token_bytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        return self.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def allocate(self, num_layers: int, num_pages: int, device: torch.device) -> Tensor:
        """Zeroed pages [num_layers, 1, P, page_size, R + P]."""
        return torch.zeros(num_layers, 1, num_pages, self.page_size, self.size, dtype=self.dtype, device=device)

    def open(self, pages: Tensor, scales: Tensor | None) -> LatentPages:
        assert scales is None
        return LatentPages(pages, self)

    def unit_scales(self, device: torch.device) -> None:
        return None

    def plans_by_bounds(self, max_q: int) -> bool:
        return False


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """One layer's pages."""

    pages: Tensor
    """[1, P, page_size, R + P]"""
    layout: LatentLayout

    @staticmethod
    def of(pages: LayerPages | None) -> LatentPages:
        """The pages of a layer that keeps latents."""
        assert isinstance(pages, LatentPages), pages
        return pages

    @property
    def vectors(self) -> Tensor:
        """[P, page_size, R + P]"""
        return self.pages[0]

    def write(self, latents: Tensor, rotated: Tensor, slot_mapping: Tensor) -> None:
        """Write latents [T, R] and rotated parts [T, P] to the slots int64 [T], as the kernel `write_latents` does."""
        finite = (latents.isfinite().all(-1) & rotated.isfinite().all(-1))[:, None]
        vectors = torch.cat((latents.where(latents.isfinite(), 0.0), rotated.where(finite, torch.nan)), 1)
        self.pages.flatten(0, 2)[slot_mapping] = vectors

    def read(self, page_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Latents [num_tokens, R] and rotated parts [num_tokens, P], the first in these pages, int64."""
        return self._parts(self.vectors.index_select(0, page_ids).flatten(0, 1)[:num_tokens])

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [N, R] and rotated parts [N, P] at slots int64 [N]."""
        return self._parts(self.vectors.flatten(0, 1).index_select(0, slots))

    def _parts(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        latents, rotated = vectors.split((self.layout.size - self.layout.rope_dim, self.layout.rope_dim), -1)
        return latents, rotated
