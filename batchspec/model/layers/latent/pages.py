"""What latent attention keeps of each token: one vector of R + P numbers, the latent and the rotated part of the keys."""

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

    def write(self, vectors: Tensor, slot_mapping: Tensor) -> None:
        """Write vectors [T, R + P] to the slots int64 [T]. One that is not finite becomes NaN: queries that read it get NaN."""
        finite = vectors.isfinite().all(-1, keepdim=True)
        self.pages.flatten(0, 2)[slot_mapping] = vectors.masked_fill(~finite, torch.nan)

    def read(self, page_ids: Tensor, num_tokens: int) -> Tensor:
        """[num_tokens, R + P] the first vectors in these pages, int64."""
        return self.pages[0].index_select(0, page_ids).flatten(0, 1)[:num_tokens]
