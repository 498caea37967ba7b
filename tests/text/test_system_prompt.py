"""input.system: one system prompt for all chats of a job; a row's own is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import batchspec
from batchspec import cli
from batchspec.errors import ConfigError
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer

JOB, ROW, CHAT = "Answer in one word.", "Answer as a pirate.", "Answer in French."
USER = {"role": "user", "content": "Name a sea."}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder, chat_template=CHAT_TEMPLATE)


def options(model: Path, **more: Any) -> dict[str, Any]:
    keys = {"model.path": str(model), "input.system": JOB, "decode.max_new_tokens": 2, "draft": "none", "output.prompt_ids": True}
    return {**keys, "output.messages": "prompt", **more}


def test_the_nearest_system_prompt_wins(model: Path) -> None:
    """The row's column, else the chat's own system or developer message, else the job's."""
    developer = {"role": "developer", "content": CHAT}
    rows = [
        {"messages": [USER], "system": None},
        {"messages": [USER], "system": ROW},
        {"messages": [system(CHAT), USER], "system": None},
        {"messages": [system(CHAT), USER], "system": ROW},
        {"messages": [developer, USER], "system": None},
    ]
    chats = [[system(JOB), USER], [system(ROW), USER], [system(CHAT), USER], [system(ROW), USER], [developer, USER]]
    found = batchspec.generate(rows, overrides=options(model))
    assert found["messages"].to_list() == chats
    without = batchspec.generate([{"messages": chat} for chat in chats], overrides=options(model, **{"input.system": None}))
    assert found["prompt_ids"].equals(without["prompt_ids"])


def test_prompts_that_become_user_turns_get_it_and_texts_cannot(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = batchspec.generate(["Name a sea."], overrides=options(model, **{"input.chat": True}))
    assert found["messages"].to_list() == [[system(JOB), USER]]
    with pytest.raises(ConfigError, match=r"^input.system=Answer in one word. applies to chats, and column"):
        batchspec.generate(["Name a sea."], overrides=options(model))


@pytest.mark.second
def test_it_is_part_of_the_job(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": [USER]}) + "\n")
    words = [f"{key}={value}" for key, value in options(model).items()]
    words += [f"input.path={tmp_path}/in.jsonl", f"output.dir={tmp_path}/out"]
    assert cli.main(["run", *words]) == 0
    assert pl.read_parquet(tmp_path / "out/data/*.parquet")["messages"].to_list() == [[system(JOB), USER]]
    assert cli.main(["run", *words]) == 0
    capsys.readouterr()
    assert cli.main(["run", *words, f"input.system={ROW}"]) == 2
    assert "input.system" in capsys.readouterr().err


@pytest.mark.second
def test_each_turn_of_a_conversation_has_it_once(model: Path) -> None:
    seen: list[Any] = []

    def next_turn(turn: Any) -> Any:
        seen.append(turn.messages)
        return [*turn.messages, USER] if turn.number == 0 else None

    keys = options(model, **{"input.chat": True, "model.max_len": 256})
    with batchspec.Engine(keys) as engine:
        engine.converse(["Name a sea."], next_turn)
    assert [[turn["role"] for turn in chat] for chat in seen] == [
        ["system", "user", "assistant"], ["system", "user", "assistant", "user", "assistant"]
    ]
    assert seen[1][0] == system(JOB)
