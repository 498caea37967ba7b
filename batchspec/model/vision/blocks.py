"""What vision encoders are made of. N patches of all images of a pass, one image after another; NH heads of D numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.batch.upload import upload
from batchspec.kernels.attention import bidirectional
from batchspec.tuning import policy

Grid = tuple[int, int]
"""Rows and columns of an image's patches."""


def merge_order(grid: Grid, merge: int, device: torch.device | None = None) -> Tensor:
    """int64 [2, rows * cols] row and column of each patch, in the order in which patches of one token are neighbours: those of a
    square of merge * merge row by row, and the squares row by row. Last come those of rows and columns that fill no square.
    Made on the device: a copy would wait for all earlier work."""
    high, wide = (size - size % merge for size in grid)
    rows, cols = (torch.arange(size, device=device).view(-1, merge) for size in (high, wide))
    shape = (len(rows), len(cols), merge, merge)
    row, col = rows[:, None, :, None].expand(shape), cols[None, :, None, :].expand(shape)
    found = torch.stack((row.reshape(-1), col.reshape(-1)))
    if (high, wide) == grid:
        return found
    right = _rectangle((0, high), (wide, grid[1]), device)
    return torch.cat((found, right, _rectangle((high, grid[0]), (0, grid[1]), device)), 1)


def _rectangle(rows: tuple[int, int], cols: tuple[int, int], device: torch.device | None) -> Tensor:
    """int64 [2, n] row and column of the patches of these ranges, row by row."""
    row, col = (torch.arange(*ends, device=device) for ends in (rows, cols))
    shape = (len(row), len(col))
    return torch.stack((row[:, None].expand(shape).reshape(-1), col.expand(shape).reshape(-1)))


def grid_positions(table: Tensor, coords: Tensor, grid: Grid) -> Tensor:
    """[n, H] fp32 or wider: learned position embeddings, table [side * side, H] of a square grid, interpolated bilinearly to an
    image's patches (align_corners). coords int64 [2, n] of `merge_order`, on the table's device."""
    side = round(len(table) ** 0.5)
    taps, weights = [], []
    for at, size in zip(coords, grid, strict=True):
        place = at.float() * (side - 1) / max(size - 1, 1)
        below = place.floor()
        share = place - below
        taps.append((below.long(), (below.long() + 1).clamp(max=side - 1)))
        weights.append((1 - share, share))
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    found = wide.new_zeros(coords.shape[1], wide.shape[1])
    for row, of_row in zip(taps[0], weights[0], strict=True):
        for col, of_col in zip(taps[1], weights[1], strict=True):
            found += wide[row * side + col].mul_((of_row * of_col)[:, None])  # [n, H] twice in memory
    return found


def axial_angles(coords: Tensor, dim: int, theta: float, *, own_frequencies: bool = False) -> tuple[Tensor, Tensor]:
    """2D RoPE: cos and sin fp32 [N, dim/2] of a rotation by the row in the first half of the pairs of a head, by the column in
    the others. coords int64 [2, N]; own_frequencies: rows use frequencies 0, 2, 4, ... of a head, columns 1, 3, 5, ... (Pixtral);
    else both use those of rows (Qwen)."""
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=coords.device) / dim)
    of_rows, of_cols = freqs[0::2], freqs[1::2] if own_frequencies else freqs[0::2]
    angles = torch.cat((coords[0, :, None].float() * of_rows, coords[1, :, None].float() * of_cols), 1)
    return angles.cos(), angles.sin()


class AttentionWithin:
    """Attention of each patch to those of its own image, in all layers of a pass."""

    def __init__(
        self, cu_seqlens: Sequence[int], dtype: torch.dtype, device: torch.device, *, scale: float | None = None
    ) -> None:
        """cu_seqlens: [images + 1] where the patches of each image begin, and N; scale: of the scores, None: 1 / sqrt(D)."""
        self._cu_seqlens, self._scale = cu_seqlens, scale
        has_kernel = policy.has_kernels(device) and dtype in bidirectional.DTYPES
        self._tiles = upload(bidirectional.tiles_of(cu_seqlens), torch.int32, device) if has_kernel else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [N, NH, D] -> [N, NH * D]."""
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        if self._tiles is not None and q.shape[-1] <= bidirectional.MAX_HEAD_DIM:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            bidirectional.bidirectional_attention(q, k, v, self._tiles, scale=scale, out=out)
            return out.flatten(1)
        found = []
        for begin, end in pairwise(self._cu_seqlens):
            query, key, value = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
            found.append(F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1).flatten(1))
        return torch.cat(found)
