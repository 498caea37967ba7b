"""The output schema: always these columns in this order, and what happens when an input column has a taken name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.config.schema import OutputConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.schema import output_schema
from batchspec.errors import ConfigError, InputError

ALWAYS = [
    "request_id", "row_index", "sample_index", "status", "messages", "completion", "reasoning", "reasoning_truncated",
    "finish_reason", "stop_reason", "usage", "seed", "error", "spec_decode", "perf",
]


def names(fields: dict[str, pa.DataType], mapping: dict[str, str | None] | None = None, **output: object) -> list[str]:
    schema = pa.schema(list(fields.items()))
    return list(output_schema(schema, map_columns(schema, mapping or {}), OutputConfig(**output)).names)  # type: ignore[arg-type]


def test_the_columns_are_those_of_the_contract() -> None:
    assert names({"id": pa.string(), "prompt": pa.string()}) == [*ALWAYS, "id", "prompt"]


def test_optional_columns_have_their_place() -> None:
    got = names({"prompt": pa.string()}, token_ids=True, prompt_ids=True, logprobs=2, messages="none", passthrough="none")
    assert got[4:14] == [
        "completion", "reasoning", "reasoning_truncated", "finish_reason", "stop_reason",
        "prompt_ids", "token_ids", "logprobs", "top_logprobs", "usage",
    ]
    assert "top_logprobs" not in names({"prompt": pa.string()}, logprobs=0)


def test_types_do_not_depend_on_values_and_are_plain() -> None:
    fields = {"prompt": pa.dictionary(pa.int8(), pa.string()), "note": pa.string_view(), "x": pa.list_(pa.float16())}
    schema = pa.schema(list(fields.items()))
    out = output_schema(schema, map_columns(schema, {}), OutputConfig())
    assert out.field("completion").type == pa.large_string()
    assert out.field("perf").type.field("finished_at").type == pa.timestamp("us", tz="UTC")
    assert [out.field(name).type for name in fields] == [pa.string(), pa.large_string(), pa.list_(pa.float16())]
    assert [field.name for field in out if not field.nullable] == ["request_id", "row_index", "sample_index", "status"]


def test_the_type_of_a_map_in_a_file_is_kept_to_the_letter(tmp_path: Path) -> None:
    """Its inner names are part of the job's fingerprint: if they changed, no job with such a column could be resumed."""
    table = pa.table({"prompt": ["a"], "m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))})
    pq.write_table(table, tmp_path / "in.parquet")
    schema = pq.read_schema(tmp_path / "in.parquet")
    out = output_schema(schema, map_columns(schema, {}), OutputConfig())
    assert str(out.field("m").type) == str(schema.field("m").type) != "map<string, int8>"


def test_a_mapped_column_is_left_out_if_an_output_column_carries_it() -> None:
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    assert names({"messages": messages, "seed": pa.int64(), "tag": pa.string()}) == [*ALWAYS, "tag"]
    assert names({"messages": messages}, messages="none")[-1] == "messages"
    ids = pa.list_(pa.int32())
    assert names({"prompt_ids": ids})[-1] == "prompt_ids"
    assert names({"prompt_ids": ids}, prompt_ids=True).count("prompt_ids") == 1


@pytest.mark.parametrize(
    ("fields", "mapping", "passthrough", "message"),
    [
        ({"prompt": pa.string(), "status": pa.string()}, {}, "all", r"'status' has the name .*passthrough=\[prompt\]"),
        ({"prompt": pa.string(), "seed": pa.string()}, {"seed": None}, "all", "'seed' has the name of an output column"),
        ({"prompt": pa.string(), "usage": pa.int8()}, {}, ["usage"], "'usage' has the name of an output column"),
        ({"prompt": pa.string(), "topic": pa.string()}, {}, ["topics"], "no column 'topics'; did you mean topic"),
    ],
)
def test_collisions_and_unknown_names_are_refused(
    fields: dict[str, pa.DataType], mapping: dict[str, str | None], passthrough: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        names(fields, mapping, passthrough=passthrough)


@pytest.mark.parametrize("kind", [pa.binary(0), pa.list_(pa.binary(0)), pa.month_day_nano_interval()], ids=str)
def test_a_column_that_parquet_cannot_store_is_refused_in_one_line(kind: pa.DataType) -> None:
    with pytest.raises(InputError, match=r"column 'key' has type .*; cast it, or leave it out: output\.passthrough=\[prompt\]"):
        names({"prompt": pa.string(), "key": kind}, passthrough=["prompt", "key"])


def test_a_list_or_none_chooses_the_columns() -> None:
    fields = {"prompt": pa.string(), "status": pa.string(), "b": pa.int8(), "a": pa.int8()}
    assert names(fields, passthrough=["a", "b", "a"])[len(ALWAYS) :] == ["a", "b"]
    assert names(fields, passthrough="none") == ALWAYS
