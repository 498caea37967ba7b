"""What a user writes on the command line is what the job gets, whatever Hydra's grammar has a place for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from batchspec.config.compose import compose, composed
from batchspec.config.key import value_of
from batchspec.config.overrides import LISTS, for_hydra, overrides_of
from batchspec.config.schema import KEYS
from batchspec.config.train_schema import TrainRun
from batchspec.config.values import written
from batchspec.errors import ConfigError

HOME = Path("~").expanduser()
KWARGS = {"enable_thinking": False, "x": {"y": [1]}}
SCHEMA = {
    "properties": {"a b": {"$ref": "#/$defs/é"}, 'c"d': {"const": "it's ${x}"}},
    "$defs": {"é": {"enum": [None, True, 1.5]}},
}


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
        ("input.columns={'id': 'q'}".replace("'", '"'), "input.columns", {"id": "q"}),
        ('input.template_kwargs={"enable_thinking": false, "x": {"y": [1]}}', "input.template_kwargs", KWARGS),
        ('model.adapters={"a/b": "/x y/z", "v1.5": "c"}', "model.adapters", {"a/b": "/x y/z", "v1.5": "c"}),
        ('decode.logit_bias={"17": -100, "5": 2.5}', "decode.logit_bias", {17: -100, 5: 2.5}),
        ('decode.schema={"enum": ["it\'s", "${x}", "a\\\\b"]}', "decode.schema", '{"enum": ["it\'s", "${x}", "a\\\\b"]}'),
        ("decode.regex=[A-E]", "decode.regex", "[A-E]"),
        ("decode.regex=[A-E]{3}'s", "decode.regex", "[A-E]{3}'s"),
        ('decode.regex="[A-E]"', "decode.regex", "[A-E]"),
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


@pytest.mark.parametrize("text", ["1e3", "12345e6", "true", "1_0", "nan", " a", "a\t", "b ", "1"])
def test_text_is_no_number_and_keeps_its_spaces(text: str) -> None:
    """A commit, or the name of a file."""
    config = compose([f"model.revision={text}", f"output.dir={text}", f"input.path={text}"])
    assert (config.model.revision, config.output.dir, config.input.path) == (text, text, text)


def test_text_with_a_comma_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(ConfigError, match=r"""one value with a comma is "output.dir='a,b'"$"""):
        compose(["output.dir=a,b"])
    assert compose(["output.dir='a,b'"]).output.dir == "a,b"


@pytest.mark.parametrize("nested", [False, True])
def test_python_dictionaries_may_hold_maps(nested: bool) -> None:
    """A map is the value of its key: the names in it are no keys of the configuration."""
    maps = {"schema": SCHEMA, "logit_bias": {17: -100, "5": 2.5}}
    given = {"decode": maps} if nested else {f"decode.{name}": value for name, value in maps.items()}
    more = {"model.adapters": {"a/b": "x", "v1.5": "y"}, "input.template_kwargs": KWARGS, "decode.n": 1}
    config = compose(overrides_of({**given, **more}))
    assert json.loads(config.decode.schema) == SCHEMA
    assert config.decode.logit_bias == {17: -100, 5: 2.5}
    assert (config.model.adapters, config.input.template_kwargs) == ({"a/b": "x", "v1.5": "y"}, KWARGS)


@pytest.mark.parametrize("name", ["it's", 'a"b', "a:b", "a,b", "{", "é", ""])
def test_a_name_that_hydra_cannot_read_is_refused_with_the_place_for_it(name: str) -> None:
    for options in (overrides_of, lambda given: for_hydra([f"{key}={json.dumps(value)}" for key, value in given.items()])):
        with pytest.raises(ConfigError, match=r"^model.adapters: Hydra cannot read the name .* write the map in a recipe"):
            options({"model.adapters": {name: "x"}})


@pytest.mark.parametrize("key", sorted({*LISTS, *(key for key, its in KEYS.items() if its.example)}))
def test_the_values_that_messages_advise_to_write_are_accepted(key: str) -> None:
    """They are single words of a shell's command, and Hydra reads them."""
    (word,) = shlex.split(written(key).replace("TEXT", "2"))
    value = value_of(compose([word], checked=False), key)
    assert value not in (None, [], {})
    assert isinstance(value, dict | list)
