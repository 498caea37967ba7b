"""A key or a column that would have no effect is refused by name, instead of being accepted in silence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import batchspec
from batchspec import cli
from batchspec.config.compose import compose
from batchspec.config.unread import refuse_unread
from batchspec.data.dataset.reader import table_source
from batchspec.errors import ConfigError, InputError
from batchspec.job.prepare import Job, open_job
from batchspec.warm.engine import Engine
from batchspec.warm.options import warm_config
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_thinking_tokenizer, make_tokenizer

PROMPTS: dict[str, Any] = {
    "prompt": "a", "prompt_ids": [5, 6], "messages": [{"role": "user", "content": "a"}]
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    (folder / "own.jinja").write_text("{{ messages[0].content }}{{ mood }}")
    return make_tokenizer(folder)


def opened(model: Path, kind: str, *words: str, **columns: Any) -> Job:
    """The checked job over one row."""
    words = tuple(word.replace("FOLDER", str(model)) for word in words)
    table = pa.table({kind: [PROMPTS[kind]], **{name: [value] for name, value in columns.items()}})
    few = [] if any(word.startswith("decode.score=") for word in words) else ["decode.max_new_tokens=4"]
    return open_job(compose([f"model.path={model}", *few, *words]), table_source(table))


OF_CHATS = [
    "input.final_assistant=drop", "input.template_date=2025-08-05", "model.chat_template=FOLDER/own.jinja",
    "input.template_kwargs={add_generation_prompt: true}",
]


@pytest.mark.parametrize("word", OF_CHATS)
def test_keys_of_chats_need_a_chat(model: Path, tmp_path: Path, word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"^{key}=.* applies to chats, and column .prompt. .* set input.chat=true or remove the key$"
    ):
        opened(model, "prompt", word)
    with pytest.raises(ConfigError, match=rf"^{key}=.* and column .prompt_ids. \(prompt_ids\) has none; remove the key$"):
        opened(model, "prompt_ids", word)
    template = CHAT_TEMPLATE + "{{ strftime_now('%Y') }}"
    dated = make_tokenizer(shutil.copytree(model, tmp_path / "dated"), chat_template=template)
    opened(dated, "prompt", word, "input.chat=true")
    opened(dated, "messages", word)


@pytest.mark.parametrize("name", ["system", "tools", "template_kwargs", "final_assistant"])
def test_columns_of_chats_are_refused_beside_prompt_ids(model: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"^column '{name}' .* applies to chats, .* input.columns.{name}=null$"):
        opened(model, "prompt_ids", **{name: "{}"})
    opened(model, "prompt_ids", **{name: None})
    opened(model, "prompt_ids", f"input.columns={{{name}: null}}", **{name: "{}"})
    opened(model, "messages", **{name: "{}"})


@pytest.mark.parametrize(
    "name",
    ["max_new_tokens", "n", "stop", "schema", "regex", "choice", "grammar", "response_format", "thinking_token_budget"],
)
def test_columns_about_answers_are_refused_where_prompts_are_scored(model: Path, name: str) -> None:
    named = f"input.columns={{{name}: x}}"
    value = {"choice": ["a"], "stop": ["a"], "thinking_token_budget": 1, "max_new_tokens": 3, "n": 2}.get(name, "{}")
    with pytest.raises(InputError, match=rf"^column 'x' \({name}\) applies to answers, .* input.columns.{name}=null$"):
        opened(model, "prompt", "decode.score=prompts", named, x=value)
    opened(model, "prompt", "decode.score=prompts", x=value)


def test_a_column_of_nulls_or_empty_lists_asks_for_nothing(model: Path) -> None:
    """As CSV and JSON lines have them, with a type."""
    table = pa.table({"prompt": ["a"], "stop": pa.array([[]], pa.list_(pa.string())), "regex": pa.array([None], pa.string())})
    open_job(compose([f"model.path={model}", "decode.score=prompts"]), table_source(table))
    table = pa.table({"prompt_ids": [[5, 6]], "system": pa.array([None], pa.string())})
    open_job(compose([f"model.path={model}", "decode.max_new_tokens=4"]), table_source(table))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["output.push_private=false"], "output.push_private=false has no effect without output.push_to_hub"),
        (
            ["output.reasoning_in_messages=true", "output.messages=prompt"],
            "has no effect with output.messages=prompt, which leaves answers out",
        ),
        (["packing.pages=40", "packing.memory_gb=1"], "packing.pages=40 and packing.memory_gb=1.0 both set the number"),
        (["packing.expert_correlation=0.5"], "packing.expert_correlation=0.5 applies to experts (MoE)"),
        (["output.reasoning_in_messages=true"], "output.reasoning_in_messages=true needs think tokens"),
        (["draft=none", "draft.num_speculative_tokens=3"], "draft.num_speculative_tokens=3 is not used by draft=none"),
        (["draft=none", "draft.adaptive=false"], "draft.adaptive=false is not used by draft=none"),
        (["draft=none", "draft.lengths=fixed"], "draft.lengths=fixed is not used with draft=none"),
        (["draft.adaptive=false", "draft.lengths=fixed"], "draft.lengths=fixed is not used with draft.adaptive=false"),
        (["draft=tree", "draft.path=x", "draft.lengths=fixed"], "draft.lengths=fixed is not used with draft.tree.topk=10"),
        (
            ["draft=eagle3", "model.load_format=dummy", "ablation.sharded_draft=true"],
            "ablation.sharded_draft=true has no effect with cluster.tensor_parallel=1",
        ),
        (["decode.n=2"], "decode.n=2: decode.temperature=0 is greedy, which makes all completions of a row equal; choose"),
        (["decode.thinking_closing=so"], "decode.thinking_closing=so has no effect without a thinking budget"),
        (["input.chat=true", "input.template_kwargs={mod: glad}"], "it reads no variable 'mod', which template_kwargs sets"),
        (["input.chat=true", "input.template_kwargs={content: x}"], "it reads no variable 'content'"),
        (["input.chat=true", "input.template_date=2020-01-01"], "input.template_date=2020-01-01 has no effect: the chat"),
        (["input.chat=true", "input.template_kwargs={messages: []}"], "template_kwargs.messages would replace the messages"),
    ],
)
def test_a_key_without_effect_is_refused(model: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(model, "prompt", *words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.second
def test_several_completions_of_a_row_need_a_temperature_above_0(model: Path) -> None:
    opened(model, "prompt", "decode.n=2", "decode=sampled")
    opened(model, "prompt", "decode.n=2", temperature=0.5)
    opened(model, "prompt", n=1)
    opened(model, "prompt", "input.columns={n: null}", n=2)
    opened(model, "prompt", "decode.n=2", temperature=np.float16(0.5))
    for more in ({}, {"temperature": 0.0}, {"temperature": None}):
        with pytest.raises(InputError, match=r"^column 'n' .* decode.temperature=0 is greedy, .* input.columns.n=null$"):
            opened(model, "prompt", n=2, **more)
        with pytest.raises(ConfigError, match=r"^decode.n=2: .* choose decode=sampled, or remove decode.n$"):
            opened(model, "prompt", "decode.n=2", **more)


def test_an_unreadable_row_does_not_count_in_the_checks_of_columns(model: Path, tmp_path: Path) -> None:
    """It has no value in any column: neither a temperature above 0, nor a value without effect."""
    path, torn = tmp_path / "in.jsonl", '{"prompt": "Sa'
    words = [f"model.path={model}", f"input.path={path}", "decode.max_new_tokens=4", "draft=none", "model.dtype=float64"]
    path.write_text("\n".join(['{"prompt": "Say", "n": 2, "temperature": 0}', torn]))
    with pytest.raises(
        InputError, match=r"column 'n' \(n\) asks for several completions of a row: decode.temperature=0 is greedy"
    ):
        open_job(compose(words))
    path.write_text("\n".join(['{"prompt": "Say", "n": 2}', torn, '{"prompt": "Say", "n": 1}']))
    open_job(compose(words))
    path.write_text("\n".join(['{"prompt": "Say", "temperature": 0}', torn]))
    with pytest.raises(ConfigError, match=r"decode.n=2: decode.temperature=0 is greedy"):
        open_job(compose([*words, "decode.n=2"]))
    path.write_text("\n".join(['{"prompt_ids": [5, 6], "system": null}', torn]))
    open_job(compose(words))


def test_a_warm_engine_refuses_equal_completions_but_not_conversations_that_begin_alike(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"model.path": str(model), "model.max_len": 64, "decode.max_new_tokens": 2, "decode.n": 2, "model.dtype": "float64"}
    with batchspec.Engine(options) as engine:
        for call in (engine.generate, engine.stream):
            with pytest.raises(ConfigError, match=r"^decode.n=2: decode.temperature=0 is greedy"):
                call({"prompt": ["a"]})
        chats = {"messages": [[{"role": "user", "content": "a"}]]}
        assert engine.converse(chats, lambda turn: None)["sample_index"].to_list() == [0, 1]
        assert "completions at temperature 0" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^draft.adaptive=true uses times measured on a GPU"):
        batchspec.Engine({"model.path": str(model), "draft.adaptive": True})


def test_a_key_that_needs_a_gpu_is_accepted_for_a_job_on_another_machine(model: Path) -> None:
    source = table_source(pa.table({"prompt": ["a"]}))
    words = [f"model.path={model}", "decode.max_new_tokens=4", "draft.adaptive=true"]
    open_job(compose(words), source, on_this_machine=False)


def test_chats_of_token_ids_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"input\.chat=true applies to text"):
        opened(model, "prompt_ids", "input.chat=true")


def test_a_closing_is_written_for_budgets_of_rows(tmp_path: Path) -> None:
    folder = make_thinking_tokenizer(make_checkpoint(tmp_path, "llama", num_hidden_layers=1))
    job = opened(folder, "messages", "decode.thinking_closing=so", "output.reasoning_in_messages=true", thinking_token_budget=3)
    (request,) = job.admission.admit(next(iter(job.source.shards(1))))
    assert request.thinking.budget == 3  # type: ignore[union-attr]
    assert request.thinking.closing  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("input.path=other.parquet", "the call brings its own rows"),
        ("input.split=train", "the call brings its own rows"),
        ("output.push_to_hub=a/b", "nothing is written without output.dir"),
        ("resume=error", "nothing is written without output.dir"),
        ("cluster.workers=2", "it computes in its own process"),
        ("input.num_workers=1", "without output.dir it prepares rows in its own process"),
    ],
)
def test_generate_refuses_what_it_does_not_read(model: Path, word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^(input|output|resume|cluster)\.\w+=.* is not for batchspec.generate: {why}"):
        batchspec.generate(["a"], overrides=[f"model.path={model}", word])


def test_values_that_say_what_is_done_in_any_case_are_taken() -> None:
    assert refuse_unread(compose(["input.num_workers=0"]), [], {"input.num_workers": "why"}, "a call") == ["input.num_workers"]
    assert warm_config({"model.path": "m", "input.num_workers": 0, "cluster.workers": 1}) == warm_config({"model.path": "m"})


@pytest.mark.second
def test_a_recipe_of_the_users_may_need_the_keys_beside_it(tmp_path: Path) -> None:
    """Alone it has a drafter without a head, and only the caller says where Hydra finds it."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/mine.yaml").write_text("# @package _global_\ndefaults: [override /draft: eagle3]\ninput: {path: mine}\n")
    config = warm_config(["draft.path=head", "model.path=m"], job="mine", config_dir=tmp_path)
    assert (config.draft.name, config.draft.path, config.input.path) == ("eagle3", "head", None)
    assert config == warm_config([f"hydra.searchpath=[file://{tmp_path}]", "draft.path=head", "model.path=m"], job="mine")


def test_a_folder_of_recipes_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "my recipes, [new]"
    (folder / "job").mkdir(parents=True)
    (folder / "job/mine.yaml").write_text("# @package _global_\nmodel: {path: m}\n")
    assert warm_config([], job="mine", config_dir=folder).model.path == "m"


def test_what_a_recipe_needs_is_said_in_the_words_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a recipe of your own is FOLDER/job/mine.yaml with config_dir=FOLDER$"):
        Engine(job="mine", model={"path": "m"})
    with pytest.raises(ConfigError, match=r"^config_dir=\S+/nowhere is not a folder; correct the path$"):
        Engine(job="mine", config_dir=tmp_path / "nowhere")


@pytest.mark.parametrize("key", ["input.split", "input.num_workers", "cluster.watchdog_s"])
def test_a_warm_engine_refuses_what_it_does_not_read(key: str) -> None:
    value = "train" if key == "input.split" else 2
    with pytest.raises(ConfigError, match=rf"^{key}={value}.* is not for batchspec.Engine: "):
        warm_config({"model.path": "m", key: value})
    ranks = {"model.path": "m", "cluster.tensor_parallel": 2, "cluster.watchdog_s": 2}
    assert warm_config(ranks).cluster.watchdog_s == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_generate_on_a_cpu_refuses_a_job_for_gpus(model: Path) -> None:
    """The recipe's own input and output are not read, and not refused."""
    with pytest.raises(ConfigError, match="device=cuda: torch sees no GPU"):
        batchspec.generate(["a"], job="reasoning_8k", overrides=[f"model.path={model}", "model.max_len=null", "decode=greedy"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify out --files --rows 5", "--rows 5 is not read with --files"),
        ("verify out --files --kv", "--kv is not read with --files"),
        ("export out --to chat x.jsonl --drop seed", "--drop seed is read only with --from-openai"),
        ("export --from-openai x.jsonl x.parquet --status error", "--status error is read only with --to"),
        ("prompts x.parquet --from out --rows 5", "--rows 5 is read only with --open"),
        ("prompts x.parquet --open m --tasks t.txt", "--tasks t.txt is read only with --texts"),
    ],
)
def test_an_option_without_effect_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"batchspec: {said}")
    assert "; remove it; `batchspec " in line
