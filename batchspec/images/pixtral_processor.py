"""How images become pixels and tokens of Pixtral's kind, from the preprocessor_config.json of a PixtralImageProcessor: only large
images are made smaller, to a limit on the longer side. In Mistral's models each row of embeddings ends with a token of text.

Source: transformers 5, models/pixtral/image_processing_pil_pixtral.py and processing_pixtral.py, and
models/lighton_ocr/processing_lighton_ocr.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.checkpoint.config_values import Json
from batchspec.images.header import BadImage
from batchspec.images.processor import Fit, ImageProcessor, check_known, check_usual, colours_of, refusal

_TYPES = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil", None)


@dataclass(frozen=True)
class LongestEdgeProcessor(ImageProcessor):
    """min_pixels and max_pixels follow from the limit on sides. The tokens of an image are placeholders alone."""

    longest_edge: int
    """Limit on the longer side, before it is rounded up to whole units."""
    unit: int
    """Both sides are multiples of it. Where it is less than a token, the last rows and columns of patches may be part of none."""

    @property
    def most_token_pixels(self) -> int:
        return (2 * self.multiple - self.unit) ** 2

    def within(self, least: int | None, most: int | None) -> ImageProcessor:
        if least is None and most is None:
            return self
        name, value = ("min_pixels", least) if most is None else ("max_pixels", most)
        raise ValueError(f"{name}={value} does not apply to this model, which limits the longer side to {self.longest_edge}")

    def fit(self, height: int, width: int) -> Fit:
        """As `ImageProcessor.fit`. Raises BadImage if the shorter side would have no pixel, and for an image without a token."""
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        rows, cols = (math.floor(height / ratio), math.floor(width / ratio)) if ratio > 1 else (height, width)
        if not min(rows, cols):
            said = f"{width} x {height} pixels: nothing is left of one side when the other has {self.longest_edge}; cut the image"
            raise BadImage("bad_image", said)
        found = Fit(-(-rows // self.unit) * self.unit, -(-cols // self.unit) * self.unit)
        if min(found) < self.multiple:
            said = f"{width} x {height} pixels become {found.width} x {found.height}, and a token is {self.multiple} pixels wide"
            raise BadImage("bad_image", f"{said}; give a larger image")
        return found

    def advance(self, rows: int, cols: int) -> int:
        return rows * cols


@dataclass(frozen=True)
class PixtralProcessor(LongestEdgeProcessor):
    """That of Mistral's models."""

    row_end: int
    """The token after each row of embeddings but the last."""
    image_end: int
    """The token after the last row."""

    def tokens(self, rows: int, cols: int) -> NDArray[np.int32]:
        found = np.full((rows, cols + 1), self.placeholder, np.int32)
        found[:, -1] = self.row_end
        found[-1, -1] = self.image_end
        return found.reshape(-1)

    def advance(self, rows: int, cols: int) -> int:
        return rows * (cols + 1)


def read_pixtral_processor(
    values: Json, where: str, *, patch: int, merge: int, placeholder: int, row_end: int, image_end: int
) -> PixtralProcessor:
    """As `read_longest_edge_processor`, of Mistral's models: their sides are multiples of a token, whatever patch_size says."""
    found = read_longest_edge_processor(
        values, where, patch=patch, merge=merge, placeholder=placeholder, units={patch: patch * merge}, usual=patch
    )
    return PixtralProcessor(**vars(found), row_end=row_end, image_end=image_end)


def read_longest_edge_processor(
    values: Json, where: str, *, patch: int, merge: int, placeholder: int, units: Mapping[int, int], usual: int = 16
) -> LongestEdgeProcessor:
    """The processor of a preprocessor_config.json.

    patch, merge  what config.json says; placeholder: the id of its token
    units         the supported values of patch_size -> `unit`; usual: that of a file without one
    Raises CheckpointError for an unknown key, a value that would change the pixels, and what does not fit config.json.
    """
    rest = check_usual(values, where, _TYPES, do_pad=(True, None))
    given = rest.pop("patch_size", usual)
    side = next((side for side in units if given in (side, {"height": side, "width": side})), None)
    if side is None:
        raise refusal(where, "patch_size", given, f"config.json says {' or '.join(map(str, units))}; correct one of them")
    size = rest.pop("size", None) or {"longest_edge": 1024}
    longest = size.get("longest_edge") if isinstance(size, dict) and len(size) == 1 else None
    if type(longest) is not int or not 1 <= longest <= 2**16:
        raise refusal(where, "size", size, "must be an object of longest_edge, a number of pixels; correct it")
    mean, std = colours_of(where, rest)
    check_known(where, rest)
    unit, token = units[side], patch * merge
    if longest <= token - unit:
        raise refusal(where, "size", size, f"leaves no image the {token} pixels of a token; correct it")
    return LongestEdgeProcessor(
        patch=patch, merge=merge, frames=1, min_pixels=token**2, max_pixels=(-(-longest // unit) * unit) ** 2, mean=mean, std=std,
        placeholder=placeholder, longest_edge=longest, unit=unit,
    )
