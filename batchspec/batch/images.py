"""The images of rows on the device: what a prefill pass reads in their places, and the positions of the tokens around them.

An image is encoded in the first prefill pass that computes one of its tokens. Embeddings stay in an LRU cache of `most_rows`
tokens, for later passes and for rows with the same image.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.image_inputs import AxisPositions, ImageInputs
from batchspec.batch.upload import upload
from batchspec.packed_batch import ExampleRow
from batchspec.records import ImagePiece, Request

RowPixels = tuple[NDArray[np.uint8], ...]
"""Of each image of a row uint8 [height, width, 3]."""
Segments = Sequence[tuple[int, int, int]]
"""(slot, begin, end): tokens begin .. end-1 of the row in this slot."""


class ImageEncoder(Protocol):
    """The part of a model that encodes images (`model/vision/`)."""

    @property
    def axes(self) -> tuple[int, ...]:
        """As `AxisPositions.axes`; (): tokens of images have positions as those of text."""

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """Of each image, uint8 [height, width, 3] of a size that the model reads, its rows [tokens, 1 + D, H]: see
        `ImageInputs`. Does not synchronise."""

    def examples(self, most_tokens: int) -> Iterator[tuple[ImagePiece, ...]]:
        """Images of rows that begin with them and have at most so many tokens: each row for kernels that the others may not
        launch. Nothing encodes their source."""


class _Found(NamedTuple):
    """Tokens first .. last-1 of an image in a pass; flat: where the first of them is in the pass."""

    piece: ImagePiece
    pixels: NDArray[np.uint8]
    flat: int
    first: int
    last: int


class ImagesOnDevice:
    """The images of the rows in the slots."""

    def __init__(self, encoder: ImageEncoder, device: torch.device, *, most_rows: int) -> None:
        self._encoder, self._device, self._most_rows = encoder, device, most_rows
        self._images: dict[int, tuple[ImagePiece, ...]] = {}
        """Slot -> images of the row that entered it last. Only prefill passes read them, before rows change slots."""
        self._pixels: dict[int, RowPixels] = {}
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        """Digest -> rows of an encoded image, those that were used last at the end."""
        self.axes = upload(np.array(encoder.axes, np.int64), torch.int64, device) if encoder.axes else None
        """As `AxisPositions.axes`; None: tokens of images have positions as those of text."""

    def begin(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Requests enter these slots. What earlier ones left for their prefill is dropped."""
        self._images = {slot: request.images for slot, request in zip(slots, requests, strict=True) if request.images}
        self._pixels = {}

    def place(self, slot: int, pixels: RowPixels) -> None:
        """The pixels of the row in this slot, which has begun."""
        self._pixels[slot] = pixels

    def examples(self, most_tokens: int) -> Iterator[ExampleRow]:
        """Rows of an image, or of several, and a token."""
        for pieces in self._encoder.examples(most_tokens - 1):
            yield ExampleRow(pieces[-1].begin + pieces[-1].length + 1, partial(self._placed, pieces))

    @contextmanager
    def _placed(self, pieces: tuple[ImagePiece, ...]) -> Iterator[None]:
        """Within this block these are the images of the row in slot 0, in black. Nothing of them stays."""
        self._images, self._pixels = {0: pieces}, {0: tuple(np.zeros((own.height, own.width, 3), np.uint8) for own in pieces)}
        try:
            yield
        finally:
            self._images, self._pixels = {}, {}
            for piece in pieces:
                self._rows.pop(piece.digest, None)

    def inputs(
        self, segments: Segments, *, shifted: bool = False
    ) -> tuple[AxisPositions | None, ImageInputs | None, ImageInputs | None]:
        """The positions of a pass over these segments, None if tokens count them; what its tokens of images read, and (shifted)
        what tokens read whose next token is one of an image; None if it has no such token. Encodes images that were not yet."""
        positions = [rope_positions(self._images.get(slot, ()), begin, end) for slot, begin, end in segments]
        axes = None
        if self.axes is not None:
            axes = AxisPositions(upload(np.concatenate(positions, 1), torch.int64, self._device), self.axes)
        own = list(self._found(segments))
        following = list(self._found([(slot, begin + 1, end + 1) for slot, begin, end in segments])) if shifted else []
        rows = self._encoded([(found.piece, found.pixels) for found in (*own, *following)])
        inputs = axes, self._inputs(own, rows), self._inputs(following, rows)
        self._forget()
        return inputs

    def last_keys(self, segments: Segments) -> Tensor | None:
        """As `FlatBatch.last_keys`, int32 [T]."""
        pieces = [[piece for piece in self._images.get(slot, ()) if piece.whole] for slot, _, _ in segments]
        parts = [last_keys(own, begin, end) for own, (_, begin, end) in zip(pieces, segments, strict=True)]
        if all(part is None for part in parts):
            return None
        found = [np.arange(begin, end) if part is None else part for part, (_, begin, end) in zip(parts, segments, strict=True)]
        return upload(np.concatenate(found), torch.int32, self._device)

    def _inputs(self, found: Sequence[_Found], rows: Mapping[bytes, Tensor]) -> ImageInputs | None:
        if not found:
            return None
        places = np.concatenate([one.flat + one.piece.embedded(one.first, one.last) - one.first for one in found])
        parts = [rows[one.piece.digest][one.piece.rows_before(one.first) : one.piece.rows_before(one.last)] for one in found]
        return ImageInputs(upload(places, torch.int64, self._device), torch.cat(parts)) if len(places) else None

    def _found(self, segments: Segments) -> Iterator[_Found]:
        """The images that have tokens in these segments."""
        flat = 0
        for slot, begin, end in segments:
            for number, piece in enumerate(self._images.get(slot, ())):
                first, last = max(begin, piece.begin), min(end, piece.begin + piece.length)
                if first < last:
                    pixels = self._pixels[slot][number]
                    yield _Found(piece, pixels, flat + first - begin, first - piece.begin, last - piece.begin)
            flat += end - begin

    def _encoded(self, images: Sequence[tuple[ImagePiece, NDArray[np.uint8]]]) -> OrderedDict[bytes, Tensor]:
        """The rows of these images and of others."""
        missing: dict[bytes, NDArray[np.uint8]] = {}
        for piece, pixels in images:
            if piece.digest in self._rows:
                self._rows.move_to_end(piece.digest)
            elif piece.digest not in missing:
                missing[piece.digest] = pixels
        if missing:
            self._rows.update(zip(missing, self._encoder.encode([*missing.values()]), strict=True))
        return self._rows

    def _forget(self) -> None:
        """Drop the rows that were used longest ago, while there are more than `most_rows`."""
        count = sum(map(len, self._rows.values()))
        while count > self._most_rows:
            count -= len(self._rows.popitem(last=False)[1])


def rope_positions(images: Sequence[ImagePiece], begin: int, end: int) -> NDArray[np.int64]:
    """int64 [3, end - begin] RoPE positions (time, height, width) of tokens begin .. end-1 of a row with these images.

    Text counts by one on all axes. An image at position p has p on the axis of time, p + row and p + column on the others, and
    the text after it goes on at p + max(rows, cols). Source: Qwen2-VL (arXiv 2409.12191), section 2.1.
    """
    found = np.arange(begin, end, dtype=np.int64)[None].repeat(3, 0)
    shift = 0
    for piece in images:
        stop = piece.begin + piece.length
        first, last = max(begin, piece.begin), min(end, stop)
        if first < last:
            own = np.arange(first, last) - piece.begin
            found[:, first - begin : last - begin] = piece.begin + shift
            found[1, first - begin : last - begin] += own // piece.cols
            found[2, first - begin : last - begin] += own % piece.cols
        shift += piece.advance - piece.length
        if stop < end:
            found[:, max(stop, begin) - begin :] = np.arange(max(stop, begin), end) + shift
    return found


def last_keys(images: Sequence[ImagePiece], begin: int, end: int) -> NDArray[np.int64] | None:
    """int64 [end - begin] the last key that tokens begin .. end-1 of a row attend to: a token of one of these images that of the
    image's last token, others their own. None: all their own. `end` is inside none of the images."""
    found = np.arange(begin, end)
    near = [piece for piece in images if piece.begin < end and begin < piece.begin + piece.length]
    for piece in near:
        last = piece.begin + piece.length - 1
        assert last < end, "a pass ends inside an image whose tokens attend to each other"
        found[max(piece.begin - begin, 0) : last + 1 - begin] = last
    return found if near else None
