"""cache.state_dtype: the states of recurrent layers in bf16. The model, the plan and the job's identity follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import run
from batchspec.cache.layer_state import RowTensor
from batchspec.cache.pages import KVCache
from batchspec.commands.decode_again import other_cache
from batchspec.commands.planning import plan
from batchspec.config.compose import compose
from batchspec.errors import ConfigError, OutputError
from batchspec.job.prepare import Job, open_job
from batchspec.job.runner.identity import job_fingerprint
from batchspec.job.runner.job_run import open_run
from batchspec.model.layers.base import Shard
from batchspec.model.shard import part_of
from batchspec.model.spec import ModelSpec
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.model.test_recurrent_families import SHAPE

STATES = 2 * 6 * 14 * 10
"""Numbers in the states of a row: two recurrent layers, value heads, their size, that of a key head."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**SHAPE, "num_hidden_layers": 3, "full_attention_interval": 3, "num_attention_heads": 6, "num_key_value_heads": 3}
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("recurrent"), "qwen3_5_text", **config))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "in.parquet"
    pl.DataFrame({"prompt": ["one two three " * (1 + 2 * i) for i in range(5)]}).write_parquet(file)
    return file


def states_of(spec: ModelSpec, dtype: torch.dtype) -> list[RowTensor]:
    return [kept.row[0] for kept in spec.layer_states(dtype, 1, draft_len=0) if kept.row]


def words(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"input.path={data}", f"output.dir={out}", "device=cpu", "decode.max_new_tokens=12",
        "model.dtype=float32", *more,
    ]


def opened(model: Path, data: Path, *more: str) -> Job:
    return open_job(compose(words(model, data, data.parent / "out", *more)))


@pytest.mark.second
@pytest.mark.parametrize(("value", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_run_keeps_its_states_in_this_dtype(
    value: str, dtype: torch.dtype, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[KVCache] = []
    allocate = KVCache.allocate

    def noted(*args: Any, **options: Any) -> KVCache:
        caches.append(allocate(*args, **options))
        return caches[-1]

    monkeypatch.setattr(KVCache, "allocate", noted)
    assert run.main(words(model, data, tmp_path / "out", f"cache.state_dtype={value}", "draft=lookup")) == 0
    assert {own.rows[0].dtype for cache in caches for own in cache.kept if own.rows} == {dtype}
    assert pl.read_parquet(tmp_path / "out" / "data" / "*.parquet")["error"].null_count() == 5


@pytest.mark.parametrize(
    ("more", "numbers"), [([], "6.72 kB a row in float32"), (["model.dtype=float64"], "13.4 kB a row in float64")]
)
def test_the_plan_says_what_the_states_of_a_row_take(more: list[str], numbers: str, model: Path, data: Path) -> None:
    job = opened(model, data, *more)
    line = f"states       {numbers}, of 2 recurrent layers"
    made = plan(job.config)
    assert line in made.text().splitlines()
    assert made.batch is not None
    moved = made.batch.num_slots * STATES * job.dtype.itemsize / 1e3
    assert f" of K/V, and reads and writes {moved:.3g} kB of states\n" in made.text()
    assert sum(state.nbytes for state in states_of(job.spec, job.dtype)) == STATES * job.dtype.itemsize


def test_states_in_bf16_are_half_as_large_on_every_rank(model: Path, data: Path) -> None:
    job = opened(model, data, "cache.state_dtype=bfloat16")
    assert "states       3.36 kB a row in bfloat16" in plan(job.config).text()
    part = part_of(job.spec, Shard(1, 3))
    assert {state.dtype for spec in (part, part.whole) if spec for state in states_of(spec, job.dtype)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["cache.state_dtype=float16"], "cache.state_dtype=float16 must be one of auto, bfloat16"),
        (
            ["cache.state_dtype=bfloat16", "model.dtype=float64"],
            "cache.state_dtype=bfloat16 has no effect in float64, whose states are in float64 too; remove the key",
        ),
    ],
)
def test_another_value_is_refused_by_name(more: list[str], said: str, model: Path, data: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(model, data, *more)
    assert said in str(caught.value)


def test_a_model_without_recurrent_layers_is_refused_by_name(data: Path, tmp_path: Path) -> None:
    plain = make_tokenizer(make_checkpoint(tmp_path, "llama"))
    opened(plain, data)
    said = "^cache.state_dtype=bfloat16 applies to recurrent layers, and llama has none; remove the key$"
    with pytest.raises(ConfigError, match=said):
        opened(plain, data, "cache.state_dtype=bfloat16")


def test_states_of_another_dtype_are_another_job(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run.main(words(model, data, out)) == 0
    other = open_job(compose(words(model, data, out, "cache.state_dtype=bfloat16")))
    assert job_fingerprint(other)["cache.state_dtype"] == '"bfloat16"'
    with pytest.raises(OutputError, match=r'holds another job \(cache.state_dtype: "auto" -> "bfloat16"\)'):
        open_run(other)


def test_the_other_cache_of_verify_has_the_jobs_own_states(model: Path, data: Path) -> None:
    """`verify --kv` compares data types of K and V alone."""
    job = opened(model, data, "cache.state_dtype=bfloat16")
    assert (other_cache(job).dtype, other_cache(job).state_dtype) == ("fp8", "bfloat16")
