"""Jobs and warm engines that score prompts: decode.score=prompts."""

from __future__ import annotations

import re
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
from batchspec.config.compose import compose
from batchspec.engine.features.scoring import PromptScores
from batchspec.errors import ConfigError, InputError
from tests.helpers.lost_runs import lost, run_and_lose
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer

LOGPROBS = pl.List(pl.Float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(
        make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float32), chat_template=CHAT_TEMPLATE
    )


def options(model: Path, **more: Any) -> list[str]:
    words = [f"model.path={model}", "decode.score=prompts", "output.prompt_ids=true", "packing.max_num_seqs=3"]
    return [*words, *(f"{key.replace('__', '.')}={value}" for key, value in more.items())]


def texts() -> pl.DataFrame:
    """With common beginnings of several pages, one row of a token or two, and two bad rows."""
    common = "Say word1 word2 word3 again and again, and then say it all once more. " * 2
    prompts = [common + tail for tail in ("", "yes", "no", "no, never")] + ["a", "other words", None, "x" * 4000]
    return pl.DataFrame({"id": [f"q{i}" for i in range(len(prompts))], "prompt": prompts})


def by_transformers(model: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens - 1, V] of what follows each token but the last."""
    loaded: Any = AutoModelForCausalLM
    target = loaded.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.log_softmax(target(torch.tensor([ids])).logits[0, :-1].float(), 1)


def check_rows(found: pl.DataFrame, model: Path, num_top: int) -> int:
    """Every row without an error against transformers; their number."""
    good = found.filter(pl.col("error").is_null()).to_dicts()
    for row in good:
        ids, logprobs = row["prompt_ids"], row["prompt_logprobs"]
        expected = by_transformers(model, ids)
        own = expected[range(len(ids) - 1), ids[1:]].numpy()
        assert logprobs[0] is None
        np.testing.assert_allclose(logprobs[1:], own, atol=1e-4)
        np.testing.assert_allclose(row["prompt_logprob_sum"], own.sum(), atol=1e-3)
        if num_top and len(ids) > 1:
            best = expected.topk(num_top, dim=1).values.numpy()
            assert row["prompt_top_logprobs"][0] == []
            values = [[one["logprob"] for one in place] for place in row["prompt_top_logprobs"][1:]]
            np.testing.assert_allclose(values, best, atol=1e-4)
            at = [[float(expected[i, one["id"]]) for one in place] for i, place in enumerate(row["prompt_top_logprobs"][1:])]
            np.testing.assert_allclose(at, best, atol=1e-4)
        assert (row["status"], row["finish_reason"], row["completion"]) == ("ok", "length", None)
        assert (row["usage"]["completion_tokens"], row["usage"]["prompt_tokens"]) == (0, len(ids))
    return len(good)


@pytest.mark.second
@pytest.mark.parametrize("num_top", [0, 3])
def test_a_job_writes_the_logprobs_that_transformers_computes(
    model: Path, tmp_path: Path, num_top: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts().write_parquet(tmp_path / "in.parquet")
    out = tmp_path / "out"
    words = [*options(model, output__prompt_logprobs=num_top), f"input.path={tmp_path}/in.parquet", f"output.dir={out}"]
    assert run.main(words) == 0
    found = pl.read_parquet(out / "data/*.parquet")
    assert ("prompt_top_logprobs" in found.columns) == (num_top > 0)
    assert "logprobs" not in found.columns
    assert found.schema["prompt_logprobs"] == LOGPROBS
    assert found.schema["prompt_logprob_sum"] == pl.Float64
    assert check_rows(found, model, num_top) == 6
    assert [error["code"] if error else None for error in found["error"]] == [None] * 6 + ["null_prompt", "too_long"]
    assert found["prompt_logprob_sum"].is_null().to_list() == [False] * 6 + [True] * 2
    assert sum(usage["cached_tokens"] for usage in found["usage"].head(6)) > 0
    assert run.main(words) == 0  # nothing left to compute
    for command in (["stats", str(out)], ["status", str(out)], ["inspect", str(out), "q1"], ["report", str(out)]):
        assert cli(command) == 0, command
    assert cli(["export", str(out), "--to", "chat", str(tmp_path / "x.jsonl")]) == 2
    assert cli(["verify", str(out)]) == 2
    said = capsys.readouterr().err
    assert "holds scores of prompts and no answer" in said
    assert "holds scores and no output tokens, so there is nothing to decode again" in said
    assert "left out)\n" in said
    assert not re.search(r"\brounds?\b", said)
    left_out = ("decode.score", "output.prompt_logprobs")
    assert run.main([*(word for word in words if not word.startswith(left_out)), "decode.max_new_tokens=3"]) == 2
    assert re.search(r"holds another job \(.*\bdecode\.score: \"prompts\" -> ", capsys.readouterr().err)


@pytest.mark.second
def test_scores_that_a_lost_run_saved_are_those_of_the_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that saves every row at once, and is lost before it commits a shard."""
    texts().write_parquet(tmp_path / "in.parquet")
    words = [*options(model, output__prompt_logprobs=2), f"input.path={tmp_path}/in.parquet", "output.shard_rows=8"]
    assert run.main([*words, f"output.dir={tmp_path}/whole"]) == 0

    run_and_lose([*words, f"output.dir={tmp_path}/out"])
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptScores, "add", lost)  # nothing is left to score
        assert run.main([*words, f"output.dir={tmp_path}/out"]) == 0
    assert "6 completions are saved" in capsys.readouterr().err
    whole, again = (pl.read_parquet(tmp_path / name / "data/*.parquet").drop("perf") for name in ("whole", "out"))
    assert check_rows(again, model, 2) == 6
    assert again.drop("usage").equals(whole.drop("usage"))


@pytest.mark.second
def test_prompts_that_fill_max_len_and_pages_for_one_row_are_enough(model: Path, tmp_path: Path) -> None:
    ids = AutoTokenizer.from_pretrained(model)("Say word1 again and again " * 3)["input_ids"]
    pl.DataFrame({"prompt_ids": [ids, ids[:-1], ids, [*ids, 5]]}).write_parquet(tmp_path / "in.parquet")
    more = {"model__max_len": len(ids), "packing__pages": -(-len(ids) // 16) + 1, "packing__max_num_batched_tokens": 7}
    assert run.main([*options(model, **more), f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out"]) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert check_rows(found, model, 0) == 3
    assert found["error"].to_list()[3]["code"] == "too_long"


def test_chats_are_scored_as_the_template_writes_them(model: Path) -> None:
    question, answer = {"role": "user", "content": "Which river?"}, {"role": "assistant", "content": "The Rhine"}
    rows = [{"messages": [question]}, {"messages": [question, answer]}]
    found = batchspec.generate(rows, overrides=options(model, input__final_assistant="continue"))
    assert check_rows(found, model, 0) == 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row, ids in zip(rows, found["prompt_ids"].to_list(), strict=True):
        last = row["messages"][-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=not last, continue_final_message=last
        )
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found["messages"].to_list() == [[question], [question, answer]]


@pytest.mark.second
def test_a_warm_engine_scores_call_after_call(model: Path) -> None:
    with batchspec.Engine(options(model, model__max_len=128, output__prompt_logprobs=2)) as engine:
        assert engine._opened.admission.constraints is None  # nothing is decoded: no memory is held for schemas
        first, second = engine.generate(texts()), engine.generate(texts().reverse())
        assert check_rows(first, model, 2) == check_rows(second, model, 2) == 6
        assert sum(usage["cached_tokens"] for usage in second["usage"].tail(6)) > 0
        with pytest.raises(ConfigError, match="which a conversation needs"):
            engine.converse(texts(), lambda turn: None)


def test_plan_knows_that_nothing_is_decoded(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts().write_parquet(tmp_path / "in.parquet")
    assert cli(["plan", *options(model), f"input.path={tmp_path}/in.parquet"]) == 0
    said = capsys.readouterr().out
    assert "rounds       none: prompts are scored, nothing is decoded" in said
    assert "drafter none" in said
    assert " prompt tokens, " in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["draft=window", "draft.window=9"], "draft=window with decode.score=prompts drafts nothing"),
        (["decode.deterministic=true"], "decode.deterministic=true with decode.score=prompts is not supported"),
        (["decode.n=2"], "decode.n=2 with decode.score=prompts has no effect"),
        (["decode.choice=[a,b]"], "decode.choice=['a', 'b'] with decode.score=prompts has no effect"),
        (["decode.grammar=values.gbnf"], "decode.grammar=values.gbnf with decode.score=prompts has no effect"),
        (["decode.stop=[x]"], "decode.stop=['x'] with"),
        (["draft.prompt_lookup_max=5"], "draft=auto with decode.score=prompts drafts nothing; remove the keys of draft"),
        (["output.logprobs=1"], "prompts have output.prompt_logprobs"),
        (["decode.min_new_tokens=1"], "decode.min_new_tokens=1 with decode.score=prompts has no effect"),
        (["decode.max_new_tokens=5"], "decode.max_new_tokens=5 with decode.score=prompts has no effect"),
        (["decode.score=none", "output.prompt_logprobs=1"], "output.prompt_logprobs=1 with decode.score=none is not"),
        (["decode.score=choices", "output.prompt_logprobs=1"], "output.prompt_logprobs=1 with decode.score=choices is not"),
        (["decode.score=choices", "decode.choice=[a,a]"], "decode.choice=['a', 'a'] holds a text twice"),
    ],
)
def test_options_without_effect_on_scores_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["decode.score=prompts", *words])
    assert said in str(caught.value)


def test_the_default_drafter_is_left_out() -> None:
    config = compose(["decode.score=prompts"])
    assert (config.draft.name, config.output.prompt_logprobs) == ("none", 0)
    assert compose([]).output.prompt_logprobs is None


def test_columns_about_answers_are_refused_by_name(model: Path) -> None:
    for name, value in (("max_new_tokens", 3), ("n", 2), ("choice", ["a"])):
        words = options(model, **({"input__columns__choice": "choice"} if name == "choice" else {}))
        said = rf"^column '{name}' \({name}\) applies to answers, and decode.score=prompts writes none"
        with pytest.raises(InputError, match=said):
            batchspec.generate([{"prompt": "a b", name: value}], overrides=words)


def test_the_length_0_no_longer_scores(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"^decode.max_new_tokens=0 must be at least 1; .*decode.score=prompts decodes none$"):
        compose(["decode.max_new_tokens=0"])
