"""The examples of conversations in jobs/examples, with a tiny model: what they ask for in each turn, and what they keep."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import batchspec
from batchspec.records import Completion
from batchspec.warm.conversations import Turn
from tests.helpers.models import make_classifier, make_tokenizer
from tests.helpers.runs import make_model

pytestmark = pytest.mark.second

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = make_model(tmp_path_factory.mktemp("loops") / "model")
    return [f"model.path={model}", "model.max_len=256", "decode.max_new_tokens=6", "packing.max_num_seqs=4"]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["tool_loop", "judge_loop", "best_of_n"])
def test_an_example_explains_itself_and_reports_a_mistake_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(*words: str) -> object:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return ended.value.code

    assert main("--help") is None
    assert f"python jobs/examples/{name}.py [model.path=MODEL]" in capsys.readouterr().out
    assert main("decode.max_tokens=3") == (
        f"{name}.py: decode.max_tokens is not a key of the configuration; batchspec calls it decode.max_new_tokens"
    )


def turn(text: str, number: int = 0, **row: Any) -> Turn:
    """A turn of the chat "Q", whose answer is `text`."""
    done = Completion(request_id="q", row_index=0, sample_index=0, shard=0, status="ok", finish_reason="stop", text=text)
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": text}]
    return Turn(completion=done, messages=chat, row=row, number=number)


def test_a_tool_loop_gives_the_result_of_each_call_and_ends_with_an_answer_without_one(options: list[str]) -> None:
    loop = load("tool_loop")
    assert loop.next_turn(turn("It is calc(17 * 24)"))[-1] == {"role": "user", "content": "calc(17 * 24) is 408. Go on."}
    assert loop.next_turn(turn("It is 408.")) is None
    assert loop.next_turn(turn("calc(1)", number=loop.MAX_CALLS)) is None
    for text in ("2 **", "1 / 0", "a + 1", "'x' * 9", "9 ** 9"):
        assert loop.calculate(text).startswith("an error: ")
    loop.CALL = re.compile("()")  # a model of noise calls no tool: every answer counts as a call
    loop.SYSTEM, loop.MAX_CALLS = "S", 2
    found = loop.run(options, ["Q1", "Q2"])
    assert found.select("turn", "status").rows() == [(2, "truncated"), (2, "truncated")]
    assert "calc() is an error" in found["messages"][0][-2]["content"]


def test_a_judge_loop_repeats_until_the_verdict_is_yes(options: list[str]) -> None:
    loop = load("judge_loop")
    asked = loop.next_turn(turn("Mercury."))
    assert (asked["messages"][-1]["content"], asked["max_new_tokens"]) == (loop.CHECK, 4)
    assert loop.next_turn(turn("Yes.", number=1)) is None
    assert loop.next_turn(turn("No.", number=1))[-1]["content"] == loop.CORRECT
    assert loop.next_turn(turn("No.", number=7)) is None
    loop.MAX_CORRECTIONS = 1
    found = loop.run(options, ["Q1", "Q2", "Q3"])
    assert found["corrections"].to_list() == [1, 1, 1], "noise never says yes"
    assert [len(chat) for chat in found["messages"]] == [6, 6, 6]


def test_best_of_n_keeps_the_answer_with_the_highest_score(options: list[str]) -> None:
    loop = load("best_of_n")
    assert [loop.score_of(text) for text in ("7", "I say 12.", "none", None)] == [7, 10, -1, -1]
    assert "Question: Q\nAnswer: because" in loop.next_turn(turn("because", question="Q"))["messages"][0]["content"]
    scores = iter([3, 9, 1, 9, 0, 5, 5, 2])
    loop.score_of = lambda text: next(scores)
    found = loop.run([*options, "decode.n=4"], ["Q1", "Q2"])
    assert found.select("row_index", "sample_index", "score", "turn").rows() == [(0, 1, 9, 0), (1, 1, 5, 0)]


def test_best_of_n_takes_the_scores_of_a_reward_model_if_one_is_given(options: list[str], tmp_path: Path) -> None:
    """Which reads each chat with its answer, also one that was cut off."""
    loop = load("best_of_n")
    reward = make_tokenizer(make_classifier(tmp_path / "reward", "llama", {0: "good", 1: "other"}))
    found = loop.run([*options, "decode.n=4", f"reward={reward}"], ["Q1", "Q2"])
    with batchspec.Engine([*loop.OPTIONS, *options, "decode.n=4"]) as engine:
        answers = engine.generate([{"messages": [{"role": "user", "content": text}]} for text in ("Q1", "Q2")])
    chats = answers["messages"].to_list()
    scores = batchspec.generate({"messages": chats}, overrides=[f"model.path={reward}"])["scores"].to_list()
    rated = answers.with_columns(score=pl.Series([row[0]["score"] for row in scores]))
    best = rated.group_by("row_index").agg(pl.all().sort_by("score").last()).sort("row_index")
    assert found.select("row_index", "completion").equals(best.select("row_index", "completion"))
    np.testing.assert_allclose(found["score"], best["score"], atol=1e-4)
