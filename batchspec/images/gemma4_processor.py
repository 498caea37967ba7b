"""How images become pixels and tokens of Gemma 4, from the image processor of its processor_config.json: an image gets the
largest size with at most max_soft_tokens tokens, and a token of text before and after it.

Source: transformers 5, models/gemma4/image_processing_pil_gemma4.py and processing_gemma4.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchspec.checkpoint.config_values import Json
from batchspec.images.processor import Fit, ImageProcessor, check_usual, refusal

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Values of max_soft_tokens."""
_UNREAD = ("image_mean", "image_std", "size", "image_seq_length")
"""Keys that change nothing: without do_normalize no colour is normalised, and sizes follow from max_soft_tokens."""


@dataclass(frozen=True)
class Gemma4Processor(ImageProcessor):
    """max_pixels is that of max_soft_tokens tokens."""

    image_begin: int
    """The token before an image."""
    image_end: int
    """The token after it."""
    whole: bool
    """Whether its tokens attend to each other."""
    most_tokens: int = SOFT_TOKENS[-1]
    """Limit on the tokens of an image: that of the encoder's tables of positions."""

    @property
    def _area(self) -> int:
        """Pixels of a token."""
        return self.multiple**2

    def within(self, least: int | None, most: int | None) -> ImageProcessor:
        if least is not None:
            raise ValueError(f"min_pixels={least} does not apply to this model, which makes each image as large as max_pixels")
        allowed = [count * self._area for count in SOFT_TOKENS]
        if most is not None and most not in allowed:
            raise ValueError(
                f"max_pixels={most} must be one of {', '.join(map(str, allowed))}, the pixels of "
                f"{', '.join(map(str, SOFT_TOKENS))} tokens"
            )
        if most is not None and most > self.most_tokens * self._area:
            raise ValueError(
                f"max_pixels={most} is {most // self._area} tokens, and the model's tables of positions hold {self.most_tokens}"
            )
        return self if most is None else replace(self, max_pixels=most)

    def fit(self, height: int, width: int) -> Fit:
        """The largest size with the ratio of these sides, rounded down to tokens; a side has at least one."""
        factor, unit = math.sqrt(self.max_pixels / (height * width)), self.multiple
        rows, cols = math.floor(factor * height / unit), math.floor(factor * width / unit)
        most = self.max_pixels // self._area
        if not rows:
            rows, cols = 1, min(width // height, most)
        elif not cols:
            rows, cols = min(height // width, most), 1
        return Fit(rows * unit, cols * unit)

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.image_begin,), (self.image_end,)

    @property
    def most_whole(self) -> int:
        return self.max_pixels // self._area if self.whole else 0

    def advance(self, rows: int, cols: int) -> int:
        return rows * cols


def read_gemma4_processor(
    values: Json, where: str, *, types: tuple[str, ...], patch: int, merge: int, placeholder: int, image_begin: int,
    image_end: int, whole: bool,
) -> Gemma4Processor:
    """The processor of an image processor's file, whose pixels are 0 to 255 divided by 255.

    types   names of its class; patch, merge: patch_size and pooling_kernel_size of config.json
    whole   `Gemma4Processor.whole`; the others: ids of tokens
    Raises CheckpointError for an unknown key, a value that would change the pixels, and what does not fit config.json.
    """
    rest = {key: value for key, value in values.items() if key not in _UNREAD}
    rest = check_usual(rest, where, (*types, None), do_normalize=(False,))
    for key, (own, usual) in {"patch_size": (patch, 16), "pooling_kernel_size": (merge, 3)}.items():
        if (given := rest.pop(key, usual)) != own:
            raise refusal(where, key, given, f"config.json says {own}; correct one of them")
    if (side := rest.pop("model_patch_size", patch * merge)) != patch * merge:
        raise refusal(where, "model_patch_size", side, f"must be {patch * merge}, as its other keys say; correct it")
    tokens = rest.pop("max_soft_tokens", 280)
    if tokens not in SOFT_TOKENS or type(tokens) is not int:
        raise refusal(where, "max_soft_tokens", tokens, f"must be one of {', '.join(map(str, SOFT_TOKENS))}; correct it")
    if rest:
        key, value = next(iter(rest.items()))
        raise refusal(where, key, value, "unknown key, which may change pixels; remove it if it does not")
    area = (patch * merge) ** 2
    return Gemma4Processor(
        patch=patch, merge=merge, frames=1, min_pixels=area, max_pixels=tokens * area, mean=(0.0,) * 3, std=(1.0,) * 3,
        placeholder=placeholder, image_begin=image_begin, image_end=image_end, whole=whole,
    )
