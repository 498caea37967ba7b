"""What is another job is refused by the name of what differs; what is the same job goes on, however it is run."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchspec import run
from batchspec.config.compose import compose
from batchspec.config.schema import RunConfig
from batchspec.config.typed import keys
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.step import ScheduledRound
from batchspec.errors import OutputError
from batchspec.job.prepare import open_job
from batchspec.job.runner.commit_shards import PendingCommit, ShardCommitter
from batchspec.job.runner.identity import job_fingerprint
from batchspec.job.runner.job_run import open_run
from batchspec.kernels.attention.ordered_step import PART, block_of
from batchspec.model.deterministic import ORDER_VERSION
from batchspec.packing.work_plan import DecodedShard
from tests.cluster.slurm_lab import wait_for
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_thinking_tokenizer, make_tokenizer
from tests.job.test_job import arguments, prompts
from tests.model.test_lora import make_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_thinking_tokenizer(folder, chat_template=CHAT_TEMPLATE)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prompts().write_parquet(tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the plain job: no drafting, one slot."""
    folder = tmp_path_factory.mktemp("plain")
    prompts().write_parquet(folder / "prompts.parquet")
    assert run.main(arguments(model, folder / "prompts.parquet", folder / "out", "draft=none", "packing.max_num_seqs=1")) == 0
    return folder / "out"


CHANGES: dict[str, tuple[Any, str]] = {
    "task": ("reward", "task"),
    "output.embedding_dim": (8, "output.embedding_dim"),
    "output.embedding_dtype": ("float16", "output.embedding_dtype"),
    "output.embedding_pooling": ("mean", "output.embedding_pooling"),
    "input.prompt_name": ("query", "input.prompt_name"),
    "model.adapter": ("{folder}/adapter", "model.adapter"),
    "model.adapters": ({"a": "{folder}/adapter"}, "model.adapters"),
    "model.dtype": ("float32", "model.dtype"),
    "model.activations": ("fp8", "model.activations"),
    "model.quantize": ("fp8", "model.quantize"),
    "model.max_len": (128, "model.max_len"),
    "model.load_format": ("dummy", "model.weights"),
    "model.chat_template": ("{folder}/other.jinja", "model.tokenizer"),
    "model.think_tokens": ("none", "model.think_tokens"),
    "model.vision": (True, "model.vision"),
    "draft.synthetic": ([0.5], "draft.synthetic"),
    "cache.dtype": ("fp8", "cache.dtype"),
    "cache.scales": ("calibrate", "cache.scales"),
    "cache.state_dtype": ("bfloat16", "cache.state_dtype"),
    "decode.max_new_tokens": (23, "decode.max_new_tokens"),
    "decode.min_new_tokens": (1, "decode.min_new_tokens"),
    "decode.temperature": (0.5, "decode.temperature"),
    "decode.top_k": (5, "decode.top_k"),
    "decode.top_p": (0.9, "decode.top_p"),
    "decode.min_p": (0.1, "decode.min_p"),
    "decode.repetition_penalty": (1.1, "decode.repetition_penalty"),
    "decode.presence_penalty": (0.5, "decode.presence_penalty"),
    "decode.frequency_penalty": (0.5, "decode.frequency_penalty"),
    "decode.logit_bias": ({5: -1}, "decode.logit_bias"),
    "decode.bad_words": (["x"], "decode.bad_words"),
    "decode.seed": (1, "decode.seed"),
    "decode.n": (2, "decode.n"),
    "decode.stop": (["x"], "decode.stop"),
    "decode.stop_ids": ([5], "decode.stop_ids"),
    "decode.schema": ({"type": "integer"}, "decode.schema"),
    "decode.regex": ("[a-z]+", "decode.regex"),
    "decode.choice": (["a"], "decode.choice"),
    "decode.choice_norm": ("tokens", "decode.choice_norm"),
    "decode.schema_unsupported": ("check", "decode.schema_unsupported"),
    "decode.grammar": ('root ::= "a"', "decode.grammar"),
    "decode.thinking_token_budget": (5, "decode.thinking_token_budget"),
    "decode.thinking_closing": ("so", "decode.thinking_closing"),
    "decode.repetition_detection.max_pattern_size": (8, "decode.repetition_detection"),
    "decode.repetition_detection.min_pattern_size": (2, "decode.repetition_detection"),
    "decode.repetition_detection.min_count": (3, "decode.repetition_detection"),
    "decode.no_repeat_ngram.ngram_size": (8, "decode.no_repeat_ngram"),
    "decode.no_repeat_ngram.window_size": (50, "decode.no_repeat_ngram"),
    "decode.no_repeat_ngram.whitelist_token_ids": ([5], "decode.no_repeat_ngram"),
    "decode.deterministic": (True, "decode.deterministic"),
    "decode.ignore_eos": (True, "model.end_ids"),
    "input.path": ("{folder}/other.parquet", "input.files"),
    "input.from_job": ("{folder}/answers", "input.files"),
    "input.from_status": (["ok"], "input.from_status"),
    "input.from_where": ("true", "input.from_where"),
    "input.columns": ({"stop": None}, "input.columns"),
    "input.chat": (True, "input.chat"),
    "input.on_overlong": ("skip", "input.on_overlong"),
    "input.final_assistant": ("drop", "input.final_assistant"),
    "input.template_date": ("2025-08-05", "input.template_date"),
    "input.limit": (7, "input.rows"),
    "input.template_kwargs": ({"add_generation_prompt": True}, "input.template_kwargs"),
    "output.shard_rows": (4, "output.shard_rows"),
    "output.messages": ("prompt", "output.messages"),
    "output.reasoning_in_messages": (True, "output.reasoning_in_messages"),
    "input.system": ("Be brief.", "input.system"),
    "input.min_pixels": (64, "model.vision"),
    "input.max_pixels": (640, "model.vision"),
    "input.drop": (["logprobs"], "input.drop"),
    "decode.score": ("prompts", "decode.score"),
    "model.tool_calls": ("hermes", "model.tool_calls"),
    "output.logprob_tokens": (True, "output.schema"),
    "output.token_ids": (False, "output.schema"),
    "input.prompt": ("{{ topic }}", "input.prompt"),
    "output.prompt_ids": (False, "output.schema"),
    "output.logprobs": (1, "output.logprobs"),
    "output.prompt_logprobs": (1, "output.prompt_logprobs"),
    "output.passthrough": ("none", "output.schema"),
}
"""Keys that make another job -> another value, and what the refusal names."""
ELSEWHERE = {
    "output.prompt_logprobs": "below: in a job that scores prompts",
    "task": "tests/tasks/test_reward.py",
    "output.embedding_dim": "tests/tasks/test_embed.py",
    "output.embedding_dtype": "tests/tasks/test_embed.py",
    "output.embedding_pooling": "tests/tasks/test_embed.py",
    "input.prompt_name": "tests/tasks/test_embed.py",
    "model.activations": "tests/model/test_fp8.py",
    "model.adapters": "tests/model/test_lora_rows.py",
    "model.vision": "tests/job/test_image_jobs.py",
    "input.min_pixels": "tests/job/test_image_jobs.py",
    "input.max_pixels": "tests/job/test_image_jobs.py",
    "model.tool_calls": "tests/tool_calls/test_tool_calls.py",
    "cache.state_dtype": "tests/cache/test_state_dtype.py",
    "input.template_date": "tests/text/test_harmony.py",
    "input.from_job": "tests/data/test_from_job.py",
    "input.from_status": "tests/data/test_from_job.py",
    "input.from_where": "tests/data/test_from_job.py",
    "decode.choice_norm": "tests/batch/test_choices.py",
    "input.drop": "tests/data/test_openai_jobs.py",
    "input.prompt": "tests/text/test_row_templates.py",
    "output.logprob_tokens": "the test below",
    "decode.score": "tests/engine/test_scoring_job.py",
}
"""Keys that need other rows or another model -> where they are tested."""
ONLY_WITH = {
    "decode.thinking_closing": ("decode.thinking_token_budget", 5),
    "decode.repetition_detection.min_pattern_size": ("decode.repetition_detection.max_pattern_size", 9),
    "decode.repetition_detection.min_count": ("decode.repetition_detection.max_pattern_size", 9),
    "decode.no_repeat_ngram.window_size": ("decode.no_repeat_ngram.ngram_size", 9),
    "decode.no_repeat_ngram.whitelist_token_ids": ("decode.no_repeat_ngram.ngram_size", 9),
}
"""Keys that are refused, or have no effect, without another one."""
NO_PART = re.compile(
    r"(packing|resume|cluster|ablation)\..*|draft\.(?!synthetic).*|model\.(path|revision)|input\.(max_error_fraction|num_workers|config_name|split|image_root)"
    r"|output\.(dir|dedup|openai|overwrite|license|push_to_hub|push_private|push_overwrite)|device"
)
"""Keys that say where a job lies and how it is run."""


def test_every_key_is_a_part_of_what_a_job_is_or_of_how_it_is_run() -> None:
    """A new key belongs into one of the two: forgotten, its change would mix two jobs."""
    assert {key for key in keys() if not NO_PART.fullmatch(key)} == CHANGES.keys()


def test_another_cut_of_the_keys_is_another_order_of_sums() -> None:
    """Whoever changes one of these numbers raises the version, which `decode.deterministic` brings into a job's identity."""
    assert (PART, block_of(64), block_of(128), block_of(256)) == (2048, 64, 64, 32)
    assert ORDER_VERSION >= 4


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    config = copy.deepcopy(config)
    *groups, name = key.split(".")
    node: Any = config
    for group in groups:
        node = getattr(node, group)
    assert getattr(node, name) != value
    setattr(node, name, value)
    return config


@pytest.mark.second
def test_another_value_of_any_key_that_makes_another_job_is_refused_by_name(finished: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages[0]['content'] }}")
    make_adapter(tmp_path / "adapter", model, ["q_proj"])
    prompts().with_columns(topic=pl.lit("c")).write_parquet(tmp_path / "other.parquet")
    job = open_job(compose(arguments(model, finished.parent / "prompts.parquet", finished)))
    assert not open_run(job).folder.missing()
    for key, (value, name) in CHANGES.items():
        if key in ELSEWHERE:
            continue
        value = value.format(folder=tmp_path) if isinstance(value, str) else value
        config = changed(job.config, key, value)
        if key in ONLY_WITH:
            config = changed(config, *ONLY_WITH[key])
        other = open_job(config, tokenizer=None if key.startswith("model.") else job.tokenizer)
        with pytest.raises(OutputError, match=rf"holds another job \(.*\b{re.escape(name)}: .*output\.overwrite=true") as caught:
            open_run(other)
        assert "\n" not in str(caught.value)


def test_the_texts_of_likeliest_tokens_are_a_part_of_what_a_job_is(finished: Path, model: Path) -> None:
    job = open_job(compose(arguments(model, finished.parent / "prompts.parquet", finished, "output.logprobs=1")))
    other = replace(job, config=changed(job.config, "output.logprob_tokens", True))
    assert job_fingerprint(other) != job_fingerprint(job)


def test_of_how_many_tokens_prompts_have_log_probabilities_is_a_part_of_what_a_job_is(model: Path, tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["a", "b"]}).write_parquet(tmp_path / "in.parquet")
    words = [f"model.path={model}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", "decode.score=prompts"]
    job = open_job(compose([*words, "output.prompt_logprobs=1"]))
    other = replace(job, config=changed(job.config, "output.prompt_logprobs", 2))
    assert job_fingerprint(other) != job_fingerprint(job)


def test_how_and_where_a_job_is_run_does_not_enter_its_fingerprint(finished: Path, model: Path) -> None:
    job = open_job(compose(arguments(model, finished.parent / "prompts.parquet", finished)))
    for key in filter(NO_PART.fullmatch, keys()):
        assert job_fingerprint(replace(job, config=changed(job.config, key, "another"))) == job_fingerprint(job), key


def test_another_job_in_the_same_folder_ends_the_command_before_it_does_anything(
    finished: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments(model, finished.parent / "prompts.parquet", finished, "decode.seed=3")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "decode.seed: 0 -> 3" in said


def same_size_edit(path: Path) -> None:
    frame = pl.read_parquet(path)
    frame.with_columns(topic=pl.col("topic").replace({"a": "b", "b": "a"})).write_parquet(path)


@pytest.mark.second
def test_an_edited_input_and_other_weights_of_the_same_size_are_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    command = arguments(own, data, tmp_path / "out", "decode.max_new_tokens=2")
    assert run.main(command) == 0
    size = data.stat().st_size
    same_size_edit(data)
    assert data.stat().st_size == size
    assert run.main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"holds another job (input.files: {data.name} has other content)" in said
    same_size_edit(data)
    tensors = load_file(own / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, own / "model.safetensors")
    assert run.main(command) == 2
    assert "model.weights" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.second
def test_a_model_of_which_one_layer_was_trained_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, out = shutil.copytree(model, tmp_path / "own"), tmp_path / "out"
    command = arguments(own, data, out, "decode.max_new_tokens=2")
    assert run.main(command) == 0
    tensors = load_file(own / "model.safetensors")
    name = min(tensors, key=lambda name: tensors[name].numel())
    save_file({**tensors, name: tensors[name] * 1.01}, own / "model.safetensors", metadata={"format": "pt"})
    assert run.main(command) == 2
    assert "model.tensors" in capsys.readouterr().err.splitlines()[-1]
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    assert run.main(command) == 0
    (own / "hf_quant_config.json").write_text("{}")
    shutil.rmtree(out)
    assert run.main(command) == 0
    (own / "hf_quant_config.json").unlink()
    assert run.main(command) == 2
    assert "model.quantization" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.second
def test_another_shape_or_template_of_the_model_is_refused_by_name(
    model: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    command = arguments(own, finished.parent / "prompts.parquet", finished)
    assert run.main(command) == 0  # the same model in another folder
    shape = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**shape, "rope_theta": 5000.0, "rope_parameters": None}))
    assert run.main(command) == 2
    assert "model.config" in capsys.readouterr().err.splitlines()[-1]
    (own / "config.json").write_text((model / "config.json").read_text())
    make_tokenizer(own, chat_template=CHAT_TEMPLATE.replace("assistant", "helper"))
    assert run.main(command) == 2
    assert "model.tokenizer" in capsys.readouterr().err.splitlines()[-1]
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert run.main(arguments(model, finished.parent / "prompts.parquet", finished, f"model.chat_template={template}")) == 2
    assert "model.tokenizer" in capsys.readouterr().err.splitlines()[-1]


def test_how_a_job_is_run_is_no_part_of_what_it_is(
    finished: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another drafter, batch and array: nothing is refused, computed or changed."""
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    monkeypatch.setattr(Engine, "__init__", lambda *rest, **named: pytest.fail("a finished job made an engine"))
    task = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "64"}
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    ways = [
        "draft=lookup",
        "draft.num_speculative_tokens=5",
        "packing.max_num_seqs=7",
        "packing.pages=50",
        "packing.max_num_batched_tokens=9",
    ]
    assert run.main(arguments(model, finished.parent / "prompts.parquet", finished, *ways, "cluster.max_restarts=3")) == 0
    assert "already complete: 22 rows" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.second
def test_slots_stay_full_from_shard_to_shard(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round that is launched while there are rows to come has all its slots, at the borders of shards too."""
    slots, rows = 4, 60
    caps = [3 + 7 * i % 11 for i in range(rows)]
    frame = pl.DataFrame({"prompt_ids": [[5 + i, 9, 11] for i in range(rows)], "max_new_tokens": caps})
    frame.write_parquet(tmp_path / "in.parquet")
    schedule, pending = Scheduler._schedule_round, ShardCommitter._pending
    courses, begun = list[tuple[int, bool, int]](), list[DecodedShard]()

    def committed() -> int:
        return len(list((tmp_path / "out/data").glob("*"))) if (tmp_path / "out/data").is_dir() else 0

    def noted(self: Scheduler) -> tuple[ScheduledRound, UnreadLaunch]:
        wait_for(lambda: committed() == len(begun), 60, "commits that have begun")  # their thread is late on a busy machine
        courses.append((len(self.slots.live), self._allocator.is_exhausted(), committed()))
        return schedule(self)

    def counted(self: ShardCommitter, done: DecodedShard) -> PendingCommit:
        begun.append(done)
        return pending(self, done)

    monkeypatch.setattr(Scheduler, "_schedule_round", noted)
    monkeypatch.setattr(ShardCommitter, "_pending", counted)
    settings = [
        "decode.ignore_eos=true",
        "output.messages=none",
        "output.shard_rows=3",
        f"packing.max_num_seqs={slots}",
        "draft=lookup",
    ]
    assert run.main(arguments(model, tmp_path / "in.parquet", tmp_path / "out", *settings)) == 0
    steady = [(live, committed) for live, exhausted, committed in courses if not exhausted]
    assert {live for live, _ in steady} == {slots}
    assert len({committed for _, committed in steady}) > 6  # commits came in between: as many borders were crossed
    assert len(list((tmp_path / "out/data").iterdir())) == rows / 3
