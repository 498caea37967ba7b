"""resume.retry: rows that were cut off or failed are computed again, in the place of the old ones; all others stay."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from polars.testing import assert_frame_equal

from batchspec import run
from batchspec.commands import plan, verify
from batchspec.config.compose import compose
from batchspec.data.dataset.reader import InputShard
from batchspec.data.runstate.generations import Generation, Generations, folder_of
from batchspec.data.runstate.journal import Journaled
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage.open_store import open_store
from batchspec.engine.loop.engine import Engine
from batchspec.engine.rounds.round import Round
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.errors import OutputError
from batchspec.job.prepare import Job, open_job, survey_first
from batchspec.job.report.status import StatusReader
from batchspec.job.run_job import run_job
from batchspec.job.runner.new_retry import new_retry
from batchspec.job.runner.retry_plan import RetryPlan
from batchspec.packing.open_shards import OpenShards
from batchspec.packing.survey import Survey
from batchspec.packing.work_plan import AdmittedShard
from batchspec.records import Completion, Request, RowError
from batchspec.request_stream import RequestStream
from tests.data.s3_lab import BUCKET, Lab, running_lab
from tests.helpers.models import make_checkpoint, make_thinking_tokenizer
from tests.helpers.runs import run_apart
from tests.helpers.streams import answers_of
from tests.job.test_crashes import poison

pytestmark = pytest.mark.second

ROWS = 14
CAPS = (8, 20)
SAME = [
    "request_id", "row_index", "sample_index", "status", "messages", "completion", "reasoning", "reasoning_truncated",
    "finish_reason", "stop_reason", "token_ids", "seed", "error", "topic",
]
"""Columns that two runs of one job share; spec_decode, perf and usage.cached_tokens tell what a run did."""


KEYS = ["request_id", "sample_index"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks and a prompts file: rows with samples, stops, budgets and a cap of their own, and a bad one."""
    folder = tmp_path_factory.mktemp("job")
    make_thinking_tokenizer(make_checkpoint(folder / "model", "llama", dtype=torch.float64))
    rows = [
        {
            "id": f"q{i}",
            "messages": None if i == 4 else [{"role": "user", "content": f"Say word{i % 5}"}],
            "template_kwargs": '{"quick": 1}' if i % 3 else None,
            "thinking_token_budget": {6: 7, 9: 100}.get(i),
            "max_new_tokens": {2: 5, 3: 30}.get(i, 3 if 10 <= i < 12 else None),
            "n": 3 if i == 1 else None,
            "stop": ["e", "a"] if i in (5, 7, 8) else None,
            "topic": "ab"[i % 2],
        }
        for i in range(ROWS)
    ]
    pl.DataFrame(rows, schema_overrides={"n": pl.Int32}).write_parquet(folder / "prompts.parquet")
    return folder


def arguments(folder: Path, out: Path | str, cap: int, *more: str) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        "model.dtype=float64",
        f"input.path={folder / 'prompts.parquet'}",
        f"output.dir={out}",
        "output.shard_rows=2",
        "output.token_ids=true",
        f"decode.max_new_tokens={cap}",
        "decode.temperature=1",
        "packing.max_num_seqs=3",
        "decode.thinking_token_budget=5",
        "decode.thinking_closing=' So then:'",
        *more,
    ]


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """The job with the small cap, complete."""
    assert run.main(arguments(folder, folder / "base", CAPS[0])) == 0
    return folder / "base"


@pytest.fixture(scope="module")
def wanted(folder: Path) -> pl.DataFrame:
    """What a run with the large cap gives from the start."""
    assert run.main(arguments(folder, folder / "large", CAPS[1], "draft=none")) == 0
    return rows_of(folder / "large")


def rows_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data")


def parts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "data").iterdir()}


@pytest.fixture
def out(base: Path, tmp_path: Path) -> Path:
    return shutil.copytree(base, tmp_path / "out")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that engines of this process take from their streams."""
    given: list[Request] = []
    arrive = RunFeatures.arrive

    def noted(features: RunFeatures, request: Request, draft_len: int) -> RequestState:
        given.append(request)
        return arrive(features, request, draft_len)

    monkeypatch.setattr(RunFeatures, "arrive", noted)
    return given


def retry(folder: Path, out: Path | str, *more: str) -> list[str]:
    return arguments(folder, out, CAPS[1], "resume=length", *more)


@pytest.mark.smoke("a retry")
def test_truncated_rows_resume_from_their_tokens_and_all_others_are_kept(
    folder: Path, out: Path, wanted: pl.DataFrame, ran: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    before, files = rows_of(out), parts(out)
    cut_off = before.filter((pl.col("status") == "truncated") & ~pl.col("request_id").is_in(["q2", "q3", "q10", "q11"]))
    assert before["status"].value_counts().height == 3, "ok, truncated and error rows are needed"
    assert run.main(arguments(folder, out, CAPS[0])) == 0
    count = before.filter(pl.col("status") == "truncated").height
    advice = "resume=length and a larger decode.max_new_tokens continue those that it cut off"
    assert f"{out}: {count} truncated completions; {advice}\n" in capsys.readouterr().err, "the end of a run says it"
    assert run.main(retry(folder, out, "draft=lookup")) == 0
    after = rows_of(out)
    assert after.select(SAME).equals(wanted.select(SAME))
    assert sorted((r.request_id, r.sample_index) for r in ran) == sorted(cut_off.select("request_id", "sample_index").rows())
    check_resumed(ran, before)
    done = {(r.request_id, r.sample_index) for r in ran}
    kept = [place not in done for place in before.select("request_id", "sample_index").rows()]
    assert after.filter(kept).equals(before.filter(kept)), "perf, attempt and time too"
    counts = after["spec_decode"].drop_nulls().struct.unnest()
    emitted = counts["num_prefills"] + counts["num_accepted_draft_tokens"] + counts["num_spec_steps"]
    lengths = after.filter(pl.col("spec_decode").is_not_null())["token_ids"].list.len()
    assert (emitted == lengths - counts["num_forced_tokens"] + counts["num_discarded_tokens"]).all()
    name = "part-00005.parquet"  # rows 10 and 11: cut off by caps of their own
    assert parts(out)[name] == files[name]
    assert verify.main([str(out), "--rows", "0"]) == 0
    assert f"max_new_tokens {CAPS[1]}" in (out / "README.md").read_text()
    capsys.readouterr()
    assert run.main(arguments(folder, out, CAPS[0])) == 2  # the command that began the job
    said = capsys.readouterr().err
    assert f"retried since (decode.max_new_tokens: {CAPS[1]} -> {CAPS[0]}); run the command with resume=length" in said
    assert "overwrite" not in said
    assert run.main(arguments(folder, out, CAPS[0], "decode.seed=3")) == 2
    assert "holds another job" in capsys.readouterr().err


def check_resumed(ran: list[Request], before: pl.DataFrame) -> None:
    """They resume with the tokens, counts and seconds that the output has."""
    rows = {(row["request_id"], row["sample_index"]): row for row in before.iter_rows(named=True)}
    assert ran
    for request in ran:
        row, resumed = rows[request.request_id, request.sample_index], request.resumed
        assert resumed is not None
        spec, perf = row["spec_decode"], row["perf"]
        assert list(resumed.tokens) == row["token_ids"]
        assert len(resumed.tokens) == CAPS[0]
        assert resumed.cached_tokens == row["usage"]["cached_tokens"]
        assert list(resumed.accepted) == spec["acceptance_histogram"]
        assert sum(resumed.drafted) == sum(resumed.accepted) == spec["num_spec_steps"]
        assert sum(j * count for j, count in enumerate(resumed.drafted)) == spec["num_draft_tokens"]
        counts = (resumed.num_prefills, resumed.num_discarded, resumed.num_forced)
        assert counts == (spec["num_prefills"], spec["num_discarded_tokens"], spec["num_forced_tokens"])
        assert (resumed.prefill_s, resumed.decode_s) == (perf["prefill_s"], perf["decode_s"])


@pytest.mark.parametrize("first", ["none", "lookup"])
def test_forced_tokens_are_counted_once_though_the_smaller_limit_cut_them_off(
    folder: Path, out: Path, tmp_path: Path, first: str, ran: list[Request]
) -> None:
    """The limit of 8 leaves 3 closing tokens after a thought of 5 tokens, and 1 after one of 7. Without a drafter the output does
    not count forced tokens."""
    if first == "none":
        out = tmp_path / "none"
        assert run.main(arguments(folder, out, CAPS[0], "draft=none")) == 0
    ran.clear()
    assert run.main(retry(folder, out, "draft=lookup")) == 0
    assert run.main(arguments(folder, tmp_path / "undisturbed", CAPS[1], "draft=lookup")) == 0
    after, undisturbed = rows_of(out), rows_of(tmp_path / "undisturbed")
    resumed = [request for request in ran if request.resumed is not None]
    assert {request.resumed.num_forced for request in resumed if request.resumed is not None} == {0, 1, 3}
    assert all(r.resumed.num_prefills == 1 for r in resumed if r.resumed is not None and first == "none")
    computed = pl.DataFrame([(r.request_id, r.sample_index) for r in resumed], KEYS, orient="row")
    counts = [*KEYS, pl.col("spec_decode").struct.field("num_forced_tokens")]
    assert_frame_equal(
        *(frame.with_columns(pl.col("sample_index").cast(pl.Int64)).select(counts).join(computed, KEYS, "semi")
          for frame in (after, undisturbed)),
    )


def changed(part: Path, column: str, change: Callable[[Any], Any]) -> None:
    """Write a part anew with another value in its first row."""
    table = pq.read_table(part)
    values = table[column].to_pylist()
    values[0] = change(values[0])
    place = table.schema.get_field_index(column)
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), part)


def test_tokens_that_the_first_run_discarded_count_in_the_row_that_resumes(folder: Path, out: Path, ran: list[Request]) -> None:
    part = out / "data/part-00000.parquet"
    changed(part, "spec_decode", lambda spec: spec | {"num_discarded_tokens": 3})
    before = rows_of(out)
    assert before.row(0, named=True)["status"] == "truncated"
    assert run.main(retry(folder, out)) == 0
    check_resumed(ran, before)
    assert rows_of(out)["spec_decode"][0]["num_discarded_tokens"] >= 3


def test_the_same_retry_again_computes_nothing_and_changes_nothing(
    folder: Path, out: Path, ran: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(retry(folder, out)) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    ran.clear()
    left = f"; nothing left for resume=length decode.max_new_tokens={CAPS[1]}: a row that is still cut off there needs more\n"
    for command, said in ((retry(folder, out), left), (arguments(folder, out, CAPS[1]), "\n")):
        assert run.main(command) == 0
        assert f"already complete: 14 rows in 7 shards{said}" in capsys.readouterr().err
    assert not ran
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("stored", ["output.token_ids=false", "output.logprobs=0"])
def test_without_stored_tokens_or_with_logprobs_rows_are_computed_anew(
    folder: Path, tmp_path: Path, wanted: pl.DataFrame, ran: list[Request], stored: str
) -> None:
    """Logprobs of a row are all of one run."""
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, CAPS[0], stored)) == 0
    ran.clear()
    assert run.main(retry(folder, out, stored)) == 0
    assert ran
    assert all(request.resumed is None for request in ran)
    after = rows_of(out)
    columns = [name for name in SAME if name in after.columns]
    assert after.select(columns).equals(wanted.select(columns))
    if "logprobs" in after.columns:
        assert after["logprobs"].list.len().to_list() == after["token_ids"].list.len().to_list()


def test_a_prompt_that_the_larger_cap_cuts_shorter_is_computed_anew(folder: Path, tmp_path: Path, ran: list[Request]) -> None:
    """Its output was generated from a prompt that was cut less."""
    cut = ["input.on_overlong=truncate", "model.max_len=50", "output.prompt_ids=false"]
    for out in ("out", "wanted"):
        assert run.main(arguments(folder, tmp_path / out, CAPS[out == "wanted"], *cut)) == 0
    ran.clear()
    assert run.main(retry(folder, tmp_path / "out", *cut)) == 0
    assert {request.resumed is None for request in ran} == {True, False}
    found, wanted = (dict(rows_of(tmp_path / out).select("request_id", "token_ids").rows()) for out in ("out", "wanted"))
    for request in ran:
        assert found[request.request_id] == wanted[request.request_id]


def test_a_row_whose_prompt_has_other_tokens_now_is_computed_anew(folder: Path, tmp_path: Path, ran: list[Request]) -> None:
    """For example with a template that prints the date."""
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, CAPS[0], "output.prompt_ids=true")) == 0
    part = out / "data/part-00000.parquet"
    assert pl.read_parquet(part)["status"][0] == "truncated"
    changed(part, "prompt_ids", lambda ids: [ids[0] + 1, *ids[1:]])
    ran.clear()
    assert run.main(retry(folder, out, "output.prompt_ids=true")) == 0
    assert [request.request_id for request in ran if request.resumed is None] == ["q0"]
    assert len(ran) > 1


def test_a_smaller_cap_another_key_and_a_job_that_is_not_done_are_refused(
    folder: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*command: str) -> str:
        before = parts(out)
        assert run.main(list(command)) == 2
        assert parts(out) == before
        assert not (out / "_batchspec/retry").exists()
        return capsys.readouterr().err.splitlines()[-1]

    for cap in (7, 8):
        said = refused(*arguments(folder, out, cap, "resume=length"))
        assert f"resume=length decode.max_new_tokens={cap} gives no row more tokens: rows were cut off at 8" in said
    assert "decode.seed" in refused(*retry(folder, out, "decode.seed=3"))
    assert "decode.max_new_tokens" in refused(*arguments(folder, out, CAPS[1], "resume=error"))
    assert "resume.retry=lenght must be one of" in refused(*arguments(folder, out, CAPS[1], "resume.retry=lenght"))
    assert run.main(retry(folder, out.parent / "another")) == 2
    assert not (out.parent / "another").exists()
    assert "another: no job was run there that resume=length could retry; check output.dir" in capsys.readouterr().err
    (out / "data/part-00003.parquet").unlink()
    assert "1 shards are not done; run the command with decode.max_new_tokens=8 and without resume=length" in refused(
        *retry(folder, out)
    )


def test_more_tokens_for_a_complete_job_name_the_retry_that_continues_its_rows(
    folder: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str, command: Callable[[list[str]], int] = run.main) -> str:
        assert command(arguments(folder, out, CAPS[1], *more)) == 2
        said = capsys.readouterr()
        return said.err.splitlines()[-1] if command is run.main else said.out

    count = rows_of(out).filter((pl.col("status") == "truncated") & (pl.col("usage").struct[1] == CAPS[0])).height
    advice = f"resume=length continues its {count} truncated rows; or use another output.dir"
    assert advice in refused()
    assert advice in refused("resume=error")
    assert advice in refused(command=plan.main)
    assert "resume=length" not in refused("decode.seed=3")
    (out / "data/part-00003.parquet").unlink()
    assert "end it with decode.max_new_tokens=8, then run with resume=length decode.max_new_tokens=20; or" in refused()


def killed_before_its_mark() -> None:
    """Dies when the first shard is replaced, and nothing says so yet."""

    def kill(*rest: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Generations.mark = kill  # type: ignore[method-assign,assignment]


def test_a_mark_counts_for_its_own_job_and_names_the_retry_that_wrote_the_shard(tmp_path: Path) -> None:
    generations = Generations(open_store(str(tmp_path), "_batchspec/tmp"))
    keys, shards = {"decode.max_new_tokens": "8"}, (0, 1, 2, 3)
    asked = Generation(number=2, retry="error", fingerprint=keys, config={}, shards=shards, job="mine")
    begun = generations.begin(asked)
    assert isinstance(begun, Generation)
    generations.mark(begun, 0, 2)
    generations.mark(begun, 1, 0)
    generations.mark(replace(begun, job="other"), 3, 2)
    (tmp_path / folder_of(begun) / "done/00002").touch()
    assert generations.missing(begun) == {2, 3}
    assert generations.written("mine") == {0: 2}


def signalled_in_a_round() -> None:
    run_round, seen = Round.run, []

    def signalled(self: Round, *rest: Any, **named: Any) -> Any:
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_round(self, *rest, **named)

    Round.run = signalled  # type: ignore[method-assign]


def test_a_retry_that_is_killed_resumes_and_no_reader_gets_a_mixed_file(
    folder: Path, out: Path, tmp_path: Path, wanted: pl.DataFrame
) -> None:
    seen: dict[str, set[bytes]] = {name: {data} for name, data in parts(out).items()}
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for name, data in parts(out).items():
                seen[name].add(data)
            time.sleep(0.005)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert run_apart(retry(folder, out), tmp_path / "log", killed_before_its_mark)[0] == -signal.SIGKILL
        code, said = run_apart(retry(folder, out), tmp_path / "log", signalled_in_a_round)
        assert code == 75, said
        assert re.search(r"completions? (is|are) saved", said)
        code, said = run_apart(retry(folder, out), tmp_path / "log")
        assert code == 0, said
    finally:
        done.set()
        reader.join()
    assert rows_of(out).select(SAME).equals(wanted.select(SAME))
    assert all(len(contents) <= 2 for contents in seen.values()), "a file was replaced more than once"
    for contents in seen.values():
        for data in contents:
            frame = pl.read_parquet(data)
            old = frame.filter(pl.col("token_ids").list.len() == CAPS[0])["perf"].struct.field("attempt").n_unique()
            assert old <= 1
    left = {path.name for path in (out / "_batchspec/retry/00001").rglob("*.json")}
    assert not left, "claims, journal and attempts are gone"


def test_a_row_that_kills_its_retry_stays_as_it_was(folder: Path, out: Path, tmp_path: Path, wanted: pl.DataFrame) -> None:
    before = rows_of(out)
    command = retry(folder, out, "resume.row_attempts=1")
    for _ in range(3):
        assert run_apart(command, tmp_path / "log", partial(poison, "q0", signal.SIGKILL))[0] == -signal.SIGKILL
    assert run.main(command) == 0
    after, mine = rows_of(out), pl.col("request_id") == "q0"
    assert after.filter(mine).equals(before.filter(mine))
    assert after.filter(mine)["status"].to_list() == ["truncated"]
    assert after.filter(~mine).select(SAME).equals(wanted.filter(~mine).select(SAME))


def test_runs_at_the_same_time_share_a_retry(folder: Path, out: Path, tmp_path: Path, wanted: pl.DataFrame) -> None:
    with ThreadPool(3) as pool:
        ends = pool.map(lambda i: run_apart(retry(folder, out, "packing.max_num_seqs=1"), tmp_path / f"log{i}"), range(3))
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert rows_of(out).select(SAME).equals(wanted.select(SAME))
    assert sorted(path.name for path in (out / "_batchspec/retry").iterdir()) == ["00001", "00001.json"]


def test_a_run_joins_a_retry_that_another_one_began_after_it_read_the_manifest(folder: Path, out: Path) -> None:
    late, command = OutputFolder(out), retry(folder, out)
    assert late.generation is None
    assert run.main(command) == 0
    assert new_retry(open_job(compose(command)), late) is None


def test_a_column_of_the_input_named_as_that_of_digests_keeps_no_row_from_going_on(folder: Path, tmp_path: Path) -> None:
    """A job over the answers of a job with images has such a column."""
    data, out = tmp_path / "in.parquet", tmp_path / "out"
    pl.read_parquet(folder / "prompts.parquet").with_columns(image_digest=pl.lit("ab" * 16)).write_parquet(data)
    own = f"input.path={folder / 'prompts.parquet'}"
    small, large = (
        [f"input.path={data}" if word == own else word for word in words]
        for words in (arguments(folder, out, CAPS[0]), arguments(folder, out, CAPS[1], "resume=length"))
    )
    assert run.main(small) == 0
    before = rows_of(out)["token_ids"].list.len().sum()
    assert run.main(large) == 0
    assert rows_of(out)["token_ids"].list.len().sum() > before


def failing_q8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row q8 fails for a reason that may pass."""
    steps_of = Engine.steps

    def failing(engine: Engine, requests: RequestStream) -> Any:
        error, failed = RowError(code="crash", stage="decode", message="died", retryable=True), list[Request]()

        def others() -> Iterator[Request]:
            for request in answers_of(requests):
                if request is not None and request.request_id == "q8":
                    failed.append(request)
                elif request is not None:
                    yield request

        yield from steps_of(engine, others())
        for r in failed:
            yield [
                Completion(
                    request_id=r.request_id, row_index=r.row_index, sample_index=0, shard=r.shard, status="error",
                    finish_reason="error", error=error,
                )
            ]

    monkeypatch.setattr(Engine, "steps", failing)


def test_rows_with_a_temporary_error_are_computed_again(
    folder: Path,
    tmp_path: Path,
    base: Path,
    ran: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """q4, which has no prompt, is not tried again."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing_q8(patch)
        assert run.main(arguments(folder, out, CAPS[0])) == 0
    assert rows_of(out)["status"].value_counts(sort=True).filter(pl.col("status") == "error")["count"].to_list() == [2]
    ran.clear()
    assert StatusReader(OutputFolder(out)).read().errors == 2
    assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0
    assert StatusReader(OutputFolder(out)).read().errors == 1
    assert [request.request_id for request in ran] == ["q8"]
    assert rows_of(out).select(SAME).equals(rows_of(base).select(SAME))
    capsys.readouterr()
    for again in ("resume=error", "resume.retry=error"):
        assert run.main(arguments(folder, out, CAPS[0], "resume=error", again)) == 0
        assert "already complete: 14 rows in 7 shards; nothing left for resume=error\n" in capsys.readouterr().err
    assert len(ran) == 1


def test_a_run_in_whose_start_up_the_job_ended_and_was_retried_computes_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing_q8(patch)
        assert run.main(arguments(folder, out, CAPS[0])) == 0
    (out / "data/part-00005.parquet").unlink()

    def survey_late(job: Job, finished: Collection[int]) -> Survey:
        monkeypatch.undo()
        run_job(compose(arguments(folder, out, CAPS[0])))
        run_job(compose(arguments(folder, out, CAPS[0], "resume=error")))
        return survey_first(job, finished)

    monkeypatch.setattr("batchspec.job.run_job.survey_first", survey_late)
    assert run.main(arguments(folder, out, CAPS[0])) == 2
    assert "a retry of it began while this run loaded; run the same command again" in capsys.readouterr().err
    assert run.main(arguments(folder, out, CAPS[0])) == 0


def test_an_error_that_is_planned_twice_is_replaced_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that ran out of memory plans the rows of its shards again."""
    out, plan_rows = tmp_path / "out", RetryPlan.rows

    def planned_twice(plan: RetryPlan, shard: InputShard, admitted: Iterator[Request | Completion]) -> Iterator[Any]:
        entries = list(admitted)
        list(plan_rows(plan, shard, iter(entries)))
        return plan_rows(plan, shard, iter(entries))

    with monkeypatch.context() as patch:
        failing_q8(patch)
        assert run.main(arguments(folder, out, CAPS[0])) == 0
    monkeypatch.setattr(RetryPlan, "rows", planned_twice)
    assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0
    assert StatusReader(OutputFolder(out)).read().errors == 1


def test_rows_that_fail_again_are_retried_once_by_each_command(
    folder: Path,
    tmp_path: Path,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tasks of a Slurm array are one command."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        failing_q8(patch)
        patch.setenv("SLURM_ARRAY_JOB_ID", "17")
        assert run.main(arguments(folder, out, CAPS[0])) == 0
        assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0
        capsys.readouterr()
        assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0
        assert "already complete" in capsys.readouterr().err
        patch.setenv("SLURM_ARRAY_JOB_ID", "18")
        assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0
    assert len(OutputFolder(out).latest_changes()) == 2
    (out / "data/part-00004.parquet").unlink()
    assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0  # ends the retry before it begins another one
    assert len(OutputFolder(out).latest_changes()) == 2
    assert run.main(arguments(folder, out, CAPS[0], "resume=error")) == 0
    assert rows_of(out).select(SAME).equals(rows_of(base).select(SAME))


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


def test_on_s3_a_shard_is_replaced_only_in_the_version_that_was_read(
    server: Lab, folder: Path, base: Path, wanted: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    out = f"s3://{BUCKET}/out"
    assert run.main(arguments(folder, out, CAPS[0])) == 0
    server.faults.ignore_conditions = True
    assert run.main(retry(folder, out)) == 2  # a store that would replace anything
    server.faults.ignore_conditions = False
    late = OutputFolder(out)
    assert run.main(retry(folder, out)) == 0
    assert late.scan().select(SAME).collect().equals(wanted.select(SAME))
    table, version = late.written(0)
    other = OutputFolder(out)
    assert other.recommit(0, table, other.written(0)[1])
    assert not late.recommit(0, table, version)
    assert late.generation is not None
    another = replace(late.generation, retry="error")
    with pytest.raises(OutputError, match="another run began"):
        late.retry(another)


@pytest.mark.parametrize("kind", ["error", "length"])
def test_a_row_that_is_refused_now_loses_no_sample_that_the_output_or_the_interrupted_retry_has(kind: str) -> None:
    """Sample 0 is to be computed again, or is carried over; the retry finished sample 1 before; sample 2 is carried over."""
    table = pa.table({"prompt": ["a"]})
    shard = InputShard(index=0, first_row=0, table=table)
    missing = RowError(code="missing_image", stage="admission", message="a.png", retryable=True)
    refused = Completion(
        request_id="a", row_index=0, sample_index=0, shard=0, status="error", finish_reason="error", num_samples=3, error=missing
    )
    again: dict[str, Any] = {"status": "error", "finish_reason": "error", "error": {"retryable": True}}
    if kind == "length":
        again = {"status": "ok", "finish_reason": "length", "error": None}
    good: dict[str, Any] = {"status": "ok", "finish_reason": "stop", "error": None}
    done = refused.replace(sample_index=1, num_samples=1, status="ok", finish_reason="stop", error=None)
    for first in (again, good):
        rows = [{"row_index": 0, "sample_index": i, **own} for i, own in enumerate((first, again, good))]
        output: Any = SimpleNamespace(committed=lambda: {0}, written=lambda shard, rows=rows: (pa.Table.from_pylist(rows), "v"))
        plan = RetryPlan(output, Generation(number=1, retry=kind, fingerprint={}, config={}, shards=(0,)))
        opened = OpenShards(plan.rows, lambda request: request, Journaled({(0, 1): done}))
        assert [*opened.planned(AdmittedShard(shard, iter([refused])))] == [[], [], []]
        (decoded,) = opened.complete()
        found = {one.sample_index: one.error for one in decoded.completions}
        assert found == ({0: missing, 1: None} if kind == "error" and first is again else {1: None})
        assert decoded.num_carried == 3 - len(found)
