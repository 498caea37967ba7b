"""What counts as a committed shard: a file whose footer names the job and says exactly the shard's rows."""

from __future__ import annotations

import gc
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from batchspec.data.runstate import footers
from batchspec.data.runstate.footers import read_shard_file
from batchspec.data.runstate.generations import Generation
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage.local_store import LocalStore
from batchspec.data.storage.s3_store import S3Store
from batchspec.errors import BatchspecError, OutputError, StorageError
from tests.data.s3_lab import BUCKET, Lab, running_lab
from tests.helpers.io_samples import new_folder, tables


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture
def remote(server: Lab, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where a job of six rows in three shards goes, on S3."""
    server.empty()
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/out"


@pytest.fixture
def whole(tmp_path: Path) -> OutputFolder:
    folder = new_folder(tmp_path / "out", 6, 2)
    for index, table in enumerate(tables()):
        assert folder.commit(index, table)
    return folder


def part(tmp_path: Path, index: int) -> Path:
    return tmp_path / f"out/data/part-{index:05d}.parquet"


def rewritten(path: Path, change: Callable[[dict[bytes, bytes]], Any]) -> None:
    """The same rows with other metadata."""
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    change(metadata)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def of_another_job(tmp_path: Path) -> None:
    other = new_folder(tmp_path / "other", 6, 2)
    assert other.commit(1, tables()[1])
    shutil.copy(tmp_path / "other/data/part-00001.parquet", part(tmp_path, 1))


def as_a_folder(tmp_path: Path) -> None:
    part(tmp_path, 1).unlink()
    part(tmp_path, 1).mkdir()


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder": (as_a_folder, r"part-00001\.parquet failed: a folder, not a file .*move away what is in its place"),
    "a copy of another part": (
        lambda path: shutil.copy(part(path, 0), part(path, 1)),
        r"holds rows 0 \.\. 1 of shard 0, not rows 2 \.\. 3 of shard 1; delete the file and run",
    ),
    "of another job": (of_another_job, "is a shard of another job; move it away"),
    "empty": (lambda path: part(path, 1).write_bytes(b""), "its footer cannot be read .*; delete the file and run"),
    "cut off": (lambda path: os.truncate(part(path, 1), 3000), "its footer cannot be read"),
    "text": (lambda path: part(path, 1).write_text("hello, this is no Parquet file"), "its footer cannot be read"),
    "written by another program": (
        lambda path: pl.read_parquet(part(path, 1)).write_parquet(part(path, 1)),
        "was not written by a run of this job, or written anew by another program",
    ),
    "other rows than it says": (
        lambda path: pq.write_table(pq.read_table(part(path, 1)).slice(1), part(path, 1)),
        r"holds rows 2 \.\. 3 and rows 3 \.\. 3 of shard 1, not rows 2 \.\. 3 of shard 1",
    ),
    "another number": (
        lambda path: rewritten(part(path, 1), lambda said: said.update({b"batchspec.shard": b"2"})), "rows 2 .. 3 of shard 2, not"
    ),
}


@pytest.mark.parametrize("how", [*WRONG])
def test_a_file_with_a_shards_name_that_is_not_that_shard_is_refused_and_named(
    whole: OutputFolder, tmp_path: Path, how: str
) -> None:
    assert whole.committed() == {0, 1, 2}
    act, said = WRONG[how]
    act(tmp_path)
    for folder in (whole, OutputFolder(tmp_path / "out")):  # at the end of a run that had seen the right one, and at a resume
        with pytest.raises(BatchspecError, match=said) as caught:
            folder.finished()
        assert f"{tmp_path}/out/data/part-00001.parquet" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, OutputError | StorageError)
        assert not folder.is_done(1)
        assert folder.is_done(2)


@pytest.mark.parametrize("how", ["a copy of another part", "cut off", "written by another program", "of another job"])
def test_a_wrong_file_costs_its_shard_alone(whole: OutputFolder, tmp_path: Path, how: str) -> None:
    WRONG[how][0](tmp_path)
    (line,) = whole.damage()
    assert str(part(tmp_path, 1)) in line
    part(tmp_path, 1).unlink()
    again = OutputFolder(tmp_path / "out")
    assert again.missing() == {1}
    assert again.commit(1, tables()[1])
    assert not again.missing()
    assert list(again.damage()) == []


def test_who_commits_over_a_wrong_file_does_not_take_it_for_a_commit(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "out", 6, 2)
    folder.commit(0, tables()[0])
    shutil.copy(part(tmp_path, 0), part(tmp_path, 1))
    with pytest.raises(OutputError, match=r"holds rows 0 \.\. 1 of shard 0"):
        folder.commit(1, tables()[1])
    assert part(tmp_path, 1).read_bytes() == part(tmp_path, 0).read_bytes()
    assert not os.listdir(tmp_path / "out/_batchspec/tmp")


def test_footers_are_read_once_for_each_version_of_a_file(whole: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    tail = LocalStore.tail

    def noted(self: LocalStore, name: str, count: int) -> Any:
        read.append(name)
        return tail(self, name, count)

    monkeypatch.setattr(LocalStore, "tail", noted)
    monkeypatch.setattr(footers, "_KNOWN", {})
    for fresh in (OutputFolder(whole.path), OutputFolder(whole.path)):
        assert not fresh.missing()
    assert read == [f"data/part-0000{index}.parquet" for index in range(3)]
    os.utime(f"{whole.path}/data/part-00001.parquet")
    assert not fresh.missing()
    assert read[3:] == ["data/part-00001.parquet"]


def test_a_footer_that_was_read_is_freed_at_once(whole: OutputFolder, tmp_path: Path) -> None:
    """A run collects garbage rarely, and the footers of ten thousand shards would be a gigabyte."""
    gc.collect()
    gc.disable()
    try:
        for index in range(3):
            assert read_shard_file(LocalStore(tmp_path / "out", "tmp"), f"data/{part(tmp_path, index).name}") is not None
        assert not [kept for kept in gc.get_objects() if isinstance(kept, pq.FileMetaData)]
    finally:
        gc.enable()


def test_a_footer_that_is_longer_than_one_read_or_reads_damaged_once_is_read_again(
    whole: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, store = "data/part-00001.parquet", whole._store
    expected = read_shard_file(store, name)
    with monkeypatch.context() as patched:
        patched.setattr(footers, "TAIL_BYTES", 100)
        assert read_shard_file(store, name) == expected
    tail, seen = LocalStore.tail, list[int]()

    def flipped(self: LocalStore, name: str, count: int) -> Any:
        found = tail(self, name, count)
        seen.append(1)
        if found is not None and len(seen) == 1:
            return type(found)(found.data[:-3] + b"x" + found.data[-2:], found.version)
        return found

    monkeypatch.setattr(LocalStore, "tail", flipped)
    assert read_shard_file(store, name) == expected
    assert len(seen) == 2


# --- a run that was suspended, and the job that took its folder


def stands_still_before_its_put(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], Any]) -> None:
    """The next run that publishes has read the manifest; then all this happens, and only then comes its PUT."""
    publish = S3Store.publish

    def late(self: S3Store, path: Path, name: str) -> bool:
        monkeypatch.undo()
        meanwhile()
        return publish(self, path, name)

    monkeypatch.setattr(S3Store, "publish", late)


@pytest.mark.second
@pytest.mark.parametrize("found", ["as it commits", "before it begins"])
def test_on_s3_a_shard_of_the_job_before_is_recognised_and_replaced(
    remote: Any, server: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    first = new_folder(remote, 6, 2)
    second: list[OutputFolder] = []
    with monkeypatch.context() as patched:
        stands_still_before_its_put(patched, lambda: second.append(new_folder(remote, 6, 2, overwrite=True)))
        with pytest.raises(OutputError, match="was overwritten while this run worked on it"):
            first.commit(1, tables()[1], {"of": "first"})
        for name, value in server.environ().items():
            patched.setenv(name, value)
        (mine,) = second
        assert server.keys("out/data") == ["out/data/part-00001.parquet"]  # it came all the same
        if found == "before it begins":
            assert mine.committed() == set()
            assert mine.missing() == {0, 1, 2}
        for index, table in enumerate(tables()):
            assert mine.commit(index, table)
        assert not mine.missing()
        assert list(mine.damage()) == []
        assert {pq.read_schema(path).metadata[b"batchspec.job"] for path in downloads(server)} == {mine.manifest.job.encode()}
    assert sum("was published by a run of another job" in line for line in caplog.messages) == 1


def downloads(server: Lab) -> list[Any]:
    return [io.BytesIO(server.held(key)) for key in server.names() if key.startswith("out/data/")]


@pytest.mark.second
def test_on_s3_a_run_that_was_suspended_replaces_nothing_of_the_job_that_took_its_folder(
    remote: Any, server: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_folder(remote, 6, 2)

    def meanwhile() -> None:
        second = new_folder(remote, 6, 2, overwrite=True)
        assert all(second.commit(index, table) for index, table in enumerate(tables()))

    with monkeypatch.context() as patched:
        stands_still_before_its_put(patched, meanwhile)
        before: dict[str, bytes] = {}
        with pytest.raises(OutputError, match="was overwritten while this run worked on it"):
            first.commit(1, tables()[1], {"of": "first"})
        before = {key: server.held(key) for key in server.names() if key.startswith("out/data/")}
        for name, value in server.environ().items():
            patched.setenv(name, value)
        with pytest.raises(OutputError, match="was overwritten"):
            first.commit(2, tables()[2])
        assert {key: server.held(key) for key in before} == before
        assert OutputFolder(remote).committed() == {0, 1, 2}


@pytest.mark.second
def test_on_s3_a_shard_that_the_new_job_does_not_have_is_taken_back(
    remote: Any, server: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_folder(remote, 6, 2)

    def meanwhile() -> None:
        second = new_folder(remote, 2, 2, overwrite=True)
        assert second.commit(0, tables()[0])

    with monkeypatch.context() as patched:
        stands_still_before_its_put(patched, meanwhile)
        with pytest.raises(OutputError, match="was overwritten"):
            first.commit(2, tables()[2])
    assert server.keys("out/data") == ["out/data/part-00000.parquet"]


def test_a_card_that_is_written_into_the_folder_of_another_job_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_folder(tmp_path, 6, 2), list[OutputFolder]()
    put = LocalStore.put

    def late(self: LocalStore, name: str, data: bytes) -> None:
        monkeypatch.undo()
        second.append(new_folder(tmp_path, 6, 2, overwrite=True))
        second[0].finish("the card of the second job")
        put(self, name, data)

    monkeypatch.setattr(LocalStore, "put", late)
    with pytest.raises(OutputError, match="was overwritten"):
        first.finish("the card of the first job")
    assert not second[0].has_card()


def test_a_run_suspended_while_it_deletes_a_job_deletes_nothing_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_folder(tmp_path, 6, 2)
    discard = LocalStore.discard

    def late(self: LocalStore, prefix: str) -> None:
        monkeypatch.undo()
        discard(self, prefix)
        other = new_folder(tmp_path, 6, 2, overwrite=True)
        assert all(other.commit(index, table) for index, table in enumerate(tables()))

    monkeypatch.setattr(LocalStore, "discard", late)
    with pytest.raises(OutputError, match="was overwritten"):
        new_folder(tmp_path, 6, 2, overwrite=True)
    assert not OutputFolder(tmp_path).missing()


# --- retries


def begin_retry(folder: OutputFolder, number: int = 1) -> Generation:
    retry = Generation(
        number=number, retry="error", fingerprint={**folder.manifest.fingerprint, "decode.max_new_tokens": "8"},
        config={}, shards=(1,),
    )
    folder.retry(retry)
    return retry


def test_a_retry_is_named_by_the_words_that_begin_it_again(whole: OutputFolder) -> None:
    assert str(begin_retry(whole)) == "resume=error decode.max_new_tokens=8"


@pytest.mark.parametrize("method", ["link", "rename"])
def test_a_run_that_was_suspended_does_not_undo_a_retry(
    whole: OutputFolder, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It is suspended after it found the name free and before its rename, which would replace. Its own file is deleted."""
    shard = Path(whole.path) / "data/part-00001.parquet"
    kept = shard.read_bytes()
    shard.unlink()
    late = joined(whole, method)
    call = "replace" if method == "rename" else "link"
    act = getattr(os, call)

    def stopped(source: Any, target: Any) -> None:
        if Path(target) == shard:
            monkeypatch.undo()
            shard.write_bytes(kept)
            fresh = OutputFolder(whole.path)
            begin_retry(fresh)
            assert fresh.recommit(1, *fresh.written(1))
        act(source, target)

    monkeypatch.setattr(os, call, stopped)
    if method == "rename":
        assert not late.commit(1, tables()[1])
    with pytest.raises(OutputError, match="a retry of it began while this run worked on it; the run ends and publishes nothing"):
        late.commit(1, tables()[1])
    found = read_shard_file(whole._store, "data/part-00001.parquet")
    assert found is not None
    assert found.generation == 1
    assert not OutputFolder(whole.path).missing()


def joined(folder: OutputFolder, method: str = "link") -> OutputFolder:
    """Another run of the job, which has read its manifest."""
    late = OutputFolder(folder.path)
    assert late.manifest == folder.manifest
    late._store.method = method
    return late


def test_a_file_that_is_older_than_the_retry_that_wrote_its_shard_is_refused(whole: OutputFolder, tmp_path: Path) -> None:
    before = part(tmp_path, 1).read_bytes()
    begin_retry(whole)
    assert whole.missing() == {1}
    assert whole.recommit(1, *whole.written(1))
    assert not OutputFolder(whole.path).missing()
    part(tmp_path, 1).write_bytes(before)
    with pytest.raises(OutputError, match=r"part-00001\.parquet is older than retry 1, which had written this shard; delete"):
        OutputFolder(whole.path).missing()


def test_a_retry_of_the_job_before_is_none_of_this_job(whole: OutputFolder) -> None:
    late = joined(whole)
    now = new_folder(Path(whole.path), 6, 2, overwrite=True)
    for index, table in enumerate(tables()):
        assert now.commit(index, table)
    with pytest.raises(OutputError, match="was overwritten"):
        begin_retry(late)
    late.check_own = lambda: None  # type: ignore[method-assign]  # it had checked already
    stale = replace(begin_retry(late), job=whole.manifest.job)
    fresh = OutputFolder(whole.path)
    assert fresh.generation is None
    begin_retry(fresh)
    late._generations.mark(stale, 1, 1)
    assert fresh.missing() == OutputFolder(whole.path).missing() == {1}
    assert fresh.recommit(1, *fresh.written(1))
    assert not OutputFolder(whole.path).missing()
