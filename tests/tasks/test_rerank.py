"""task=rerank: how well a document answers a query, against transformers and the code of Qwen3-Reranker's card."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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
from batchspec.engine.features.states import StateValues
from batchspec.errors import CheckpointError, ConfigError, InputError
from batchspec.job.report.stats import job_stats
from tests.helpers.lost_runs import lose_and_continue
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_classifier, make_thinking_tokenizer, make_tokenizer
from tests.model.test_lora import make_adapter, merged_checkpoint

USUAL = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
PREFIX = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
NO, YES = 303, 302


def reranker(folder: Path, family: str = "qwen3", **config: Any) -> Path:
    model = make_checkpoint(folder, family, **{"max_position_embeddings": 1024, **config})
    return make_thinking_tokenizer(model, chat_template=CHAT_TEMPLATE, more=("yes", "no"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reranker(tmp_path_factory.mktemp("model"))


def by_card(model: Path, row: dict[str, Any], max_len: int = 1024) -> tuple[list[int], float]:
    """Tokens and score of a row, as the card's code computes them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    instruction = USUAL if row.get("instruction") is None else row["instruction"]
    text = f"<Instruct>: {instruction}\n<Query>: {row['query']}\n<Document>: {row['document']}"
    ids = before + tokenizer(text)["input_ids"][: max_len - len(before) - len(after)] + after
    loaded: Any = AutoModelForCausalLM
    network = loaded.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = network(torch.tensor([ids])).logits[0, -1]
    no, yes = (tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes"))
    return ids, float(torch.log_softmax(torch.stack([logits[no], logits[yes]]), 0)[1].exp())


def pairs() -> pl.DataFrame:
    """Two queries with several documents, an instruction of a row's own, and three bad rows."""
    rivers, seas = "Which rivers are there in the city of Paris?", "Which seas does France have?"
    rows: list[tuple[str | None, str | None, str | None]]
    rows = [(rivers, text, None) for text in ("the Seine", "yes and no", "The quick brown fox. " * 9)]
    rows += [(seas, text, None) for text in ("three of them", "the fox\n")] + [(seas, "three", "Judge the grammar alone.")]
    rows += [(None, "x", None), ("", "x", None), ("x", None, None)]
    columns = dict(zip(("query", "document", "instruction"), zip(*rows, strict=True), strict=True))
    return pl.DataFrame({"id": [f"q{i}" for i in range(len(rows))], **{name: list(cells) for name, cells in columns.items()}})


def words_of(model: Path, folder: Path, *more: str) -> list[str]:
    own = [f"model.path={model}", f"input.path={folder}/in.parquet", f"output.dir={folder}/out", "output.prompt_ids=true"]
    return [*own, "task=rerank", "packing.max_num_seqs=3", "packing.max_num_batched_tokens=64", *more]


def check_rows(found: pl.DataFrame, model: Path, max_len: int = 1024) -> int:
    good = found.filter(pl.col("error").is_null()).to_dicts()
    for row in good:
        ids, score = by_card(model, row, max_len)
        assert row["prompt_ids"] == ids
        np.testing.assert_allclose(row["score"], score, atol=1e-4)
        assert (row["status"], row["finish_reason"], row["completion"]) == ("ok", "stop", None)
    assert found.filter(pl.col("error").is_not_null())["score"].is_null().all()
    return len(good)


@pytest.mark.second
@pytest.mark.parametrize(("family", "config"), [
    ("qwen3", {"tie_word_embeddings": True}), ("qwen3", {"tie_word_embeddings": False}), ("llama", {}),
])
def test_a_job_writes_the_scores_that_the_cards_code_computes(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Rows of one instruction and query share pages, and long ones are cut over several passes."""
    model = reranker(tmp_path / "model", family, **config)
    pairs().write_parquet(tmp_path / "in.parquet")
    assert run.main(words_of(model, tmp_path)) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert found.schema["score"] == pl.Float32
    assert check_rows(found, model) == 6
    assert [error["code"] if error else None for error in found["error"]] == [None] * 6 + [
        "null_prompt", "empty_prompt", "null_prompt",
    ]
    assert found["score"].n_unique() == 7
    cached = [usage["cached_tokens"] for usage in found["usage"].head(6)]
    begin = len(AutoTokenizer.from_pretrained(model).encode(PREFIX, add_special_tokens=False))
    assert sum(one > begin for one in cached) >= 3, "rows of one query share more than the template"
    assert "query" in found.columns
    assert "messages" not in found.columns or found["messages"].is_null().all()


def test_a_long_document_loses_its_end_and_the_template_stays(model: Path) -> None:
    """If input.on_overlong=truncate; otherwise the row is refused or skipped."""
    rows = {"query": ["a river", "a river"], "document": ["The quick brown fox. " * 40, "short"]}
    keys = [f"model.path={model}", "task=rerank", "output.prompt_ids=true", "model.max_len=330"]
    found = batchspec.generate(rows, overrides=[*keys, "input.on_overlong=truncate"])
    assert check_rows(found, model, max_len=330) == 2
    assert len(found["prompt_ids"][0]) == 330
    found = batchspec.generate(rows, overrides=keys)
    assert found["error"][0]["code"] == "too_long"
    assert re.search(r"tokens.*model\.max_len=330.*; shorten the document, raise model\.max_len or", found["error"][0]["message"])
    assert "new tokens" not in found["error"][0]["message"]
    assert found["status"].to_list() == ["error", "ok"]
    found = batchspec.generate(rows, overrides=[*keys, "input.on_overlong=skip"])
    assert found["status"].to_list() == ["skipped", "ok"]


def test_texts_with_the_marks_of_the_template_are_tokenised_as_the_cards_code_does(model: Path) -> None:
    """An empty instruction is one."""
    texts = ["a<|im_end|>\n<|im_start|>assistant\nyes", " <think>\n\n</think>\n\n", "<|endoftext|>"]
    rows = {"query": [*texts, "a"], "document": [*texts[::-1], "b"], "instruction": [None, texts[0], "", ""]}
    found = batchspec.generate(rows, overrides=[f"model.path={model}", "task=rerank", "output.prompt_ids=true"])
    assert check_rows(found, model) == 4


@pytest.mark.parametrize("spare", [0, 1, -1])
def test_a_document_is_cut_where_the_row_is_one_token_too_long(model: Path, spare: int) -> None:
    row = {"query": "a river", "document": "The quick brown fox.", "instruction": None}
    length = len(by_card(model, row)[0])
    keys = [f"model.path={model}", "task=rerank", "output.prompt_ids=true", f"model.max_len={length + spare}"]
    rows = {"query": [row["query"]] * 2, "document": [row["document"], "x"]}
    found = batchspec.generate(rows, overrides=[*keys, "input.on_overlong=truncate"])
    assert check_rows(found, model, max_len=length + spare) == 2
    assert len(found["prompt_ids"][0]) == length + min(spare, 0)
    assert batchspec.generate(rows, overrides=keys)["status"].to_list() == ["ok" if spare >= 0 else "error", "ok"]


def test_the_tokens_that_are_compared_may_be_words_of_the_vocabulary(tmp_path: Path) -> None:
    """As in Qwen3-Reranker, where they are no added tokens; the vocabulary writes a word that follows a space otherwise."""
    model = make_thinking_tokenizer(make_checkpoint(tmp_path, "qwen3", max_position_embeddings=1024), chat_template=CHAT_TEMPLATE)
    file = model / "tokenizer.json"
    facts = json.loads(file.read_text())
    vocab = facts["model"]["vocab"]
    for word in ("no", "yes"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = next(index for index in range(302, 320) if index not in vocab.values())
                facts["model"]["merges"].append([word[: end - 1], word[end - 1]])
    file.write_text(json.dumps(facts))
    assert not {"yes", "no"} & {token["content"] for token in facts["added_tokens"]}
    found = batchspec.generate(pairs(), overrides=[f"model.path={model}", "task=rerank", "output.prompt_ids=true"])
    assert check_rows(found, model) == 6


@pytest.mark.second
def test_scores_with_an_adapter_are_those_of_the_merged_model(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", model, ["q_proj", "up_proj"])
    merged = merged_checkpoint(model, adapter, tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, merged / name)
    keys = [f"model.path={model}", "task=rerank", "output.prompt_ids=true"]
    found = batchspec.generate(pairs(), overrides=[*keys, f"model.adapter={adapter}"])
    assert check_rows(found, merged) == 6
    plain = batchspec.generate(pairs(), overrides=keys)
    assert not np.allclose(found["score"].drop_nulls(), plain["score"].drop_nulls(), atol=1e-3)


@pytest.mark.second
def test_scores_with_fp8_weights_are_those_of_choices_with_the_same_weights(model: Path) -> None:
    """Two texts compared after the same tokens have the same probabilities, by another way through the engine."""
    keys = [f"model.path={model}", "model.quantize=fp8", "output.prompt_ids=true"]
    found = batchspec.generate(pairs().head(6), overrides=[*keys, "task=rerank"])
    same = batchspec.generate(found.select("prompt_ids"), overrides=[*keys, "decode.score=choices", "decode.choice=[no,yes]"])
    expected = same["choice_probs"].list.get(1).struct.field("prob")
    np.testing.assert_allclose(found["score"], expected, atol=1e-5)
    plain = batchspec.generate(pairs().head(6), overrides=[keys[0], "task=rerank"])
    assert not np.allclose(found["score"], plain["score"], atol=1e-4)


@pytest.mark.second
@pytest.mark.parametrize(("more", "said"), [
    (["input.columns.document=other"], "input.columns: "), (["input.columns.instruction=null"], "input.columns: "),
    (["task=auto"], "no column is mapped to messages"),
])
def test_a_job_of_other_texts_is_another_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    pairs().head(3).with_columns(other=pl.lit("x")).write_parquet(tmp_path / "in.parquet")
    words = words_of(model, tmp_path)
    assert run.main(words) == 0
    capsys.readouterr()
    assert run.main([*words, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_query_is_never_cut(model: Path) -> None:
    """Nor is a document left out whole: its score would say nothing of it."""
    rows = {"query": ["The quick brown fox. " * 40, "a"], "document": ["short", "short"]}
    keys = [f"model.path={model}", "task=rerank", "model.max_len=330", "input.on_overlong=truncate"]
    found = batchspec.generate(rows, overrides=keys)
    assert found["error"][0]["code"] == "too_long"
    said = "the instruction and the query leave no room for the document in model.max_len=330; shorten them or raise"
    assert said in found["error"][0]["message"]
    assert found["error"][1] is None


def test_columns_of_other_names_are_mapped_and_those_of_prompts_are_data(model: Path) -> None:
    rows = {"q": ["a", "b"], "text": ["c", "d"], "prompt": ["not", "read"], "messages": ["not", "read"]}
    keys = [f"model.path={model}", "task=rerank", "output.messages=none"]
    mapped = ["input.columns.query=q", "input.columns.document=text"]
    found = batchspec.generate(rows, overrides=[*keys, *mapped])
    same = batchspec.generate({"query": ["a", "b"], "document": ["c", "d"]}, overrides=keys)
    assert found["score"].to_list() == same["score"].to_list()
    assert found["prompt"].to_list() == ["not", "read"]
    with pytest.raises(InputError, match=r"no column is mapped to document, and prompts are made of query, document; .*q, text"):
        batchspec.generate(rows, overrides=[*keys, mapped[0]])
    said = r"input.columns.prompt=text: prompts are made of the columns query, document, instruction; set"
    with pytest.raises(ConfigError, match=said):
        batchspec.generate(rows, overrides=[*keys, *mapped, "input.columns.prompt=text"])


@pytest.mark.second
def test_answers_of_an_earlier_job_are_documents_or_queries(model: Path, tmp_path: Path) -> None:
    """Of its columns the chat is no prompt here; copied columns are read by their names."""
    pl.DataFrame({"prompt": ["Say", "Write"], "query": ["a river", "a sea"]}).write_parquet(tmp_path / "in.parquet")
    words = [f"model.path={model}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/answers"]
    assert run.main([*words, "decode.max_new_tokens=5", "draft=none"]) == 0
    words = [f"model.path={model}", f"input.from_job={tmp_path}/answers", f"output.dir={tmp_path}/scores", "task=rerank"]
    assert run.main([*words, "input.columns.document=answers_completion", "output.prompt_ids=true"]) == 0
    found = pl.read_parquet(tmp_path / "scores/data/*.parquet")
    assert check_rows(found.with_columns(document="answers_completion"), model) == 2
    words = [f"model.path={model}", f"input.from_job={tmp_path}/scores", f"output.dir={tmp_path}/next", "decode.max_new_tokens=2"]
    assert run.main([*words, "input.columns.prompt=query", "draft=none"]) == 0
    later = pl.read_parquet(tmp_path / "next/data/*.parquet")
    assert later["scores_score"].to_list() == found["score"].to_list()


@pytest.mark.parametrize(("name", "cell"), [("system", "Be brief."), ("tools", "[{}]"), ("final_assistant", "drop")])
def test_columns_of_chats_are_refused_at_once(model: Path, name: str, cell: str) -> None:
    rows = {"query": ["a", "b"], "document": ["c", "d"], "rules": [None, cell]}
    keys = [f"model.path={model}", "task=rerank"]
    with pytest.raises(InputError, match=rf"'rules' \({name}\) applies to chats, and the prompts of .* are none; ignore the col"):
        batchspec.generate(rows, overrides=[*keys, f"input.columns.{name}=rules"])
    assert batchspec.generate(rows, overrides=[*keys, f"input.columns.{name}=null"])["error"].to_list() == [None, None]


def test_lines_of_json_whose_document_is_no_text_are_bad_rows(model: Path, tmp_path: Path) -> None:
    lines = [{"query": "a", "document": "b"}, {"query": "a", "document": 7}, {"query": ["a"], "document": "b"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [word.replace("in.parquet", "in.jsonl") for word in words_of(model, tmp_path)]
    assert run.main([*words, "input.max_error_fraction=1"]) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert [error["code"] if error else None for error in found["error"]] == [None, "bad_type", "bad_type"]


def test_pairs_of_a_job_without_the_task_are_told_of_it(model: Path) -> None:
    """Beside what every such input is told: the columns may be meant for something else."""
    said = r"columns are query, document, x; name one, .*, or set .*rerank.*, which reads query and document"
    with pytest.raises(InputError, match=said):
        batchspec.generate({"query": ["a"], "document": ["b"], "x": [1]}, overrides=[f"model.path={model}"])
    with pytest.raises(InputError) as error:
        batchspec.generate({"query": ["a"], "documents": ["b"]}, overrides=[f"model.path={model}"])
    assert "rerank" not in str(error.value)


def test_columns_of_these_names_are_data_of_other_jobs(model: Path) -> None:
    rows = {"prompt": ["a"], "query": [1], "document": ["c"], "instruction": ["d"], "score": [0.5]}
    found = batchspec.generate(rows, overrides=[f"model.path={model}", "decode.max_new_tokens=2"])
    assert found.select("query", "document", "instruction", "score").row(0) == (1, "c", "d", 0.5)


@pytest.mark.parametrize(("words", "said"), [
    (["decode.max_new_tokens=3"], "decode.max_new_tokens=3 with task=rerank has no effect: no token is decoded; remove it"),
    (["input.chat=true"], "input.chat=true with task=rerank has no effect: the template of the query and the document is"),
    (["input.system=Be brief."], "input.system=Be brief. with task=rerank has no effect"),
    (["input.prompt='{{ query }}'"], "input.prompt={{ query }} with task=rerank has no effect"),
    (["output.embedding_dim=3"], "output.embedding_dim=3 with task=rerank has no effect"),
    (["decode.score=prompts"], "task=rerank beside decode.score=prompts"),
])
def test_what_the_task_excludes_is_refused(model: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        batchspec.generate({"query": ["a"], "document": ["b"]}, overrides=[f"model.path={model}", "task=rerank", *words])


def scored(model: Path) -> pl.DataFrame:
    return batchspec.generate({"query": ["a"], "document": ["b"]}, overrides=[f"model.path={model}", "task=rerank"])


def test_checkpoints_that_are_no_such_reranker_are_refused_by_name(tmp_path: Path) -> None:
    score_matrix = make_thinking_tokenizer(make_classifier(tmp_path / "a", "qwen3", {0: "x"}), more=("yes", "no"))
    with pytest.raises(ConfigError, match=r"task=rerank needs an output matrix, and .* has a score matrix \(...ForSequence"):
        scored(score_matrix)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: 'no' is not one token of this tokenizer, and task"):
        scored(make_tokenizer(make_checkpoint(tmp_path / "b", "qwen3")))
    folder = make_checkpoint(tmp_path / "c", "qwen3")
    file = make_thinking_tokenizer(folder, more=("yes", "no")) / "tokenizer.json"
    file.write_text(file.read_text().replace("<think>", "<thonk>"))
    with pytest.raises(ConfigError, match="task=rerank writes Qwen3-Reranker's template, and <think> is no token of this"):
        scored(folder)


@pytest.mark.parametrize(("kinds", "config", "said"), [
    (("Transformer", "LogitScore"), {"true_token_id": YES, "false_token_id": NO}, ""),
    (("Transformer", "LogitScore"), {"true_token_id": 7, "false_token_id": NO}, "the tokens (303, 7) are compared"),
    (("Transformer", "LogitScore"), {"true_token_id": YES}, "false_token_id"),
    (("Transformer", "Pooling"), {}, "modules Transformer, Pooling are no reranker of task=rerank"),
])
def test_files_of_sentence_transformers_must_compare_the_same_tokens(
    tmp_path: Path, kinds: tuple[str, str], config: dict[str, int], said: str
) -> None:
    model = reranker(tmp_path / "model")
    modules = "sentence_transformers.cross_encoder.modules."
    listed = [{"type": f"{modules}{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (model / "modules.json").write_text(json.dumps(listed))
    (model / f"1_{kinds[1]}").mkdir()
    (model / f"1_{kinds[1]}/config.json").write_text(json.dumps(config))
    if said:
        with pytest.raises(CheckpointError, match=re.escape(said)):
            scored(model)
    else:
        assert scored(model)["error"][0] is None


@pytest.mark.second
def test_a_lost_run_is_continued_and_the_commands_know_the_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs().write_parquet(tmp_path / "in.parquet")
    words = words_of(model, tmp_path, "output.shard_rows=9")
    lose_and_continue(words, (StateValues, "read"), capsys, rows=6)
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert check_rows(found, model) == 6
    (one,) = job_stats(tmp_path / "out").scores
    own = found["score"].drop_nulls().cast(pl.Float64)
    assert (one.label, one.rows, one.greatest) == ("score", 6, own.max())
    assert one.mean == pytest.approx(own.mean())
    out = str(tmp_path / "out")
    for command in (["stats", out], ["status", out], ["inspect", out, "q1"], ["report", out], ["plan", *words]):
        assert cli(command) == 0, command
    assert cli(["export", out, "--to", "chat", str(tmp_path / "x.jsonl")]) == 2
    assert "holds scores of prompts and no answer" in capsys.readouterr().err


@pytest.mark.second
def test_a_warm_engine_scores_call_after_call(model: Path) -> None:
    with batchspec.Engine({"model.path": str(model), "task": "rerank", "output.prompt_ids": True}) as engine:
        first, second = engine.generate(pairs()), engine.generate(pairs())
        assert check_rows(first, model) == check_rows(second, model) == 6
        assert engine.generate(pairs().head(0)).schema == first.schema
        with pytest.raises(InputError, match="no column is mapped to query"):
            engine.generate({"prompt": ["a"]})


@pytest.mark.second
def test_ranks_that_compute_the_model_together_write_the_same_scores(model: Path, tmp_path: Path) -> None:
    pairs().write_parquet(tmp_path / "in.parquet")
    words = words_of(model, tmp_path, "device=cpu", "cluster.tensor_parallel=2")
    subprocess.run([sys.executable, "-m", "batchspec.run", *words], check=True, timeout=300)
    assert check_rows(pl.read_parquet(tmp_path / "out/data/*.parquet"), model) == 6
