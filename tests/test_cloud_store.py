"""Google Cloud Storage and Azure as a job's store, on emulators: once, whole, in bounded time, without a secret in a message."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.errors import ConfigError, OutputError, StorageError
from batchspec.report.stats import job_stats
from batchspec.runstate.output_folder import OutputFolder
from batchspec.storage import retry
from batchspec.storage.cloud_store import CloudStore
from batchspec.storage.open_store import open_store
from batchspec.storage.store import Tail
from tests.cloud_lab import ACCOUNT_KEY, BUCKET, TOKEN, CloudLab, Faults, running_azure, running_gcs
from tests.io_samples import built, dataset, new_folder, shards_of
from tests.s3_lab import Proxy, running_proxy

BOUND_S = 30.0
"""What ends after one try, or a deadline of a second, takes less on a busy machine too."""


@pytest.fixture(scope="module", params=["gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudLab]:
    with running_gcs() if request.param == "gs" else running_azure(tmp_path_factory.mktemp("azurite")) as lab:
        yield lab


@pytest.fixture
def lab(server: CloudLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CloudLab:
    server.empty()
    server.faults.__dict__.update(Faults().__dict__)
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    set_times(monkeypatch)
    return server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudLab]:
    """With faults of HTTP put into it."""
    set_times(monkeypatch)
    with running_gcs() as lab:
        for name, value in lab.environ().items():
            monkeypatch.setenv(name, value)
        yield lab


@pytest.fixture
def proxy(lab: CloudLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with running_proxy(lab.port) as found:
        for name, value in lab.environ(found.port).items():
            monkeypatch.setenv(name, value)
        yield found


def set_times(monkeypatch: pytest.MonkeyPatch, request_s: float = 30.0, deadline_s: float = 15.0) -> None:
    for name, value in (("CONNECT_S", 5.0), ("REQUEST_S", request_s), ("DEADLINE_S", deadline_s), ("FIRST_PAUSE_S", 0.05)):
        monkeypatch.setattr(retry, name, value)


def store(lab: CloudLab, folder: str = "out") -> CloudStore:
    return CloudStore(f"{lab.root}/{folder}")


def tables() -> list[pa.Table]:
    shards, columns = shards_of(dataset(6), 2)
    return [built(shard, columns) for shard in shards]


def times(count: int, answer: tuple[int, str], method: str = "PUT") -> Any:
    """A fault of the first `count` requests of a method."""
    left = [count]

    def fault(asked: str, path: str) -> tuple[int, str] | None:
        if asked != method or not left[0]:
            return None
        left[0] -= 1
        return answer

    return fault


def test_a_name_is_taken_once(lab: CloudLab) -> None:
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


def test_versions_tell_objects_apart_and_a_tail_comes_with_its_own(lab: CloudLab) -> None:
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


def test_an_object_is_replaced_only_where_it_is_still_the_one_that_was_seen(lab: CloudLab) -> None:
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


def test_a_file_is_published_and_gone(lab: CloudLab) -> None:
    here = store(lab)
    for won in (True, False):
        path = here.scratch() / "x"
        path.write_bytes(b"shard" * 2_000_000)  # more than obstore sends in one part by itself
        assert here.publish(path, "data/x") is won
        assert not path.exists()
    assert lab.body("out/data/x") == b"shard" * 2_000_000


def test_one_of_many_writers_wins(lab: CloudLab) -> None:
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


def test_one_of_many_replacements_of_a_version_wins(lab: CloudLab) -> None:
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


def test_a_folder_of_more_than_a_page_is_listed_and_deleted_in_full(lab: CloudLab) -> None:
    here = store(lab)
    for i in range(103):
        lab.put(f"out/data/{i:03d}", b"")
    assert here.list("data") == [f"{i:03d}" for i in range(103)]
    here.delete_tree("data")
    assert lab.keys() == []


def test_ages_are_by_the_stores_clock(lab: CloudLab) -> None:
    here = store(lab)
    here.put("old", b"")
    time.sleep(2.1)  # the clock of such a store has seconds
    here.put("new", b"")
    old, new, gone = here.ages_s(["old", "new", "gone"])
    assert 1 <= old <= BOUND_S
    assert 0 <= new < old
    assert gone == float("inf")
    assert here.list("_batchspec/tmp") == []


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/../../x", ".", "a\0b"])
def test_names_cannot_leave_the_folder(lab: CloudLab, name: str) -> None:
    with pytest.raises(OutputError, match=r"\.\. are refused"):
        store(lab).put_if_absent(name, b"x")


@pytest.mark.parametrize(
    "root", ["gs://", "gs://lab", "gs://lab/", "gs://lab/a//b", "abfss://lab@x.dfs.core.windows.net", "az://", "abfss://@x.y/z"]
)
def test_an_output_folder_that_cannot_be_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match=r"names no folder of a bucket|name a bucket|must be abfss://"):
        open_store(root, "tmp")


def test_the_probes_pass_and_leave_nothing(lab: CloudLab) -> None:
    store(lab).probe()
    store(lab).probe_replace()
    assert lab.keys() == []


def test_the_probes_refuse_a_store_that_ignores_conditions(gcs: CloudLab) -> None:
    gcs.faults.ignore_conditions = True
    for probe in (store(gcs).probe, store(gcs).probe_replace):
        with pytest.raises(OutputError, match="ignores x-goog-if-generation-match"):
            probe()
    assert gcs.keys() == []


def test_a_bucket_that_is_not_there_is_named(lab: CloudLab) -> None:
    root: Any = f"{lab.root}/out".replace(f"//{BUCKET}", "//elsewhere")
    for act in (
        lambda: open_store(root, "tmp").put("x", b""),
        lambda: open_store(root, "tmp").read("x"),
        lambda: new_folder(root, 4, 2),
        lambda: OutputFolder(root).manifest,
        lambda: job_stats(root),
    ):
        with pytest.raises(OutputError, match="there is no bucket elsewhere; make it or name another"):
            act()


def test_a_job_is_committed_resumed_read_and_overwritten(lab: CloudLab, tmp_path: Path) -> None:
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
    new_folder(root, 7, 2, overwrite=True)
    assert lab.keys() == ["out/_batchspec/manifest.json"]
    assert not list(tmp_path.rglob("part-*"))


def test_a_shard_that_is_gone_while_rows_are_read_is_one_line(lab: CloudLab) -> None:
    parts, root = tables(), f"{lab.root}/out"
    folder = new_folder(root, 6, 2)  # type: ignore[arg-type]
    for i in range(3):
        folder.commit(i, parts[i])
    rows = folder.scan()
    lab.client().delete("out/data/part-00001.parquet")
    with pytest.raises(StorageError, match=r"reading .*part-00001\.parquet failed: it is not there any more"):
        rows.collect()


def test_a_prefix_of_something_else_is_never_touched(lab: CloudLab) -> None:
    lab.put("out/data/part-00000.parquet", b"precious")
    lab.put("file", b"precious")
    for name in ("out", "file"):
        root: Any = f"{lab.root}/{name}"
        with pytest.raises(OutputError, match="is no batchspec job"):
            new_folder(root, 6, 2, overwrite=True)
    assert lab.keys() == ["file", "out/data/part-00000.parquet"]


# --- what goes wrong on the way


@pytest.mark.parametrize("answer", [(503, "ServiceUnavailable"), (500, "InternalError"), (429, "TooManyRequests"), (408, "Slow")])
def test_what_passes_is_sent_again(gcs: CloudLab, answer: tuple[int, str]) -> None:
    gcs.faults.before = times(2, answer)
    assert store(gcs).put_if_absent("data/x", b"x")
    gcs.faults.before = times(1, answer, "GET")
    assert store(gcs).read("data/x") == b"x"


def test_a_put_whose_answer_got_lost_counts_as_ours(gcs: CloudLab) -> None:
    gcs.faults.after = times(1, (500, "InternalError"))
    assert store(gcs).put_if_absent("data/x", b"ours")
    gcs.faults.after = times(1, (500, "InternalError"))
    assert not store(gcs).put_if_absent("data/x", b"another's")
    assert gcs.body("out/data/x") == b"ours"
    here = store(gcs)
    path = here.scratch() / "new"
    path.write_bytes(b"new")
    gcs.faults.after = times(1, (500, "InternalError"))
    assert here.replace(path, "data/x", here.version("data/x"))
    assert gcs.body("out/data/x") == b"new"


def test_a_conflict_with_nothing_there_is_sent_again_and_takes_nothing(gcs: CloudLab) -> None:
    gcs.faults.before = times(2, (409, "Conflict"))
    assert store(gcs).put_if_absent("data/x", b"x")
    assert gcs.body("out/data/x") == b"x"


def test_what_does_not_pass_is_said_at_once(gcs: CloudLab) -> None:
    gcs.faults.before = times(1, (403, "AccessDenied"))
    with pytest.raises(StorageError, match=r"publishing gs://lab/out/x failed: access denied \(AccessDenied\).*GOOGLE_"):
        store(gcs).put_if_absent("x", b"x")
    with pytest.raises(StorageError, match="reading gs://lab/out/x failed: it is not there any more"):
        store(gcs).read("x")


@pytest.mark.parametrize("kind", ["latency", "reset", "truncation", "black hole"])
def test_faults_that_pass_are_not_noticed(lab: CloudLab, proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "black hole":
        set_times(monkeypatch, 1.0)
    proxy.kind, proxy.faulty, proxy.good_bytes = kind, 1, 5
    assert store(lab).put_if_absent("data/x", b"x" * 2000)
    proxy.faulty = 1
    assert store(lab).read("data/x") == b"x" * 2000


@pytest.mark.parametrize("kind", ["reset", "truncation", "black hole"])
def test_faults_that_last_end_in_bounded_time_with_nothing_partial(
    lab: CloudLab, proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root: Any = f"{lab.root}/out"
    folder, parts = new_folder(root, 6, 2), tables()
    set_times(monkeypatch, 1.0 if kind == "black hole" else 29.0, 1.0)  # other times: a client without open connections
    proxy.kind, proxy.faulty, proxy.good_bytes = kind, float("inf"), 5
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"failed for .*run the same command again") as caught:
        folder.commit(0, parts[0])
    assert time.monotonic() - began < BOUND_S
    said = str(caught.value)
    assert "\n" not in said
    assert not [secret for secret in (TOKEN, ACCOUNT_KEY, "AWS") if secret in said]
    committed = [key for key in sorted(lab.keys()) if "/data/" in key]
    for key in committed:  # an answer was lost: what was asked is done, and whole
        assert pq.read_table(pa.BufferReader(lab.body(key))).num_rows == 2
    proxy.faulty = 0
    set_times(monkeypatch)
    assert folder.commit(0, parts[0]) is not bool(committed)


def test_a_slow_upload_is_given_time_for_its_size(gcs: CloudLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore counts the time for the answer from the request's first byte."""
    sent: list[int] = []
    made = CloudStore._mode

    def mode(self: CloudStore, key: str, condition: str | None) -> Any:
        sent.append(1)
        return made(self, key, condition)

    monkeypatch.setattr(CloudStore, "_mode", mode)
    set_times(monkeypatch, 1.0)
    gcs.faults.before = lambda method, path: time.sleep(2.0) if method == "PUT" else None
    assert store(gcs).put_if_absent("large", b"x" * (5 << 20))
    assert len(sent) == 1
