"""A Parquet file takes bounded memory, however large its values become when they are decoded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec import run
from batchspec.config.schema import InputConfig
from batchspec.data.dataset import writer
from batchspec.data.dataset.decoding import Decoding, _all_differ, _dictionary, decoding_of
from batchspec.data.dataset.files import reading
from batchspec.data.dataset.reader import Source, open_source
from batchspec.data.dataset.writer import plain_table, write_parquet
from batchspec.errors import CapacityError
from tests.helpers.models import make_checkpoint, make_tokenizer

MB = 1 << 20
LONG, ROWS = "x" * MB, 3000
"""As text in each row it would take 3 GB."""
SHARED = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array([LONG]))
POOLS: list[pa.MemoryPool] = []
"""Arrays may live longer than the block that allocates them, and a pool must live as long."""
OFFSETS = pa.array(range(ROWS + 1), pa.int32())


def written(path: Path, column: pa.Array, **options: object) -> Path:
    table = pa.table({"prompt": [f"row {i}" for i in range(len(column))], "long": column})
    pq.write_table(table, path, **{"compression": "zstd", "dictionary_pagesize_limit": 64 * MB, "store_schema": False, **options})
    return path


def opened(path: Path, limit: int | None = None) -> Source:
    return open_source(InputConfig(path=str(path), limit=limit))


def decoding(path: Path, *names: str) -> Decoding:
    def head(begin: int, count: int) -> bytes:
        return path.read_bytes()[begin : begin + count]

    with pq.ParquetFile(path) as file:
        return decoding_of(file, 0, names, lambda paths: pq.ParquetFile(path, read_dictionary=list(paths)), head)


@contextmanager
def at_most(limit_mb: int) -> Iterator[None]:
    """Arrow allocates at most this much in the block."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield
    finally:
        pa.set_memory_pool(before)
    assert (pool.max_memory() or 0) < limit_mb * MB


TEXT, LARGE, BYTES = pa.string(), pa.large_string(), pa.binary()


@pytest.mark.parametrize("kind", [TEXT, LARGE, BYTES])
def test_a_long_value_that_rows_share_is_read_once(tmp_path: Path, kind: pa.DataType) -> None:
    shared = pa.DictionaryArray.from_arrays(SHARED.indices, SHARED.dictionary.cast(kind))
    path = written(tmp_path / "in.parquet", shared, store_schema=True)
    table = pq.ParquetFile(path).schema_arrow
    assert pa.types.is_dictionary(table.field("long").type)
    plain = written(tmp_path / "plain.parquet", shared)
    for source in (opened(path), opened(plain)):
        with at_most(40):
            shards = [shard.table.column("long") for shard in source.shards(512)]
        assert sum(map(len, shards)) == ROWS
        assert all(column[len(column) - 1].as_py() in (LONG, LONG.encode()) for column in shards)


@pytest.mark.second
def test_a_long_value_of_large_text_has_the_type_of_its_column(tmp_path: Path) -> None:
    """Arrow reads it as a dictionary of text. A file of 200 rows can be made without one."""
    path = written(tmp_path / "in.parquet", pa.array([LONG] * 200, LARGE), store_schema=True)
    source = opened(path)
    (shard,) = source.shards(200)
    assert source.schema.field("long").type == LARGE
    assert shard.table.schema.field("long").type == pa.dictionary(pa.int32(), LARGE)
    assert plain_table(shard.table).schema.field("long").type == LARGE


def test_a_single_column_comes_in_short_arrays_of_its_type(tmp_path: Path) -> None:
    source = opened(written(tmp_path / "in.parquet", SHARED))
    rows = 0
    with at_most(300):
        for array in source.column("long"):
            assert array.type == TEXT
            assert array.nbytes <= 65 * MB
            rows += len(array)
    assert rows == ROWS


@pytest.mark.second
@pytest.mark.parametrize(
    "nested", [pa.ListArray.from_arrays(OFFSETS, SHARED), pa.StructArray.from_arrays([SHARED], ["inner"])], ids=["list", "struct"]
)
def test_long_values_within_lists_and_structs_are_decoded_a_few_rows_at_a_time(tmp_path: Path, nested: pa.Array) -> None:
    source = opened(written(tmp_path / "in.parquet", nested))
    rows = 0
    with at_most(300):
        for shard in source.shards(16):
            rows += shard.table.num_rows
    assert rows == ROWS


@pytest.mark.second
def test_values_of_fixed_size_count_as_they_are_decoded(tmp_path: Path) -> None:
    """Run-length encoding makes a few bytes of a million numbers."""
    lists = pa.ListArray.from_arrays(pa.array(range(0, 101 * 100_000, 100_000), pa.int32()), pa.array([7] * 10_000_000))
    bytes_ = pa.DictionaryArray.from_arrays(pa.array([0] * 9000, pa.int32()), pa.array([b"x" * 10_000], pa.binary(10_000)))
    assert decoding(written(tmp_path / "lists.parquet", lists), "long").batch_rows == 5
    assert decoding(written(tmp_path / "bytes.parquet", bytes_.dictionary_decode()), "long").batch_rows == 419


def test_ordinary_columns_are_read_in_large_batches_as_before(tmp_path: Path) -> None:
    texts = [f"{'question' * 20} {i % 3000}" for i in range(50_000)]
    path = written(tmp_path / "in.parquet", pa.array(texts), dictionary_pagesize_limit=MB)
    assert decoding(path, "prompt", "long") == Decoding(4096)
    assert decoding(path, "prompt") == Decoding(4096)


def test_a_file_that_was_read_leaves_no_footer_behind(tmp_path: Path) -> None:
    """A run collects garbage rarely, and an input may have thousands of files, each with a footer of 100 KB."""
    path = written(tmp_path / "in.parquet", pa.array(["question"] * 10))
    gc.collect()
    gc.disable()
    try:
        before = [kept for kept in gc.get_objects() if isinstance(kept, pq.FileMetaData)]
        assert sum(shard.table.num_rows for shard in opened(path).shards(5)) == 10
        assert len([kept for kept in gc.get_objects() if isinstance(kept, pq.FileMetaData)]) == len(before)
    finally:
        gc.enable()


def test_texts_of_which_a_few_are_shared_stay_texts(tmp_path: Path) -> None:
    """A chunk that goes on with texts after its dictionary: Arrow would look up each of them in a growing dictionary."""
    texts = [LONG] * 100 + [f"{i} {'y' * 4000}" for i in range(5000)]
    path = written(tmp_path / "in.parquet", pa.array(texts), dictionary_pagesize_limit=MB, data_page_size=MB)
    assert decoding(path, "long") == Decoding(64)
    with at_most(150):
        assert sum(shard.table.num_rows for shard in opened(path).shards(16)) == 5100


@pytest.mark.second
def test_long_values_that_differ_are_read_as_they_are_although_they_are_in_a_dictionary(tmp_path: Path) -> None:
    """Images: Arrow would give all of them again with every batch."""
    images = pa.array([bytes([i]) * MB for i in range(80)], pa.binary())
    path = written(tmp_path / "in.parquet", images, dictionary_pagesize_limit=128 * MB)
    with pq.ParquetFile(path) as file:
        assert file.metadata.row_group(0).column(1).has_dictionary_page
    found = decoding(path, "prompt", "long")
    assert found.dictionaries == ()
    assert found.batch_rows <= 64
    twice = written(tmp_path / "twice.parquet", pa.concat_arrays([images, images]), dictionary_pagesize_limit=128 * MB)
    assert decoding(twice, "prompt", "long").dictionaries == ("long",)
    with at_most(350):  # the dictionary's page, its values, and batches of 4 MB
        read = [shard.table.column("long").to_pylist() for shard in opened(path).shards(16)]
    assert [row for rows in read for row in rows] == images.to_pylist()


@pytest.mark.parametrize("options", [{}, {"write_page_checksum": True}, {"data_page_version": "2.0"}])
def test_of_images_that_all_differ_no_dictionary_is_made(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of its page tells how many there are, with a check sum too. If two rows share one, its values are looked at."""
    made = list[str]()

    def counted(again: Any, group: int, path: str) -> pa.Array:
        made.append(path)
        return _dictionary(again, group, path)

    monkeypatch.setattr("batchspec.data.dataset.decoding._dictionary", counted)
    images = [bytes([i]) * (100 << 10) for i in range(70)]
    for more, dictionaries in (([], 0), ([images[3]], 1), ([None], 1), (images, 1)):
        rows = [*images, *more]
        path = written(tmp_path / "in.parquet", pa.array(rows, pa.binary()), dictionary_pagesize_limit=64 * MB, **options)
        made.clear()
        with at_most(64):
            read = [shard.table.column("long").to_pylist() for shard in opened(path).shards(16)]
        assert [row for shard in read for row in shard] == rows
        assert made == ["long"] * dictionaries


def test_a_damaged_header_of_a_dictionary_says_nothing(tmp_path: Path) -> None:
    images = pa.array([bytes([i]) * (100 << 10) for i in range(70)], pa.binary())
    path = written(tmp_path / "in.parquet", images, dictionary_pagesize_limit=64 * MB)
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(1)
    header = path.read_bytes()[chunk.dictionary_page_offset :][:64]
    assert _all_differ(chunk, lambda begin, count: header)
    for cut in range(12):
        assert not _all_differ(chunk, lambda begin, count, cut=cut: header[:cut])
        assert not _all_differ(chunk, lambda begin, count, cut=cut: b"\xff" * cut)


def test_a_dictionary_is_found_although_the_first_rows_have_no_value(tmp_path: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([None, *[0] * ROWS], pa.int32()), pa.array([LONG]))
    source = opened(written(tmp_path / "in.parquet", values))
    with at_most(100):
        assert sum(shard.table.num_rows for shard in source.shards(16)) == ROWS + 1


@pytest.mark.parametrize("name", ["lists", "maps", "structs", "extensions", "a.b"])
def test_a_dictionary_is_found_in_columns_of_all_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("batchspec.data.dataset.decoding.MOST_BYTES", 256 << 10)
    texts = [f'"{i % 700} {"y" * 200}"' for i in range(20_000)]
    column = {
        "lists": lambda: pa.array([*[None] * 99, *([[text]] for text in texts)], pa.large_list(pa.list_(TEXT))),
        "maps": lambda: pa.array([[("key", text)] for text in texts], pa.map_(TEXT, TEXT)),
        "structs": lambda: pa.array([{"number": 1, "texts": [text]} for text in texts]),
        "extensions": lambda: pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts)),
        "a.b": lambda: pa.array(texts),
    }[name]()
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({name: column}), path)
    assert 1 <= decoding(path, name).batch_rows <= 1300 or decoding(path, name).dictionaries == (name,)
    tables = [shard.table.column(name) for shard in opened(path).shards(3000)]
    assert [cell for table in tables for cell in table.to_pylist()] == column.to_pylist()


@pytest.mark.second
def test_values_with_shared_prefixes_are_decoded_a_few_rows_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    column = pa.array([LONG + str(i) for i in range(300)])
    pq.write_table(pa.table({"long": column}), path, use_dictionary=False, column_encoding={"long": "DELTA_BYTE_ARRAY"})
    assert path.stat().st_size < 2 * MB
    assert decoding(path, "long").batch_rows == 64


@pytest.mark.second
def test_a_shard_may_lie_in_row_groups_with_and_without_a_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    with pq.ParquetWriter(path, pa.schema({"prompt": TEXT, "long": TEXT}), compression="zstd") as file:
        for value, count in (("short", 3), (LONG, 200), ("end", 2)):
            file.write_table(pa.table({"prompt": ["p"] * count, "long": [value] * count}))
    (shard,) = opened(path).shards(1000)
    found = plain_table(shard.table).column("long")
    assert found.type == TEXT
    assert [len(text.as_py()) for text in found] == [5] * 3 + [MB] * 200 + [3] * 2


def test_a_shared_value_is_repeated_one_row_group_at_a_time_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GROUP_BYTES", 16 * MB)
    with at_most(120):
        write_parquet(pa.table({"long": SHARED.slice(0, 400)}), tmp_path / "out.parquet", {})
    footer = pq.read_metadata(tmp_path / "out.parquet")
    assert max(footer.row_group(i).num_rows for i in range(footer.num_row_groups)) <= 16
    assert pl.scan_parquet(tmp_path / "out.parquet").collect_schema() == {"long": pl.String}
    assert pl.read_parquet(tmp_path / "out.parquet")["long"].unique().to_list() == [LONG]


# --- what is not needed is not read


def damaged(path: Path, column: str, page: int) -> None:
    """Change a byte in a page of a column."""
    footer = pq.read_metadata(path).row_group(0)
    chunk = next(footer.column(i) for i in range(footer.num_columns) if footer.column(i).path_in_schema == column)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + page * chunk.total_compressed_size // 100] ^= 255
    path.write_bytes(data)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model"), "llama", dtype=torch.float64))


@pytest.mark.second
@pytest.mark.parametrize("passthrough", ["none", "[id]"])
def test_a_job_does_not_read_columns_that_it_neither_uses_nor_copies(model: Path, tmp_path: Path, passthrough: str) -> None:
    path = tmp_path / "in.parquet"
    rows = {"id": ["a", "b"], "prompt": ["Say one", "Say two"], "long": ["un", "used"]}
    pq.write_table(pa.table(rows), path, use_dictionary=False, write_page_checksum=True)
    damaged(path, "long", 60)
    arguments = [f"model.path={model}", "draft=none", "decode.max_new_tokens=2", f"input.path={path}"]
    arguments.append(f"output.dir={tmp_path}/out")
    assert run.main(arguments) == 2
    assert run.main([*arguments, f"output.passthrough={passthrough}"]) == 0
    found = pl.read_parquet(tmp_path / "out/data")
    assert found["status"].to_list() == ["truncated"] * 2
    assert ("id" in found.columns) is (passthrough == "[id]")


def test_rows_after_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    rows = {"prompt": [f"row {i:06d}" for i in range(50_000)]}
    pages = {"use_dictionary": False, "write_page_checksum": True, "data_page_size": 10_000, "compression": "none"}
    pq.write_table(pa.table(rows), path, **pages)
    damaged(path, "prompt", 90)
    (shard,) = opened(path, limit=20).shards(100)
    assert shard.table.column("prompt").to_pylist() == rows["prompt"][:20]
    assert [len(array) for array in opened(path, limit=20).column("prompt")] == [20]


def test_a_reader_without_memory_says_so() -> None:
    said = "in.parquet: out of memory while it was read \\(realloc of size 4096 failed\\); free the machine's memory, leave long"
    with pytest.raises(CapacityError, match=said), reading("in.parquet"):
        raise pa.ArrowMemoryError("realloc of size 4096 failed")
