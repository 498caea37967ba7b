"""preprocessor_config.json: sizes as transformers computes them, refusals by name, what a digest depends on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from batchspec.errors import CheckpointError
from batchspec.images.header import BadImage
from batchspec.images.processor import Fit, ImageProcessor, read_processor
from tests.helpers.image_models import PREPROCESSOR


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
