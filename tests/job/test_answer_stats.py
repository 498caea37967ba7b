"""What `stats` and the report say about labels, JSON answers and tool calls, against rows made by hand; the speed of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.cli import main as cli
from batchspec.job.report import stats as stats_module
from batchspec.job.report.calls import ToolCalls
from batchspec.job.report.json_answers import MAX_VALUES, Field, JsonTally
from batchspec.job.report.labels import Label
from batchspec.job.report.stats import JobStats, job_stats
from batchspec.job.report.summary import DECODED, speed_of
from batchspec.records import Completion
from batchspec.tasks.choose import Choose
from batchspec.tasks.score_prompts import ScorePrompts
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of


def job(path: Path, completions: list[Completion], *, table: pa.Table | None = None, decode: Any = None, **made: Any) -> JobStats:
    """The statistics of a finished job with a completion for each row, two rows a shard."""
    table = dataset(len(completions)) if table is None else table
    shards, columns = shards_of(table, 2)
    config = {"model": {"path": "tiny"}, "decode": decode or {}}
    folder = new_folder(path, len(completions), 2, config=config)
    for shard in shards:
        mine = [row for row in completions if row.row_index in folder.rows_of(shard.index)]
        folder.commit(shard.index, built(shard, columns, mine, **made))
    return job_stats(path)


def scored(row: int, **probs: float) -> Completion:
    """A row with these probabilities of labels."""
    best = max(probs, key=lambda name: probs[name])
    logprobs = tuple((name, -1.0) for name in probs)
    return completion(row, token_ids=None, text=best, choice_logprobs=logprobs, choice_probs=tuple(probs.values()), stats=None)


LABELLED = [
    scored(0, yes=0.7, no=0.3), scored(1, yes=0.6, no=0.4), failed(2), scored(3, yes=0.05, no=0.95), scored(4, yes=0.9, no=0.1),
]
CHOICES = {"score": "choices", "choice": ["maybe", "yes", "no"]}


def test_each_label_has_its_count_and_the_mean_probability_and_margin_of_its_rows(tmp_path: Path) -> None:
    found = job(tmp_path, LABELLED, decode=CHOICES, task=Choose()).labels
    assert found is not None
    yes, no, maybe = found.labels
    assert (yes.label, yes.rows, no.label, no.rows) == ("yes", 3, "no", 1)
    assert [yes.mean_prob, yes.mean_margin, no.mean_prob, no.mean_margin] == pytest.approx([2.2 / 3, 1.4 / 3, 0.95, 0.9])
    assert maybe == Label(label="maybe", rows=0, mean_prob=None, mean_margin=None), "a label that no row has is listed"
    assert (found.rows, found.other_rows) == (4, 0)
    assert [one.request_id for one in found.least_certain] == ["q-1", "q-0", "q-4", "q-3"]
    first = found.least_certain[0]
    assert (first.label, first.prob) == ("yes", 0.6)
    assert first.margin == pytest.approx(0.2)


def test_a_row_with_one_choice_has_its_whole_probability_as_margin(tmp_path: Path) -> None:
    found = job(tmp_path, [scored(0, yes=1.0)], task=Choose()).labels
    assert found is not None
    assert [(one.prob, one.margin) for one in found.least_certain] == [(1.0, 1.0)]


def test_labels_do_not_depend_on_how_much_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = job(tmp_path, LABELLED, decode=CHOICES, task=Choose()).labels
    monkeypatch.setattr(stats_module, "READ_ROWS", 1)
    assert job_stats(tmp_path).labels == whole


def test_of_more_labels_than_are_counted_the_others_are_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchspec.job.report.labels.MAX_LABELS", 2)
    found = job(tmp_path, [scored(i, **{f"ending {i % 3}": 0.8, "x": 0.2}) for i in range(6)], task=Choose()).labels
    assert found is not None
    assert ([(one.label, one.rows) for one in found.labels], found.other_rows) == ([("ending 0", 2), ("ending 1", 2)], 2)


def test_answers_that_are_decoded_as_one_of_some_texts_are_counted_without_probabilities(tmp_path: Path) -> None:
    rows = [completion(i, text="yes" if i < 3 else "no") for i in range(4)]
    rows[1] = rows[1].replace(status="truncated", finish_reason="length", text="y")
    found = job(tmp_path, rows, decode={"choice": ["yes", "no", "maybe"]}).labels
    assert found is not None
    assert [(one.label, one.rows) for one in found.labels] == [("yes", 2), ("no", 1), ("maybe", 0)]
    assert {one.mean_prob for one in found.labels} == {None}
    assert found.least_certain == ()


def test_text_json_and_page_show_the_labels_and_no_lengths_of_zero_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, LABELLED, decode=CHOICES, task=Choose())
    assert cli(["stats", str(tmp_path), "--by", "kind"]) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["rows", "share", "mean", "probability", "mean", "margin"] in lines
    assert ["yes", "3", "75.0%", "0.733", "0.467"] in lines
    assert ["q-1", "yes", "0.600", "0.200"] in lines
    assert "completion length" not in said
    assert "end in a loop" not in said
    assert lines[-3:] == [["completions"], ["a", "2"], ["b", "2"]], "no token was decoded"
    assert cli(["stats", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"]["labels"][0]["rows"] == 3
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    assert cli(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>yes</td><td>3</td><td>75.0%</td><td>0.73</td><td>0.47</td>" in page
    assert "<td>q-1</td><td>yes</td><td>0.600</td><td>0.200</td>" in page
    assert "Completion lengths" not in page
    assert "<dd>none: choices are scored</dd>" in page


SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad", None]}, "note": {"type": ["string", "null"]}, "stars": {"type": "integer"}},
}
OBJECTS = [
    {"mood": "good", "note": "a", "stars": 3}, {"mood": "good", "note": None, "stars": 3}, {"mood": None, "stars": 5},
    {"mood": "good", "note": "b", "stars": 5},
]


def texts(*answers: str) -> list[Completion]:
    return [completion(i, text=text) for i, text in enumerate(answers)]


def test_of_a_schema_the_valid_answers_the_fields_and_the_values_of_enums_are_counted(tmp_path: Path) -> None:
    rows = texts(*map(json.dumps, OBJECTS), '{"mood": "go', '{"mood": "good"', "[1]")
    rows[5] = rows[5].replace(status="truncated", finish_reason="length")
    found = job(tmp_path, rows, decode={"schema": SCHEMA}).json_answers
    assert found is not None
    assert (found.finished, found.valid, found.objects) == (6, 5, 4)
    assert found.fields == (
        Field(name="mood", present=4, null=1, values={"good": 3, "bad": 0}),
        Field(name="note", present=3, null=1, values=None),
        Field(name="stars", present=4, null=0, values={"3": 2, "5": 2}),
    )


def test_a_field_of_the_schema_that_no_answer_has_is_listed_also_if_the_schema_is_text(tmp_path: Path) -> None:
    found = job(tmp_path, texts("{}"), decode={"schema": json.dumps(SCHEMA)}).json_answers
    assert found is not None
    assert [(field.name, field.present) for field in found.fields] == [("mood", 0), ("note", 0), ("stars", 0)]


def test_rows_with_schemas_of_their_own_are_counted_by_what_they_hold(tmp_path: Path) -> None:
    found = job(tmp_path, texts('{"kind": true}', ' {"kind": "true", "n": 1.5}', '{"kind": true}', "no JSON")).json_answers
    assert found is not None
    assert (found.finished, found.valid) == (4, 3)
    assert found.fields == (
        Field(name="kind", present=3, null=0, values=None), Field(name="n", present=1, null=0, values=None)
    ), "three values of two kinds are no enum"
    again = job(tmp_path / "2", texts(*['{"kind": true}', '{"kind": "true"}'] * 2)).json_answers
    assert again is not None
    assert again.fields[0].values == {"true": 2, '"true"': 2}, "a text and a boolean are told apart"


def test_plain_texts_have_no_section_of_fields(tmp_path: Path) -> None:
    assert job(tmp_path, texts("{a} set", '{"a": 1}', "c", "d")).json_answers is None


VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["a", "b", "true", "5"]) | st.just([1])


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from(["x", "y", "z"]), VALUES), min_size=1), cut=st.integers(1, 5))
def test_counts_of_fields_are_those_of_the_objects(rows: list[dict[str, Any]], cut: int) -> None:
    tally = JsonTally({})
    for start in range(0, len(rows), cut):
        part = pl.Series(map(json.dumps, rows[start : start + cut]), dtype=pl.String)
        tally.add(pl.DataFrame({"json_text": part}).with_columns(status=pl.lit("ok"), has_text=pl.lit(value=True)))
    found = tally.result()
    assert found is not None
    assert found.valid == found.objects == found.finished == len(rows)
    for field in found.fields:
        values = [row[field.name] for row in rows if field.name in row]
        assert (field.present, field.null) == (len(values), values.count(None))
        if field.values is not None:
            assert sum(field.values.values()) == len(values) - values.count(None)
            assert len(field.values) <= MAX_VALUES


def called(row: int, *calls: tuple[str, str]) -> Completion:
    listed = [{"id": "x", "type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]
    return completion(row, text="", tool_calls=json.dumps(listed) if calls else None)


TOOLS = json.dumps([{"type": "function", "function": {"name": name}} for name in ("find", "book")])
CALLED = [
    called(0, ("find", "{}"), ("find", '{"a": 1}')), called(1), called(2, ("book", "[1]")), called(3, ("buy", "{")), called(4),
    failed(5),
]


def test_tool_calls_are_counted_by_tool_with_rows_without_one_and_invalid_ones(tmp_path: Path) -> None:
    table = dataset(6).append_column("tools", pa.array([TOOLS] * 4 + [None, TOOLS]))
    assert job(tmp_path, CALLED, table=table, calls=True).tool_calls == ToolCalls(
        answers=4, without=1, calls=4, by_tool={"find": 2, "book": 1, "buy": 1}, bad_arguments=2, unknown_tools=1
    ), "row 4 has no tools"
    records = pa.array([json.loads(TOOLS)] * 4 + [[], None])
    assert job(tmp_path / "2", CALLED, table=dataset(6).append_column("tools", records), calls=True).tool_calls == (
        job_stats(tmp_path).tool_calls
    ), "tools may be records"
    flat = json.dumps([{"function": None, "name": "find"}, {"name": "book"}])
    table = dataset(6).append_column("tools", pa.array([flat] * 4 + ["{", flat]))
    assert job(tmp_path / "3", CALLED, table=table, calls=True).tool_calls == job_stats(tmp_path).tool_calls, "or functions alone"


def test_without_the_rows_tools_every_answer_counts_and_no_tool_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = job(tmp_path, CALLED, calls=True).tool_calls
    assert found is not None
    assert (found.answers, found.without, found.unknown_tools) == (5, 2, None)
    assert cli(["stats", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "tool calls              4 in 3 of 5 answers" in said
    assert "invalid calls           2 with arguments that are not a JSON object" in said
    assert ["find", "2"] in [line.split() for line in said.splitlines()]


def log(seconds: float, tokens: int, began_at: float | None = None, **more: Any) -> str:
    return json.dumps({"seconds": seconds, "tokens": tokens, **({} if began_at is None else {"began_at": began_at}), **more})


def test_the_speed_of_a_job_counts_time_in_which_several_runs_worked_once() -> None:
    speed = speed_of([log(10, 100, 5000.0), log(10, 300, 5004.0), log(2, 40, 5006.0), log(6, 60, 9000.0), "damaged", "[]"])
    assert speed is not None
    assert (speed.tok_s, speed.counts, speed.tokens, speed.seconds, speed.runs) == (25.0, DECODED, 500, 20.0, 4)
    assert speed_of([]) is None


def test_runs_of_earlier_versions_and_scoring_runs_have_a_speed_too() -> None:
    earlier, scoring = speed_of([log(10, 100), log(10, 300)]), speed_of([log(2, 8, 5000.0, counts=ScorePrompts.counts)])
    assert earlier is not None
    assert scoring is not None
    assert (earlier.tok_s, earlier.counts, scoring.tok_s, scoring.counts) == (20.0, DECODED, 4.0, ScorePrompts.counts)
