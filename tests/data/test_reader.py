"""Reading the input: what is found, what is refused, and that shards partition the rows however the files are cut."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.columns import ColumnMap, map_columns
from batchspec.data.dataset.input_paths import check_apart
from batchspec.data.dataset.reader import Source, derived_ids, open_source, place_in_file, table_source
from batchspec.data.dataset.row_ids import check_ids, request_ids
from batchspec.data.dataset.untyped_columns import as_text
from batchspec.errors import ConfigError, InputError


def write(path: Path, table: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def numbered(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    return pa.table({"id": [f"q-{i}" for i in rows], "prompt": [f"say {i}" for i in rows]})


def source_of(path: Any, limit: int | None = None) -> Source:
    return open_source(InputConfig(path=path, limit=limit))


def prompts(source: Source, shard_rows: int = 4) -> list[str]:
    return [text for shard in source.shards(shard_rows) for text in shard.table["prompt"].to_pylist()]


def id_columns(source: Source) -> ColumnMap:
    return map_columns(source.schema, {})


# --- finding files


def test_a_folder_is_read_in_order_of_name_and_hidden_files_are_no_data(tmp_path: Path) -> None:
    write(tmp_path / "in/b.parquet", numbered(2, 2))
    write(tmp_path / "in/a/z.parquet", numbered(0, 2))
    write(tmp_path / "in/_tmp/x.parquet", numbered(90, 1))
    write(tmp_path / "in/.y.parquet", numbered(91, 1))
    (tmp_path / "in/README.md").write_text("not data")
    source = source_of(str(tmp_path / "in"))
    assert [file.name for file in source.files] == ["a/z.parquet", "b.parquet"]
    assert prompts(source) == ["say 0", "say 1", "say 2", "say 3"]


def test_globs_and_lists_name_files_relative_to_what_they_share(tmp_path: Path) -> None:
    for i, name in enumerate(("x/p.parquet", "x/q.parquet", "y/p.parquet")):
        write(tmp_path / name, numbered(i, 1))
    assert [f.name for f in source_of(str(tmp_path / "*/p.parquet")).files] == ["x/p.parquet", "y/p.parquet"]
    listed = source_of([str(tmp_path / "y"), str(tmp_path / "x/q.parquet")])
    assert [f.name for f in listed.files] == ["x/q.parquet", "y/p.parquet"]
    assert [f.name for f in source_of(tmp_path / "x/q.parquet").files] == ["q.parquet"]


def test_a_row_is_located_in_its_file(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", numbered(0, 3))
    write(tmp_path / "b.parquet", numbered(3, 2))
    source = source_of(str(tmp_path))
    assert derived_ids(source, 1, 4) == ["a.parquet:1", "a.parquet:2", "b.parquet:0"]
    assert [place_in_file(source, row) for row in (0, 4)] == ["a.parquet row 0", "b.parquet row 1"]


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
def test_messages_name_the_line_of_a_text_file_as_an_editor_counts_and_the_row_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    """Blank lines, a header, and cells with line breaks are lines too."""
    monkeypatch.setattr("batchspec.data.dataset.files.BATCH_BYTES", batch_bytes)
    monkeypatch.setattr("batchspec.data.dataset.lines.MAX_LINE_BYTES", 40)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n\n\n{"prompt": "4"}\nno json\n' + " " * 50 + '\n\n{"prompt": "8"}')
    (tmp_path / "b.jsonl").write_text('\n{"prompt": "2"}\n')
    (tmp_path / "c.csv").write_text('prompt\n2\n"3\n\n5"\n6\n\n8\n9,9\n' + "x" * 50 + "\n11\n")
    write(tmp_path / "d.parquet", pa.table({"prompt": ["0", "1"]}))

    def places(name: str) -> list[str]:
        source = source_of(str(tmp_path / name))
        return [place_in_file(source, row) for row in range(source.num_rows)]

    lines = [f"a.jsonl line {line}" for line in (1, 4, 5, 6, 8)] + ["b.jsonl line 2"]
    assert places("*.jsonl") == lines
    assert places("c.csv") == [f"c.csv line {line}" for line in (2, 3, 6, 8, 9, 10, 11)]
    assert places("d.parquet") == ["d.parquet row 0", "d.parquet row 1"]


def test_json_lines_hold_whole_and_other_numbers_and_dates_stay_text(tmp_path: Path) -> None:
    lines = [{"prompt": "2020-01-01", "k": 1}, {"prompt": "b", "k": 2.5, "tags": ["2021-01-01"]}, {"prompt": None, "n": None}]
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    source = source_of(str(path))
    table = pa.concat_tables(shard.table for shard in source.shards(2))
    assert table.to_pylist() == [
        {"prompt": "2020-01-01", "k": 1.0, "tags": None, "n": None},
        {"prompt": "b", "k": 2.5, "tags": ["2021-01-01"], "n": None},
        {"prompt": None, "k": None, "tags": None, "n": None},
    ]


def test_json_lines_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchspec.data.dataset.files.BATCH_BYTES", 64)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(50)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "say 50", "late": 1}))
    source = source_of(str(tmp_path))
    assert prompts(source) == [f"say {i}" for i in range(51)]
    assert source.schema.names == ["prompt", "late"]
    assert [shard.first_row for shard in source.shards(16, skip={0, 1})] == [32, 48]


def test_lines_that_are_bad_cost_their_rows_and_keep_what_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f'{{"id": "q{i}", "prompt": "say {i}", "k": {i}}}' for i in range(40)]
    lines[0] = '{"id": "q0", "prompt": 5, "k": 1}'
    lines[7] = "{torn"
    lines[20] = '{"id": {"x": 1}, "prompt": "say 20", "k": "many"}'
    lines[21] = "[1, 2]"
    lines[39] = '{"id": "q39", "prompt": ["say 39"]}'
    (tmp_path / "in.jsonl").write_text("\n\n".join(lines))
    for block_bytes in (100, 1 << 20):
        monkeypatch.setattr("batchspec.data.dataset.files.BATCH_BYTES", block_bytes)
        source = source_of(str(tmp_path))
        columns = map_columns(source.schema, {})
        check_ids(source, columns)
        shards = list(source.shards(16))
        ids = [name for shard in shards for name in request_ids(source, columns, shard)]
        derived = {7: "in.jsonl:15", 20: '{"x": 1}', 21: "in.jsonl:43"}  # the numbers of their lines
        assert ids == [derived.get(i, f"q{i}") for i in range(40)]
        bad = {row: why for shard in shards for row, why in shard.bad.items()}
        assert {row: why.code for row, why in bad.items()} == {7: "bad_json", 21: "bad_json"}
        assert bad[21].message == "the line is a list, not an object; correct the line"
        alone = [shard.only(row) for shard in shards for row in range(shard.first_row, shard.first_row + shard.table.num_rows)]
        assert [(one.first_row, one.table.num_rows, dict(one.bad)) for one in alone] == [
            (row, 1, {row: bad[row]} if row in bad else {}) for row in range(40)
        ]
        assert [name for one in alone for name in request_ids(source, columns, one)] == ids
        # A column of several kinds holds each cell's own JSON: admission tells what is wrong with one, if it is mapped.
        table = pa.concat_tables(shard.table for shard in shards)
        other = {0: "5", 7: None, 21: None, 39: '["say 39"]'}
        assert table.column("prompt").to_pylist() == [other.get(i, f'"say {i}"') for i in range(40)]
        assert as_text(table.column("prompt"), source.schema.field("prompt")).to_pylist()[:2] == ["5", "say 1"]
        assert table.column("k").to_pylist()[18:22] == ["18", "19", '"many"', None]


# --- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "nowhere.parquet", "does not exist"),
        (
            lambda d: "org/name",
            r"does not exist; check the path \(the working folder is .*\); a dataset of the hub is hf://datasets/org/name",
        ),
        (lambda d: d / "*.parquet", "no data file there"),
        (lambda d: d, "no data file there"),
        (lambda d: (d / "in.txt").write_text("x") and d / "in.txt", "is not that of a data file; names end in one of"),
        *(
            (lambda d, entry=entry: (d / "a.JPG").write_text("x") and d / entry, f"{said}; images are no rows: .*image_root")
            for entry, said in (("a.JPG", "data file"), ("*.JPG", "file there"), (".", "file there"))
        ),
        (lambda d: write(d / "in.parquet", numbered(0, 0)), "no rows"),
        (lambda d: (d / "in.parquet").write_bytes(b"PAR1 cut") and d / "in.parquet", "in.parquet: cannot be read"),
        (lambda d: (d / "in.jsonl").write_text("\n \n") and d / "in.jsonl", "no rows"),
        (lambda d: [write(d / "in.parquet", numbered(0, 1))] * 2, "twice"),
    ],
)
def test_bad_paths_are_one_line_with_advice(tmp_path: Path, make: Any, message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        source_of(path if isinstance(path, list) else str(path))
    assert "\n" not in str(caught.value)


def test_no_path_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"input\.path is not set"):
        source_of(None)


def test_files_that_disagree_are_named_with_the_column(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"prompt": ["x"], "k": [1]}))
    write(tmp_path / "b.parquet", pa.table({"prompt": ["x"], "k": ["1"]}))
    with pytest.raises(InputError, match=r"column 'k' differs between files: b\.parquet has string, a\.parquet has int64"):
        source_of(str(tmp_path))


def test_a_damaged_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["x" * 1000] * 100})
    path = write(tmp_path / "in.parquet", table, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.parquet: cannot be read: .*(CRC|checksum)"):
        prompts(source_of(str(path)))


# --- shards


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 7)), min_size=1, max_size=4).filter(lambda f: any(dict(f))),
    limit=st.none() | st.integers(1, 40),
    shard_rows=st.integers(1, 9),
    skip=st.sets(st.integers(0, 20)),
    in_memory=st.booleans(),
)
def test_shards_partition_the_rows(
    files: list[tuple[int, int]], limit: int | None, shard_rows: int, skip: set[int], in_memory: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = 0
        for i, (count, group) in enumerate(files):
            write(Path(folder) / f"{i}.parquet", numbered(first, count), row_group_size=group)
            first += count
        source = table_source(numbered(0, first), limit) if in_memory else source_of(folder, limit)
        rows = first if limit is None else min(first, limit)
        shards = list(source.shards(shard_rows, skip))
        assert source.num_rows == rows
        assert [shard.index for shard in shards] == [i for i in range(-(-rows // shard_rows)) if i not in skip]
        for shard in shards:
            last = min((shard.index + 1) * shard_rows, rows)
            assert shard.first_row == shard.index * shard_rows
            assert shard.table["prompt"].to_pylist() == [f"say {i}" for i in range(shard.first_row, last)]
        assert [x for array in source.column("id") for x in array.to_pylist()] == [f"q-{i}" for i in range(rows)]


def test_row_groups_of_skipped_shards_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", numbered(0, 40), row_group_size=10, compression="none", use_dictionary=False,
                 write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[data.index(b"say 12")] ^= 1
    path.write_bytes(data)
    source = source_of(str(path))
    assert [shard.index for shard in source.shards(10, skip={1})] == [0, 2, 3]
    with pytest.raises(InputError):
        list(source.shards(10))


MEASURE = """
import resource, sys
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = sum(shard.table.num_rows for shard in open_source(InputConfig(path=sys.argv[1])).shards(256))
print(rows, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.second
@pytest.mark.parametrize("group", [500, 30_000])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, group: int) -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(8000))
    table = pa.table({"prompt": [f"{i} {text}" for i in range(30_000)]})  # 240 MB
    path = write(tmp_path / "in.parquet", table, row_group_size=group, use_dictionary=False)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    rows, megabytes = map(int, done.stdout.split())
    assert rows == 30_000
    assert megabytes < 100


# --- columns


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string()), ("name", pa.string())]))


def test_columns_map_by_name_and_by_the_users_word() -> None:
    schema = pa.schema([("question_id", pa.int64()), ("prompt", pa.string()), ("seed", pa.string()), ("n", pa.int32())])
    columns = map_columns(schema, {"id": "question_id", "seed": None})
    assert dict(columns.names) == {"id": "question_id", "prompt": "prompt", "n": "n"}
    assert (columns.prompt_kind, columns.prompt_column, columns.get("seed")) == ("prompt", "prompt", None)


def test_a_column_named_for_another_use_is_not_mapped_by_itself() -> None:
    schema = pa.schema([("prompt", pa.string()), ("text", pa.string())])
    assert dict(map_columns(schema, {"system": "prompt", "prompt": "text"}).names) == {"system": "prompt", "prompt": "text"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prompt", pa.dictionary(pa.int32(), pa.string())),
        ("prompt", pa.string_view()),
        ("messages", MESSAGES),
        ("messages", pa.large_list(MESSAGES.value_type)),
        ("prompt_ids", pa.list_(pa.uint16())),
    ],
)
def test_every_shape_of_prompt_is_taken(name: str, kind: pa.DataType) -> None:
    assert map_columns(pa.schema([(name, kind)]), {}).prompt_kind == name


@pytest.mark.parametrize(
    ("fields", "columns", "error", "message"),
    [
        ({"text": pa.string()}, {}, InputError, "the input's columns are text"),
        ({"prompt": pa.string(), "messages": MESSAGES}, {}, InputError, r"messages \(column 'messages'\) and prompt"),
        ({"prompt": pa.string()}, {"promt": "prompt"}, ConfigError, "did you mean 'prompt'"),
        ({"prompt": pa.string()}, {"id": "key"}, InputError, "no such column; its columns are prompt"),
        ({"prompt": pa.int64()}, {}, InputError, "has type int64; allowed: string"),
        ({"prompt": pa.string(), "n": pa.string()}, {}, InputError, "has type string; allowed: integer"),
        ({"messages": pa.list_(pa.string())}, {}, InputError, "allowed: list<struct<role"),
        ({"prompt": pa.null()}, {}, InputError, "has type null"),
    ],
)
def test_bad_mappings(fields: dict[str, pa.DataType], columns: dict[str, str | None], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        map_columns(pa.schema(list(fields.items())), columns)
    assert "\n" not in str(caught.value)


def test_an_optional_column_may_be_empty() -> None:
    assert map_columns(pa.schema([("prompt", pa.string()), ("stop", pa.null())]), {}).get("stop") == "stop"


# --- ids


@pytest.mark.second
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.text(max_size=2) | st.integers(0, 30).map(str), min_size=1, max_size=30), chunk=st.integers(1, 7))
def test_duplicates_are_found_exactly_when_a_set_finds_them(ids: list[str], chunk: int) -> None:
    chunks = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    table = pa.table({"id": pa.chunked_array(chunks, pa.string()), "prompt": ids})
    source = table_source(table)
    if len(set(ids)) == len(ids):
        check_ids(source, id_columns(source))
        assert [i for s in source.shards(3) for i in request_ids(source, id_columns(source), s)] == ids
    else:
        with pytest.raises(InputError, match="ids must be unique"):
            check_ids(source, id_columns(source))


def test_meeting_hashes_are_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr("batchspec.data.dataset.row_ids._hash", lambda array: np.zeros(len(array), np.uint64))
    source = table_source(numbered(0, 50))
    check_ids(source, id_columns(source))


def test_a_duplicate_names_both_rows_and_a_null_its_row(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"id": [1, 2, 3], "prompt": ["x"] * 3}))
    write(tmp_path / "b.parquet", pa.table({"id": [4, 2], "prompt": ["x"] * 2}))
    source = source_of(str(tmp_path))
    with pytest.raises(InputError, match=r"id '2' is in a\.parquet row 1 and again in b\.parquet row 1"):
        check_ids(source, id_columns(source))
    write(tmp_path / "b.parquet", pa.table({"id": [4, None], "prompt": ["x"] * 2}))
    source = source_of(str(tmp_path))
    with pytest.raises(InputError, match=r"b\.parquet row 1: the id \(column 'id'\) is null"):
        check_ids(source, id_columns(source))
    broken = pa.array([b"a", b"\xff"]).cast(pa.binary()).view(pa.string())
    source = table_source(pa.table({"id": broken, "prompt": ["x", "y"]}))
    with pytest.raises(InputError, match=r"table row 1: the id \(column 'id'\) is not valid UTF-8"):
        check_ids(source, id_columns(source))


def test_rows_without_ids_are_named_by_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", numbered(0, 3).drop(["id"]))
    write(tmp_path / "sub/b.parquet", numbered(3, 3).drop(["id"]))
    source = source_of(str(tmp_path), limit=5)
    columns = id_columns(source)
    check_ids(source, columns)
    ids = [request_ids(source, columns, shard) for shard in source.shards(2)]
    assert ids == [["a.parquet:0", "a.parquet:1"], ["a.parquet:2", "sub/b.parquet:0"], ["sub/b.parquet:1"]]


@pytest.mark.parametrize(
    ("path", "out", "inside"),
    [
        ("in", "in/out", True), ("in", "in", True), ("in/", "./in/a/../out", True), ("in/**/*.parquet", "in/out", True),
        (["other", "in"], "in/out", True), ("s3://b/in", "s3://b/in/out", True), ("in/*/data/*.parquet", "in/out", True),
        ("in/**/*.parquet", "in/_out", False), ("in/**", "in/.out", False), ("_in/**", "_in/out", True),
        ("in", "in/_out", False), ("in/*.parquet", "in/out", False), ("in", "out", False), ("in", "inner/out", False),
        ("s3://b/in", "in/out", False), ("s3://b/in", "s3://c/in/out", False), ("in/a.parquet", "in", False),
    ],
)
def test_the_output_is_no_part_of_the_input(path: Any, out: str, inside: bool) -> None:
    """Otherwise the first run succeeds, and the next one reads its output as input."""
    entries = path if isinstance(path, list) else [path]
    with pytest.raises(ConfigError, match=r"output.dir=.* lies in input.path=.*; choose another") if inside else nullcontext():
        check_apart(entries, out)
