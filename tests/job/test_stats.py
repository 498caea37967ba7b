"""Statistics of a job against sums made by hand, the `stats` command, and the dataset card."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.commands.stats import main
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError
from batchspec.job.report import stats as stats_module
from batchspec.job.report.card import dataset_card
from batchspec.job.report.stats import count_error_rows, job_stats
from batchspec.job.report.summary import Calibration
from batchspec.records import Completion, RowStats
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of, stats


def job(path: Path, completions: list[Completion], rows: int = 4, shard_rows: int = 2, **changes: Any) -> None:
    """A finished job with these completions."""
    shards, columns = shards_of(dataset(rows), shard_rows)
    folder = new_folder(path, rows, shard_rows, **changes)
    for shard in shards:
        mine = [c for c in completions if c.row_index in folder.rows_of(shard.index)]
        folder.commit(shard.index, built(shard, columns, mine))


def mixed() -> list[Completion]:
    return [
        completion(0, stats=stats([0, 0])),
        completion(1, stats=stats([3, 2, 1, 3], [3, 3, 3, 3]), prompt_ids=np.zeros(600, np.int32)),
        failed(2),
        completion(3, stats=stats([1], [1], num_discarded=2), status="truncated", finish_reason="length"),
    ]


def test_sums_are_over_tokens_and_beside_them_means_over_requests(tmp_path: Path) -> None:
    job(tmp_path, mixed())
    got = job_stats(tmp_path)
    assert (got.shards, got.shards_total, got.completions, got.drafter) == (2, 2, 4, "lookup")
    assert got.by_status == {"ok": 2, "error": 1, "truncated": 1}
    assert got.by_finish_reason == {"stop": 2, "length": 1}
    assert got.by_error == {"overlong": 1}
    assert (got.prompt_tokens, got.completion_tokens) == (610, 9)
    every = got.overall
    assert (every.completions, every.rounds, every.drafted, every.accepted, every.discarded) == (3, 7, 19, 10, 2)
    assert every.mean_acceptance_length == pytest.approx(1 + 10 / 7)
    assert every.acceptance_rate == pytest.approx(10 / 19)
    assert every.mean_length_over_requests == pytest.approx((1 + 3.25 + 2) / 3)
    assert every.mean_rate_over_requests == pytest.approx((0 + 9 / 12 + 1) / 3)
    assert got.histogram == (2, 2, 1, 2)
    assert [(p.drafted, p.accepted) for p in got.by_position] == [(7, 5), (6, 3), (6, 2)]


def test_rows_with_errors_are_counted_alone_without_all_other_sums(tmp_path: Path) -> None:
    """A row of two samples counts once, and of the shards only those that are asked for."""
    rows = [failed(0), failed(0).replace(sample_index=1), completion(1), completion(2), failed(3)]
    job(tmp_path, rows)
    folder = OutputFolder(tmp_path)
    assert count_error_rows(folder, [0, 1]) == job_stats(tmp_path).error_rows == 2
    assert [count_error_rows(folder, [shard]) for shard in (0, 1)] == [1, 1]


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_sums_do_not_depend_on_how_much_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    job(tmp_path, mixed(), shard_rows=1)
    whole = job_stats(tmp_path, by="kind")
    monkeypatch.setattr(stats_module, "READ_ROWS", at_a_time)
    assert job_stats(tmp_path, by="kind") == whole


def test_groups_by_a_column_of_the_input(tmp_path: Path) -> None:
    job(tmp_path, mixed())
    groups = job_stats(tmp_path, by="kind").by_column
    assert [(group.name, group.completions, group.rounds) for group in groups] == [("b", 2, 5), ("a", 1, 2)]
    with pytest.raises(OutputError, match=r"--by perf: the output has no such column of plain values; it has .*kind"):
        job_stats(tmp_path, by="perf")


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.binary(), b"\xff"), (pa.decimal256(50, 3), Decimal("1.5")), (pa.list_(pa.int8()), [1])], ids=str
)
def test_stats_by_a_column_that_polars_cannot_write_as_text_are_refused(tmp_path: Path, kind: pa.DataType, value: object) -> None:
    table = dataset(4).append_column("odd", pa.array([value] * 4, kind))
    shards, columns = shards_of(table, 2)
    folder = new_folder(tmp_path, 4, 2)
    for shard in shards:
        folder.commit(shard.index, built(shard, columns, [c for c in mixed() if c.row_index in folder.rows_of(shard.index)]))
    with pytest.raises(OutputError, match=r"--by odd: the output has no such column of plain values; it has .*kind$"):
        job_stats(tmp_path, by="odd")


def test_a_job_without_speculation_has_no_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, [completion(i, stats=stats([0, 0], [0, 0], k=0, drafter="none")) for i in range(4)])
    got = job_stats(tmp_path)
    assert (got.drafter, got.overall.completions, got.overall.mean_acceptance_length, got.by_position) == ("none", 0, None, ())
    assert main([str(tmp_path), "--by", "kind"]) == 0
    said = capsys.readouterr().out
    assert "acceptance" not in said
    assert [line.split() for line in said.splitlines()[-2:]] == [["a", "2", "6", "3.0"], ["b", "2", "6", "3.0"]]


@st.composite
def row_stats(draw: st.DrawFn) -> RowStats:
    k = draw(st.integers(1, 5))
    drafted = draw(st.lists(st.integers(0, k), max_size=8))
    return stats([draw(st.integers(0, d)) for d in drafted], drafted, k=k)


@pytest.mark.second
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(row_stats(), min_size=4, max_size=4))
def test_identities_hold_for_any_rounds(tmp_path_factory: pytest.TempPathFactory, rows: list[RowStats]) -> None:
    path = tmp_path_factory.mktemp("job")
    job(path, [completion(i, stats=row) for i, row in enumerate(rows)])
    got = job_stats(path)
    assert sum(got.histogram) == got.overall.rounds == sum(row.num_rounds for row in rows)
    assert sum(j * count for j, count in enumerate(got.histogram)) == got.overall.accepted
    assert sum(p.accepted for p in got.by_position) == got.overall.accepted
    assert got.overall.drafted == sum(p.drafted for p in got.by_position) == sum(row.num_drafted for row in rows)
    assert all(p.rate is None if not p.drafted else p.rate == p.accepted / p.drafted <= 1 for p in got.by_position)


@pytest.mark.parametrize(("make", "message"), [(False, "holds no batchspec job"), (True, "no committed shard yet")])
def test_nothing_to_count_is_one_line(tmp_path: Path, make: bool, message: str) -> None:
    if make:
        new_folder(tmp_path, 4, 2)
    with pytest.raises(OutputError, match=message):
        main([str(tmp_path)])


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, mixed())
    assert main([str(tmp_path), "--by", "kind"]) == 0
    text = capsys.readouterr().out
    assert "mean acceptance length  2.429 (mean over requests 2.083)" in text
    assert "by kind\n" in text
    assert main([str(tmp_path), "--by", "kind", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["overall"]["accepted"], values["by_column"][0]["name"]) == (10, "b")


def test_the_card_is_read_by_datasets_and_runs_the_job_again(tmp_path: Path) -> None:
    import yaml  # type: ignore[import-untyped]

    config = {
        "model": {"path": "tiny", "revision": None},
        "decode": {"temperature": 0.5, "stop": ["a: b\n"]},
        "input": {"path": ["x y.parquet"]},
    }
    job(tmp_path, mixed(), config=config)
    folder = new_folder(tmp_path, 4, 2)
    folder.finish(dataset_card(folder.manifest, job_stats(tmp_path)))
    card = (tmp_path / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["configs"][0]["data_files"][0]["path"] == "data/*.parquet"
    assert yaml.safe_load(body.split("```yaml\n")[1].split("```")[0]) == config
    assert "| Mean acceptance length | 2.429 tokens per round, 52.6% of 19 draft tokens accepted |" in body
    assert "| Acceptance by position | 71.4%, 50.0%, 33.3% |" in body
    assert "| Sampling | temperature 0.5 |" in body


def test_the_start_of_each_run_is_shown_by_phase_and_a_log_without_one_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third run was interrupted before its first token, the others are of an older version, or damaged."""
    job(tmp_path, mixed())
    logs = tmp_path / "_batchspec" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    written: list[object] = [
        {"start_up": {"imports": 3.25, "engine": 0.5, "first rows": 0.25}},
        {"start_up": {"imports": 2.25, "survey": 0.5, "first rows": 0.25}},
        {"start_up": {"imports": 3.25, "engine": 0.5}},
        {"tokens": 3},
        {"start_up": {"first rows": "soon"}},
        [1],
    ]
    for i, log in enumerate(written):
        (logs / f"run-{i:032x}.json").write_text(json.dumps(log))
    (logs / f"run-{9:032x}.json").write_text("{")
    found = job_stats(tmp_path).start_ups
    assert sorted(sum(run.values()) for run in found) == [3.0, 4.0]
    assert main([str(tmp_path)]) == 0
    block = capsys.readouterr().out.partition("from the command to the first token, seconds\n")[2].partition("\n\n")[0]
    assert [line.split() for line in block.splitlines()] == [
        ["run", "1", "run", "2"],
        ["imports", "3.2", "2.2"],
        ["engine", "0.5", "-"],
        ["first", "rows", "0.2", "0.2"],
        ["survey", "-", "0.5"],
        ["in", "all", "4.0", "3.0"],
    ]


def test_the_calibration_of_drafts_is_summed_over_runs_of_a_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the drafter's confidence, the least likely drafts first; damaged logs are left out."""
    job(tmp_path, mixed())
    logs = tmp_path / "_batchspec" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    written: list[object] = [
        {"calibration": {"4": [10, 3, 2.5], "20": [80, 70, 72.0]}}, {"calibration": {"4": [30, 9, 7.5]}},
        {"drafter": "eagle3", "calibration": {"4": [100, 40, 50.0]}},  # numbers its confidence in another way
        {"calibration": {"4": [1]}}, {"calibration": 3}, {"tokens": 3}, [1],
    ]
    for i, log in enumerate(written):
        (logs / f"run-{i:032x}.json").write_text(json.dumps(log))
    assert job_stats(tmp_path).calibration == (
        Calibration(drafts=40, expected=0.25, accepted=0.3), Calibration(drafts=100, expected=0.5, accepted=0.4),
        Calibration(drafts=80, expected=0.9, accepted=0.875),
    )
    assert main([str(tmp_path)]) == 0
    block = capsys.readouterr().out.partition("drafts by the drafter's confidence\n")[2].partition("\n\n")[0]
    assert [line.split() for line in block.splitlines()] == [
        ["drafts", "expected", "rate", "rate"], ["40", "0.250", "0.300"], ["100", "0.500", "0.400"], ["80", "0.900", "0.875"],
    ]
