"""image_jobs.py: folders of shapes that batchspec and transformers read, and whole jobs over pages and photos."""

from __future__ import annotations

import importlib
import shlex
from math import prod
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma4ImageProcessorPil, Qwen2VLImageProcessorPil

from batchspec import run
from batchspec.model.spec import load_spec
from batchspec.model.vision.registry import load_vision

JOBS = Path(__file__).parents[2] / "jobs"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(JOBS / "benchmarks")
    image_jobs: Any = importlib.import_module("image_jobs")


TINY: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {
        "text_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    },
    "gemma4-26b-a4b": {
        "text_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 32, "vocab_size": 512,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 16,
        },
    },
}
"""Keys that make a shape small enough for a CPU."""


@pytest.mark.parametrize(
    ("shape", "billions", "read", "tokens"),
    [
        ("qwen3-vl-8b", 8.19, (1728, 1216), (2052, 196)), ("qwen3-vl-2b", 1.72, (1728, 1216), (2052, 196)),
        ("qwen3.5-9b", 8.95, (1728, 1216), (2052, 196)), ("tiny", 0.0, (1728, 1216), (2052, 196)),
        ("qwen2.5-vl-7b", 7.62, (1512, 1064), (2052, 256)), ("gemma4-26b-a4b", 25.24, (912, 672), (268, 282)),
    ],
)
def test_a_shape_has_the_weights_of_its_model_and_marks_that_are_single_tokens(
    shape: str, billions: float, read: tuple[int, int], tokens: tuple[int, int], tmp_path: Path
) -> None:
    """read, tokens: the size to which a page is resized, and the tokens of a page and of a photo with those around them."""
    folder, own = image_jobs.write_model(tmp_path, shape), image_jobs.folder_files(shape)
    spec, vision = load_spec(folder), load_vision(folder)
    assert sum(prod(tensor.shape) for tensor in spec.tensors()) / 1e9 == pytest.approx(billions, abs=0.02)
    config, tokenizer = AutoConfig.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for key, text in own.ids.items():
        assert tokenizer.encode(f"a{text}a").ids[1:-1] == [getattr(config, key)]
    assert vision.processor.placeholder == config.image_token_id
    assert tokenizer.get_vocab_size() > config.image_token_id
    assert tokenizer.decode([300, 301]) == "w300w301"
    assert vision.processor.fit(2339, 1654) == read
    assert (image_jobs.image_tokens(folder, (2339, 1654)), image_jobs.image_tokens(folder, own.photo)) == tokens


@pytest.mark.second
@pytest.mark.parametrize("shape", list(image_jobs.SHAPES))
def test_a_shape_has_as_many_numbers_in_its_weights_as_the_model_that_transformers_builds(shape: str, tmp_path: Path) -> None:
    folder, auto = image_jobs.write_model(tmp_path, shape), cast("Any", AutoModelForImageTextToText)
    with torch.device("meta"):
        theirs = auto.from_config(AutoConfig.from_pretrained(folder))
    of_files = {name: own for name, own in theirs.named_buffers() if name.endswith(("std_bias", "std_scale", "layer_scalar"))}
    expected = sum(own.numel() for own in (dict(theirs.named_parameters()) | of_files).values())
    own = (load_spec(folder), load_vision(folder))
    assert sum(prod(tensor.shape) for part in own for tensor in part.tensors()) == expected


@pytest.mark.parametrize("shape", ["qwen3-vl-8b", "qwen2.5-vl-7b", "gemma4-26b-a4b"])
def test_a_photo_has_as_many_tokens_for_the_image_processor_of_transformers(shape: str, tmp_path: Path) -> None:
    folder, (height, width) = image_jobs.write_model(tmp_path, shape), image_jobs.folder_files(shape).photo
    image, tokens = Image.new("RGB", (width, height)), image_jobs.image_tokens(folder, (height, width))
    if shape == "gemma4-26b-a4b":
        (found,) = Gemma4ImageProcessorPil.from_pretrained(folder)(image)["num_soft_tokens_per_image"]
        assert found == tokens - 2
    else:
        (grid,) = Qwen2VLImageProcessorPil.from_pretrained(folder)(image)["image_grid_thw"]
        assert prod(grid) // 4 == tokens


@pytest.mark.second
@pytest.mark.parametrize(
    ("shape", "kind", "tokens"),
    [
        ("tiny", "pages", 2052), ("tiny", "photos", 196), ("qwen2.5-vl-7b", "pages", 2052), ("gemma4-26b-a4b", "photos", 280),
    ],
)
def test_the_job_that_it_writes_runs(
    shape: str, kind: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = image_jobs.SHAPES[shape]
    small = {part: config[part] | keys for part, keys in TINY.get(shape, {}).items()}
    monkeypatch.setitem(image_jobs.SHAPES, shape, config | small)
    image_jobs.main([str(tmp_path), "--shape", shape, f"--{kind}", "3", "--gen", "4", "--processes", "1"])
    command = capsys.readouterr().out.splitlines()[1].removeprefix("python -m batchspec.run ")
    assert run.main([*shlex.split(command), "model.dtype=float32", "device=cpu"]) == 0
    rows = pl.read_parquet(tmp_path / "out/data").sort("row_index")
    assert rows["id"].to_list() == [f"{kind}-{i:05d}" for i in range(3)]
    usage = rows["usage"].struct.unnest()
    assert usage["image_tokens"].to_list() == [tokens] * 3
    assert usage["completion_tokens"].to_list() == [4] * 3
    assert rows["image_digest"].n_unique() == 3
