"""What tokens of images have that others do not: rows in place of embeddings, and positions along three axes.

T tokens of a pass, N of images, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchspec.batch.upload import upload


@dataclass(frozen=True, slots=True)
class AxisPositions:
    """RoPE positions along three axes (time, height, width). Each frequency reads one axis (mRoPE).

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1.
    """

    values: Tensor
    """int64 [3, T]"""
    axes: tuple[int, ...]
    """The axis that each frequency reads, 0 to 2; more frequencies than these read the time."""

    def of_frequencies(self, count: int) -> Tensor:
        """int64 [count] on the device: the axis that each frequency reads."""
        axes = np.zeros(count, np.int64)
        axes[: len(self.axes)] = self.axes[:count]
        return upload(axes, torch.int64, self.values.device)

    def select(self, places: Tensor) -> AxisPositions:
        return AxisPositions(self.values.index_select(1, places), self.axes)


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """What tokens of images read in place of their embeddings, and what D layers add to them (deepstack)."""

    places: Tensor
    """int64 [N] flat indices of these tokens"""
    rows: Tensor
    """[N, 1 + D, H]: the embedding, then the deepstack embeddings, added to the residual stream after layers 0 .. D-1"""
