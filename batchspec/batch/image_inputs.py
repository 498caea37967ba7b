"""What tokens of images have that others do not: rows in place of embeddings, and positions along three axes.

T tokens of a pass, N of images, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AxisPositions:
    """RoPE positions along three axes (time, height, width). Each frequency reads one axis (mRoPE).

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1.
    """

    values: Tensor
    """int64 [3, T], contiguous"""
    axes: Tensor
    """int64 [A] the axis that each frequency reads, 0 to 2; more frequencies than these read the time"""

    def __post_init__(self) -> None:
        assert self.values.is_contiguous(), "kernels read positions of neighbours side by side"

    def of_frequencies(self, count: int) -> Tensor:
        """int64 [count]: the axis that each frequency reads. Copies nothing from the host: CUDA graphs hold it."""
        own = self.axes[:count]
        return F.pad(own, (0, count - len(own)))

    def select(self, places: Tensor) -> AxisPositions:
        return AxisPositions(self.values.index_select(1, places), self.axes)


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What tokens of images read in place of their embeddings, and what D layers add to them (deepstack)."""

    places: Tensor
    """int64 [N] flat indices of these tokens"""
    rows: Tensor
    """[N, 1 + D, H]: the embedding, then the deepstack embeddings, added to the residual stream after layers 0 .. D-1"""
