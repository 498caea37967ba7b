"""How a model's images are resized and how many tokens each takes: preprocessor_config.json of a Qwen2VLImageProcessor, which
Qwen3-VL and Qwen3.5 have too. Source: transformers 5, models/qwen2_vl/image_processing_pil_qwen2_vl.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchspec.checkpoint.config_values import Json
from batchspec.console.text import as_json
from batchspec.errors import CheckpointError
from batchspec.images.header import BadImage

IMAGE_VERSION = 1
"""Raised with every change of pixels or tokens that images become: a job that began with another version is refused."""
PREPROCESSOR = "preprocessor_config.json"
MOST_ASPECT = 200
"""Limit on the longer side divided by the shorter one."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_USUAL: dict[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
    "rescale_factor": 1 / 255, "data_format": "channels_first", "do_center_crop": None,
    "do_pad": None, "pad_size": None, "crop_size": None, "input_data_format": None, "return_tensors": None, "device": None,
    "disable_grouping": None, "image_seq_length": None,
}
"""Keys -> the only supported value."""
_UNREAD = (
    "image_processor_type", "processor_class", "feature_extractor_type", "_processor_class", "image_processor_class",
    "default_to_square",
)
"""Names of classes; default_to_square applies to a `size` that is one number, which is refused."""
_TYPES = (
    "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil", "Qwen3VLImageProcessor",
    "Qwen2_5_VLImageProcessor", None,
)
"""The last name is a copy of the first in a development version of transformers, with which models were published."""


class Fit(NamedTuple):
    """The size in pixels to which an image is resized."""

    height: int
    width: int


@dataclass(frozen=True)
class ImageProcessor:
    """How images become pixels and tokens."""

    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Patches along each side of the square that becomes one token."""
    frames: int
    """temporal_patch_size: how often a still image is repeated in a patch."""
    min_pixels: int
    max_pixels: int
    """Range of height * width after resizing."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """[3] of red, green, blue after division by 255."""
    placeholder: int
    """The token in whose places embeddings of images are put."""

    @property
    def multiple(self) -> int:
        """Pixels along each side of the square that becomes one token; both sides of an image are multiples of it."""
        return self.patch * self.merge

    @property
    def most_token_pixels(self) -> int:
        """Limit on the pixels of an image, after resizing, divided by its tokens."""
        return self.multiple**2

    def within(self, least: int | None, most: int | None) -> ImageProcessor:
        """The processor with other limits on pixels; None: the limit stays. Raises ValueError for limits that no size fits."""
        found = replace(self, min_pixels=least or self.min_pixels, max_pixels=most or self.max_pixels)
        if found.max_pixels < self.multiple**2:
            raise ValueError(f"max_pixels={found.max_pixels} must be at least {self.multiple**2}, the pixels of a token")
        if found.min_pixels > found.max_pixels:
            raise ValueError(f"min_pixels={found.min_pixels} exceeds max_pixels={found.max_pixels}")
        return found

    def fit(self, height: int, width: int) -> Fit:
        """The size to which an image of this size is resized. Raises BadImage for an extreme ratio of its sides."""
        if max(height, width) / min(height, width) > MOST_ASPECT:
            said = f"{width} x {height} pixels: one side is more than {MOST_ASPECT} times as long as the other; cut the image"
            raise BadImage("bad_image", said)
        unit = self.multiple
        rows, cols = round(height / unit) * unit, round(width / unit) * unit
        if rows * cols > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, cols = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif rows * cols < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, cols = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return Fit(rows, cols)

    def grid(self, fit: Fit) -> tuple[int, int]:
        """Rows and columns of its tokens."""
        return fit.height // self.multiple, fit.width // self.multiple

    def tokens(self, rows: int, cols: int) -> NDArray[np.int32]:
        """int32 [.] the tokens of an image of so many rows and columns of embeddings."""
        return np.full(rows * cols, self.placeholder, np.int32)

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of text before an image and after it."""
        return (), ()

    @property
    def most_whole(self) -> int:
        """Tokens of the largest image that no prefill pass may cut (`ImagePiece.whole`); 0: passes may end inside images."""
        return 0

    def advance(self, rows: int, cols: int) -> int:
        """Positions that rotary embedding counts for it: Qwen2-VL (arXiv 2409.12191), section 2.1."""
        return max(rows, cols)

    def of_size(self, fit: Fit) -> dict[str, Any]:
        """The fields of an `ImagePiece` that follow from its size."""
        rows, cols = self.grid(fit)
        return {
            "length": len(self.tokens(rows, cols)), "rows": rows, "cols": cols, "advance": self.advance(rows, cols),
            "height": fit.height, "width": fit.width, "whole": self.most_whole > 0,
        }

    def square_fits(self, most_tokens: int) -> Iterator[Fit]:
        """Sizes of square images of at most so many tokens: the largest, and of half as many again and again."""
        found, tokens = set[Fit](), most_tokens
        while tokens:
            side = math.isqrt(tokens * self.multiple**2)
            with suppress(BadImage):
                fit = self.fit(side, side)
                if fit not in found and len(self.tokens(*self.grid(fit))) <= most_tokens:
                    found.add(fit)
                    yield fit
            tokens //= 2

    def digest(self, data: bytes, fit: Fit) -> bytes:
        """16 bytes that determine the pixels: of the encoded image and of the size to which it is resized."""
        size = fit.height.to_bytes(4, "little") + fit.width.to_bytes(4, "little")
        return blake2b(blake2b(data, digest_size=16).digest() + size, digest_size=16).digest()

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """float32 [3, 256] what each byte of each colour becomes: divided by 255, then normalised, with transformers' steps."""
        bytes_ = np.arange(256, dtype=np.uint8)[:, None].repeat(3, 1)
        scaled = (bytes_.astype(np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(own, dtype=np.float32) for own in (self.mean, self.std))
        return np.ascontiguousarray(((scaled - mean) / std).T)


def read_processor(values: Json, where: str, *, patch: int, merge: int, frames: int, placeholder: int) -> ImageProcessor:
    """The processor of a preprocessor_config.json. patch, merge, frames, placeholder: what config.json says.

    Raises CheckpointError for an unknown key, a value that would change the pixels, and what does not fit config.json.
    """
    rest = check_usual(values, where, _TYPES)
    check_sizes(where, rest, patch, merge, frames)
    low, high = _pixels(where, rest)
    mean, std = colours_of(where, rest)
    check_known(where, rest)
    return ImageProcessor(
        patch=patch, merge=merge, frames=frames, min_pixels=low, max_pixels=high, mean=mean, std=std, placeholder=placeholder
    )


def check_usual(values: Json, where: str, types: Sequence[str | None], **more: tuple[Any, ...]) -> dict[str, Any]:
    """The other keys of a preprocessor_config.json. types: classes of image processors; more: key -> its supported values, the
    first of them that without the key. Raises CheckpointError for another class or value."""
    rest = {key: value for key, value in values.items() if key not in _UNREAD}
    if values.get("image_processor_type") not in types:
        raise refusal(where, "image_processor_type", values["image_processor_type"], f"only {types[0]} is supported")
    for key, supported in {**{key: (usual,) for key, usual in _USUAL.items()}, **more}.items():
        given = rest.pop(key, supported[0])
        same = math.isclose(given, supported[0]) if key == "rescale_factor" and isinstance(given, float) else given in supported
        if not same:
            raise refusal(where, key, given, f"only {as_json(supported[0])} is supported")
    return rest


def check_sizes(where: str, rest: dict[str, Any], patch: int, merge: int, frames: int) -> None:
    """Take the sizes that config.json says too from `rest`. Raises CheckpointError for others."""
    usual = {"patch_size": (14, patch), "merge_size": (2, merge), "temporal_patch_size": (2, frames)}
    for key, (without, own) in usual.items():
        if (given := rest.pop(key, without)) != own:
            raise refusal(where, key, given, f"config.json says {own}; correct one of them")


def check_known(where: str, rest: dict[str, Any]) -> None:
    """Raises CheckpointError for a key that no reader took from `rest`."""
    for key, value in rest.items():
        raise refusal(where, key, value, "unknown key, which may change pixels; remove it if it does not")


def colours_of(where: str, rest: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """image_mean and image_std, taken from `rest`. Raises CheckpointError."""
    mean, std = (
        _colours(where, key, rest.pop(key, usual)) for key, usual in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
    )
    if min(std) <= 0:
        raise refusal(where, "image_std", list(std), "must be above 0; correct it")
    return mean, std


def _pixels(where: str, rest: dict[str, Any]) -> tuple[int, int]:
    """min_pixels and max_pixels, which replace the two numbers of `size`."""
    size = rest.pop("size", None) or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if not isinstance(size, dict) or not {*size} <= {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise refusal(where, "size", size, "must be an object of shortest_edge and longest_edge; correct it")
    found = []
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        own = rest.pop(key, None)
        value = size.get(edge, size.get(key)) if own is None else own
        if type(value) is not int or not 1 <= value <= 2**40:
            raise refusal(where, f"{key} or size.{edge}", value, "must be a whole number of pixels; correct it")
        found.append(value)
    if found[0] > found[1]:
        raise refusal(where, "min_pixels", found[0], f"exceeds max_pixels={found[1]}; correct one of them")
    return found[0], found[1]


def _colours(where: str, key: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, list | tuple) and len(value) == 3 and all(type(one) in (int, float) for one in value):
        return tuple(map(float, value))
    raise refusal(where, key, value, "must be three numbers; correct it")


def refusal(where: str, key: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key}={as_json(value)}: {why}")
