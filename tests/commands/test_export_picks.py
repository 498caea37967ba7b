"""What `batchspec export` picks and keeps: conditions, scores, pairs for preference training, prompts with an answer."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from batchspec import cli
from batchspec.commands.export import main
from batchspec.config.schema import InputConfig, OutputConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.data.dataset.writer import build_table
from batchspec.errors import BatchspecError, ConfigError, InputError, OutputError
from batchspec.records import Completion
from tests.commands.test_export import lines, turn
from tests.helpers.io_samples import completion, failed, new_folder

SAYS: list[list[str | None]] = [["4", "5", "4"], ["7", "7", "7"], ["9", "8", "9"], ["1", None, "2"]]
"""Of each request the answers of its samples; None: an error row."""
REFERENCE = ["4", "7", "8", "1"]
PAGE = Path(__file__).parents[2] / "jobs" / "pages" / "output.md"


def job(path: Path) -> Path:
    """Four requests with three samples each, in two shards; the last sample of the third was cut off."""
    table = pa.table(
        {
            "id": [f"q-{i}" for i in range(4)], "prompt": [f"say {i}" for i in range(4)], "answer": REFERENCE,
            "kind": list("abab"), "day": [date(2026, 1, 1 + i) for i in range(4)], "score": [10.0, 20.0, float("nan"), 40.0],
            "raw": [b"\xff"] * 4,
        }
    )
    columns = map_columns(table.schema, {})
    folder = new_folder(path, 4, 2, config={"output": {"messages": "full"}})
    for shard in table_source(table).shards(2):
        made = [_completion(row, sample) for row in folder.rows_of(shard.index) for sample in range(3)]
        config: dict[str, Any] = {"input": InputConfig(), "output": OutputConfig(), "attempt": "a"}
        folder.commit(shard.index, build_table(shard, made, columns=columns, **config))
    return path


def _completion(row: int, sample: int) -> Completion:
    text = SAYS[row][sample]
    if text is None:
        bad = failed(row)
        return completion(
            row, sample, status="error", finish_reason="error", text=None, error=bad.error, prompt_ids=None, token_ids=None,
            seed=None, stats=None,
        )
    cut = {"status": "truncated", "finish_reason": "length"} if (row, sample) == (2, 2) else {}
    return completion(row, sample, text=f"So it is {text}", **cut)


def exported(out: Path, form: str, *words: str) -> list[Any]:
    file = out.parent / "file.jsonl"
    assert main([str(out), "--to", form, str(file), "--overwrite", *words]) == 0
    return lines(file)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["chat", "--where", "usage.completion_tokens > 3"], "10 by --where, 1 error, 1 truncated); give a condition that "),
        (["chat", "--status", "invalid"], "1 error, 10 ok, 1 truncated); --status ok,truncated takes them"),
        (["prompt_only", "--status", "error"], "1 error, 10 ok, 1 truncated); --status ok,truncated takes them"),
        (["openai", "--status", "skipped"], "1 error, 10 ok, 1 truncated); --status ok,truncated takes them"),
        (["chat", "--score", "score", "--where", "row_index = 2"], "8 by --where, 1 error, 1 truncated, 2 without a score); "),
        (["preference", "--score", "row_index"], "1 error, 10 of requests without a better and a worse answer, 1 truncated); a "),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_of_no_row_is_refused_and_writes_no_file(
    tmp_path: Path, words: list[str], problem: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job(Path("out"))
    file = Path("file.jsonl" if "openai" in words else f"file.{suffix}")
    file.write_text("earlier")
    with pytest.raises(OutputError) as refused:
        main(["out", str(file), "--overwrite", "--to", *words])
    assert str(refused.value).startswith(f"{file} is not written: all rows of out are left out ({problem}")
    assert file.read_text() == "earlier"
    assert {path.name for path in Path().iterdir()} == {file.name, "out"}


def keys(rows: list[Any]) -> list[tuple[str, int]]:
    return [(row["request_id"], row["sample_index"]) for row in rows]


@pytest.mark.parametrize("words", [["chat", "--score", "sample_index"], ["prompt_only"], ["openai", "--where", "row_index != 2"]])
def test_a_shard_is_joined_with_its_own_part_of_the_picked_rows(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined with those of the whole job, each of a million rows would cost as much as the job has shards."""
    joined, join = list[list[int]](), pl.LazyFrame.join

    def told(self: pl.LazyFrame, other: pl.LazyFrame, **how: Any) -> pl.LazyFrame:
        joined.append(other.select("row_index").collect().to_series().unique(maintain_order=True).to_list())
        return join(self, other, **how)

    monkeypatch.setattr(pl.LazyFrame, "join", told)
    written = exported(job(tmp_path / "out"), *words)
    of_shards = [[0, 1], [2, 3] if "openai" not in words else [3]]
    assert [rows for rows in joined if rows not in of_shards] == []
    assert joined[-2:] == of_shards
    assert len(written) == sum(map(len, of_shards))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("kind = 'b' AND sample_index > 0", [("q-1", 1), ("q-1", 2), ("q-3", 2)]),
        ("STRPOS(completion, answer) > 0", [("q-0", 0), ("q-0", 2), ("q-1", 0), ("q-1", 1), ("q-1", 2), ("q-2", 1), ("q-3", 0)]),
        # Over the rows of the whole job, not those of a shard; NaN and null are not true.
        ("day = MAX(day) OVER (PARTITION BY kind)", [("q-2", 0), ("q-2", 1), ("q-3", 0), ("q-3", 2)]),
        ("day > (SELECT 1)", None),
    ],
)
def test_a_condition_chooses_rows_of_the_whole_job(tmp_path: Path, where: str, expected: list[tuple[str, int]] | None) -> None:
    out = job(tmp_path / "out")
    if expected is None:
        with pytest.raises(ConfigError, match=r"^--where day > \(SELECT 1\): "):
            exported(out, "chat", "--where", where)
    else:
        assert keys(exported(out, "chat", "--where", where)) == expected


def test_it_is_said_which_rows_a_condition_and_a_score_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = job(tmp_path / "out")
    exported(out, "chat", "--where", "kind = 'a'", "--score", "sample_index")
    said = "2 lines; rows left out: 5 by --where, 1 error, 3 other samples, 1 truncated\n"
    assert capsys.readouterr().out == f"{tmp_path}/file.jsonl: {said}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--where", "kind ="], "--where kind =: not an SQL expression"),
        (["--where", "kinds = 'a'"], "no column 'kinds'; did you mean kind"),
        (["--where", "kind > 3"], "--where kind > 3: cannot be computed"),
        (["--where", "sample_index"], "its values are Int32, not true or false"),
        (["--where", "read_csv('/etc/passwd') = 1"], "not an SQL expression"),
        (["--score", "kind"], "--score kind: its values are String, not numbers"),
        (["--keep", "kinds"], "--keep kinds: the output has no such column"),
        (["--keep", "completion"], "trainers read it as one of another format"),
        (["--keep", "score", "--score", "sample_index"], "has a column of that name"),
        (["--keep", "raw"], "it holds bytes"),
        (["--join", "x.csv"], "--join x.csv: not .parquet or .jsonl, and no folder of a job"),
        (["--join", "nowhere.jsonl"], "--join nowhere.jsonl: cannot be read"),
    ],
)
def test_an_option_that_cannot_be_followed_is_one_line_and_writes_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    out = job(tmp_path / "out")
    with pytest.raises(BatchspecError) as error:
        main([str(out), "--to", "chat", str(tmp_path / "x.jsonl"), *words])
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"request_id": ["q-0"], "points": [1]}, "no column 'sample_index'"),
        ({"request_id": ["q-0", "q-0"], "sample_index": [1, 1], "points": [1, 2]}, "several lines for request 'q-0', sample 1"),
        (
            {"request_id": ["x"], "sample_index": [0], "points": [1]},
            "none of its lines has the request_id and sample_index of a row",
        ),
        ({"request_id": ["q-0"], "sample_index": [0], "kind": [1]}, "the output has a column 'kind' too; rename it"),
    ],
)
def test_a_file_that_does_not_fit_the_job_is_not_joined(tmp_path: Path, made: dict[str, Any], said: str) -> None:
    out, file = job(tmp_path / "out"), tmp_path / "scores.parquet"
    pl.DataFrame(made).write_parquet(file)
    with pytest.raises(InputError, match=said):
        exported(out, "chat", "--join", str(file))


def points(folder: Path, suffix: str = "parquet") -> Path:
    """A judge's points: of the first request the second answer is best; the second has equal ones, the third is not judged."""
    rows = pl.DataFrame(
        {"request_id": ["q-0"] * 3 + ["q-1"] * 3 + ["q-3"] * 2, "sample_index": [0, 1, 2, 0, 1, 2, 2, 0],
         "points": [1, 5, 0, 2, 2, 2, 3, 4], "note": list("abcdefgh")}
    )
    file = folder / f"points.{suffix}"
    if suffix == "parquet":
        rows.write_parquet(file)
    else:
        rows.write_ndjson(file)
    return file


def test_pairs_are_the_best_and_the_worst_answer_as_trl_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = job(tmp_path / "out")
    words = ["--join", str(points(tmp_path)), "--score", "points", "--keep", "kind,note"]
    rows = exported(out, "preference", *words)
    assert rows == [
        {
            "request_id": f"q-{row}", "chosen_sample_index": best, "rejected_sample_index": worst, "score_chosen": high,
            "score_rejected": low, "prompt": [turn("user", f"say {row}")], "chosen": [turn("assistant", f"So it is {good}")],
            "rejected": [turn("assistant", f"So it is {bad}")], "kind": kind, "note": note,
        }
        for row, best, worst, high, low, good, bad, kind, note in (
            (0, 1, 2, 5.0, 0.0, "5", "4", "a", "b"), (3, 0, 2, 4.0, 3.0, "1", "2", "b", "h"),
        )
    ]
    left = "1 error, 3 of requests without a better and a worse answer, 1 other samples, 1 truncated, 2 without a score"
    assert capsys.readouterr().out == f"{tmp_path}/file.jsonl: 2 lines; rows left out: {left}\n"
    assert main([str(out), "--to", "preference", str(tmp_path / "x.parquet"), *words]) == 0
    assert pl.read_parquet(tmp_path / "x.parquet").to_dicts() == rows
    with pytest.raises(ConfigError, match="--to preference needs --score"):
        exported(out, "preference")


def test_prompts_are_written_once_each_with_the_reference_or_the_best_answer(tmp_path: Path) -> None:
    out = job(tmp_path / "out")
    rows = exported(out, "prompt_only", "--keep", "answer,day,score")
    assert exported(out, "prompt_only", "--keep", "answer,day", "--keep", "score") == rows
    assert rows == [
        {"request_id": f"q-{i}", "prompt": [turn("user", f"say {i}")], "answer": REFERENCE[i], "day": f"2026-01-0{i + 1}",
         "score": None if i == 2 else 10.0 * (i + 1)} for i in range(4)
    ]
    best = exported(out, "prompt_only", "--join", str(points(tmp_path, "jsonl")), "--score", "points")
    assert [(row["request_id"], row["sample_index"], row["answer"], row["score"]) for row in best] == [
        ("q-0", 1, "So it is 5", 5.0), ("q-1", 0, "So it is 7", 2.0), ("q-3", 0, "So it is 1", 4.0)
    ]


def test_requests_that_have_no_prompt_in_the_file_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = job(tmp_path / "out")
    assert len(exported(out, "prompt_only")) == 4
    assert "was wanted" not in capsys.readouterr().out
    assert len(exported(out, "prompt_only", "--where", "request_id IN ('q-0', 'q-3')")) == 2
    assert capsys.readouterr().out.endswith("; no row of 2 requests was wanted\n")
    exported(out, "chat", "--where", "request_id = 'q-0'")
    assert "was wanted" not in capsys.readouterr().out


def test_a_score_is_the_expression_s_value_where_the_job_has_a_column_of_that_name(tmp_path: Path) -> None:
    rows = exported(job(tmp_path / "out"), "chat", "--score", "sample_index * 2")
    assert [(row["sample_index"], row["score"]) for row in rows] == [(2, 4.0), (2, 4.0), (1, 2.0), (2, 4.0)]


def test_openai_s_lines_take_a_condition_but_no_score(tmp_path: Path) -> None:
    out = job(tmp_path / "out")
    assert [line["custom_id"] for line in exported(out, "openai", "--where", "kind = 'b'")] == ["q-1", "q-3"]
    with pytest.raises(ConfigError, match=r"--score points has no place in --to openai"):
        exported(out, "openai", "--score", "points")


def test_the_lines_of_the_page_make_majority_best_of_and_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks under `After the job` of jobs/pages/output.md, run one after another."""
    monkeypatch.chdir(tmp_path)
    job(tmp_path / "OUT")
    section = PAGE.read_text(encoding="utf-8").split("\n## After the job\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "bash"]
    assert blocks[0][1].count("\n") == 3
    for kind, block in blocks:
        if kind == "python":
            exec(block, {"pl": pl})
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                assert words[0] == "batchspec"
                assert cli.main(words[1:]) == 0
    ok = [[text for sample, text in enumerate(texts) if (row, sample) != (2, 2)] for row, texts in enumerate(SAYS)]
    majority = lines(tmp_path / "majority.jsonl")
    assert [row["request_id"] for row in majority] == ["q-0", "q-1", "q-2", "q-3"]
    for row, texts in zip(majority, ok, strict=True):
        said = row["completion"][0]["content"].split()[-1]
        counts = Counter(text for text in texts if text)
        assert counts[said] == max(counts.values())
    best = lines(tmp_path / "best.jsonl")
    assert [row["messages"][-1]["content"] for row in best] == [f"So it is {text}" for text in REFERENCE]
    pairs = lines(tmp_path / "pairs.jsonl")
    assert [(row["request_id"], row["chosen"][0]["content"][-1], row["rejected"][0]["content"][-1]) for row in pairs] == [
        ("q-0", "4", "5"), ("q-2", "8", "9"), ("q-3", "1", "2")
    ]
    questions = lines(tmp_path / "questions.jsonl")
    assert [row["answer"] for row in questions] == REFERENCE
