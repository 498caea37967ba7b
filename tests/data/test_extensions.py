"""An extension in the output folder: recorded once, agreed on by all runs, and harmless to a run that does not know of it."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from batchspec.data.dataset.reader import InputFile
from batchspec.data.runstate import job_state
from batchspec.data.runstate.extensions import Extension, shard_rows_of
from batchspec.data.runstate.generations import Generation
from batchspec.data.runstate.manifest import Manifest, compared_facts, default_shard_rows
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.errors import OutputError
from tests.data.s3_lab import BUCKET, Lab, running_lab
from tests.helpers.io_samples import new_folder, tables

FILES = (InputFile(name="a.parquet", size_bytes=100, num_rows=9, digest="d"),)


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture(params=["link", "rename", "put"])
def out(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where a job of four rows in two shards goes, on each kind of store."""
    if request.param == "rename":
        monkeypatch.setattr(os, "link", no_links)
        monkeypatch.setattr(job_state, "SETTLE_S", 0.05)
    if request.param != "put":
        return tmp_path / "out"
    lab: Lab = request.getfixturevalue("server")
    lab.empty()
    for name, value in lab.environ().items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/out"


def no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "no hard links here")


def begun(out: Any) -> OutputFolder:
    """A run of the job before any change."""
    return new_folder(out, 4, 2, files=FILES, fingerprint=limited(4))


def limited(rows: int | None) -> dict[str, str]:
    return {"model": "a", "input.limit": json.dumps(rows)}


def to(folder: OutputFolder, num_rows: int, shard_rows: int = 2, number: int = 1) -> Extension:
    """The extension to so many rows."""
    compared = compared_facts(limited(num_rows), num_rows, shard_rows)
    return Extension(
        number=number, fingerprint=compared, config={"model": {"path": "tiny"}}, num_rows=num_rows, shard_rows=shard_rows,
        files=FILES, job=folder.manifest.job,
    )


def retry_of(folder: OutputFolder, number: int = 1, *shards: int) -> Generation:
    facts = {**folder.manifest.fingerprint, "decode.max_new_tokens": "9"}
    return Generation(number=number, retry="error", fingerprint=facts, config={}, shards=shards)


# --- one record


def test_an_extension_only_adds_a_record(out: Any) -> None:
    folder = begun(out)
    assert folder.commit(0, tables()[0])
    folder.finish("card")
    before = {name: folder._store.read(name) for name in ("_batchspec/manifest.json", "data/part-00000.parquet")}
    folder.extend(to(folder, 6))
    assert {name: folder._store.read(name) for name in before} == before
    assert folder._store.list("_batchspec/retry") == ["00001.json"]
    again = new_folder(out, 6, 2, files=FILES, fingerprint=limited(6))
    assert again.manifest.job == begun_job(again)
    assert (again.manifest.num_rows, again.manifest.files, again.num_shards) == (6, FILES, 3)
    assert (again.committed(), again.missing()) == ({0}, {1, 2})
    for shard in (1, 2):
        assert again.commit(shard, tables()[shard])
    assert again.missing() == set()
    assert not again.has_card()
    again.finish("card")
    assert OutputFolder(out).has_card()


def begun_job(folder: OutputFolder) -> str:
    first = Manifest.from_json(folder._store.read("_batchspec/manifest.json"), "")
    return first.job


@pytest.mark.second
def test_extensions_follow_each_other(out: Any) -> None:
    folder = begun(out)
    for number, (rows, shard_rows) in enumerate([(5, 3), (6, 4)], 1):
        folder.extend(to(folder, rows, shard_rows, number))
    assert [list(folder.rows_of(i)) for i in range(folder.num_shards)] == [[0, 1], [2, 3], [4], [5]]
    assert not OutputFolder(out).has_card()
    now = r"input\.limit=6 output\.shard_rows=4 and input file a\.parquet"
    with pytest.raises(OutputError, match=f"extended since .*; run the command with {now}"):
        begun(out)
    with pytest.raises(OutputError, match="extended since"):
        new_folder(out, 5, 3, files=FILES, fingerprint=limited(5))


@pytest.mark.second
def test_runs_that_begin_the_same_extension_at_once_agree(out: Any) -> None:
    begun(out)
    folders = [OutputFolder(out) for _ in range(6)]
    wanted = [replace(to(folder, 6), config={"run": i}) for i, folder in enumerate(folders)]
    threads = [threading.Thread(target=folder.extend, args=(one,)) for folder, one in zip(folders, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(folder.num_shards, folder.manifest.num_rows) for folder in folders} == {(3, 6)}
    assert folders[0]._store.list("_batchspec/retry") == ["00001.json"]
    won = [folder.commit(2, tables()[2]) for folder in folders]
    assert won.count(True) == 1


@pytest.mark.parametrize("first", ["extension", "retry"])
def test_of_two_different_changes_at_once_the_first_takes_place(out: Any, first: str) -> None:
    one, other, third = begun(out), OutputFolder(out), OutputFolder(out)
    for shard in (0, 1):
        assert one.commit(shard, tables()[shard])
    extension, retry, wider = to(other, 6), retry_of(other, 1, 0), to(third, 5)
    assert third.manifest
    if first == "extension":
        one.extend(extension)
        with pytest.raises(OutputError, match=r"another run began another change; run the command with input\.limit=6"):
            other.retry(retry)
    else:
        one.retry(retry)
        with pytest.raises(OutputError, match="another run changed the job at the same time; run the command with resume=error"):
            other.extend(extension)
    with pytest.raises(OutputError, match="another run changed the job at the same time"):
        third.extend(wider)


def test_a_run_whose_record_is_replaced_for_want_of_links_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs saw that there was no record: that of the last stands, and the other must not divide shards its own way."""
    monkeypatch.setattr(os, "link", no_links)
    one, other = begun(tmp_path), OutputFolder(tmp_path)
    later = replace(to(other, 6), job=other.manifest.job)

    def meanwhile(_: float) -> None:
        other._store.put("_batchspec/retry/00001.json", json.dumps(asdict(later)).encode())

    monkeypatch.setattr(time, "sleep", meanwhile)
    with pytest.raises(OutputError, match=r"another run changed the job at the same time; run the command with input\.limit=6"):
        one.extend(to(one, 5))
    assert OutputFolder(tmp_path).manifest.num_rows == 6


@pytest.mark.parametrize("change", [{"num_rows": 3}, {"shard_rows": 0}, {"files": []}, {"num_rows": "6"}, {"job": 7}])
def test_a_damaged_record_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = begun(tmp_path)
    folder.extend(to(folder, 6))
    record = tmp_path / "_batchspec/retry/00001.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    with pytest.raises(OutputError, match="is damaged"):
        assert OutputFolder(tmp_path).manifest


# --- a run that does not know of it


def test_a_run_of_the_old_command_ends_its_own_rows(out: Any) -> None:
    old = begun(out)
    assert old.commit(0, tables()[0])
    new = OutputFolder(out)
    new.extend(to(new, 6))
    assert new.commit(2, tables()[2])
    claims = new.claims()
    assert claims.take(1)
    assert old.committed() == {0}
    assert not old.claims().take(1), "runs before and after the extension share the claims"
    assert old.commit(1, tables()[1])
    assert (old.missing(), new.missing()) == (set(), set())
    assert old.is_extended()
    assert not new.is_extended()
    old.tidy()
    assert new._store.list("_batchspec/claims"), "they are the extension's"
    new.tidy()
    assert not new._store.list("_batchspec/claims")


def test_a_retry_after_an_extension_still_ends_runs_from_before_it(out: Any) -> None:
    old, new = begun(out), OutputFolder(out)
    for shard in (0, 1):
        assert new.commit(shard, tables()[shard])
    new.extend(to(new, 6))
    assert new.commit(2, tables()[2])
    late = OutputFolder(out)
    assert late.manifest
    new.retry(retry_of(new, 2, 2))
    assert new.missing() == {2}
    for folder, shard in ((old, 1), (late, 2)):
        with pytest.raises(OutputError, match="a retry of it began while this run worked on it"):
            folder.commit(shard, tables()[shard])
    table, version = new.written(2)
    assert new.recommit(2, table, version)
    assert new.missing() == set()


def test_a_file_of_an_extension_stays_if_a_retry_begins_as_it_gets_its_name(out: Any) -> None:
    """The run that publishes the last shard ends, and the shard, which made the job complete, is the job's."""
    late, other = begun(out), OutputFolder(out)
    for shard in (0, 1):
        assert late.commit(shard, tables()[shard])
    late.extend(to(late, 6))
    publish = late._store.publish

    def then_retried(path: Path, name: str) -> bool:
        won = publish(path, name)
        assert not other.missing()
        other.retry(retry_of(other, 2, 0))
        return won

    late._store.publish = then_retried  # type: ignore[method-assign]
    with pytest.raises(OutputError, match="a retry of it began while this run worked on it"):
        late.commit(2, tables()[2])
    assert other.committed() == {0, 1, 2}


def test_a_file_after_the_last_extension_is_refused(tmp_path: Path) -> None:
    old, new = begun(tmp_path), OutputFolder(tmp_path)
    new.extend(to(new, 6))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/part-00003.parquet").touch()
    for folder in (old, new):
        with pytest.raises(OutputError, match=r"part-00003\.parquet is not a shard of this job"):
            folder.committed()


def test_a_new_job_in_the_folder_has_no_extension(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.extend(to(folder, 6))
    anew = new_folder(tmp_path, 4, 2, files=FILES, fingerprint=limited(4), overwrite=True)
    assert (anew.num_shards, anew.manifest.num_rows) == (2, 4)
    assert not (tmp_path / "_batchspec/retry").exists()
    late = replace(to(anew, 6), job="another job")
    (tmp_path / "_batchspec/retry").mkdir()
    anew._generations.begin(late)  # a run of the old job that was suspended
    assert OutputFolder(tmp_path).num_shards == 2
    anew.extend(to(anew, 5))
    assert OutputFolder(tmp_path).manifest.num_rows == 5


# --- the size of its shards


def test_added_rows_have_shards_of_their_own_size() -> None:
    before = Manifest(
        fingerprint={},
        config={},
        recorded={},
        num_rows=100,
        shard_rows=default_shard_rows(100),
        publish="link",
        files=FILES,
        job="one",
    )
    million = 1_000_100
    free = compared_facts({}, million, None)
    assert shard_rows_of(before, free, million) == default_shard_rows(10**6) == 512
    assert shard_rows_of(before, compared_facts({}, million, 7), million) == 7
    week = replace(before, num_rows=10**7, shard_rows=default_shard_rows(10**7))
    assert shard_rows_of(week, compared_facts({}, 10**7 + 1000, None), 10**7 + 1000) == 16, "for many tasks"
