"""decode.repetition_detection: a row ends at the token that completes a repetition, and everything that tells of it agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec import run
from batchspec.config.compose import compose
from batchspec.engine.features.repetition import RepetitionFinder
from batchspec.errors import ConfigError
from batchspec.records import Repetition
from tests.helpers.engines import first_repetition
from tests.helpers.runs import make_model

REPETITION = "decode.repetition_detection"
KEYS = [f"{REPETITION}.max_pattern_size=20", f"{REPETITION}.min_count=2"]
TWICE = Repetition(min_pattern_size=1, max_pattern_size=20, min_count=2)
"""What these keys ask for."""


@given(
    tokens=st.lists(st.integers(0, 2), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    count=st.integers(2, 5),
)
def test_the_first_repetition_is_found_whatever_pieces_the_tokens_come_in(
    tokens: list[int], cuts: list[int], sizes: tuple[int, int], count: int
) -> None:
    repetition = Repetition(min_pattern_size=min(sizes), max_pattern_size=max(sizes), min_count=count)
    expected = first_repetition(tokens, repetition)
    finder = RepetitionFinder(repetition)
    pieces = [finder.go_on(tokens[:end], 0) for end in sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)})]
    assert next((found for found in pieces if found is not None), None) == expected


def test_tokens_that_were_replaced_are_read_anew() -> None:
    """A thinking budget cuts an output and appends its closing: the output may even be as long as before."""
    finder = RepetitionFinder(Repetition(min_pattern_size=1, max_pattern_size=2, min_count=3))
    assert finder.go_on([7, 8, 7, 8, 1], 0) is None
    assert finder.go_on([7, 8, 7, 9, 9], 2) is None
    assert finder.go_on([7, 8, 7, 9, 9, 9], 2) == 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def job(model: Path, folder: Path, out: str, *more: str) -> list[dict[str, Any]]:
    data = folder / "in.parquet"
    if not data.exists():
        pl.DataFrame({"messages": [[{"role": "user", "content": f"Say {i}"}] for i in range(6)]}).write_parquet(data)
    words = [
        f"model.path={model}", f"input.path={data}", f"output.dir={folder / out}", "decode.max_new_tokens=60", "draft=none",
        "model.dtype=float64", "decode.ignore_eos=true", "output.token_ids=true", "device=cpu", *more,
    ]
    assert run.main(words) == 0
    return pl.read_parquet(folder / out / "data/*.parquet").sort("row_index").to_dicts()


@pytest.mark.second
def test_a_job_ends_rows_that_repeat_themselves_and_says_so(model: Path, tmp_path: Path) -> None:
    """The tiny model loops in all of its greedy rows. The same with drafts; OpenAI's file has only a reason that OpenAI knows."""
    whole, cut = job(model, tmp_path, "whole"), job(model, tmp_path, "cut", *KEYS, f"output.openai={tmp_path / 'openai.jsonl'}")
    ended = 0
    for before, after in zip(whole, cut, strict=True):
        tokens = before["token_ids"]
        end = first_repetition(tokens, TWICE)
        assert after["token_ids"] == tokens[:end]
        assert after["status"] == "truncated"
        assert after["finish_reason"] == ("length" if end is None else "repetition")
        ended += end is not None
    assert ended
    lines = [json.loads(line) for line in (tmp_path / "openai.jsonl").read_text().splitlines()]
    reasons = [choice["finish_reason"] for line in lines if "response" in line for choice in line["response"]["body"]["choices"]]
    assert reasons == ["length"] * 6
    drafted = job(model, tmp_path, "drafted", *KEYS, "draft=lookup", "packing.max_num_seqs=2")
    assert [row["token_ids"] for row in drafted] == [row["token_ids"] for row in cut]


@pytest.mark.second
def test_a_retry_of_cut_off_rows_leaves_rows_that_repeat_themselves(model: Path, tmp_path: Path) -> None:
    before = job(model, tmp_path, "out", *KEYS, "decode.max_new_tokens=40")
    after = job(model, tmp_path, "out", *KEYS, "decode.max_new_tokens=60", "resume=length")
    assert {old["finish_reason"] for old in before} == {"repetition", "length"}
    for old, new in zip(before, after, strict=True):
        if old["finish_reason"] == "repetition":
            assert new["token_ids"] == old["token_ids"]
            assert new["perf"] == old["perf"]
        else:
            assert len(new["token_ids"]) > len(old["token_ids"])


@pytest.mark.second
def test_rows_that_repeated_themselves_go_on_if_a_retry_asks_for_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They then have the tokens of a job without the detection; rows that are cut off at the limit stay."""
    whole, before = job(model, tmp_path, "whole"), job(model, tmp_path, "out", *KEYS)
    assert {old["finish_reason"] for old in before} == {"repetition", "length"}
    with pytest.raises(AssertionError):
        job(model, tmp_path, "out", *KEYS, "resume=repetition")
    assert f"{REPETITION} on would end the same rows again; set {REPETITION}.max_pattern_size=0" in capsys.readouterr().err
    after = job(model, tmp_path, "out", "resume=repetition", "draft=lookup")
    assert [new["token_ids"] for new in after] == [row["token_ids"] for row in whole]
    for old, new in zip(before, after, strict=True):
        assert new["finish_reason"] == "length"
        assert (new["perf"] == old["perf"]) == (old["finish_reason"] == "length")
    capsys.readouterr()
    assert job(model, tmp_path, "out", "resume=repetition") == after
    with pytest.raises(AssertionError):
        job(model, tmp_path, "out", *KEYS, "resume=repetition")
    assert "would end the same rows again" in capsys.readouterr().err
    assert job(model, tmp_path, "out", "resume=repetition") == after
    assert "nothing left for resume=repetition" in capsys.readouterr().err
    with pytest.raises(AssertionError):
        job(model, tmp_path, "out", *KEYS)
    assert "run the command with resume=repetition" in capsys.readouterr().err


@pytest.mark.second
def test_a_retry_that_finds_no_row_changes_the_job_all_the_same(model: Path, tmp_path: Path) -> None:
    """Later commands have the setting of the retry, here one that extends the job."""
    data = tmp_path / "in"
    data.mkdir()
    turns = [[{"role": "user", "content": "Say 1"}]]
    pl.DataFrame({"messages": turns, "max_new_tokens": [1]}).write_parquet(data / "a.parquet")
    own = [f"input.path={data}"]
    before = job(model, tmp_path, "out", *KEYS, *own)
    assert job(model, tmp_path, "out", "resume=repetition", *own) == before
    pl.DataFrame({"messages": turns, "max_new_tokens": [60]}).write_parquet(data / "b.parquet")
    first, second = job(model, tmp_path, "out", "resume=extend", *own)
    assert first == before[0]
    assert second["finish_reason"] == "length"
    with pytest.raises(AssertionError):
        job(model, tmp_path, "out", *KEYS, "resume=extend", *own)


@pytest.mark.second
def test_a_row_that_repeats_itself_at_its_limit_was_cut_off_once_the_detection_is_off(model: Path, tmp_path: Path) -> None:
    """As in a job without detection: a later retry with a larger limit continues it, and its statistics are kept."""
    whole = job(model, tmp_path, "whole")
    ends = [first_repetition(row["token_ids"], TWICE) or 61 for row in whole]
    at = ends.index(min(ends))
    limit = f"decode.max_new_tokens={ends[at]}"
    before = job(model, tmp_path, "out", *KEYS, limit)
    assert (before[at]["finish_reason"], len(before[at]["token_ids"])) == ("repetition", ends[at])
    off = job(model, tmp_path, "out", limit, "resume=repetition")
    assert [row["finish_reason"] for row in off] == ["length"] * 6
    assert off[at]["token_ids"] == before[at]["token_ids"]
    longer = job(model, tmp_path, "out", "resume=length", "draft=lookup")
    assert [row["token_ids"] for row in longer] == [row["token_ids"] for row in whole]
    for row in longer:
        assert row["spec_decode"]["num_prefills"] >= 2
        assert num_kept(row) == 60


@pytest.mark.second
def test_rows_examined_late_keep_their_counts_when_they_go_on(model: Path, tmp_path: Path) -> None:
    """Some tokens of a row that repeats itself are decoded in vain, because it is examined now and then; nothing was drafted."""
    before = job(model, tmp_path, "out", *KEYS)
    in_vain = [row["finish_reason"] == "repetition" and row["perf"]["rounds"] >= len(row["token_ids"]) for row in before]
    assert any(in_vain)
    for was_in_vain, row in zip(in_vain, job(model, tmp_path, "out", "resume=repetition", "draft=lookup"), strict=True):
        if was_in_vain:
            counts = row["spec_decode"]
            assert counts["num_prefills"] == 2
            assert counts["num_discarded_tokens"] > 0
            assert num_kept(row) == 60


def num_kept(row: dict[str, Any]) -> int:
    """The number of tokens that a row has by its counts, without forced ones."""
    counts = row["spec_decode"]
    emitted: int = counts["num_prefills"] + counts["num_accepted_draft_tokens"] + counts["num_spec_steps"]
    return emitted - int(counts["num_discarded_tokens"])


@pytest.mark.second
def test_another_repetition_is_another_job_and_none_is_the_job_of_before(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(model, tmp_path, "out", f"{REPETITION}.min_count=3")  # it is off
    job(model, tmp_path, "out")
    words = [f"{REPETITION}.max_pattern_size=20", "decode.max_new_tokens=60"]
    with pytest.raises(AssertionError):
        job(model, tmp_path, "out", *words)
    assert REPETITION in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [f"{REPETITION}.max_pattern_size=3", f"{REPETITION}.min_pattern_size=4"],
            "min_pattern_size=4 exceeds max_pattern_size=3",
        ),
        ([f"{REPETITION}.max_pattern_size=2000"], f"{REPETITION}.max_pattern_size=2000 must be in 0 .. 1024"),
        ([f"{REPETITION}.min_count=1"], f"{REPETITION}.min_count=1 must be in 2 .. 1000000"),
        (["decode.score=prompts", f"{REPETITION}.max_pattern_size=3"], "has no effect"),
    ],
)
def test_wrong_keys_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(["model.path=m", "input.path=a.parquet", "output.dir=out", *keys])
