"""Whole jobs whose model several processes compute: the same rows as one process writes, whatever becomes of a rank."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import jsonschema
import polars as pl
import pytest

from batchspec import run
from batchspec.cluster import crew
from batchspec.distributed import rank_processes, silent_ranks
from batchspec.model.spec import load_spec
from batchspec.process import load_progress
from tests.helpers.forked import run_python
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.processes import ended, wait_for_end
from tests.helpers.runs import new_interpreters, put, run_apart, start_apart
from tests.job.crews import commits_wait_for, journals, make_job, owners, tokens, wait_until, workers_of
from tests.model.test_lora import make_adapter

pytestmark = pytest.mark.second

ROWS = 40
"""Enough rows of enough tokens that a run can be met in the middle."""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_job(tmp_path_factory.mktemp("job"), rows=ROWS, new_tokens=40, slots=4)


@pytest.fixture(scope="module")
def model(command: list[str]) -> Path:
    return Path(command[0].removeprefix("model.path="))


@pytest.fixture(scope="module")
def expected(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Of one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run.main([*command, f"output.dir={out}"]) == 0
    return tokens(out, ROWS)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke("two ranks")), 4])
def test_ranks_write_what_one_process_does(
    ranks: int, command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    cut = [f"cluster.tensor_parallel={ranks}", "input.limit=8", "decode.max_new_tokens=12"]
    code, said = run_apart([*command, f"output.dir={tmp_path / 'out'}", *cut], tmp_path / "log")
    assert code == 0, said
    assert "loading " in said
    assert f"in float64 on {ranks} x cpu" in said
    found = tokens(tmp_path / "out", 8)
    assert found == {name: expected[name][:12] for name in found}


def test_sampling_drafts_and_logprobs_on_two_ranks(model: Path, command: list[str], tmp_path: Path) -> None:
    design = tiny_design(load_spec(model))
    head = write_head(tmp_path / "head", design, random_tensors(design))
    more = [
        "decode.temperature=0.9", "decode.top_p=0.95", "decode.repetition_penalty=1.1", "output.logprobs=2", "draft=hybrid",
        f"draft.path={head}", "draft.num_speculative_tokens=3", "draft.corpus_tokens=1000", "input.limit=8", "decode.stop=[a]",
        "decode.max_new_tokens=24",
    ]
    assert run.main([*command, *more, f"output.dir={tmp_path / 'one'}"]) == 0
    cut = ["cluster.tensor_parallel=2", "ablation.sharded_draft=true"]
    words = [*command, *more, f"output.dir={tmp_path / 'two'}", *cut]
    code, said = run_apart(words, tmp_path / "log", new_interpreters)  # strings have other hashes on each rank
    assert code == 0, said
    assert tokens(tmp_path / "one", 8) == tokens(tmp_path / "two", 8)
    one, two = (pl.read_parquet(tmp_path / name / "data").sort("request_id") for name in ("one", "two"))
    for a, b in zip(one["logprobs"], two["logprobs"], strict=True):
        assert list(a) == pytest.approx(list(b), abs=1e-5)


def test_ranks_follow_the_schema_of_each_row(command: list[str], model: Path, tmp_path: Path) -> None:
    schemas: list[dict[str, Any]] = [
        {"enum": [i, i + 1]} if i % 3 else {"type": "array", "items": {"type": "boolean"}, "maxItems": i} for i in range(9)
    ]
    none: dict[str, Any] = {"enum": []}
    rows = [{"id": f"s{i}", "prompt": f"row {i}", "schema": json.dumps(one)} for i, one in enumerate([*schemas, none])]
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    head = write_head(tmp_path / "head", tiny_design(load_spec(model)), random_tensors(tiny_design(load_spec(model))))
    words = [
        *[word for word in command if not word.startswith(("input.", "decode.ignore_eos", "draft="))],
        f"input.path={tmp_path / 'in.parquet'}",
        "input.columns.schema=schema", "decode.temperature=1", "decode.min_new_tokens=2", "draft=hybrid", f"draft.path={head}",
        "draft.num_speculative_tokens=3", "input.max_error_fraction=1", "decode.max_new_tokens=24",
    ]
    assert run.main([*words, f"output.dir={tmp_path / 'one'}"]) == 0
    code, said = run_apart([*words, f"output.dir={tmp_path / 'two'}", "cluster.tensor_parallel=2"], tmp_path / "log")
    assert code == 0, said
    one, two = (pl.read_parquet(tmp_path / name / "data").sort("row_index") for name in ("one", "two"))
    assert one["token_ids"].to_list() == two["token_ids"].to_list()
    assert two["status"].to_list()[9] == "error"
    for row, schema in zip(two.iter_rows(named=True), schemas, strict=False):
        if row["status"] == "ok":
            jsonschema.validate(json.loads(row["completion"]), schema)
    assert two["status"].to_list().count("ok") > 5


def test_rows_with_adapters_on_two_ranks(model: Path, command: list[str], expected: dict[str, list[int]], tmp_path: Path) -> None:
    """Each rank has its part of every adapter, and learns from the leader which row has which."""
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    folders = [make_adapter(tmp_path / name, model, targets, seed=seed) for seed, name in enumerate(("a", "b"))]
    own = [None, "a", "b"]
    (source,) = (Path(word.removeprefix("input.path=")) for word in command if word.startswith("input.path="))
    frame = pl.read_parquet(source).head(9)
    frame.with_columns(adapter=pl.Series([own[i % 3] for i in range(9)])).write_parquet(tmp_path / "in.parquet")
    words = [word for word in command if not word.startswith("input.path=")]
    words += [f"input.path={tmp_path / 'in.parquet'}", f"model.adapters={{a:{folders[0]},b:{folders[1]}}}"]
    words.append("decode.max_new_tokens=12")
    assert run.main([*words, f"output.dir={tmp_path / 'one'}"]) == 0
    code, said = run_apart([*words, f"output.dir={tmp_path / 'two'}", "cluster.tensor_parallel=2"], tmp_path / "log")
    assert code == 0, said
    found = tokens(tmp_path / "two", 9)
    assert found == tokens(tmp_path / "one", 9)
    assert {name for name in found if found[name] == expected[name][:12]} == {"q0", "q3", "q6"}


def test_a_killed_rank_costs_no_row_and_the_other_group_keeps_running(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log, go = tmp_path / "out", tmp_path / "log", tmp_path / "go"
    words = [*command, f"output.dir={out}", "cluster.tensor_parallel=2", "cluster.workers=2"]
    parent = start_apart(words, log, partial(commits_wait_for, go))
    wait_until(lambda: len(owners(out)) == 2, parent)
    os.kill(ranks_of(parent, 1)[0], signal.SIGKILL)
    go.touch()
    code, said = ended(parent), log.read_text()
    assert re.search(
        r"batchspec: rank 1 of worker \d was killed by SIGKILL; its group ends; 1 other takes its shards over\n", said
    )
    assert code == 0, said
    assert tokens(out, ROWS) == expected


def ranks_of(parent: ForkServerProcess, rank: int) -> list[int]:
    """Processes of the ranks of this number, one of each group of two."""
    return workers_of(parent)[rank::2]


@pytest.mark.slow
def test_the_scales_of_an_e4m3_cache_are_those_of_one_process(command: list[str], tmp_path: Path) -> None:
    """Calibrated by all ranks, each its own heads; a job is continued with them by any number of ranks."""
    words = [*command, "cache.dtype=fp8", "input.limit=8"]
    assert run.main([*words, f"output.dir={tmp_path / 'one'}"]) == 0
    code, said = run_apart([*words, f"output.dir={tmp_path / 'four'}", "cluster.tensor_parallel=4"], tmp_path / "log")
    assert code == 0, said
    assert "K and V in e4m3, scales calibrated" in said
    one, four = (json.loads((tmp_path / name / "_batchspec/kv_scales.json").read_text()) for name in ("one", "four"))
    assert one == four
    # A number next to a rounding boundary of e4m3 may fall on its other side, so few tokens may differ.
    first, second = tokens(tmp_path / "one", 8), tokens(tmp_path / "four", 8)
    assert sum(first[name] == second[name] for name in first) >= 6
    code, said = run_apart(
        [*words, f"output.dir={tmp_path / 'one'}", "cluster.tensor_parallel=2", "resume=length", "decode.max_new_tokens=44"],
        tmp_path / "log",
    )
    assert code == 0, said
    assert "K and V in e4m3, scales of the output folder" in said


def impatient() -> None:
    """Of a group whose leader has ended, the others are killed after two and a half seconds, not five. A follower that continues
    then takes that for a pause: its own watchdog does not print its stacks too.
    """
    put(rank_processes, "END_S", 0.5)
    put(load_progress, "PAUSE_S", 2.0)


def impatient_in_the_middle(go: Path) -> None:
    impatient()
    commits_wait_for(go, after=1)


@pytest.mark.parametrize(
    ("what", "rank"), [("SIGKILL", 1), ("SIGSTOP", 1), ("SIGKILL", 0), pytest.param("SIGSTOP", 0, marks=pytest.mark.slow)]
)
def test_a_job_whose_rank_is_lost_is_resumed_even_with_another_number_of_ranks(
    what: str, rank: int, command: list[str], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    out, log, go = tmp_path / "out", tmp_path / "log", tmp_path / "go"
    words = [*command, f"output.dir={out}", "cluster.tensor_parallel=2", "cluster.watchdog_s=3"]
    parent = start_apart(words, log, partial(impatient_in_the_middle, go))
    wait_until(lambda: (out / "data").is_dir() and any((out / "data").iterdir()), parent)
    pids = workers_of(parent)
    (lost,) = ranks_of(parent, rank)
    os.kill(lost, getattr(signal, what))
    go.touch()
    code, said = ended(parent), log.read_text()
    assert code == 75, said
    assert "run the same command again to go on\n" in said
    if (what, rank) == ("SIGSTOP", 0):  # no thread of the process that saves runs
        hangs = r"rank 0 of worker 0 has not run for more than 3 s \(cluster\.watchdog_s\): process \d+ was stopped by a signal, "
        assert re.search(hangs, said)
    elif what == "SIGSTOP":
        assert "no round ended for 3 s (cluster.watchdog_s); the stacks above show where it hangs" in said
        ended_so = (
            r"rank 1 of worker 0 does not end: process \d+ was stopped by a signal, has begun \d+ of \d+ steps and read \d+"
        )
        assert re.search(ended_so + r" results; killed\n", said)
        assert "[0.1] Fatal Python error: Aborted" in said  # its stacks
    else:
        assert f"batchspec: rank {rank} of worker 0 was killed by SIGKILL; its group ends\n" in said
        assert said.endswith(
            "[0] batchspec: rank 1 of this group is gone; run the same command again to go on\n" if rank else
            f"batchspec: {out}: no process was left to say what is saved; run the same command again to go on\n"
        )
    wait_for_end(pids)
    assert run.main([*command, f"output.dir={out}"]) == 0
    assert tokens(out, ROWS) == expected


def test_a_signal_ends_a_group_with_its_work_saved_and_so_does_the_end_of_its_parent(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither leaves a process or a temporary file."""
    out, log, temporary, go = tmp_path / "out", tmp_path / "log", tmp_path / "temporary", tmp_path / "go"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = [*command, f"output.dir={out}", "cluster.tensor_parallel=2"]
    parent = start_apart(words, log, partial(commits_wait_for, go))
    wait_until(lambda: len(owners(out)) == 1, parent)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGUSR1)
    go.touch()
    code, said = ended(parent), log.read_text()
    assert code == 75, said
    assert re.search(r"\[0\] batchspec: SIGUSR1: \d+ of 10 shards are committed", said), said

    saved = journals(out)
    go.unlink()
    parent = start_apart(words, log, partial(commits_wait_for, go))
    wait_until(lambda: len(owners(out)) == 1, parent)
    pids = workers_of(parent)
    parent.kill()
    go.touch()
    ended(parent)
    wait_for_end(pids)
    assert not list(temporary.iterdir())
    assert journals(out) > saved
    code, said = run_apart(words, log)
    assert code == 0, said
    assert tokens(out, ROWS) == expected


def test_ranks_with_other_devices_are_refused(command: list[str], tmp_path: Path, fault: pytest.MonkeyPatch) -> None:
    fault.setenv("FAULT", "device 1 0")
    words = [*command, f"output.dir={tmp_path / 'out'}", "cluster.tensor_parallel=2"]
    code, said = run_apart(words, tmp_path / "log", with_faults)
    assert code == 2, said
    assert re.search(r"batchspec: rank 1 has NVIDIA H100, rank 0 has cpu, torch \S+: ranks of a model need equal devices;", said)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_the_leader_refuses_ends_the_group(command: list[str], tmp_path: Path) -> None:
    code, said = run_apart([*command, f"output.dir={tmp_path / 'out'}", "cluster.tensor_parallel=8"], tmp_path / "log")
    assert code == 2, said
    assert "batchspec: num_attention_heads 4 cannot be cut into 8 equal parts; lower cluster.tensor_parallel" in said
    assert not (tmp_path / "out").exists()


def test_a_leader_whose_main_thread_waits_for_a_lost_rank_saves_its_work_and_ends() -> None:
    """As on a GPU, where the host waits for a kernel that waits for the other GPU."""
    done = run_python(["-c", """import time
from batchspec.job.supervise import watchdog
watchdog.LOST_S = 0.2
dog = watchdog.Watchdog(1000.0, lost=lambda: True)
dog.save = lambda: "of the other shards 3 completions are saved"
with dog.watching():
    time.sleep(60)
"""])
    assert done.returncode == 75
    assert "a rank of this group is gone, and this one waits for it; the stacks above show where it hangs; " in done.stderr
    assert "where it hangs; of the other shards 3 completions are saved" in done.stderr
    assert "in <module>" in done.stderr


def with_faults() -> None:
    crew.PROGRAM = ("-m", "tests.distributed.rank_faults")


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What goes wrong is in the environment of the runs: see tests/distributed/rank_faults.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return monkeypatch


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("diverge 1 30", 70, r"the ranks of this group came to different hidden states within \d+ rounds and prefill passes;"),
        (
            "files 1 0",
            2,
            r"batchspec: .*/model: rank 1 finds other weight files than rank 0: they were written or replaced while",
        ),
        ("oom 1 30", 2, r"batchspec: rank 1: out of memory \(CUDA out of memory. Tried to allocate 20 GiB\); free memory"),
        pytest.param("oom 0 30", 2, r"batchspec: rank 0: out of memory \(CUDA out of", marks=pytest.mark.slow),
        ("prefill 1 20", 2, r"batchspec: rank 1: out of memory \(CUDA out of memory. Tried to allocate 20 GiB\); free memory"),
        pytest.param("prefill 0 20", 2, r"batchspec: rank 0: out of memory \(CUDA out of", marks=pytest.mark.slow),
        ("memory 1 2", 2, r"batchspec: rank 1: out of memory \(CUDA out of memory. Tried to allocate 20 GiB\); free memory"),
        pytest.param("memory 0 2", 2, r"batchspec: rank 0: out of memory \(CUDA out of", marks=pytest.mark.slow),
        ("join 1 0", 2, r"batchspec: out of memory while rank 1 joined its group \(CUDA out of memory. Tried to allocate 20"),
        (f"disk 1 {errno.EIO}", 74, r"\[0\.1\] batchspec: .*/model/model\.safetensors: .* Input/output error \(EIO\); run the"),
        pytest.param(
            f"disk 1 {errno.EACCES}", 2, r"model\.safetensors: cannot be read as safetensors \(.*denied", marks=pytest.mark.slow
        ),
        pytest.param("hang 1 30", 75, r"rank_faults.py., line \d+ in executed", marks=pytest.mark.slow),
    ],
)
def test_what_goes_wrong_on_a_rank_ends_its_group_with_a_clear_word(
    kind: str, code: int, said: str, command: list[str], expected: dict[str, list[int]], tmp_path: Path, fault: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    fault.setenv("FAULT", kind)
    words = [*command, f"output.dir={out}", "cluster.tensor_parallel=2", "cluster.watchdog_s=4"]
    found, text = run_apart(words, log, with_faults)
    assert found == code, text
    assert re.search(said, text), text
    assert "an exchange with the other ranks" not in text, "what the library says is no news"
    for part in (out / "data").glob("*.parquet"):  # what is committed is right
        rows = dict(pl.read_parquet(part).select("request_id", "token_ids").iter_rows())
        assert rows == {name: expected[name] for name in rows}
    assert run.main([*command, f"output.dir={out}"]) == 0
    assert tokens(out, ROWS) == expected


@pytest.mark.slow
def test_a_row_that_crashes_one_rank_alone_becomes_an_error_row(model: Path, tmp_path: Path, fault: pytest.MonkeyPatch) -> None:
    """Found by isolated retries, like a row that crashes the only process."""
    data, out = tmp_path / "in.parquet", tmp_path / "out"
    pl.DataFrame({"id": [f"q{i}" for i in range(6)], "prompt_ids": [[10 + i, 5, 6] for i in range(6)]}).write_parquet(data)
    fault.setenv("FAULT", "poison 1 13")
    words = [
        f"model.path={model}", f"input.path={data}", f"output.dir={out}", "cluster.tensor_parallel=2", "draft=none",
        "decode.max_new_tokens=8", "resume.row_attempts=2", "packing.max_num_seqs=2",
    ]
    codes: list[int] = []
    while not codes or codes[-1] == 75:
        codes.append(run_apart(words, tmp_path / "log", with_faults)[0])
        assert len(codes) < 9, (tmp_path / "log").read_text()
    assert codes[-1] == 0
    frame = pl.read_parquet(out / "data").sort("request_id")
    assert frame["status"].to_list() == ["truncated"] * 3 + ["error"] + ["truncated"] * 2
    assert frame["error"][3]["code"] == "crash"


def more_impatient() -> None:
    impatient()
    put(rank_processes, "STACKS_S", 0.5)
    put(crew, "LEADER_END_S", 3.0)
    put(silent_ranks, "LATER_S", 1.0)


@pytest.mark.slow
def test_ranks_that_are_killed_or_stopped_at_random_moments_change_no_token_and_leave_nothing(
    command: list[str], expected: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run loses up to three processes, leaders or followers, while they start, compute or end, until the job is complete."""
    log, chance, temporary, hits = tmp_path / "log", random.Random(7), tmp_path / "temporary", 0
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    two_groups = ["cluster.tensor_parallel=2", "cluster.workers=2", "cluster.watchdog_s=3"]
    while hits < 8:
        out, code = tmp_path / f"out{hits}", 75
        while code == 75:
            parent, pids = start_apart([*command, f"output.dir={out}", *two_groups], log, more_impatient), set[int]()
            for _ in range(chance.randint(1, 3) if hits < 20 else 0):
                parent.join(chance.uniform(0.5, 6.0))
                found = workers_of(parent) if parent.exitcode is None else []
                pids.update(found)
                for pid in [chance.choice(found)] if found else []:
                    with suppress(ProcessLookupError):
                        os.kill(pid, chance.choice((signal.SIGKILL, signal.SIGSTOP)))
                    hits += 1
            code = ended(parent)
            wait_for_end(list(pids))
        assert code == 0, log.read_text()
        assert tokens(out, ROWS) == expected
        assert not list(temporary.iterdir())


def test_ranks_read_the_log_probabilities_that_rows_ask_for(model: Path, command: list[str], tmp_path: Path) -> None:
    """The leader alone finds what rows ask for, by the column of the input; every rank computes the values."""
    rows = [{"id": f"q{i}", "prompt": f"row {i}", "num_logprobs": (None, 0, 3)[i % 3]} for i in range(6)]
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    words = [
        *[word for word in command if not word.startswith("input.")], f"input.path={tmp_path / 'in.parquet'}",
        "decode.max_new_tokens=8",
    ]
    assert run.main([*words, f"output.dir={tmp_path / 'one'}"]) == 0
    code, said = run_apart([*words, f"output.dir={tmp_path / 'two'}", "cluster.tensor_parallel=2"], tmp_path / "log")
    assert code == 0, said
    one, two = (pl.read_parquet(tmp_path / name / "data").sort("row_index") for name in ("one", "two"))
    assert one["token_ids"].to_list() == two["token_ids"].to_list()
    assert [values is not None for values in two["logprobs"]] == [False, True, True] * 2
    for a, b in zip(one["logprobs"], two["logprobs"], strict=True):
        assert (a is None) == (b is None)
        assert a is None or list(a) == pytest.approx(list(b), abs=1e-5)
    for a, b in zip(one["top_logprobs"].to_list(), two["top_logprobs"].to_list(), strict=True):
        assert (a is None) == (b is None)
        assert a is None or [[top["id"] for top in at] for at in a] == [[top["id"] for top in at] for at in b]
