"""Images of Gemma 4's kind: sizes, pixels and tokens as transformers makes them; refusals by name."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Gemma4ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from batchspec.errors import BadRow, CheckpointError
from batchspec.images.decode import decode
from batchspec.images.gemma4_processor import SOFT_TOKENS, Gemma4Processor, read_gemma4_processor
from batchspec.packing.prompt_images import PromptImages
from tests.helpers.image_models import GEMMA4, picture

PUBLISHED: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280, "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"height": 224, "width": 224},
}
"""image_processor of the 31B's processor_config.json."""


def processor(patch: int = 4, merge: int = 3, whole: bool = True, **keys: Any) -> Gemma4Processor:
    values = {**GEMMA4, "patch_size": patch, "pooling_kernel_size": merge, **keys}
    return read_gemma4_processor(
        values, "processor_config.json", types=("Gemma4ImageProcessor",), patch=patch, merge=merge, placeholder=7, image_begin=8,
        image_end=9, whole=whole,
    )


def test_max_pixels_are_refused_that_the_tables_of_positions_do_not_hold() -> None:
    own = replace(processor(), most_tokens=280)
    area = own.multiple**2
    assert own.within(None, 280 * area).max_pixels == 280 * area
    with pytest.raises(ValueError, match=f"max_pixels={560 * area} is 560 tokens, and the model's tables of positions hold 280"):
        own.within(None, 560 * area)


@settings(max_examples=400)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([(16, 3), (4, 3), (5, 2)]), st.sampled_from(SOFT_TOKENS))
@example(1, 9000, (16, 3), 70)
@example(9000, 1, (16, 3), 1120)
def test_sizes_are_those_of_transformers(height: int, width: int, patch: tuple[int, int], tokens: int) -> None:
    own = processor(*patch, max_soft_tokens=tokens)
    fit = own.fit(height, width)
    assert fit == get_aspect_ratio_preserving_size(height, width, patch[0], tokens * patch[1] ** 2, patch[1])
    rows, cols = own.grid(fit)
    assert 1 <= rows * cols <= tokens == own.most_whole


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 90), st.integers(2, 90), st.integers(0, 99), st.sampled_from([70, 140]))
def test_pixels_are_those_of_transformers_bit_for_bit(height: int, width: int, seed: int, tokens: int) -> None:
    own, data = processor(max_soft_tokens=tokens), picture(height, width, seed)
    theirs: Any = Gemma4ImageProcessorPil(**GEMMA4 | {"image_processor_type": None, "max_soft_tokens": tokens})
    made = theirs([Image.open(io.BytesIO(data))], return_tensors="pt")
    fit = own.fit(height, width)
    found = own.values[np.arange(3), decode(data, fit)]  # [H, W, 3]
    cells = torch.from_numpy(found).unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).transpose(1, 2).reshape(-1, 48)
    assert torch.equal(cells, made["pixel_values"][0, : len(cells)])
    assert not made["pixel_values"][0, len(cells) :].any()
    assert int(np.prod(own.grid(fit))) == int(made["num_soft_tokens_per_image"][0])


def test_the_published_file_is_read() -> None:
    assert processor(16, **PUBLISHED) == processor(16, max_soft_tokens=280)
    saved = Gemma4ImageProcessorPil(**PUBLISHED | {"image_processor_type": None}).to_dict()
    assert processor(16, **saved | {"image_processor_type": "Gemma4ImageProcessor"}) == processor(16, max_soft_tokens=280)
    assert processor(16, whole=False, **PUBLISHED).most_whole == 0


def test_an_image_has_a_token_of_text_before_it_and_after_it() -> None:
    own, data = processor(), picture(7, 9)
    rows, cols = own.grid(own.fit(7, 9))
    found = PromptImages(own, True, None).expanded(np.array([1, 7, 2, 7], np.int32), [data, data], {})
    image = [8, *[7] * (rows * cols), 9]
    assert found.ids.tolist() == [1, *image, 2, *image]
    for piece, begin in zip(found.images, (2, 5 + rows * cols), strict=True):
        assert (piece.begin, piece.length, piece.advance, piece.whole) == (begin, rows * cols, rows * cols, True)
        assert set(found.ids[piece.begin : piece.begin + piece.length].tolist()) == {7}
    (piece,) = PromptImages(processor(whole=False), True, None).expanded(np.array([7], np.int32), [data], {}).images
    assert not piece.whole


def test_limits_on_pixels_choose_the_number_of_tokens() -> None:
    own = processor(16, max_soft_tokens=560)
    assert own.within(None, None) is own
    assert own.within(None, 280 * 48**2) == processor(16, max_soft_tokens=280)
    with pytest.raises(ValueError, match=r"max_pixels=64 must be one of 161280, 322560, .*, the pixels of 70, 140, 280"):
        own.within(None, 64)
    with pytest.raises(ValueError, match="min_pixels=64 does not apply"):
        own.within(64, None)
    images = PromptImages(own, True, None)
    assert images.processor_of({"max_pixels": 70 * 48**2}).max_pixels == 70 * 48**2
    with pytest.raises(BadRow, match="exceeds the job's limit"):
        images.processor_of({"max_pixels": 1120 * 48**2})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"do_normalize": True}, "do_normalize=true: only false"), ({"do_sharpen": True}, "do_sharpen=true: unknown key"),
        ({"patch_size": 8}, "patch_size=8: config.json says 4"), ({"pooling_kernel_size": 2}, "pooling_kernel_size=2: config"),
        ({"max_soft_tokens": 71}, "max_soft_tokens=71: must be one of 70, 140, 280, 560, 1120"),
        ({"max_soft_tokens": 70.0}, "max_soft_tokens=70.0: must"), ({"model_patch_size": 13}, "model_patch_size=13: must be 12"),
        ({"image_processor_type": "Gemma3ImageProcessor"}, "image_processor_type=.*only Gemma4ImageProcessor"),
        ({"resample": 2}, "resample=2: only 3"), ({"do_resize": False}, "do_resize=false: only true"),
    ],
)  # fmt: skip
def test_what_would_make_other_pixels_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^processor_config.json: {said}"):
        read_gemma4_processor(
            {**GEMMA4, **keys}, "processor_config.json", types=("Gemma4ImageProcessor",), patch=4, merge=3, placeholder=7,
            image_begin=8, image_end=9, whole=True,
        )
