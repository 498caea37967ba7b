"""Equal greedy rows are computed once, and each of them is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec import run
from batchspec.commands.stats import render
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.job.report.stats import job_stats
from batchspec.packing.equal_rows import EqualRows, answer_key
from batchspec.records import Completion, Request, SamplingParams
from batchspec.request_stream import ListedRequests
from tests.helpers.models import make_checkpoint, make_tokenizer
from tests.packing.test_planner import request

HOT = SamplingParams(temperature=1.0)


def done(request: Request) -> Completion:
    """An answer that depends on the prompt alone."""
    return Completion(
        request_id=request.request_id, row_index=request.row_index, sample_index=request.sample_index, shard=request.shard,
        status="ok", finish_reason="stop", prompt_ids=request.prompt_ids, token_ids=request.prompt_ids[::-1], text="",
        seed=request.seed,
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.integers(1, 5), st.integers(0, 40))
def test_each_row_is_answered_once_and_each_prompt_decoded_once(rows: list[tuple[int, bool]], slots: int, room: int) -> None:
    """However many rows are in slots, and whether or not earlier answers are still kept."""
    requests = [
        replace(request(row, [kind, 7]), sampling=HOT if hot else SamplingParams(), seed=row)
        for row, (kind, hot) in enumerate(rows)
    ]
    answered: list[Completion] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchspec.packing.equal_rows.MOST_BYTES", room << 10)
        stream = EqualRows(ListedRequests(requests), answered.append)
        live: list[Request] = []
        decoded: list[Request] = []
        while True:
            while len(live) < slots and (one := stream.next_ready()) is not None:
                live.append(one)
            if not live:
                break
            decoded.append(live[0])
            answered += [done(live[0]), *stream.copies(done(live.pop(0)))]
    assert sorted(one.row_index for one in answered) == list(range(len(rows)))
    for answer in answered:
        assert (answer.request_id, answer.seed) == (f"r{answer.row_index}", answer.row_index)
        assert answer.token_ids is not None
        assert answer.token_ids.tolist() == [7, rows[answer.row_index][0]]
    greedy = [kind for kind, hot in rows if not hot]
    if room >= 5:  # the four answers, of 1,040 bytes each, fit
        assert sum(one.sampling.temperature == 0 for one in decoded) == len(set(greedy))
    assert sum(one.sampling.temperature > 0 for one in decoded) == len(rows) - len(greedy)


def test_the_values_of_embeddings_count_for_the_memory_of_kept_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight answers with 4 KB each, a limit of 16 KB keeps the newest three."""
    monkeypatch.setattr("batchspec.packing.equal_rows.MOST_BYTES", 16 << 10)
    answered: list[Completion] = []
    requests = [request(row, [row % 8, 7]) for row in range(16)]
    stream = EqualRows(ListedRequests(requests), answered.append)
    for row in range(8):
        one = stream.next_ready()
        assert one is not None
        stream.copies(done(one).replace(state_values=np.full(1024, row, np.float32)))
    again = [one.row_index for one in iter(stream.next_ready, None)]
    assert again == [8, 9, 10, 11, 12]
    assert [one.state_values[0] for one in answered if one.state_values is not None] == [5, 6, 7]


CHANGES: dict[str, Any] = {
    "prompt_ids": np.array([1, 2, 4], np.int32), "max_new_tokens": 7, "min_new_tokens": 1, "stop": ("x",), "stop_ids": (5,),
    "sampling": SamplingParams(repetition_penalty=1.5), "constraint": ("regex", "a+"), "tools": "[]", "num_logprobs": 2,
    "one_call": True, "adapter": 1, "synthetic_len": 3,
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_that_differ_in_anything_that_their_answer_depends_on_are_not_equal(name: str) -> None:
    first = request(0, [1, 2, 3])
    assert answer_key(first) == answer_key(request(9, [1, 2, 3], predicted=5, sample=1)) != None  # noqa: E711
    assert answer_key(replace(first, **{name: CHANGES[name]})) not in (answer_key(first), None)


def test_an_error_is_copied_to_the_rows_that_wait_but_not_kept() -> None:
    answered: list[Completion] = []
    stream = EqualRows(ListedRequests([request(row, [1]) for row in range(3)]), answered.append)
    first = stream.next_ready()
    assert first is not None
    failed = done(first).replace(status="error")
    assert stream.next_ready() is None
    assert [one.row_index for one in stream.copies(failed)] == [1, 2]


# --- in a job


@pytest.fixture
def out(tmp_path: Path) -> Path:
    make_tokenizer(make_checkpoint(tmp_path / "model", "llama"))
    prompts = ["a b", "c", "a b", "a b", "c"]
    pl.DataFrame({"prompt": prompts, "max_new_tokens": [6, 6, 6, 3, 6]}).write_parquet(tmp_path / "in.parquet")
    return tmp_path / "out"


def rows_of(out: Path, *keys: str) -> pl.DataFrame:
    command = [f"model.path={out.parent / 'model'}", f"input.path={out.parent / 'in.parquet'}", f"output.dir={out}"]
    fixed = ["decode.max_new_tokens=8", "output.token_ids=true", "output.shard_rows=2", "packing.max_num_seqs=1"]
    assert run.main([*command, *fixed, *keys]) == 0
    return OutputFolder(str(out)).scan().collect().sort("row_index", "sample_index")


def computed(rows: pl.DataFrame) -> list[bool]:
    return rows["perf"].struct.field("decode_s").is_not_null().to_list()


@pytest.mark.second
def test_copies_have_the_tokens_of_rows_that_are_computed(out: Path) -> None:
    found = rows_of(out)
    alone = rows_of(out.with_name("alone"), "output.dedup=false")
    same = ["request_id", "row_index", "status", "token_ids", "completion", "messages", "finish_reason", "seed"]
    assert found.select(same).equals(alone.select(same))
    assert computed(found) == [True, True, False, True, False]
    assert computed(alone) == [True] * 5
    assert (job_stats(out).copied, job_stats(out.with_name("alone")).copied) == (2, 0)
    length = found["usage"].struct.field("completion_tokens")
    assert (job_stats(out).copied_tokens, job_stats(out.with_name("alone")).copied_tokens) == (length[2] + length[4], 0)
    assert f"({length[2] + length[4]} of copies, which the speed leaves out)" in render(job_stats(out))
    cached = found["usage"].struct.field("cached_tokens")
    assert cached[2] == found["usage"].struct.field("prompt_tokens")[2]


@pytest.mark.second
def test_greedy_samples_of_a_row_are_computed_once(out: Path) -> None:
    rows = pl.read_parquet(out.with_name("in.parquet"))
    hot = pl.Series([0.0, 0.0, 0.0, 0.0, 1.0])
    rows.with_columns(n=pl.lit(3), temperature=hot).write_parquet(out.with_name("in.parquet"))
    found = rows_of(out)
    assert computed(found).count(False) == 12 - 3
    assert found.group_by("row_index", maintain_order=True).n_unique()["token_ids"].to_list() == [1, 1, 1, 1, 3]


def test_a_stream_of_equal_rows_answers_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards of those whose answer is known are committed meanwhile."""
    monkeypatch.setattr("batchspec.packing.equal_rows.MOST_LEFT_OUT", 3)
    answered: list[Completion] = []
    stream = EqualRows(ListedRequests([request(row, [4, 7]) for row in range(8)]), answered.append)
    first = stream.next_ready()
    assert first is not None
    stream.copies(done(first))
    for count in (3, 6, 7):
        assert stream.next_ready() is None
        assert len(answered) == count
    assert stream.ended
