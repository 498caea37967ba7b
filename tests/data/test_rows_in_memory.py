"""What calls from Python take as rows besides tables and dictionaries: objects that make a table, chats, and an empty list."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
import torch

import batchspec
from batchspec.data.dataset.in_memory import table_of
from batchspec.errors import InputError
from tests.helpers.models import CHAT_TEMPLATE, make_checkpoint, make_tokenizer

TABLE = pl.DataFrame({"prompt": ["a", "b"], "topic": ["x", None]})
USER = {"role": "user", "content": "Name a sea."}
CHATS = [[USER], [{"role": "system", "content": "Be brief."}, USER]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64, num_hidden_layers=1)
    return make_tokenizer(folder, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def keys(model: Path) -> dict[str, Any]:
    return {"model.path": str(model), "model.max_len": 128, "decode.max_new_tokens": 2, "draft": "none"}


class Made:
    """An object of another library that is a table by one of the usual methods, and no list."""

    def __init__(self, method: str, make: Callable[..., Any]) -> None:
        setattr(type(self), method, lambda self, *_, **__: make())


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("to_polars", lambda: TABLE),  # datasets.Dataset, Ibis
        ("to_arrow", TABLE.to_arrow),  # cuDF, DuckDB
        ("__arrow_c_stream__", lambda: TABLE.__arrow_c_stream__()),
    ],
)
def test_an_object_that_makes_a_table_is_one(method: str, make: Callable[..., Any]) -> None:
    other = type("Other", (Made,), {})(method, make)
    assert pl.DataFrame(table_of(other)).equals(TABLE)


def test_a_lazy_frame_is_collected() -> None:
    assert table_of(TABLE.lazy().filter(prompt="a")).num_rows == 1


@pytest.mark.second
def test_a_list_of_chats_is_the_column_messages(keys: dict[str, Any]) -> None:
    with batchspec.Engine(keys) as engine:
        found = engine.generate([*CHATS, None])
        assert found["completion"].equals(engine.generate([{"messages": chat} for chat in [*CHATS, None]])["completion"])
        assert [error and error["code"] for error in found["error"].to_list()] == [None, None, "null_prompt"]
        assert [[turn["role"] for turn in chat] for chat in found["messages"].to_list()[:2]] == [
            ["user", "assistant"], ["system", "user", "assistant"]
        ]
        with pytest.raises(InputError, match=r"^the rows are messages, not chats; .* in Python rows may be a list of chats"):
            engine.generate(CHATS[1])


@pytest.mark.second
def test_an_empty_list_gives_the_columns_of_an_output(keys: dict[str, Any]) -> None:
    one = batchspec.generate(["a"], overrides=keys)
    none = batchspec.generate([], overrides=keys)
    assert (none.schema, none.height) == (one.schema, 0)
    mapped = batchspec.generate([], overrides={**keys, "input.columns": {"prompt": "question"}})
    assert mapped.columns == [name if name != "prompt" else "question" for name in one.columns]
    assert batchspec.generate(TABLE.clear(), overrides=keys).columns == batchspec.generate(TABLE, overrides=keys).columns
    assert pl.concat([one, none]).height == 1
    templated = {**keys, "input.prompt": "{{ question }}", "input.system": "{{ role }}", "input.chat": True}
    columns = batchspec.generate([{"question": "a", "role": "b"}], overrides=templated).columns
    assert batchspec.generate([], overrides=templated).columns == columns
    with batchspec.Engine(templated) as engine:
        assert engine.generate([]).columns == columns


def test_a_dataset_of_hugging_face_is_a_table_and_map_takes_the_engine(keys: dict[str, Any]) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict(TABLE.to_dict(as_series=False)).select([1, 0])
    assert pa.types.is_string(table_of(dataset).schema.field("prompt").type) or table_of(dataset).num_columns == 2
    with batchspec.Engine(keys) as engine:
        plain = engine.generate(TABLE)
        assert engine.generate(dataset)["prompt"].to_list() == ["b", "a"]
        mapped = dataset.map(engine.generate, batched=True, batch_size=1, new_fingerprint="answers")
    assert sorted(mapped["completion"]) == sorted(plain["completion"].to_list())


@pytest.mark.second
def test_an_engine_is_not_pickled(keys: dict[str, Any]) -> None:
    """datasets' map tries to, for a hash of the function: of all weights."""
    with batchspec.Engine(keys) as engine, pytest.raises(TypeError, match=r"^batchspec.Engine is not pickled"):
        pickle.dumps(engine.generate)
