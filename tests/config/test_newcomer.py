"""What a newcomer brings: OpenAI's tool calls, ShareGPT, JSON text, CSV, compressed and broken files, read and admitted.

Each row is what its own line says, whatever the other lines hold; a bad row is one error row, a bad file one line.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from batchspec.config.schema import InputConfig, OutputConfig, RunConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.in_memory import table_of
from batchspec.data.dataset.json_text import MAX_DEPTH
from batchspec.data.dataset.reader import Source, open_source, table_source
from batchspec.data.dataset.row_ids import check_ids, request_ids
from batchspec.data.dataset.schema import MESSAGES, TOOL_MESSAGES, output_schema
from batchspec.data.dataset.writer import build_table
from batchspec.errors import InputError
from batchspec.packing.admit import Admission
from batchspec.records import Completion, Request
from tests.helpers.stand_ins import ByteTokenizer, small_spec

Json = dict[str, Any]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
SUM = {"type": "function", "function": {"name": "sum", "parameters": {"enum": [1, "x", None], "big": 12345678901234567890123}}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def calls(arguments: Any, **more: Any) -> Json:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def answers(text: str) -> Json:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


class Template(ByteTokenizer):
    """Keeps what the chat template gets of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Json] = []

    def encode_chat(self, messages: Any, **more: Any) -> list[int]:
        self.rows.append({"messages": messages, "tools": more["tools"], "kwargs": more["template_kwargs"]} | (
            {"continue": True} if more["continue_final"] else {}
        ))
        return [1]


def lines(path: Path, *rows: Any) -> Path:
    """Rows that are text already are written as they are."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


class Read:
    """A file as the job reads it."""

    def __init__(self, path: Any, columns: dict[str, str | None] | None = None, **input: Any) -> None:
        self.config = RunConfig(input=InputConfig(path=None if isinstance(path, pa.Table) else str(path), **input))
        self.config.decode.max_new_tokens = 16
        self.source: Source = table_source(path) if isinstance(path, pa.Table) else open_source(self.config.input)
        self.columns = map_columns(self.source.schema, columns or {})
        check_ids(self.source, self.columns)
        self.template = Template()
        admission = Admission(
            self.config, source=self.source, columns=self.columns, spec=small_spec(), tokenizer=cast(Any, self.template)
        )
        self.shards = list(self.source.shards(100))
        self.made = [item for shard in self.shards for item in admission.admit(shard)]
        self.ids = [name for shard in self.shards for name in request_ids(self.source, self.columns, shard)]

    @property
    def requests(self) -> list[Request]:
        assert all(isinstance(item, Request) for item in self.made), self.errors
        return cast(list[Request], self.made)

    @property
    def errors(self) -> dict[str, str]:
        """Id -> code and message of the error rows."""
        bad = [item for item in self.made if isinstance(item, Completion) and item.error is not None]
        assert all("\n" not in item.error.message for item in bad if item.error)
        return {item.request_id: f"{item.error.code}: {item.error.message}" for item in bad if item.error}

    def output(self) -> list[Json]:
        """The output rows, all of which answer `ok`."""
        [shard] = self.shards
        done = [
            item if isinstance(item, Completion) else Completion(
                request_id=item.request_id, row_index=item.row_index, sample_index=0, shard=0, status="ok", finish_reason="stop",
                text="ok",
            ) for item in self.made
        ]
        table = build_table(shard, done, columns=self.columns, input=self.config.input, output=self.config.output, attempt="a")
        rows: list[Json] = table.to_pylist()
        return rows


# --- tool calling, from OpenAI's form to the output


CHATS: list[Json] = [
    {"messages": [user("a"), calls('{"city": "Paris"}'), answers("12 C")], "tools": [WEATHER]},
    {"messages": [user("b"), calls({"n": [1, None]}, name="x"), answers("13 C")], "tools": [SUM]},
    {"messages": [user("c")]},
]


def test_the_template_gets_the_fields_of_its_own_line_only(tmp_path: Path) -> None:
    read = Read(lines(tmp_path / "in.jsonl", *CHATS))
    assert len(read.requests) == 3
    assert [row["messages"] for row in read.template.rows] == [chat["messages"] for chat in CHATS]
    assert [row["tools"] for row in read.template.rows] == [[WEATHER], [SUM], None]
    assert [list(call["function"]) for call in read.template.rows[0]["messages"][1]["tool_calls"]] == [["name", "arguments"]]


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(3)), more=st.integers(0, 3))
def test_the_order_of_the_lines_changes_no_row_and_no_type(
    order: list[int], more: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [{**CHATS[0], "k": 1, "m": {"a": 1}}, {**CHATS[1], "k": "x", "m": [2]}, {**CHATS[2], "k": None, "m": None}]
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    read = Read(lines(path, *[rows[i] for i in order], *[user("z")] * 0, *[rows[2]] * more))
    seen = dict(zip(order, read.template.rows, strict=False))
    assert [seen[i]["messages"] for i in range(3)] == [row["messages"] for row in rows]
    output = read.output()
    assert {i: (row["k"], row["m"]) for i, row in zip(order, output, strict=False)} == {
        0: ("1", '{"a": 1}'), 1: ("x", "[2]"), 2: (None, None)
    }
    schema = output_schema(read.source.schema, read.columns, OutputConfig())
    assert (schema.field("k").type, schema.field("m").type) == (pa.string(), pa.string())


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.second
@given(cells=st.lists(_VALUES, min_size=1, max_size=4))
def test_dictionaries_in_memory_are_the_rows_of_the_same_json_lines(
    cells: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A cell of any kind, in a column that batchspec reads and in one of the user's: no row changes another one's value."""
    rows = [{"messages": [{**user("a"), "more": cell}], "mine": cell} for cell in cells]
    read = Read(lines(tmp_path_factory.mktemp("rows") / "in.jsonl", *rows))
    columns = {name: [row[name] for row in rows] for name in ("messages", "mine")}
    for found in (Read(table_of(rows)), Read(table_of(columns))):
        assert found.source.schema.equals(read.source.schema, check_metadata=True)
        assert json.dumps(found.template.rows) == json.dumps(read.template.rows)  # NaN is not equal to itself
        assert json.dumps(list(map(_value, found.output()))) == json.dumps(list(map(_value, read.output())))


def test_numbers_that_polars_refuses_or_rounds_are_rows_in_memory_as_in_json_lines(tmp_path: Path) -> None:
    cells: list[Any] = [[0, 0.5], [None, 0, 0.5], [1 << 60], [0.5], [], None]
    rows = [{"prompt": "a", "x": cell, "y": {"z": [math.nan]}, "u": i or 0.5} for i, cell in enumerate(cells)]
    for output in (Read(table_of(rows)).output(), Read(lines(tmp_path / "in.jsonl", *rows)).output()):
        assert [json.loads(row["x"] or "null") for row in output] == cells
        assert [row["u"] for row in output] == [0.5, 1, 2, 3, 4, 5]
        assert math.isnan(json.loads(output[0]["y"])["z"][0])


def test_a_dictionary_may_hold_lists_arrays_and_single_values() -> None:
    cells: list[Any] = [{"a": [0]}, {"a": [0.5], "b": 1}]
    columns = {"x": cells, "day": [date(2026, 1, 2), None], "k": np.arange(2, dtype=np.int32), "prompt": "a"}
    table = table_of(columns)
    assert table.schema.names == list(columns)
    assert table.schema.field("k").type == pa.int32()
    assert [json.loads(cell) for cell in table["x"].to_pylist()] == cells
    assert table["day"].to_pylist() == columns["day"]
    assert table["prompt"].to_pylist() == ["a", "a"]
    assert [made.prompt_ids.tolist() for made in Read(table).requests] == [[97]] * 2
    for wrong in ({"prompt": ["a", "b"], "k": np.arange(3)}, {"prompt": ["a", "b"], "k": [1, 2, 3]}):
        with pytest.raises(InputError, match=r"^rows of type dict do not make a table \(.*\); give a table or a list of dict"):
            table_of(wrong)


def test_text_that_is_none_in_memory_is_an_error_row_as_in_json_lines(tmp_path: Path) -> None:
    rows = [{"id": "x", "prompt": "\ud83d"}, {"id": "y", "prompt": "b"}]
    for read in (Read(table_of(rows)), Read(lines(tmp_path / "in.jsonl", *rows))):
        assert list(read.errors) == ["x"]
        assert read.errors["x"].startswith("bad_text: ")
    assert table_of(["\ud83d", "b"])["prompt"].cast(pa.binary()).to_pylist() == [b"\xed\xa0\xbd", b"b"]
    for name in ("\ud83d", 1):
        with pytest.raises(InputError, match=r"^column .* has a name that is not text; rename it$"):
            table_of([{"prompt": "a", name: 1}])


def _value(row: Json) -> Any:
    """The value of the user's column, whether it was copied as JSON text or not."""
    try:
        return json.loads(row["mine"])
    except (TypeError, ValueError):
        return row["mine"]


def test_dictionaries_that_are_no_json_are_refused_with_row_and_column() -> None:
    with pytest.raises(InputError, match=r"row 1: the value of 'k' cannot be written as JSON \(it has the type object\)"):
        table_of([{"prompt": "a", "k": {}}, {"prompt": "b", "k": {"x": object()}}])


def test_a_table_whose_cells_should_be_json_text_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        InputError, match=r"allowed: JSON string; write its cells as JSON text or set input.columns.response_format"
    ):
        Read(pa.table({"prompt": ["a"], "response_format": [{"type": "text"}]}))
    with pytest.raises(
        InputError, match=r"input.columns.prompt=null to read messages, or input.columns.messages=null to read prompt"
    ):
        Read(pa.table({"prompt": ["a"], "messages": ["[]"]}))


def test_numpy_values_and_dates_of_dictionaries_keep_their_types() -> None:
    row = {"prompt_ids": np.arange(3), "day": date(2026, 1, 2), "k": {"x": np.float32(0.5), "y": np.arange(2)}}
    [kept] = table_of([row]).to_pylist()
    assert kept == {"prompt_ids": [0, 1, 2], "day": date(2026, 1, 2), "k": '{"x":0.5,"y":[0,1]}'}


def test_dates_keep_their_time_zones_and_dates_of_two_kinds_become_text() -> None:
    noon = datetime(2026, 1, 2, 12, tzinfo=UTC)
    for made in (table_of({"day": [noon], "any": [noon]}), table_of([{"day": noon, "any": noon}])):
        assert made.schema.field("day").type == pa.timestamp("us", "UTC")
    assert table_of([{"day": noon}, {"day": date(2026, 1, 2)}])["day"].to_pylist() == ["2026-01-02T12:00:00Z", "2026-01-02"]


class Markup(str):
    """Text of a kind of its own, as some libraries return it."""

    def __str__(self) -> str:
        return "shown"


def test_kinds_of_text_and_numbers_are_read_as_python_s() -> None:
    rows = [{"prompt": Markup("a"), "ok": np.bool_(True), "n": np.int8(3), "x": np.float32(0.5), "big": np.uint64(2**64 - 1)}]
    for made in (table_of(rows), table_of({name: (value,) for name, value in rows[0].items()})):
        assert made.to_pylist() == [{"prompt": "a", "ok": True, "n": 3, "x": 0.5, "big": str(2**64 - 1)}]
    with pytest.raises(InputError, match=r"row 0: the value of 'x' cannot be written as JSON \(it has the type complex\)"):
        table_of([{"prompt": "a", "x": np.complex64(1j)}])


@pytest.mark.parametrize("other", [None, "text"])
def test_many_rows_in_memory_keep_their_order(other: str | None) -> None:
    """More than are made into an array at once; with one value of another kind also as JSON text."""
    values = [*range(5000), other]
    found = table_of({"k": values, "prompt": [str(value) for value in values]}).to_pylist()
    assert [(row["k"] if other is None else json.loads(row["k"]), row["prompt"]) for row in found] == [
        (value, str(value)) for value in values
    ]


def test_integers_beyond_64_bits_in_memory_are_copied_as_text_as_from_json_lines() -> None:
    assert [row["x"] for row in Read(table_of([{"prompt": "a", "x": 1 << 70}, {"prompt": "b", "x": -1}])).output()] == [
        str(1 << 70), "-1"
    ]


def test_values_that_arrow_cannot_hold_are_refused() -> None:
    """polars would write the addresses of objects."""
    for rows in (pl.DataFrame({"prompt": ["a"], "x": [object()]}), [{"prompt": "a", "x": {1, 2}}]):
        with pytest.raises(InputError, match=r"column 'x' holds Python objects \((object|set)\); give plain values"):
            table_of(rows)
    with pytest.raises(InputError, match=r"'x' holds Python objects \(Image\); give the rows as a list of dictionaries, or"):
        table_of(pl.DataFrame({"x": [Image.new("L", (2, 2))]}))
    with pytest.raises(InputError, match=r"prompt: String, x: Int128 do not make an Arrow table \(.*\); cast the column"):
        table_of(pl.DataFrame({"prompt": ["a"], "x": pl.Series([1], dtype=pl.Int128)}))
    with pytest.raises(InputError, match=r"rows of type list do not make a table \(.*too large"):
        table_of([{"prompt": "a", "x": Decimal(10) ** 40}])
    wide = pa.decimal256(50, 3)
    for kind in (wide, pa.list_(pa.struct([("y", wide)])), pa.map_(pa.string(), wide), pa.dictionary(pa.int8(), wide)):
        table = pa.table({"prompt": ["a"], "x": pa.nulls(1, kind)})
        for data in (table, table.to_reader()):
            with pytest.raises(InputError, match=r"^column 'x' has type .*, which polars cannot read; cast it, or leave it out$"):
                table_of(data)


def test_lists_that_are_empty_in_every_row_ask_for_nothing(tmp_path: Path) -> None:
    rows = [{"messages": [user("a")], "tools": [], "stop": []} for _ in range(2)]
    read = Read(lines(tmp_path / "in.jsonl", *rows))
    assert [(row["tools"], made.stop) for row, made in zip(read.template.rows, read.requests, strict=True)] == [([], ())] * 2
    for name in ("messages", "prompt_ids"):
        assert {said.split(":")[0] for said in Read(lines(tmp_path / f"{name}.jsonl", {name: []})).errors.values()} == {
            "empty_prompt"
        }
    with pytest.raises(InputError, match="'prompt' is mapped to prompt but has type list"):
        Read(lines(tmp_path / "in.jsonl", {"prompt": []}))


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "n", "synthetic_len"])
def test_a_setting_beyond_64_bits_makes_an_error_row(tmp_path: Path, name: str) -> None:
    read = Read(lines(tmp_path / "in.jsonl", {"prompt": "a", name: 10**400}, {"prompt": "b"}))
    (said,) = read.errors.values()
    assert said.endswith(f"{name}=10000000000000000000... does not fit in 64 bits; correct it or leave it null")


def test_views_of_text_and_bytes_are_copied_at_any_depth() -> None:
    """As DataFusion writes them."""
    kinds = {
        "bytes": (pa.binary_view(), b"x"), "list": (pa.list_(pa.string_view()), ["x", None]),
        "struct": (pa.struct([("a", pa.large_list(pa.binary_view()))]), {"a": [b"x"]}),
        "map": (pa.map_(pa.string_view(), pa.string_view()), [("a", "x")]), "pair": (pa.list_(pa.string_view(), 2), ["x", "y"]),
        "words": (pa.dictionary(pa.int8(), pa.string()), "x"),
    }
    table = pa.table({"prompt": ["a", "b"], **{name: pa.array([value, None], kind) for name, (kind, value) in kinds.items()}})
    read = Read(table)
    assert [[row[name] for name in kinds] for row in read.output()] == [
        [value for _, value in kinds.values()], [None] * len(kinds)
    ]
    assert "view" not in str(output_schema(table.schema, read.columns, OutputConfig()))


@pytest.mark.parametrize("kind", [pa.list_view(pa.int8()), pa.struct([("a", pa.large_list_view(pa.int8()))]), pa.struct([])])
def test_a_column_that_no_output_can_hold_is_refused_by_name(kind: pa.DataType) -> None:
    schema = pa.schema([("prompt", pa.string()), ("mine", kind)])
    with pytest.raises(InputError, match=r"column 'mine' has type .* or leave it out: output.passthrough=\[prompt\]"):
        output_schema(schema, map_columns(schema, {}), OutputConfig())
    output_schema(schema, map_columns(schema, {}), OutputConfig(passthrough=["prompt"]))


def test_numbers_that_json_lacks_reach_template_and_output_and_are_refused_in_a_request_of_openai(tmp_path: Path) -> None:
    """They would be null: a different chat, in silence."""
    chat = [user("a"), calls({"x": math.nan, "y": -math.inf}), answers("b")]
    for read in (Read(lines(tmp_path / "in.jsonl", {"messages": chat})), Read(table_of([{"messages": chat}]))):
        assert json.dumps(read.template.rows[0]["messages"][1]["tool_calls"]) == json.dumps(chat[1]["tool_calls"])
        assert '{"x":NaN,"y":-Infinity}' in read.output()[0]["messages"][1]["tool_calls"]
    bodies: list[Json] = [{"messages": chat}, {"messages": [user("a")], "chat_template_kwargs": {"x": [math.inf]}}]
    requests = [{"custom_id": f"r{i}", "body": body} for i, body in enumerate([*bodies, {"messages": [user("a")]}])]
    read = Read(lines(tmp_path / "requests.jsonl", *requests))
    assert [said.partition("body.")[2] for said in read.errors.values()] == [
        "messages[1].tool_calls[0].function.arguments.x=NaN is not a number; correct the line",
        "chat_template_kwargs.x[0]=Infinity is not a number; correct the line",
    ]


def test_tool_calls_are_kept_in_the_output_and_read_back_from_it(tmp_path: Path) -> None:
    read = Read(lines(tmp_path / "in.jsonl", *CHATS))
    output = read.output()
    turn = output[0]["messages"][1]
    assert turn["content"] is None
    assert json.loads(turn["tool_calls"]) == CHATS[0]["messages"][1]["tool_calls"]
    assert output[0]["messages"][2]["tool_call_id"] == "c1"
    nothing = dict.fromkeys(("name", "tool_calls", "tool_call_id"))
    assert output[0]["messages"][3] == {"role": "assistant", "content": "ok", **nothing}
    again = [{"messages": [*row["messages"], user("and?")]} for row in output]
    back = Read(pa.table({"messages": pa.array([row["messages"] for row in again], TOOL_MESSAGES)}))
    assert len(back.requests) == 3
    first = back.template.rows[0]["messages"]
    assert first[1] == {"role": "assistant", "tool_calls": CHATS[0]["messages"][1]["tool_calls"]}
    assert first[2:] == [answers("12 C"), {"role": "assistant", "content": "ok"}, user("and?")]


def test_plain_chats_keep_the_plain_type(tmp_path: Path) -> None:
    for rows, kind in (([CHATS[2]], MESSAGES), (CHATS, TOOL_MESSAGES)):
        read = Read(lines(tmp_path / "in.jsonl", *rows))
        assert output_schema(read.source.schema, read.columns, OutputConfig()).field("messages").type == kind


def test_nulls_that_a_parquet_writer_filled_in_are_removed(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(CHATS[:1] + CHATS[2:]), tmp_path / "in.parquet")
    read = Read(tmp_path / "in.parquet")
    assert len(read.requests) == 2
    first, last = read.template.rows
    assert first["messages"] == [user("a"), {k: v for k, v in CHATS[0]["messages"][1].items() if k != "content"}, answers("12 C")]
    assert last == {"messages": [user("c")], "tools": None, "kwargs": {}}


def test_json_text_columns_are_read_as_what_they_hold(tmp_path: Path) -> None:
    text = {name: [json.dumps(chat.get(name)) if name in chat else None for chat in CHATS] for name in ("messages", "tools")}
    pq.write_table(pa.table(text), tmp_path / "in.parquet")
    read = Read(tmp_path / "in.parquet")
    assert [row["messages"] for row in read.template.rows] == [chat["messages"] for chat in CHATS]
    assert [row["tools"] for row in read.template.rows] == [[WEATHER], [SUM], None]
    bad = Read(pa.table({"messages": ["hello", '{"role": "user"}', "[1]", "[]", ""]}))
    codes = [text.split(":")[0] for text in bad.errors.values()]
    assert codes == ["bad_messages", "bad_messages", "bad_messages", "empty_prompt", "empty_prompt"]
    assert "messages hold text, and it is not JSON" in bad.errors["table:0"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": None}, "message 1 has content None, which must be text"),
        ({"role": "tool", "content": None}, "message 1 has content None"),
        ({"role": "user", "content": 5}, "content that is a number"),
        ({"content": "x"}, "message 1 has role None"),
        ("x", "message 1 is text, not an object"),
        (calls({}, tool_calls="{"), "tool_calls that are text, and it is not JSON"),
        (calls({}, tool_calls=[1]), "tool_calls that are not a list of objects"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "a part of type 'input_audio'"),
        ({"from": "narrator", "value": "x"}, "is from 'narrator'"),
        (calls({}), "the chat ends with tool calls"),
    ],
)
def test_a_message_that_cannot_be_taken_is_said_in_its_row(tmp_path: Path, message: Any, said: str) -> None:
    read = Read(lines(tmp_path / "in.jsonl", {"id": "bad", "messages": [user("a"), message]}, {"id": "ok", **CHATS[2]}))
    assert list(read.errors) == ["bad"]
    assert said in read.errors["bad"]
    assert read.errors["bad"].startswith("bad_messages: in.jsonl line 1")


def test_parts_of_text_are_one_text_in_the_output(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = Read(lines(tmp_path / "in.jsonl", {"messages": [{"role": "user", "content": parts}]}))
    assert read.template.rows[0]["messages"] == [{"role": "user", "content": parts}], "a template may read them"
    assert read.output()[0]["messages"][0] == user("a\nb")


# --- chats that end with the assistant's turn; ShareGPT


PREFILL = {"id": "p", "messages": [user("Count"), {"role": "assistant", "content": "One, "}]}


def test_a_chat_that_ends_with_the_assistant_is_refused_continued_or_answered_anew(tmp_path: Path) -> None:
    path = lines(tmp_path / "in.jsonl", PREFILL, {"id": "q", **CHATS[2]})
    refused = Read(path)
    assert list(refused.errors) == ["p"]
    assert "input.final_assistant=continue" in refused.errors["p"]
    going_on = Read(path, final_assistant="continue")
    assert [row.get("continue", False) for row in going_on.template.rows] == [True, False]
    assert going_on.template.rows[0]["messages"] == PREFILL["messages"]
    said = [[turn["content"] for turn in row["messages"]] for row in going_on.output()]
    assert said == [["Count", "One, ok"], ["c", "ok"]]
    dropped = Read(path, final_assistant="drop")
    assert dropped.template.rows[0]["messages"] == [user("Count")]
    assert [turn["content"] for turn in dropped.output()[0]["messages"]] == ["Count", "ok"]


def test_a_row_can_set_its_own_final_assistant(tmp_path: Path) -> None:
    rows = [{**PREFILL, "id": final or "none", "final_assistant": final} for final in ("continue", "drop", None, "no")]
    read = Read(lines(tmp_path / "in.jsonl", *rows))
    assert list(read.errors) == ["none", "no"]
    assert "the column final_assistant says so for its row" in read.errors["none"]
    assert "final_assistant='no' must be one of error, continue, drop" in read.errors["no"]
    assert [row.get("continue", False) for row in read.template.rows] == [True, False]
    said = {row["request_id"]: [turn["content"] for turn in row["messages"]] for row in read.output()}
    assert said["continue"] == ["Count", "One, ok"]
    assert said["drop"] == ["Count", "ok"]
    assert said["none"] == ["Count", "One, "]


SHAREGPT = [
    {"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"},
    {"from": "human", "value": "again"},
]


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_sharegpt_is_refused_with_the_line_that_maps_it_and_then_read(tmp_path: Path, name: str) -> None:
    rows = [{"conversations": SHAREGPT}]
    if name == "in.jsonl":
        lines(tmp_path / name, *rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    with pytest.raises(InputError, match=r"name one, e\.g\. input\.columns\.messages=conversations"):
        Read(tmp_path / name)
    read = Read(tmp_path / name, {"messages": "conversations"})
    turns = [("system", "s"), ("user", "hi"), ("assistant", "hello"), ("user", "again")]
    assert read.template.rows[0]["messages"] == [{"role": role, "content": text} for role, text in turns]
    assert [turn["role"] for turn in read.output()[0]["messages"]] == [*(role for role, _ in turns), "assistant"]


def test_openai_s_batch_requests_are_read_as_lines_and_refused_as_columns(tmp_path: Path) -> None:
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [user("a")]}}
    assert Read(lines(tmp_path / "in.jsonl", line)).template.rows[0]["messages"] == [user("a")]
    pq.write_table(pa.Table.from_pylist([line]), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="give their JSON lines, whose keys are custom_id, method, url and body alone"):
        Read(tmp_path / "in.parquet")


# --- files: compressed, CSV, other encodings, other shapes


def plain(path: Path) -> bytes:
    return lines(path, *({"id": f"q{i}", "prompt": f"say {i}"} for i in range(50))).read_bytes()


def test_compressed_files_are_read_in_parts_and_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = plain(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:500]) + gzip.compress(data[500:]))
    (tmp_path / "c.jsonl.zst").write_bytes(pa.compress(data, "zstd", asbytes=True))
    monkeypatch.setattr("batchspec.data.dataset.files.BATCH_BYTES", 64)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        source = open_source(InputConfig(path=str(tmp_path / name)))
        assert source.num_rows == 50
        for _ in range(2):
            assert [row for shard in source.shards(7) for row in shard.table["id"].to_pylist()] == [f"q{i}" for i in range(50)]
        assert [shard.table["prompt"][0].as_py() for shard in source.shards(10, skip={0, 2})] == ["say 10", "say 30", "say 40"]
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(data)[:-20])
    with pytest.raises(InputError, match="cannot be read: Truncated"):
        open_source(InputConfig(path=str(tmp_path / "d.jsonl.gz")))


def test_csv_is_text_with_numbers_where_numbers_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "prompt", "max_new_tokens", "temperature", "note"])
        rows.writerows([["001", 'Say\n"it", twice', "3", "0.5", ""], ["002", "Say", "", "", "x"]])
        rows.writerows([["003", "Say", "many", "", "x"], ["004", "Say"], ["005", "", "", "", ""]])
    for block_bytes in (1, 1 << 20):
        monkeypatch.setattr("batchspec.data.dataset.files.BATCH_BYTES", block_bytes)
        read = Read(tmp_path / "in.csv")
        assert read.ids == ["001", "002", "003", "in.csv:6", "005"]
        first, second = (item for item in read.made if isinstance(item, Request))
        assert bytes(first.prompt_ids.tolist()) == b'Say\n"it", twice'
        assert (first.max_new_tokens, first.sampling.temperature) == (3, 0.5)
        assert second.max_new_tokens == 16
        assert [text.split(":")[0] for text in read.errors.values()] == ["bad_parameter", "bad_csv", "empty_prompt"]
        assert "the row has 2 cells, and the header names 5 columns" in read.errors["in.csv:6"]
        assert [row["note"] for row in read.output()] == ["", "x", "x", None, ""]


def test_an_empty_cell_of_csv_is_no_system_turn_in_the_prompt_nor_in_the_output(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, user("Hi")]
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["messages", "system", "final_assistant"], [json.dumps(chat), "", ""], [json.dumps(chat), "Hey", ""]]
        )
    read = Read(tmp_path / "in.csv")
    assert [row["messages"] for row in read.template.rows] == [chat, [{**chat[0], "content": "Hey"}, chat[1]]]
    for seen, row in zip(read.template.rows, read.output(), strict=True):
        assert [{name: turn[name] for name in ("role", "content")} for turn in row["messages"][:-1]] == seen["messages"]


@pytest.mark.parametrize(
    ("cell", "stop"),
    [
        ('["e", "the end"]', ("e", "the end")), ("[]", ()), ("e", ("e",)), ("", ()), ("[/INST]", ("[/INST]",)),
        ("[1]", ("[1]",)), ('["e"', ('["e"',)), ('"e"', ('"e"',)),
    ],
)
def test_stops_in_csv_are_a_json_list_or_one_text(tmp_path: Path, cell: str, stop: tuple[str, ...]) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "stop"], ["Hi", cell]])
    assert Read(tmp_path / "in.csv").requests[0].stop == stop


@pytest.mark.parametrize(("rest", "lines"), [("3,c\n", "1 line"), ("3,c\n4,d\n", "2 lines")])
def test_the_error_of_an_unclosed_quote_tells_how_much_text_it_swallowed(tmp_path: Path, rest: str, lines: str) -> None:
    (tmp_path / "in.csv").write_text(f'id,prompt\n1,a\n2,"b\n{rest}')
    read = Read(tmp_path / "in.csv")
    assert read.ids == ["1", "in.csv:3"]
    assert f"a quote in it is never closed: {lines} after it became part of its text" in read.errors["in.csv:3"]


def test_half_a_surrogate_pair_costs_the_row_only_where_it_is_the_prompt(tmp_path: Path) -> None:
    read = Read(
        lines(
            tmp_path / "in.jsonl",
            '{"id": "ok", "prompt": "\\ud83d\\ude00"}',
            '{"id": "prompt", "prompt": "x \\ud83d y"}',
            '{"id": "other", "prompt": "x", "note": "x \\ud83d y"}',
            '{"id": "key", "prompt": "x", "\\ud83d": 1}',
        )
    )
    assert list(read.errors) == ["prompt", "in.jsonl:4"]
    assert all(text.startswith("bad_text: in.jsonl line") and "surrogate" in text for text in read.errors.values())
    assert read.output()[2]["note"] == "x \ufffd\ufffd\ufffd y"
    chats = Read(lines(tmp_path / "c.jsonl", '{"id": "a", "messages": [{"role": "user", "content": "\\ud83d"}]}'))
    assert chats.errors["a"].startswith("bad_text: c.jsonl line 1 (id 'a'): messages: it holds half of a surrogate pair")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"prompt": "a"}\n'.encode("utf-16"), "holds UTF-16 text; write it as UTF-8: iconv"),
        ('{"prompt": "a"}\n'.encode("utf-16-le"), "is not UTF-8 text"),
        ('{"prompt": "a"}\n'.encode("utf-32"), "holds UTF-32 text; write it as UTF-8: iconv -f UTF-32"),
        (b'[{"prompt": "a"}, {"prompt": "b"}]', "is one JSON array, and JSON lines hold an object a line; convert it: python"),
        (b'[\n {"prompt": "a"},\n {"prompt": "b"}\n]', "is one JSON array"),
        (b'[\n{"prompt": "a"}\n]', "is one JSON array"),
        (b'{\n "prompt": "a"\n}', "no line is a JSON object"),
        (b"id,prompt\n1,a\n", "no line is a JSON object"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0), "holds gzip data; let its name end in .gz"),
        (b"PAR1....", "holds Parquet"),
    ],
)
def test_a_file_of_another_kind_is_one_line_with_advice(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(InputError) as caught:
        Read(tmp_path / "in.jsonl")
    assert said in str(caught.value)
    assert "in.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_csv_file_without_commas_is_one_line_with_the_conversion(tmp_path: Path, separator: str) -> None:
    (tmp_path / "in.csv").write_text(f"id{separator}prompt\n1{separator}hello, you\n")
    with pytest.raises(InputError, match="is one column, because batchspec reads commas alone") as caught:
        Read(tmp_path / "in.csv")
    assert f"separator={separator!r}" in str(caught.value)
    pl.read_csv(tmp_path / "in.csv", separator=separator, infer_schema=False).write_csv(tmp_path / "new.csv")
    assert Read(tmp_path / "new.csv").ids == ["1"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + plain(tmp_path / "x.jsonl"))
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbfprompt\nhello\n")
    assert Read(tmp_path / "in.jsonl").ids[:2] == ["q0", "q1"]
    assert len(Read(tmp_path / "in.csv").requests) == 1


# --- depth and width


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "1" + "}" * (depth - 1)


@pytest.mark.second
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3_600, 10_000, 30_000, 1_000_000])
def test_what_is_nested_deeply_costs_its_row(tmp_path: Path, depth: int) -> None:
    lists = "[" * depth + "]" * depth
    read = Read(lines(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, f'{{"id": "b", "prompt": "x", "m": {nested(depth)}}}',
        f'{{"id": "c", "prompt": "x", "m": {lists}}}', {"id": "d", "prompt": "[" * depth},
    ))
    assert list(read.errors) == ["in.jsonl:2", "in.jsonl:3"] + ["d"] * (depth > 400)
    assert f"it is nested {depth:,} levels deep, and at most {MAX_DEPTH} are taken" in read.errors["in.jsonl:2"]
    chat = [json.dumps([user("x")])] * 3
    kwargs = [None, None, nested(depth + 1), None]
    cells = Read(pa.table({"messages": [*chat, lists], "tools": [None, lists, None, None], "template_kwargs": kwargs}))
    assert list(cells.errors) == ["table:1", "table:2", "table:3"]
    assert all("levels deep" in text for text in cells.errors.values())


def test_what_is_nested_as_deeply_as_allowed_goes_through(tmp_path: Path) -> None:
    value = json.loads(nested(MAX_DEPTH - 1))
    read = Read(lines(tmp_path / "in.jsonl", {"messages": [user("x")], "template_kwargs": value}))
    assert len(read.requests) == 1
    assert read.template.rows[0]["kwargs"] == value


@pytest.mark.second
def test_many_columns_take_time_and_memory_by_their_number(tmp_path: Path) -> None:
    """Quadratic in the columns this took minutes and gigabytes."""
    wide = pa.table({"prompt": ["x"], **{f"c{i}": [i] for i in range(6_000)}})
    for name in "ab":
        pq.write_table(wide, tmp_path / f"{name}.parquet")
    source = open_source(InputConfig(path=str(tmp_path)))
    assert len(output_schema(source.schema, map_columns(source.schema, {}), OutputConfig())) > 6_000
    path = lines(tmp_path / "in.jsonl", *({"prompt": "x", **{f"k{i * 100 + j}": j for j in range(100)}} for i in range(200)))
    source = open_source(InputConfig(path=str(path)))
    assert len(source.schema) == 20_001
    assert map_columns(source.schema, {}).prompt_kind == "prompt"


def test_keys_that_hold_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchspec.data.dataset.untyped_columns.MAX_COLUMNS", 10)
    with pytest.raises(InputError, match="more than 10 different keys"):
        Read(lines(tmp_path / "in.jsonl", *({"prompt": "x", f"k{i}": i} for i in range(20))))


# --- types of JSON lines


@pytest.mark.parametrize(
    ("cells", "kind", "copied"),
    [
        (["a", None, "b"], pa.string(), ["a", None, "b"]),
        ([1, 2, None], pa.int64(), [1, 2, None]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([1 << 60, 2], pa.int64(), [1 << 60, 2]),
        ([1 << 60, 2.5], pa.string(), [str(1 << 60), "2.5"]),
        ([1 << 70, 2], pa.string(), [str(1 << 70), "2"]),
        ([True, None], pa.bool_(), [True, None]),
        ([True, 1], pa.string(), ["true", "1"]),
        ([["a"], [], None], pa.list_(pa.string()), [["a"], [], None]),
        ([[1, None], [2.5]], pa.list_(pa.float64()), [[1.0, None], [2.5]]),
        ([["a"], [1]], pa.string(), ['["a"]', "[1]"]),
        ([{"b": 1, "a": None}, {}], pa.string(), ['{"b": 1, "a": null}', "{}"]),
        (["a", 1, ["b"], {"c": 2}], pa.string(), ["a", "1", '["b"]', '{"c": 2}']),
        ([None, None], pa.null(), [None, None]),
    ],
)
def test_a_column_has_the_type_that_holds_every_cell_exactly(
    tmp_path: Path, cells: list[Any], kind: Any, copied: list[Any]
) -> None:
    read = Read(lines(tmp_path / "in.jsonl", *({"prompt": "x", "k": cell} for cell in cells)))
    assert output_schema(read.source.schema, read.columns, OutputConfig()).field("k").type == kind
    assert [row["k"] for row in read.output()] == copied


def test_a_column_that_never_fits_is_refused_and_one_that_sometimes_does_costs_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mapped to prompt but has no type that fits: each cell is object"):
        Read(lines(tmp_path / "in.jsonl", {"prompt": {"a": 1}}))
    read = Read(lines(
        tmp_path / "in.jsonl", {"id": 1, "prompt": "a"}, {"id": "b", "prompt": ["a"]}, {"id": "c", "prompt": "a", "n": "two"},
        {"id": "d", "prompt": "a", "n": 2, "stop": "x"}, {"id": "e", "prompt": "a", "stop": ["y"]},
        {"id": "f", "prompt": "a", "stop": {"z": 1}},
    ))
    assert read.ids == ["1", "b", "c", "d", "e", "f"]
    assert {name: text.split(":")[0] for name, text in read.errors.items()} == {
        "b": "bad_type", "c": "bad_parameter", "f": "bad_parameter"
    }
    stops = {item.request_id: item.stop for item in read.made if isinstance(item, Request)}
    assert stops == {"1": (), "d": ("x",), "e": ("y",)}


def test_ids_that_are_the_same_text_are_the_same(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"id '7' is in in\.jsonl line 1 and again in in\.jsonl line 2"):
        Read(lines(tmp_path / "in.jsonl", {"id": 7, "prompt": "x"}, {"id": "7", "prompt": "y"}))


def test_files_of_json_lines_share_their_columns(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", {"id": "a", "prompt": "x", "k": 1})
    lines(tmp_path / "b.jsonl", {"id": "b", "prompt": "y", "k": "z", "m": [1]})
    assert [(row["k"], row["m"]) for row in Read(tmp_path).output()] == [("1", None), ("z", [1])]


def test_a_file_name_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    lines(tmp_path / "good.jsonl", {"prompt": "a"})
    (tmp_path / os.fsdecode(b"bad\xff.jsonl")).write_bytes((tmp_path / "good.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"the name of 'bad\\udcff\.jsonl' is not valid Unicode; rename the file"):
        open_source(InputConfig(path=str(tmp_path)))


def test_an_empty_csv_cell_is_null_as_an_option_and_empty_text_as_a_copied_value(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,prompt,seed,stop,note\n1,Hi,,,\n2,,,,x\n")
    read = Read(tmp_path / "in.csv")
    (request, _) = read.made
    assert isinstance(request, Request)
    assert request.stop == ()
    assert [row["note"] for row in read.output()] == ["", "x"]
    assert {name: said.partition(":")[0] for name, said in read.errors.items()} == {"2": "empty_prompt"}
