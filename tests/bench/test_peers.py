"""peers.py, the comparison with vLLM and SGLang: its rows, its arguments, what the engines are given, turns, JSON lines.

No other engine runs here: a stand-in takes the place of its package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchspec.bench.arguments import parse as bench_parse
from batchspec.checkpoint.files import StoredTensor
from batchspec.draft.assistant_spec import read_assistant
from batchspec.draft.block_head import dummy_block_spec
from batchspec.draft.block_spec import read_block
from batchspec.draft.block_tensors import expected_tensors
from batchspec.model.families.shapes import SHAPES, config_json, shape_spec

JOBS = Path(__file__).parents[2] / "jobs"


def load(*names: str) -> list[Any]:
    """The modules of jobs/benchmarks. They import each other by their bare names, as a script imports files of its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(JOBS / "benchmarks")
        return [importlib.import_module(name) for name in names]


peers, peers_gang, peers_options, shapes = load("peers", "peer_gang", "peer_options", "peer_shapes")
(speed_picture,) = load("speed_picture")
FIELDS = {
    "engine", "version", "row", "k", "accept", "draft", "tensor_parallel", "decode_tok_s", "prefill_s", "whole_s", "tok_s",
    "tokens", "turn", "counts", "shape", "batch", "prompt", "gen", "routing", "options", "device",
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


PAGES = list((JOBS / "pages").glob("*.md"))


@pytest.mark.parametrize("command", sorted({
    line
    for page in PAGES
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith("python jobs/benchmarks/peers.py ")
}))
def test_a_command_on_a_page_can_be_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.join(shlex.split(command, comments=True)[2:])
    assert arguments(monkeypatch, words, "batchspec" if "--k auto" in command else "vllm").rows


def test_the_picture_of_speed_has_the_figures_of_the_page() -> None:
    assert speed_picture.PICTURE.read_text(encoding="utf-8") == speed_picture.svg(speed_picture.rows()), "run speed_picture.py"


def test_rows_of_the_readme_are_there() -> None:
    table = (JOBS.parent / "README.md").read_text(encoding="utf-8").split("## Performance")[1].split("## How")[0]
    named = {tuple(line.split("|")[1].split(", ")[:2]) for line in table.splitlines() if "EAGLE-3 |" in line}
    assert named
    for model, sizes in named:
        batch, prompt = sizes.split(" + ")[0].split(" x ")
        assert f"{model.strip().removeprefix('gpt-oss-')}-{batch}x{prompt}".lower() in peers.ROWS


@pytest.mark.parametrize("shape", sorted({row.shape for row in peers.ROWS.values() if row.shape}))
def test_the_other_engines_get_the_shape_that_bench_measures(shape: str) -> None:
    own, other = json.loads(config_json(shape)), peers.model_config(shape)
    method = [config.pop("quantization_config", {}).get("quant_method") for config in (own, other)]
    named_otherwise = {"model_type", "architectures", "rope_parameters"} if own["model_type"] == "mistral4" else set()
    assert {key for key in own if other[key] != own[key]} == named_otherwise
    assert method[0] == method[1]
    if peers.drafter_of(shape) == "eagle3":
        head = peers.drafter_config(shape)
        assert (head["hidden_size"], head["intermediate_size"]) == (own["hidden_size"], shape_spec(shape).intermediate_size)


def test_fp8_models_name_the_router_of_every_layer() -> None:
    plain = peers.model_config("qwen3-30b-a3b-fp8")["quantization_config"]["modules_to_not_convert"]
    assert (len(plain), plain[0], plain[-1]) == (49, "lm_head", "model.layers.47.mlp.gate")
    assert peers.model_config("llama8b-fp8")["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    packed = peers.model_config("qwen3-30b-a3b-nvfp4")["quantization_config"]
    assert (packed["ignore"], packed["group_size"]) == (plain, 16)


def test_vllm_gets_mistral_small_4_as_the_model_of_which_it_reads_mistrals_own_file() -> None:
    made = peers.model_config("mistral-small-4-nvfp4")
    assert (made["model_type"], made["architectures"]) == ("deepseek_v3", ["MistralLarge3ForCausalLM"])
    assert made["llama_4_scaling"] == {"original_max_position_embeddings": 8192, "beta": 0.1}
    assert "partial_rotary_factor" not in made["rope_parameters"], "vLLM would rotate half of qk_rope_head_dim"
    plain = made["quantization_config"]["ignore"]
    assert (len(plain), plain[1]) == (37, "model.layers.0.mlp.gate")


def test_a_block_head_is_as_large_as_that_of_bench(tmp_path: Path) -> None:
    target = shape_spec("qwen3-8b")
    dummy = dummy_block_spec(target)
    stored = {one.name: StoredTensor(one.name, "BF16", one.shape, "model.safetensors", 0, 0) for one in expected_tensors(dummy)}
    folder = Path(peers.write_config(tmp_path / "head", peers.drafter_config("qwen3-8b", "block")))
    assert read_block(folder, stored, target) == dummy


def test_the_states_of_nano_are_fp32_as_those_of_batchspec() -> None:
    assert peers.model_config("nemotron3-nano-30b-a3b")["mamba_ssm_cache_dtype"] == "float32"


def test_an_mtp_layer_is_the_models_own_and_an_assistant_is_a_model_that_batchspec_can_read(tmp_path: Path) -> None:
    assert [peers.drafter_of(shape) for shape in ("llama8b", "qwen3.5-27b", "glm-4.5-air-fp8")] == ["eagle3", "mtp", "mtp"]
    assert [peers.drafter_of(shape) for shape in ("glm-4.7-flash", "nemotron3-nano-30b-a3b")] == ["mtp", "mtp"]
    assert peers.model_config("qwen3.5-27b")["mtp_num_hidden_layers"] == 1
    assert peers.drafter_of("gemma4-26b-a4b") == "assistant"
    folder = Path(peers.write_config(tmp_path / "assistant", peers.drafter_config("gemma4-26b-a4b")))
    read = read_assistant(folder, shape_spec("gemma4-26b-a4b"))
    assert (len(read.layers), read.ends.hidden_size, read.ends.num_clusters) == (4, 1024, 0)


def test_a_written_assistant_has_all_its_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = shapes.assistant_config(peers.model_config("gemma4-26b-a4b"))
    small["text_config"] |= {"hidden_size": 8, "intermediate_size": 16}
    monkeypatch.setattr(shapes, "drafter_config", lambda _shape: small)
    folder = Path(peers.write_assistant(tmp_path / "assistant", "gemma4-26b-a4b"))
    spec = read_assistant(folder, shape_spec("gemma4-26b-a4b"))
    found = load_file(folder / "model.safetensors")
    assert {name: tuple(made.shape) for name, made in found.items()} == {one.name: one.shape for one in spec.tensors()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("out.jsonl 8b-64x8192 20b-64x8192", "rows of different shapes"),
        ("out.jsonl gsm8k --model m", "needs --model and --input"),
        ("out.jsonl gsm8k --model m --input f --k 2", "with drafts --head"),
        ("out.jsonl 9b-1x1", "invalid choice"),
        ("out.jsonl", "required"),
        ("out.jsonl 8b-64x8192 --k 3 --accept .6,.28", "needs as many rates"),
        ("out.jsonl nano-256x1024 --k 2 --draft block", "without a drafter of their own"),
        ("out.jsonl gsm8k --k 2 --draft block --model m --head h --input f", "without a drafter of their own"),
        ("out.jsonl mistral-small-4-256x1024 --k 1", "timed without drafts"),
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
    with pytest.raises(SystemExit):
        arguments(monkeypatch, "o glm-4.5-air-24x4096 --k 2", "sglang")
    assert "EAGLE-3 heads alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "draft"),
    [
        ("8b-64x8192", "none"),
        ("20b-256x1024 --k auto", "eagle3"),
        ("gsm8k --k 3 --model smollm2-135m --head h --input f.parquet", "eagle3"),
        ("qwen3.5-27b-64x4096 --k 3 --accept .85,.7,.55", "mtp"),
        ("gemma4-26b-128x1024 --k 2 --accept .7,.5,.35", "mtp"),
        ("glm-4.7-flash-256x1024 --gen 256", "none"),
        ("nano-64x8192 --k auto --accept .85,.7,.55", "mtp"),
        ("mistral-small-4-256x1024", "none"),
        ("70b-64x4096 --k auto --tensor-parallel 2", "eagle3"),
        ("qwen3-8b-256x1024 --k 3 --draft block --gen 256", "block"),
    ],
)
def test_bench_knows_the_arguments_that_batchspec_is_given(monkeypatch: pytest.MonkeyPatch, words: str, draft: str) -> None:
    args = arguments(monkeypatch, f"o {words} --turns 3")
    row = peers.row_of(args, args.rows[0])
    found = bench_parse(["out.jsonl", "name", "--device", "cpu", *peers.bench_arguments(args, row)], None)
    assert (found.batch, found.gen, found.runs) == (row.batch, row.gen, 3)
    assert (row.gen, found.tensor_parallel) == (256 if "--gen" in words or not row.shape else 512, args.tensor_parallel)
    assert found.draft == [draft]
    assert found.prompt == row.prompt if row.shape else found.eos
    assert not row.shape or found.accept == [list(args.accept)]


def test_graphs_of_vllm_reach_all_rows_with_their_drafts() -> None:
    assert peers_options.graph_sizes(20, 0) == [1, 2, 4, 8, 16, 20]
    assert peers_options.graph_sizes(16, 2) == [3, 6, 12, 24, 48]
    rows = [peers.ROWS[name] for name in ("20b-64x8192", "20b-256x1024")]
    sizes = peers.vllm_options(rows, (0.6, 0.28, 0.12), "m", "h")["compilation_config"]["cudagraph_capture_sizes"]
    assert (sizes[-1], len(sizes), {size % 4 for size in sizes}) == (1024, 35, {0})


def test_vllm_measures_no_memory_where_it_is_given_its_share() -> None:
    alone, together = (peers.vllm_options([peers.ROWS["8b-64x8192"]], (), "m", None, share) for share in (None, 1.5))
    assert "kv_cache_memory_bytes" not in alone
    assert (together["kv_cache_memory_bytes"], together["gpu_memory_utilization"]) == (3 * 2**29, 0.01)


@pytest.mark.parametrize(
    ("name", "drafter", "said"),
    [
        ("8b-64x8192", "h", ("eagle3", "h")), ("qwen3.5-27b-64x4096", None, ("mtp", None)),
        ("gemma4-26b-128x1024", "a", ("mtp", "a")),
    ],
)
def test_vllm_is_told_what_drafts(name: str, drafter: str | None, said: tuple[str, str | None]) -> None:
    found = peers.vllm_options([peers.ROWS[name]], (0.7, 0.5), "m", drafter)["speculative_config"]
    assert (found["method"], found.get("model")) == said
    assert (found["num_speculative_tokens"], found["synthetic_acceptance_rates"]) == (2, [0.7, 0.5])


def test_vllm_drafts_a_block_with_the_candidates_of_batchspec_and_verifies_by_confidence() -> None:
    row = peers.ROWS["qwen3-8b-256x1024"]
    found = peers.vllm_options([row], (0.7, 0.5), "m", "h", kind="block")["speculative_config"]
    assert (found["method"], found["model"], found["num_speculative_tokens"]) == ("dspark", "h", 2)
    assert found["dspark_draft_topk"] == dummy_block_spec(shape_spec(row.shape)).candidates
    assert found["enable_adaptive_verification"]


def test_options_replace_arguments_and_of_a_dictionary_its_keys() -> None:
    found = peers.vllm_options([peers.ROWS["qwen3-8b-256x1024"]], (0.7,), "m", "h", kind="block")
    changed = peers.with_options(found, {"seed": 1, "use_replayssm": True, "speculative_config": {"dspark_draft_topk": 8}})
    assert (found["seed"], changed["seed"], changed["use_replayssm"]) == (0, 1, True)
    assert changed["speculative_config"] == found["speculative_config"] | {"dspark_draft_topk": 8}


@pytest.mark.parametrize(
    ("words", "drafter", "parallel"),
    [
        ("qwen3-8b-256x1024 --k 2 --draft block --gen 16", "Qwen3DSparkModel", 1),
        ("qwen3-8b-256x1024 --k 2", "LlamaForCausalLMEagle3", 1),
        ("70b-fp8-64x8192 --tensor-parallel 4", None, 4),
        ("nano-256x1024 --k 2", None, 1),
    ],
)
def test_vllm_starts_with_the_model_its_drafter_and_so_many_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, drafter: str | None, parallel: int
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=lambda **options: given.append(options)))
    args = arguments(monkeypatch, f"o {words}", "vllm")
    peers.start(args, tmp_path)
    row = peers.row_of(args, args.rows[0])
    assert (given[0]["tensor_parallel_size"], given[0]["max_model_len"]) == (parallel, row.prompt + row.gen + 64)
    assert json.loads(Path(given[0]["model"], "config.json").read_text()) == peers.model_config(row.shape)
    head = given[0].get("speculative_config", {}).get("model")
    found = json.loads(Path(head, "config.json").read_text())["architectures"][0] if head else None
    assert found == drafter


def test_rows_that_share_an_engine_all_fit_into_it() -> None:
    rows = [peers.ROWS[name] for name in ("20b-256x1024", "20b-64x8192")]
    vllm, sglang = peers.vllm_options(rows, (0.6, 0.28), "m", "h"), peers.sglang_options(rows, 2, "m", "h")
    assert vllm["max_num_seqs"] == sglang["max_running_requests"] == sglang["cuda_graph_max_bs_decode"] == 256
    assert vllm["max_model_len"] == sglang["context_length"] >= 8192 + 512
    assert vllm["speculative_config"]["synthetic_acceptance_rates"] == [0.6, 0.28]
    assert (sglang["speculative_num_steps"], sglang["speculative_num_draft_tokens"]) == (2, 3)


def test_routing_and_acceptance_go_to_the_engines_by_environment() -> None:
    assert peers.environment("sglang", "none", ()) == {}
    assert peers.environment("sglang", "spread", ()) == {peers.SPREAD: "sglang"}
    assert peers.environment("vllm", "none", ()) == {"VLLM_DEEP_GEMM_WARMUP": "skip"}
    assert peers.environment("vllm", "uniform_random", ())["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "uniform_random"
    rates = (0.6, 0.28, 0.12)
    lengths = [peers.environment("sglang", "none", rates[:k])["SGLANG_SIMULATE_ACC_LEN"] for k in (1, 2, 3)]
    assert lengths == ["1.60", "1.88", "2.00"]


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


def test_a_warm_pass_comes_before_the_first_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def run(_prompts: list[list[int]], gen: int) -> int:
        asked.append(gen)
        return 256 * gen

    monkeypatch.setattr(peers, "start", lambda _args, _folder: run)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.33.0"))
    args = arguments(monkeypatch, f"o 135m-256x512 --turns 1 --warm 32 --together {tmp_path / 'gang'} 1", "vllm")
    assert [line["counts"] for line in peers.peer_turns(args, tmp_path)] == [True]
    assert asked == [32, 1, 512]
    assert (tmp_path / "gang" / f"{os.getpid()}.settled").exists()


def test_a_gang_waits_for_all_to_start_or_fail_and_goes_one_by_one(tmp_path: Path) -> None:
    first, second, failed = (peers_gang.Gang(tmp_path, 3) for _ in range(3))
    first.settle(1)
    with pytest.raises(ZeroDivisionError), failed.starting():
        _ = 1 / 0
    with pytest.raises(TimeoutError, match="2 of 3 have started"):
        first.take_turn(0.05, pause_s=0.01)
    second.settle(2)
    order: list[str] = []
    first.take_turn(1)

    def wait() -> None:
        second.take_turn(1)
        order.append("second")

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    order.append("first")
    first._turn.close()  # as the end of its process does
    waiting.join(5)
    assert order == ["first", "second"]
