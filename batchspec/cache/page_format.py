"""What the cache knows of a page's content: how many bytes a token takes, and who can make and read such pages."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class LayerPages(Protocol):
    """One layer's pages, for the layers that write and read them."""

    @property
    def pages(self) -> Tensor:
        """[parts, P, page_size, ...]"""

    @property
    def layout(self) -> PageFormat: ...


class PageFormat(Protocol):
    """How a layer stores what it keeps of each token. Layers of one K/V group with equal formats share one tensor."""

    @property
    def page_size(self) -> int:
        """Tokens."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""

    @property
    def read_bytes(self) -> int:
        """Bytes of one token in one layer as a prefill reads it, copied from its page in the dtype of the computation."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""

    def allocate(self, num_layers: int, num_pages: int, device: torch.device) -> Tensor:
        """Zeroed pages [num_layers, parts, P, page_size, ...]: what was not written may be read under a mask, and must be finite.
        `kv_move` needs two parts."""

    def open(self, pages: Tensor, scales: Tensor | None) -> LayerPages:
        """The pages of one layer [parts, P, page_size, ...]. scales: of the stored numbers; None unless the format has some."""

    def unit_scales(self, device: torch.device) -> Tensor | None:
        """Scales that are all 1; None for a format that has none."""

    def plans_by_bounds(self, max_q: int) -> bool:
        """Whether a prefill on a GPU whose rows have at most `max_q` tokens can be launched with bounds of their lengths alone
        (`FlatBatch.max_keys`), reading nothing back: a CUDA graph can hold such a pass."""
