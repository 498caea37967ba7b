"""preprocessor_config.json: sizes as transformers computes them, refusals by name, what a digest depends on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from batchspec.errors import CheckpointError
from batchspec.images.header import BadImage
from batchspec.images.processor import Fit, ImageProcessor, read_processor
from tests.helpers.image_models import PREPROCESSOR, picture


def processor(patch: int = 16, merge: int = 2, **keys: Any) -> ImageProcessor:
    values = {**PREPROCESSOR, "patch_size": patch, "merge_size": merge, **keys}
    return read_processor(values, "preprocessor_config.json", patch=patch, merge=merge, frames=2, placeholder=7)


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([(4, 1), (14, 2), (16, 2)]), st.integers(1, 10**6),
    st.integers(0, 10**7),
)
def test_sizes_are_those_of_transformers(height: int, width: int, unit: tuple[int, int], least: int, more: int) -> None:
    size = {"shortest_edge": least, "longest_edge": least + more}
    own = processor(*unit, size=size)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(BadImage, match="more than 200 times as long"):
            own.fit(height, width)
        return
    expected = smart_resize(height, width, factor=own.multiple, min_pixels=least, max_pixels=least + more)
    assert own.fit(height, width) == expected


def test_min_pixels_and_max_pixels_replace_those_of_size() -> None:
    own = processor(min_pixels=100, max_pixels=5000)
    assert (own.min_pixels, own.max_pixels) == (100, 5000)
    assert (processor(size={"min_pixels": 5, "max_pixels": 9}).min_pixels, processor().max_pixels) == (5, 4096)


def test_null_counts_as_missing_where_the_usual_value_is_null() -> None:
    assert processor(do_pad=None, crop_size=None, device=None) == processor()


FAST: dict[str, Any] = {
    "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None, "disable_grouping": None,
    "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_pad": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "input_data_format": None, "max_pixels": 12845056, "merge_size": 2,
    "min_pixels": 3136, "pad_size": None, "patch_size": 14, "processor_class": "Qwen2_5_VLProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "return_tensors": None, "size": {"longest_edge": 12845056, "shortest_edge": 3136},
    "temporal_patch_size": 2,
}
"""A whole file of a fast processor of transformers 4."""


@pytest.mark.parametrize("kind", [None, "Qwen2_5_VLImageProcessor"])
@pytest.mark.parametrize("square", [True, False, None])
def test_a_whole_file_of_a_fast_processor_is_read_and_default_to_square_changes_nothing(square: Any, kind: str | None) -> None:
    values = {**FAST, "default_to_square": square, "image_processor_type": kind or FAST["image_processor_type"]}
    own = read_processor(values, "preprocessor_config.json", patch=14, merge=2, frames=2, placeholder=7)
    assert (own.min_pixels, own.max_pixels) == (3136, 12845056)
    image = Image.open(io.BytesIO(picture(50, 71, 0)))
    theirs: Any = Qwen2VLImageProcessorPil(**values | {"image_processor_type": None})
    saved = theirs.to_dict() | {"image_processor_type": "Qwen2VLImageProcessor"}
    assert read_processor(saved, "preprocessor_config.json", patch=14, merge=2, frames=2, placeholder=7) == own
    _, height, width = theirs([image], return_tensors="pt")["image_grid_thw"][0].tolist()
    assert own.fit(50, 71) == Fit(14 * height, 14 * width)


def test_limits_on_pixels_of_a_job_or_a_row_replace_those_of_the_model() -> None:
    own = processor()
    assert own.within(None, None) == own
    assert own.within(2048, None).fit(32, 32) == smart_resize(32, 32, factor=32, min_pixels=2048, max_pixels=4096)
    assert own.within(None, 1024).fit(64, 64) == Fit(32, 32)
    for limits, said in (((None, 1023), "at least 1024"), ((5000, None), "min_pixels=5000 exceeds max_pixels=4096")):
        with pytest.raises(ValueError, match=said):
            own.within(*limits)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"do_sharpen": True}, "do_sharpen=true: unknown key"), ({"do_rescale": False}, "do_rescale=false: only true"),
        ({"resample": 2}, "resample=2: only 3"), ({"rescale_factor": 0.5}, "rescale_factor=0.5: only"),
        ({"image_mean": [0.5]}, "image_mean=.*three numbers"), ({"image_std": [0.5, 0, 1]}, "image_std=.*above 0"),
        ({"merge_size": 3}, "merge_size=3: config.json says 2"), ({"patch_size": 14}, "patch_size=14: config.json says 16"),
        ({"size": {"height": 4, "width": 4}}, "size=.*shortest_edge"),
        ({"size": {"shortest_edge": 4}}, "max_pixels or size.longest"),
        ({"min_pixels": 10**9}, "min_pixels=1000000000: exceeds max_pixels"),
        *(({name: None}, f"{name}=null: only") for name in ("do_normalize", "do_resize", "do_convert_rgb", "rescale_factor")),
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type=.*only Qwen2VL"),
    ],
)  # fmt: skip
def test_what_would_make_other_pixels_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^preprocessor_config.json: {said}"):
        processor(**keys) if not {"patch_size", "merge_size"} & {*keys} else read_processor(
            {**PREPROCESSOR, "patch_size": 16, **keys}, "preprocessor_config.json", patch=16, merge=2, frames=2, placeholder=7
        )


def test_a_digest_depends_on_the_encoded_image_and_on_its_size() -> None:
    digests = {processor().digest(data, Fit(*size)) for data in (b"a", b"b") for size in ((32, 64), (64, 32), (32, 32))}
    assert len(digests) == 6
