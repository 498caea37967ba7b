"""input.from_job: the output of a finished job is the input of another one."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from batchspec import cli
from tests.runs import make_model

STATUSES = ("ok", "truncated", "error", "skipped")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"model.path={make_model(tmp_path_factory.mktemp('model'))}", "draft=none", "decode.max_new_tokens=4"]


@pytest.fixture(scope="module")
def answers(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four answers to each of three questions, and a bad row; of two shards."""
    folder = tmp_path_factory.mktemp("jobs")
    chats = [[{"role": "user", "content": f"Name sea {i}."}] for i in range(3)]
    rows = [
        {"id": f"q{i}", "messages": chat, "level": i, "tags": ["a", None], "stop": ["x"]} for i, chat in enumerate([*chats, None])
    ]
    pl.DataFrame(rows).write_parquet(folder / "in.parquet")
    keys = [f"input.path={folder}/in.parquet", f"output.dir={folder}/answers", "output.shard_rows=2"]
    assert cli.main(["run", *words, *keys, "decode.n=4", "decode.temperature=1", "decode.seed=3"]) == 0
    return folder / "answers"


def output(name: str) -> pl.DataFrame:
    return pl.read_parquet(f"{name}/data/*.parquet")


def run(words: list[str], *more: str) -> int:
    return cli.main(["run", *words, *more])


def refused(capsys: pytest.CaptureFixture[str], words: list[str], *more: str) -> str:
    """The one line with which a run is refused."""
    capsys.readouterr()
    assert run(words, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_four_answers_are_judged_the_best_is_kept_and_its_conversation_goes_on(
    words: list[str], answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = ["input.prompt='Is that right at level {{ level }}?'", "decode.score=choices", "decode.choice=[yes,no]"]
    words = [word for word in words if "max_new_tokens" not in word]
    assert run(words, f"input.from_job={answers}", f"output.dir={tmp_path}/judged", *judge) == 0
    assert f"input.from_job={answers}: 12 truncated; left out: 1 error; " in capsys.readouterr().err
    first, judged = output(str(answers)), output(f"{tmp_path}/judged")
    good = first.filter(pl.col("status") != "error")
    assert judged["request_id"].to_list() == [f"q{i}#{k}" for i in range(3) for k in range(4)]
    for name in ("request_id", "sample_index", "messages", "completion"):
        assert judged[f"answers_{name}"].equals(good[name]), name
    assert judged.select("level", "tags", "stop").equals(good.select("level", "tags", "stop"))
    chat = [[*turns, f"Is that right at level {level}?"] for turns, level in zip(
        good["messages"].list.eval(pl.element().struct.field("content")).to_list(), good["level"], strict=True)]
    assert [[turn["content"] for turn in turns][:-1] for turns in judged["messages"].to_list()] == chat

    go_on = ["input.columns.messages=answers_messages", "input.prompt='Go on.'", "decode.max_new_tokens=3"]
    assert run(words, f"input.from_job={tmp_path}/judged", f"output.dir={tmp_path}/next", *go_on) == 0
    found = output(f"{tmp_path}/next")
    assert found["request_id"].equals(judged["request_id"])
    assert found["judged_choice_probs"].equals(judged["choice_probs"])
    assert found["answers_completion"].equals(good["completion"])
    assert [[turn["role"] for turn in turns] for turns in found["messages"].to_list()] == [["user", "assistant"] * 2] * 12
    assert found["messages"].list.get(2).struct.field("content").unique().to_list() == ["Go on."]
