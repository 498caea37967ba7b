"""Hive partitions: folders `key=value` are columns, with the values and types that polars reads."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.partitions import NULL
from batchspec.data.dataset.reader import Source, open_source
from batchspec.errors import InputError

VALUES = [
    "1", "-5", "007", "2024", "+5", "1e5", "1.5", ".5", "5.", "NaN", "inf", "true", "False", "null", "en", "a b", "ä", "你好",
    "a+b", "2024-01-01", "2024-02-30", "2024-1-1", "2024-01-01 10:00:00", "2024-01-01T00:00:00.123456",
    "2024-01-01 00:00:00+00:00",
    "9223372036854775807", "1_000", " 1", "0x10", "20240101", "50%", "a/b", "",
]
"""Values of folders, before they are encoded."""


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(columns or {"prompt": ["say"]}).write_parquet(path)
    return path


def source_of(*paths: Path | str) -> Source:
    return open_source(InputConfig(path=[*map(str, paths)]))


def rows(source: Source) -> list[dict[str, Any]]:
    return [row for shard in source.shards(3) for row in shard.table.to_pylist()]


def refusal(*paths: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        source_of(*paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- values and types


@pytest.mark.second
@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.sampled_from([*VALUES, NULL]), min_size=1, max_size=4, unique=True))
@example(values=[NULL])
@example(values=["", "1"])
@example(values=["", "en"])
@example(values=["1", "en"])
@example(values=["2024-01-01", NULL])
def test_values_and_types_are_those_that_polars_reads(values: list[str]) -> None:
    folder = Path(tempfile.mkdtemp())
    for value in values:
        write(folder / f"k={quote(value, safe=' +')}/a.parquet")
    expected = pl.read_parquet(folder, hive_partitioning=True)
    source = source_of(folder)
    read = pl.from_arrow(pa.concat_tables(shard.table for shard in source.shards(2)))
    assert isinstance(read, pl.DataFrame)
    assert read.schema == expected.schema
    assert sorted(map(repr, read.rows())) == sorted(map(repr, expected.rows()))
    shutil.rmtree(folder)


def test_a_file_lies_in_several_partitions_and_in_other_folders(tmp_path: Path) -> None:
    write(tmp_path / "lang=en/sub/year=2024/a.parquet")
    write(tmp_path / "year=2023/lang=de/a.parquet")
    source = source_of(tmp_path)
    assert source.schema.names == ["prompt", "lang", "year"]
    assert rows(source) == [{"prompt": "say", "lang": "en", "year": 2024}, {"prompt": "say", "lang": "de", "year": 2023}]


@pytest.mark.parametrize(
    ("folder", "value"),
    [("k=a=b", "a=b"), ("k=%ff", "%ff"), ("k=12:30:00", "12:30:00"), ("k=9223372036854775808", "9223372036854775808")],
)
def test_a_value_that_polars_leaves_out_or_stops_at_is_text(tmp_path: Path, folder: str, value: str) -> None:
    write(tmp_path / folder / "a.parquet")
    assert rows(source_of(tmp_path)) == [{"prompt": "say", "k": value}]


def test_a_file_without_the_partition_has_null(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet")
    write(tmp_path / "k=1/a.parquet")
    assert [row["k"] for row in rows(source_of(tmp_path))] == [None, 1]


# --- which folders are partitions


def test_partitions_are_the_folders_below_what_the_entries_have_in_common(tmp_path: Path) -> None:
    for lang in ("de", "en"):
        write(tmp_path / f"in/lang={lang}/a.parquet")
    de, en = tmp_path / "in/lang=de", tmp_path / "in/lang=en"
    both, none = ["de", "en"], [None]
    for paths, langs in (
        ([tmp_path / "in"], both), ([tmp_path / "in/*/*.parquet"], both), ([tmp_path / "in/**"], both),
        ([tmp_path / "in/lang=*/a.parquet"], both), ([de, en], both), ([de / "a.parquet", en / "a.parquet"], both),
        ([de], none), ([de / "a.parquet"], none), ([de / "*.parquet"], none),
    ):
        assert [row.get("lang") for row in rows(source_of(*paths))] == langs, paths


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"prompt": "say"}\n'), ("a.csv", "prompt\nsay\n")])
def test_json_lines_and_csv_have_partitions_too(tmp_path: Path, name: str, text: str) -> None:
    for temperature in (0.5, 1):
        folder = tmp_path / f"temperature={temperature}"
        folder.mkdir()
        (folder / name).write_text(text)
    source = source_of(tmp_path)
    assert source.schema.field("temperature") == pa.field("temperature", pa.float64())
    assert [row["temperature"] for row in rows(source)] == [0.5, 1.0]


def test_a_partition_alone_is_read_and_bad_lines_stay_bad(tmp_path: Path) -> None:
    folder = tmp_path / "prompt=say%20it"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"x": 1}\n{\n{"x": 2}\n')
    source = source_of(tmp_path)
    assert [piece for array in source.column("prompt") for piece in array.to_pylist()] == ["say it"] * 3
    (shard,) = source.reading(["prompt"]).shards(9)
    assert shard.table.to_pydict() == {"prompt": ["say it"] * 3}
    assert [*shard.bad] == [1]


def test_a_folder_whose_key_begins_with_an_underscore_is_a_partition_and_no_hidden_folder(tmp_path: Path) -> None:
    write(tmp_path / "_year=2024/a.parquet")
    write(tmp_path / "_hidden/a.parquet")
    for path in (tmp_path, tmp_path / "**/*.parquet"):
        assert rows(source_of(path)) == [{"prompt": "say", "_year": 2024}]


# --- a column that the files have too


def test_a_column_that_says_what_the_folder_says_is_the_files_own(tmp_path: Path) -> None:
    """polars writes the keys into the files."""
    frame = pl.DataFrame({"prompt": ["a", "b", "c"], "k": pl.Series([1, 2, None], dtype=pl.Int16), "d": ["x y", "%", "é"]})
    frame.write_parquet(f"{tmp_path / 'in'}/", partition_by=["k", "d"], mkdir=True)
    source = source_of(tmp_path / "in")
    assert source.schema.field("k").type == pa.int16()
    assert sorted(map(repr, rows(source))) == sorted(map(repr, frame.to_dicts()))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv"])
def test_a_column_that_says_something_else_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "in/lang=en" / name
    path.parent.mkdir(parents=True)
    frame = pl.DataFrame({"prompt": ["a", "b"], "lang": ["en", "de"]})
    writers: dict[str, Any] = {"a.parquet": frame.write_parquet, "a.jsonl": frame.write_ndjson, "a.csv": frame.write_csv}
    writers[name](path)
    assert f"lang=en/{name} lies in a folder lang=en, and its own column 'lang' has another value" in refusal(tmp_path / "in")
    assert [row["lang"] for row in rows(source_of(path.parent))] == ["en", "de"]


def test_one_key_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "k=1/k=2/a.parquet")
    assert "k=1/k=2/a.parquet lies in two folders named k=...:" in refusal(tmp_path)


def test_json_lines_of_which_one_file_has_the_column_and_the_other_the_folder(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"prompt": "x", "k": 3}\n'), ("k=4/b.jsonl", '{"prompt": "y"}\n')):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [row["k"] for row in rows(source_of(tmp_path))] == [3, 4]
