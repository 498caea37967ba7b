"""Arrow IPC files and streams as input: all their rows, record batch by record batch, or one line that says what is wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.arrow_file import ArrowFile
from batchspec.data.dataset.reader import Source, open_source
from batchspec.data.dataset.writer import plain_table
from batchspec.data.storage.places import LocalPlace
from batchspec.errors import InputError

Row = dict[str, Any]


def table(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    kinds = pa.array(["even" if i % 2 == 0 else None for i in rows]).dictionary_encode()
    return pa.table({"id": [f"q-{i}" for i in rows], "prompt": [f"say {i}" for i in rows], "kind": kinds, "k": [*rows]})


def written(data: pa.Table, batch_rows: int, *, stream: bool, **options: Any) -> bytes:
    sink = io.BytesIO()
    made = (ipc.new_stream if stream else ipc.new_file)(sink, data.schema, options=ipc.IpcWriteOptions(**options))
    with made as writer:
        writer.write_table(data, max_chunksize=batch_rows)
    return sink.getvalue()


def source_of(path: Path | str) -> Source:
    return open_source(InputConfig(path=str(path)))


def rows(source: Source, shard_rows: int = 3) -> list[Row]:
    return [row for shard in source.shards(shard_rows) for row in shard.table.to_pylist()]


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        rows(source_of(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 30), batch_rows=st.integers(1, 9), stream=st.booleans(), codec=st.sampled_from([None, "lz4", "zstd"]),
    shard_rows=st.integers(1, 9), legacy=st.booleans(),
)
def test_every_row_is_read_however_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch_rows: int, stream: bool, codec: str | None, shard_rows: int,
    legacy: bool,
) -> None:  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "in.arrow"
    data = table(0, count)
    path.write_bytes(written(data, batch_rows, stream=stream, compression=codec, use_legacy_format=legacy))
    source = source_of(path)
    assert rows(source, shard_rows) == data.to_pylist()
    assert [value for array in source.column("k") for value in array.to_pylist()] == [*range(count)]
    assert source.schema.field("kind").type == data.schema.field("kind").type
    assert rows(source.reading(["k"])) == [{"k": k} for k in range(count)]


@pytest.mark.parametrize("name", ["in.arrow", "in.arrows", "in.feather", "in.ipc"])
def test_what_polars_and_pyarrow_write_is_read(tmp_path: Path, name: str) -> None:
    frame = pl.DataFrame({"prompt": ["a", "é", None], "kind": pl.Series(["x", "y", "x"], dtype=pl.Categorical)})
    path = tmp_path / name
    for write in (
        lambda: frame.write_ipc(path), lambda: frame.write_ipc_stream(path), lambda: frame.write_ipc(path, compression="zstd"),
        lambda: feather.write_feather(frame.to_arrow(), str(path)),
    ):
        write()
        assert rows(source_of(path)) == frame.to_dicts()


def test_categories_of_polars_are_copied_to_the_output_or_refused_by_name(tmp_path: Path) -> None:
    """They are dictionaries of views, whose values Arrow cannot repeat."""
    path = tmp_path / "in.arrow"
    frame = pl.DataFrame({"prompt": ["a", "b"], "kind": pl.Series(["x", "y"], dtype=pl.Categorical)})
    frame.write_ipc(path)
    (shard,) = source_of(path).shards(9)
    assert plain_table(shard.table)["kind"].to_pylist() == ["x", "y"]
    frame.select("prompt", pl.struct("kind")).write_ipc(path)
    assert "in.arrow: column 'kind' has categories in struct<" in refusal(path)


def test_dictionaries_that_grow_or_are_replaced_within_a_stream(tmp_path: Path) -> None:
    for deltas in (True, False):
        chunks = [["a", "b"], ["a", "b", "c"], ["x"], ["x", "y"]] if not deltas else [["a"], ["a", "b"], ["a", "b", "c"]]
        batches = [pa.DictionaryArray.from_arrays(pa.array([len(one) - 1]), pa.array(one)) for one in chunks]
        data = pa.table({"prompt": pa.chunked_array(batches)})
        (tmp_path / "in.arrow").write_bytes(
            written(data, 9, stream=True, emit_dictionary_deltas=deltas, unify_dictionaries=False)
        )
        assert rows(source_of(tmp_path / "in.arrow")) == data.to_pylist()


def test_opening_reads_headers_alone_and_a_shard_its_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.arrow"
    for stream in (True, False):
        data = pa.table({"prompt": ["x" * 100_000] * 100})
        path.write_bytes(written(data, 10, stream=stream))
        read: list[int] = []

        class Counted(io.FileIO):
            def readinto(self, buffer: Any, read: list[int] = read) -> int:
                got = super().readinto(buffer)
                read.append(got)
                return got

        monkeypatch.setattr(LocalPlace, "open", lambda place: io.BufferedReader(Counted(place.path), 1 << 12))
        file = ArrowFile(LocalPlace(path), "in.arrow", digest_bytes=0)
        assert [part.num_rows for part in file.parts] == [10] * 10
        digest_bytes = 8 * (64 << 10)
        assert sum(read) < digest_bytes + 200_000
        read.clear()
        assert sum(batch.num_rows for batch in file.read(file.parts[7], ["prompt"])) == 10
        assert sum(read) < 1_200_000
        monkeypatch.undo()


def test_a_digest_tells_headers_and_blocks(tmp_path: Path) -> None:
    path, data = tmp_path / "in.arrow", pa.table({"prompt": ["x" * 1000] * 1000})
    digests = set()
    for batch_rows in (10, 20, 20):
        path.write_bytes(written(data, batch_rows, stream=True))
        file = ArrowFile(LocalPlace(path), "in.arrow", digest_bytes=0)
        digests.add(file.digest)
        assert file.digest_of(1 << 30) != file.digest
    assert len(digests) == 2


def test_a_file_that_was_cut_off_or_is_no_arrow_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.arrow"
    for stream in (True, False):
        whole = written(table(0, 20), 5, stream=stream)
        for cut in [*range(0, len(whole), 101), len(whole) - 1, len(whole) - 8]:
            path.write_bytes(whole[:cut])
            assert "in.arrow is cut off, or no Arrow IPC data" in refusal(path), cut
    for data in (b'{"prompt": "x"}\n' * 9, b"\xff" * 99, b"\0" * 99):
        path.write_bytes(data)
        assert "no Arrow IPC data" in refusal(path)
    path.write_bytes(b"FEA1 and more")
    assert "in.arrow is Feather version 1; write it as Parquet" in refusal(path)
    pq.write_table(table(0, 1), path)
    assert "no Arrow IPC data" in refusal(path)


@pytest.mark.second
@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), stream=st.booleans())
def test_a_damaged_byte_never_ends_the_process(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, stream: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.arrow"
    data = bytearray(written(table(0, 20), 5, stream=stream))
    data[at % len(data)] = byte
    path.write_bytes(data)
    try:
        rows(source_of(path))
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017 (not every byte matters)
