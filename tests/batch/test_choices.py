"""decode.score=choices: how likely a model continues each prompt with each of the given texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import batchspec
from batchspec import run
from batchspec.cli import main as cli
from batchspec.errors import ConfigError, InputError
from batchspec.records import Choice
from batchspec.tasks.choices import apart
from tests.helpers.lost_runs import run_and_lose
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_thinking_tokenizer, make_tokenizer

TEXTS = ["yes", "no", "no, never", "word1 again"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(
        make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float32), chat_template=CHAT_TEMPLATE
    )


def options(model: Path, *more: str, choice: str = json.dumps(TEXTS)) -> list[str]:
    words = [f"model.path={model}", "decode.score=choices", "output.prompt_ids=true", "packing.max_num_seqs=3"]
    return [*words, *([f"decode.choice={choice}"] if choice else []), *more]


def expected(model: Path, prompt_ids: list[int], texts: list[str]) -> list[float]:
    """Log of the probability of each text after the prompt, as transformers computes it, one text at a time.

    That of a text whose tokens begin a longer one leaves the longer one out.
    """
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)

    def begun(ids: list[int]) -> float:
        with torch.no_grad():
            logits = network(torch.tensor([[*prompt_ids, *ids]])).logits[0].double().log_softmax(-1)
        return sum(float(logits[len(prompt_ids) - 1 + place, token]) for place, token in enumerate(ids))

    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = []
    for own in tokens:
        longer = [other for other in tokens if other != own and other[: len(own)] == own]
        found.append(math.log(math.exp(begun(own)) - sum(math.exp(begun(other)) for other in longer)))
    return found


def check(frame: pl.DataFrame, model: Path, texts: list[str], *, normalised: bool = False) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) if normalised else 1 for text in texts]
    for row in frame.iter_rows(named=True):
        assert [one["choice"] for one in row["choice_probs"]] == texts
        logprobs, probs = (np.array([one[name] for one in row["choice_probs"]]) for name in ("logprob", "prob"))
        wanted = np.array(expected(model, row["prompt_ids"], texts))
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
        scores = wanted / lengths
        np.testing.assert_allclose(probs, np.exp(scores) / np.exp(scores).sum(), atol=1e-5)
        assert row["completion"] == texts[int(scores.argmax())]
        assert (row["status"], row["finish_reason"], row["sample_index"]) == ("ok", "stop", 0)
        assert (row["usage"]["prompt_tokens"], row["usage"]["completion_tokens"]) == (len(row["prompt_ids"]), 0)


def write(tmp_path: Path, **columns: Any) -> list[str]:
    common = "Say word1 word2 word3 again and again, and then say it all once more. "
    prompts = [f"{common}{tail}" for tail in ("", "yes", "no")] + ["a", None]
    frame = pl.DataFrame({"id": [f"q{i}" for i in range(len(prompts))], "prompt": prompts, **columns})
    frame.write_parquet(tmp_path / "in.parquet")
    return [f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out"]


@pytest.mark.second
def test_a_job_writes_the_probabilities_that_transformers_computes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*options(model), *write(tmp_path)]
    assert cli(["plan", *words]) == 0
    planned = capsys.readouterr().out
    assert "rounds       none: choices are scored, nothing is decoded" in planned
    assert "\nprompts, each with its longest text, " in planned
    assert " prompt and text tokens, " in planned
    assert cli(["run", *words]) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert found.schema["choice_probs"] == pl.List(pl.Struct({"choice": pl.String, "prob": pl.Float64, "logprob": pl.Float64}))
    assert "prompt_logprobs" not in found.columns
    assert found["request_id"].to_list() == [f"q{i}" for i in range(5)]
    assert found["error"].struct.field("code").to_list() == [None] * 4 + ["null_prompt"]
    check(found.head(4), model, TEXTS)
    assert sum(usage["cached_tokens"] for usage in found["usage"].head(4)) > 0
    for command in (["stats"], ["status"], ["report"], ["verify", "--files"]):
        assert cli([command[0], str(tmp_path / "out"), *command[1:]]) == 0, command
    assert cli(["export", str(tmp_path / "out"), "--to", "chat", str(tmp_path / "x.jsonl")]) == 0
    first = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])
    assert first["messages"][-1] == {"role": "assistant", "content": found["completion"][0]}


def test_a_text_that_begins_another_one_is_counted_apart_from_it(model: Path) -> None:
    """As the grades 1 and 10: an output `10` is not the grade 1."""
    texts = ["1", "10", "100", "2"]
    found = batchspec.generate(["Grade: ", "a"], overrides=options(model, choice=json.dumps(texts)))
    check(found, model, texts)
    assert sum(math.exp(one["logprob"]) for one in found["choice_probs"][0]) < 1


def test_of_choices_that_leave_nothing_to_the_shorter_one_it_gets_the_rounding_error() -> None:
    grades = (Choice(text="1", token_ids=(5,)), Choice(text="10", token_ids=(5, 6)), Choice(text="100", token_ids=(5, 6, 7)))
    one, ten, hundred = apart(grades, [-1.0, -1.0, -3.0])
    assert one == pytest.approx(-1 + math.log(2**-24))
    assert ten == pytest.approx(-1 + math.log(1 - math.exp(-2)))
    assert hundred == -3


def test_choices_of_different_lengths_are_compared_by_log_probability_per_token(model: Path) -> None:
    texts = ["word1 again and again", "no", "yes, yes", "1", "10"]
    plain, normalised = (
        batchspec.generate(["Is it so?", "a"], overrides=options(model, f"decode.choice_norm={norm}", choice=json.dumps(texts)))
        for norm in ("none", "tokens")
    )
    check(plain, model, texts)
    check(normalised, model, texts, normalised=True)
    assert plain["completion"].to_list() != normalised["completion"].to_list(), "else this test tells nothing"


@pytest.mark.second
def test_rows_have_their_own_choices(model: Path, tmp_path: Path) -> None:
    own = [["no", "yes"], None, ["a", "b", "c"], ["a", "a"], None]
    words = write(tmp_path, options=own)
    assert run.main([*options(model, "input.columns.choice=options"), *words]) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    for place, texts in enumerate((own[0], TEXTS, own[2])):
        assert texts is not None
        check(found[place], model, texts)
    assert "holds a text twice" in found["error"][3]["message"]
    assert "options" in found.columns
    frame = batchspec.generate(
        pl.read_parquet(tmp_path / "in.parquet"),
        overrides=options(model, "input.columns.choice=options", "input.max_error_fraction=1", choice=""),
    )
    assert "choice is null, and there is no decode.choice" in frame["error"][1]["message"]


@pytest.mark.second
def test_a_warm_engine_scores_the_choices_that_rows_bring(model: Path) -> None:
    data = pl.DataFrame({"prompt": ["Is it so?", "Never?"], "options": [["no", "yes"], ["a", "b", "c"]]})
    with batchspec.Engine(options(model, "model.max_len=128", "input.columns.choice=options", choice="")) as engine:
        found = engine.generate(data)
    check(found[0], model, ["no", "yes"])
    check(found[1], model, ["a", "b", "c"])


@pytest.mark.second
def test_a_warm_engine_scores_choices_of_chats(model: Path) -> None:
    with batchspec.Engine(options(model, "model.max_len=128", "input.chat=true")) as engine:
        found = engine.generate(["Is it so?", "Never?"])
        check(found, model, TEXTS)
        again = {completion.request_id: completion for completion in engine.stream(["Is it so?", "Never?"])}
        assert {len(one.choice_logprobs or ()) for one in again.values()} == {len(TEXTS)}
        with pytest.raises(ConfigError, match=r"^decode.score=choices writes no answers, which a conversation needs"):
            engine.converse(["a"], lambda turn: None)
    template = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "Is it so?"}]
    text = template.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert found["prompt_ids"][0].to_list() == template(text, add_special_tokens=False)["input_ids"]


@pytest.mark.second
def test_scores_that_a_lost_run_saved_are_those_of_the_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*options(model), *write(tmp_path)]
    run_and_lose(words)
    capsys.readouterr()
    assert run.main(words) == 0
    assert "4 completions are saved" in capsys.readouterr().err
    check(pl.read_parquet(tmp_path / "out/data/*.parquet").head(4), model, TEXTS)
    assert run.main([*words, 'decode.choice=["yes"]']) == 2
    assert "decode.choice" in capsys.readouterr().err
    assert run.main([*words, "decode.choice_norm=tokens"]) == 2
    assert 'decode.choice_norm: "none" -> "tokens"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "decode.score=choices needs the texts to score; give decode.choice"),
        (["decode.choice=[a,a]"], "holds a text twice"),
        (["decode.choice=[a,'']"], "holds an empty text"),
        (["decode.choice=[a,b]", "decode.temperature=1", "decode.n=2"], "decode.n=2 with decode.score=choices has no effect"),
        (["decode.choice=[a,b]", "output.logprobs=1"], "output.logprobs=1 with decode.score=choices has no effect"),
        (["decode.score=none", "decode.choice_norm=tokens"], "decode.choice_norm=tokens with decode.score=none has no effect"),
        (["decode.choice=[a,b]", "decode.choice_norm=bytes"], "decode.choice_norm=bytes must be one of none, tokens"),
        (["decode.score=probs"], "decode.score=probs must be one of none, prompts, choices"),
    ],
)
def test_what_has_no_effect_on_choices_is_refused(model: Path, words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, InputError)) as caught:
        batchspec.generate(["a"], overrides=options(model, *words, choice=""))
    assert said in str(caught.value)


def test_a_prompt_that_ends_inside_a_thought_is_an_error_row(tmp_path: Path) -> None:
    folder = make_thinking_tokenizer(make_checkpoint(tmp_path, "llama", num_hidden_layers=1))
    words = options(folder, "input.max_error_fraction=1")
    (bad, good) = batchspec.generate(["a<think>b", "a<think>b</think>"], overrides=words)["error"].to_list()
    assert "the prompt ends inside a reasoning block" in bad["message"]
    assert good is None
