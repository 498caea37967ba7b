"""The decoded images of a run, made in this process when a row is about to enter its slot; the newest are kept."""

from __future__ import annotations

from collections import OrderedDict

from batchspec.images.decode import Rgb, decode
from batchspec.images.rule import Fit
from batchspec.records import ImagePiece

MOST_KEPT = 256 << 20
"""Bytes of pixels that are kept for rows with the same image, such as the samples of a row, which enter one after another."""


class Pixels:
    """Pixels by digest. It holds no more than MOST_KEPT bytes, or one image."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Rgb] = OrderedDict()
        self._num_bytes = 0

    def of(self, piece: ImagePiece) -> Rgb:
        """uint8 [piece.height, piece.width, 3]. Raises BadImage for bytes that cannot be decoded."""
        if piece.digest not in self._kept:
            self._kept[piece.digest] = made = decode(piece.source, Fit(piece.height, piece.width))
            self._num_bytes += made.nbytes
            while self._num_bytes > MOST_KEPT and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(piece.digest)
        return self._kept[piece.digest]
