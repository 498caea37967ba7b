"""Files of one dataset whose columns differ: read as one if nothing is lost, and otherwise refused with the names of both."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchspec.config.schema import InputConfig
from batchspec.console.text import VALUE_CHARS, cut
from batchspec.data.dataset.common_schema import common_schema, files_of_dataset
from batchspec.data.dataset.files import MemoryFile
from batchspec.data.dataset.reader import Source, open_source
from batchspec.data.dataset.wider_type import wider
from batchspec.errors import InputError

SCALARS = [
    pa.null(), pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64(), pa.float16(),
    pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
    pa.binary_view(), pa.binary(3), pa.decimal128(5, 2), pa.decimal128(20, 0), pa.decimal32(5, 1), pa.date32(), pa.date64(),
    pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.timestamp("ns", "UTC"),
    pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.duration("s"), pa.duration("us"),
    pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_string()), pa.dictionary(pa.int8(), pa.int32()),
]  # fmt: skip


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(st.tuples(st.sampled_from("abc"), inner), min_size=1, max_size=3, unique_by=lambda field: field[0])
    return st.one_of(
        inner.map(pa.list_), inner.map(pa.large_list), fields.map(pa.struct), inner.map(lambda kind: pa.map_(pa.string(), kind)),
        inner.filter(lambda kind: not pa.types.is_null(kind)).map(lambda kind: pa.list_(kind, 2)),  # Arrow makes none
    )


TYPES = st.recursive(st.sampled_from(SCALARS), nested, max_leaves=3)


def cells(kind: pa.DataType) -> list[Any]:
    """Two values that are the hardest to keep, and a null."""
    tests = pa.types
    if tests.is_dictionary(kind):
        return cells(kind.value_type)
    if tests.is_null(kind):
        return [None, None, None]
    if tests.is_boolean(kind):
        return [True, False, None]
    if tests.is_integer(kind):
        signed = bool(tests.is_signed_integer(kind))
        return [2 ** (kind.bit_width - signed) - 1, -(2 ** (kind.bit_width - 1)) if signed else 0, None]
    if tests.is_float16(kind):
        return [np.float16(1.5), np.float16(-65504), None]
    if tests.is_floating(kind):
        return [1.5, 2.0**-60, None]
    if tests.is_decimal(kind):
        return [Decimal(10**kind.precision - 1).scaleb(-kind.scale), Decimal(0), None]
    if tests.is_date(kind):
        return [datetime.date(2024, 2, 29), datetime.date(1900, 1, 1), None]
    if tests.is_timestamp(kind):
        return [datetime.datetime(2024, 1, 1, 3), datetime.datetime(1900, 1, 1), None]
    if tests.is_time(kind):
        return [datetime.time(1, 2, 3), datetime.time(0), None]
    if tests.is_duration(kind):
        return [datetime.timedelta(seconds=5), datetime.timedelta(0), None]
    if tests.is_struct(kind):
        return [{field.name: cells(field.type)[at] for field in kind} for at in (0, 2)] + [None]
    if tests.is_map(kind):
        return [[("key", cells(kind.item_type)[0])], [], None]
    if tests.is_nested(kind):
        return [cells(kind.value_type)[:2], cells(kind.value_type)[1:], None]
    if tests.is_fixed_size_binary(kind):
        return [b"abc", b"\xff\x00x", None]
    return ["aé", "", None] if "string" in str(kind) else [b"\xff\x01", b"", None]


def file_of(name: str, column: pa.Array) -> MemoryFile:
    made = MemoryFile(pa.table({"k": column}))
    made.name = name
    return made


def value(cell: Any) -> Any:
    """A cell whose structs lack the fields that are null, and whose times have no type of pandas'."""
    if isinstance(cell, dict):
        return {name: value(one) for name, one in cell.items() if one is not None}
    if isinstance(cell, list | tuple):
        return [value(one) for one in cell]
    plain = getattr(cell, "to_pydatetime", None) or getattr(cell, "to_pytimedelta", None)
    return plain() if plain else cell


def shown(kind: pa.DataType) -> str:
    return cut(str(kind), VALUE_CHARS)


@pytest.mark.second
@settings(max_examples=300, deadline=None)
@given(one=TYPES, other=TYPES)
@example(*(pa.struct({f"field{i}": kind for i in range(40)}) for kind in (pa.string(), pa.int8())))
def test_two_types_are_read_without_any_loss_or_refused_with_both_names(one: pa.DataType, other: pa.DataType) -> None:
    arrays = [pa.array(cells(kind), kind) for kind in (one, other)]
    files = [file_of(name, array) for name, array in zip("ab", arrays, strict=True)]
    kind = wider(one, other)
    if kind is None:
        with pytest.raises(InputError) as caught:
            files_of_dataset(files)
        assert str(caught.value).startswith(f"column 'k' differs between files: b has {shown(other)}, a has {shown(one)}")
        assert str(caught.value).endswith("; give all files the same columns or run them as two jobs")
        return
    schema, read = files_of_dataset(files)
    assert schema.field("k").type == kind
    for file, array in zip(read, arrays, strict=True):
        (batch,) = file.read(file.parts[0], ["k"])
        column = batch.column(0)
        assert not batch.schema.metadata
        column.validate(full=True)
        found = column.dictionary_decode() if column.type != kind else column
        assert found.equals(array.cast(kind))
        assert [*map(value, column.to_pylist())] == [*map(value, array.to_pylist())]


@settings(max_examples=100, deadline=None)
@given(kinds=st.lists(TYPES, min_size=1, max_size=2))
def test_a_wider_type_holds_both_whatever_their_order(kinds: list[pa.DataType]) -> None:
    one, other = kinds[0], kinds[-1]
    both, same = wider(one, other), wider(other, one)
    assert (both is None) == (same is None)
    assert wider(one, one) == one
    if both is not None:
        assert wider(both, one) == both
        assert wider(both, other) == both


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint32(), pa.int8(), pa.int64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int16(), pa.float32(), pa.float32()),
        (pa.int32(), pa.float32(), pa.float64()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.null(), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.decimal128(5, 2), pa.decimal128(8, 1), pa.decimal128(9, 2)),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.large_list(pa.int64())),
        (pa.list_(pa.field("item", pa.int8(), False)), pa.list_(pa.int8()), pa.list_(pa.int8())),
        (pa.struct({"a": pa.int8()}), pa.struct({"b": pa.string()}), pa.struct({"a": pa.int8(), "b": pa.string()})),
    ],
)
def test_what_differs_without_loss_has_the_wider_type(one: pa.DataType, other: pa.DataType, both: pa.DataType) -> None:
    assert wider(one, other) == both


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.string(), pa.int64()), (pa.string(), pa.binary()), (pa.bool_(), pa.int8()), (pa.int64(), pa.float64()),
        (pa.uint64(), pa.int8()), (pa.timestamp("us"), pa.timestamp("us", "UTC")), (pa.date32(), pa.timestamp("us")),
        (pa.decimal128(38, 0), pa.decimal128(38, 10)), (pa.struct({"a": pa.int8()}), pa.struct({"a": pa.string()})),
        (pa.float64(), pa.decimal128(5, 2)), (pa.list_(pa.int8()), pa.int8()),
    ],
)  # fmt: skip
def test_what_would_lose_something_is_refused(one: pa.DataType, other: pa.DataType) -> None:
    assert wider(one, other) is None


def test_whole_numbers_and_floats_are_refused_with_the_reason() -> None:
    files = [file_of("a", pa.array([1])), file_of("b", pa.array([1.5]))]
    with pytest.raises(InputError, match=r"b has double, a has int64 \(a float64 holds whole numbers exactly up to 2\*\*53 only"):
        common_schema(files)


def test_the_file_that_does_not_agree_is_named_though_it_is_not_the_first() -> None:
    files = [file_of("a", pa.array([1], pa.int8())), file_of("b", pa.array([1], pa.int64())), file_of("c", pa.array([1.5]))]
    with pytest.raises(InputError, match="c has double, b has int64"):
        common_schema(files)


# --- of files


def write(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


def read_rows(source: Source) -> list[dict[str, Any]]:
    return [row for shard in source.shards(3) for row in shard.table.to_pylist()]


def test_columns_in_another_order_missing_ones_and_new_ones(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", id=["1"], prompt=["x"], k=pa.array([1], pa.int32()))
    write(tmp_path / "b.parquet", k=[2**40], more=[True], prompt=pa.array(["y"], pa.large_string()), id=["2"])
    write(tmp_path / "c.parquet", prompt=["z"], id=["3"])
    source = open_source(InputConfig(path=str(tmp_path)))
    assert source.schema == pa.schema(
        {"id": pa.string(), "prompt": pa.large_string(), "k": pa.int64(), "more": pa.bool_()}
    )
    assert read_rows(source) == [
        {"id": "1", "prompt": "x", "k": 1, "more": None}, {"id": "2", "prompt": "y", "k": 2**40, "more": True},
        {"id": "3", "prompt": "z", "k": None, "more": None},
    ]
    assert [array.type for array in source.column("k")] == [pa.int64()] * 3
    assert read_rows(source.reading(["more"])) == [{"more": None}, {"more": True}, {"more": None}]


def test_a_date_that_the_finer_unit_does_not_hold_costs_its_row(tmp_path: Path) -> None:
    when = [datetime.datetime(year, 1, 1) for year in (2024, 3000, 2025)]
    write(tmp_path / "a.parquet", id=["1", "2", "3"], when=pa.array(when, pa.timestamp("ms")))
    write(tmp_path / "b.parquet", id=["4"], when=pa.array(when[:1], pa.timestamp("ns")))
    source = open_source(InputConfig(path=str(tmp_path)))
    (shard,) = source.shards(9)
    assert shard.table["when"].cast(pa.timestamp("us")).to_pylist() == [when[0], None, when[2], when[0]]
    assert shard.table["id"].to_pylist() == ["1", "2", "3", "4"]
    assert {row: bad.code for row, bad in shard.bad.items()} == {1: "bad_value"}
    assert "column 'when' is read as timestamp[ns]" in shard.bad[1].message
    assert not next(iter(source.reading(["id"]).shards(9))).bad


def test_long_values_that_rows_share_stay_shared_in_the_wider_type(tmp_path: Path) -> None:
    long = "x" * 200_000
    write(tmp_path / "a.parquet", prompt=[long] * 400)
    write(tmp_path / "b.parquet", prompt=pa.array(["y"], pa.large_string()))
    (shard,) = open_source(InputConfig(path=str(tmp_path))).shards(500)
    assert shard.table.nbytes < 10_000_000
    assert shard.table["prompt"].type.value_type == pa.large_string()
    assert set(shard.table["prompt"].unique().to_pylist()) == {long, "y"}


def test_files_of_two_formats_have_the_same_columns(tmp_path: Path) -> None:
    """JSON beside Parquet may be something else than data."""
    write(tmp_path / "a.parquet", prompt=["x"], k=[1])
    (tmp_path / "b.jsonl").write_text('{"prompt": "y"}\n')
    with pytest.raises(InputError, match=r"column 'k' differs between files: b\.jsonl has no such column, a\.parquet has int64"):
        open_source(InputConfig(path=str(tmp_path)))
    (tmp_path / "b.jsonl").write_text('{"prompt": "y", "k": 2}\n')
    assert [row["k"] for row in read_rows(open_source(InputConfig(path=str(tmp_path))))] == [1, 2]


def test_csv_files_may_have_other_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,k\nx,1\n")
    (tmp_path / "b.csv").write_text("more,prompt\n2,y\n")
    assert read_rows(open_source(InputConfig(path=str(tmp_path)))) == [
        {"prompt": "x", "k": "1", "more": None}, {"prompt": "y", "k": None, "more": "2"}
    ]
