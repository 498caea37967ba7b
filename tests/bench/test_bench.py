"""`batchspec bench` on the CPU with a tiny shape: its variants, the numbers of a line, the job it writes, the trace it reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec import run
from batchspec.batch import no_repeat_ngram
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.bench import command as bench
from batchspec.bench.arguments import parse
from batchspec.bench.engines import Bench, variant_specs
from batchspec.bench.profile import read_trace
from batchspec.bench.rounds import begin_rows
from batchspec.bench.schemas import following, symbols_of
from batchspec.bench.workloads import make_job, make_workload
from batchspec.config.compose import compose
from batchspec.draft import pard
from batchspec.draft.block import BlockDrafter, BlockDrafterSpec
from batchspec.draft.block_head import BlockWeights
from batchspec.engine.loop.engine import Engine
from batchspec.engine.prefill.graphs import PrefillGraphs
from batchspec.errors import ConfigError, InputError
from batchspec.job.prepare import open_job, survey_first
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.kernels.sampling.forbid_ngrams import forbid_ngrams
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.model.lora_products import LoraStacks
from batchspec.packed_batch import ExpectedRows, PackedBatch
from batchspec.packing.survey import Survey
from batchspec.records import Completion, Request, RowError
from batchspec.request_stream import RequestStream
from tests.helpers.assistants import make_assistant, make_target
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.padded_prefill import ALWAYS
from tests.helpers.waiting_requests import count_waiting

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps({**COMMON, **TINY}))
    return path


def lines(shape: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    """The JSON lines of a run on `shape`, by default 4 prompts of 8 tokens with 12 new ones."""
    sizes = ["--batch", "4", "--prompt", "8", "--gen", "12", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(out), "tiny", "--shape", str(shape), *sizes, *more]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_line_has_the_settings_and_the_speed_of_a_variant(
    shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = lines(shape, tmp_path / "o.jsonl", "--runs", "2")
    assert (row["variant"], row["batch"], row["requests"], row["tokens"], row["rounds"]) == ("none", 4, 4, 48, 11)
    assert (row["mean_acceptance_length"], row["mean_live_rows"], row["runs"], len(row["seconds"])) == (1.0, 4.0, 2, 2)
    assert row["decode_tok_s"] == pytest.approx(44 / (row["total_s"] - row["prefill_s"]), rel=0.1)
    assert row["round_us"] == pytest.approx((row["total_s"] - row["prefill_s"]) / 11 * 1e6, rel=0.1)
    assert row["versions"]["torch"] == torch.__version__
    assert row["command"].startswith("batchspec bench ")
    assert "--runs 2" in row["command"]
    said = capsys.readouterr().out
    assert "turn 2 of 2  none" in said
    assert "1.000  [1.000, 1.000]" in said


SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 5, "num_experts": 5,
    "num_experts_per_tok": 2, "rotary_dim": 8, "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "shared_expert_intermediate_size": 32,
    "n_routed_experts": 5, "shared_intermediate_size": 32, "layer_types": ["attention"] * 2, "top_k_experts": 2,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
}
SHARING_KV: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2
}
"""Of shapes whose last layers read the K and V of earlier layers of their kind."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        "hybrid_override_pattern": "M*EM", "num_hidden_layers": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 32,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "glm_ocr_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2,
    },
}


def small(name: str) -> str:
    known = {**COMMON, **SHAPES[name]}
    cut = {key: value for key, value in SMALL.items() if known.get(key)}
    sharing = SHARING_KV if "num_kv_shared_layers" in known else {}
    return json.dumps({**known, **cut, **sharing, **OF_FAMILY.get(known["model_type"], {})})


DISTINCT = {small(name): name for name in reversed(SHAPES) if "-" in name and "kv_lora_rank" not in SHAPES[name]}
"""Of latent attention no new head can be made."""


@pytest.mark.parametrize("config", DISTINCT, ids=DISTINCT.values())
def test_the_shapes_with_experts_in_fp8_and_with_states_run(config: str, tmp_path: Path) -> None:
    shape_ = tmp_path / "config.json"
    shape_.write_text(config)
    rows = lines(shape_, tmp_path / "o.jsonl", "--draft", "none", "eagle3", "--k", "2", "--accept", "1,0")
    assert [(row["variant"], row["tokens"]) for row in rows] == [("none", 48), ("eagle3 K=2", 48)]
    assert rows[1]["mean_acceptance_length"] == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize("name", ["nemotron3-nano-30b-a3b", "nemotron3-super-120b-a12b"])
def test_the_mtp_layer_of_a_shape_drafts_with_random_weights(name: str, tmp_path: Path) -> None:
    shape_ = tmp_path / "config.json"
    shape_.write_text(small(name))
    rows = lines(shape_, tmp_path / "o.jsonl", "--draft", "none", "mtp", "--k", "1", "3", "--accept", "0.85,0.7,0.55")
    assert [(row["variant"], row["tokens"]) for row in rows] == [("none", 48), ("mtp K=1", 48), ("mtp K=3", 48)]
    assert 1.4 < rows[1]["mean_acceptance_length"] <= 2 < rows[2]["mean_acceptance_length"]


def test_every_drafter_runs_with_every_length_and_every_option(shape: Path, tmp_path: Path) -> None:
    rows = lines(
        shape, tmp_path / "o.jsonl", "--draft", "none", "lookup", "eagle3", "parallel", "--k", "1", "3", "--accept", "1,1,0",
        "--opt", "dead_positions=false", "argmax=false,uniform_slots=false",
    )
    others = ["", " argmax=false uniform_slots=false"]
    own = ["", " dead_positions=false", " argmax=false uniform_slots=false"]
    expected = [f"none{opt}" for opt in others]
    expected += [f"lookup K={k}{opt}" for k in (1, 3) for opt in others]
    expected += [f"{head} K={k}{opt}" for head in ("eagle3", "parallel") for k in (1, 3) for opt in own]
    assert [row["variant"] for row in rows] == expected
    for row in rows:
        assert row["tokens"] == 48
        # Every draft token but the third is accepted; the last round is cut at the limit: 11 tokens in rounds of 2 or of 3.
        drafts = {"none": 0, "K=1": 1, "K=3": 2}[row["variant"].split(" ")[0 if "none" in row["variant"] else 1]]
        assert row["rounds"] == -(-11 // (1 + drafts))


def test_sampled_rows_are_drafted_with_and_without_the_noise_of_their_draws(shape: Path, tmp_path: Path) -> None:
    rows = lines(
        shape, tmp_path / "o.jsonl", "--draft", "eagle3", "--k", "2", "--temperature", "0", "100", "--opt", "coupled=false",
    )
    assert [row["variant"] for row in rows] == ["eagle3 K=2", "eagle3 K=2 T=100", "eagle3 K=2 T=100 coupled=false"]
    assert rows[1]["mean_acceptance_length"] > 1.8 > rows[2]["mean_acceptance_length"]
    with pytest.raises(ConfigError, match=r"--temperature \[-1.0\] must be in 0 .. 100"):
        lines(shape, tmp_path / "o.jsonl", "--temperature", "-1")


def test_lookup_and_hybrid_learn_from_rows_that_have_ended(shape: Path, tmp_path: Path) -> None:
    rows = lines(
        shape, tmp_path / "o.jsonl", "--draft", "lookup", "hybrid", "--k", "3", "--corpus-tokens", "500", "--gen", "20",
        "--requests", "6",
    )
    assert [row["variant"] for row in rows] == ["lookup K=3", "hybrid K=3"]
    assert rows[0]["tokens"] == rows[1]["tokens"] > 40


def test_trees_run_side_by_side_with_their_chain(shape: Path, tmp_path: Path) -> None:
    rows = lines(
        shape, tmp_path / "o.jsonl", "--draft", "eagle3", "tree", "--k", "3", "--topk", "4", "--nodes", "9",
        "--gen", "30",
    )
    assert [row["variant"] for row in rows] == ["eagle3 K=3", "tree K=3"]
    for row in rows:
        assert row["tokens"] == 120
        assert len(row["accepted_by_position"]) == 3
        assert 1 + sum(row["accepted_by_position"]) == pytest.approx(row["mean_acceptance_length"], abs=2e-3)
        assert row["mean_acceptance_length_of_requests"] >= 1
        assert row["tok_s_of_requests"] > 0


@pytest.mark.parametrize("mode", [[], ["--rounds", "4"]])
def test_rows_follow_schemas_without_ending_before_the_others(shape: Path, tmp_path: Path, mode: list[str]) -> None:
    rows = lines(
        shape, tmp_path / "o.jsonl", "--schemas", "0", "3", "--draft", "none", "lookup", "eagle3", "--k", "2", *mode
    )
    names = ["none", "none schemas=3", "lookup K=2", "lookup K=2 schemas=3", "eagle3 K=2", "eagle3 K=2 schemas=3"]
    assert [row["variant"] for row in rows] == names
    if mode:
        assert all(row["round_us"] > 0 for row in rows)
        return
    assert [row["tokens"] for row in rows] == [48] * 6
    assert rows[3]["mean_acceptance_length"] > rows[2]["mean_acceptance_length"], "what must come is drafted"


def test_what_rows_of_schemas_write_is_what_their_patterns_allow(shape: Path) -> None:
    args = parse(["o", "n", "--shape", str(shape), "--schemas", "3", "--batch", "4", "--prompt", "8", "--gen", "40"])
    bench_ = Bench(args, make_workload(args, torch.device("cpu")), torch.device("cpu"))
    (way,) = variant_specs(args)
    automata = bench_.automata(way)
    assert len({id(one) for one in automata}) == 3
    symbols = symbols_of(None, 320)
    requests = [following(one, automata[i % 3]) for i, one in enumerate(bench_.workload.requests)]
    for done in bench_.engine(way).run(iter(requests)):
        assert done.token_ids is not None
        text = b"".join(
            bytes(symbols.symbols[symbols.starts[token] : symbols.starts[token + 1]].tolist())
            for token in done.token_ids.tolist()
        ).decode()
        begun = f'{{"field_{done.row_index % 3}": "'
        assert text[: len(begun)] == begun[: len(text)]


def test_no_speed_is_shown_where_a_row_failed(shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RowError(code="nonfinite", stage="decode", message="a logit is not finite", retryable=False)
    steps_of = Engine.steps

    def failing(engine: Engine, requests: RequestStream | Iterable[Request]) -> Iterator[list[Completion]]:
        yield from ([done.replace(error=failed) for done in step] for step in steps_of(engine, requests))

    monkeypatch.setattr(Engine, "steps", failing)
    with pytest.raises(InputError, match="of the benchmark failed: nonfinite: a logit is not finite"):
        lines(shape, tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists()


def test_passes_that_were_padded_are_counted(shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU, where padding saves nothing, unless its time is made up."""
    words = ["--batch", "2", "--requests", "6", "--prompt", "9", "--gen", "4", "--draft", "none", "--opt", "prefill_graphs=false"]
    asked, plain = lines(shape, tmp_path / "o.jsonl", *words)
    assert "padded_passes" not in plain
    assert asked["padded_passes"] == 0
    monkeypatch.setattr(PrefillGraphs, "cost", ALWAYS)
    padded, _ = lines(shape, tmp_path / "p.jsonl", *words)
    assert padded["padded_passes"] >= 3
    assert padded["tokens"] == plain["tokens"]


def test_options_of_heads_are_tried_with_heads_alone() -> None:
    words = ["--draft", "none", "lookup", "eagle3", "--k", "1", "--opt", "sharded_draft=false", "dead_positions=false"]
    found = [way.name for way in variant_specs(parse(["o", "n", "--shape", "smol135m", *words]))]
    assert found == ["none", "lookup K=1", "eagle3 K=1", "eagle3 K=1 sharded_draft=false", "eagle3 K=1 dead_positions=false"]


def test_options_of_drafts_are_tried_where_drafts_may_differ_by_them() -> None:
    """Lengths where the engine chooses them; the noise of draws with sampled rows and drafters that draw. Sets are whole."""
    words = ["--draft", "none", "lookup", "eagle3", "tree", "--k", "2", "auto", "--temperature", "0", "1"]
    words += ["--opt", "lengths=false", "coupled=false,argmax=false"]
    found = [way.name for way in variant_specs(parse(["o", "n", "--shape", "smol135m", *words])) if way.options]
    assert found == [
        "lookup K=auto lengths=false", "lookup K=auto T=1 lengths=false",
        "eagle3 K=2 T=1 coupled=false argmax=false",
        "eagle3 K=auto lengths=false", "eagle3 K=auto T=1 lengths=false", "eagle3 K=auto T=1 coupled=false argmax=false",
        "tree K=2 T=1 coupled=false argmax=false", "tree K=auto T=1 coupled=false argmax=false",
    ]


@pytest.mark.parametrize(
    ("past", "drafters"), [(8, ["eagle3"]), (33, ["eagle3", "parallel", "window", "tree", "block", "dflash2"])]
)
def test_single_rounds_are_timed_over_rows_with_a_made_up_past(
    shape: Path, tmp_path: Path, past: int, drafters: list[str]
) -> None:
    rows = lines(
        shape, tmp_path / "o.jsonl", "--rounds", "5", "--prompt", str(past), "--draft", "none", *drafters,
        "--k", "0", "1", "3", "--accept", "1,1,0", "--window", "4", "--topk", "2",
    )
    assert [row["variant"] for row in rows] == ["none", *(f"{drafter} K={k}" for drafter in drafters for k in (0, 1, 3))]
    for row in rows:
        assert (row["past"], row["rounds"], row["batch"]) == (past, 5, 4)
        # Every draft but the third is accepted; the tokens of 5 rounds of 4 rows come in their time.
        length = {"none": 1.0, "K=0": 1.0, "K=1": 2.0, "K=3": 3.0}[row["variant"].split(" ")[-1]]
        assert row["mean_acceptance_length"] == length or row["variant"].startswith("tree")
        tok_s = 4 * row["mean_acceptance_length"] / row["round_us"] * 1e6
        assert row["tok_s"] == pytest.approx(tok_s, rel=1e-3, abs=0.06)  # written with one digit after the point


def test_dflash2_is_timed_with_its_convolutions_and_its_selector(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[tuple[int, int, int]]()
    build = BlockDrafterSpec.build

    def noted(self: BlockDrafterSpec, weights: BlockWeights, *args: Any, **options: Any) -> BlockDrafter:
        found.append((weights.spec.conv_taps, weights.spec.selector_rank, weights.spec.markov_rank))
        return build(self, weights, *args, **options)

    monkeypatch.setattr(BlockDrafterSpec, "build", noted)
    rows = lines(shape, tmp_path / "o.jsonl", "--draft", "block", "dflash2", "--k", "2", "--accept", "1,1")
    assert [row["variant"] for row in rows] == ["block K=2", "dflash2 K=2"]
    assert found == [(0, 0, 256), (2, 256, 0)]


@pytest.mark.parametrize("more", [["--rounds", "3", "--prompt", "40"], []])
def test_rows_have_ngrams_that_do_not_come_twice(
    shape: Path, tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The made-up past of a round is output as far as the window goes."""
    seen = set[tuple[int, ...]]()

    def noted(logits: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, *rest: Any, **named: Any) -> None:
        _, prompt_len, settings = rest
        seen.update((*line, int(length)) for line, length in zip(settings[:, :2].tolist(), prompt_len, strict=True))
        forbid_ngrams(logits, row_ids, positions, *rest, **named)

    monkeypatch.setattr(no_repeat_ngram, "forbid_ngrams", noted)
    words = ["--draft", "none", "lookup", "--k", "2", "--ngrams", "0", "3", "--ngram-window", "30", *more]
    rows = lines(shape, tmp_path / "o.jsonl", *words)
    assert [row["variant"] for row in rows] == ["none", "none ngrams=3", "lookup K=2", "lookup K=2 ngrams=3"]
    assert (3, 30, 10 if more else 8) in seen


def test_rows_with_a_made_up_past_have_pages_of_their_own_wherever_a_window_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchspec.bench.engines.free_after_loading", lambda *_: [0])
    config, cpu = make_target(tmp_path / "model", "dense") / "config.json", torch.device("cpu")
    sizes = ["--batch", "4", "--prompt", "300", "--rounds", "3", "--prefill-tokens", "32", "--k", "0", "--dtype", "float32"]
    args = parse(["o", "tiny", "--shape", str(config), *sizes, "--device", "cpu"])
    (variant,) = variant_specs(args)
    engine = Bench(args, make_workload(args, cpu), cpu).engine(variant, buckets=(4,)).engine
    begin_rows(engine, 300)
    every_key, windowed = engine.executor.rows.page_tables
    assert len(every_key[:, : -(-300 // engine.batch.page_size)].unique()) == 4 * -(-300 // engine.batch.page_size)
    held = (engine.batch.group_pages(2)[1] - 1) // 4
    assert 2 <= held < windowed.shape[1], "a window has fewer pages than the row has columns"
    for start in range(windowed.shape[1] - held + 1):
        pages = windowed[:, start : start + held]
        assert len(pages.unique()) == 4 * held
        assert pages.min() >= 1, "none is the scratch page"


@pytest.mark.parametrize("more", [["--rounds", "3", "--k", "0", "2"], ["--k", "2"]])
def test_rows_have_adapters_of_noise_in_turn(
    shape: Path, tmp_path: Path, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many tokens as without, and in rounds over made-up rows too."""
    seen = list[list[int]]()
    tokens_of = LoraStacks.tokens

    def noted(self: LoraStacks, adapters: torch.Tensor) -> LoraTokens:
        seen.append(sorted(set(adapters.tolist())))
        return tokens_of(self, adapters)

    monkeypatch.setattr(LoraStacks, "tokens", noted)
    words = ["--draft", "none", "window", "--window", "8", *more]
    rows = lines(shape, tmp_path / "o.jsonl", *words, "--adapters", "3", "--adapter-rank", "5")
    assert [1, 2, 3] in seen
    seen.clear()
    plain = lines(shape, tmp_path / "plain.jsonl", *words)
    assert not seen
    assert [row["variant"] for row in rows] == [row["variant"] for row in plain]


def test_auto_drafts_as_far_as_rates_are_given(shape: Path, tmp_path: Path) -> None:
    (row,) = lines(
        shape, tmp_path / "o.jsonl", "--draft", "eagle3", "--k", "auto", "--accept", "1,1", "--window", "4", "--sink", "2"
    )
    assert (row["variant"], row["rounds"]) == ("eagle3 K=auto", 4)


def test_samples_share_their_prompt_unless_told_otherwise(shape: Path, tmp_path: Path) -> None:
    sizes = ["--prompt", "40", "--samples", "4"]
    shared, apart = lines(shape, tmp_path / "o.jsonl", *sizes, "--opt", "sharing=false")
    assert (shared["cached_tokens"], apart["cached_tokens"]) == (3 * 32, 0)
    assert shared["tokens"] == apart["tokens"] == 48


def test_requests_that_outnumber_the_slots_stream_through_them(shape: Path, tmp_path: Path) -> None:
    (row,) = lines(shape, tmp_path / "o.jsonl", "--requests", "9", "--gen", "40")
    assert (row["batch"], row["requests"]) == (4, 9)
    assert 9 * 32 <= row["tokens"] <= 9 * 40
    assert "decode_tok_s" not in row


def test_rows_that_end_are_replaced_so_that_kinds_stay_mixed(shape: Path, tmp_path: Path) -> None:
    """Every second request accepts all of its drafts, the others none: a round emits 3 tokens or 1. Two slots, six requests."""
    words = ["--requests", "6", "--equal", "--gen", "13", "--batch", "2", "--draft", "eagle3", "--k", "2", "--accept", "1,1;0,0"]
    (row,) = lines(shape, tmp_path / "o.jsonl", *words)
    assert (row["requests"], row["tokens"], row["prefill_s"] > 0) == (6, 6 * 13, True)
    assert row["decode_tok_s"] == pytest.approx(6 * 12 / (row["total_s"] - row["prefill_s"]), rel=0.1)
    assert row["mean_acceptance_length"] == pytest.approx(6 * 12 / (3 * 4 + 3 * 12), abs=0.01)
    assert row["mean_live_rows"] > 1.7, "alone, the last row has few rounds"


def test_an_engine_is_prepared_and_fed_as_in_a_job(shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, prepared = count_waiting(monkeypatch), list[tuple[SamplingMode, Survey, int, int]]()

    def note(engine: Engine, mode: SamplingMode, survey: Survey, num_rows: int, window_rows: int) -> None:
        assert (engine.batch.longest_prompt, engine.batch.longest_row) == (8, 48)
        assert engine.batch.max_len == 48, "and nothing of its K/V is held back for longer rows"
        prepared.append((mode, survey, num_rows, window_rows))

    monkeypatch.setattr("batchspec.bench.variants.prepare_engine", note)
    lines(shape, tmp_path / "o.jsonl", "--requests", "40", "--gen", "40", "--temperature", "0.5")
    ((mode, seen, *numbers),) = prepared
    assert (mode, numbers) == (SamplingMode(random=True), [40, 40])
    assert seen.lengths("prompt_tokens").tolist() == [8] * 40
    outputs = seen.lengths("predicted_tokens").tolist()
    assert outputs == sorted(outputs, reverse=True), "surveyed in the order in which they are fed"
    assert max(taken) > 1


@pytest.mark.parametrize("short", [False, True])
def test_layers_with_a_window_have_pages_for_it_alone_only_where_memory_is_short(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 128 tokens in layers that read all keys, and in layers that read the newest 7; an assistant drafts."""
    batches = list[PackedBatch]()
    monkeypatch.setattr("batchspec.bench.variants.prepare_engine", lambda engine, *_a, **_k: batches.append(engine.batch))
    monkeypatch.setattr("batchspec.bench.engines.free_after_loading", lambda *_: [0 if short else 10**12])
    target = make_target(tmp_path / "model", "dense")
    drafts = ["--draft", "none", "mtp", "--draft-path", str(make_assistant(tmp_path / "assistant", target)), "--k", "2"]
    sizes = ["--prompt", "100", "--gen", "28", "--prefill-tokens", "32"]
    rows = lines(target / "config.json", tmp_path / "o.jsonl", *sizes, *drafts, "--accept", "1,0")
    assert [(row["variant"], row["tokens"]) for row in rows] == [("none", 112), ("mtp K=2", 112)]
    assert (rows[0]["mean_live_rows"] == 4) is not short, "no row waits for pages if there is memory"
    for batch in batches:
        every_key, windowed = batch.group_pages(2)
        assert every_key >= 1 + 4 * 128 // batch.page_size
        assert (windowed == every_key) is not short


@pytest.mark.parametrize(("eos", "tokens"), [(True, 100), (False, 200)])
def test_an_engine_expects_as_many_rounds_as_in_a_job_of_the_same_rows(
    eos: bool, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that EOS may end are predicted to reach half their limit of 200 tokens."""
    make_tokenizer(tmp_path / "model")
    make_checkpoint(tmp_path / "model", "llama", eos_token_id=2)
    pl.DataFrame({"prompt": [f"{i} and {i + 1}?" for i in range(9)]}).write_parquet(tmp_path / "in.parquet")
    words = [f"model.path={tmp_path}/model", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", "draft=none"]
    job = open_job(compose([*words, "device=cpu", "decode.max_new_tokens=200", f"decode.ignore_eos={not eos}"]))
    of_job = survey_first(job).expected_rows(job.source.num_rows, window_rows=9)

    prepared: list[ExpectedRows | None] = []
    monkeypatch.setattr(
        "batchspec.bench.variants.prepare_engine",
        lambda engine, mode, survey, num_rows, window_rows: prepared.append(survey.expected_rows(num_rows, window_rows)),
    )
    real = ["--model", str(tmp_path / "model"), "--input", str(tmp_path / "in.parquet"), *(["--eos"] if eos else [])]
    sizes = ["--batch", "4", "--gen", "200", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(tmp_path / "o"), "o", *real, "--draft", "none", *sizes]) == 0
    (of_bench,) = prepared
    assert of_job is not None
    assert of_bench is not None
    assert of_bench.rounds(4) == of_job.rounds(4) == 9 * tokens / 4


def test_a_model_runs_to_the_cap_or_to_its_own_ends_over_prompts_as_chats(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "model")
    make_checkpoint(tmp_path / "model", "llama", eos_token_id=list(range(2, 320, 20)))
    source, out = tmp_path / "prompts.parquet", tmp_path / "out"
    pl.DataFrame({"prompt": [f"{i} and {i + 1}?" for i in range(9)]}).write_parquet(source)
    words = [f"model.path={tmp_path / 'model'}", f"input.path={source}", f"output.dir={out}", "input.chat=true"]
    assert run.main([*words, "draft=none", "device=cpu", "model.dtype=float32", "decode.max_new_tokens=24"]) == 0
    ends = pl.read_parquet(out / "data" / "*.parquet").select(pl.col("usage").struct.field("completion_tokens").sum()).item()
    assert 9 <= ends < 9 * 24

    file, sizes = tmp_path / "lines.jsonl", ["--batch", "4", "--gen", "24", "--dtype", "float32", "--device", "cpu"]
    real = ["--model", str(tmp_path / "model"), "--input", str(source), "--chat", "--draft", "none", "lookup", "--k", "2"]
    assert bench.main([str(file), "whole", *real, *sizes]) == 0
    assert bench.main([str(file), "ends", *real, *sizes, "--eos"]) == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["name"], row["variant"], row["tokens"]) for row in found] == [
        ("whole", "none", 9 * 24), ("whole", "lookup K=2", 9 * 24), ("ends", "none", ends), ("ends", "lookup K=2", ends),
    ]
    assert 1 <= found[3]["mean_acceptance_length"] <= 3


def test_a_small_model_drafts_with_every_length_and_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the model itself, so that every draft is accepted."""
    make_tokenizer(tmp_path / "model")
    make_checkpoint(tmp_path / "model", "llama")
    pl.DataFrame({"prompt": ["1 and 2?", "3 and 4?"]}).write_parquet(tmp_path / "in.parquet")
    loaded, load = list[Path](), pard.load_pard

    def noted(folder: Path, *rest: Any, **named: Any) -> pard.PardModel:
        loaded.append(folder)
        return load(folder, *rest, **named)

    monkeypatch.setattr(pard, "load_pard", noted)
    real = ["--model", str(tmp_path / "model"), "--input", str(tmp_path / "in.parquet"), "--batch", "2", "--gen", "13"]
    words = ["--draft", "pard", "--draft-path", str(tmp_path / "model"), "--k", "2", "3", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([str(tmp_path / "o.jsonl"), "tiny", *real, *words]) == 0
    found = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(row["variant"], row["mean_acceptance_length"]) for row in found] == [("pard K=2", 3.0), ("pard K=3", 4.0)]
    assert loaded == [tmp_path / "model"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs OUT.jsonl and NAME"),
        (["o", "n", "--k", "0"], "--k counts from 1"),
        (["o", "n", "--opt", "argmx=false"], "--opt argmx=false must be NAME=true or NAME=false"),
        (["o", "n", "--opt", "sharing=false"], "needs --samples above 1"),
        (["o", "n", "--accept", ".1,.2"], "non-increasing"),
        (["o", "n", "--accept", ".2;.2,.1"], "as long as those of other kinds"),
        (["o", "n", "--accept", "no-such-output"], "no-such-output is neither numbers, as .6,.28,.12, nor Parquet"),
        (["o", "n", "--rounds", "0"], "--rounds 0 must be at least 1"),
        (["o", "n", "--ngrams", "9", "--ngram-window", "8"], r"--ngrams \[9\] must be in 0 .. 8"),
        (["o", "n", "--rounds", "5", "--k", "auto"], "give numbers to --k, not auto"),
        (["o", "n", "--rounds", "5", "--requests", "9"], "leave out --model, --requests and --samples"),
        (["o", "n", "--equal"], "--equal needs --shape and --requests"),
        (["o", "n", "--equal", "--requests", "9", "--model", "m"], "--equal needs --shape and --requests"),
        (["o", "n", "--samples", "3"], "8 requests are not a multiple of it"),
        (["o", "n", "--eos"], "--chat and --eos need --model"),
        (["o", "n", "--model", "m", "--eos", "--schemas", "0", "5"], "rows with schemas would end at other lengths"),
        (["o", "n", "--accept", ".5", "--schemas", "0", "5"], "drafts accepted by chance follow no schema"),
        (["o", "n", "--adapters", "2", "--adapter-rank", "65"], "there may be up to 256 adapters, of rank 1 to 64"),
        (["o", "n", "--adapters", "2", "--deterministic"], "with --deterministic is not supported"),
        (["--make-job", "d", "--adapters", "2"], "give the job adapters of its own"),
        (["o", "n", "--shape", "llama9b"], "neither one of llama8b"),
        (["o", "n", "--device", "cpu", "--draft", "tree", "--k", "9"], "--draft tree with --k 9, --topk, --nodes: .* at most 64"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench.main(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_profile_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="--profile needs a GPU"):
        bench.main(["o", "n", "--profile", "p.txt"])


def test_the_job_has_the_lengths_that_the_other_engine_is_measured_with(tmp_path: Path) -> None:
    assert make_job(tmp_path, shape="llama8b", num_requests=192, prompt_len=8192, cap=3072) == (204_107, 3072)
    known, hidden = (pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("known", "hidden"))
    assert known.columns == ["id", "prompt_ids", "max_new_tokens"]
    assert hidden.columns == ["id", "prompt_ids", "synthetic_len"]
    assert known["max_new_tokens"].to_list() == hidden["synthetic_len"].to_list()
    assert known["prompt_ids"].list.len().to_list() == [8192] * 192
    generator = torch.Generator().manual_seed(0)  # as /bench/vllm_baseline.py draws them
    ids = torch.randint(10, 30000, (192, 8192), generator=generator)
    assert known["prompt_ids"][191].to_list() == ids[191].tolist()
    lengths = torch.empty(192).log_normal_(6.685, 0.7, generator=generator).clamp(32, 3072).int()
    assert known["max_new_tokens"].to_list() == lengths.tolist()


def test_the_written_job_runs_with_known_and_with_hidden_lengths(
    shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job"
    words = ["--make-job", str(job), "--shape", str(shape), "--requests", "5", "--prompt", "20", "--gen", "60"]
    assert bench.main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("5 prompts of 20 tokens, ")
    for command in said[1:]:
        overrides = command.removeprefix("python -m batchspec.run ").split(" ")
        more = [
            "model.dtype=float32",
            "draft=lookup",
            "draft.num_speculative_tokens=3",
            "draft.synthetic=[0.6,0.28,0.12]",
        ]
        assert run.main([*overrides, *more, "device=cpu"]) == 0
    known, hidden = (pl.read_parquet(job / f"out-{name}/data") for name in ("known", "hidden"))
    lengths = pl.read_parquet(job / "known.parquet")["max_new_tokens"].to_list()
    assert known["token_ids"].list.len().to_list() == hidden["token_ids"].list.len().to_list() == lengths
    assert known["token_ids"].to_list() == hidden["token_ids"].to_list()
    predicted = hidden["perf"].struct.field("predicted_tokens").to_list()
    assert len(set(predicted)) == 1, "the planner sees the cap alone"


def kernel(name: str, ts: float, dur: float, launch: int, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": launch, "stream": 7}}


def graph_launch(launch: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0.0, "dur": 5.0, "args": {"correlation": launch}}


def test_a_trace_becomes_kernels_a_round_and_the_gap_between_replays() -> None:
    events = [{"ph": "M", "name": "process_name", "args": {}}]
    for i in range(4):
        start = 1000.0 * i
        events += [graph_launch(i + 1), kernel("gemm", start, 400, i + 1), kernel("gemm", start + 400, 200, i + 1)]
        events += [kernel("norm", start + 500, 300, i + 1)]  # 100 us of it beside the product
        events += [kernel("Memcpy DtoH", start + 850, 10, 100 + i, "gpu_memcpy")]
    found = read_trace(events, num_rounds=0)
    assert (found.rounds, found.round_us, found.gap_us, found.outside_us) == (4, 1000, 200, 10)
    assert found.busy_us == 800
    assert [(k.name, k.count, k.us) for k in found.kernels] == [("gemm", 2, 600), ("norm", 1, 300)]
    assert found.kernels_per_round == 3
    assert found.summary()["top"][0] == ["gemm", 2, 600]
    text = found.text("eagle3 K=3").splitlines()
    assert text[0].startswith("eagle3 K=3: 4 rounds of 1,000.0 us: 800.0 us in 3.0 kernels, gap between replays 200.0 us")
    assert text[2].split() == ["2.0", "600.0", "300.00", "75.0%", "gemm"]


def test_without_graphs_every_kernel_counts_for_its_share_of_the_rounds() -> None:
    found = read_trace([kernel("a", 10.0 * i, 5, i) for i in range(20)], num_rounds=5)
    assert (found.rounds, found.kernels_per_round, found.busy_us, found.round_us) == (5, 4, 20, 39)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 200)), min_size=1, max_size=30))
def test_busy_time_counts_overlaps_once(spans: list[tuple[int, int]]) -> None:
    events = [graph_launch(1), *(kernel("k", ts, dur, 1) for ts, dur in spans)]
    covered = {us for ts, dur in spans for us in range(ts, ts + dur)}
    assert read_trace(events, 1).busy_us == len(covered)


def test_an_fp8_cache_is_decoded_like_any_other(shape: Path, tmp_path: Path) -> None:
    (row,) = lines(shape, tmp_path / "o.jsonl", "--draft", "lookup", "--k", "2", "--kv", "fp8")
    assert row["tokens"] == 48
    assert "--kv fp8" in row["command"]
