"""Is the data good? What `batchspec stats` counts of the answers, and the lines of a run's log."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec import run
from batchspec.commands.stats import main
from batchspec.job.report import quality
from batchspec.job.report import stats as stats_module
from batchspec.job.report.quality import LOOP_CHARS, LOOP_COPIES, ends_in_a_loop
from batchspec.job.report.stats import job_stats
from batchspec.records import Completion
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of
from tests.helpers.models import make_checkpoint, make_tokenizer

LOOP = "The answer is 4. " * 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOP, True),
        (f"First a reason of its own, which is not repeated. {LOOP}The ans", True),  # cut off within a copy
        ("a" * 60, True),
        ("\n" * 500, True),
        ("abcab" * 12, True),  # its last letters occur within the sequence too
        ("word " * 11, False),  # too short
        ("a" * 20 + ("x" * 50 + "y") * 3, False),  # three copies
        ("The answer is 4. " * 8 + "Done.", False),  # it came out of the loop
        (" ".join(f"{i}. item" for i in range(200)), False),
        ("", False),
        ((("x" * 400) + "y") * 4, True),
        ((("x" * 600) + "y") * 4, False),  # longer than what is looked at
    ],
)
def test_a_text_ends_in_a_loop_if_one_sequence_fills_its_end(text: str, expected: bool) -> None:
    assert ends_in_a_loop(text) is expected


@given(st.text("ab", max_size=40), st.text("ab \n", min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 29))
def test_a_loop_is_found_whatever_is_repeated_and_wherever_it_is_cut(head: str, unit: str, copies: int, more: int) -> None:
    """Against the definition: some period p, of which the last max(LOOP_CHARS, LOOP_COPIES p) characters are made."""
    text = head + unit * copies + unit[: more % len(unit)]
    spans = ((p, max(LOOP_CHARS, LOOP_COPIES * p)) for p in range(1, len(text)))
    periodic = any(span <= len(text) and text[len(text) - span + p :] == text[len(text) - span : -p] for p, span in spans)
    assert ends_in_a_loop(text) is periodic


def job(path: Path, rows: list[Completion], count: int) -> None:
    shards, columns = shards_of(dataset(count), 2)
    folder = new_folder(path, count, 2, config={"output": {"messages": "full"}})
    for shard in shards:
        folder.commit(shard.index, built(shard, columns, [row for row in rows if row.row_index in folder.rows_of(shard.index)]))


def answers() -> list[Completion]:
    """Two requests with three answers each, an empty answer, one cut off in a loop, one whose thought loops, an error."""
    cut: dict[str, Any] = {"status": "truncated", "finish_reason": "length"}
    return [
        *(completion(0, i, text=text) for i, text in enumerate(("yes", "no", "yes"))),
        *(completion(1, i, text="same", token_ids=np.zeros(40, np.int32)) for i in range(3)),
        completion(2, text=" \n"),
        completion(3, text=LOOP, token_ids=np.zeros(90, np.int32), **cut),
        completion(4, text="", reasoning=LOOP, prompt_ids=np.zeros(70, np.int32), **cut),
        failed(5),
    ]


@pytest.mark.parametrize("at_a_time", [1, 100])
def test_stats_say_how_many_answers_are_empty_loop_or_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at_a_time: int
) -> None:
    monkeypatch.setattr(stats_module, "READ_ROWS", at_a_time)
    job(tmp_path, answers(), 6)
    good = job_stats(tmp_path).quality
    assert (good.answers, good.empty, good.loops) == (9, 2, 2)
    assert (good.sampled_requests, good.mean_answers, good.mean_distinct, good.all_equal) == (2, 3.0, 1.5, 1)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for line in (
        "completions        10 (7 ok, 2 truncated, 1 error)", "empty answers      2 of 9 (22.2%)",
        "end in a loop      2 of 9 (22.2%)", "distinct answers   1.50 of 3.00 per request; all equal in 1 of 2 (50.0%) requests",
        "prompt length      median 5, 90 % up to 70, 99 % up to 70, longest 70 tokens",
        "completion length  median 3, 90 % up to 90, 99 % up to 90, longest 90 tokens",
    ):
        assert f"{line}\n" in said
    blocks = ["shards", "random samples", "prompt tokens", "drafter", "acceptance by position"]
    assert [said.index(f"\n{block}") if i else said.index(block) for i, block in enumerate(blocks)] == sorted(
        said.index(f"\n{block}") if i else 0 for i, block in enumerate(blocks)
    ), "first the data, then the speed, then the acceptance"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_percentiles_are_lengths_that_so_many_rows_do_not_exceed(lengths: list[int]) -> None:
    got = quality._lengths(np.bincount(lengths))
    assert got is not None
    for share, value in ((0.5, got.median), (0.9, got.p90), (0.99, got.p99)):
        assert sum(length <= value for length in lengths) >= share * len(lengths) - 1e-9
        assert value in lengths
        assert sum(length < value for length in lengths) < share * len(lengths)
    assert (got.shortest, got.longest) == (min(lengths), max(lengths))
    begins = [got.shortest + i * got.bin_width for i in range(len(got.bins))]
    assert got.bins == tuple(sum(begin <= length < begin + got.bin_width for length in lengths) for begin in begins)
    assert begins[-1] <= got.longest < begins[-1] + got.bin_width
    assert len(begins) <= quality.MAX_BINS


@pytest.mark.second
def test_samples_are_the_same_each_time_and_their_text_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, [completion(i, text=f"\x1b[31m\n{'long ' * 300}{i}") for i in range(40)], 40)
    shown = []
    for _ in range(2):
        assert main([str(tmp_path), "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out)["quality"]["samples"])
    assert shown[0] == shown[1]
    assert len({row["request_id"] for row in shown[0]}) == 6
    assert [row["row_index"] for row in shown[0]] != [0, 1, 2, 3, 4, 5]
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n    > ") == 6, "all that --json and the report have"
    assert "\x1b" not in text
    assert "    > \\x1b[31m\\nlong" in text
    assert max(map(len, text.splitlines())) <= 160


def test_a_job_of_error_rows_or_of_scores_has_no_answers_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path / "errors", [failed(0), failed(1)], 2)
    scores: dict[str, Any] = {"text": None, "token_ids": np.zeros(0, np.int32), "finish_reason": "length"}
    job(tmp_path / "scores", [completion(i, **scores) for i in range(2)], 2)
    for name in ("errors", "scores"):
        assert main([str(tmp_path / name)]) == 0
        said = capsys.readouterr().out
        assert "loop" not in said
        assert "random samples" not in said


@pytest.mark.second
def test_the_lines_of_a_run_s_log_are_short_and_use_no_word_before_it_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(make_checkpoint(tmp_path / "m", "llama"))
    pl.DataFrame({"prompt": [None, *(f"say {i}" for i in range(20))]}).write_parquet(tmp_path / "in.parquet")
    words = [f"model.path={model}", f"input.path={tmp_path}/in.parquet", "decode.max_new_tokens=12", "packing.max_num_seqs=2"]
    for drafter in ("lookup", "none"):
        assert run.main([*words, f"output.dir={tmp_path}/{drafter}", f"draft={drafter}"]) == 0
        said = capsys.readouterr().err
        lines = said.replace(str(tmp_path), "/work").splitlines()
        assert len(lines) > 5
        assert [line for line in lines if len(line) >= 120] == []
        assert "live row" not in said
        assert "ETA 00:00" not in said
        first = {word: next(line for line in lines if re.search(rf"\b{word}s?\b", line)) for word in ("page", "round")}
        assert re.fullmatch(r"2 rows at a time, up to \d+ tokens each; K/V cache of \d+ pages of 16 tokens", first["page"])
        explained = "drafts up to 8 tokens for each row, and the model" if drafter == "lookup" else "adds one token to each row"
        assert first["round"].startswith(f"draft={drafter}: a round {explained}")
