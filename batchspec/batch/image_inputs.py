"""What tokens of images have that others do not: rows in place of embeddings, and positions along three axes.

T tokens of a pass, N of images, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AxisPositions:
    """RoPE positions along three axes (time, height, width), of which each frequency reads one (mRoPE, interleaved).

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1; transformers, models/qwen3_vl (recomposition_frequencies).
    """

    values: Tensor
    """int64 [3, T]"""
    sections: tuple[int, int, int]
    """Numbers of frequencies that read each axis: 1, 4, 7, ... height, 2, 5, 8, ... width, all others time."""

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
    """What tokens of images read in place of their embeddings. D layers of the model add rows to their tokens too."""

    places: Tensor
    """int64 [N] flat indices of these tokens"""
    rows: Tensor
    """[N, 1 + D, H]: the embedding, then what is added to the stream after layers 0 .. D-1"""
