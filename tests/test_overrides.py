"""What a user writes on the command line is what the job gets, whatever Hydra's grammar has a place for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchspec.config.compose import compose, composed
from batchspec.config.overrides import LISTS, for_hydra
from batchspec.config.values import value_of
from batchspec.errors import ConfigError
from batchspec.train.settings import TrainRun

HOME = Path("~").expanduser()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("decode.stop='</s>'", "decode.stop", ["</s>"]),
        ("decode.stop=</s>", "decode.stop", ["</s>"]),
        ("decode.stop=<|im_end|>", "decode.stop", ["<|im_end|>"]),
        ("decode.stop=END", "decode.stop", ["END"]),
        ("decode.stop='a,b'", "decode.stop", ["a,b"]),
        ("decode.stop=[END,</s>]", "decode.stop", ["END", "</s>"]),
        ("decode.stop_ids=3", "decode.stop_ids", [3]),
        ("decode.choice=[yes,no,3]", "decode.choice", ["yes", "no", "3"]),
        ("decode.choice=['true',\"1e3\"]", "decode.choice", ["true", "1e3"]),
        ("cluster.sbatch=--qos=low", "cluster.sbatch", ["--qos=low"]),
        ("input.columns={prompt:q}", "input.columns", {"prompt": "q"}),
        ("input.columns={prompt: q, id: null}", "input.columns", {"prompt": "q", "id": None}),
        ("input.columns.prompt=q", "input.columns", {"prompt": "q"}),
        ("input.template_kwargs={enable_thinking:false}", "input.template_kwargs", {"enable_thinking": False}),
        ("input.path=~/in.jsonl", "input.path", f"{HOME}/in.jsonl"),
        ("input.path=[~/a.csv,b.csv]", "input.path", [f"{HOME}/a.csv", "b.csv"]),
        ("input.path='~/in put.jsonl'", "input.path", f"{HOME}/in put.jsonl"),
        ("input.path=/data/prüfung.jsonl", "input.path", "/data/prüfung.jsonl"),
        ("output.dir=~/out", "output.dir", f"{HOME}/out"),
        ("model.path=~/m", "model.path", f"{HOME}/m"),
        ("model.chat_template=~/c.jinja", "model.chat_template", f"{HOME}/c.jinja"),
        ("cluster.log=~/logs/%A.log", "cluster.log", f"{HOME}/logs/%A.log"),
    ],
)
def test_what_is_written_is_what_the_job_gets(override: str, key: str, value: Any) -> None:
    assert value_of(compose([override]), key) == value


def test_a_drafter_and_a_training_have_homes_too() -> None:
    assert compose(["draft=eagle3", "draft.path=~/head"]).draft.path == f"{HOME}/head"
    run = composed("train", ["model.path=~/m", "input.path=~/out"], schema=TrainRun)
    assert (run.model.path, run.input.path) == (f"{HOME}/m", f"{HOME}/out")


def test_overrides_that_hydra_reads_stay_as_they_are() -> None:
    words = ["+job=demo", "draft=none,lookup", "-m", "decode.stop=[a,b]", "~input.limit", "output.dir='out/${draft.name}'"]
    assert for_hydra(words) == words
    assert "decode.stop" in LISTS


@pytest.mark.parametrize("override", ["decode.stop=[a,b", "input.columns={prompt:q", 'decode.stop="a'])
def test_a_bracket_or_quote_that_is_not_closed_is_no_text(override: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the override"):
        compose([override])


@pytest.mark.parametrize("text", ["<it's>", "<a\\", "<\\'>", "<a b>", "#", "<\\n>", "ü,ö", "</a>='b'"])
def test_text_that_hydra_has_no_place_for_is_taken_as_it_is(text: str) -> None:
    assert compose([f"decode.stop={text}"]).decode.stop == [text]
