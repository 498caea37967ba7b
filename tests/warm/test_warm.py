"""The warm engine: many calls of one loaded model, each with the rows that a job of the same rows would write."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

import batchspec
from batchspec.checkpoint.files import LocalFiles
from batchspec.engine.loop.engine import Engine as BatchEngine
from batchspec.errors import CapacityError, CheckpointError, ConfigError, EngineInUse, InputError
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.process.own_process import finalize_here
from batchspec.warm.options import warm_config
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.models import make_checkpoint
from tests.helpers.runs import make_model
from tests.helpers.waiting_requests import count_waiting

pytestmark = pytest.mark.second

WORDS = ["model.dtype=float64", "decode.max_new_tokens=8", "output.token_ids=true", "packing.max_num_seqs=3", "model.max_len=96"]
OF_A_RUN = ["perf", "usage", "spec_decode"]
"""Columns that describe how a row was computed."""


def rows(count: int = 7) -> pl.DataFrame:
    """Greedy and drawn rows, one with two samples, one without a prompt, one that is too long; and a column of the user's."""
    table = [
        {
            "id": f"q{i}",
            "prompt": f"Say word{i} again",
            "temperature": 0.9 * (i % 2),
            "n": 1 + (i == 3),
            "seed": 7 if i == 5 else None,
        }
        for i in range(count)
    ]
    bad = [{"id": "null", "prompt": None}, {"id": "long", "prompt": "again and again " * 20}]
    return pl.DataFrame([*table, *bad], infer_schema_length=None).with_columns(topic=pl.lit("words"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("warm") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return make_checkpoint(tmp_path_factory.mktemp("other") / "model", "llama", dtype=torch.float64, seed=5)


@pytest.fixture(scope="module")
def words(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of every engine here: with a drafter that has weights."""
    design = tiny_design(judge_model(LocalFiles(model)))
    head = write_head(tmp_path_factory.mktemp("head"), design, random_tensors(design))
    return [f"model.path={model}", "draft=eagle3", f"draft.path={head}", *WORDS]


@pytest.fixture(scope="module")
def shared(words: list[str]) -> Iterator[batchspec.Engine]:
    """Tests that leave the weights alone share it: it must stand that."""
    with batchspec.Engine(words) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(words: list[str]) -> pl.DataFrame:
    return batchspec.generate(rows(), overrides=words)


def here(engine: batchspec.Engine) -> BatchEngine:
    """The engine that computes in this process."""
    assert engine._loaded is not None
    assert isinstance(engine._loaded.engine, BatchEngine)
    return engine._loaded.engine


def same(found: pl.DataFrame, wanted: pl.DataFrame) -> bool:
    assert found.columns == wanted.columns
    return found.drop(OF_A_RUN).equals(wanted.drop(OF_A_RUN))


@pytest.mark.smoke("a warm call")
def test_rows_are_those_of_a_job_in_every_column_call_after_call(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    assert (expected.height, (expected["status"] == "error").sum()) == (10, 2)
    first, second = shared.generate(rows()), shared.generate(rows().reverse())
    assert same(first, expected)
    by = ["request_id", "sample_index"]
    assert same(second.drop("row_index", "error").sort(by), expected.drop("row_index", "error").sort(by))
    assert second["request_id"].to_list() == first["request_id"].reverse().to_list()


def test_rows_may_be_any_table_or_dictionaries(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    for data in (rows().to_dicts(), rows().to_arrow(), rows().to_dict(as_series=False)):
        assert same(shared.generate(data), expected)
    table = shared(rows().to_arrow())
    assert isinstance(table, pa.Table)
    assert same(pl.DataFrame(table), expected)


def test_prompts_may_be_chats_or_token_ids(shared: batchspec.Engine, words: list[str]) -> None:
    chats = [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a sea."}]},
        {"messages": [{"role": "user", "content": "Name a river."}]},
    ]
    ids = {"prompt_ids": [[5, 6, 7], [9]], "max_new_tokens": [3, 4]}
    for data in (chats, ids):
        assert same(shared.generate(data), batchspec.generate(data, overrides=words))


def test_a_list_of_texts_is_the_column_prompt(shared: batchspec.Engine) -> None:
    texts = ["Say word1 again", "Say word2 again"]
    assert same(shared.generate(texts), shared.generate({"prompt": texts}))
    with pytest.raises(InputError, match=r"rows are one text; give a list of texts"):
        shared.generate(texts[0])


def test_a_list_of_texts_may_hold_none(shared: batchspec.Engine) -> None:
    with_gap = shared.generate(["ab ba", None, ""])
    assert with_gap["status"].to_list()[1:] == ["error", "error"]
    assert [error["code"] for error in with_gap["error"].to_list()[1:]] == ["null_prompt", "empty_prompt"]
    assert with_gap["token_ids"].to_list()[0] == shared.generate(["ab ba"])["token_ids"].to_list()[0]


def test_a_column_with_a_name_of_vllm_is_reported_once(shared: batchspec.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        shared.generate([{"prompt": "ab", "max_tokens": 2}])
    said = "batchspec: column 'max_tokens' has no effect: batchspec's name is 'max_new_tokens'; map it, "
    assert capsys.readouterr().err.count(said) == 1


def test_dictionaries_may_hold_objects_as_json_lines_do(shared: batchspec.Engine) -> None:
    schema = {"type": "object", "properties": {"sea": {"const": None}}, "required": ["sea"]}
    form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": schema}}
    parts = [{"type": "text", "text": "Name a "}, {"type": "text", "text": "sea."}]
    given: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Name a sea."}], "response_format": form, "max_new_tokens": 40},
        {"messages": [{"role": "user", "content": parts}], "stop": "e", "about": {"topic": "seas", "by": None}},
        {"messages": [{"role": "user", "content": "Name a \nsea."}], "stop": ["e"], "logit_bias": {7: -100}, "about": 3},
    ]
    found = shared.generate(given)
    assert found["error"].to_list() == [None] * 3
    assert json.loads(found["completion"][0]) == {"sea": None}
    assert found["prompt_ids"][1].to_list() == found["prompt_ids"][2].to_list()
    assert found["about"].to_list() == [None, '{"topic":"seas","by":null}', "3"]
    seen: list[Any] = []
    shared.converse(given, lambda turn: seen.append(turn.row))
    assert {row["max_new_tokens"] for row in seen} == {40, None}
    for name in ("messages", "response_format", "stop", "about"):
        for row in given:
            assert any(turn.get(name) == row.get(name) for turn in seen), name


def test_requests_are_prefetched_as_in_a_job(shared: batchspec.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_waiting(monkeypatch)
    shared.generate(rows())
    assert max(taken) > 1


def test_prefixes_are_kept_between_calls(shared: batchspec.Engine) -> None:
    data = [{"prompt": "The quick brown fox jumps over the lazy dog and sleeps on"}]
    cached = [shared.generate(data)["usage"].struct.field("cached_tokens")[0] for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] >= 16


def test_a_table_of_bad_rows_alone_gives_their_errors(shared: batchspec.Engine) -> None:
    assert shared.generate(rows().filter(id="null"))["status"].to_list() == ["error"]


def test_a_table_without_rows_gives_the_same_columns(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    assert shared.generate(rows().clear()).schema == expected.schema
    assert list(shared.stream(rows().clear())) == []
    chats = pl.DataFrame({"messages": [[{"role": "user", "content": "a"}]]})
    assert shared.converse(chats.clear(), lambda turn: None).columns == shared.converse(chats, lambda turn: None).columns
    assert shared.generate([]).schema == shared.generate(["a"]).schema
    with pytest.raises(InputError, match="no rows and no columns"):
        shared.generate({})


def test_a_table_that_no_job_accepts_is_refused_and_the_engine_keeps_running(
    shared: batchspec.Engine, expected: pl.DataFrame
) -> None:
    for data, message in (
        ({"question": ["a"]}, r'name one, e\.g\. \{"input\.columns\.prompt": "question"\}'),
        ({"id": ["a", "a"], "prompt": ["b", "c"]}, "ids must be unique"),
        (7, "give a table or a list of dictionaries"),
    ):
        for call in (shared.generate, shared.stream):
            with pytest.raises(InputError, match=message):
                call(data)
    assert same(shared.generate(rows()), expected)


def test_a_stream_gives_each_completion_as_it_ends(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    found = {(done.request_id, done.sample_index): done for done in shared.stream(rows())}
    assert len(found) == expected.height
    assert {name for name, _ in list(found)[:3]} >= {"null", "long"}, "bad rows do not wait for good ones"
    for name, sample, status, ids in expected.select("request_id", "sample_index", "status", "token_ids").iter_rows():
        done = found[name, sample]
        assert done.status == status
        assert ids == (None if done.token_ids is None else done.token_ids.tolist())


def test_a_stream_computes_only_what_is_asked_for_and_frees_the_engine_when_it_is_closed(
    shared: batchspec.Engine, expected: pl.DataFrame
) -> None:
    with shared.stream(rows(40)) as stream:
        next(stream)
        for call in (lambda: shared.generate(rows()), lambda: next(shared.stream(rows())), lambda: shared.load_weights({})):
            with pytest.raises(EngineInUse, match="one call at a time"):
                call()
    assert list(stream) == []
    assert same(shared.generate(rows()), expected)
    for _ in shared.stream(rows()):
        break
    assert same(shared.generate(rows()), expected), "a loop that was left gives up its stream"


def test_another_thread_is_refused_while_a_call_runs(shared: batchspec.Engine) -> None:
    said: list[str] = []

    def meanwhile(turn: Any) -> None:  # called in a thread of its own while the engine decodes
        try:
            shared.generate(rows())
        except EngineInUse as error:
            said.append(str(error))

    shared.converse([{"messages": [{"role": "user", "content": "Name a sea."}]}], meanwhile)
    assert len(said) == 1
    assert "one call at a time" in said[0]


def test_an_asynchronous_loop_has_the_same_completions(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    async def collect() -> list[str]:
        return [done.request_id async for done in shared.stream(rows())]

    assert sorted(asyncio.run(collect())) == sorted(expected["request_id"])


def test_a_cancelled_task_gives_up_its_rows_within_a_round(shared: batchspec.Engine, expected: pl.DataFrame) -> None:
    """All rows begin together: the next completion would come after more than 60 rounds."""
    rounds = []

    async def long() -> None:
        async for _ in shared.stream({"prompt_ids": [[5], [6], [7]], "max_new_tokens": [90] * 3}):
            pass

    async def cancelled() -> None:
        task, begun = asyncio.create_task(long()), shared.totals.rounds
        while shared.totals.rounds < begun + 3:
            await asyncio.sleep(0.001)
        rounds.append(shared.totals.rounds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rounds.append(shared.totals.rounds)

    asyncio.run(cancelled())
    assert rounds[1] - rounds[0] < 30
    assert same(shared.generate(rows()), expected)


def test_memory_that_runs_out_ends_the_call_and_not_the_engine(
    shared: batchspec.Engine, expected: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Target, "logits", full)
        with pytest.raises(CapacityError, match=r"out of memory with 3 slots.*packing.max_num_seqs"):
            shared.generate(rows())
    assert same(shared.generate(rows()), expected)


def test_the_shape_is_that_of_the_keys_and_not_of_the_rows(shared: batchspec.Engine) -> None:
    assert (shared.shape.num_slots, shared.shape.max_len) == (3, 96)
    long = shared.generate({"prompt_ids": [[5] * 88, [5] * 89]})
    assert long["status"].to_list() == ["truncated", "error"]
    assert "exceed model.max_len=96" in long["error"].struct.field("message")[1]


def test_closing_frees_the_weights_and_pages_and_ends_what_is_open(model: Path) -> None:
    engine = batchspec.Engine({"model.path": str(model), "decode": {"max_new_tokens": 4}, "packing.max_num_seqs": 2})
    stream = engine.stream(rows())
    next(stream)
    loaded = here(engine)
    held: list[weakref.ref[Any]] = [weakref.ref(loaded.executor), weakref.ref(loaded.target)]
    del loaded
    engine.close()
    engine.close()
    assert [item() for item in held] == [None, None]
    assert list(stream) == []
    with pytest.raises(EngineInUse, match="closed"):
        engine.generate(rows())


def test_closing_ends_a_call_of_another_thread_with_an_error(model: Path) -> None:
    engine = batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 60, "packing.max_num_seqs": 2})
    ended: list[str] = []

    def call() -> None:
        try:
            engine.generate({"prompt": ["The quick brown fox"] * 200})
        except EngineInUse as error:
            ended.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not engine.totals.rounds:
        thread.join(0.01)
    engine.close()
    thread.join()
    assert len(ended) == 1
    assert "given up before its end" in ended[0]


@pytest.mark.parametrize("form", ["folder", "tensors"])
def test_swapped_weights_are_those_of_the_other_model_and_back(form: str, words: list[str], model: Path, other: Path) -> None:
    def source(folder: Path) -> Any:
        return folder if form == "folder" else load_file(folder / "model.safetensors")

    prompts = rows(3).with_columns(prompt=pl.col("prompt") + " and again and again")
    with batchspec.Engine(words) as engine:
        before = engine.generate(prompts)
        engine.load_weights(source(other))
        swapped = engine.generate(prompts)
        engine.load_weights(source(model))
        assert same(engine.generate(prompts), before)
    (make_model(other.parent / "whole") / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    plain = [f"model.path={other.parent / 'whole'}", *WORDS]
    assert same(swapped, batchspec.generate(prompts, overrides=plain))
    assert not same(swapped, before)


def test_scales_of_fp8_keys_and_values_are_those_of_the_new_weights(words: list[str], model: Path, other: Path) -> None:
    fp8 = [*words, "cache.dtype=fp8", "draft=none", "draft.path=null"]
    tensors = {
        name: 9 * tensor if "v_proj" in name else tensor for name, tensor in load_file(other / "model.safetensors").items()
    }
    with batchspec.Engine(fp8) as engine:
        before = here(engine).target.all_kv_scales
        engine.load_weights(tensors)
        after, swapped = here(engine).target.all_kv_scales, engine.generate(rows())
        engine.load_weights(model)
        assert before is not None
        assert after is not None
        assert not torch.equal(before, after)
        back = here(engine).target.all_kv_scales
        assert back is not None
        assert torch.equal(back, before)
        assert not same(engine.generate(rows()), swapped)


def test_weights_of_another_model_are_refused_before_anything_changes(
    shared: batchspec.Engine, expected: pl.DataFrame, model: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "theta", "llama", dtype=torch.float64, rope_theta=77.0)
    with pytest.raises(CheckpointError, match=r"config.json differs from that of model.path=.* in layers, rope"):
        shared.load_weights(other)
    tensors = load_file(model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing tensors: model\.norm\.weight"):
        shared.load_weights({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"})
    with pytest.raises(CheckpointError, match="load_weights=/nowhere"):
        shared.load_weights("/nowhere")
    assert same(shared.generate(rows()), expected)


def test_weights_that_are_half_loaded_answer_nothing(words: list[str], other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the disk is gone")

    with batchspec.Engine(words) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Target, "rewrite", fails)
            with pytest.raises(OSError, match="disk"):
                engine.load_weights(other)
        with pytest.raises(EngineInUse, match="weights are of two models"):
            engine.generate(rows())
        engine.load_weights(other)
        assert engine.generate(rows()).height == 10


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("input.path=a.parquet", "each call brings its own rows"),
        ("output.dir=out", "returns its rows and writes nothing"),
        ("resume=error", "nothing is stored"),
        ("cluster.workers=2", "one copy of the model"),
        ("input.max_error_fraction=0.1", "error rows come back as rows"),
    ],
)
def test_keys_that_a_call_has_no_use_for_are_refused(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"is not for batchspec.Engine: .*{message}.*; remove the key") as refused:
        warm_config(["model.path=model", option])
    assert "\n" not in str(refused.value)


TAKEN_BY_ENGINE = "which batchspec.Engine takes for all rows"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda engine: engine.generate(["a"], max_tokens=5),
            "max_tokens is not an argument of Engine.generate: it is the key decode.max_new_tokens, "
            f"{TAKEN_BY_ENGINE}; a value for each row is the column 'max_new_tokens'",
        ),
        (
            lambda engine: engine.stream(["a"], stop_token_ids=[3]),
            f"stop_token_ids is not an argument of Engine.stream: it is the key decode.stop_ids, {TAKEN_BY_ENGINE}",
        ),
        (
            lambda engine: engine.converse(["a"], lambda turn: None, temperature=0.5),
            "temperature is not an argument of Engine.converse: it is the key decode.temperature, "
            f"{TAKEN_BY_ENGINE}; a value for each row is the column 'temperature'",
        ),
        (
            lambda engine: engine.generate(["a"], response_format={}),
            "response_format is not an argument of Engine.generate: choose decode.schema, decode.regex, decode.choice or "
            "decode.grammar, or fill the column response_format; a value for each row is the column 'response_format'",
        ),
        (
            lambda engine: engine.generate(["a"], skip_special_tokens=False),
            "skip_special_tokens is not an argument of Engine.generate: `completion` holds no special tokens; "
            "output.token_ids=true writes all tokens",
        ),
        (
            lambda engine: engine.generate(prompts=["a"]),
            "prompts is not an argument of Engine.generate: rows are its first argument, `data`",
        ),
        (
            lambda engine: engine.generate(["a"], sampling_params={"n": 2}),
            "sampling_params is not an argument of Engine.generate: its parameters are keys under `decode`, which "
            "batchspec.Engine takes",
        ),
        (
            lambda engine: engine.generate(["a"], model="smollm2-135m"),
            "model is not an argument of Engine.generate: the model is the key model.path, which batchspec.Engine takes",
        ),
        (
            lambda engine: engine.generate(["a"], {"n": 2}),
            "Engine.generate: too many positional arguments; it takes data, task, and batchspec.Engine takes the keys of a job",
        ),
        (
            lambda engine: engine.converse(["a"], lambda turn: None, thread=4),
            "thread is not an argument of Engine.converse, which takes data, next_turn, threads; batchspec.Engine takes the keys "
            "of a job: did you mean threads?",
        ),
        (
            lambda engine: batchspec.generate(["a"], max_completion_tokens=5),
            "max_completion_tokens is not an argument of batchspec.generate: it is the key decode.max_new_tokens, which "
            "overrides={...} takes for all rows; a value for each row is the column 'max_new_tokens'",
        ),
        (
            lambda engine: batchspec.Engine(max_tokens=5),
            "max_tokens is not an argument of batchspec.Engine: it is the key decode.max_new_tokens, which "
            "batchspec.Engine takes for all rows; a value for each row is the column 'max_new_tokens'",
        ),
    ],
)
def test_an_argument_of_vllm_is_answered_with_the_key_or_column_that_is_meant(
    call: Callable[[Any], object], message: str, shared: batchspec.Engine
) -> None:
    with pytest.raises(ConfigError) as refused:
        call(shared)
    assert str(refused.value) == message


def test_an_error_of_types_inside_a_call_stays_itself(shared: batchspec.Engine) -> None:
    with pytest.raises(TypeError, match="next_turn returned int"):
        shared.converse({"messages": [[{"role": "user", "content": "a"}]]}, lambda turn: 3)  # type: ignore[arg-type, return-value]


def test_every_call_takes_overrides_as_a_list_a_dictionary_or_keywords(model: Path) -> None:
    keys: dict[str, Any] = {"model.path": str(model), "decode.max_new_tokens": 2, "model.max_len": 64, "draft": "none"}
    texts = [f"{key}={value}" for key, value in keys.items()]
    groups: dict[str, Any] = {"model": {"path": str(model), "max_len": 64}, "decode": {"max_new_tokens": 2}, "draft": "none"}
    expected = batchspec.generate(["a b"], overrides=texts)
    assert batchspec.generate(["a b"], overrides=keys)["completion"].equals(expected["completion"])
    assert batchspec.generate(["a b"], **groups)["completion"].equals(expected["completion"])
    for engine in (batchspec.Engine(texts), batchspec.Engine(keys), batchspec.Engine(**keys), batchspec.Engine(**groups)):
        with engine:
            assert engine.generate(["a b"])["completion"].equals(expected["completion"])


def test_an_engine_says_what_it_is(model: Path) -> None:
    keys = {"model.path": str(model), "model.max_len": 64, "decode.max_new_tokens": 8, "packing.max_num_seqs": 3}
    engine = batchspec.Engine({**keys, "draft": "none"})
    facts = f"<batchspec.Engine model={str(model)!r}, dtype=float64, device=cpu, "
    assert repr(engine) == f"{facts}draft=none, slots=3, max_len=64>"
    engine.close()
    assert repr(engine) == f"{facts}closed>"


def test_options_are_overrides_or_a_dictionary_nested_or_dotted() -> None:
    texts = warm_config(["model.path=it's a path", "draft=lookup", "decode.n=2", "decode.stop=[a,b]"])
    assert (texts.model.path, texts.decode.n, texts.decode.stop) == ("it's a path", 2, ["a", "b"])
    made = warm_config(
        {
            "model": {"path": "it's a path"}, "draft": "lookup", "decode.n": 2, "decode.stop": ["a, b", "null", "it's"],
            "input.columns": {"prompt": "my q", "system": None}, "packing": {"max_num_seqs": None}, "output.token_ids": True,
        }
    )
    assert made.model.path == "it's a path"
    assert (made.decode.n, made.decode.stop) == (2, ["a, b", "null", "it's"])
    assert made.input.columns == {"prompt": "my q", "system": None}
    assert made.output.token_ids is True
    with pytest.raises(ConfigError, match="is one text"):
        warm_config("model.path=x")
    with pytest.raises(ConfigError, match=r"^3 is neither a list of overrides nor a dictionary of keys"):
        warm_config(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^\{'n': 2\} is not an override; write a list of texts"):
        warm_config([{"n": 2}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"model\.paht"):
        warm_config({"model.paht": "x"})


def test_a_recipe_gives_its_keys_without_its_input_and_output() -> None:
    config = warm_config(["decode.max_new_tokens=7"], job="demo")
    assert (config.decode.max_new_tokens, config.input.path, config.output.dir) == (7, None, None)
    assert config.draft.name == "eagle3"


def test_calls_bring_penalties_and_biases_of_their_own(shared: batchspec.Engine, words: list[str]) -> None:
    """The engine was made without any."""
    table = rows(6).with_columns(
        frequency_penalty=pl.Series([1.5, None, None, 0.5, None, 0.0, 2.0, None]),
        logit_bias=pl.Series([None, '{"5": 100}', None, '{"5": -100, "7": 2.5}', None, "{}", '{"5": 101}', None]),
    )
    plain = shared.generate(rows(6))
    found = shared.generate(table)
    assert same(found, batchspec.generate(table, overrides=words))
    assert found["token_ids"].to_list()[1] == [5] * 8
    changed = [a != b for a, b in zip(found["token_ids"].to_list(), plain["token_ids"].to_list(), strict=True)]
    assert changed[2] is False
    assert shared.generate(rows(6))["token_ids"].to_list() == plain["token_ids"].to_list()


@pytest.mark.parametrize(
    ("keys", "rows", "said"),
    [
        ({}, {"text": ["a"]}, 'name one, e.g. {"input.columns.prompt": "text"}'),
        ({"decode.n": 2, "decode.max_new_tokens": 4}, {"prompt": ["a"]}, 'choose {"decode": "sampled"}, or remove decode.n'),
        ({"model.path": None}, {"prompt": ["a"]}, 'job="demo" is a job that has everything'),
        ({}, {"prompt": ["a", "b"], "id": ["1", "1"]}, 'set {"input.columns.id": None} to number the rows'),
        ({"input.path": "x.parquet"}, {"prompt": ["a"]}, "^input.path=x.parquet is not for .*, such as polars.read_parquet"),
    ],
)
def test_errors_of_a_call_advise_keys_as_python_writes_them(
    model: Path, keys: dict[str, Any], rows: dict[str, list[str]], said: str
) -> None:
    with pytest.raises((ConfigError, InputError), match=said if said.startswith("^") else re.escape(said)):
        batchspec.generate(rows, overrides={"model.path": str(model), "draft": "none"} | keys)
    with pytest.raises(ConfigError, match=re.escape("give a dictionary of keys, {'model.path': 'smollm2-135m'}")):
        batchspec.Engine("smollm2-135m")


def in_fork(act: Callable[[], object]) -> str:
    """What a process that is forked from this one says about an action: the exception's type and message, or "done"."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        said = "done"
        try:
            act()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return said


CALLS: dict[str, Callable[[batchspec.Engine], object]] = {
    "generate": lambda engine: engine.generate(["a"]), "stream": lambda engine: engine.stream(["a"]),
    "converse": lambda engine: engine.converse({"messages": []}, lambda turn: None), "shape": lambda engine: engine.shape,
    "load_weights": lambda engine: engine.load_weights({}), "totals": lambda engine: engine.totals,
    "__call__": lambda engine: engine(pa.table({"prompt": ["a"]})),
}
NO_CALLS = {"__init__", "__repr__", "__reduce__", "__enter__", "__exit__", "close"}


def test_every_call_in_a_forked_process_is_refused_at_once_and_the_engine_lives_on(
    shared: batchspec.Engine, expected: pl.DataFrame
) -> None:
    """A fork has none of the threads that polars and torch wait for: datasets' map with num_proc would wait for ever."""
    own = {name for name, value in vars(batchspec.Engine).items() if callable(value) or isinstance(value, property)}
    assert {name for name in own if not name.startswith("_") or name.startswith("__")} == CALLS.keys() | NO_CALLS
    for name, call in CALLS.items():
        said = in_fork(lambda call=call: call(shared))  # type: ignore[misc]
        assert said.startswith(f"EngineInUse: this engine belongs to process {os.getpid()}, from which this one, "), name
    assert in_fork(lambda: repr(shared)) == in_fork(shared.close) == in_fork(lambda: shared.__exit__(None, None, None)) == "done"
    assert same(shared.generate(rows()), expected)


def test_an_open_stream_goes_on_after_a_fork_tried_to_read_or_close_it(shared: batchspec.Engine) -> None:
    with shared.stream(["a", "b", "c"]) as stream:
        first = next(stream)
        assert in_fork(lambda: next(stream)).startswith(f"EngineInUse: this stream belongs to process {os.getpid()}, ")
        assert in_fork(stream.close) == in_fork(shared.close) == "done"
        assert sorted(done.row_index for done in (first, *stream)) == [0, 1, 2]
    assert shared.generate(["a"]).height == 1


def test_what_ends_with_its_owner_does_not_end_with_a_fork_s_copy_of_it() -> None:
    class Owner:
        pass

    ended = list[int]()
    owner = Owner()
    finalize_here(owner, lambda: ended.append(os.getpid()))

    def drop() -> None:
        nonlocal owner
        del owner
        assert not ended

    assert in_fork(drop) == "done"
    del owner
    assert ended == [os.getpid()]


def test_whatever_ends_with_its_owner_is_kept_from_forks() -> None:
    files = Path(batchspec.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "weakref.finalize(" in file.read_text()] == ["own_process.py"]


@pytest.mark.parametrize("error", [
    ValueError("row 3 is broken"), KeyboardInterrupt(), RuntimeError("CUDA out of memory"), MemoryError(), StopAsyncIteration(),
    InputError("decode.n=2 is too many; set decode.n=1"), GeneratorExit(),
])
def test_an_exception_of_the_rows_generator_reaches_the_caller_as_it_is(error: BaseException, shared: batchspec.Engine) -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        raise error from LookupError("the reason")

    batches = pa.RecordBatchReader.from_batches(
        pa.schema([("prompt", pa.string())]), (pa.record_batch({"prompt": [text]}) for text in prompts())
    )
    calls: list[Callable[[], object]] = [
        lambda: shared.generate(prompts()), lambda: shared.stream(prompts()), lambda: shared.generate({"prompt": prompts()}),
        lambda: shared.converse(prompts(), lambda turn: None),
    ]
    if isinstance(error, Exception):
        calls.append(lambda: shared.generate(batches))
    for call in calls:
        with pytest.raises(type(error)) as raised:
            call()
        assert raised.value is error
        assert str(error.__cause__) == "the reason"
        assert any(entry.name == "prompts" for entry in raised.traceback)
    assert shared.generate(text for text in ("a", "b"))["status"].to_list() == ["truncated", "truncated"]
