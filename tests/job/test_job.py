"""Whole jobs: Parquet in, Parquet out, through the command line of `batchspec.run`, on a tiny float64 model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import batchspec
from batchspec import run
from batchspec.commands import plan, verify
from batchspec.commands.decode_again import Difference, summary
from batchspec.data.runstate import claims
from batchspec.data.runstate.journal import Journal
from batchspec.data.runstate.manifest import MANIFEST
from batchspec.data.storage.local_store import LocalStore
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.rounds.records import RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.errors import ConfigError, OutputError
from batchspec.job import prepare
from batchspec.job.report.stats import job_stats
from batchspec.job.runner import decode_shards
from batchspec.job.runner.job_run import FoundRun
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.records import Snapshot
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.helpers.runs import run_apart, signalled_after_commits, start_apart

pytestmark = pytest.mark.second

ROWS = 22


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64)
    return make_tokenizer(folder)


def prompts() -> pl.DataFrame:
    """Questions of several lengths with per-row parameters, and three bad rows."""
    rows: list[dict[str, Any]] = []
    for i in range(ROWS):
        words = " ".join(f"word{(i * k) % 7}" for k in range(1, 3 + i % 9))
        rows.append(
            {
                "id": f"q{i}",
                "messages": [{"role": "user", "content": f"Say {words} again and again"}],
                "max_new_tokens": None if i % 3 else 5 + i,
                "temperature": 0.9 if i % 4 == 1 else None,
                "n": 3 if i == 6 else None,
                "stop": ["e"] if i % 5 == 2 else None,
                "topic": ["a", "b"][i % 2],
            }
        )
    rows[3]["messages"] = None
    rows[8]["messages"] = []
    rows[11]["temperature"] = -1.0
    return pl.DataFrame(rows, schema_overrides={"n": pl.Int32})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prompts().write_parquet(tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def arguments(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", f"output.dir={out}", "output.shard_rows=5",
        "decode.max_new_tokens=24", "output.token_ids=true", "output.prompt_ids=true", "packing.max_num_seqs=3", *more,
    ]


def tokens(out: Path) -> dict[tuple[str, int], list[int] | None]:
    frame = pl.read_parquet(out / "data").select("request_id", "sample_index", "token_ids")
    return {(name, sample): ids for name, sample, ids in frame.iter_rows()}


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the plain job: no drafting, one slot."""
    folder = tmp_path_factory.mktemp("plain")
    prompts().write_parquet(folder / "prompts.parquet")
    assert run.main(arguments(model, folder / "prompts.parquet", folder / "out", "draft=none", "packing.max_num_seqs=1")) == 0
    return folder / "out"


@pytest.mark.smoke("a whole job")
def test_every_row_is_written_once_in_input_order_with_its_columns(finished: Path) -> None:
    frame = pl.read_parquet(finished / "data")
    expected = [(f"q{i}", sample) for i in range(ROWS) for sample in range(3 if i == 6 else 1)]
    assert frame.select("request_id", "sample_index").rows() == expected
    assert frame["topic"].to_list() == [["a", "b"][int(name[1:]) % 2] for name, _ in expected]
    bad = frame.filter(pl.col("status") == "error")
    assert dict(zip(bad["request_id"], bad["error"].struct.field("code"), strict=True)) == {
        "q3": "null_prompt",
        "q8": "empty_prompt",
        "q11": "bad_parameter",
    }
    good = frame.filter(pl.col("status") != "error")
    assert good["token_ids"].list.len().to_list() == good["usage"].struct.field("completion_tokens").to_list()
    answers = [messages[-1] for messages in good["messages"]]
    assert [answer["content"] for answer in answers] == good["completion"].to_list()
    assert (finished / "README.md").read_text().startswith("---\nconfigs:")


@pytest.mark.parametrize(
    "settings",
    [
        ["draft=lookup"],
        [
            "draft=lookup",
            "draft.num_speculative_tokens=8",
            "draft.prompt_lookup_min=2",
            "packing.max_num_seqs=4",
            "packing.run_ahead=2",
        ],
        ["draft=lookup", "draft.num_speculative_tokens=6", "draft.corpus_tokens=3000"],
        ["draft=lookup", "draft.num_speculative_tokens=1", "packing.max_num_seqs=16", "packing.max_num_batched_tokens=7"],
        ["draft=none", "packing.max_num_seqs=16", "output.shard_rows=3", "ablation.uniform_slots=false"],
        ["draft=lookup", "packing.max_num_seqs=4", "packing.pages=9", "ablation.argmax=false", "ablation.dead_rows=false"],
    ],
)
def test_tokens_do_not_depend_on_drafting_or_packing(
    model: Path, data: Path, finished: Path, tmp_path: Path, settings: list[str]
) -> None:
    assert run.main(arguments(model, data, tmp_path / "out", *settings)) == 0
    assert tokens(tmp_path / "out") == tokens(finished)


def test_a_run_ends_with_a_line_and_a_file_with_its_speed(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments(model, data, tmp_path / "out", "draft=lookup", "output.dedup=false")) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "first row read to the last commit" in line]
    (log,) = (tmp_path / "out/_batchspec/logs").glob("run-*.json")
    facts = json.loads(log.read_text())
    assert facts["tokens"] == sum(len(ids) for ids in tokens(tmp_path / "out").values() if ids is not None)
    assert said.startswith(f"{facts['tokens']:,} completion tokens in {facts['seconds']:.2f} s")
    assert facts["tok_s"] == pytest.approx(facts["tokens"] / facts["seconds"], rel=0.01)
    speed = job_stats(tmp_path / "out").speed
    assert speed is not None
    assert f"{speed.tok_s:,.1f} tok/s" in said, "the log, `stats` and the report show the same number"
    assert 1 <= facts["mean_acceptance_length"] <= 9
    assert 1 <= facts["mean_live_rows"] <= 3


def test_a_synthetic_end_cuts_a_row_at_its_length_in_any_batch(model: Path, tmp_path: Path) -> None:
    ends = [3, 9, None, 24, 1, 30]
    rows = [{"prompt_ids": [5 + i, 9, 11], "synthetic_len": end} for i, end in enumerate(ends)]
    pl.DataFrame(rows).write_parquet(tmp_path / "ends.parquet")
    common = ["draft=lookup", "decode.ignore_eos=true", "output.messages=none"]
    for slots in (1, 4):
        out = tmp_path / f"out{slots}"
        command = arguments(model, tmp_path / "ends.parquet", out, *common, f"packing.max_num_seqs={slots}")
        assert run.main(command) == 0
        frame = pl.read_parquet(out / "data")
        assert frame["token_ids"].list.len().to_list() == [min(end or 24, 24) for end in ends]
        assert frame["finish_reason"].to_list() == ["length"] * len(ends)
    assert tokens(tmp_path / "out1") == tokens(tmp_path / "out4")


def test_tokens_do_not_depend_on_the_order_of_the_input(model: Path, data: Path, finished: Path, tmp_path: Path) -> None:
    prompts().sample(fraction=1, shuffle=True, seed=3).write_parquet(data)
    assert run.main(arguments(model, data, tmp_path / "out")) == 0
    assert tokens(tmp_path / "out") == tokens(finished)


@pytest.mark.smoke("resume after SIGKILL")
def test_a_run_killed_after_a_shard_is_finished_by_the_same_command(
    model: Path, data: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(model, data, tmp_path / "out", "draft=lookup")
    assert run_apart(command, tmp_path / "log", partial(signalled_after_commits, 2, signal.SIGKILL))[0] == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/data").iterdir()}
    assert len(before) == 2
    assert run.main(command) == 0
    assert "2 of 5 shards are committed already" in capsys.readouterr().err
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/data").iterdir()}
    assert {name: after[name] for name in before} == before
    assert tokens(tmp_path / "out") == tokens(finished)


def test_ctrl_c_prints_how_to_resume_and_exits_75(model: Path, data: Path, finished: Path, tmp_path: Path) -> None:
    command = arguments(model, data, tmp_path / "out", "output.shard_rows=2")
    code, text = run_apart(command, tmp_path / "log", partial(signalled_after_commits, 2, signal.SIGINT))
    assert code == 75
    said = text.splitlines()[-1]
    assert re.search(
        r"SIGINT: [2-9] of 11 shards are committed, of the other shards (no|\d+) completions? (is|are) saved.*; run the", said
    ), said
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == tokens(finished)


def signalled_in_round(count: int, number: signal.Signals) -> None:
    """The process gets a real signal in the middle of this round."""
    run_round, seen = Round.run, list[int]()

    def signalled(self: Round, *rest: Any, **named: Any) -> RoundResult:
        seen.append(1)
        if len(seen) == count:
            os.kill(os.getpid(), number)
        return run_round(self, *rest, **named)

    Round.run = signalled  # type: ignore[method-assign]


def signalled_while_a_renewal_waits(log: Path) -> None:
    """SIGTERM arrives while the store holds up a claim's renewal, which ends only when rows are saved. Each renewal that is begun
    writes a line: whether they were."""
    put, flush, begun, saved = LocalStore.put, Journal.flush, threading.Event(), threading.Event()

    def held_up(self: LocalStore, name: str, data: bytes) -> None:
        if name.startswith(claims.FOLDER) and json.loads(data).get("counter"):
            begun.set()
            in_time = saved.wait(10)
            with log.open("a") as lines:
                print(in_time, file=lines)
        put(self, name, data)

    def flushed(self: Journal, snapshots: Iterable[Snapshot] = ()) -> int:
        count = flush(self, snapshots)
        if count:
            saved.set()
        return count

    def when_begun(self: RunMonitor, totals: EngineTotals, call: Callable[..., None] = RunMonitor.after_round) -> None:
        call(self, totals)
        if totals.tokens > 20 and begun.wait(60):
            os.kill(os.getpid(), signal.SIGTERM)

    claims.RENEW_S = 0.0
    LocalStore.put, Journal.flush, RunMonitor.after_round = held_up, flushed, when_begun  # type: ignore[method-assign]


def test_a_signal_saves_rows_while_the_store_holds_up_the_renewal_of_a_claim(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    """A store may take minutes for an operation; a batch system kills a run 30 to 90 s after the signal."""
    command = arguments(model, data, tmp_path / "out", "output.shard_rows=3", "packing.max_num_seqs=4")
    patch = partial(signalled_while_a_renewal_waits, tmp_path / "renewals")
    code, said = run_apart(command, tmp_path / "log", patch)
    assert (code, "completions are saved" in said) == (75, True), said
    owners = [json.loads(path.read_text())["owner"] for path in (tmp_path / "out" / claims.FOLDER).iterdir()]
    assert len(owners) > 1
    assert set(owners) == {""}, "claims are released, and no renewal comes after that"
    assert (tmp_path / "renewals").read_text() == "True\n", "of several claims no other one is renewed after the signal"
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == tokens(finished)


def test_a_signal_saves_finished_and_unfinished_rows_and_the_next_run_resumes_them(
    model: Path, data: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three signals in turn, as a batch system sends them; one shard holds everything, so none is committed before the end."""
    command = arguments(model, data, tmp_path / "out", "draft=lookup", "packing.max_num_seqs=4", "output.shard_rows=22")
    rows = r"(of the other shards [1-9]\d* completions? (?:is|are) saved \([1-4] of them unfinished, with [1-9]\d* tokens\))"
    left, said = list[int](), list[str]()
    for number, rounds in ((signal.SIGTERM, 5), (signal.SIGUSR1, 8), (signal.SIGUSR2, 8)):
        code, text = run_apart(command, tmp_path / "log", partial(signalled_in_round, rounds, number))
        assert code == 75, text
        said += re.findall(rf"{number.name}: 0 of 1 shards are committed, {rows};", text.splitlines()[-1])
        left.append(sum(path.stat().st_size for path in (tmp_path / "out/_batchspec/journal").iterdir()))
        if len(said) > 1:  # a run finds what the one before it said, of all runs before it
            assert f"0 of 1 shards are committed already, {said[-2]}; the rest is computed" in text
    assert left == sorted(left)
    assert len(said) == 3
    assert not list((tmp_path / "out/data").glob("*"))
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == tokens(finished)
    assert not (tmp_path / "out/_batchspec/journal").exists()
    stats = pl.read_parquet(tmp_path / "out/data")["spec_decode"].drop_nulls().struct.unnest()
    assert max(stats["num_prefills"].to_list()) > 1  # unfinished rows were resumed, with their tokens
    emitted = stats["num_prefills"] + stats["num_accepted_draft_tokens"] + stats["num_spec_steps"]
    lengths = pl.read_parquet(tmp_path / "out/data").filter(pl.col("spec_decode").is_not_null())["token_ids"].list.len()
    assert (emitted == lengths + stats["num_discarded_tokens"]).all()
    (log,) = (tmp_path / "out/_batchspec/logs").glob("run-*.json")
    assert 0 < json.loads(log.read_text())["tokens"] < lengths.sum()  # how fast the last run was says nothing of earlier ones


def test_a_segment_that_is_still_being_written_at_the_end_of_a_job_is_not_left_over(
    model: Path, data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is slow to save rows: the run that completes the job waits for it, and deletes the journal after that."""
    out, late = tmp_path / "out", list[bool]()
    put = LocalStore.put_if_absent

    def slow(self: LocalStore, name: str, content: bytes) -> bool:
        if threading.current_thread().name == "journal":
            due = time.monotonic() + 60
            while len(list((out / "data").glob("part-*"))) < 5 and time.monotonic() < due:
                time.sleep(0.01)
            ended = time.monotonic() + 1.0
            while time.monotonic() < ended and not (out / "README.md").exists():
                time.sleep(0.01)
            late.append(True)
        return put(self, name, content)

    monkeypatch.setattr(LocalStore, "put_if_absent", slow)
    monkeypatch.setattr(decode_shards, "JOURNAL_S", -1.0)
    assert run.main(arguments(model, data, out, "draft=none")) == 0
    for thread in threading.enumerate():
        if thread.name == "journal":
            thread.join(60)
    assert late
    assert not (out / "_batchspec/journal").exists()
    assert tokens(out) == tokens(finished)


def test_runs_at_the_same_time_share_the_shards_and_one_that_is_killed_leaves_its_part_to_the_others(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    """As tasks of an array, without any index: every row once, and whoever sees the job complete writes the card."""
    command = arguments(model, data, tmp_path / "out", "draft=lookup", "output.shard_rows=1", "packing.max_num_seqs=2")
    runs = [start_apart(command, tmp_path / f"log{i}") for i in range(3)]
    claims = tmp_path / "out/_batchspec/claims"
    while not (claims.is_dir() and list(claims.iterdir())):
        assert any(run.exitcode is None for run in runs)
        time.sleep(0.01)
    runs[0].kill()
    for one in runs:
        one.join(120)
    said = [(tmp_path / f"log{i}").read_text() for i in range(3)]
    assert [one.exitcode for one in runs] == [-signal.SIGKILL, 0, 0], said
    assert tokens(tmp_path / "out") == tokens(finished)
    assert len(list((tmp_path / "out/data").iterdir())) == 22
    assert (tmp_path / "out/README.md").exists()
    assert not claims.exists()


def test_a_damaged_journal_costs_its_rows_and_nothing_else(model: Path, data: Path, finished: Path, tmp_path: Path) -> None:
    command = arguments(model, data, tmp_path / "out", "draft=lookup", "packing.max_num_seqs=4", "output.shard_rows=22")
    assert run_apart(command, tmp_path / "log", partial(signalled_in_round, 12, signal.SIGTERM))[0] == 75
    for segment in (tmp_path / "out/_batchspec/journal").iterdir():
        data_bytes = bytearray(segment.read_bytes())
        data_bytes[len(data_bytes) // 2] ^= 1
        segment.write_bytes(bytes(data_bytes))
    assert run.main(command) == 0
    assert tokens(tmp_path / "out") == tokens(finished)


@pytest.mark.parametrize(
    ("missing", "said"),
    [([1, 5], "this run's part is done; other runs work on 2 of 7 shards"), ([], "done, 22 rows in 7 shards")],
)
def test_a_run_says_whether_other_runs_still_work_when_it_has_nothing_more_to_compute(missing: list[int], said: str) -> None:
    found: Any = object.__new__(FoundRun)
    found.begins_job, found.job = True, SimpleNamespace(layout=SimpleNamespace(num_rows=22))
    found.folder = SimpleNamespace(missing=lambda: missing, num_shards=7, is_extended=lambda: False)
    assert found.end().outcome() == said


def test_a_finished_job_computes_nothing_and_changes_nothing(
    finished: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    monkeypatch.setattr(Engine, "__init__", lambda *rest, **named: pytest.fail("a finished job made an engine"))
    command = arguments(model, finished.parent / "prompts.parquet", finished, "draft=lookup")
    assert run.main(command) == 0
    assert "already complete: 22 rows" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_overwrite_starts_anew(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(model, data, out)) == 0
    assert run.main(arguments(model, data, out, "output.overwrite=true", "decode.max_new_tokens=2")) == 0
    made = tokens(out)
    assert all(len(made[f"q{i}", 0] or []) <= 2 for i in range(ROWS) if i % 3)  # the others have a cap of their own
    assert pl.read_parquet(out / "data").height == ROWS + 2


def test_a_seed_given_back_repeats_the_sample(model: Path, data: Path, finished: Path, tmp_path: Path) -> None:
    third = pl.read_parquet(finished / "data").filter(pl.col("request_id") == "q6").row(2, named=True)
    assert third["sample_index"] == 2
    sampled = arguments(model, data, tmp_path / "n3", "decode.temperature=1.0")
    assert run.main(sampled) == 0
    samples = pl.read_parquet(tmp_path / "n3/data").filter(pl.col("request_id") == "q6")
    assert len({tuple(ids) for ids in samples["token_ids"]}) > 1
    row = prompts().filter(pl.col("id") == "q6").drop("n")
    row.with_columns(seed=pl.lit(samples["seed"][2])).write_parquet(data)
    assert run.main(arguments(model, data, tmp_path / "again", "decode.temperature=1.0")) == 0
    again = pl.read_parquet(tmp_path / "again/data")
    assert again["token_ids"].to_list() == [samples["token_ids"].to_list()[2]]
    assert again["seed"][0] == samples["seed"][2]


def test_logprobs_are_written_for_every_token(model: Path, data: Path, tmp_path: Path) -> None:
    assert run.main(arguments(model, data, tmp_path / "out", "output.logprobs=2")) == 0
    good = pl.read_parquet(tmp_path / "out/data").filter(pl.col("status") != "error")
    for ids, logprobs, top in good.select("token_ids", "logprobs", "top_logprobs").iter_rows():
        assert len(ids) == len(logprobs) == len(top)
        assert all(value <= 0 for value in logprobs)
        assert all(best[0]["logprob"] >= best[1]["logprob"] for best in top)


def test_generate_gives_what_the_command_writes(model: Path, finished: Path) -> None:
    overrides = [f"model.path={model}", "model.dtype=float64", "decode.max_new_tokens=24", "output.token_ids=true"]
    frame = batchspec.generate(prompts(), overrides=overrides)
    made = {(name, sample): ids for name, sample, ids in frame.select("request_id", "sample_index", "token_ids").iter_rows()}
    assert made == tokens(finished)


def test_generate_takes_plain_columns_and_writes_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [f"model.path={model}", "decode.max_new_tokens=3", "input.chat=true"]
    frame = batchspec.generate({"prompt": ["one", "two"]}, overrides=overrides)
    assert frame["usage"].struct.field("completion_tokens").to_list() == [3, 3]
    assert list(tmp_path.iterdir()) == []


def test_the_summary_of_verify_has_the_share_of_rows_and_quantiles_of_the_gaps() -> None:
    places = [
        Difference(request_id=f"r{i}", sample_index=0, token_index=10 * i, written=1, plain=2, gap=None if i == 0 else i / 10)
        for i in range(11)
    ]
    assert summary(places, 44) == (
        "11 differ (25.0%); first difference at token 50 (median), score gap there 0.6 (median), 1 (90 %), 1 (largest)"
    )
    assert summary(places[:1], 8) == "1 differ (12.5%); first difference at token 0 (median)"  # one of both had ended
    assert summary([], 0) == "0 differ (0.0%)"


def test_verify_finds_no_difference_in_an_honest_output_and_names_a_false_one(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(model, data, out, "draft=lookup", "decode.repetition_penalty=1.2", "input.limit=8")) == 0
    assert verify.main([str(out), "--rows", "0"]) == 0
    with pytest.raises(ConfigError, match="-3 must be a number of completions; 0: all"):
        verify.main([str(out), "--rows", "-3"])
    assert "9 completions decoded again one at a time and without speculation: 0 differ" in capsys.readouterr().out
    assert verify.main([str(out), "--rows", "0", "--dtype", "float64", "--device", "cpu"]) == 0
    assert "loading" in (said := capsys.readouterr()).err
    assert "in float64 on cpu" in said.err
    assert "9/9 completions (100.0%)" in said.err

    def another_token(ids: list[Any]) -> None:
        ids[0][2] = (ids[0][2] + 1) % 300

    rewrite(out, "token_ids", another_token)
    assert verify.main([str(out), "--rows", "0"]) == 1
    shown = capsys.readouterr().out
    assert "q0 sample 0 token 2" in shown
    assert "9 completions decoded again one at a time and without speculation: 1 differ (11.1%)" in shown


def rewrite(out: Path, name: str, change: Callable[[list[Any]], None]) -> None:
    """Change a column of the first shard, as no run would."""
    part = out / "data/part-00000.parquet"
    table = pq.read_table(part)
    cells, place = table[name].to_pylist(), table.schema.get_field_index(name)
    change(cells)
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, [pa.array(cells, field.type)]), part)


def test_verify_compares_logprobs_too(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["draft=lookup", "output.logprobs=2", "decode.repetition_penalty=1.2", "input.limit=5"]
    assert run.main(arguments(model, data, out, *words)) == 0
    kept = (out / "data/part-00000.parquet").read_bytes()
    assert verify.verify(out, 0).logprobs.nats < 1e-5  # type: ignore[union-attr]

    def another_number(cells: list[Any]) -> None:
        cells[1][3] -= 0.25

    def another_top(cells: list[Any]) -> None:
        cells[1][3][0]["id"] = (cells[1][3][0]["id"] + 1) % 300

    def one_too_few(cells: list[Any]) -> None:
        cells[1].pop(3)

    for name, change, said in (
        ("logprobs", another_number, "0.25 nats, at q1 sample 0 token 3"),
        ("top_logprobs", another_top, "nats, at q1 sample 0 token 3"),
        ("logprobs", one_too_few, "nats, at q1"),
    ):
        rewrite(out, name, change)
        capsys.readouterr()
        assert verify.main([str(out), "--rows", "0"]) == 1
        shown = capsys.readouterr().out
        assert "4 completions decoded again one at a time and without speculation: 0 differ" in shown
        assert said in shown
        (out / "data/part-00000.parquet").write_bytes(kept)


def test_a_job_of_a_gpu_is_verified_where_there_is_none(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(model, data, out, "input.limit=3")) == 0
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["config"]["device"], manifest["config"]["model"]["dtype"] = "cuda", "auto"
    (out / MANIFEST).write_text(json.dumps(manifest))
    capsys.readouterr()
    assert verify.main([str(out), "--device", "cpu"]) == 0
    assert verify.main([str(out)]) == 0
    assert "3 completions decoded again one at a time and without speculation: 0 differ" in capsys.readouterr().out


def test_verify_that_can_compare_nothing_reports_it(model: Path, tmp_path: Path) -> None:
    pl.DataFrame({"id": ["a", "b"], "prompt": [None, ""]}, schema_overrides={"prompt": pl.String}).write_parquet(
        tmp_path / "p.parquet"
    )
    assert run.main(arguments(model, tmp_path / "p.parquet", tmp_path / "out", "input.max_error_fraction=1")) == 3
    with pytest.raises(OutputError, match="no completion that can be decoded again"):
        verify.verify(tmp_path / "out", 0)


@pytest.mark.parametrize("penalty", ["repetition_penalty=1.5", "presence_penalty=2"])
def test_one_penalty_alone_makes_outputs_repeat_less(
    model: Path, data: Path, finished: Path, tmp_path: Path, penalty: str
) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(model, data, out, "draft=lookup", f"decode.{penalty}")) == 0
    made, plain = tokens(out), tokens(finished)
    assert made != plain
    repeated = [sum(len(ids) - len(set(ids)) for ids in found.values() if ids is not None) for found in (made, plain)]
    assert repeated[0] < repeated[1] / 2
    assert verify.main([str(out), "--rows", "6"]) == 0


def test_too_many_error_rows_end_the_job_with_exit_code_3(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(model, data, tmp_path / "out", "input.max_error_fraction=0.05")
    assert run.main(command) == 3
    assert "input.max_error_fraction=0.05 allows" in capsys.readouterr().err
    parts = sorted((tmp_path / "out/data").iterdir())
    assert run.main(command) == 3  # what is committed is over the limit already: nothing more is computed
    assert sorted((tmp_path / "out/data").iterdir()) == parts
    assert run.main([*command, "input.max_error_fraction=0.5"]) == 0
    assert run.main(command) == 3
    assert "already complete" in capsys.readouterr().err


@pytest.mark.usefixtures("draws")
def test_a_job_of_nothing_but_error_rows_ends_with_exit_code_3_whatever_the_fraction(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count, bad, more, code in (
        ("one of three", 3, 1, [], 0),
        ("two of three", 3, 2, [], 3),
        ("two of three are allowed", 3, 2, ["input.max_error_fraction=1"], 0),
        ("all are never", 3, 3, ["input.max_error_fraction=1"], 3),
        ("one of one", 1, 1, ["input.max_error_fraction=1"], 3),
    ):
        rows = [{"id": f"q{i}", "prompt": "" if i < bad else "Say word1"} for i in range(count)]
        data = tmp_path / f"{name}.parquet"
        pl.DataFrame(rows).write_parquet(data)
        out = tmp_path / name
        command = [f"model.path={model}", f"input.path={data}", f"output.dir={out}", "decode.max_new_tokens=2", *more]
        assert plan.main(command) == code, name
        for _ in range(2):  # the same command again says the same of a complete job
            assert run.main(command) == code, name
            assert {"README.md", "report.html"} <= {path.name for path in out.iterdir()}, "whatever its exit code"
            assert f".parquet` ({count} row{'s' * (count > 1)})" in (out / "README.md").read_text()
        said = capsys.readouterr().err
        all_failed = name.startswith(("all", "one of one"))
        assert ("every completion of " in said) == all_failed, said
        assert (f"every completion of {'the only row' if count == 1 else 'all 3 rows'} is an error" in said) == all_failed
        first = f"the first one this: {name}.parquet row 0 (id 'q0'): prompt is empty; drop the row\n"
        assert said.count(first) == 2 * all_failed
        assert pl.read_parquet(out / "data").height == count


def bad_inputs(tmp_path: Path, model: Path) -> dict[str, list[str]]:
    """Name of the mistake -> overrides that make it."""
    good = prompts()

    def write(name: str, frame: pl.DataFrame) -> str:
        frame.write_parquet(tmp_path / name)
        return f"input.path={tmp_path / name}"

    empty = tmp_path / "no_weights"
    empty.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (empty / name).write_bytes((model / name).read_bytes())
    torn = shutil.copytree(model, tmp_path / "torn")
    tensors = load_file(torn / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, torn / "model.safetensors")
    other = tmp_path / "notes"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    return {
        "missing file": [f"input.path={tmp_path / 'nowhere.parquet'}"],
        "empty dataset": [write("empty.parquet", good.head(0))],
        "wrong column type": [write("type.parquet", good.with_columns(temperature=pl.lit("hot")))],
        "two prompt columns": [write("two.parquet", good.with_columns(prompt=pl.lit("x")))],
        "unknown column mapping": ["input.columns.messages=turns"],
        "unknown name in the mapping": ["input.columns.mesages=messages"],
        "duplicate ids": [write("twice.parquet", pl.concat([good, good.head(1)]))],
        "model without weights": [f"model.path={empty}"],
        "model with a tensor missing": [f"model.path={torn}"],
        "no room for a row": ["packing.pages=2"],
        "folder of something else": [f"output.dir={other}"],
        "folder that cannot be": ["output.dir=/proc/out"],
        "typo": ["decode.max_tokns=3"],
        "wrong type": ["decode.max_new_tokens=many"],
    }


@pytest.mark.parametrize("mistake", [
    "missing file", "empty dataset", "wrong column type", "two prompt columns", "unknown column mapping",
    "unknown name in the mapping", "duplicate ids", "model without weights", "model with a tensor missing",
    "no room for a row", "folder of something else", "folder that cannot be", "typo", "wrong type",
])
def test_bad_input_is_one_line_exit_code_2_and_nothing_is_written(
    mistake: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = bad_inputs(tmp_path, model)[mistake]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run.main(arguments(model, data, tmp_path / "out", *overrides)) == 2
    # Notes on the input and the loading of weights are said before it fails; the refusal itself is one line.
    lines = capsys.readouterr().err.splitlines()
    notes = ("loading ", "1 row asks for several completions at temperature 0, which are all equal: ")
    said = [line for line in lines if not line.startswith(notes) and "completions (" not in line]
    assert said == lines or "folder" not in mistake
    assert len(said) == 1
    assert said[0].startswith("batchspec: ")
    assert len(said[0]) < 400
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "out").exists()


def test_a_run_tells_what_it_does_not_follow_of_the_model_s_files(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_gate_scale": 0.5}))
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.05, "suppress_tokens": [7]}))
    assert run.main(arguments(folder, data, tmp_path / "out", "input.limit=1", "decode.max_new_tokens=2")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("config.json: nothing reads attn_gate_scale=0.5; ")]
    said = "recommends decode.repetition_penalty=1.05 and sets suppress_tokens=[7], which jobs do not follow"
    assert f"the model's generation_config.json {said}" in lines


def test_the_shape_is_chosen_from_the_first_rows_when_the_input_is_long(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare, "SURVEY_ROWS", 5)
    assert run.main(arguments(model, data, tmp_path / "out", "model.max_len=128")) == 0
    assert pl.read_parquet(tmp_path / "out/data").height == ROWS + 2
