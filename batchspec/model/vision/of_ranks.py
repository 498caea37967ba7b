"""Images encoded by the ranks that compute a model together: each has the whole vision encoder and encodes a part of the images
of a call, and all get the same rows of all images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.images import ImageEncoder
from batchspec.distributed.collectives import Collectives
from batchspec.images.processor import Fit
from batchspec.model.vision.spec import VisionSpec
from batchspec.records import ImagePiece

EXCHANGED = 1024
"""Rows of each rank that are exchanged at a time. Of a hidden size of 4096 in bf16 they have 8 MB, with three layers of deepstack
34 MB."""


class EncoderOfRanks:
    """An `ImageEncoder`. All ranks call it with the same images: it waits for the others as every exchange does."""

    def __init__(self, own: ImageEncoder, spec: VisionSpec, ranks: Collectives, dtype: torch.dtype, device: torch.device) -> None:
        """own: this rank's encoder, of this spec; dtype, device: of its rows"""
        self._own, self._spec, self._ranks = own, spec, ranks
        width = spec.row_bytes(dtype) // dtype.itemsize
        self._none = torch.empty((0, width // spec.hidden_size, spec.hidden_size), dtype=dtype, device=device)

    @property
    def axes(self) -> tuple[int, ...]:
        return self._own.axes

    @torch.inference_mode()
    def encode(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        owners = owners_of([image.shape[0] * image.shape[1] for image in images], self._ranks.ranks)
        own = [image for image, owner in zip(images, owners, strict=True) if owner == self._ranks.rank]
        counts = [prod(self._spec.processor.grid(Fit(*image.shape[:2]))) for image in images]
        rows = torch.cat(self._own.encode(own)) if own else self._none
        with self._ranks.prefilling():
            return self._exchanged(rows, owners, counts)

    def examples(self, most_tokens: int) -> Iterator[tuple[ImagePiece, ...]]:
        """As many images a row as there are ranks: each rank encodes one."""
        for (piece,) in self._own.examples(most_tokens // self._ranks.ranks):
            yield tuple(
                replace(piece, begin=rank * piece.length, digest=bytes([rank]) + piece.digest[1:])
                for rank in range(self._ranks.ranks)
            )

    def _exchanged(self, own: Tensor, owners: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
        """The rows of each image. own: of this rank's images, one after another; counts: number of each image's rows"""
        firsts, ends = list[int](), [0] * self._ranks.ranks  # of each image, and of all images of each rank
        for owner, count in zip(owners, counts, strict=True):
            firsts.append(ends[owner])
            ends[owner] += count
        assert own.shape == (ends[self._ranks.rank], *self._none.shape[1:]), "the encoder returned other rows than planned"
        found = [self._none.new_empty((count, *self._none.shape[1:])) for count in counts]
        for begin in range(0, max(ends), EXCHANGED):
            end = min(begin + EXCHANGED, max(ends))
            part = self._none.new_zeros((end - begin, *self._none.shape[1:]))  # the rank may have fewer rows than another one
            part[: max(0, len(own) - begin)] = own[begin:end]
            gathered = self._ranks.gather(part)
            for rows, owner, first in zip(found, owners, firsts, strict=True):
                low, high = max(begin, first), min(end, first + len(rows))
                if low < high:
                    rows[low - first : high - first] = gathered[owner, low - begin : high - begin]
        return found


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that encodes each image, by numbers of pixels: the largest first, each by the rank that has the fewest pixels so
    far, of equal ones the first. All ranks come to the same."""
    pixels, found = [0] * ranks, [0] * len(sizes)
    for image in sorted(range(len(sizes)), key=lambda image: -sizes[image]):
        found[image] = pixels.index(min(pixels))
        pixels[found[image]] += sizes[image]
    return found


def encoding_bytes(spec: VisionSpec, dtype: torch.dtype, ranks: int, tokens: int) -> int:
    """Bytes that encoding and exchanging images of so many tokens take at most on a rank, besides what `encode` returns. ranks: 1
    if there are no others"""
    exchanged = 0 if ranks == 1 else spec.row_bytes(dtype) * (2 * tokens + (1 + ranks) * EXCHANGED)
    return max(spec.activation_bytes(dtype), exchanged)
