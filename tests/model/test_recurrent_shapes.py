"""The shapes of models with recurrent layers that bench, doctor and plan know by name, and their dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
import torch

from batchspec.bench import command as bench
from batchspec.bench.arguments import parse
from batchspec.bench.engines import Bench, variant_specs
from batchspec.bench.rounds import begin_rows
from batchspec.bench.workloads import make_workload
from batchspec.commands import plan_text, planning
from batchspec.config.compose import compose
from batchspec.errors import ConfigError
from batchspec.job import prepare
from batchspec.job.load import memory
from batchspec.kernels.common import card
from batchspec.model.families.shapes import COMMON, SHAPES, shape_spec
from batchspec.model.layers.gated_delta.block import A_LOGS, DT_BIASES
from batchspec.model.products import products
from batchspec.model.quant.plain import PLAIN
from batchspec.model.weights import DummyWeights
from batchspec.packing.cost import num_multiplied
from batchspec.tuning import policy
from batchspec.tuning.cards import known_card
from tests.helpers.stand_ins import H200, ByteTokenizer

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("name", "weights_gb", "active", "state_mb", "token_bytes"),
    [
        ("qwen3.5-0.8b", 1.50, 0.75e9, 18.9, 12_288),
        ("qwen3.5-27b", 53.8, 25.6e9, 151.0, 65_536),
        ("qwen3.5-35b-a3b", 69.3, 2.9e9, 62.9, 20_480),
        ("qwen3.5-35b-a3b-fp8", 35.7, 2.9e9, 62.9, 20_480),
        ("qwen3-next-80b-a3b", 159.3, 3.6e9, 75.5, 24_576),
        ("nemotron-nano-9b", 17.8, 8.3e9, 141.6, 16_384),
        ("nemotron3-nano-30b-a3b", 63.2, 3.2e9, 48.2, 6_144),
        ("nemotron3-nano-30b-a3b-fp8", 32.7, 3.2e9, 48.2, 6_144),
        ("nemotron3-super-120b-a12b", 241.3, 12.2e9, 167.8, 8_192),
        ("nemotron3-super-120b-a12b-nvfp4", 73.4, 12.2e9, 167.8, 8_192),
        ("granite4-h-tiny", 13.9, 1.5e9, 56.6, 8_192),
    ],
)
def test_sizes_are_the_published_ones(
    name: str, weights_gb: float, active: float, state_mb: float, token_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "has_kernels", lambda device: True)
    spec = shape_spec(name).on(CPU, BF16)
    assert spec.unread == ()
    assert spec.weight_bytes(BF16) == pytest.approx(weights_gb * 1e9, rel=0.01)
    assert num_multiplied(spec) == pytest.approx(active, rel=0.1)
    states = [kept.row[0] for kept in spec.layer_states(BF16, 1, draft_len=0) if kept.row]
    assert sum(state.nbytes for state in states) == pytest.approx(state_mb * 1e6, rel=0.002)
    assert spec.page_formats(BF16, 1)[0].token_bytes * spec.num_paged_layers == token_bytes


def test_gates_stay_plain_in_fp8() -> None:
    spec = shape_spec("qwen3.5-35b-a3b-fp8").on(CPU, BF16)
    plain = {
        part.name for prefix, block in spec.blocks() if prefix.startswith("model.layers.0.") for product in block.products
        for part in product.parts if spec.formats.of(f"{prefix}{part.name}") is PLAIN
    }
    assert plain == {"linear_attn.in_proj_b", "linear_attn.in_proj_a"}


@pytest.mark.parametrize(("name", "mixer"), [("qwen3.5-0.8b", "linear_attn"), ("nemotron-nano-9b", "mixer")])
def test_dummy_states_forget_slowly(name: str, mixer: str) -> None:
    weights = DummyWeights(shape_spec(name), dtype=torch.float32, device=CPU)
    dt_bias, a_log = (weights.tensor(f"model.layers.0.{mixer}.{own}") for own in ("dt_bias", "A_log"))
    assert DT_BIASES[0] <= float(dt_bias.min()) < float(dt_bias.max()) <= DT_BIASES[1]
    assert A_LOGS[0] <= float(a_log.min()) < float(a_log.max()) <= A_LOGS[1]
    left = (-a_log.exp() * torch.nn.functional.softplus(dt_bias)).exp()
    assert 0.15 < float(left.min()) < 0.9 < float(left.max()) < 1


@pytest.fixture
def small(tmp_path: Path) -> Path:
    changes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "full_attention_interval": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    }
    path = tmp_path / "small.json"
    path.write_text(json.dumps({**COMMON, **SHAPES["qwen3.5-0.8b"], **changes}))
    return path


SIZES = ["--batch", "2", "--prompt", "8", "--dtype", "float32", "--device", "cpu"]


@pytest.mark.second
def test_states_stay_finite_over_many_tokens(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    assert bench.main([str(out), "small", "--shape", str(small), "--gen", "400", *SIZES, "--states", "bfloat16"]) == 0
    assert json.loads(out.read_text())["tokens"] == 800  # a logit that is not finite would end its row


def test_rounds_begin_from_states_that_hold_the_past(small: Path) -> None:
    """Without it the first round would replay thousands of positions, from rings that hold a few."""
    args = parse(["o", "n", "--shape", str(small), "--rounds", "2", *SIZES, "--k", "2", "--draft", "lookup"])
    (way,) = variant_specs(args)
    engine = Bench(args, make_workload(args, CPU), CPU).engine(way, buckets=(2,)).engine
    begin_rows(engine, 8)
    cache = engine.executor.cache
    assert cache.num_folded is not None
    assert cache.num_folded[:2].tolist() == [7, 7]
    assert all(bool(tensor.any()) and bool(tensor.isfinite().all()) for own in cache.kept for tensor in own.rows)


@pytest.mark.parametrize("drafter", [["none"], ["eagle3", "--k", "0", "2", "--accept", "1,0"]])
@pytest.mark.second
def test_single_rounds_are_timed(drafter: list[str], small: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    assert bench.main([str(out), "small", "--shape", str(small), "--rounds", "4", *SIZES, "--draft", *drafter]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mean_acceptance_length"] for row in found] == ([1.0] if len(drafter) == 1 else [1.0, 2.0])


def test_states_of_a_shape_without_them_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache.state_dtype=bfloat16 applies to recurrent layers, and llama has none"):
        make_workload(parse(["o", "n", "--shape", "smol135m", *SIZES, "--states", "bfloat16"]), CPU)


@pytest.mark.second
@pytest.mark.parametrize(
    ("recipe", "shape", "answer", "max_len", "weights", "slots"),
    [
        ("reasoning_35b", "qwen3.5-35b-a3b", 16_384, 20_480, "69.32 GB weights", 150),
        ("nemotron_nano", "nemotron3-nano-30b-a3b", 8192, 12_288, "63.15 GB weights", 256),
    ],
)
def test_the_recipes_of_recurrent_models_are_planned_for_one_h200(
    recipe: str, shape: str, answer: int, max_len: int, weights: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dummy weights: `batchspec plan +job=reasoning_35b model.load_format=dummy ...`."""
    free = 140 * 10**9
    for module in (plan_text, memory):
        monkeypatch.setattr(module, "free_memory", lambda device, weights=0: free - weights)
    monkeypatch.setattr(prepare, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(card, "_read", lambda device: known_card("H200").card)
    monkeypatch.setattr(planning, "device_rates", lambda *_, **__: H200)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    turns = [[{"role": "user", "content": "x" * 1500}]] * 2000
    pl.DataFrame({"messages": turns}).write_parquet(tmp_path / "in.parquet")
    words = [f"+job={recipe}", f"model.path={tmp_path / 'model'}", f"input.path={tmp_path / 'in.parquet'}"]
    found = {}
    for value in ("auto", "bfloat16"):
        no_budget = "decode.thinking_token_budget=null"  # the tokenizer has no think tokens
        config = compose([*words, "model.load_format=dummy", "device=cpu", no_budget, f"cache.state_dtype={value}"])
        made = planning.plan(config, tokenizer=cast(Any, ByteTokenizer()))
        assert made.batch is not None
        assert made.batch.num_verified == 3
        assert 1500 + answer < made.batch.max_len <= max_len
        held, total = next(line for line in made.text().splitlines() if line.startswith("memory")).split(" = ")
        assert weights in held
        assert " states of rows" in held
        assert float(total.split(" GB")[0]) <= 140
        found[value] = made.batch.num_slots
    assert slots < found["auto"] < found["bfloat16"]


def test_doctor_tunes_the_products_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v and z; the gates; the output. In FP8 the gates alone, which stay plain."""
    of_layer = [("linear", 12_288, 2048), ("linear", 64, 2048), ("linear", 2048, 4096), ("linear_add", 2048, 4096)]
    for name in ("qwen3.5-35b-a3b", "qwen3-next-80b-a3b"):
        assert products(shape_spec(name))[:4] == of_layer
    assert [("linear", rows, 5120) in products(shape_spec("qwen3.5-27b")) for rows in (16_384, 96, 14_336)] == [True] * 3
    monkeypatch.setattr(policy, "has_kernels", lambda device: True)
    fp8 = shape_spec("qwen3.5-35b-a3b-fp8").on(CPU, BF16)
    assert products(fp8) == [("linear", 64, 2048), ("lm_head", 248_320, 2048)]
