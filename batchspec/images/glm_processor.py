"""How a model's images are resized, from the preprocessor_config.json of a Glm46VImageProcessor: as Qwen's, but limits count the
pixels of all frames, and an image with a side shorter than a token is enlarged first.

Source: transformers 5, models/glm46v/image_processing_pil_glm46v.py."""

from __future__ import annotations

from dataclasses import dataclass

from batchspec.checkpoint.config_values import Json
from batchspec.images.processor import Fit, ImageProcessor, check_known, check_sizes, check_usual, colours_of, refusal

_TYPES = ("Glm46VImageProcessor", "Glm46VImageProcessorFast", "Glm46VImageProcessorPil", None)
_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000}


@dataclass(frozen=True)
class GlmProcessor(ImageProcessor):
    """min_pixels and max_pixels are those of one frame."""

    def fit(self, height: int, width: int) -> Fit:
        unit = self.multiple
        if min(height, width) < unit:
            grow = max(unit / height, unit / width)
            height, width = int(height * grow), int(width * grow)
        return super().fit(height, width)


def read_glm_processor(values: Json, where: str, *, patch: int, merge: int, frames: int, placeholder: int) -> GlmProcessor:
    """As `read_processor`."""
    rest = check_usual(values, where, _TYPES)
    check_sizes(where, rest, patch, merge, frames)
    size = rest.pop("size", None) or _SIZE
    given = [size[key] for key in _SIZE] if isinstance(size, dict) and {*size} == {*_SIZE} else []
    limits = [own // frames for own in given if type(own) is int and 1 <= own <= 2**40 and own % frames == 0]
    if len(limits) != len(_SIZE):
        said = f"must be shortest_edge and longest_edge, pixels of {frames} frames and multiples of {frames}; correct it"
        raise refusal(where, "size", size, said)
    low, high = limits
    if low > high:
        raise refusal(where, "size", size, "shortest_edge exceeds longest_edge; correct one of them")
    mean, std = colours_of(where, rest)
    check_known(where, rest)
    return GlmProcessor(
        patch=patch, merge=merge, frames=frames, min_pixels=low, max_pixels=high, mean=mean, std=std, placeholder=placeholder
    )
