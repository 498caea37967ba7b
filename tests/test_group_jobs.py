"""Whole jobs whose model several processes compute: the same rows as one process writes, whatever becomes of a rank."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import torch

from batchspec import run
from batchspec.model.spec import load_spec
from tests.heads import random_tensors, tiny_design, write_head
from tests.models import make_checkpoint, make_tokenizer
from tests.runs import run_apart, start_apart
from tests.test_workers import ended, journals, owners, wait_for_end, wait_until, workers_of

ROWS = 40
"""Enough rows of enough tokens that a run can be met in the middle."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


@pytest.fixture(scope="module")
def command(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = tmp_path_factory.mktemp("data") / "in.parquet"
    pl.DataFrame({"id": [f"q{i}" for i in range(ROWS)], "prompt": [f"{i} and {i * i}" for i in range(ROWS)]}).write_parquet(data)
    return [
        f"model.path={model}", f"input.path={data}", "decode.max_new_tokens=40", "decode.ignore_eos=true", "draft=none",
        "output.shard_rows=4", "output.token_ids=true", "packing.max_num_seqs=4",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run.main([*command, f"output.dir={out}"]) == 0
    return tokens(out)


def tokens(out: Path, rows: int = ROWS) -> dict[str, list[int]]:
    frame = pl.read_parquet(out / "data")
    counts = Counter(frame["request_id"])
    assert len(counts) == rows
    assert set(counts.values()) == {1}
    assert set(frame["status"]) <= {"ok", "truncated"}
    return dict(frame.select("request_id", "token_ids").iter_rows())


def test_four_ranks_write_what_one_process_does(command: list[str], expected: dict[str, list[int]], tmp_path: Path) -> None:
    code, said = run_apart([*command, f"output.dir={tmp_path / 'out'}", "cluster.tensor_parallel=4"], tmp_path / "log")
    assert code == 0, said
    assert "loading " in said
    assert "in float64 on 4 x cpu" in said
    assert tokens(tmp_path / "out") == expected


def test_sampling_drafts_and_logprobs_on_two_ranks(model: Path, command: list[str], tmp_path: Path) -> None:
    design = tiny_design(load_spec(model))
    head = write_head(tmp_path / "head", design, random_tensors(design))
    more = [
        "decode.temperature=0.9", "decode.top_p=0.95", "decode.repetition_penalty=1.1", "output.logprobs=2", "draft=hybrid",
        f"draft.path={head}", "draft.num_speculative_tokens=3", "draft.corpus_tokens=1000", "input.limit=16", "decode.stop=[a]",
    ]  # fmt: skip
    assert run.main([*command, *more, f"output.dir={tmp_path / 'one'}"]) == 0
    code, said = run_apart([*command, *more, f"output.dir={tmp_path / 'two'}", "cluster.tensor_parallel=2"], tmp_path / "log")
    assert code == 0, said
    assert tokens(tmp_path / "one", 16) == tokens(tmp_path / "two", 16)
    one, two = (pl.read_parquet(tmp_path / name / "data").sort("request_id") for name in ("one", "two"))
    for a, b in zip(one["logprobs"], two["logprobs"], strict=True):
        assert list(a) == pytest.approx(list(b), abs=1e-5)


def test_a_rank_that_is_killed_costs_no_row_and_the_other_group_goes_on(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    parent = start_apart([*command, f"output.dir={out}", "cluster.tensor_parallel=2", "cluster.workers=2"], log)
    wait_until(lambda: len(owners(out)) == 2, parent)
    os.kill(ranks_of(parent, 1)[0], signal.SIGKILL)
    code, said = ended(parent), log.read_text()
    assert re.search(
        r"batchspec: rank 1 of worker \d was killed by SIGKILL; its group ends; 1 other takes its shards over\n", said
    )
    assert code == 0, said
    assert tokens(out) == expected


def ranks_of(parent: object, rank: int) -> list[int]:
    """Processes of the ranks of this number, one of each group."""
    found = []
    for pid in workers_of(parent):  # type: ignore[arg-type]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        place = words.index(b"batchspec.cluster.worker")
        found += [pid] if int(words[place + 3]) == rank else []
    return found


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_a_job_whose_rank_is_lost_is_resumed_even_with_another_number_of_ranks(
    what: str, command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    parent = start_apart([*command, f"output.dir={out}", "cluster.tensor_parallel=2", "cluster.watchdog_s=3"], log)
    wait_until(lambda: (out / "data").is_dir() and any((out / "data").iterdir()), parent)
    pids = workers_of(parent)
    (follower,) = ranks_of(parent, 1)
    os.kill(follower, getattr(signal, what))
    code, said = ended(parent), log.read_text()
    assert code == 75, said
    if what == "SIGSTOP":
        assert "no round ended for 3 s (cluster.watchdog_s); the stacks above show where it hangs" in said
        assert re.search(r"rank 1 of worker 0 does not end: it has begun \d+ of \d+ steps and read \d+ results; killed\n", said)
    else:
        assert "batchspec: rank 1 of worker 0 was killed by SIGKILL; its group ends\n" in said
    wait_for_end(pids)
    assert run.main([*command, f"output.dir={out}"]) == 0
    assert tokens(out) == expected


def test_a_signal_ends_a_group_with_its_work_saved_and_so_does_the_end_of_its_parent(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    words = [*command, f"output.dir={out}", "cluster.tensor_parallel=2"]
    parent = start_apart(words, log)
    wait_until(lambda: len(owners(out)) == 1, parent)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGUSR1)
    code, said = ended(parent), log.read_text()
    assert code == 75, said
    assert re.search(r"\[0\] batchspec: SIGUSR1: \d+ of 10 shards are committed", said), said

    saved = journals(out)
    parent = start_apart(words, log)
    wait_until(lambda: len(owners(out)) == 1, parent)
    pids = workers_of(parent)
    parent.kill()
    ended(parent)
    wait_for_end(pids)
    assert journals(out) > saved
    code, said = run_apart(words, log)
    assert code == 0, said
    assert tokens(out) == expected


def test_what_the_leader_refuses_ends_the_group(command: list[str], tmp_path: Path) -> None:
    code, said = run_apart([*command, f"output.dir={tmp_path / 'out'}", "cluster.tensor_parallel=8"], tmp_path / "log")
    assert code == 2, said
    assert "batchspec: num_attention_heads 4 cannot be cut into 8 equal parts; lower cluster.tensor_parallel" in said
    assert not (tmp_path / "out").exists()
