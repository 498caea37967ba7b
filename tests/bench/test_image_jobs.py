"""image_jobs.py: folders of shapes that batchspec and transformers read, and whole jobs over pages and photos."""

from __future__ import annotations

import importlib
import shlex
from math import prod
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tokenizers import Tokenizer
from transformers import AutoConfig

from batchspec import run
from batchspec.model.spec import load_spec
from batchspec.model.vision.registry import load_vision

JOBS = Path(__file__).parents[2] / "jobs"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(JOBS / "benchmarks")
    image_jobs: Any = importlib.import_module("image_jobs")


@pytest.mark.parametrize(
    ("shape", "billions"), [("qwen3-vl-8b", 8.19), ("qwen3-vl-2b", 1.72), ("qwen3.5-9b", 8.95), ("tiny", 0.0)]
)
def test_a_shape_has_the_weights_of_its_model_and_marks_that_are_single_tokens(
    shape: str, billions: float, tmp_path: Path
) -> None:
    folder = image_jobs.write_model(tmp_path, shape)
    spec, vision = load_spec(folder), load_vision(folder)
    assert sum(prod(tensor.shape) for tensor in spec.tensors()) / 1e9 == pytest.approx(billions, abs=0.02)
    config, tokenizer = AutoConfig.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>a").ids
    assert ids[:3] == [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
    assert vision.processor.placeholder == config.image_token_id
    assert tokenizer.get_vocab_size() > config.image_token_id
    assert tokenizer.decode([300, 301]) == "w300w301"
    rows, cols = vision.processor.grid(vision.processor.fit(2339, 1654))
    assert (rows * cols, (rows * 32, cols * 32)) == (image_jobs.PAGE_TOKENS, (1728, 1216))
    rows, cols = vision.processor.grid(vision.processor.fit(image_jobs.PHOTO, image_jobs.PHOTO))
    assert rows * cols == image_jobs.PHOTO_TOKENS


@pytest.mark.second
@pytest.mark.parametrize(("kind", "tokens"), [("pages", 2052), ("photos", 196)])
def test_the_job_that_it_writes_runs(kind: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_jobs.main([str(tmp_path), "--shape", "tiny", f"--{kind}", "3", "--gen", "4", "--processes", "1"])
    command = capsys.readouterr().out.splitlines()[1].removeprefix("python -m batchspec.run ")
    assert run.main([*shlex.split(command), "model.dtype=float32", "device=cpu"]) == 0
    rows = pl.read_parquet(tmp_path / "out/data").sort("row_index")
    assert rows["id"].to_list() == [f"{kind}-{i:05d}" for i in range(3)]
    usage = rows["usage"].struct.unnest()
    assert usage["image_tokens"].to_list() == [tokens] * 3
    assert usage["completion_tokens"].to_list() == [4] * 3
    assert rows["image_digest"].n_unique() == 3
