"""The task of a call: a warm engine scores, reranks and embeds with the weights that it decodes with."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import batchspec
from batchspec.errors import CapacityError, ConfigError, EngineInUse
from batchspec.model.target import Target
from tests.helpers.models import make_checkpoint, make_classifier, make_thinking_tokenizer

pytestmark = pytest.mark.second
PAIRS = {"query": ["a river", "a sea"], "document": ["the Seine", "the fox"]}
TEXTS = {"prompt": ["Say word1 word2.", "Another prompt."]}
CHOICES = {"decode.score": "choices", "decode.choice": ["yes", "no"]}


def made(folder: Path, seed: int = 0) -> Path:
    model = make_checkpoint(folder, "qwen3", max_position_embeddings=1024, seed=seed)
    return make_thinking_tokenizer(model, more=("yes", "no"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("model"))


def same(found: pl.DataFrame, expected: pl.DataFrame, column: str) -> None:
    cells = {"choice_probs": pl.col("choice_probs").list.eval(pl.element().struct.field("prob"))}.get(column, pl.col(column))
    one, other = (frame.select(cells.alias("x"))["x"].to_list() for frame in (found, expected))
    assert found.columns == expected.columns
    for cell, wanted in zip(one, other, strict=True):
        assert wanted is not None
        np.testing.assert_allclose(cell, wanted, atol=1e-4)


CALLS: list[tuple[Any, dict[str, list[str]], str]] = [
    ("rerank", PAIRS, "score"), ("embed", TEXTS, "embedding"), ({"task": "embed", "output.embedding_dim": 8}, TEXTS, "embedding"),
    (CHOICES, TEXTS, "choice_probs"), ({"decode.score": "prompts"}, TEXTS, "prompt_logprob_sum"), ("rerank", PAIRS, "score"),
]


def test_calls_of_several_tasks_have_the_values_of_engines_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the weights are loaded once; between them answers stay what they were, also with a drafter."""
    keys = {"model.path": str(model), "decode.max_new_tokens": 8, "draft": "lookup", "decode.temperature": 0.5, "decode.n": 2}
    alone = [
        batchspec.generate(rows, overrides={"model.path": str(model), **({"task": task} if isinstance(task, str) else task)})
        for task, rows, _ in CALLS
    ]
    rows = {"id": ["a", "b"], **TEXTS}
    with batchspec.Engine(keys) as engine:
        answers = engine.generate(rows)["completion"].to_list()
        loads: list[object] = []
        monkeypatch.setattr(Target, "load", lambda *rest, **named: loads.append(rest))
        for (task, data, column), expected in zip(CALLS, alone, strict=True):
            for _ in range(2):
                same(engine.generate(data, task=task), expected, column)
            assert engine.generate(rows)["completion"].to_list() == answers
        assert engine.generate(pl.DataFrame(PAIRS).head(0), task="rerank").schema == alone[0].schema
        assert not loads
        assert engine.generate(rows, task="generate")["completion"].to_list() == answers


def test_new_weights_are_those_of_every_task(model: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", seed=7)
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 2}) as engine:
        before = engine.generate(PAIRS, task="rerank")
        engine.load_weights(other)
        after = engine.generate(PAIRS, task="rerank")
    assert not np.allclose(before["score"], after["score"], atol=1e-3)
    same(after, batchspec.generate(PAIRS, overrides={"model.path": str(other), "task": "rerank"}), "score")


def test_weights_that_another_thread_loads_while_a_call_begins_are_not_mixed_with_older_keys_and_values(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefixes that the other task kept are of the weights before."""
    other = made(tmp_path / "other", seed=7)
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 2}) as engine:
        engine.generate(PAIRS, task="rerank")
        call = engine._call

        def late(*rest: Any, **named: Any) -> Any:
            engine.load_weights(other)
            return call(*rest, **named)

        monkeypatch.setattr(engine, "_call", late)
        with pytest.raises(EngineInUse, match="another thread changed the weights or the task while this call began"):
            engine.generate(PAIRS, task="rerank")
        assert engine.generate(TEXTS).height == 2, "a call of the engine's own task needs no pages but its own"
        monkeypatch.undo()
        found = engine.generate(PAIRS, task="rerank")
    same(found, batchspec.generate(PAIRS, overrides={"model.path": str(other), "task": "rerank"}), "score")


def test_an_engine_for_chats_reranks(model: Path) -> None:
    """The template of the task takes the place of the engine's chats, whose keys a call cannot give."""
    expected = batchspec.generate(PAIRS, overrides={"model.path": str(model), "task": "rerank"})
    keys: dict[str, Any] = {"model.path": str(model), "decode.max_new_tokens": 2}
    for more in (
        {"input.chat": True, "input.system": "Be brief."}, {"input.prompt": "Say {{ word }}"},
        {"input.columns.messages": "chat", "input.columns.system": "rules"},
    ):
        with batchspec.Engine({**keys, **more}) as engine:
            same(engine.generate(PAIRS, task="rerank"), expected, "score")


def test_a_task_is_dropped_with_the_engine_and_with_the_next_one(model: Path) -> None:
    """Its K/V pages are memory that the next one needs."""
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 2}) as engine:
        engine.generate(PAIRS, task="rerank")
        assert engine._other is not None
        pages = weakref.ref(engine._other[1].loaded.engine)
        engine.generate(TEXTS, task="embed")
        gc.collect()
        assert pages() is None
    with pytest.raises(EngineInUse, match="this engine is closed"):
        engine.generate(TEXTS, task="embed")
    assert engine._other is None


def test_one_call_at_a_time_whatever_its_task(model: Path) -> None:
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 9}) as engine:
        stream = engine.stream(TEXTS)
        next(iter(stream))
        with pytest.raises(EngineInUse, match="a call is running or a stream is open"):
            engine.generate(TEXTS, task="embed")
        stream.close()
        assert engine.generate(TEXTS, task="embed").height == 2


@pytest.mark.parametrize(("task", "said"), [
    ("reward", "task=reward needs a score matrix (...ForSequenceClassification), and model.path="),
    ("rewards", "task=rewards must be one of auto, generate, reward"),
    ({"task": "embed", "decode.temperature": 1}, "decode.temperature is no key of a call's task, whose keys are task, "),
    ({"task": "embed", "model.path": "x"}, "model.path is no key of a call's task"),
    ({"task": "embed", "output.embedding_dim": 65}, "output.embedding_dim=65 exceeds the model's 64"),
    ({"decode.score": "choices"}, "decode.score=choices needs the texts to score"),
])
def test_what_a_call_cannot_do_is_refused_by_name_and_the_engine_goes_on(model: Path, task: Any, said: str) -> None:
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 2}) as engine:
        with pytest.raises(ConfigError, match=re.escape(said)):
            engine.generate(TEXTS, task=task)
        assert engine.generate(TEXTS).height == 2


def test_an_engine_of_another_task_serves_what_its_weights_allow(model: Path, tmp_path: Path) -> None:
    with batchspec.Engine({"model.path": str(model), "task": "rerank"}) as engine:
        expected = batchspec.generate(TEXTS, overrides={"model.path": str(model), "task": "embed"})
        same(engine.generate(TEXTS, task="embed"), expected, "embedding")
        with pytest.raises(ConfigError, match=r"decode\.score=none of a call is not supported: rounds are prepared when"):
            engine.generate(TEXTS, task="generate")
    with batchspec.Engine({"model.path": str(model), "task": "embed"}) as engine:
        said = "task=rerank needs an output matrix, which the engine did not load, because task=embed does not read it"
        with pytest.raises(ConfigError, match=said):
            engine.generate(PAIRS, task="rerank")
    judge = make_thinking_tokenizer(make_classifier(tmp_path / "judge", "qwen3", {0: "good"}))
    with batchspec.Engine({"model.path": str(judge)}) as engine:
        expected = batchspec.generate(TEXTS, overrides={"model.path": str(judge), "task": "embed"})
        same(engine.generate(TEXTS, task="embed"), expected, "embedding")


def test_memory_that_is_missing_is_that_of_the_other_task(model: Path) -> None:
    with batchspec.Engine({"model.path": str(model), "decode.max_new_tokens": 2, "packing.pages": 100}) as engine:
        assert engine.generate(TEXTS, task="embed").height == 2
        engine._open_model.config.packing.pages = 2
        with pytest.raises(CapacityError, match=r"task=rerank beside the engine's own batch: packing.pages=2 gives 2 K/V pages"):
            engine.generate(PAIRS, task="rerank")
