"""task=embed: vectors of texts, against transformers and the files that sentence-transformers reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer

import batchspec
from batchspec import run
from batchspec.cli import main as cli
from batchspec.config.compose import compose
from batchspec.engine.features.states import StateValues
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.spec import load_spec
from tests.helpers.lost_runs import lose_and_continue
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer, needed

DIM = 64
HYBRID = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}
LAST, MEAN = {"pooling_mode_lasttoken": True}, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
PROMPTS = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
KIND = "sentence_transformers.models."


def embedder(
    folder: Path, family: str = "qwen3", *, pooling: dict[str, Any] | None = None, normalise: bool = True, **config: Any
) -> Path:
    """A random model in `folder`, whose tokenizer adds token 0 after each text, as Qwen3-Embedding's adds its EOS; its weights
    have the names of a class without an output matrix. pooling: the folder has the files of sentence-transformers."""
    make_tokenizer(make_checkpoint(folder, family, **{**needed(family, 3), **config}))
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    if pooling is not None:
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *([("Normalize", "2_Normalize")] if normalise else [])]
        listed = [{"idx": i, "name": str(i), "path": path, "type": KIND + name} for i, (name, path) in enumerate(modules)]
        write(folder / "modules.json", listed)
        write(folder / "1_Pooling/config.json", {"word_embedding_dimension": DIM, "include_prompt": True, **pooling})
        write(folder / "config_sentence_transformers.json", PROMPTS)
    return folder


def write(path: Path, values: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))


def by_transformers(model: Path, ids: list[int], *, mean: bool = False, dim: int = DIM, normalise: bool = True) -> Any:
    loaded: Any = AutoModel
    network = loaded.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = network(torch.tensor([ids])).last_hidden_state[0]
    values = (states.mean(0) if mean else states[-1])[:dim]
    return (torch.nn.functional.normalize(values, dim=0) if normalise else values).numpy()


def check_rows(found: pl.DataFrame, model: Path, *, atol: float = 1e-4, **how: Any) -> int:
    good = found.filter(pl.col("error").is_null())
    for row in good.select("status", "prompt_ids", "embedding", "completion").to_dicts():
        np.testing.assert_allclose(row["embedding"], by_transformers(model, row["prompt_ids"], **how), atol=atol)
        assert (row["status"], row["completion"]) == ("ok", None)
    assert found.filter(pl.col("error").is_not_null())["embedding"].is_null().all()
    return good.height


def texts() -> pl.DataFrame:
    """With common beginnings of several pages, one row of a token or two, and a bad row."""
    common = "Say word1 word2 word3 again and again, and then say it all once more. " * 2
    prompts = [common + tail for tail in ("", "yes", "no", "no, never")] + ["a", "other words", None]
    return pl.DataFrame({"id": [f"q{i}" for i in range(len(prompts))], "prompt": prompts})


def words_of(model: Path, folder: Path, *more: str) -> list[str]:
    own = [f"model.path={model}", f"input.path={folder}/in.parquet", f"output.dir={folder}/out", "output.prompt_ids=true"]
    return [*own, "packing.max_num_seqs=3", "packing.max_num_batched_tokens=64", *more]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedder(tmp_path_factory.mktemp("model"), pooling=LAST)


@pytest.mark.second
@pytest.mark.parametrize(("family", "pooling", "config"), [
    ("qwen3", LAST, {}), ("llama", LAST, {}), ("gemma3_text", MEAN, {"sliding_window": 16}), ("qwen3_5_text", LAST, HYBRID),
    ("qwen3_5_text", MEAN, HYBRID), ("mistral", MEAN, {}),
])
def test_a_job_writes_the_embeddings_that_transformers_computes(
    family: str, pooling: dict[str, Any], config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By task=auto, which one line says. Prompts share prefixes, and are cut over several passes."""
    model = embedder(tmp_path / "model", family, pooling=pooling, **config)
    texts().write_parquet(tmp_path / "in.parquet")
    assert run.main(words_of(model, tmp_path)) == 0
    mean = pooling is MEAN
    what = "the mean of all states" if mean else "the last token's state"
    said = rf"task=embed, taken by task=auto: its folder has modules\.json, .*; the column embedding has {DIM} values of {what}"
    assert re.search(said, capsys.readouterr().err)
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert found.schema["embedding"] == pl.Array(pl.Float32, DIM)
    assert check_rows(found, model, mean=mean) == 6
    assert found["prompt_ids"].drop_nulls().list.last().to_list() == [0] * 6
    assert (sum(usage["cached_tokens"] for usage in found["usage"].head(6)) == 0) == mean
    norms = np.linalg.norm(found["embedding"].drop_nulls().to_numpy(), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-6)


@pytest.mark.second
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_first_values_alone_are_normalised_and_written(model: Path, tmp_path: Path, dtype: str) -> None:
    texts().write_parquet(tmp_path / "in.parquet")
    assert run.main(words_of(model, tmp_path, "output.embedding_dim=10", f"output.embedding_dtype={dtype}")) == 0
    found = pl.read_parquet(tmp_path / "out/data/*.parquet")
    assert found["embedding"].dtype.shape == (10,)  # type: ignore[attr-defined]
    assert check_rows(found, model, dim=10, atol=1e-4 if dtype == "float32" else 1e-3) == 6


def test_a_model_without_these_files_gives_the_last_state_and_the_keys_say_otherwise(tmp_path: Path) -> None:
    model, keys = embedder(tmp_path / "model", normalise=False), ["task=embed", "output.prompt_ids=true"]
    found = batchspec.generate({"prompt": ["some text"]}, overrides=[f"model.path={model}", *keys])
    assert check_rows(found, model) == 1
    keys = [f"model.path={model}", *keys, "output.embedding_pooling=mean"]
    assert check_rows(batchspec.generate({"prompt": ["some text"]}, overrides=keys), model, mean=True) == 1
    not_normalised = embedder(tmp_path / "other", pooling=LAST, normalise=False)
    found = batchspec.generate({"prompt": ["some text"]}, overrides=[f"model.path={not_normalised}", "output.prompt_ids=true"])
    assert check_rows(found, not_normalised, normalise=False) == 1


def test_an_architecture_without_an_output_matrix_is_embedded(tmp_path: Path) -> None:
    model = embedder(tmp_path / "model")
    config = {**json.loads((model / "config.json").read_text()), "architectures": ["Qwen3Model"]}
    write(model / "config.json", config)
    found = batchspec.generate({"prompt": ["some text"]}, overrides=[f"model.path={model}", "output.prompt_ids=true"])
    assert check_rows(found, model) == 1
    with pytest.raises(ConfigError, match=r"task=generate needs an output matrix, and model.path=.* has hidden states"):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", "task=generate"])


def test_a_prompt_of_the_checkpoint_comes_before_each_text(model: Path) -> None:
    keys = [f"model.path={model}", "output.prompt_ids=true"]
    named = batchspec.generate({"prompt": ["a river", "a sea"]}, overrides=[*keys, "input.prompt_name=query"])
    written = batchspec.generate({"prompt": ["Find: a river", "Find: a sea"]}, overrides=keys)
    assert named["prompt_ids"].to_list() == written["prompt_ids"].to_list()
    assert named["embedding"].to_list() == written["embedding"].to_list()
    with pytest.raises(ConfigError, match=r"input.prompt_name=qurey is no prompt of the checkpoint .*: it has query, document;"):
        batchspec.generate({"prompt": ["a"]}, overrides=[*keys, "input.prompt_name=qurey"])


def test_a_prompt_that_was_asked_for_is_never_left_out(model: Path) -> None:
    """Chats and ids have none: a job is refused, and a row of an engine, which may have any input, is an error row."""
    key = {"model.path": str(model), "input.prompt_name": "query"}
    with pytest.raises(ConfigError, match=r"input.prompt_name=query is for prompts that are text, and those of this input are"):
        batchspec.generate({"prompt_ids": [[5, 6]]}, overrides=[f"model.path={model}", "input.prompt_name=query"])
    with batchspec.Engine(key) as engine:
        found = engine.generate({"prompt_ids": [[5, 6]]})
        assert found["error"][0]["code"] == "bad_parameter"
        assert engine.generate({"prompt": ["text"]})["error"][0] is None


def test_the_default_prompt_of_the_checkpoint_is_used(tmp_path: Path) -> None:
    model = embedder(tmp_path / "model", pooling=LAST)
    write(model / "config_sentence_transformers.json", {**PROMPTS, "default_prompt_name": "query"})
    keys = [f"model.path={model}", "output.prompt_ids=true"]
    found = batchspec.generate({"prompt": ["a river"]}, overrides=keys)
    plain = batchspec.generate({"prompt": ["Find: a river"]}, overrides=[*keys, "input.prompt_name=document"])
    assert found["prompt_ids"].to_list() == plain["prompt_ids"].to_list()


    none = batchspec.generate({"prompt": ["a river"]}, overrides=[*keys, "input.prompt_name=''"])
    bare = Tokenizer.from_file(str(model / "tokenizer.json")).encode("a river").ids
    assert none["prompt_ids"].to_list() == [bare]
    assert found["prompt_ids"].to_list() != [bare]


@pytest.mark.parametrize("spare", [0, 1 << 22])
def test_what_is_too_long_is_cut_at_its_end_and_keeps_the_token_after_it(model: Path, spare: int) -> None:
    """Also a text so long that its end is never tokenised; given ids have no token after them."""
    long = "Say word1 again and again. " * 4 + "x" * spare
    keys = [f"model.path={model}", "output.prompt_ids=true", "model.max_len=20"]
    found = batchspec.generate({"prompt": [long, "short"]}, overrides=keys)
    (cut, short) = found["prompt_ids"].to_list()
    whole = Tokenizer.from_file(str(model / "tokenizer.json")).encode("Say word1 again and again. " * 4).ids
    assert cut == [*whole[:19], 0]
    assert short[-1] == 0
    assert check_rows(found, model) == 2
    ids = batchspec.generate({"prompt_ids": [whole]}, overrides=keys)
    assert ids["prompt_ids"].to_list() == [whole[:20]]
    skipped = batchspec.generate({"prompt": [long, "short"]}, overrides=[*keys, "input.on_overlong=skip"])
    assert skipped["status"].to_list() == ["skipped", "ok"]


@pytest.mark.parametrize("given", [12, None, 9999])
def test_the_length_of_the_checkpoints_files_is_the_limit_of_rows(tmp_path: Path, given: int | None) -> None:
    """Where they say nothing, or more than the model can do, the model's is."""
    model = embedder(tmp_path / "model", pooling=LAST)
    write(model / "sentence_bert_config.json", {"max_seq_length": given, "do_lower_case": False})
    found = batchspec.generate({"prompt": ["words " * 500]}, overrides=[f"model.path={model}", "output.prompt_ids=true"])
    assert len(found["prompt_ids"][0]) == min(given or 9999, load_spec(model).max_len)


@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize(("of_tokenizer", "of_files", "length"), [
    (9, None, 9), (9.0, None, 9), (9, 12, 12), (10**30, None, 256), (1e30, None, 256), (9999, None, 256), ("x", None, 256),
])
def test_the_length_of_the_tokenizer_counts_where_those_files_say_nothing(
    tmp_path: Path, of_tokenizer: Any, of_files: int | None, length: int, modules: bool
) -> None:
    """As in sentence-transformers, where transformers' value for none is 1e30."""
    model = embedder(tmp_path / "model", pooling=LAST if modules else None)
    config = json.loads((model / "tokenizer_config.json").read_text())
    write(model / "tokenizer_config.json", {**config, "model_max_length": of_tokenizer})
    if modules:
        write(model / "sentence_bert_config.json", {"max_seq_length": of_files})
    elif of_files is not None:
        length = 9
    keys = [f"model.path={model}", "task=embed", "output.prompt_ids=true"]
    found = batchspec.generate({"prompt": ["words " * 500]}, overrides=keys)
    assert len(found["prompt_ids"][0]) == length
    assert len(batchspec.generate({"prompt": ["words " * 500]}, overrides=[*keys, "model.max_len=20"])["prompt_ids"][0]) == 20


@pytest.mark.second
def test_the_length_of_the_tokenizer_is_that_of_texts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It cuts neither given ids nor chats, and the user is told at how many tokens it cuts texts."""
    model = embedder(tmp_path / "model", pooling=LAST)
    make_tokenizer(model, chat_template=CHAT_TEMPLATE)
    config = json.loads((model / "tokenizer_config.json").read_text())
    write(model / "tokenizer_config.json", {**config, "model_max_length": 9})
    keys, ids = [f"model.path={model}", "task=embed", "output.prompt_ids=true"], list(range(5, 25))
    assert batchspec.generate({"prompt_ids": [ids]}, overrides=keys)["prompt_ids"].to_list() == [ids]
    chat = [{"role": "user", "content": " ".join(["words"] * 9)}]
    for rows, more in (({"messages": [chat]}, []), ({"prompt": [chat[0]["content"]]}, ["input.chat=true"])):
        (found,) = batchspec.generate(rows, overrides=[*keys, *more])["prompt_ids"].to_list()
        assert found == AutoTokenizer.from_pretrained(model).apply_chat_template(chat, return_dict=False)
    capsys.readouterr()
    with batchspec.Engine(keys) as engine:
        assert engine.generate({"prompt_ids": [ids]})["prompt_ids"].to_list() == [ids]
        said = "prompts have at most 9 tokens, as model_max_length of tokenizer_config.json says; model.max_len sets another"
        assert said not in capsys.readouterr().err
        assert len(engine.generate({"prompt": ["words " * 500]})["prompt_ids"][0]) == 9
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value", "said"), [
    ("auto_map", {"AutoTokenizer": ["tokenization_x.Fast", None]}, r"names code of the folder for its tokenizer \(auto_map\)"),
    ("add_eos_token", True, "has add_eos_token=true, and tokenizer.json adds no EOS"),
])
def test_a_tokenizer_that_may_end_texts_otherwise_is_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    """The state of its last token would be another one. Ids and chats do not depend on it, nor do answers."""
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "qwen3"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    write(model / "tokenizer_config.json", {**config, key: value})
    words = [f"model.path={model}", "task=embed"]
    with pytest.raises(ConfigError, match=f"task=embed reads the end of texts, and tokenizer_config.json {said}"):
        batchspec.generate({"prompt": ["a"]}, overrides=words)
    assert batchspec.generate({"prompt_ids": [[5, 6]]}, overrides=words)["error"][0] is None
    chat = [{"role": "user", "content": "Who?"}]
    assert batchspec.generate({"messages": [chat]}, overrides=words)["error"][0] is None
    assert batchspec.generate({"prompt": ["a"]}, overrides=[words[0], "decode.max_new_tokens=2"])["error"][0] is None


def test_a_tokenizer_that_adds_the_eos_it_is_said_to_add_is_taken(tmp_path: Path) -> None:
    model = embedder(tmp_path / "model", pooling=LAST)
    config = json.loads((model / "tokenizer_config.json").read_text())
    write(model / "tokenizer_config.json", {**config, "add_eos_token": True})
    assert batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}"])["error"][0] is None


def test_the_first_values_have_the_direction_and_the_length_of_sentence_transformers(tmp_path: Path) -> None:
    """Which normalises (if Normalize is a module), cuts, and normalises again (normalize_embeddings)."""
    for normalise in (True, False):
        model = embedder(tmp_path / str(normalise), pooling=LAST, normalise=normalise)
        keys = [f"model.path={model}", "output.prompt_ids=true"]
        whole, cut = (
            batchspec.generate({"prompt": ["some text"]}, overrides=[*keys, *more]) for more in ([], ["output.embedding_dim=10"])
        )
        first = whole["embedding"].to_numpy()[:, :10]
        own = first / np.linalg.norm(first) if normalise else first
        np.testing.assert_allclose(cut["embedding"].to_numpy(), own, atol=1e-6)
        assert (abs(np.linalg.norm(whole["embedding"].to_numpy()) - 1) < 1e-6) == normalise


def test_blanks_around_a_text_change_nothing(model: Path) -> None:
    keys = [f"model.path={model}", "output.prompt_ids=true", "input.prompt_name=query"]
    found = batchspec.generate({"prompt": ["some text", "some text \n\n"]}, overrides=keys)["prompt_ids"].to_list()
    assert found[0] == found[1]
    found = batchspec.generate({"prompt": ["Find: some text", " Find: some text\t"]}, overrides=keys[:2])["prompt_ids"].to_list()
    assert found[0] == found[1]


def test_modules_that_pool_nothing_say_nothing_about_embeddings(tmp_path: Path) -> None:
    """A folder of a cross-encoder has such modules. Its model decodes, unless the user asks for embeddings."""
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama"))
    listed = [{"type": KIND + "Transformer"}, {"type": "sentence_transformers.cross_encoder.CausalScoreHead"}]
    write(model / "modules.json", listed)
    assert batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", "decode.max_new_tokens=2"]).height == 1
    with pytest.raises(CheckpointError, match="modules Transformer, CausalScoreHead are not supported"):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", "task=embed"])


def test_half_precision_is_for_vectors_of_length_1(tmp_path: Path) -> None:
    model = embedder(tmp_path / "model", pooling=LAST, normalise=False)
    with pytest.raises(ConfigError, match=r"output\.embedding_dtype=float16 is for normalised embeddings"):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", "output.embedding_dtype=float16"])


@pytest.mark.parametrize(("file", "values", "said"), [
    ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling 'pooling_mode_cls_token' is not supported; supported"),
    ("1_Pooling/config.json", {**LAST, "pooling_mode_max_tokens": True}, "pooling 'lasttoken+pooling_mode_max_tokens' is not"),
    ("1_Pooling/config.json", {}, "pooling '' is not supported"),
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt=false with the mean"),
    ("modules.json", [{"type": KIND + "Transformer"}, {"type": KIND + "Pooling", "path": "1_Pooling"}, {"type": KIND + "Dense"}],
     "modules Transformer, Pooling, Dense are not supported"),
    ("modules.json", {"a": 1}, "not a list of modules"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case=true is not supported"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length is 0; it must be an integer in 1 .. "),
    ("sentence_bert_config.json", {"config_args": {"is_causal": False}}, "changes the model, which is not supported; write it"),
    ("modules.json", [{"type": "custom_st.Transformer"}, {"type": KIND + "Pooling", "path": "1_Pooling"}],
     "modules custom_st.Transformer, Pooling are not supported"),
    ("modules.json", [{"type": KIND + "Transformer"}, *[{"type": KIND + "Pooling", "path": "1_Pooling"}] * 2],
     "modules Transformer, Pooling, Pooling are not supported"),
])
def test_files_that_say_something_else_are_refused_by_name(tmp_path: Path, file: str, values: Any, said: str) -> None:
    model = embedder(tmp_path / "model", pooling=LAST)
    write(model / file, values)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}"])


@pytest.mark.parametrize(("words", "said"), [
    (["output.embedding_dim=65"], "output.embedding_dim=65 exceeds the model's 64; lower it or remove the key"),
    (["task=embed", "decode.max_new_tokens=5"], "decode.max_new_tokens=5 with task=embed has no effect: no token is decoded"),
    (["decode.temperature=1", "decode.n=2"], "task=auto is embed, because its folder has modules.json"),
    (["task=generate", "output.embedding_dim=5"],
     "output.embedding_dim=5 with task=generate has no effect: task=embed alone reads it; remove the key"),
    (["input.on_overlong=truncate"], "input.on_overlong=truncate keeps the end of a prompt, and task=embed cuts what is too"),
    (["task=reward"], "task=reward needs a score matrix (...ForSequenceClassification), and model.path="),
])
def test_what_the_task_excludes_is_refused(model: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", *words])


@pytest.mark.parametrize("key", ["output.embedding_dim=5", "input.prompt_name=query", "output.embedding_dtype=float16"])
def test_keys_of_embeddings_are_refused_where_an_answer_is_decoded(tmp_path: Path, key: str) -> None:
    """Also with task=auto, once the model is known."""
    model = make_tokenizer(make_checkpoint(tmp_path / "model", "llama"))
    with pytest.raises(ConfigError, match=re.escape(f"{key} with task=generate has no effect")):
        batchspec.generate({"prompt": ["a"]}, overrides=[f"model.path={model}", key])


@pytest.mark.second
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_lost_run_is_continued_and_the_commands_know_the_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pooling: str
) -> None:
    """The journal keeps embeddings, so that the next run computes nothing; neither does one of a finished job."""
    texts().write_parquet(tmp_path / "in.parquet")
    words = words_of(model, tmp_path, "output.shard_rows=8", f"output.embedding_pooling={pooling}")

    lose_and_continue(words, (StateValues, "leave"), capsys, rows=6)
    assert check_rows(pl.read_parquet(tmp_path / "out/data/*.parquet"), model, mean=pooling == "mean") == 6
    out = str(tmp_path / "out")
    for command in (["stats", out], ["status", out], ["inspect", out, "q1"], ["report", out]):
        assert cli(command) == 0, command
    assert cli(["export", out, "--to", "chat", str(tmp_path / "x.jsonl")]) == 2
    assert "holds embeddings of prompts and no answer" in capsys.readouterr().err
    for key in (
        f"output.embedding_pooling={'last' if pooling == 'mean' else 'mean'}", "output.embedding_dim=9",
        "output.embedding_dtype=float16", "input.prompt_name=query",
    ):
        assert run.main([*words, key]) == 2
        assert re.search(rf"holds another job \(.*\b{re.escape(key.partition('=')[0])}: ", capsys.readouterr().err), key


@pytest.mark.second
def test_a_warm_engine_embeds_call_after_call(model: Path) -> None:
    data = {"id": ["a", "b"], "prompt": ["Say word1 word2.", "Another prompt."]}
    with batchspec.Engine({"model.path": str(model), "output.prompt_ids": True, "output.embedding_dim": 8}) as engine:
        first, second = engine.generate(data), engine.generate(data)
    assert check_rows(first, model, dim=8) == check_rows(second, model, dim=8) == 2
    assert [usage["cached_tokens"] > 0 for usage in second["usage"]] == [usage["prompt_tokens"] > 16 for usage in first["usage"]]


def test_conf_of_a_job_knows_these_keys() -> None:
    config = compose(["task=embed", "output.embedding_dim=256", "input.prompt_name=query"])
    assert (config.task, config.draft.name, config.output.embedding_dim) == ("embed", "none", 256)
