"""`batchspec compact`: a finished job's rows in few large files, whole or not at all, and the job as it was."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from batchspec.commands import compact as compact_module
from batchspec.commands.compact import main
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.runstate.shard_writer import row_ids
from batchspec.errors import ConfigError, OutputError, StorageError
from tests.helpers.io_samples import built, completion, dataset, failed, new_folder, shards_of

ROWS = 11


def job(path: Path, *, shards: int = 6) -> OutputFolder:
    """Shards of two rows: one row with three samples, one error."""
    parts, columns = shards_of(dataset(ROWS), 2)
    folder = new_folder(path, ROWS, 2)
    for part in parts[:shards]:
        rows = [failed(row) if row == 4 else completion(row) for row in folder.rows_of(part.index)]
        more = [completion(7, 1), completion(7, 2)] if 7 in folder.rows_of(part.index) else []
        folder.commit(part.index, built(part, columns, [*rows, *more]))
    if shards == 6:
        folder.finish("# the card")
    return folder


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_all_rows_come_in_their_order_in_one_file_and_the_job_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(tmp_path / "out")
    before = files(tmp_path / "out")
    assert main([str(tmp_path / "out"), str(tmp_path / "few")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/few: 13 rows of 6 shards in 1 file\n"
    assert sorted(files(tmp_path / "few")) == ["README.md", "data/part-00000.parquet"]
    assert pl.read_parquet(tmp_path / "few/data").equals(folder.scan().collect())
    assert (tmp_path / "few/README.md").read_text() == "# the card"
    metadata = pq.read_metadata(tmp_path / "few/data/part-00000.parquet").metadata
    assert metadata[b"batchspec.job"].decode() == folder.manifest.job
    assert files(tmp_path / "out") == before


def test_files_end_at_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_module, "GROUP_ROWS", 3)
    folder = job(tmp_path / "out")
    target = tmp_path / "few"
    assert compact_module.compact(folder, target, file_bytes=1) == (3, 13)
    parts = sorted((target / "data").iterdir())
    assert [part.name for part in parts] == [f"part-{i:05d}.parquet" for i in range(3)]
    assert pl.read_parquet(target / "data").equals(folder.scan().collect())
    assert [pq.read_metadata(part).num_rows for part in parts] == [4, 6, 3]


def test_ids_are_compared_a_row_group_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file holds millions of short rows, and the ids of all of them would be gigabytes."""
    most, names = 0, list[weakref.ref[RequestId]]()

    def counted(table: Any) -> list[Any]:
        nonlocal most
        rows = [(row, sample, RequestId(name)) for row, sample, name in row_ids(table)]
        names.extend(weakref.ref(name) for _, _, name in rows)
        most = max(most, sum(name() is not None for name in names))
        return rows

    monkeypatch.setattr(compact_module, "row_ids", counted)
    monkeypatch.setattr(compact_module, "GROUP_ROWS", 2)
    job(tmp_path / "out")
    assert main([str(tmp_path / "out"), str(tmp_path / "few")]) == 0
    assert pq.read_metadata(tmp_path / "few/data/part-00000.parquet").num_row_groups == 7
    assert most == 2


class RequestId(str):
    """An id that can be counted while it is in memory."""

    __slots__ = ("__weakref__",)


def test_only_a_whole_and_undamaged_job_is_compacted(tmp_path: Path) -> None:
    job(tmp_path / "part", shards=5)
    with pytest.raises(OutputError, match=r"1 of 6 shards are missing; run the job to its end before compact"):
        main([str(tmp_path / "part"), str(tmp_path / "few")])
    job(tmp_path / "out")
    file = tmp_path / "out/data/part-00003.parquet"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StorageError, match=r"part-00003.parquet: its .* bytes are not those that were committed"):
        main([str(tmp_path / "out"), str(tmp_path / "few")])
    assert {path.name for path in tmp_path.iterdir()} == {"part", "out"}


def test_a_disk_that_changes_a_file_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path / "out")
    monkeypatch.setattr(compact_module, "parquet_file", lambda path, **rest: Reversed(pq.read_table(path)))
    with pytest.raises(StorageError, match="reads back with other rows; check the disk"):
        main([str(tmp_path / "out"), str(tmp_path / "few")])
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


class Reversed:
    """A file whose rows come back in another order."""

    num_row_groups = 1

    def __init__(self, table: Any) -> None:
        self._table = table

    def __enter__(self) -> Reversed:
        return self

    def __exit__(self, *rest: object) -> None:
        pass

    def read_row_group(self, index: int) -> Any:
        return self._table.take(list(reversed(range(self._table.num_rows))))


def test_a_folder_that_cannot_be_new_is_refused_by_name(tmp_path: Path) -> None:
    out = job(tmp_path / "out").path
    (tmp_path / "there").mkdir()
    for name, message in (
        ("there", "there exists; compact writes a new folder"), ("no/where", "is not a folder"),
        ("out/few", "lies inside the job's own folder"),
    ):
        with pytest.raises(OutputError, match=message):
            main([out, str(tmp_path / name)])
    with pytest.raises(OutputError, match="compact writes a local folder"):
        main([out, "s3://bucket/few"])
    with pytest.raises(ConfigError, match="--file-mb 0"):
        main([out, str(tmp_path / "few"), "--file-mb", "0"])
