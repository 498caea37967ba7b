"""`batchspec plan`: the numbers are those of the rows, and the memory does not grow with the text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec.checkpoint.generation_config import read_generation
from batchspec.commands import plan as command
from batchspec.commands import plan_text, planning
from batchspec.commands.plan_text import Plan, histogram
from batchspec.commands.planning import plan
from batchspec.config.decode_schema import DecodeConfig
from batchspec.config.schema import RunConfig
from batchspec.data.storage.local_store import LocalStore
from batchspec.errors import BatchspecError, CapacityError, ConfigError, InputError, StorageError
from batchspec.job import prepare
from batchspec.job.load import memory
from batchspec.kernels.common import card
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.model.spec import read_spec
from batchspec.packing.memory import prefill_graph_bytes, reserve_bytes
from batchspec.packing.model_notes import model_notes, sampling_advice
from batchspec.tasks.base import Task
from batchspec.tasks.registry import GENERATE, TASKS
from batchspec.tuning.cards import known_card
from tests.helpers.models import write_weights
from tests.helpers.stand_ins import H200, ByteTokenizer

MODEL = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 4096, "eos_token_id": 257, "tie_word_embeddings": True,
}


@pytest.fixture
def job(tmp_path: Path) -> RunConfig:
    """A model of zeros, 40 output tokens a row; the input is the test's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    write_weights(tmp_path / "model")
    config = RunConfig(device="cpu")
    config.model.path, config.input.path = str(tmp_path / "model"), str(tmp_path / "in.parquet")
    config.decode.max_new_tokens = 40
    return config


def write(config: RunConfig, **columns: Any) -> None:
    pq.write_table(pa.table(columns), config.input.path)


def planned(config: RunConfig, **options: Any) -> Plan:
    return plan(config, tokenizer=cast(Any, ByteTokenizer()), **options)


def test_rows_completions_and_bad_rows_are_counted(job: RunConfig) -> None:
    write(job, id=["a", "b", "c", "d"], prompt=["x" * 10, None, "y" * 30, "z" * 5000], n=[3, 1, None, 1])
    job.decode.temperature = 1.0
    made = planned(job)
    assert made.num_completions == 4
    assert made.survey.prompt_tokens.tolist() == [10, 10, 10, 30]
    assert {code: count for code, (count, _) in made.survey.bad.items()} == {"null_prompt": 1, "too_long": 1}
    text = made.text()
    assert "4 rows in in.parquet" in text
    assert "bad rows     2 of 4" in text
    assert "in.parquet row 3 (id 'd'): 5000 prompt tokens + 40 new tokens exceed model.max_len=4096" in text
    assert not list(Path(job.input.path).parent.glob("out*"))


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("prompts", "keys", "code"),
    [
        ([None, "a"], {}, 0),
        ([None, None, "a"], {}, 3),
        ([None, None, "a"], {"max_error_fraction": 1.0}, 0),
        ([None, None], {"max_error_fraction": 1.0}, 3),
        ([LONG, LONG, "a"], {}, 3),
        ([LONG, LONG, "a"], {"on_overlong": "skip"}, 0),
        ([None] * 29 + ["a"] * 71, {"max_error_fraction": 0.29}, 0),
    ],
)
def test_the_exit_code_is_that_of_a_run_with_so_many_error_rows(
    job: RunConfig, prompts: list[str | None], keys: dict[str, Any], code: int
) -> None:
    for name, value in keys.items():
        setattr(job.input, name, value)
    write(job, prompt=pa.array(prompts, pa.string()))
    made = planned(job)
    assert (made.exit_code, "a run ends with exit code 3: more than" in made.text()) == (code, code == 3)


def test_the_exit_code_for_a_sample_is_that_of_a_run_whose_other_rows_are_like_these(
    job: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SAMPLE_ROWS", 1)
    monkeypatch.setattr(planning, "SHARD_ROWS", 1)
    write(job, prompt=pa.array([None, "a"] * 2, pa.string()))
    sampled = planned(job)  # of every fourth row, the first
    assert sampled.exit_code == 3
    assert "a run ends with exit code 3, sampled from 1 of 4 rows, if the others are like these: more than" in sampled.text()


@pytest.mark.parametrize(
    ("temperature", "generation", "said"),
    [
        (0.0, {"do_sample": True, "temperature": 0.6, "top_k": 20}, "decode.temperature=0.6 decode.top_k=20\n"),
        (0.7, {"do_sample": True, "temperature": 0.6}, None),
        (0.0, {"do_sample": False, "temperature": 0.6}, None),
        (0.0, {"do_sample": True}, None),
    ],
)
def test_a_greedy_job_of_a_model_that_recommends_sampling_is_reported(
    job: RunConfig, temperature: float, generation: dict[str, Any], said: str | None
) -> None:
    write(job, prompt=["x"])
    (Path(job.input.path or "").parent / "model" / "generation_config.json").write_text(json.dumps(generation))
    job.decode.temperature = temperature
    text = planned(job).text()
    assert ("\nsampling     decoding is greedy" in text) == (said is not None)
    assert said is None or f"the model's generation_config.json recommends {said}" in text


@pytest.mark.parametrize(
    ("temperature", "generation", "said"),
    [
        (0.0, {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05},
         "decoding is greedy (decode.temperature=0); the model's generation_config.json recommends decode.temperature=0.7 "
         "decode.repetition_penalty=1.05"),
        (0.7, {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05},
         "the model's generation_config.json recommends decode.repetition_penalty=1.05"),
        (0.0, {"repetition_penalty": 1.0, "min_length": 0, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": None}, ""),
        (0.7, {"suppress_tokens": [3, 4], "no_repeat_ngram_size": 3},
         "the model's generation_config.json sets suppress_tokens=[3, 4], no_repeat_ngram_size=3, which jobs do not follow "
         "(no_repeat_ngram_size: it counts the prompt too; decode.no_repeat_ngram.ngram_size counts the output alone)"),
        (0.0, {"repetition_penalty": 1.2, "forced_eos_token_id": 2},
         "the model's generation_config.json recommends decode.repetition_penalty=1.2 and sets forced_eos_token_id=2, which jobs "
         "do not follow"),
    ],
)
def test_what_the_job_does_not_follow_of_generation_config_is_one_line(
    temperature: float, generation: dict[str, Any], said: str
) -> None:
    assert sampling_advice(DecodeConfig(temperature=temperature), read_generation(generation)) == said


def test_a_penalty_that_the_job_sets_itself_and_a_job_that_scores_need_no_advice() -> None:
    generation = read_generation({"repetition_penalty": 1.05, "suppress_tokens": [3]})
    assert sampling_advice(DecodeConfig(repetition_penalty=1.1), {"repetition_penalty": 1.05}) == ""
    assert sampling_advice(DecodeConfig(), generation, TASKS["score_prompts"]) == ""


def test_a_key_of_the_config_that_nothing_reads_is_reported(job: RunConfig) -> None:
    write(job, prompt=["x"])
    path = Path(job.input.path or "").parent / "model" / "config.json"
    assert "\nnot read " not in planned(job).text()
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_gate_scale": 0.5}))
    assert "\nnot read     config.json: nothing reads attn_gate_scale=0.5; if that changes" in planned(job).text()


@pytest.mark.parametrize(
    ("task", "decode", "end_ids", "said"),
    [
        (GENERATE, DecodeConfig(), set(), "tokenizer_config.json and decode.stop_ids; rows end at max_new_tokens"),
        (GENERATE, DecodeConfig(stop=["x"]), set(), "rows end at a stop string or max_new_tokens"),
        (GENERATE, DecodeConfig(), {2}, None),
        (GENERATE, DecodeConfig(ignore_eos=True), set(), None),
        (TASKS["score_prompts"], DecodeConfig(), set(), None),
    ],
)
def test_a_model_without_an_end_token_is_reported(
    task: Task, decode: DecodeConfig, end_ids: set[int], said: str | None
) -> None:
    notes = dict(model_notes(decode, read_spec(MODEL, "config.json"), end_ids, task))
    assert ("no end" in notes) == (said is not None)
    assert said is None or notes["no end"].endswith(said)


def test_columns_with_names_of_other_programs_are_reported(job: RunConfig) -> None:
    """A column max_tokens, as vLLM's users name it, would only be copied to the output, without a message."""
    write(job, prompt=["x"], max_tokens=[3], stop_token_ids=[[1]], max_new_tokens=[4], tensor_parallel_size=[2])
    (line,) = [line for line in planned(job).text().splitlines() if line.startswith("columns ")]
    assert line == (
        "columns      column 'max_tokens' has no effect: batchspec's name is 'max_new_tokens'; map it, "
        "input.columns.max_new_tokens=max_tokens; column 'stop_token_ids' has no effect: batchspec's name is the key "
        "decode.stop_ids, for all rows"
    )
    write(job, prompt=["x"], max_tokens=[3])
    job.input.columns = {"max_new_tokens": "max_tokens"}
    assert "columns " not in planned(job).text()


def test_the_shape_is_what_the_rows_need(job: RunConfig) -> None:
    write(job, prompt=["x" * 10, "y" * 24])
    made = planned(job)
    assert made.batch is not None
    assert (made.batch.max_len, made.batch.num_verified, made.batch.run_ahead) == (64, 8, 0)
    assert made.batch.num_slots <= 2
    assert made.batch.num_pages == made.batch.num_slots * 4 + 1
    assert made.forecast is not None
    assert made.forecast.rounds >= 20


def test_the_memory_is_stated_before_anything_is_loaded(job: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    write(job, prompt=["x" * 10, "y" * 24])
    monkeypatch.setattr(plan_text, "free_memory", lambda device: 10**9)
    made = planned(job)
    assert made.batch is not None
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64
    weights, pages = 4 * (2 * layer + 300 * 32), made.batch.num_pages * 16 * 2 * 2 * 16 * 4
    total = weights + pages
    text = f"{weights / 1e3:.3g} kB weights + {pages / 1e3:.3g} kB K/V = {total / 1e3:.3g} kB of 1.00 GB that are free"
    assert f"memory       {text}" in made.text()
    assert f"; a full one reads {weights / 1e3:.3g} kB of weights and " in made.text()


def test_what_a_draft_head_keeps_of_each_row_besides_k_and_v_is_stated(job: RunConfig) -> None:
    """Of each slot an EAGLE-3 head keeps its next draft and the confidence in it, 4 bytes each, and a hidden state of 32
    numbers in fp32."""
    write(job, prompt=["x" * 10, "y" * 24])
    assert "states of rows" not in planned(job).text()
    job.model.load_format, job.draft.name = "dummy", "eagle3"
    made = planned(job)
    assert made.batch is not None
    assert f" K/V + {made.batch.num_slots * (4 + 4 + 32 * 4)} B states of rows = " in made.text()


def test_what_recurrent_layers_keep_of_each_row_is_stated(job: RunConfig) -> None:
    """A state of 2 x 6 x 5 numbers, and of the newest 4 tokens the inputs (22), keys (5), values (12) and gates (2 x 2); fp32."""
    folder = Path(str(job.model.path))
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 5, "linear_value_head_dim": 6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder)
    write(job, prompt=["x" * 10, "y" * 24])
    job.draft.name = "none"
    text, row_bytes = planned(job).text(), 3 * 4 * (2 * 6 * 5 + 4 * (22 + 5 + 12 + 2 * 2))
    assert f"\nrecurrent    3 of the layers keep {row_bytes / 1e3:.3g} kB of a row, however long, and no K or V; rows" in text
    assert " states of rows = " in text


GB = 1e9
SCALED = 1 + 4 / 128**2
"""FP8 in blocks: bytes a number."""
LLAMA_BYTES = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096) * SCALED + 2 * 2 * 128256 * 4096
QWEN_BYTES = 48 * (2 * 2048 * 4096 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048) * SCALED + 2 * (2 * 151936 + 48 * 128) * 2048
_OSS_EXPERT = 2944 * (3 * 2880 / 2 + (2 * 2880 + 2944) / 32)
OSS_BYTES = 36 * 128 * _OSS_EXPERT + 2 * (36 * (2 * 4096 + 2 * 512 + 128) + 2 * 201088) * 2880
"""MXFP4 columns are padded to a multiple of 128, and rows of scales too."""
_GLM_ATTENTION = 2 * 12288 * 4096 + 2 * 1024 * 4096
_GLM_SCALES = 46 * (12288 + 2 * 1024 + 4096) + (2 * 10944 + 4096) + 45 * 129 * (2 * 1408 + 4096)
GLM_BYTES = (
    46 * _GLM_ATTENTION + 3 * 10944 * 4096 + 45 * 129 * 3 * 1408 * 4096 + 4 * _GLM_SCALES + 2 * (2 * 151552 + 45 * 128) * 4096
)
"""FP8 in rows, with an fp32 scale each; one dense layer."""
NVFP4_ROWS = 48 * (4096 + 2 * 512 + 2048 + 128 * (2 * 768 + 2048))
NVFP4_BYTES = (
    48 * (2 * 2048 * 4096 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048) * 9 / 16 + 4 * NVFP4_ROWS + 2 * (2 * 151936 + 48 * 128) * 2048
)
"""Four bits a number, one byte for 16, four bytes a row."""
INT4_BYTES = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096) * (1 / 2 + 2 / 128) + 2 * 2 * 128256 * 4096


@pytest.mark.parametrize(
    ("shape", "cache", "kept", "weights", "token_bytes"),
    [
        ("llama8b-fp8", "auto", "FP8 weights and activations", LLAMA_BYTES, 32 * 2 * 8 * 128 * 2),
        ("llama8b-fp8", "fp8", "FP8 weights and activations", LLAMA_BYTES, 32 * 2 * 8 * 128),
        ("qwen3-30b-a3b-fp8", "auto", "FP8 weights and activations", QWEN_BYTES, 48 * 2 * 4 * 128 * 2),
        ("glm-4.5-air-fp8", "auto", "FP8 weights and activations", GLM_BYTES, 46 * 2 * 8 * 128 * 2),
        ("gpt-oss-120b", "auto", "MXFP4 experts", OSS_BYTES, 18 * 2 * 8 * 64 * 2),
        ("llama8b-int4", "auto", "INT4 weights", INT4_BYTES, 32 * 2 * 8 * 128 * 2),
        ("qwen3-30b-a3b-nvfp4", "auto", "NVFP4 weights", NVFP4_BYTES, 48 * 2 * 4 * 128 * 2),
    ],
)
def test_the_memory_of_quantised_models_on_a_gpu(
    shape: str, cache: str, kept: str, weights: float, token_bytes: int, job: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, from the published sizes."""
    free = 140 * 10**9
    for module in (plan_text, memory):
        monkeypatch.setattr(module, "free_memory", lambda device, weights=0: free - weights)
    monkeypatch.setattr(prepare, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(prepare, "check_fp8_kv", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(card, "_read", lambda device: known_card("H200").card)
    monkeypatch.setattr(planning, "device_rates", lambda *_, **__: H200)
    (Path(str(job.model.path)) / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    job.model.load_format, job.cache.dtype, job.packing.max_num_seqs = "dummy", cache, 64
    job.decode.max_new_tokens, job.draft.name = 512, "none"
    write(job, prompt_ids=[[1] * 1024] * 64)
    made = planned(job)
    assert made.batch is not None
    assert made.batch.num_pages == 64 * 96 + 1
    text, pages = made.text(), token_bytes * 16 * sum(made.batch.group_pages(1 + len(made.batch.more_pages)))
    assert f"{weights / GB:.2f} GB ({kept}, the rest bfloat16) on cuda" in text
    assert ("K and V in e4m3" in text) == (cache == "fp8")
    held = reserve_bytes(
        made.job.spec, dtype=torch.bfloat16, slots=64, num_buckets=len(made.batch.row_buckets), num_verified=0,
        prefill_tokens=made.batch.prefill_tokens, max_len=1536, shared_tokens=1024,
    )
    assert 2 * GB < held < 10 * GB
    assert made.batch.graph_tokens is not None
    graphs = prefill_graph_bytes(made.job.spec, dtype=torch.bfloat16, tokens=made.batch.graph_tokens)
    assert 0.3 * GB < graphs < 3 * GB
    line = next(line for line in text.splitlines() if line.startswith("memory"))
    assert line == (
        f"memory       {weights / GB:.2f} GB weights + {graphs / GB:.2f} GB graphs of prefill + {pages / GB:.2f} GB K/V + "
        f"{held / GB:.2f} GB passes, rounds and graphs = "
        f"{(weights + graphs + pages + held) / GB:.2f} GB of 140.00 GB that are free"
    )


def test_pages_leave_memory_for_the_graphs_of_prefill(job: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that cannot hold all rows."""
    free = 33 * 10**9
    for module in (plan_text, memory):
        monkeypatch.setattr(module, "free_memory", lambda device, weights=0: free - weights)
    monkeypatch.setattr(prepare, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    monkeypatch.setattr(card, "_read", lambda device: known_card("H200").card)
    monkeypatch.setattr(planning, "device_rates", lambda *_, **__: H200)
    (Path(str(job.model.path)) / "config.json").write_text(json.dumps(COMMON | SHAPES["llama8b-fp8"]))
    job.model.load_format, job.draft.name = "dummy", "none"
    job.packing.max_num_seqs, job.packing.max_num_batched_tokens, job.decode.max_new_tokens = 64, 16384, 512
    write(job, prompt_ids=[[1] * 3000] * 64)
    graphed = planned(job)
    text = graphed.text()
    job.ablation.prefill_graphs = False
    plain = planned(job)
    assert "graphs of prefill" not in plain.text()
    assert plain.batch is not None
    assert graphed.batch is not None
    tokens = graphed.batch.graph_tokens
    assert tokens is not None
    assert 2000 < tokens < 3000  # more take longer to compute than to launch
    held = prefill_graph_bytes(plain.job.spec, dtype=torch.bfloat16, tokens=tokens)
    a_pass, keys = 1.5 * 2 * tokens * (12 * 4096 + 3 * 14336), 4 * tokens * 2 * 8 * 128 * 2
    assert held == pytest.approx(a_pass + keys + 16 * 16 * 10**6, rel=0.01)
    page_bytes = 32 * 2 * 8 * 128 * 2 * 16
    assert plain.batch.num_pages - graphed.batch.num_pages == pytest.approx(
        held / page_bytes, rel=0.02
    )  # fewer rows need less besides
    assert f" {held / GB:.2f} GB graphs of prefill " in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_job_for_a_gpu_is_planned_where_there_is_none(
    job: RunConfig, cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on the login node of a cluster: its rows are counted, and one line tells where the rest is planned."""
    write(job, prompt_ids=[[5, 6, 7], [8] * 30, [9] * 5000])
    words = [f"model.path={job.model.path}", f"input.path={job.input.path}", f"cache.dtype={cache}", "model.max_len=2048"]
    words += ["decode.max_new_tokens=40", "decode.deterministic=true", "output.token_ids=true", "draft.adaptive=true"]
    assert command.main(["+job=reasoning_8k", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("input        3 rows in in.parquet")
    assert "completions  2" in lines
    assert "bad rows     1 of 3" in lines
    assert "prompts      16 tokens on average, median 16, longest 30" in lines
    assert lines[-1] == (
        "GPU          device=cuda, and torch sees no GPU on this machine; for slots, memory and times run plan on a machine "
        "with the job's GPU, or with device=cpu for those of this CPU"
    )
    assert not any(line.startswith(("shape", "memory", "together")) for line in lines)


def test_token_ids_need_no_tokenizer(job: RunConfig) -> None:
    write(job, prompt_ids=[[1, 2, 3], [4]])
    assert plan(job).survey.prompt_tokens.tolist() == [3, 1]


def test_a_large_input_is_sampled_evenly_and_full_reads_it_all(job: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SAMPLE_ROWS", 1000)
    write(job, prompt_ids=pa.array([[1] * (1 + row // 500) for row in range(5000)]))
    sampled, whole = planned(job), planned(job, full=True)
    assert sampled.survey.num_rows == 1000
    assert set(sampled.survey.prompt_tokens) == {1, 6}
    assert sampled.num_completions == 5000
    assert sampled.batch is not None
    assert sampled.batch.max_len == 4096, "a row that was not read may be as long as the job allows"
    assert "(estimated)" in sampled.text()
    assert whole.survey.num_rows == 5000
    assert whole.batch is not None
    assert whole.batch.max_len == 4096, "a run chooses the shape by its first rows"


def test_an_input_without_a_good_row_is_said_so(job: RunConfig) -> None:
    write(job, prompt=pa.array([None, ""], pa.string()))
    made = planned(job)
    assert made.batch is None
    assert "nothing to run" in made.text()


def test_weights_that_no_memory_holds_are_named_before_the_pages(job: RunConfig) -> None:
    """Else the message would be about K/V, for which nothing is left."""
    config = MODEL | {"num_hidden_layers": 4000, "hidden_size": 16384, "num_attention_heads": 64, "intermediate_size": 65536}
    (Path(str(job.model.path)) / "config.json").write_text(json.dumps(config))
    job.model.load_format = "dummy"
    write(job, prompt_ids=[[1, 2, 3]])
    with pytest.raises(CapacityError, match=r"the weights take [\d,]+\.\d GB as torch.float32, and this machine has"):
        planned(job)


def test_jobs_that_a_run_would_refuse_are_refused(job: RunConfig) -> None:
    write(job, id=["a", "a"], prompt=["x", "y"])
    with pytest.raises(InputError, match="'a'"):
        planned(job)
    write(job, prompt=["x" * 1000])
    job.packing.pages = 8
    with pytest.raises(CapacityError, match="one row of 1040 tokens needs 66"):
        planned(job)
    job.draft.adaptive = True
    with pytest.raises(ConfigError, match=r"draft\.adaptive=true uses times measured on a GPU"):
        planned(job)


@pytest.mark.parametrize("error", [ConfigError("is a file"), StorageError("cannot be written; mend that")])
def test_a_plan_is_made_where_the_output_folder_cannot_be_written(
    job: RunConfig, tmp_path: Path, error: BatchspecError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another machine than that of the run, or for the folder of somebody else."""

    def refuses(self: LocalStore) -> None:
        raise error

    write(job, prompt=["x"])
    job.output.dir = str(tmp_path / "out")
    monkeypatch.setattr(LocalStore, "check_root", refuses)
    made = planned(job)
    assert made.exit_code == error.exit_code
    said = f"a run would end with exit code {error.exit_code}: {error}; what follows is about all rows"
    assert f"\noutput       {said}\n" in made.text()


def test_histogram_lines_cover_every_length_once() -> None:
    lines = histogram(np.array([1, 2, 3, 4, 5, 9, 16, 17], np.int32))
    counts = {line.split()[0] + "-" + line.split()[2]: int(line.split()[3]) for line in lines}
    assert counts == {"1-1": 1, "2-2": 1, "3-4": 2, "5-8": 1, "9-16": 2, "17-32": 1}


def test_the_command_prints_the_plan(job: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write(job, prompt_ids=[[1, 2, 3], [4]])
    argv = [f"model.path={job.model.path}", f"input.path={job.input.path}", "device=cpu", "--full"]
    assert command.main(argv) == 0
    said = capsys.readouterr().out
    for word in ("input", "completions", "bad rows", "prompts", "model", "shape", "pages", "rounds", "prefill", "assumed"):
        assert f"\n{word}" in "\n" + said


PEAK = """
import resource, sys
from batchspec.commands.planning import plan
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.config.schema import RunConfig
from batchspec.text.chat_templates import ChatTemplates
class Words:
    eos_ids, special_ids, added_ids, fingerprint, chats = (2,), {}, {}, "words", ChatTemplates({}, {}, "words", date="2026-01-01")
    def encode(self, text, **_): return [len(word) for word in text.split()]
for path in sys.argv[2:]:
    config = RunConfig(device="cpu")
    config.model.path, config.input.path = sys.argv[1], path
    made = plan(config, tokenizer=Words(), full=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(made.num_completions, peak * 1024)
"""


def peaks(job: RunConfig, *paths: Path) -> list[tuple[int, int]]:
    """Completions and peak resident bytes after planning each input in turn, in a separate process."""
    words = [sys.executable, "-c", PEAK, str(job.model.path), *map(str, paths)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return [(int(rows), int(peak)) for rows, peak in map(str.split, done.stdout.splitlines())]


def write_texts(path: Path, num_rows: int, group_rows: int) -> Path:
    """Rows of about 8 KB of text, made without holding them."""
    words = np.random.default_rng(0).integers(10**5, 10**8, (1000, 1000)).astype(str)
    texts = pa.array([" ".join(row) for row in words])
    prompts = pa.chunked_array([texts] * (num_rows // 1000))
    pq.write_table(pa.table({"id": np.arange(num_rows), "prompt": prompts}), path, row_group_size=group_rows)
    return path


@pytest.mark.second
def test_memory_does_not_grow_with_the_text(job: RunConfig, tmp_path: Path) -> None:
    small, many, one = (
        write_texts(tmp_path / f"{name}.parquet", rows, group)
        for name, rows, group in [("small", 1000, 1000), ("many", 12_000, 1000), ("one", 12_000, 12_000)]
    )
    (_, base), (rows, groups), (_, whole) = peaks(job, small, many, one)
    assert rows == 12_000
    text_bytes = 12_000 * 8000
    assert groups - base < text_bytes / 3
    assert whole - base < text_bytes / 3


@pytest.mark.slow
@pytest.mark.parametrize("group_rows", [1000, 200_000])
def test_200_000_rows_of_8_kb_are_planned_in_1_5_gb(job: RunConfig, tmp_path: Path, group_rows: int) -> None:
    ((rows, peak),) = peaks(job, write_texts(tmp_path / "in.parquet", 200_000, group_rows))
    print(f"row groups of {group_rows:,}: {peak / 1e9:.2f} GB")
    assert rows == 200_000
    assert peak < 1.5e9
