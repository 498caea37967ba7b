"""output.logprob_tokens: the text of each token beside its id among the likeliest ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import AutoTokenizer

import batchspec
from batchspec import cli
from batchspec.config.compose import compose
from batchspec.errors import ConfigError
from batchspec.text.token_texts import TokenTexts
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_checkpoint, make_tokenizer

ENTRY = pl.Struct({"id": pl.Int32, "token": pl.String, "logprob": pl.Float32})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder)


def check(model: Path, column: pl.Series) -> None:
    assert column.dtype == pl.List(pl.List(ENTRY))
    tokenizer = AutoTokenizer.from_pretrained(model)
    entries = column.explode().explode().drop_nulls().to_list()
    assert len(entries) > 10
    for one in entries:
        assert one["token"] == tokenizer.decode([one["id"]])


@pytest.mark.second
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_job_writes_them_on_request(model: Path, tmp_path: Path, num_workers: int) -> None:
    pl.DataFrame({"prompt": ["Say word1 again", "a"]}).write_parquet(tmp_path / "in.parquet")
    words = [
        f"model.path={model}", f"input.path={tmp_path}/in.parquet", "decode.max_new_tokens=6", "decode.ignore_eos=true",
        "draft=none", "output.logprobs=2", f"input.num_workers={num_workers}",
    ]
    assert cli.main(["run", *words, f"output.dir={tmp_path}/out", "output.logprob_tokens=true"]) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")["top_logprobs"]
    check(model, found)
    assert cli.main(["run", *words, f"output.dir={tmp_path}/plain"]) == 0
    plain = pl.read_parquet(tmp_path / "plain/data/*.parquet")["top_logprobs"].to_list()
    without = [[[{name: one[name] for name in ("id", "logprob")} for one in place] for place in row] for row in found.to_list()]
    assert without == plain


def test_scored_prompts_have_them_too(model: Path) -> None:
    keys: dict[str, Any] = {"model.path": str(model), "decode.score": "prompts", "output.prompt_logprobs": 3}
    found = batchspec.generate(["Say word1 again"], overrides={**keys, "output.logprob_tokens": True})
    check(model, found["prompt_top_logprobs"])


def test_special_tokens_spaces_and_parts_of_characters_have_a_text(model: Path) -> None:
    tokenizer, reference = Tokenizer(model), AutoTokenizer.from_pretrained(model)
    texts = TokenTexts(tokenizer)
    assert texts(reference.eos_token_id)[0] == reference.eos_token
    (space,) = tokenizer.encode_part(" ")
    assert texts(space)[0] == " "
    begin, *_ = tokenizer.encode_part("é")
    assert texts(begin)[0] == "\ufffd"


@pytest.mark.parametrize("words", [[], ["output.logprobs=0"], ["decode.score=prompts"]])
def test_without_likeliest_tokens_the_key_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^output.logprob_tokens=true has no effect: no likeliest tokens are written"):
        compose(["output.logprob_tokens=true", *words])
