"""`batchspec prompts`: user turns that a chat model writes itself, through two jobs to the training of a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchspec import cli, run
from batchspec.errors import CheckpointError, ConfigError, InputError, OutputError
from batchspec.heads.prompts import main, opening_of
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_checkpoint, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts") / "model"
    make_tokenizer(folder)
    return make_checkpoint(folder, "llama", hidden_size=32, intermediate_size=48, initializer_range=0.02)


def job(model: Path, source: Path, out: Path, *words: str) -> pl.DataFrame:
    common = [f"model.path={model}", f"input.path={source}", f"output.dir={out}", "device=cpu", "draft=none", "output=training"]
    assert run.main([*common, "decode.temperature=1", "packing.max_num_seqs=16", *words]) == 0
    return pl.read_parquet(out / "data" / "*.parquet").sort("row_index")


@pytest.mark.second
def test_turns_become_prompts_and_their_answers_train_a_head(model: Path, tmp_path: Path, capsys: Any) -> None:
    openings, questions = tmp_path / "openings.parquet", tmp_path / "questions.parquet"
    assert main(["--open", str(model), "--rows", "30", str(openings)]) == 0
    assert "30 rows that open a user's turn" in capsys.readouterr().out
    tokenizer = Tokenizer(model)
    rows = pl.read_parquet(openings)
    assert tokenizer.decode(rows["prompt_ids"][0].to_list(), skip_special=False) == "<|im_start|>user\n"
    assert rows["stop"].to_list() == [["<|im_end|>"]] * 30
    assert rows["id"].n_unique() == 30

    turns = job(model, openings, tmp_path / "turns", "decode.max_new_tokens=120")
    assert turns["completion"].n_unique() > 25  # each row is drawn for itself
    assert main(["--from", str(tmp_path / "turns"), str(questions)]) == 0
    ended = turns.filter(pl.col("status") == "ok")
    assert 0 < len(ended) < 30
    asked = pl.read_parquet(questions)
    wanted = {text.strip() for text in ended["completion"]} - {""}
    assert {messages[0]["content"] for messages in asked["messages"]} == wanted
    assert len(asked) == len(wanted)
    assert f"{len(wanted)} distinct turns of 30" in capsys.readouterr().out

    answers = job(model, questions, tmp_path / "answers", "decode.max_new_tokens=12")
    text = tokenizer.decode(answers["prompt_ids"][0].to_list(), skip_special=False)
    first = asked["messages"][0][0]["content"]
    assert text == f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n"
    words = [
        f"model.path={model}",
        f"input.path=[{tmp_path / 'turns'},{tmp_path / 'answers'}]",
        f"output.dir={tmp_path / 'head'}",
    ]
    quick = ["device=cpu", "train.steps=2", "train.held_out=2", "train.max_len=128", "train.ahead=2"]
    assert cli.main(["train", "draft=eagle3", *words, *quick]) == 0


@pytest.mark.second
def test_chats_grow_by_a_turn_that_the_model_writes_after_them(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(model)
    pl.DataFrame({"messages": [[{"role": "user", "content": f"{i}?"}] for i in range(24)]}).write_parquet(tmp_path / "q.parquet")
    answers = job(model, tmp_path / "q.parquet", tmp_path / "answers", "decode.max_new_tokens=100")
    ended = answers.filter(pl.col("status") == "ok")
    assert 0 < len(ended) < 24
    assert main(["--open", str(model), "--after", str(tmp_path / "answers"), str(tmp_path / "o.parquet")]) == 0
    rows = pl.read_parquet(tmp_path / "o.parquet")
    assert rows["id"].n_unique() == len(rows) == len(ended)
    for row, answer in zip(rows.iter_rows(named=True), ended["completion"], strict=True):
        question = row["turns"][0]["content"]
        chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\n"
        assert tokenizer.decode(row["prompt_ids"], skip_special=False) == chat
    turns = job(model, tmp_path / "o.parquet", tmp_path / "turns", "decode.max_new_tokens=60")
    assert main(["--from", str(tmp_path / "turns"), str(tmp_path / "more.parquet")]) == 0
    told = {text.strip(): before for text, before in turns.filter(pl.col("status") == "ok").select("completion", "turns").rows()}
    for messages in pl.read_parquet(tmp_path / "more.parquet")["messages"].to_list():
        *before, last = messages
        assert [turn["role"] for turn in messages] == ["user", "assistant", "user"]
        assert told[last["content"]] == before
    assert main(["--open", str(model), "--after", str(tmp_path / "answers"), "--rows", "2", str(tmp_path / "two.parquet")]) == 0
    assert len(pl.read_parquet(tmp_path / "two.parquet")) == 2


@pytest.mark.second
def test_texts_to_work_on_are_written_under_their_task_and_follow_it_in_the_question(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "tasks.txt").write_text("Summarize this.\n\n  Translate this.  \n")
    words = ["--open", str(model), "--tasks", str(tmp_path / "tasks.txt"), "--rows", "6", "--texts", "24"]
    assert main([*words, str(tmp_path / "openings.parquet")]) == 0
    rows = pl.read_parquet(tmp_path / "openings.parquet")
    assert rows["task"].to_list() == [None] * 6 + ["Summarize this.", "Translate this."] * 12
    assert rows["id"].n_unique() == 30
    tokenizer = Tokenizer(model)
    for ids, task in rows.select("prompt_ids", "task").rows():
        told = f"<|im_start|>system\n{task}<|im_end|>\n" if task else ""
        opening = f"{told}<|im_start|>user\n"
        assert tokenizer.decode(ids, skip_special=False) == opening

    texts = job(model, tmp_path / "openings.parquet", tmp_path / "texts", "decode.max_new_tokens=60")
    assert set(texts["status"]) == {"ok", "truncated"}
    texts = texts.filter((pl.col("status") == "ok") | pl.col("task").is_not_null())  # a question that was cut off asks nothing
    assert main(["--from", str(tmp_path / "texts"), str(tmp_path / "questions.parquet")]) == 0
    asked = pl.read_parquet(tmp_path / "questions.parquet")["messages"].to_list()
    turns = texts.select("task", "completion").rows()
    wanted = {f"{task}\n\n{text.strip()}" if task else text.strip() for task, text in turns if text.strip()}
    assert {messages[0]["content"] for messages in asked} == wanted
    assert all([turn["role"] for turn in messages] == ["user"] for messages in asked)


def test_the_shipped_tasks_are_told_apart_and_others_are_checked(model: Path, tmp_path: Path) -> None:
    assert main(["--open", str(model), "--rows", "0", "--texts", "200", str(tmp_path / "o.parquet")]) == 0
    assert pl.read_parquet(tmp_path / "o.parquet")["task"].n_unique() == 40
    (tmp_path / "empty.txt").write_text(" \n")
    for name, said in (("empty.txt", "it contains no task; write one a line"), ("none.txt", "cannot be read as text")):
        with pytest.raises(InputError, match=said):
            main(["--open", str(model), "--texts", "2", "--tasks", str(tmp_path / name), str(tmp_path / "x.parquet")])
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.parametrize("words", [["--rows", "0"], ["--rows", "-1", "--texts", "5"], ["--texts", "-1"]], ids=" ".join)
def test_no_rows_at_all_are_refused(words: list[str], model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts --(rows|texts) -?\d must be at least \d; 20000 is usual"):
        main(["--open", str(model), *words, str(tmp_path / "x.parquet")])
    assert not (tmp_path / "x.parquet").exists()


def test_a_template_without_a_users_turn_is_refused(tmp_path: Path) -> None:
    for name, template, said in (
        ("left-out", "{{ 'hello' }}", "does not open a user's turn before its text"),
        ("bare", "{{ messages[0]['content'] }}", "does not open a user's turn before its text"),
        ("refused", "{{ raise_exception('no users here') }}", "no users here"),
    ):
        with pytest.raises(CheckpointError, match=said):
            opening_of(Tokenizer(make_tokenizer(tmp_path / name, chat_template=template)))


def test_an_end_that_is_no_special_token_is_no_stop(tmp_path: Path) -> None:
    template = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Answer:"
    ids, end = opening_of(tokenizer := Tokenizer(make_tokenizer(tmp_path / "m", chat_template=template)))
    assert tokenizer.decode(ids) == "User: "
    assert end is None


def test_what_cannot_be_read_or_written_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "there.parquet").write_text("mine")
    with pytest.raises(OutputError, match="exists; give another name, or --overwrite"):
        main(["--open", str(model), str(tmp_path / "there.parquet")])
    pl.DataFrame({"prompt": ["a"]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(InputError, match="no column request_id, status, messages; give the output folder of a job"):
        main(["--open", str(model), "--after", str(tmp_path / "other.parquet"), str(tmp_path / "x.parquet")])
    with pytest.raises(InputError, match="no column request_id, status, completion; give the output folder of a job"):
        main(["--from", str(tmp_path / "other.parquet"), str(tmp_path / "x.parquet")])
    pl.DataFrame({"request_id": ["a"], "status": ["truncated"], "completion": ["x"]}).write_parquet(tmp_path / "cut.parquet")
    with pytest.raises(InputError, match="none of 1 rows ended by itself"):
        main(["--from", str(tmp_path / "cut.parquet"), str(tmp_path / "x.parquet")])
    assert not (tmp_path / "x.parquet").exists()


def test_a_file_that_cannot_be_put_in_its_place_is_refused_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr("batchspec.heads.prompts.os.replace", refused)
    with pytest.raises(
        OutputError, match=r"x\.parquet: cannot be written: Permission denied; name a file in a folder that you may write to"
    ):
        main(["--open", str(model), str(tmp_path / "mine" / "x.parquet"), "--rows", "1"])
    assert not list((tmp_path / "mine").iterdir())
