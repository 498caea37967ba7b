"""jobs/peers.py, the comparison with vLLM and SGLang: its rows, its arguments, the settings that the engines get, its JSON lines.

No other engine runs here: a stand-in takes the place of its package.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.bench.arguments import parse as bench_parse
from batchspec.model.shapes import SHAPES, config_json, shape_spec

PATH = Path(__file__).parents[1] / "jobs" / "peers.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("peers", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load()
FIELDS = {
    "engine", "version", "row", "k", "decode_tok_s", "prefill_s", "whole_s", "tok_s", "tokens", "turn", "counts", "shape",
    "batch", "prompt", "gen", "routing", "options", "device",
}


def install(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """`engine` is the only package that is there; the others are folders without a module, as a checkout's folder is."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=name if name == engine else None))


def arguments(monkeypatch: pytest.MonkeyPatch, words: str, engine: str = "batchspec") -> Any:
    """The parsed words where `engine` is the only one installed."""
    install(monkeypatch, engine)
    return peers.parse(shlex.split(words))


def test_every_row_is_a_shape_of_bench_or_has_real_weights() -> None:
    assert {row.shape for row in peers.ROWS.values()} - set(SHAPES) == {""}
    assert [name for name, row in peers.ROWS.items() if not row.shape] == ["gsm8k"]
    assert all(name.endswith(f"-{row.batch}x{row.prompt}") for name, row in peers.ROWS.items() if row.shape)


def test_rows_of_the_readme_are_there() -> None:
    table = (PATH.parents[1] / "README.md").read_text(encoding="utf-8").split("## Performance")[1].split("## How")[0]
    named = {tuple(line.split("|")[1].split(", ")[:2]) for line in table.splitlines() if "EAGLE-3 |" in line}
    assert named
    for model, sizes in named:
        batch, prompt = sizes.split(" + ")[0].split(" x ")
        assert f"{model.strip().removeprefix('gpt-oss-')}-{batch}x{prompt}".lower() in peers.ROWS


@pytest.mark.parametrize("shape", sorted({row.shape for row in peers.ROWS.values() if row.shape}))
def test_the_other_engines_get_the_shape_that_bench_measures(shape: str) -> None:
    own, other = json.loads(config_json(shape)), peers.model_config(shape)
    method = [config.pop("quantization_config", {}).get("quant_method") for config in (own, other)]
    assert {key: other[key] for key in own} == own
    assert method[0] == method[1]
    head = peers.head_config(shape)
    assert (head["hidden_size"], head["intermediate_size"]) == (own["hidden_size"], shape_spec(shape).intermediate_size)


def test_fp8_models_name_the_router_of_every_layer() -> None:
    plain = peers.model_config("qwen3-30b-a3b-fp8")["quantization_config"]["modules_to_not_convert"]
    assert (len(plain), plain[0], plain[-1]) == (49, "lm_head", "model.layers.47.mlp.gate")
    assert peers.model_config("llama8b-fp8")["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("out.jsonl 8b-64x8192 20b-64x8192", "rows of different shapes"),
        ("out.jsonl gsm8k --model m", "needs --model and --input"),
        ("out.jsonl gsm8k --model m --input f --k 2", "with drafts --head"),
        ("out.jsonl 9b-1x1", "invalid choice"),
        ("out.jsonl", "required"),
    ],
)
def test_arguments_that_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        arguments(monkeypatch, words)
    assert said in capsys.readouterr().err


def test_the_first_engine_that_is_there_runs_and_only_batchspec_chooses_k(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [arguments(monkeypatch, "o 8b-64x8192", name).engine for name in peers.ENGINES] == list(peers.ENGINES)
    assert arguments(monkeypatch, "o 8b-64x8192 --k auto").k == "auto"
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "o 8b-64x8192 --k auto", "vllm")
    assert "take the best" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["8b-64x8192", "20b-256x1024 --k auto", "gsm8k --k 3 --model smollm2-135m --head h --input f.parquet"]
)
def test_bench_knows_the_arguments_that_batchspec_is_given(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    args = arguments(monkeypatch, f"o {words} --turns 3")
    row = peers.ROWS[args.rows[0]]
    found = bench_parse(["out.jsonl", "name", *peers.bench_arguments(args, row)], None)
    assert (found.batch, found.gen, found.runs) == (row.batch, row.gen, 3)
    assert found.draft == (["none"] if args.k == "0" else ["eagle3"])
    assert found.prompt == row.prompt if row.shape else found.eos


def test_graphs_of_vllm_reach_all_rows_with_their_drafts() -> None:
    def graph(k: int, *names: str) -> int | None:
        found = peers.vllm_options([peers.ROWS[name] for name in names], k, "m", "h").get("compilation_config", {})
        size: int | None = found.get("max_cudagraph_capture_size")
        return size

    assert (graph(0, "8b-256x1024"), graph(1, "8b-256x1024"), graph(3, "8b-256x1024")) == (None, None, 1024)
    assert (graph(3, "20b-64x8192"), graph(3, "20b-64x8192", "20b-256x1024")) == (None, 1024)


def test_rows_that_share_an_engine_all_fit_into_it() -> None:
    rows = [peers.ROWS[name] for name in ("20b-256x1024", "20b-64x8192")]
    vllm, sglang = peers.vllm_options(rows, 2, "m", "h"), peers.sglang_options(rows, 2, "m", "h")
    assert vllm["max_num_seqs"] == sglang["max_running_requests"] == sglang["cuda_graph_max_bs_decode"] == 256
    assert vllm["max_model_len"] == sglang["context_length"] >= 8192 + 512
    assert vllm["speculative_config"]["synthetic_acceptance_rates"] == [0.6, 0.28]
    assert (sglang["speculative_num_steps"], sglang["speculative_num_draft_tokens"]) == (2, 3)


def test_routing_and_acceptance_go_to_the_engines_by_environment() -> None:
    assert peers.environment("vllm", "none", 0) == {}
    assert peers.environment("vllm", "spread", 0) == {peers.SPREAD: "vllm"}
    assert peers.environment("vllm", "uniform_random", 0)["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
    assert [peers.environment("sglang", "none", k)["SGLANG_SIMULATE_ACC_LEN"] for k in (1, 2, 3)] == ["1.60", "1.88", "2.00"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_spread_routing_zeroes_the_biases_that_an_engine_makes(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    model = torch.nn.Linear(4, 2)
    if engine == "vllm":
        name, function = "vllm.model_executor.model_loader.dummy_loader", "initialize_single_dummy_weight"
        calls: list[tuple[Any, dict[str, str]]] = [(model.weight, {"name": "weight"}), (model.bias, {"name": "bias"})]
    else:
        name, function, calls = "sglang.srt.model_loader.loader", "initialize_dummy_weights", [(model, {})]

    def fill(made: Any, **_more: str) -> None:
        for value in made.parameters() if engine == "sglang" else [made]:
            value.data.fill_(0.5)

    loader = types.ModuleType(name)
    setattr(loader, function, fill)
    monkeypatch.setitem(sys.modules, name, loader)
    for parent in (name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    peers.spread_routing(engine)
    for made, more in calls:
        getattr(loader, function)(made, **more)
    assert (model.weight == 0.5).all()
    assert (model.bias == 0).all()


def test_a_run_writes_a_line_a_turn_and_says_which_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    class Engine:
        def __init__(self, **options: Any) -> None:
            assert json.loads(Path(options["model_path"], "config.json").read_text())["hidden_size"] == 576

        def generate(self, *, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
            gen = sampling_params[0]["max_new_tokens"]
            asked.append((len(input_ids), gen))
            return [{"output_ids": [1] * (gen + 1)} for _ in input_ids]

    engine = types.ModuleType("sglang")
    engine.__dict__.update(Engine=Engine, __version__="0.5.23")
    monkeypatch.setitem(sys.modules, "sglang", engine)
    install(monkeypatch, "sglang")
    monkeypatch.setattr(sys, "argv", ["peers.py", str(tmp_path / "out.jsonl"), "135m-256x512", "--k", "2", "--routing", "none"])
    monkeypatch.setattr(peers.os, "environ", {})
    peers.main()
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert capsys.readouterr().out == (tmp_path / "out.jsonl").read_text()
    assert asked == [(256, 1), (256, 512)] * 2
    assert [(line["turn"], line["counts"]) for line in lines] == [(1, False), (2, True)]
    for line in lines:
        assert set(line) == FIELDS
        assert (line["engine"], line["version"], line["row"], line["k"]) == ("sglang", "0.5.23", "135m-256x512", "2")
        assert line["tokens"] == 256 * 512


def test_decode_speed_leaves_out_the_prefill_and_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(monkeypatch, "o 8b-64x8192")
    made = peers.line(args, "8b-64x8192", 1, 2.0, 10.0, 64 * 512)
    assert (made["decode_tok_s"], made["tok_s"], made["routing"]) == (64 * 511 / 8, 3276.8, None)
    real = peers.line(args, "gsm8k", 2, None, 4.0, 1000)
    assert (real["decode_tok_s"], real["prefill_s"], real["tok_s"]) == (None, None, 250.0)


def test_turns_of_batchspec_are_those_of_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bench(command: list[str], *, check: bool) -> None:
        assert check
        assert command[1:4] == ["-m", "batchspec.cli", "bench"]
        Path(command[4]).write_text(json.dumps({"seconds": [12.0, 10.0], "prefill_s": 2.0, "tokens": 64 * 512}))

    monkeypatch.setattr(peers.subprocess, "run", bench)
    turns = list(peers.own_turns(arguments(monkeypatch, "o 8b-64x8192"), tmp_path))
    assert [(line["turn"], line["whole_s"], line["decode_tok_s"], line["counts"]) for line in turns] == [
        (1, 12.0, round(64 * 511 / 10, 1), False), (2, 10.0, 64 * 511 / 8, True)
    ]
