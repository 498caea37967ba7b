"""bad_words, of the job and of a row: no output has one of their token sequences. That drafts, K and resumption change no token
is tested with the other ways to sample (test_lossless.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import batchspec
from batchspec import run
from batchspec.config.compose import compose
from batchspec.errors import ConfigError
from batchspec.job.prepare import open_job
from batchspec.records import MAX_BAD_WORD, MAX_BAD_WORDS
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.runs import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def words_of(model: Path, folder: Path, rows: list[dict[str, Any]], *more: str) -> list[str]:
    pl.DataFrame(rows).write_parquet(folder / "in.parquet")
    return [
        f"model.path={model}", f"input.path={folder / 'in.parquet'}", f"output.dir={folder / 'out'}", "decode.max_new_tokens=40",
        "model.dtype=float64", "decode.ignore_eos=true", "output.token_ids=true", "output.overwrite=true", "device=cpu", *more,
    ]


def outputs(folder: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(folder / "out/data/*.parquet").sort("row_index").to_dicts()


def has(tokens: list[int], sequence: tuple[int, ...]) -> bool:
    return any(tuple(tokens[i : i + len(sequence)]) == sequence for i in range(len(tokens)))


@pytest.mark.second
def test_outputs_complete_no_bad_word(model: Path, tmp_path: Path) -> None:
    """The words are what the job writes without the key: pairs of its tokens, whose texts give these tokens again."""
    prompts = [f"Say {i}" for i in range(4)]
    rows: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    assert run.main(words_of(model, tmp_path, rows, "draft=none")) == 0
    free, tokenizer = outputs(tmp_path), Tokenizer(model)
    pairs = {tuple(row["token_ids"][i : i + 2]) for row in free for i in range(0, 38, 3)}
    texts = {pair: tokenizer.decode(list(pair)) for pair in pairs}
    bad = {text: pair for pair, text in texts.items() if text.isalnum() and tuple(tokenizer.encode_part(text)) == pair}
    assert len(bad) >= 2
    for drafter in ("none", "lookup"):
        assert run.main(words_of(model, tmp_path, rows, f"draft={drafter}", f"decode.bad_words={list(bad)}")) == 0
        kept = outputs(tmp_path)
        assert all(len(row["token_ids"]) == 40 for row in kept)
        assert not any(has(row["token_ids"], pair) for row in kept for pair in bad.values())
    assert [row["token_ids"] for row in kept] != [row["token_ids"] for row in free]
    own = [{"prompt": prompt, "bad_words": list(bad) if place % 2 else None} for place, prompt in enumerate(prompts)]
    assert run.main(words_of(model, tmp_path, own)) == 0
    for place, (row, before, without) in enumerate(zip(outputs(tmp_path), free, kept, strict=True)):
        assert row["token_ids"] == (without if place % 2 else before)["token_ids"]


def test_a_word_is_its_tokens_at_the_beginning_of_a_text_and_after_a_space(model: Path, tmp_path: Path) -> None:
    job = open_job(compose(words_of(model, tmp_path, [{"prompt": "a"}], "decode.bad_words=[word]")))
    tokenizer = Tokenizer(model)
    assert set(job.admission.settings.read["bad_words"]) == {tuple(tokenizer.encode_part(text)) for text in ("word", " word")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("['']", "must be texts that are not empty"),
        ("[' ']", "must be texts that are not empty"),
        (f"[{'z q x ' * 20}]", f"tokens, at most {MAX_BAD_WORD} are supported; shorten it"),
        (str([f"w{i}" for i in range(MAX_BAD_WORDS)]), f"at most {MAX_BAD_WORDS} are supported; shorten the list"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: str, message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^decode.bad_words.*" + message):
        open_job(compose(words_of(model, tmp_path, [{"prompt": "a"}], f"decode.bad_words={words}")))


def check_answers(model: Path, drafter: str, rows: list[tuple[dict[str, Any], str | None, str]]) -> None:
    """Decode these rows, each with its completion, or None and what its error `no_token_left` says, in one call of an engine."""
    keys: dict[str, Any] = {
        "model.path": str(model), "model.dtype": "float64", "model.max_len": 64, "decode.max_new_tokens": 20, "draft": drafter,
        "input.columns": {"regex": "regex", "grammar": "grammar"}, "packing.max_num_seqs": 3, "packing.memory_gb": 0.1,
    }
    names = dict.fromkeys(name for row, _, _ in rows for name in row)
    with batchspec.Engine(keys) as engine:
        found = engine.generate([{"prompt": "Say", **names, **row} for row, _, _ in rows]).to_dicts()
    for row, (_, completion, message) in zip(found, rows, strict=True):
        assert row["completion"] == completion
        if completion is None:
            assert (row["error"]["code"], row["error"]["retryable"]) == ("no_token_left", False)
            assert message in row["error"]["message"]
        else:
            assert (row["error"], row["finish_reason"]) == (None, "stop")


@pytest.mark.second
@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_a_row_whose_constraint_only_a_bad_word_satisfies_is_an_error_for_good(model: Path, drafter: str) -> None:
    """No run can decode it, so no retry is offered. The same with min_new_tokens, which forbids the end, and with a bad word that
    is the EOS; for finite and lazy constraints. The other rows of the call are decoded."""
    nested = 'start: "a" start "b" | "7"'
    alone = "of 1 that the regex allows there bad_words forbid 1; change one of these, or drop the row"
    optional: dict[str, Any] = {"regex": "7(a|b)?", "bad_words": ["a", "b"]}
    rows: list[tuple[dict[str, Any], str | None, str]] = [
        ({"regex": "7", "bad_words": ["7"]}, None, f"regex: no token is left for output token 1: {alone}"),
        ({"regex": "a7", "bad_words": ["7"]}, None, f"output token 2: {alone}"),
        ({"regex": "7", "bad_words": ["<|im_end|>"]}, None, f"output token 2: {alone}"),
        ({**optional, "min_new_tokens": 5}, None, "bad_words forbid 2 and 1 would end the row before min_new_tokens=5;"),
        ({"grammar": nested, "bad_words": ["a", "7"]}, None, "of 2 that the grammar allows there bad_words forbid 2;"),
        ({"grammar": nested, "bad_words": ["a"]}, "7", ""),
        ({"regex": "7", "min_new_tokens": 5}, "7", ""),
        (optional, "7", ""),
    ]
    check_answers(model, drafter, rows)
