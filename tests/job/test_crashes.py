"""Rows that kill the process, memory that runs out, rounds that hang: each costs what it must and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch

from batchspec import run
from batchspec.config.schema import PackingConfig
from batchspec.data.runstate.attempts import Attempts
from batchspec.data.runstate.claims import Claims
from batchspec.data.runstate.journal import Journal
from batchspec.data.storage.local_store import LocalStore
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.rounds.round import Round
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.step import ScheduledRound, ScheduledStep
from batchspec.errors import Interrupted
from batchspec.job.runner.oom_fallback import smaller
from batchspec.job.supervise import poison_rows
from batchspec.job.supervise.leases import released_at_end
from batchspec.model.spec import load_spec
from batchspec.packed_batch import PackedBatch
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import Patch, make_model, make_prompts, run_apart

pytestmark = pytest.mark.second

ROWS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("data") / "prompts.parquet", ROWS)


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=4",
        "decode.max_new_tokens=16", "output.token_ids=true", "packing.max_num_seqs=3", "draft=lookup", *more,
    ]


def tokens(out: Path) -> dict[str, list[int] | None]:
    return dict(pl.read_parquet(out / "data").select("request_id", "token_ids").rows())


@pytest.fixture(scope="module")
def finished(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int] | None]:
    out = tmp_path_factory.mktemp("plain") / "out"
    assert run.main(arguments(model, data, out)) == 0
    return tokens(out)


def poison(row: str, number: int, sample: int = 0) -> None:
    """From now on the process dies of a real signal when the prefill of a row's sample begins."""
    execute = Executor.execute

    def deadly(self: Executor, step: ScheduledStep) -> None:
        requests = [refill.request for refill in step.refills]
        if any((request.request_id, request.sample_index) == (row, sample) for request in requests):
            os.kill(os.getpid(), number)
        execute(self, step)

    Executor.execute = deadly  # type: ignore[method-assign]


def test_a_row_that_kills_the_process_is_found_and_its_neighbours_are_complete(
    model: Path, data: Path, finished: dict[str, list[int] | None], tmp_path: Path
) -> None:
    command = arguments(model, data, tmp_path / "out", "resume.row_attempts=2")
    # It dies with its shards, with the last group of its shard, where it is alone by chance, and in two isolated retries.
    for turn, number in enumerate([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL]):
        code, said = run_apart(command, tmp_path / "log", partial(poison, "q7", number))
        assert code == -number, said
        job = json.loads((tmp_path / "out/_batchspec/manifest.json").read_text())["job"]
        kept = Journal(LocalStore(tmp_path / "out", "tmp"), "x", job).read(skip=()).completions
        assert {(4, 0), (5, 0), (6, 0)} <= kept.keys() if turn else not kept  # the group before it need not be done again
    assert run.main(command) == 0
    frame = pl.read_parquet(tmp_path / "out/data")
    assert frame["request_id"].to_list() == [f"q{i}" for i in range(ROWS)]
    bad = frame.filter(pl.col("status") == "error").select("request_id", "error").unnest("error").row(0, named=True)
    assert (bad["request_id"], bad["code"], bad["retryable"]) == ("q7", "crash", True)
    assert "prompts.parquet row 7 (id 'q7'): 2 isolated retries of this row crashed or hung" in bad["message"]
    assert "at the same output position" in bad["message"]
    assert tokens(tmp_path / "out") == finished | {"q7": None}
    assert not (tmp_path / "out/_batchspec/attempts").exists()


def kill_in_round(count: int) -> None:
    """From now on the process is killed in this round of its run."""
    run_round, seen = Round.run, [0]

    def killed(self: Round, *rest: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_round(self, *rest, **named)

    Round.run = killed  # type: ignore[method-assign]


def test_kills_from_outside_make_no_error_of_a_row_that_is_always_alone(
    model: Path, data: Path, finished: dict[str, list[int] | None], tmp_path: Path
) -> None:
    """One row a shard, one slot, and no run lives for more than two rounds: each gets further than the one before."""
    one = arguments(model, data, tmp_path / "out", "output.shard_rows=1", "packing.max_num_seqs=1", "input.limit=2", "draft=none")
    deaths = 0
    while (code := run_apart(one, tmp_path / "log", partial(kill_in_round, 3))[0]) != 0:
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths < 20
    assert deaths > 2 + 3, "after these a row that got no further would be an error row"
    assert tokens(tmp_path / "out") == {name: finished[name] for name in ("q0", "q1")}


def kill_in_time() -> None:
    """From now on the process is killed 0.3 s after its first claim, before any prefill is done: its time is over."""
    take, execute = Claims.take, Executor.execute

    def taken(self: Claims, shard: int) -> bool:
        Claims.take = take  # type: ignore[method-assign]
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return take(self, shard)

    Claims.take = taken  # type: ignore[method-assign]

    def executed(self: Executor, step: ScheduledStep) -> None:
        if step.prefill is not None:
            time.sleep(60)
        execute(self, step)

    Executor.execute = executed  # type: ignore[method-assign]
    poison_rows.COOLDOWN_S = 60.0


def test_kills_at_the_same_time_of_each_run_make_no_error_of_the_row_that_is_alone_then(
    model: Path, data: Path, finished: dict[str, list[int] | None], tmp_path: Path
) -> None:
    """Every second isolated retry has a cooldown, and the kill comes in it: the row is not to blame."""
    command = arguments(model, data, tmp_path / "out", "input.limit=1", "resume.row_attempts=2")
    for _ in range(1 + 1 + 2 * 2):
        assert run_apart(command, tmp_path / "log", kill_in_time)[0] == -signal.SIGKILL
    code, said = run_apart(command, tmp_path / "log")
    assert code == 0, said
    assert tokens(tmp_path / "out") == {"q0": finished["q0"]}


@pytest.mark.parametrize(("cooldown_s", "stopped_at", "rounds"), [(0.25, None, 3), (60.0, 4, 4)], ids=["to its end", "stopped"])
def test_a_run_in_a_cooldown_is_seen_to_live_and_ends_when_it_is_asked_to(
    cooldown_s: float, stopped_at: int | None, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison_rows, "COOLDOWN_S", cooldown_s)
    seen: list[Any] = []
    engine: Any = SimpleNamespace(totals=object(), stopping=False)

    def on_round(totals: Any) -> None:
        seen.append(totals)
        engine.stopping = len(seen) == stopped_at

    began = time.monotonic()
    poison_rows.cool_down(engine, on_round)
    assert min(cooldown_s, 0.3) <= time.monotonic() - began < 30
    assert seen == [engine.totals] * rounds


def kill_at_token(row: str, count: int, sample: int = 0) -> None:
    """From now on the process is killed when a row's sample has this many tokens."""
    schedule = Scheduler._schedule_round

    def deadly(self: Scheduler) -> tuple[ScheduledRound, UnreadLaunch]:
        for state in self.slots.live:
            request = state.request
            num_tokens = self.slots.num_tokens[state.slot] - len(request.prompt_ids)
            if (request.request_id, request.sample_index) == (row, sample) and num_tokens >= count:
                os.kill(os.getpid(), signal.SIGKILL)
        return schedule(self)

    Scheduler._schedule_round = deadly  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("more", "deadly"),
    [([], partial(kill_at_token, "q1", 11, sample=1)), (["output.logprobs=0"], partial(poison, "q1", signal.SIGKILL, sample=1))],
    ids=["after a token", "in its prefill, no tokens kept"],
)
def test_a_row_that_always_kills_at_one_sample_is_found_and_its_finished_samples_stay(
    model: Path, tmp_path: Path, more: list[str], deadly: Patch
) -> None:
    rows = [{"id": f"q{i}", "prompt": f"Say word{i}", "n": 1 + i % 2} for i in range(3)]
    pl.DataFrame(rows, schema_overrides={"n": pl.Int32}).write_parquet(tmp_path / "prompts.parquet")
    settings = ["decode.temperature=1", "decode.ignore_eos=true", "packing.max_num_seqs=1", "resume.row_attempts=2", *more]
    plain, command = (arguments(model, tmp_path / "prompts.parquet", tmp_path / out, *settings) for out in ("plain", "out"))
    assert run.main(plain) == 0
    deaths = 0
    while (code := run_apart(command, tmp_path / "log", deadly)[0]) != 0:
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths < 8
    assert deaths == 2 + 2
    columns = ["request_id", "sample_index", "status", "token_ids"]
    wanted, found = (pl.read_parquet(tmp_path / out / "data").select(columns).rows() for out in ("plain", "out"))
    assert found == [(*row[:2], "error", None) if row[:2] == ("q1", 1) else row for row in wanted]


def break_row(row: str) -> None:
    execute = Executor.execute

    def broken(self: Executor, step: ScheduledStep) -> None:
        if any(refill.request.request_id == row for refill in step.refills):
            raise RuntimeError("an illegal memory access was encountered")
        execute(self, step)

    Executor.execute = broken  # type: ignore[method-assign]


def test_a_row_that_breaks_the_engine_is_found_like_one_that_kills_the_process(
    model: Path, data: Path, finished: dict[str, list[int] | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Executor, "execute", Executor.execute)
    break_row("q2")
    command = arguments(model, data, tmp_path / "out", "resume.row_attempts=1")
    assert [run.main(command) for _ in range(4)] == [1, 1, 1, 0]
    assert tokens(tmp_path / "out") == finished | {"q2": None}


def attempts(folder: Path, *names: str) -> dict[str, Attempts]:
    return {name: Attempts(LocalStore(folder, "tmp"), name) for name in names}


def test_the_crash_count_is_of_isolated_retries_that_crashed_at_the_furthest_position(tmp_path: Path) -> None:
    runs = attempts(tmp_path, *"abcdefghij", "me")
    runs["a"].begin_batch_retry(3, [12, 13, 14])
    runs["b"].begin_batch_retry(3, [15])  # alone by chance
    for name, reached in (("c", 0), ("d", 7), ("e", 7)):
        runs[name].begin_isolated_retry(3, 13)
        runs[name].reached(reached)
    runs["f"].begin_isolated_retry(3, 12)
    runs["f"].clear()  # it ended by itself
    runs["g"].begin_isolated_retry(3, 14)  # it lives: no other run found it dead
    runs["h"].begin_isolated_retry(7, 13)
    runs["i"].begin_cooldown(3, 14)
    runs["j"].begin_cooldown(3, 13)
    runs["j"].begin_isolated_retry(3, 13)  # it was not killed in the cooldown
    runs["j"].reached(7)
    runs["me"].begin_isolated_retry(3, 14)
    assert runs["me"].crash_counts(3) == {}
    for name in "abcdefhij":
        for _ in range(2):
            runs["me"].add_crash(3, name)
    runs["me"].add_crash(3, "me")
    runs["me"].add_crash(7, "x")
    assert runs["me"].crash_counts(3) == {12: 0, 13: 3, 14: 0, 15: 0}
    assert runs["me"].crash_counts(2) == {}
    assert runs["a"].suspect_shards() == {3, 7}
    (cooling,) = attempts(tmp_path, "k").values()
    cooling.begin_cooldown(3, 13)
    runs["me"].add_crash(3, "k")
    assert runs["me"].crash_counts(3)[13] == 2, "a kill in the cooldown takes one off the crash count"


@pytest.mark.parametrize(
    ("error", "counted"), [(None, False), (Interrupted(), False), (KeyboardInterrupt(), False), (RuntimeError(), True)]
)
def test_a_run_that_ends_by_itself_counts_as_no_crash(tmp_path: Path, error: BaseException | None, counted: bool) -> None:
    store = LocalStore(tmp_path, "tmp")
    claims, run_attempts, next_ones = Claims(store, "a"), Attempts(store, "a"), Attempts(store, "b")
    assert claims.take(3)
    with suppress(Interrupted, KeyboardInterrupt, RuntimeError), released_at_end(claims, run_attempts):
        run_attempts.begin_isolated_retry(3, 7)
        if error is not None:
            raise error
    assert Claims(store, "b").take(3), "its claims are free"
    assert next_ones.suspect_shards() == ({3} if counted else set())
    next_ones.add_crash(3, "a")
    assert next_ones.crash_counts(3) == ({7: 1} if counted else {})


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0", b"{", b"[1]", b"7", b"{}", b"[" * 100_000]
    + [b'{"shard": 3, "rows": %s}' % rows for rows in (b"7", b"[[1]]", b'["1"]', b"[null]", b"[0.5]", b"{}")]
    + [b'{"shard": 3, "rows": [1], "reached": %s}' % reached for reached in (b"null", b'"1"', b"[1]")],
)
def test_a_record_of_other_bytes_counts_for_nothing(tmp_path: Path, data: bytes) -> None:
    runs = attempts(tmp_path, "a", "b", "me")
    for name in ("a", "b"):
        runs[name].begin_isolated_retry(3, 5)
        runs["me"].add_crash(3, name)
    (tmp_path / "_batchspec/attempts/rows-a.json").write_bytes(data)
    for name in ("shard-x-a.json", "shard-00003-a", "rows-.json", "note.json"):
        (tmp_path / "_batchspec/attempts" / name).write_bytes(b"{}")
    assert runs["me"].crash_counts(3) == {5: 1}
    assert runs["me"].suspect_shards() == {3}


def short_of_memory(monkeypatch: pytest.MonkeyPatch, rounds: Iterator[int]) -> None:
    """Memory runs out in these rounds, counted over all engines."""
    run_round, seen, bad = Round.run, [0], set(rounds)

    def short(self: Round, *rest: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] in bad:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        return run_round(self, *rest, **named)

    monkeypatch.setattr(Round, "run", short)


def test_memory_that_runs_out_once_shrinks_the_batch_and_no_row_begins_anew(
    model: Path,
    data: Path,
    finished: dict[str, list[int] | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short_of_memory(monkeypatch, iter([6]))
    assert run.main(arguments(model, data, tmp_path / "out", "packing.max_num_seqs=4")) == 0
    said = capsys.readouterr().err
    assert re.search(r"out of memory with 4 slots, \d+ pages, .*\(CUDA out of memory.*\): going on with a smaller batch", said)
    assert "2 rows at a time" in said
    assert tokens(tmp_path / "out") == finished
    stats = pl.read_parquet(tmp_path / "out/data")["spec_decode"].struct.unnest()
    assert sorted(set(stats["num_prefills"])) == [1, 2]  # those in flight went on, the others were not there yet or done
    (log,) = (tmp_path / "out/_batchspec/logs").glob("run-*.json")
    assert json.loads(log.read_text())["tokens"] == sum(len(ids) for ids in finished.values() if ids), "of both batches"


def test_a_tree_still_has_its_pages_in_the_smaller_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama", dtype=torch.float64))
    design = tiny_design(load_spec(model), draft_vocab=64)
    write_head(tmp_path / "head", design, random_tensors(design))
    process, left = EngineRun._process, iter(range(3))

    def short(one: EngineRun) -> None:
        if next(left, 0) == 2:
            raise MemoryError
        process(one)

    monkeypatch.setattr(EngineRun, "_process", short)
    data = make_prompts(tmp_path / "prompts.parquet", 3)
    words = arguments(model, data, tmp_path / "out", "packing.max_num_seqs=1", "draft=tree", f"draft.path={tmp_path / 'head'}")
    assert run.main(words) == 0
    assert "going on with a smaller batch" in capsys.readouterr().err


def test_memory_that_runs_out_twice_ends_the_run_with_what_is_done_kept(
    model: Path,
    data: Path,
    finished: dict[str, list[int] | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = arguments(model, data, tmp_path / "out", "packing.max_num_seqs=4", "draft=none")
    with monkeypatch.context() as patch:
        short_of_memory(patch, iter([20, 30]))
        assert run.main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory again, with 2 slots" in said
    assert "run the same command again" in said
    assert list((tmp_path / "out/_batchspec/journal").iterdir())
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == finished


def test_a_smaller_batch_still_holds_a_row_of_the_greatest_length() -> None:
    batch = PackedBatch(
        num_slots=4, row_buckets=(4,), num_pages=100, page_size=16, max_len=290, num_verified=0, prefill_tokens=2048, run_ahead=0
    )
    for num_pages, lookahead, left in ((100, 0, 75), (20, 0, 20), (24, 63, 24)):  # the nodes of a tree lie after the last token
        packing = smaller(PackingConfig(memory_gb=1.0), replace(batch, num_pages=num_pages), lookahead)
        assert (packing.max_num_seqs, packing.pages, packing.memory_gb, packing.max_num_batched_tokens) == (2, left, None, 1024)


def test_a_batch_that_does_not_fit_at_the_start_is_made_smaller_once(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, fits = Engine.__init__, 2

    def short(self: Engine, target: Any, drafter: Any, batch: Any, **named: Any) -> None:
        if batch.num_slots > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        begin(self, target, drafter, batch, **named)

    monkeypatch.setattr(Engine, "__init__", short)
    assert run.main(arguments(model, data, tmp_path / "out", "packing.max_num_seqs=4")) == 0
    assert pl.read_parquet(tmp_path / "out/data").height == ROWS
    fits = 1
    assert run.main(arguments(model, data, tmp_path / "other", "packing.max_num_seqs=4")) == 2
    assert "out of memory again, with 2 slots" in capsys.readouterr().err
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()], "a refused job leaves no file"


def hang(count: int) -> None:
    run_round, seen = Round.run, [0]

    def stuck(self: Round, *rest: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] == count:
            time.sleep(600)
        return run_round(self, *rest, **named)

    Round.run = stuck  # type: ignore[method-assign]


@pytest.mark.smoke("a hang")
def test_a_round_that_hangs_ends_the_run_with_75_its_stacks_and_the_finished_rows(
    model: Path, data: Path, finished: dict[str, list[int] | None], tmp_path: Path
) -> None:
    command = arguments(model, data, tmp_path / "out", "draft=none", "output.shard_rows=12", "cluster.watchdog_s=2")
    code, said = run_apart(command, tmp_path / "log", partial(hang, 20))
    assert code == 75
    assert "in stuck" in said  # the frame that hangs
    message = r"no round ended for 2 s .* (of the other shards [1-9]\d* completions? (?:is|are) saved); run the same command"
    assert re.search(message, said)
    _, said = run_apart(command, tmp_path / "log", partial(hang, 8))
    saved = re.search(message, said)
    assert saved, said
    code, said = run_apart(command, tmp_path / "log")
    assert code == 0, said
    assert f"{saved[1]}; the rest is computed" in said  # it counted the rows of both runs
    assert tokens(tmp_path / "out") == finished


@pytest.mark.parametrize(
    ("crash_counts", "batches", "isolated"),
    [
        ({}, [[0, 1], [2, 3], [4]], []),
        ({1: 0, 3: 0}, [[0, 2], [4]], [(1, False), (3, False)]),
        ({0: 1, 1: 0, 2: 1, 3: 2, 4: 7}, [], [(1, False), (0, True), (2, True)]),
        (dict.fromkeys(range(5), 2), [], []),
    ],
    ids=["all untried", "suspects follow in isolation", "fewest crashes first, poison rows never", "nothing but poison rows"],
)
def test_retries_of_a_suspect_shard(
    crash_counts: dict[int, int], batches: list[list[int]], isolated: list[tuple[int, bool]]
) -> None:
    """Five rows, two slots, resume.row_attempts=2: what is retried, in which order, and which isolated retry has a cooldown."""
    found = [*poison_rows.planned_retries(range(5), crash_counts, row_attempts=2, num_slots=2)]
    assert [retry.rows for retry in found if not retry.isolated] == batches
    assert [(*retry.rows, retry.cooldown) for retry in found if retry.isolated] == isolated
    assert [retry.isolated for retry in found] == sorted(retry.isolated for retry in found)


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 34, 500, 8191])
def test_checkpoints_are_the_same_in_every_run_and_a_16th_apart_at_most(num_tokens: int) -> None:
    reached = poison_rows.checkpoint(num_tokens)
    assert reached <= num_tokens < reached + max(1, reached // 16)
    assert poison_rows.checkpoint(reached) == reached
