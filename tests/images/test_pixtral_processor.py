"""Images of Pixtral's kind: sizes, pixels and tokens as transformers makes them; refusals by name."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PixtralImageProcessorPil
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

from batchspec.errors import BadRow, CheckpointError
from batchspec.images.decode import decode
from batchspec.images.header import BadImage
from batchspec.images.pixtral_processor import (
    LongestEdgeProcessor,
    PixtralProcessor,
    read_longest_edge_processor,
    read_pixtral_processor,
)
from batchspec.packing.prompt_images import PromptImages
from tests.helpers.image_models import PIXTRAL, picture
from tests.images.test_decode import made


def processor(patch: int = 4, **keys: Any) -> PixtralProcessor:
    values = {**PIXTRAL, "patch_size": patch, **keys}
    return read_pixtral_processor(
        values, "preprocessor_config.json", patch=patch, merge=2, placeholder=7, row_end=8, image_end=9
    )


def of_lighton(patch: int = 4, merge: int = 2, **keys: Any) -> LongestEdgeProcessor:
    """The processor of LightOnOCR."""
    values, units = {**PIXTRAL, "patch_size": patch, **keys}, {patch: patch, patch * merge: patch * merge}
    return read_longest_edge_processor(
        values, "preprocessor_config.json", patch=patch, merge=merge, placeholder=7, units=units
    )


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([4, 14, 16]), st.integers(1, 2000))
def test_sizes_are_those_of_transformers(height: int, width: int, patch: int, longest: int) -> None:
    own, unit = processor(patch, size={"longest_edge": longest}), (2 * patch, 2 * patch)
    image: Any = np.zeros((height, width, 1), np.uint8)
    expected = get_resize_output_image_size(image, (longest, longest), unit, ChannelDimension.LAST)
    if not min(expected):
        with pytest.raises(BadImage, match="nothing is left of one side"):
            own.fit(height, width)
        return
    fit = own.fit(height, width)
    assert fit == expected
    assert fit.height * fit.width <= own.max_pixels


@settings(max_examples=60)
@given(st.integers(2, 90), st.integers(2, 90), st.integers(0, 99))
def test_pixels_are_those_of_transformers_bit_for_bit(height: int, width: int, seed: int) -> None:
    own, data = processor(), picture(height, width, seed)
    theirs: Any = PixtralImageProcessorPil(**PIXTRAL | {"image_processor_type": None})
    expected = theirs([Image.open(io.BytesIO(data))], patch_size=8, return_tensors="pt")["pixel_values"][0]
    found = own.values[np.arange(3), decode(data, own.fit(height, width))]  # [H, W, 3]
    assert torch.equal(torch.from_numpy(found).permute(2, 0, 1), expected)


@pytest.mark.parametrize("square", [True, False, None])
def test_a_whole_file_of_a_fast_processor_is_read_and_default_to_square_changes_nothing(square: bool | None) -> None:
    values: dict[str, Any] = {
        "crop_size": None, "data_format": "channels_first", "default_to_square": square, "device": None, "do_center_crop": None,
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.4, 0.5],
        "image_processor_type": "PixtralImageProcessorFast", "image_std": [0.5, 0.3, 0.5], "input_data_format": None,
        "patch_size": {"height": 4, "width": 4}, "processor_class": "PixtralProcessor", "resample": 3,
        "rescale_factor": 0.00392156862745098, "return_tensors": None, "size": {"longest_edge": 61},
    }  # of transformers 4
    saved = PixtralImageProcessorPil(**values | {"image_processor_type": None}).to_dict()
    for own in (values, saved | {"image_processor_type": "PixtralImageProcessor"}):
        found = read_pixtral_processor(
            own, "preprocessor_config.json", patch=4, merge=2, placeholder=7, row_end=8, image_end=9
        )
        assert found == processor()


def test_rows_of_embeddings_end_with_tokens_of_text() -> None:
    own = processor()
    assert own.grid(own.fit(16, 20)) == (2, 3)
    assert own.tokens(2, 3).tolist() == [7, 7, 7, 8, 7, 7, 7, 9]
    assert own.tokens(1, 1).tolist() == [7, 9]
    assert own.advance(2, 3) == 8


def test_limits_on_pixels_do_not_apply() -> None:
    own = processor()
    assert own.within(None, None) is own
    with pytest.raises(ValueError, match="max_pixels=64 does not apply to this model, which limits the longer side to 61"):
        own.within(None, 64)
    with pytest.raises(ValueError, match="min_pixels=64 does not apply"):
        own.within(64, None)
    with pytest.raises(BadRow, match=r"max_pixels=999999999 does not apply to this model.* leave it null$"):
        PromptImages(own, True, None).processor_of({"max_pixels": 999_999_999})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"do_pad": False}, "do_pad=false: only true"), ({"do_sharpen": True}, "do_sharpen=true: unknown key"),
        ({"patch_size": {"height": 4, "width": 2}}, "patch_size=.*config.json says 4"),
        ({"min_pixels": 9}, "min_pixels=9: unknown"),
        ({"size": {"height": 4, "width": 4}}, "size=.*longest_edge"), ({"size": {"longest_edge": 0}}, "size=.*longest_edge"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type=.*only PixtralImageProcessor"),
        ({"resample": 2}, "resample=2: only 3"), ({"image_std": [1, 0, 1]}, "image_std=.*above 0"),
    ],
)  # fmt: skip
def test_what_would_make_other_pixels_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^preprocessor_config.json: {said}"):
        read_pixtral_processor(
            {**PIXTRAL, **keys}, "preprocessor_config.json", patch=4, merge=2, placeholder=7, row_end=8, image_end=9
        )


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(4, 2), (14, 2), (5, 3)]), st.booleans(), st.integers(30, 2000)
)
def test_sizes_of_lighton_are_whole_patches_or_whole_tokens(
    height: int, width: int, sides: tuple[int, int], tokens: bool, longest: int
) -> None:
    """As patch_size says, with transformers. An image of fewer patches than a token has is refused: transformers fails there."""
    patch, merge = sides
    unit = patch * merge if tokens else patch
    own = of_lighton(patch, merge, patch_size=unit, size={"longest_edge": longest})
    image = np.zeros((height, width, 1), np.uint8)
    expected = get_resize_output_image_size(image, (longest, longest), (unit, unit), ChannelDimension.LAST)
    if min(expected) < patch * merge:
        with pytest.raises(BadImage, match=r"nothing is left of one side|pixels become .* and a token is"):
            own.fit(height, width)
        return
    fit = own.fit(height, width)
    rows, cols = own.grid(fit)
    assert fit == expected
    assert (rows, cols) == (expected[0] // (patch * merge), expected[1] // (patch * merge))
    assert own.tokens(rows, cols).tolist() == [7] * (rows * cols)
    assert own.advance(rows, cols) == rows * cols
    assert fit.height * fit.width <= min(own.max_pixels, own.most_token_pixels * rows * cols)


@settings(max_examples=60)
@given(
    st.sampled_from([("RGB", "JPEG"), ("L", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("LA", "WEBP")]),
    st.integers(5, 90), st.integers(5, 90), st.integers(0, 99), st.sampled_from([4, 8]),
)
def test_pixels_of_lighton_are_those_of_transformers_bit_for_bit(
    kind: tuple[str, str], height: int, width: int, seed: int, unit: int
) -> None:
    own, data = of_lighton(patch_size={"height": unit, "width": unit}), made(*kind, height, width, seed)
    theirs: Any = PixtralImageProcessorPil(**PIXTRAL | {"image_processor_type": None, "patch_size": unit})
    expected = theirs([Image.open(io.BytesIO(data))], return_tensors="pt")["pixel_values"][0]
    if min(expected.shape[1:]) < 8:
        return
    found = own.values[np.arange(3), decode(data, own.fit(height, width))]  # [H, W, 3]
    assert torch.equal(torch.from_numpy(found).permute(2, 0, 1), expected)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"patch_size": 6}, "patch_size=6: config.json says 4 or 8"),
        ({"size": {"longest_edge": 4}}, r"size=\{.longest_edge.: 4\}: leaves no image the 8 pixels of a token"),
        ({"do_sharpen": True}, "do_sharpen=true: unknown key"),
    ],
)
def test_what_a_processor_of_lighton_cannot_mean_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^preprocessor_config.json: {said}"):
        of_lighton(**keys)
    with pytest.raises(CheckpointError, match=r"patch_size=16: config\.json says 4 or 8"):
        read_longest_edge_processor(
            {"size": {"longest_edge": 61}}, "", patch=4, merge=2, placeholder=7, units={4: 4, 8: 8}
        )
