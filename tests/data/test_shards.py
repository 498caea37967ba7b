"""The output folder: made once, resumed only by the same job, every shard committed whole and once."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.data.dataset.reader import InputFile
from batchspec.data.dataset.writer import write_parquet
from batchspec.data.runstate.manifest import default_shard_rows, differences, files_that_differ, fingerprint
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import ConfigError, OutputError, StorageError
from tests.helpers.io_samples import built, completion, dataset, new_folder, shards_of, tables


def visible(path: Path) -> list[str]:
    return sorted(os.listdir(path / "data")) if (path / "data").exists() else []


# --- fingerprints


def test_a_fingerprint_is_stable_and_short() -> None:
    first = fingerprint({"b": {"y": 1, "x": [1.5, None]}, "a": "text", "long": "z" * 1000})
    assert first == fingerprint({"long": "z" * 1000, "a": "text", "b": {"x": [1.5, None], "y": 1}})
    assert (first["a"], first["b"]) == ('"text"', '{"x":[1.5,null],"y":1}')
    assert first["long"].startswith("sha256:")


PARTS = st.dictionaries(st.sampled_from("abcd"), st.text(max_size=3))


@given(PARTS, PARTS)
def test_differences_name_exactly_the_keys_that_differ(old: dict[str, str], new: dict[str, str]) -> None:
    keys = [line.split(":")[0] for line in differences(old, new, {})]
    assert keys == sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


@pytest.mark.parametrize(("rows", "want"), [(1, 16), (4096, 16), (25_600, 100), (10**6, 512), (10**7, 4883), (10**8, 8192)])
def test_shards_are_cut_by_the_number_of_rows_alone(rows: int, want: int) -> None:
    assert default_shard_rows(rows) == want
    assert rows / want <= 2048 or want == 8192, "files of a job"


def test_input_files_that_differ_are_named() -> None:
    def file(name: str, num_rows: int = 2, digest: str = "x") -> InputFile:
        return InputFile(name=name, size_bytes=9, num_rows=num_rows, digest=digest)

    old = [file("a"), file("b"), file("c"), file("d")]
    new = [file("a"), file("b", digest="y"), file("c", num_rows=3), file("e")]
    assert files_that_differ(old, new) == ("b has other content, c has 3 rows and had 2, d is missing and 1 more file")
    assert files_that_differ(old, old[:2][::-1] + old[2:]) == "the same files in another order"


# --- making and resuming


def test_nothing_is_made_before_create(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out")
    folder.check(fingerprint={}, num_rows=5, shard_rows=None, files=())
    assert not folder.is_job()
    with pytest.raises(OutputError, match="holds no batchspec job"):
        folder.committed()
    assert os.listdir(tmp_path) == []


def test_a_new_folder_records_the_job(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "out", 5, 2, recorded={"torch": "2"})
    manifest = OutputFolder(tmp_path / "out").manifest
    assert manifest == folder.manifest
    assert (manifest.num_rows, manifest.shard_rows, manifest.publish, manifest.recorded) == (5, 2, "link", {"torch": "2"})
    assert [list(folder.rows_of(i)) for i in range(folder.num_shards)] == [[0, 1], [2, 3], [4]]
    assert folder.committed() == set()


def test_the_same_job_resumes_and_another_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out"
    new_folder(path, 6, 2).commit(1, tables()[1])
    assert new_folder(path, 6, 2).committed() == {1}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"fingerprint": {"model": "b"}}, r"model: a -> b"),
        ({"fingerprint": {"model": "a", "dtype": "x" * 80}}, r"dtype: null -> x{21}\.\.\."),
        ({"shard_rows": 3}, r"output\.shard_rows: 2 -> 3"),
        ({"num_rows": 7}, r"input\.rows: 6 -> 7"),
    ]
    for change, message in changes:
        with pytest.raises(OutputError, match=message) as caught:
            new_folder(**{"path": path, "num_rows": 6, "shard_rows": 2, **change})
        assert "output.overwrite=true" in str(caught.value)
        assert caught.value.exit_code == 2
    assert visible(path) == ["part-00001.parquet"]


def test_overwrite_deletes_a_jobs_work_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out"
    folder = new_folder(path, 6, 2)
    folder.commit(0, tables()[0])
    (path / "_batchspec/journal").mkdir()
    (path / "notes.txt").write_text("mine")
    again = new_folder(path, 9, 3, fingerprint={"model": "b"}, overwrite=True)
    assert again.committed() == set()
    assert (again.manifest.num_rows, again.manifest.fingerprint["model"]) == (9, "b")
    assert sorted(os.listdir(path)) == ["_batchspec", "notes.txt"]
    assert sorted(os.listdir(path / "_batchspec")) == ["manifest.json", "tmp"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_something_else_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/part-00000.parquet").write_bytes(b"precious")
    with pytest.raises(OutputError, match="is not a batchspec job"):
        new_folder(tmp_path, 6, 2, overwrite=overwrite)
    with pytest.raises(ConfigError, match=r"part-00000\.parquet is a file; choose another one"):
        new_folder(tmp_path / "data/part-00000.parquet", 6, 2, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path)) == ["data"]


def test_a_run_that_died_before_its_manifest_can_start_again(tmp_path: Path) -> None:
    (tmp_path / "_batchspec/tmp").mkdir(parents=True)
    assert new_folder(tmp_path, 6, 2).is_job()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 99}', "has version 99"),
        ('{"version": 2}', "has version 2, this batchspec writes 3"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
    ],
)
def test_a_strange_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    new_folder(tmp_path, 6, 2)
    (tmp_path / "_batchspec/manifest.json").write_text(text)
    with pytest.raises(OutputError, match=message):
        new_folder(tmp_path, 6, 2)


@pytest.mark.parametrize("name", ["part-00003.parquet", "part-0001.parquet", "part-000001.parquet", "_SUCCESS"])
def test_a_foreign_file_among_the_shards_is_refused(tmp_path: Path, name: str) -> None:
    folder = new_folder(tmp_path, 6, 2)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).touch()
    with pytest.raises(OutputError, match="is not a shard of this job"):
        folder.committed()


# --- committing


def test_a_shard_is_committed_once(tmp_path: Path) -> None:
    folder, parts = new_folder(tmp_path, 6, 2), tables()
    assert folder.commit(2, parts[2], {"model": "tiny"})
    before = (tmp_path / "data/part-00002.parquet").read_bytes()
    assert not new_folder(tmp_path, 6, 2).commit(2, parts[2])
    assert (tmp_path / "data/part-00002.parquet").read_bytes() == before
    assert folder.committed() == {2}
    metadata = pq.read_schema(tmp_path / "data/part-00002.parquet").metadata
    assert metadata == {
        b"batchspec.model": b"tiny", b"batchspec.shard": b"2", b"batchspec.rows": b"4-5",
        b"batchspec.generation": b"0", b"batchspec.job": folder.manifest.job.encode(),
        b"batchspec.attempt": folder.attempt.encode(),
    }
    assert os.listdir(tmp_path / "_batchspec/tmp") == []


def test_samples_of_a_row_and_a_single_bad_row_are_a_whole_shard(tmp_path: Path) -> None:
    shards, columns = shards_of(dataset(2), 2)
    rows = [completion(0, 0), completion(0, 1), completion(1)]
    assert new_folder(tmp_path, 2, 2).commit(0, built(shards[0], columns, rows))


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    folder, parts = new_folder(tmp_path, 6, 2), tables()
    shards, columns = shards_of(dataset(6), 2)
    wrong = [
        parts[1],
        parts[0].slice(0, 1),
        parts[0].slice(0, 0),
        pa.concat_tables([parts[0], parts[0]]),
        parts[0].take([1, 0]),
        built(shards[0], columns, [completion(0, 1), completion(1)]),
        built(shards[0], columns, [completion(0), completion(1), completion(1)]),
    ]
    for table in wrong:
        with pytest.raises(ValueError, match=r"shard of rows 0 \.\. 1"):
            folder.commit(0, table)
    assert visible(tmp_path) == []


def test_a_crash_before_publishing_leaves_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, parts = new_folder(tmp_path, 6, 2), tables()
    crash = RuntimeError("killed")
    monkeypatch.setattr(folder._store, "publish", lambda *_: (_ for _ in ()).throw(crash))
    with pytest.raises(RuntimeError):
        folder.commit(0, parts[0])
    assert visible(tmp_path) == []
    again = new_folder(tmp_path, 6, 2)
    assert again.commit(0, parts[0])
    assert again.committed() == {0}


def renamed(table: pa.Table, column: str) -> pa.Table:
    """Its rows with each other's values in a column."""
    return table.set_column(table.schema.get_field_index(column), column, table[column].take([1, 0]))


@pytest.mark.parametrize(
    "other",
    [
        lambda table: table.slice(1),
        lambda table: table.take([1, 0]),
        lambda table: pa.concat_tables([table, table.slice(1)]),
        lambda table: renamed(table, "row_index"),
        lambda table: renamed(table, "request_id"),
    ],
    ids=["one less", "another order", "one twice", "other places", "other ids"],
)
def test_a_file_that_reads_back_with_other_rows_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Callable[[pa.Table], pa.Table]
) -> None:
    def forgetful(table: pa.Table, path: Path, metadata: dict[str, str]) -> None:
        write_parquet(other(table), path, metadata)

    monkeypatch.setattr("batchspec.data.runstate.shard_writer.write_parquet", forgetful)
    folder = new_folder(tmp_path, 6, 2)
    with pytest.raises(StorageError, match="reads back with other rows"):
        folder.commit(0, tables()[0])
    assert visible(tmp_path) == []


def test_every_change_of_a_committed_file_is_found_and_sha256sum_agrees(tmp_path: Path) -> None:
    folder, parts = new_folder(tmp_path, 6, 2), tables()
    for index, table in enumerate(parts):
        assert folder.commit(index, table)
    assert not new_folder(tmp_path, 6, 2).commit(1, parts[1])  # the loser's sum is none of the file's
    assert list(folder.damage()) == []
    path = tmp_path / "data/part-00001.parquet"
    whole = path.read_bytes()
    check = ["sh", "-c", "cat _batchspec/sums/* | sha256sum --check --status"]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
    places = range(0, len(whole), len(whole) // 40)
    flipped = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in places]
    for data in [*flipped, b"", whole[:-1], whole[: len(whole) // 2], whole + b"0"]:
        path.write_bytes(data)
        (line,) = folder.damage()
        assert line.startswith(f"{path}: its {len(data):,} bytes are not those that were committed; delete the file and run")
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 1
    path.unlink()
    assert folder.commit(1, parts[1])
    assert list(folder.damage()) == []


@pytest.mark.parametrize("place", [100, 2000, -20])
def test_a_disk_that_keeps_other_bytes_is_found_before_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    def rotten(table: pa.Table, path: Path, metadata: dict[str, str]) -> None:
        write_parquet(table, path, metadata)
        data = bytearray(path.read_bytes())
        data[place] ^= 0x55
        path.write_bytes(data)

    monkeypatch.setattr("batchspec.data.runstate.shard_writer.write_parquet", rotten)
    folder = new_folder(tmp_path, 6, 2)
    with pytest.raises(StorageError, match="reads back"):
        folder.commit(0, tables()[0])
    assert visible(tmp_path) == []
    assert os.listdir(tmp_path / "_batchspec/tmp") == []


def _commit(path: Path, table: pa.Table, start: Any, won: Any) -> None:
    folder = new_folder(path, 6, 2)
    start.wait()
    won.put(folder.commit(0, table))


@pytest.mark.second
@pytest.mark.parametrize("method", ["link", "rename"])
def test_many_processes_commit_one_shard(tmp_path: Path, method: str) -> None:
    folder, parts = new_folder(tmp_path, 6, 2), tables()
    manifest = tmp_path / "_batchspec/manifest.json"
    manifest.write_text(manifest.read_text().replace('"publish": "link"', f'"publish": "{method}"'))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.test_shards"])
    start, won = context.Barrier(8), context.Queue()
    workers = [context.Process(target=_commit, args=(tmp_path, parts[0], start, won)) for _ in range(8)]
    for worker in workers:
        worker.start()
    results = [won.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert results.count(True) == 1 or (method == "rename" and any(results))
    assert folder.committed() == {0}
    assert visible(tmp_path) == ["part-00000.parquet"]
    assert pq.read_table(tmp_path / "data/part-00000.parquet").equals(parts[0])
    assert os.listdir(tmp_path / "_batchspec/tmp") == []


def test_a_shard_is_on_disk_before_it_has_its_name_and_the_name_before_commit_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = new_folder(tmp_path, 6, 2)
    steps: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def noted_fsync(descriptor: int) -> None:
        steps.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_link(source: Path, target: Path) -> None:
        steps.append((str(source), str(target)))
        link(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    assert folder.commit(0, tables()[0])
    (named,) = (i for i, step in enumerate(steps) if step[1] == str(tmp_path / "data/part-00000.parquet"))
    assert ("sync", steps[named][0]) in steps[:named]  # the very file: that of its sum is synced too
    assert ("sync", str(tmp_path / "data")) in steps[named:]


def test_a_key_that_is_younger_than_a_job_differs_if_it_has_a_value() -> None:
    """A newer version goes on with the job as long as its new keys are null; a key that is gone differs if it had a value."""
    old = fingerprint({"decode.seed": 1, "decode.gone": 2, "decode.unused": None})
    new = fingerprint({"decode.seed": 1, "decode.later": None})
    assert differences(old, new, {}) == ["decode.gone: 2 -> null"]
    assert differences(new, fingerprint({"decode.seed": 1, "decode.newest": 3}), {}) == ["decode.newest: null -> 3"]
