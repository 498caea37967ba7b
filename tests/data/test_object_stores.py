"""What every object store promises a job, on emulators of S3, Google Cloud Storage and Azure; what is one store's own is in
test_s3.py and test_cloud_store.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchspec.data.storage import retry
from batchspec.data.storage.object_store import ObjectStore
from batchspec.data.storage.open_store import open_store
from batchspec.data.storage.store import Tail
from batchspec.errors import OutputError
from batchspec.job.report.stats import job_stats
from tests.data.cloud_lab import CloudLab, running_azure, running_gcs
from tests.data.cloud_lab import Faults as CloudFaults
from tests.data.s3_lab import Faults as S3Faults
from tests.data.s3_lab import Lab as S3Lab
from tests.data.s3_lab import running_lab
from tests.helpers.io_samples import new_folder, tables

pytestmark = pytest.mark.second

Lab = S3Lab | CloudLab
BOUND_S = 60.0
"""An object made just now is younger, on a busy machine too."""


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if request.param == "s3":
        with running_lab() as s3:
            yield s3
    else:
        with running_gcs() if request.param == "gs" else running_azure(tmp_path_factory.mktemp("azurite")) as cloud:
            yield cloud


@pytest.fixture
def lab(server: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    """The emulator, emptied, as the environment's endpoint; however busy the machine is, it has time to answer."""
    server.empty()
    server.faults.__dict__.update((S3Faults() if isinstance(server, S3Lab) else CloudFaults()).__dict__)
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name, seconds in (("CONNECT_S", 30.0), ("REQUEST_S", 30.0), ("DEADLINE_S", 60.0), ("FIRST_PAUSE_S", 0.05)):
        monkeypatch.setattr(retry, name, seconds)
    return server


def store(lab: Lab) -> ObjectStore:
    found = open_store(f"{lab.root}/out", "tmp")
    assert isinstance(found, ObjectStore)
    return found


def test_a_name_is_taken_once(lab: Lab) -> None:
    here = open_store(f"{lab.root}/out/", "tmp")
    assert here.where == f"{lab.root}/out"
    assert not here.exists("a/b")
    assert here.put_if_absent("a/b", b"first")
    assert not here.put_if_absent("a/b", b"second")
    assert here.read("a/b") == b"first"
    assert (here.list(""), here.list("a"), here.list("nowhere")) == (["a"], ["b"], [])
    here.put("a/b", b"third")
    assert here.read("a/b") == b"third"
    here.put("ab", b"beside")
    here.delete_tree("a")
    here.delete_tree("a")
    assert here.list("") == ["ab"]


def test_versions_tell_objects_apart_and_a_tail_comes_with_its_own(lab: Lab) -> None:
    here = store(lab)
    assert (here.versions("data"), here.tail("data/x", 4)) == ({}, None)
    for name, data in (("x", b"0123456789"), ("y", b""), ("z/deep", b"")):
        here.put(f"data/{name}", data)
    before = here.versions("data")
    assert [*before] == here.list("data") == ["x", "y", "z"]
    assert before["x"] == here.version("data/x")
    for count, data in ((4, b"6789"), (10, b"0123456789"), (99, b"0123456789")):
        assert here.tail("data/x", count) == Tail(data, before["x"])
    assert here.tail("data/y", 4) == Tail(b"", before["y"])
    here.put("data/x", b"another")
    here.delete("data/x", before["x"])
    assert here.list("data") == ["x", "y", "z"]
    here.delete("data/x", here.version("data/x"))
    assert here.list("data") == ["y", "z"]


def test_an_object_is_replaced_only_if_it_has_not_changed_since_it_was_read(lab: Lab) -> None:
    here = store(lab)

    def replaced(version: str) -> bool:
        path = here.scratch() / "new"
        path.write_bytes(b"new")
        done = here.replace(path, "data/x", version)
        assert not path.exists()
        return done

    assert not replaced("0x1")
    assert here.list("data") == []
    here.put("data/x", b"old")
    seen = here.version("data/x")
    assert replaced(seen)
    assert not replaced(seen)
    assert here.read("data/x") == b"new"


def test_publishing_uploads_a_file_once_and_deletes_the_local_copy(lab: Lab) -> None:
    here = store(lab)
    for won in (True, False):
        path = here.scratch() / "x"
        path.write_bytes(b"shard" * 2_000_000)  # more than obstore sends in one part by itself
        assert here.publish(path, "data/x") is won
        assert not path.exists()
    assert lab.body("out/data/x") == b"shard" * 2_000_000


def test_one_of_many_writers_wins(lab: Lab) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def write(i: int) -> None:
        here = store(lab)
        start.wait()
        if here.put_if_absent("data/x", bytes([i]) * 1000):
            won.append(i)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (winner,) = won
    assert lab.body("out/data/x") == bytes([winner]) * 1000


def test_one_of_many_replacements_of_a_version_wins(lab: Lab) -> None:
    store(lab).put("data/x", b"old")
    seen, won = store(lab).version("data/x"), []
    start = threading.Barrier(8)

    def write(i: int) -> None:
        here = store(lab)
        path = here.scratch() / f"{i}"
        path.write_bytes(bytes([i]) * 1000)
        start.wait()
        if here.replace(path, "data/x", seen):
            won.append(i)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (winner,) = won
    assert lab.body("out/data/x") == bytes([winner]) * 1000


def test_a_folder_of_more_than_a_page_is_listed_and_deleted_in_full(lab: Lab) -> None:
    here, count = store(lab), 1003 if isinstance(lab, S3Lab) else 103
    for i in range(count):
        lab.put(f"out/data/{i:04d}", b"")
    assert here.list("data") == [f"{i:04d}" for i in range(count)]
    here.delete_tree("data")
    assert lab.keys() == []


def test_ages_are_by_the_stores_clock(lab: Lab) -> None:
    here = store(lab)
    here.put("old", b"")
    time.sleep(3.1)  # the clock of such a store has seconds, and on a busy machine seconds pass between two answers
    here.put("new", b"")
    old, new, gone = here.ages_s(["old", "new", "gone"])
    assert 1 <= old <= BOUND_S
    assert 0 <= new < old
    assert gone == float("inf")
    assert here.list("_batchspec/tmp") == []


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../../x", ".", "a\0b"])
def test_names_cannot_leave_the_folder(lab: Lab, name: str) -> None:
    with pytest.raises(OutputError, match=r"\.\. are refused"):
        store(lab).put_if_absent(name, b"x")


def test_the_probes_pass_and_leave_nothing(lab: Lab) -> None:
    store(lab).probe()
    store(lab).probe_replace()
    assert lab.keys() == []


def test_a_job_is_committed_resumed_read_and_overwritten(lab: Lab, tmp_path: Path) -> None:
    parts, out = tables(), f"{lab.root}/out"
    root: Any = out
    folder = new_folder(root, 6, 2)
    assert folder.manifest.publish == "put"
    assert [folder.commit(i, parts[i]) for i in (1, 0, 1)] == [True, True, False]
    again = new_folder(root, 6, 2)
    assert again.committed() == {0, 1}
    assert again.commit(2, parts[2])
    drop = [name for name in again.scan().collect_schema().names() if name not in parts[0].column_names]
    assert again.scan().drop(drop).collect().equals(pl.concat([pl.DataFrame(part) for part in parts]))
    assert (job_stats(root).completions, job_stats(root).shards) == (6, 3)
    with pytest.raises(OutputError, match="holds another job"):
        new_folder(root, 7, 2)
    assert again.keep_kv_scales(b"scales") == b"scales"
    assert again.keep_weight_sums(b"sums") == b"sums"
    new_folder(root, 7, 2, overwrite=True)
    assert lab.keys() == ["out/_batchspec/manifest.json"]
    assert not list(tmp_path.rglob("part-*"))


def test_a_prefix_of_something_else_is_never_touched(lab: Lab) -> None:
    lab.put("out/data/part-00000.parquet", b"precious")
    lab.put("file", b"precious")
    for name in ("out", "file"):
        root: Any = f"{lab.root}/{name}"
        with pytest.raises(OutputError, match="is not a batchspec job"):
            new_folder(root, 6, 2, overwrite=True)
    assert lab.keys() == ["file", "out/data/part-00000.parquet"]
