"""What vision encoders share: images of a call are grouped by size and encoded in passes over patches.

P side of a patch, N patches of a pass, E hidden, H hidden of the text model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.upload import upload
from batchspec.kernels.norm_rope.norm import rms_norm
from batchspec.model.quant.base import Weights
from batchspec.model.quant.ordered import OrderedLinear
from batchspec.model.vision.blocks import Grid, merge_order
from batchspec.model.vision.spec import VisionSpec
from batchspec.records import ImagePiece

ACTIVATIONS: dict[str, Literal["silu", "none", "tanh"]] = {"silu": "silu", "gelu": "none", "gelu_pytorch_tanh": "tanh"}
"""hidden_act -> how it is computed: silu, or the approximation of gelu."""


@dataclass(frozen=True, slots=True)
class Patches:
    """The patches of a pass, one image after another, those of one size one after another."""

    values: Tensor
    """[N, frames * 3 * P * P] normalised, in the dtype of the weights"""
    coords: Tensor
    """int64 [2, N] row and column of each in its image"""
    grids: tuple[Grid, ...]
    """Of each size."""
    counts: tuple[int, ...]
    """Images of each size."""

    @property
    def cu_seqlens(self) -> list[int]:
        """[images + 1] where the patches of each image begin, and N."""
        sizes = [rows * cols for (rows, cols), count in zip(self.grids, self.counts, strict=True) for _ in range(count)]
        return [0, *accumulate(sizes)]


class PatchEncoder(ABC):
    """An `ImageEncoder`. All images of a call are computed together, in passes of up to `spec.most_patches`; or each alone, so
    that its bits depend on no other (`VisionSpec.ordered`)."""

    def __init__(self, spec: VisionSpec, weights: Weights, patch: str) -> None:
        """patch: the name of the weight that patches are multiplied by"""
        self.spec = spec
        self._weights = {tensor.name: weights.tensor(tensor.name) for tensor in spec.tensors()}
        self._patch = self._weights[patch].flatten(1)
        self._device = self._patch.device
        self._values = torch.from_numpy(spec.processor.values).to(self._device)

    @property
    def axes(self) -> tuple[int, ...]:
        return self.spec.axes

    @torch.inference_mode()
    def encode(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        order = sorted(range(len(images)), key=lambda i: images[i].shape)  # equal sizes are prepared together
        encoded: list[Tensor] = []
        group: list[NDArray[np.uint8]] = []
        count, area, most = 0, self.spec.processor.patch**2, self.spec.most_patches(self._patch.dtype)
        for image in (images[i] for i in order):
            own = image.shape[0] * image.shape[1] // area
            if group and (self.spec.ordered or count + own > most):
                encoded += self._pass(group)
                group, count = [], 0
            group.append(image)
            count += own
        of_image = dict(zip(order, encoded + self._pass(group), strict=True))
        return [of_image[i] for i in range(len(images))]

    def examples(self, most_tokens: int) -> Iterator[tuple[ImagePiece, ...]]:
        """One image a row: the largest of a pass, and smaller ones if the tiles of products depend on their size."""
        processor = self.spec.processor
        of_pass = self.spec.most_patches(self._patch.dtype) // processor.merge**2
        for fit in islice(processor.square_fits(min(most_tokens, of_pass)), None if self.spec.ordered else 1):
            digest = processor.digest(b"", fit)
            yield (ImagePiece(begin=0, **processor.of_size(fit), encoded_pixels=0, digest=digest, source=b""),)

    def _pass(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """images: those of one size one after another."""
        processor = self.spec.processor
        groups = [list(group) for _, group in groupby(images, key=lambda image: image.shape)]
        grids = tuple((group[0].shape[0] // processor.patch, group[0].shape[1] // processor.patch) for group in groups)
        coords = [self.order(grid) for grid in grids]
        values = torch.cat([self._cut(group, own) for group, own in zip(groups, coords, strict=True)]).to(self._patch.dtype)
        all_coords = torch.cat([own.repeat(1, len(group)) for group, own in zip(groups, coords, strict=True)], 1)
        patches = Patches(values, all_coords, grids, tuple(map(len, groups)))
        sizes = [self.num_tokens(grid) for grid, count in zip(grids, patches.counts, strict=True) for _ in range(count)]
        parts = self.rows_of(patches).split(sizes)
        return [part.clone() for part in parts] if len(parts) > 1 else list(parts)  # a view would keep all parts in memory

    def _cut(self, images: Sequence[NDArray[np.uint8]], coords: Tensor) -> Tensor:
        """The normalised patches of images of one size, fp32 [images * n, 3 * frames * P * P], each image's in the order of
        coords int64 [2, n]."""
        side = self.spec.processor.patch
        cells = upload(np.stack(images), torch.uint8, self._device).unflatten(2, (-1, side)).unflatten(1, (-1, side))
        cells = cells.permute(0, 1, 3, 5, 2, 4)[:, coords[0], coords[1]].flatten(0, 1).long()  # [images * n, 3, P, P]
        colours = torch.arange(3, device=self._device).view(1, 3, 1, 1)
        values = self._values[colours, cells]
        return values[:, :, None].expand(-1, -1, self.spec.processor.frames, -1, -1).flatten(1)

    def order(self, grid: Grid) -> Tensor:
        """int64 [2, n] row and column of each patch of an image, in the order in which they are computed: those of a token are
        neighbours."""
        return merge_order(grid, self.spec.processor.merge, self._device)

    def num_tokens(self, grid: Grid) -> int:
        """Of an image; rows and columns of patches that fill no token are left out."""
        return (grid[0] // self.spec.processor.merge) * (grid[1] // self.spec.processor.merge)

    def of_tokens(self, x: Tensor, patches: Patches) -> Tensor:
        """x [N, E] of the patches of a pass in the order of `merge_order` -> [tokens, merge**2 * E], without those left out."""
        merged = self.spec.processor.merge**2
        sizes = [rows * cols for rows, cols in patches.grids]
        groups = x.split([size * count for size, count in zip(sizes, patches.counts, strict=True)])
        kept = [
            own.view(count, size, -1)[:, : self.num_tokens(grid) * merged].flatten(0, 1)
            for own, grid, size, count in zip(groups, patches.grids, sizes, patches.counts, strict=True)
        ]
        return torch.cat(kept).view(-1, merged * x.shape[1]) if sum(map(len, kept)) < len(x) else x.view(-1, merged * x.shape[1])

    @abstractmethod
    def rows_of(self, patches: Patches) -> Tensor:
        """[tokens, 1 + D, H] the rows of a pass (`ImageInputs.rows`), of each image row by row."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, K] @ weight [M, K].T + bias [M]. The library's product in bf16 depends on N, and on the GPU."""
        if self.spec.ordered and x.dtype is torch.bfloat16:
            return OrderedLinear(weight, bias)(x)
        return F.linear(x, weight, bias)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.product(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _rms(self, name: str, x: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rms_norm(x, self._weights[f"{name}.weight"], eps, out=out)
        return out


def activate(act: Literal["silu", "none", "tanh"], x: Tensor) -> Tensor:
    return F.silu(x) if act == "silu" else F.gelu(x, approximate=act)
