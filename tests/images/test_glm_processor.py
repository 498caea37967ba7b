"""Images of a Glm46VImageProcessor: sizes and pixels as transformers makes them; refusals by name."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Glm46VImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize

from batchspec.errors import CheckpointError
from batchspec.images.decode import decode
from batchspec.images.glm_processor import GlmProcessor, read_glm_processor
from batchspec.images.header import BadImage, read_header
from batchspec.images.processor import Fit
from batchspec.model.vision.blocks import merge_order
from tests.helpers.image_models import GLM
from tests.images.test_decode import made


def processor(patch: int = 4, merge: int = 2, frames: int = 2, **keys: Any) -> GlmProcessor:
    values = {**GLM, "patch_size": patch, "merge_size": merge, "temporal_patch_size": frames, **keys}
    return read_glm_processor(values, "preprocessor_config.json", patch=patch, merge=merge, frames=frames, placeholder=7)


@settings(max_examples=400)
@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(4, 1), (14, 2), (16, 2)]), st.integers(1, 3),
    st.integers(1, 10**6), st.integers(0, 10**7),
)
def test_sizes_are_those_of_transformers(
    height: int, width: int, unit: tuple[int, int], frames: int, least: int, more: int
) -> None:
    least, most = least * frames, (least + more) * frames
    own = processor(*unit, frames, size={"shortest_edge": least, "longest_edge": most})
    keys = {"factor": own.multiple, "temporal_factor": frames, "min_pixels": least, "max_pixels": most}
    try:
        expected = smart_resize(frames, height, width, **keys)
    except ValueError:  # for the ratio of the sides
        with pytest.raises(BadImage, match="more than 200 times as long"):
            own.fit(height, width)
        return
    assert own.fit(height, width) == expected


@pytest.mark.parametrize("sides", [(3, 20), (20, 3), (7, 7), (1, 150), (27, 28)])
def test_an_image_with_a_side_shorter_than_a_token_is_enlarged_first(sides: tuple[int, int]) -> None:
    own = processor(14, size={"shortest_edge": 2, "longest_edge": 2 * 10**6})
    assert own.fit(*sides) == smart_resize(2, *sides, factor=28, min_pixels=2, max_pixels=2 * 10**6)


FORMATS = (("RGB", "JPEG"), ("L", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("1", "TIFF"), ("RGBA", "WEBP"))


@settings(max_examples=80)
@given(st.sampled_from(FORMATS), st.integers(1, 90), st.integers(1, 90), st.integers(0, 99))
def test_pixels_are_those_of_transformers_bit_for_bit(kind: tuple[str, str], height: int, width: int, seed: int) -> None:
    own, data = processor(), made(*kind, height, width, seed)
    theirs: Any = Glm46VImageProcessorPil(**GLM | {"image_processor_type": None})
    expected = theirs([Image.open(io.BytesIO(data))], return_tensors="pt")
    header = read_header(data)
    fit = own.fit(header.height, header.width)
    rows, cols = fit.height // 4, fit.width // 4
    assert expected["image_grid_thw"].tolist() == [[1, rows, cols]]
    values = own.values[np.arange(3), decode(data, fit)].reshape(rows, 4, cols, 4, 3).transpose(0, 2, 4, 1, 3)
    places = merge_order((rows, cols), 2).numpy()
    found = values[places[0], places[1]][:, :, None].repeat(2, 2).reshape(rows * cols, -1)
    assert torch.equal(torch.from_numpy(found), expected["pixel_values"])
    assert len(own.tokens(*own.grid(fit))) == rows * cols // 4


def test_a_whole_file_is_read_and_limits_of_a_job_count_pixels_of_one_frame() -> None:
    values: dict[str, Any] = {
        "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "do_rescale": True, "patch_size": 14, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073], "do_resize": True, "do_normalize": True,
        "image_std": [0.26862954, 0.26130258, 0.27577711], "image_processor_type": "Glm46VImageProcessor",
        "processor_class": "Glm46VProcessor", "rescale_factor": 0.00392156862745098, "resample": 3, "do_convert_rgb": True,
    }
    own = read_glm_processor(values, "preprocessor_config.json", patch=14, merge=2, frames=2, placeholder=7)
    assert (own.min_pixels, own.max_pixels) == (6272, 4816896)
    saved = Glm46VImageProcessorPil(**values | {"image_processor_type": None}).to_dict()
    saved["image_processor_type"] = "Glm46VImageProcessorFast"
    assert read_glm_processor(saved, "preprocessor_config.json", patch=14, merge=2, frames=2, placeholder=7) == own
    least = {key: value for key, value in values.items() if key not in ("size", "image_mean", "image_std")}
    usual = read_glm_processor(least, "preprocessor_config.json", patch=14, merge=2, frames=2, placeholder=7)
    theirs: Any = Glm46VImageProcessorPil()
    assert (2 * usual.min_pixels, 2 * usual.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert (usual.mean, usual.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert own.within(784, 1024).fit(64, 64) == Fit(28, 28)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"min_pixels": 9}, "min_pixels=9: unknown"), ({"do_sharpen": True}, "do_sharpen=true: unknown"),
        ({"size": {"shortest_edge": 3, "longest_edge": 8}}, "size=.*multiples of 2"),
        ({"size": {"shortest_edge": 16, "longest_edge": 8}}, "size=.*shortest_edge exceeds"),
        ({"size": {"longest_edge": 8}}, "size=.*must be shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 4, "longest_edge": 8, "height": 4}}, "size=.*must be shortest_edge and longest_edge"),
        ({"image_processor_type": "Glm4vImageProcessor"}, "image_processor_type=.*only Glm46VImageProcessor"),
        ({"resample": 2}, "resample=2: only 3"), ({"image_std": [1, 0, 1]}, "image_std=.*above 0"),
    ],
)  # fmt: skip
def test_what_would_make_other_pixels_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^preprocessor_config.json: {said}"):
        processor(**keys)
    with pytest.raises(CheckpointError, match=r"temporal_patch_size=2: config\.json says 1"):
        read_glm_processor(GLM, "", patch=4, merge=2, frames=1, placeholder=7)
