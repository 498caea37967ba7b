"""Whole jobs whose model several GPUs compute: the rows that one GPU writes. On a machine with one GPU two ranks share it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import batchspec
from batchspec.errors import RankLost
from batchspec.model.spec import load_spec
from batchspec.warm.ranks import EngineOfRanks
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint, make_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS = 48
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
MOE: dict[str, Any] = {**HEADS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {**HEADS, "hidden_size": 256, "intermediate_size": 512},
    "qwen3_moe": {**MOE, "moe_intermediate_size": 256, "num_experts": 12, "num_experts_per_tok": 3},
    "gpt_oss": {**MOE, "num_local_experts": 12, "num_experts_per_tok": 3, "sliding_window": 32},
    "minimax_m2": {**MOE, "num_local_experts": 12, "num_experts_per_tok": 3, "rotary_dim": 32},
    "phi3": {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512, "intermediate_size": 512},
}
"""Families with their exchanges: of all, of experts, of sinks and windows, of a norm over the heads of all ranks; and one with
tensors that hold several projections."""
INNER_SIZES = {"fp8": 640, "mxfp4": 160}
"""Five blocks: ranks have different numbers of them."""
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "mlp.gate", "block_sparse_moe.gate"],
        }
    },
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]}},
}
SAMPLED = ["decode.temperature=0.9", "decode.top_p=0.95", "decode.repetition_penalty=1.1", "decode.stop=[a]"]
ROUNDING = 1e-3
COUNTS = [2, pytest.param(4, marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs"))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "in.parquet"
    texts = [f"{i} and {i * i}, " * (1 + i % 7) for i in range(ROWS)]
    pl.DataFrame({"id": [f"q{i}" for i in range(ROWS)], "prompt": texts}).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_tokenizer(make_checkpoint(folder / family, family, **shape)) for family, shape in SHAPES.items()}


def words_of(model: Path, data: Path, out: Path, *more: str, dtype: str = "float32") -> list[str]:
    return [
        f"model.path={model}", f"input.path={data}", f"output.dir={out}", f"model.dtype={dtype}", "decode.max_new_tokens=60",
        "decode.ignore_eos=true", "output.shard_rows=16", "output.token_ids=true", "packing.max_num_seqs=16",
        "packing.memory_gb=1", *more,  # not all that is free: other programs may use the GPU
    ]


def start(words: list[str], ranks: int, log: Path) -> subprocess.Popen[bytes]:
    gpus = [str(index % torch.cuda.device_count()) for index in range(ranks)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "batchspec.run", *words, f"cluster.tensor_parallel={ranks}", "cluster.workers=1"]
    with log.open("ab") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=file)


def frame_of(words: list[str], ranks: int, folder: Path) -> pl.DataFrame:
    """The rows of a job, each once."""
    log = folder / f"log{ranks}"
    assert start(words, ranks, log).wait() == 0, log.read_text()[-4000:]
    out = next(word.partition("=")[2] for word in words if word.startswith("output.dir="))
    frame = pl.read_parquet(Path(out) / "data").sort("request_id")
    assert frame["request_id"].n_unique() == len(frame) == ROWS
    assert set(frame["status"]) <= {"ok", "truncated"}
    return frame


def assert_same_tokens(one: pl.DataFrame, group: pl.DataFrame, *, sampled: bool = False) -> None:
    """But for a row or two in which two tokens were as likely up to the rounding of fp32 sums.

    Until two rows part, both runs give each token the same log probability within ROUNDING. Where greedy rows part, the two
    likeliest tokens are no further apart than twice the largest such difference.
    """
    gaps, moved = [], 0.0
    for tokens, others, tops, tops_of_group in zip(
        one["token_ids"], group["token_ids"], one["top_logprobs"], group["top_logprobs"], strict=True
    ):
        parted = next((i for i, (x, y) in enumerate(zip(tokens, others, strict=False)) if x != y), len(tokens))
        assert parted < len(tokens) or len(tokens) == len(others)
        for top, top_of_group in zip(list(tops)[: parted + 1], tops_of_group, strict=False):
            found = {entry["id"]: entry["logprob"] for entry in top_of_group}
            moved = max([moved, *(abs(entry["logprob"] - found.get(entry["id"], entry["logprob"])) for entry in top)])
        if parted < len(tokens):
            gaps.append(tops[parted][0]["logprob"] - tops[parted][1]["logprob"])
    print(f"log probabilities differ by at most {moved:.2e}; gaps where rows part: {gaps}")
    assert moved < ROUNDING
    assert len(gaps) <= 2
    assert sampled or max(gaps, default=0.0) <= 2 * moved, (gaps, moved)


DRAFTS = ["draft.num_speculative_tokens=3"]
WAYS: dict[str, list[str]] = {
    "plain": ["draft=none"],
    "drafts": ["draft=hybrid", *DRAFTS, *SAMPLED],
    "cut head": ["draft=eagle3", *DRAFTS],
}
CUT = {"cut head": ["ablation.sharded_draft=true"]}
"""Keys of the group alone: one GPU, which has nothing to cut, refuses them."""


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", SHAPES)
def test_a_group_writes_the_tokens_of_one_gpu(
    family: str, way: str, ranks: int, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    model = models[family]
    design = tiny_design(load_spec(model))
    head = write_head(tmp_path / "head", design, random_tensors(design))
    more = [*WAYS[way], *([] if way == "plain" else [f"draft.path={head}"]), "output.logprobs=2"]
    one = frame_of(words_of(model, data, tmp_path / "one", *more), 1, tmp_path)
    group = frame_of(words_of(model, data, tmp_path / "group", *more, *CUT.get(way, [])), ranks, tmp_path)
    assert_same_tokens(one, group, sampled=way == "drafts")


@pytest.mark.parametrize("ranks", COUNTS)
@pytest.mark.parametrize(
    "kind", ["qwen3_moe fp8", "minimax_m2 fp8", "gpt_oss mxfp4", "llama fp8", "llama bf16", "llama bf16 fp8-kv"]
)
def test_in_low_precision_the_first_tokens_are_those_of_one_gpu(
    kind: str, ranks: int, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Sums of parts are rounded otherwise than one sum, so later tokens may differ where two are nearly as likely."""
    family, form, *kv = kind.split()
    config = json.loads((models[family] / "config.json").read_text()) | FORMS[form]
    for key in {"intermediate_size", "moe_intermediate_size"} & SHAPES[family].keys():
        config[key] = INNER_SIZES.get(form, config[key])
    if form == "fp8":
        config["head_dim"] = 128  # each of four ranks has a K/V head, which is a block
    model = make_tokenizer(tmp_path)
    (model / "config.json").write_text(json.dumps(config))
    more = ["model.load_format=dummy", "draft=lookup", "output.logprobs=1", *(["cache.dtype=fp8"] if kv else [])]
    one = frame_of(words_of(model, data, tmp_path / "one", *more, dtype="bfloat16"), 1, tmp_path)
    group = frame_of(words_of(model, data, tmp_path / "group", *more, dtype="bfloat16"), ranks, tmp_path)
    same = [a[0] == b[0] for a, b in zip(one["token_ids"], group["token_ids"], strict=True)]
    gaps = [abs(a[0] - b[0]) for a, b in zip(one["logprobs"], group["logprobs"], strict=True)]
    assert sum(same) >= 0.9 * ROWS
    assert max(gap for gap, equal in zip(gaps, same, strict=True) if equal) < 0.25


def test_a_killed_rank_costs_no_row(models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    words = words_of(
        models["llama"],
        data,
        tmp_path / "out",
        "draft=none",
        "output.logprobs=2",
        "decode.max_new_tokens=150",
        "output.shard_rows=4",
    )
    log = tmp_path / "log"
    parent = start(words, 2, log)
    try:
        while not list((tmp_path / "out").glob("data/*.parquet")):
            assert parent.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)
        os.kill(follower_of(parent.pid), signal.SIGKILL)
        assert parent.wait(120) == 75, log.read_text()[-4000:]
    finally:
        parent.kill()
    assert "rank 1 of worker 0 (GPU" in log.read_text()
    resumed = frame_of(words, 2, tmp_path)
    whole = frame_of([word for word in words if "output.dir" not in word] + [f"output.dir={tmp_path / 'whole'}"], 1, tmp_path)
    assert_same_tokens(whole, resumed)


def follower_of(parent: int) -> int:
    """The process of rank 1."""
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"batchspec.cluster.worker" in words and words[words.index(b"batchspec.cluster.worker") + 1] == b"1":
            return int(pid)
    raise AssertionError("no rank 1")


@pytest.mark.whole_gpu
@pytest.mark.parametrize("ranks", COUNTS)
def test_a_warm_engine_of_ranks_answers_as_one_gpu_and_frees_all_memory(
    ranks: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(index % torch.cuda.device_count()) for index in range(ranks)))
    model, other = models["llama"], make_checkpoint(tmp_path / "other", "llama", seed=7, **SHAPES["llama"])
    words = [
        f"model.path={model}", "model.dtype=float32", "model.max_len=256", "decode.max_new_tokens=60", "decode.ignore_eos=true",
        "output.token_ids=true", "output.logprobs=2", "packing.max_num_seqs=16", "packing.memory_gb=1", "draft=none",
    ]
    rows = {"prompt": [f"{i} and {i * i}, " * (1 + i % 7) for i in range(ROWS)]}
    tensors = load_file(other / "model.safetensors")
    with batchspec.Engine(words) as engine:
        one = engine.generate(rows)
        engine.load_weights(other)
        swapped = engine.generate(rows)
    torch.cuda.synchronize()
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    with batchspec.Engine([*words, f"cluster.tensor_parallel={ranks}"]) as engine:
        assert_same_tokens(one, engine.generate(rows))
        with engine.stream(rows) as stream:
            next(stream)
        engine.load_weights(tensors)
        assert_same_tokens(swapped, engine.generate(rows))
        engine.load_weights(model)
        assert_same_tokens(one, engine.generate(rows))
    after = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    assert all(now >= before - (64 << 20) for now, before in zip(after, free, strict=True))

    engine = batchspec.Engine([*words, f"cluster.tensor_parallel={ranks}"])
    assert engine._loaded is not None
    inner = engine._loaded.engine
    assert isinstance(inner, EngineOfRanks)
    stream = engine.stream({"prompt": rows["prompt"], "max_new_tokens": [150] * ROWS})
    next(stream)
    inner._group.members[1].process.kill()
    with pytest.raises(RankLost, match="rank 1 of this engine was killed by SIGKILL"):
        list(stream)
    assert not inner._group.live()
