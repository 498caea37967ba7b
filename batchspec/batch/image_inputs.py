"""What tokens of images have that others do not: rows in place of embeddings, and positions along three axes.

T tokens of a pass, N of images, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AxisPositions:
    """RoPE positions along three axes (time, height, width). Each frequency reads one axis (mRoPE, interleaved).

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1; transformers, models/qwen3_vl (recomposition_frequencies).
    """

    values: Tensor
    """int64 [3, T]"""
    sections: tuple[int, int, int]
    """mrope_section: how many frequencies read each axis: 1, 4, 7, ... the height, 2, 5, 8, ... the width, others the time."""

    def of_frequencies(self, count: int) -> Tensor:
        """int64 [T, count]: the position that each frequency reads."""
        axes = torch.zeros(count, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return self.values[axes.to(self.values.device)].T

    def select(self, places: Tensor) -> AxisPositions:
        return AxisPositions(self.values.index_select(1, places), self.sections)


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What tokens of images read in place of their embeddings, and what D layers add to them (deepstack)."""

    places: Tensor
    """int64 [N] flat indices of these tokens"""
    rows: Tensor
    """[N, 1 + D, H]: the embedding, then the deepstack embeddings, added to the residual stream after layers 0 .. D-1"""
