"""resume=extend: rows from a higher input.limit or new files join a job; its own rows, shards and files stay as they are."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec import run
from batchspec.commands import compact, export, plan, status, verify
from batchspec.commands import inspect as inspecting
from batchspec.config.compose import compose
from batchspec.data.runstate.generations import Generation
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.engine.loop.engine import Engine
from batchspec.errors import StorageError
from batchspec.job import run_job as job
from batchspec.job.prepare import Job, open_job
from batchspec.job.report.stats import job_stats
from batchspec.job.report.status import StatusReader
from batchspec.job.runner.new_extension import new_extension
from batchspec.job.runner.new_retry import new_retry
from batchspec.records import Completion, RowError
from batchspec.request_stream import RequestStream
from tests.helpers.runs import make_model
from tests.helpers.streams import all_of

pytestmark = pytest.mark.second

ROWS = 14
SAME = [
    "request_id", "row_index", "sample_index", "status", "messages", "completion", "finish_reason", "token_ids", "seed",
]
"""Columns that do not depend on the course of a job."""


def prompts(start: int = 0, stop: int = ROWS) -> pl.DataFrame:
    rows = [
        {"id": f"q{i}", "prompt": "" if i == 4 else f"Say word{i % 5} again", "n": 2 if i % 6 == 1 else None}
        for i in range(start, stop)
    ]
    return pl.DataFrame(rows, schema_overrides={"n": pl.Int32})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extend")
    make_model(folder / "model")
    prompts().write_parquet(folder / "prompts.parquet")
    return folder


def arguments(folder: Path, out: Path, *more: str, data: Path | None = None) -> list[str]:
    return [
        f"model.path={folder / 'model'}", "model.dtype=float64", f"input.path={data or folder / 'prompts.parquet'}",
        f"output.dir={out}", "output.token_ids=true", "decode.max_new_tokens=8", "decode.temperature=1",
        "packing.max_num_seqs=3", "packing.memory_gb=0.01", "draft=lookup", *more,
    ]


@pytest.fixture(scope="module")
def wanted(folder: Path) -> pl.DataFrame:
    """The rows of the whole job, run at once."""
    assert run.main(arguments(folder, folder / "whole", "draft=none")) == 0
    return rows_of(folder / "whole")


def rows_of(out: Path) -> pl.DataFrame:
    return pl.read_parquet(out / "data").select(SAME)


def card_of(out: Path) -> str:
    return (out / "README.md").read_text().replace("\\", "")


def first(wanted: pl.DataFrame, rows: int) -> pl.DataFrame:
    return wanted.filter(pl.col("row_index") < rows)


def parts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "data").iterdir()}


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


# --- a higher input.limit


@pytest.mark.smoke("an extension")
def test_a_trial_grows_to_the_whole_job(
    folder: Path, tmp_path: Path, wanted: pl.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, "input.limit=5")) == 0
    before, card = parts(out), (out / "README.md").read_text()
    assert "the first 5 of 14 rows" in card
    manifest = (out / "_batchspec/manifest.json").read_bytes()
    capsys.readouterr()
    assert run.main(arguments(folder, out)) == 2
    assert "resume=extend adds 9 rows to this job; or use another output.dir" in said(capsys)
    assert run.main(arguments(folder, out, "decode.max_new_tokens=16", "resume=length")) == 2
    assert "resume=extend" not in said(capsys), "it would be refused because of the larger limit"
    assert run.main(arguments(folder, out, "resume=extend")) == 0
    assert rows_of(out).equals(wanted)
    assert {name: data for name, data in parts(out).items() if name in before} == before
    assert (out / "_batchspec/manifest.json").read_bytes() == manifest, "nothing that was written is written again"
    assert "the first" not in (out / "README.md").read_text()
    grown = parts(out)
    capsys.readouterr()
    for more in ([], ["resume=extend"]):  # from now on the same input is a plain resume
        assert run.main(arguments(folder, out, *more)) == 0
        assert "already complete: 14 rows in 2 shards" in said(capsys)
    assert parts(out) == grown
    assert run.main(arguments(folder, out, "input.limit=5")) == 2
    text = said(capsys)
    assert "holds this job, extended since" in text
    assert "run the command with input.limit=null and input file prompts.parquet" in text
    assert run.main(arguments(folder, out, "input.limit=5", "resume=extend")) == 2
    assert "the input has 5 rows, fewer than the 14 of the job; run the command with input.limit=null" in said(capsys)
    assert run.main(arguments(folder, out, "decode.seed=3")) == 2
    assert "resume=extend" not in said(capsys), "it is named only where it would work"
    assert run.main(arguments(folder, out, "decode.seed=3", "resume=extend")) == 2
    assert "holds another job (decode.seed: 0 -> 3)" in said(capsys)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.integers(1, ROWS), st.integers(1, 6)), min_size=2, max_size=4, unique_by=lambda one: one[0]),
    slots=st.integers(1, 5),
)
def test_a_job_grown_in_any_steps_has_the_rows_of_the_job_at_once(
    folder: Path, wanted: pl.DataFrame, tmp_path: Path, steps: list[tuple[int, int]], slots: int
) -> None:
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    kept: dict[str, bytes] = {}
    for number, (limit, shard_rows) in enumerate(sorted(steps)):
        more = [f"input.limit={limit}", f"output.shard_rows={shard_rows}", f"packing.max_num_seqs={slots}"]
        assert run.main(arguments(folder, out, *more, *(["resume=extend"] if number else []))) == 0
        assert rows_of(out).equals(first(wanted, limit))
        assert {name: data for name, data in parts(out).items() if name in kept} == kept
        kept = parts(out)
    assert OutputFolder(out).manifest.num_rows == max(limit for limit, _ in steps)


def test_a_limit_that_changes_no_row_is_taken_without_a_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, f"input.limit={ROWS}")) == 0
    before = parts(out)
    capsys.readouterr()
    assert run.main(arguments(folder, out)) == 2
    assert "resume=extend accepts this input, which has the same rows" in said(capsys)
    assert run.main(arguments(folder, out, "resume=extend")) == 0
    assert "already complete" in said(capsys)
    assert parts(out) == before
    assert run.main(arguments(folder, out)) == 0


def test_rows_that_were_not_done_before_are_done_with_the_added_ones(folder: Path, tmp_path: Path, wanted: pl.DataFrame) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=2")) == 0
    (out / "data/part-00001.parquet").unlink()
    before = parts(out)
    assert run.main(arguments(folder, out, "resume=extend", "output.shard_rows=4")) == 0
    assert rows_of(out).equals(wanted)
    assert {name: data for name, data in parts(out).items() if name in before} == before
    assert [len(OutputFolder(out).rows_of(i)) for i in range(6)] == [2, 2, 1, 4, 4, 1]


def test_there_must_be_a_job_to_extend(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments(folder, tmp_path / "out", "resume=extend")) == 2
    assert "no job was run there that resume=extend could extend; check output.dir" in said(capsys)
    assert not (tmp_path / "out").exists()
    for more in ("output.overwrite=true", "resume.retry=error"):
        assert run.main(arguments(folder, tmp_path / "out", "resume=extend", more)) == 2
        assert "resume.extend=true" in said(capsys)


def test_only_another_size_of_shards_is_no_extension(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=2")) == 0
    capsys.readouterr()
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=3", "resume=extend")) == 2
    assert "output.shard_rows=3 only applies to added rows; run the command with output.shard_rows=2" in said(capsys)
    assert run.main(arguments(folder, out, "input.limit=5", "resume=extend")) == 2
    assert "output.shard_rows=16, the default, only applies to added rows" in said(capsys)
    assert run.main(arguments(folder, out, "input.limit=5")) == 2
    assert "run the command with output.shard_rows=2 to go on with it; or use another output.dir" in said(capsys)


def test_the_old_command_is_told_how_the_job_goes_on_even_if_its_pattern_matches_the_new_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "weeks", tmp_path / "out"
    write(data / "week1.jsonl", prompts(0, 6))
    assert run.main(arguments(folder, out, "input.limit=3", data=data)) == 0
    write(data / "week2.jsonl", prompts(6, 9))
    assert run.main(arguments(folder, out, "resume=extend", "output.shard_rows=4", data=data)) == 0
    capsys.readouterr()
    assert run.main(arguments(folder, out, "input.limit=3", data=data)) == 2
    text = said(capsys)
    assert "holds this job, extended since" in text
    assert "run the command with input.limit=null output.shard_rows=4 and the 2 input files up to week2.jsonl" in text
    write(data / "week1.jsonl", prompts(0, 7))
    assert run.main(arguments(folder, out, "input.limit=3", data=data)) == 2
    assert "holds another job" in said(capsys), "a changed file is not this job's input"


# --- new files


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_new_files_that_sort_last_join_the_job(
    folder: Path, tmp_path: Path, wanted: pl.DataFrame, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    data, out = tmp_path / "weeks", tmp_path / "out"
    write(data / f"week1.{kind}", prompts(0, 6))
    assert run.main(arguments(folder, out, data=data)) == 0
    for week, (start, stop) in enumerate([(6, 9), (9, ROWS)], 2):
        before = parts(out)
        write(data / f"week{week}.{kind}", prompts(start, stop))
        capsys.readouterr()
        assert run.main(arguments(folder, out, data=data)) == 2
        assert f"resume=extend adds {stop - start} rows to this job" in said(capsys)
        assert run.main(arguments(folder, out, "resume=extend", data=data)) == 0
        assert rows_of(out).equals(first(wanted, stop))
        assert {name: data for name, data in parts(out).items() if name in before} == before
        assert f"week{week}.{kind}` ({stop - start} rows)" in card_of(out)
    assert run.main(arguments(folder, out, data=data)) == 0
    assert "already complete: 14 rows in 3 shards" in said(capsys)
    (data / f"week3.{kind}").unlink()
    assert run.main(arguments(folder, out, data=data)) == 2
    assert "extended since" in (text := said(capsys))
    assert f"input.limit=null and the 3 input files up to week3.{kind}" in text


def write(path: Path, rows: pl.DataFrame) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        rows.write_parquet(path)
    elif path.suffix == ".csv":
        rows.write_csv(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_dicts()))


def test_a_file_within_the_limit_and_files_beyond_it_are_the_jobs_too(folder: Path, tmp_path: Path, wanted: pl.DataFrame) -> None:
    data, out = tmp_path / "weeks", tmp_path / "out"
    write(data / "a.parquet", prompts(0, 6))
    write(data / "b.parquet", prompts(6, 9))
    assert run.main(arguments(folder, out, "input.limit=3", data=data)) == 0
    write(data / "c.parquet", prompts(9, ROWS))
    assert run.main(arguments(folder, out, "input.limit=10", "resume=extend", data=data)) == 0
    assert rows_of(out).equals(first(wanted, 10))
    assert "the first 10 of 14 rows" in card_of(out)
    assert run.main(arguments(folder, out, "resume=extend", data=data)) == 0
    assert rows_of(out).equals(wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("before", r"input file a\.jsonl is new and comes before b\.jsonl, which the job has read; name new files so that they"),
        ("between", r"input file bb\.jsonl is new and comes before c\.jsonl"),
        ("removed", r"the job has read input file c\.jsonl, which is not in input\.path"),
        ("rows", r"input file c\.jsonl has changed since the job read it \(3 rows -> 4\); put the old file back"),
        ("bytes", r"input file b\.jsonl has changed since the job read it \(other bytes\)"),
        ("column", r"column 'topic' is missing in the files that the job has read and string with the new ones"),
        ("type", r"column 'n' is int64 in the files that the job has read and double with the new ones"),
        ("id", r"id 'q1' is in b\.jsonl line 2 and again in d\.jsonl line 1"),
    ],
)
def test_what_is_not_at_the_end_of_the_input_is_refused_and_not_advised(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    data, out = tmp_path / "weeks", tmp_path / "out"
    write(data / "b.jsonl", prompts(0, 6))
    write(data / "c.jsonl", prompts(6, 9))
    assert run.main(arguments(folder, out, data=data)) == 0
    before = parts(out)
    write(data / "d.jsonl", prompts(9, 11))
    if change == "before":
        (data / "d.jsonl").rename(data / "a.jsonl")
    elif change == "between":
        (data / "d.jsonl").rename(data / "bb.jsonl")
    elif change == "removed":
        (data / "c.jsonl").unlink()
    elif change == "rows":
        write(data / "c.jsonl", pl.concat([prompts(6, 9), prompts(11, 12)]))
    elif change == "bytes":
        write(data / "b.jsonl", prompts(0, 6).with_columns(prompt=pl.col("prompt").str.replace("again", "gaain")))
    elif change == "column":
        write(data / "d.jsonl", prompts(9, 11).with_columns(topic=pl.lit("a")))
    elif change == "type":
        write(data / "d.jsonl", prompts(9, 11).with_columns(n=pl.lit(1.5)))
    elif change == "id":
        write(data / "d.jsonl", prompts(1, 2))
    capsys.readouterr()
    assert run.main(arguments(folder, out, data=data)) == 2
    assert "resume=extend" not in said(capsys)
    assert run.main(arguments(folder, out, "resume=extend", data=data)) == 2
    text = said(capsys)
    assert re.search(message, text), text
    assert parts(out) == before
    assert not (out / "_batchspec/retry").exists()


def test_a_file_keeps_its_digest_however_many_files_there_are(
    folder: Path, tmp_path: Path, wanted: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a large Parquet file is of fewer bytes where there are more files."""
    from batchspec.data.dataset import files, reader

    monkeypatch.setattr(reader, "DIGEST_BYTES", 1200)
    monkeypatch.setattr(files, "SMALLEST_BLOCK", 8)
    data, out = tmp_path / "weeks", tmp_path / "out"
    write(data / "a.parquet", prompts(0, 6))
    assert run.main(arguments(folder, out, data=data)) == 0
    alone = OutputFolder(out).manifest.files[0].digest
    write(data / "b.parquet", prompts(6, ROWS))
    assert run.main(arguments(folder, out, "resume=extend", data=data)) == 0
    assert OutputFolder(out).manifest.files[0].digest != alone, "the test is of two digests"
    assert rows_of(out).equals(wanted)


def test_tool_calls_that_first_come_in_a_new_file_are_refused_by_the_columns_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They give the column `messages` of the output another type, which the files that are there do not have."""
    data, out = tmp_path / "weeks", tmp_path / "out"
    data.mkdir()
    question = {"role": "user", "content": "Say word1 again"}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    (data / "a.jsonl").write_text(json.dumps({"messages": [question]}) + "\n")
    assert run.main(arguments(folder, out, data=data)) == 0
    (data / "b.jsonl").write_text(json.dumps({"messages": [question, call, question]}) + "\n")
    capsys.readouterr()
    assert run.main(arguments(folder, out, "resume=extend", data=data)) == 2
    assert "with the new files column 'messages' of the output has another type" in said(capsys)
    assert run.main(arguments(folder, out, "resume=extend", "output.token_ids=false", data=data)) == 2
    (data / "b.jsonl").write_text(json.dumps({"messages": [question]}) + "\n")
    capsys.readouterr()
    assert run.main(arguments(folder, out, "resume=extend", "output.token_ids=false", data=data)) == 2
    assert "holds another job (output.schema" in said(capsys), "the files are not the reason"


# --- retries


@pytest.mark.parametrize("mine", ["extend", "length"])
def test_a_change_that_another_run_begins_between_the_checks_is_not_undone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    out, cap, where = tmp_path / "out", "decode.max_new_tokens=16", "batchspec.job.runner.job_run.new_retry"
    assert run.main(arguments(folder, out, "input.limit=5")) == 0
    both = {"extend": ["resume=extend"], "length": ["input.limit=5", "resume=length", cap]}
    other = both["length" if mine == "extend" else "extend"]

    def then_changed(this: Job, output: OutputFolder) -> Generation | None:
        monkeypatch.setattr(where, new_retry)
        job.run_job(compose(arguments(folder, out, *other)))
        return new_retry(this, output)

    monkeypatch.setattr(where, then_changed)
    capsys.readouterr()
    assert run.main(arguments(folder, out, *both[mine])) == 2
    assert "another run changed the job while this one began" in said(capsys)
    assert len(OutputFolder(out).latest_changes()) == 1
    assert run.main(arguments(folder, out, "resume=extend" if mine == "extend" else "resume=length", cap)) == 0
    assert run.main(arguments(folder, tmp_path / "whole", cap)) == 0
    assert rows_of(out).equals(rows_of(tmp_path / "whole"))


def test_a_retry_and_an_extension_follow_each_other_in_any_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caps = ["decode.max_new_tokens=16", "decode.n=1"]
    assert run.main(arguments(folder, tmp_path / "whole", *caps)) == 0
    wanted = rows_of(tmp_path / "whole")
    for order in ("extend length", "length extend", "length extend error"):
        out = tmp_path / order.replace(" ", "-")
        size, limit, cap = "output.shard_rows=4", "input.limit=6", "decode.max_new_tokens=8"
        assert run.main(arguments(folder, out, size, limit)) == 0
        for step in order.split():
            size, limit = ("output.shard_rows=3", "input.limit=null") if step == "extend" else (size, limit)
            cap = "decode.max_new_tokens=16" if step == "length" else cap
            assert run.main(arguments(folder, out, size, limit, cap, f"resume={step}")) == 0, said(capsys)
        assert rows_of(out).equals(wanted)
        capsys.readouterr()
        assert run.main(arguments(folder, out, size, limit, cap)) == 0
        assert "already complete: 14 rows in 5 shards" in said(capsys)
        assert run.main(arguments(folder, out, "output.shard_rows=4", "input.limit=6")) == 2
        text = said(capsys)
        assert "extended" in text
        assert "retried" in text
        assert "resume=length decode.max_new_tokens=16" in text
        assert "input.limit=null" in text
        assert verify.main([str(out), "--rows", "0"]) == 0


# --- whatever reads a job


def test_every_reader_of_a_job_sees_the_grown_one(
    folder: Path, tmp_path: Path, wanted: pl.DataFrame, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=2")) == 0
    assert run.main(arguments(folder, out, "resume=extend", "output.shard_rows=5")) == 0
    capsys.readouterr()
    assert status.main([str(out)]) == 0
    assert "14 of 14 rows" in " ".join(capsys.readouterr().out.split())
    assert verify.main([str(out), "--rows", "0"]) == 0
    assert verify.main([str(out), "--files"]) == 0
    assert inspecting.main([str(out), "q13"]) == 0
    assert "part-00004.parquet" in capsys.readouterr().out
    assert compact.main([str(out), str(tmp_path / "compact")]) == 0
    assert pl.read_parquet(tmp_path / "compact/data").select(SAME).equals(wanted)
    samples, found = job_stats(out).quality.samples, rows_of(out)
    for shown in samples:
        text = found.filter((pl.col("row_index") == shown.row_index) & (pl.col("sample_index") == shown.sample_index))
        assert text["completion"].to_list() == [shown.completion]
    assert {shown.row_index for shown in samples} & {*range(5, ROWS)}
    assert export.main([str(out), "--to", "openai", str(tmp_path / "rows.jsonl")]) == 0
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == ROWS


def test_the_status_of_an_extension_that_has_only_begun_is_of_all_its_rows(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=2")) == 0
    reader, output = StatusReader(OutputFolder(out)), OutputFolder(out)
    assert reader.read().state == "complete"
    extension = new_extension(open_job(compose(arguments(folder, out, "resume=extend", "output.shard_rows=5"))), output)
    assert extension is not None
    output.extend(extension)
    found = reader.read()
    assert (found.state, found.rows, found.rows_total, found.shards, found.shards_total) == ("stopped", 5, 14, 3, 5)
    assert found.completions_total == ROWS
    assert found.share == pytest.approx(5 / 14)


def test_plan_says_what_a_run_would_find(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "output  " not in plan_of(capsys, arguments(folder, out))
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=2")) == 0
    (out / "data/part-00001.parquet").unlink()
    assert "3 of 5 rows are done, 2 are to do;" in plan_of(capsys, arguments(folder, out, "input.limit=5", "output.shard_rows=2"))
    found = plan_of(capsys, arguments(folder, out, "resume=extend"))
    assert "3 of 14 rows are done, 11 are to do, 9 of them added by resume=extend;" in found
    found = plan_of(capsys, arguments(folder, out), code=2)
    assert "a run would end with exit code 2: output.dir" in found
    assert "resume=extend adds 9 rows to this job" in found
    assert not (out / "_batchspec/retry").exists(), "a plan writes nothing"


def plan_of(capsys: pytest.CaptureFixture[str], overrides: list[str], code: int = 0) -> str:
    capsys.readouterr()
    assert plan.main(overrides) == code
    return capsys.readouterr().out


def test_an_extension_takes_over_a_retry_that_was_not_complete(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, more = tmp_path / "out", ["output.shard_rows=2", "decode.max_new_tokens=16"]
    assert run.main(arguments(folder, tmp_path / "whole", *more)) == 0
    assert run.main(arguments(folder, out, "output.shard_rows=2", "input.limit=8")) == 0
    recommit = OutputFolder.recommit
    done: list[bool] = []

    def once(self: OutputFolder, *rest: Any) -> bool:
        if done:
            raise StorageError("the disk is full")
        done.append(recommit(self, *rest))
        return done[0]

    monkeypatch.setattr(OutputFolder, "recommit", once)
    assert run.main(arguments(folder, out, *more, "input.limit=8", "resume=length")) == 74
    monkeypatch.undo()
    assert len(OutputFolder(out).missing()) > 1
    assert run.main(arguments(folder, out, *more, "resume=extend")) == 0
    assert rows_of(out).equals(rows_of(tmp_path / "whole"))
    assert run.main(arguments(folder, out, *more)) == 0
    assert "already complete: 14 rows in 7 shards" in said(capsys)


def test_a_retry_waits_for_the_end_of_an_extension(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run.main(arguments(folder, out, "input.limit=5", "output.shard_rows=2")) == 0
    assert run.main(arguments(folder, out, "resume=extend", "output.shard_rows=2")) == 0
    (out / "data/part-00004.parquet").unlink()
    capsys.readouterr()
    assert run.main(arguments(folder, out, "resume=error", "output.shard_rows=2")) == 2
    assert "1 shards are not done; run the command with decode.max_new_tokens=8 and without resume=error" in said(capsys)


def test_what_ends_an_extension_after_a_retry_of_errors_is_not_that_retry_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, size = tmp_path / "out", "output.shard_rows=2"
    assert run.main(arguments(folder, out, "input.limit=5", size)) == 0
    output = OutputFolder(out)
    facts, config = output.manifest.fingerprint, output.manifest.config
    output.retry(Generation(number=1, retry="error", fingerprint=facts, config=config, shards=()))
    assert run.main(arguments(folder, out, "resume=extend", size)) == 0
    (out / "data/part-00004.parquet").unlink()
    capsys.readouterr()
    assert run.main(arguments(folder, out, "resume=error", size)) == 2
    assert "1 shards are not done; run the command with decode.max_new_tokens=8 and without resume=error" in said(capsys)
    assert run.main(arguments(folder, out, size)) == 0
    assert run.main(arguments(folder, out, "resume=error", size)) == 0


def test_a_retry_of_errors_from_before_an_extension_does_not_stand_for_one_after_it(
    folder: Path, tmp_path: Path, wanted: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, steps_of = tmp_path / "out", Engine.steps

    def failing(engine: Engine, requests: RequestStream) -> Any:
        error = RowError(code="crash", stage="decode", message="died", retryable=True)
        given = list(all_of(requests))
        yield from steps_of(engine, iter([r for r in given if r.request_id not in ("q2", "q9")]))
        for r in (r for r in given if r.request_id in ("q2", "q9")):
            yield [
                Completion(
                    request_id=r.request_id, row_index=r.row_index, sample_index=0, shard=r.shard, status="error",
                    finish_reason="error", error=error,
                )
            ]

    for more in (["input.limit=5"], ["resume=extend"]):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "steps", failing)
            assert run.main(arguments(folder, out, *more)) == 0
        assert rows_of(out)["status"].to_list().count("error") == 2, "q4, which has no prompt, too"
        more = [word for word in more if word != "resume=extend"]
        for _ in range(2):
            assert run.main(arguments(folder, out, *more, "resume=error")) == 0
            assert rows_of(out)["status"].to_list().count("error") == 1
    assert rows_of(out).equals(wanted)
    assert len(OutputFolder(out).latest_changes()) == 3
