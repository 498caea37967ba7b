"""A job whose head learns: acceptance rises, tokens stay, and what was learnt is kept, taken up again or refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from batchspec import cli, generate, run
from batchspec.adapt import adapter as adapter_module
from batchspec.adapt.learner import Learner
from batchspec.errors import ConfigError, StorageError
from batchspec.runner import background_commit
from batchspec.storage.local_store import LocalStore
from tests.engines import tiny_target
from tests.heads import random_tensors, tiny_design, write_head
from tests.models import make_checkpoint

NUM_PROMPTS, NUM_ROWS, CAP = 16, 256, 20
LEARNS = ["draft.adapt.every_shards=2", "draft.adapt.time_share=1", "draft.adapt.lr=5e-3"]


def job(folder: Path, out: Path, *overrides: str) -> int:
    words = [f"model.path={folder / 'model'}", f"input.path={folder / 'prompts.parquet'}", f"output.dir={out}", "device=cpu"]
    words += [
        f"decode.max_new_tokens={CAP}",
        "packing.max_num_seqs=32",
        "output.shard_rows=8",
        "output.messages=none",
        *([] if "draft=none" in overrides else ["draft.num_speculative_tokens=3"]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        # Nothing goes by the clock: a head learns from shards that are committed, and a thread commits them, which may lag behind
        # the rounds by all of a small job. Here each shard is committed before the next round.
        patch.setattr(adapter_module, "MEASURE_SHARE", np.inf)
        patch.setattr(background_commit, "WAITING", 0)
        patch.setattr(background_commit, "MOST_WAITING", 0)
        return run.main([*words, *overrides])


def frame_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data" / "*.parquet").sort("row_index")


def mean_length(frame: pl.DataFrame) -> float:
    """Tokens a round."""
    return sum(len(ids) - 1 for ids in frame["token_ids"]) / int(frame["spec_decode"].struct.field("num_spec_steps").sum())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny fp64 model, an input that repeats each prompt 16 times, and two half-trained heads: eagle3 and parallel."""
    folder = tmp_path_factory.mktemp("adapt")
    make_checkpoint(folder / "model", "llama", vocab=96, hidden_size=32, intermediate_size=48, dtype=torch.float64)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 96, 3 + i % 5).tolist() for i in range(NUM_PROMPTS)]
    pl.DataFrame({"prompt_ids": [prompts[i % NUM_PROMPTS] for i in range(NUM_ROWS)]}).write_parquet(folder / "prompts.parquet")
    assert job(folder, folder / "plain", "draft=none", "input.limit=16") == 0
    for kind in ("eagle3", "parallel"):
        words = [f"model.path={folder / 'model'}", f"input.path={folder / 'plain'}", f"output.dir={folder / kind}", "device=cpu"]
        words += [
            "train.steps=12",
            "train.held_out=0",
            "train.batch_tokens=700",
            "train.max_len=64",
            "train.ahead=3",
            "train.lr=1e-2",
        ]
        assert cli.main(["train", *words, f"draft={kind}"]) == 0
    return folder


@pytest.fixture(scope="module", params=["eagle3", "parallel"])
def learnt(made: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[list[str], Path]:
    """A head's overrides, and the output of a job in which it has learnt."""
    out = tmp_path_factory.mktemp("learnt") / "out"
    head = [f"draft={request.param}", f"draft.path={made / request.param}"]
    assert job(made, out, *head, *LEARNS) == 0
    return head, out


def test_acceptance_rises_while_the_job_runs_and_its_tokens_stay_the_same(
    made: Path, learnt: tuple[list[str], Path], tmp_path: Path
) -> None:
    head, out = learnt
    assert job(made, tmp_path / "fixed", *head, "input.limit=64") == 0
    fixed, learns = frame_of(tmp_path / "fixed"), frame_of(out)
    assert learns["token_ids"].to_list() == fixed["token_ids"].to_list() * (NUM_ROWS // 64)
    assert mean_length(learns.head(64)) == pytest.approx(mean_length(fixed), abs=0.05)
    assert mean_length(learns.tail(NUM_ROWS // 4)) > mean_length(fixed) + 0.05


def test_the_same_command_resumes_with_the_trained_head(
    made: Path, learnt: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, out = learnt[0], shutil.copytree(learnt[1], tmp_path / "out")
    before = frame_of(out).head(32)
    for part in sorted((out / "data").iterdir())[:4]:
        part.unlink()
    assert job(made, out, *head, *LEARNS) == 0
    assert "draft.adapt: going on from _batchspec/heads/" in capsys.readouterr().err
    after = frame_of(out).head(32)
    assert after["token_ids"].to_list() == before["token_ids"].to_list()
    assert mean_length(after) > mean_length(before) + 0.05
    (found,) = (out / "_batchspec" / "heads").iterdir()
    assert job(made, tmp_path / "elsewhere", head[0], f"draft.path={found}", "input.limit=32") == 0
    assert mean_length(frame_of(tmp_path / "elsewhere")) == pytest.approx(mean_length(after), abs=0.1)


@pytest.mark.parametrize("learnt", ["eagle3"], indirect=True)
def test_another_head_begins_from_itself_and_a_damaged_one_is_left_alone(
    made: Path, learnt: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, out = learnt[0], shutil.copytree(learnt[1], tmp_path / "out")
    (out / "data" / "part-00000.parquet").unlink()
    assert job(made, out, "draft=parallel", f"draft.path={made / 'parallel'}", *LEARNS) == 0
    assert "going on from" not in capsys.readouterr().err
    (out / "data" / "part-00000.parquet").unlink()
    (found,) = (out / "_batchspec" / "heads").iterdir()
    (found / "model.safetensors").write_bytes(b"no head")
    assert job(made, out, *head, *LEARNS) == 0
    said = capsys.readouterr().err
    assert "draft.adapt: the head of an earlier run is left alone" in said
    assert said.count("Traceback") == 0


@pytest.mark.parametrize("learnt", ["eagle3"], indirect=True)
def test_a_job_that_begins_anew_deletes_what_was_learnt(made: Path, learnt: tuple[list[str], Path], tmp_path: Path) -> None:
    out = shutil.copytree(learnt[1], tmp_path / "out")
    assert job(made, out, *learnt[0], "input.limit=16", "output.overwrite=true", "draft.adapt.every_shards=2") == 0
    assert not (out / "_batchspec" / "heads").exists()


@pytest.mark.parametrize(
    "words", [["draft=hybrid"], ["draft=tree", "draft.tree.topk=3", "draft.tree.nodes=8"]], ids=lambda x: x[0]
)
def test_trees_and_heads_combined_with_lookup_are_trained_too(
    made: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert job(made, tmp_path / "out", *words, f"draft.path={made / 'eagle3'}", "input.limit=128", *LEARNS) == 0
    assert re.search(r"changed the head [1-9]\d* times; it is in _batchspec/heads/", capsys.readouterr().err)
    plain = frame_of(made / "plain")["token_ids"].to_list()
    assert frame_of(tmp_path / "out")["token_ids"].to_list() == plain * 8


def test_a_failing_disk_or_short_memory_ends_the_learning_and_not_the_job(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    head = ["draft=eagle3", f"draft.path={made / 'eagle3'}", "input.limit=96"]
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", no_memory)
        assert job(made, tmp_path / "memory", *head, *LEARNS) == 0
    assert "draft.adapt: CUDA out of memory. Tried to allocate 2.00 GiB: the head stays as it is now" in capsys.readouterr().err
    put = LocalStore.put

    def full(store: LocalStore, name: str, data: bytes) -> None:
        if "/heads/" in name:
            raise StorageError("writing model.safetensors failed: No space left on device (ENOSPC)")
        put(store, name, data)

    monkeypatch.setattr(LocalStore, "put", full)
    assert job(made, tmp_path / "disk", *head[:2], "input.limit=128", *LEARNS) == 0
    assert "draft.adapt: the head is not saved: writing model.safetensors failed" in capsys.readouterr().err


def test_learning_in_process_needs_a_folder_to_commit_to(made: Path) -> None:
    words = [f"model.path={made / 'model'}", "draft=eagle3", f"draft.path={made / 'eagle3'}", *LEARNS]
    with pytest.raises(ConfigError, match=r"every_shards=2 trains on committed shards; set output.dir too"):
        generate({"prompt_ids": [[3, 4]]}, overrides=words)


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ({"own_embedding": True}, "training continues only from plain EAGLE-3 heads with an lm_head and the target's embedding"),
        ({"draft_vocab": None}, "training continues only from plain EAGLE-3 heads with an lm_head and the target's embedding"),
        ({"taps": (1, 2, 0)}, "it reads the target's layers [1, 2, 0], which cannot be written"),
    ],
)
def test_a_head_that_cannot_learn_is_refused_in_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], design: dict[str, Any], said: str
) -> None:
    spec = dataclasses.replace(tiny_target().spec, hidden_size=32, vocab_size=96)
    tiny = tiny_design(spec, heads=4, kv_heads=2, head_dim=16, inner=48, **design)
    write_head(tmp_path / "head", tiny, random_tensors(tiny))
    words = ["draft=eagle3", f"draft.path={tmp_path / 'head'}", "draft.aux_layers=input", *LEARNS]
    assert job(made, tmp_path / "out", *words) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(f"draft.adapt.every_shards=2: the head {tmp_path / 'head'} cannot be trained: {said}; remove the key")
    )
    assert not (tmp_path / "out").exists()
