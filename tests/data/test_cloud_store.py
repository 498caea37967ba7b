"""Google Cloud Storage and Azure as a job's store, on emulators: once, whole, in bounded time, without a secret in a message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage import retry
from batchspec.data.storage.cloud_store import CloudStore
from batchspec.data.storage.open_store import open_store
from batchspec.errors import ConfigError, OutputError, StorageError
from batchspec.job.report.stats import job_stats
from tests.data.cloud_lab import ACCOUNT_KEY, BUCKET, TOKEN, CloudLab, Faults, running_azure, running_gcs
from tests.data.s3_lab import Proxy, running_proxy
from tests.helpers.io_samples import new_folder, tables

BOUND_S = 60.0
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


def times(count: int, answer: tuple[int, str], method: str = "PUT") -> Any:
    """A fault of the first `count` requests of a method."""
    left = [count]

    def fault(asked: str, path: str) -> tuple[int, str] | None:
        if asked != method or not left[0]:
            return None
        left[0] -= 1
        return answer

    return fault


@pytest.mark.parametrize(
    "root", ["gs://", "gs://lab", "gs://lab/", "gs://lab/a//b", "abfss://lab@x.dfs.core.windows.net", "az://", "abfss://@x.y/z"]
)
def test_an_output_folder_that_cannot_be_is_refused(root: str) -> None:
    with pytest.raises(
        ConfigError, match=r"names no folder of a bucket|cannot be a folder of a bucket|name a bucket|must be abfss://"
    ):
        open_store(root, "tmp")


def test_the_probes_refuse_a_store_that_ignores_conditions(gcs: CloudLab) -> None:
    gcs.faults.ignore_conditions = True
    for probe in (store(gcs).probe, store(gcs).probe_replace):
        with pytest.raises(OutputError, match="ignores x-goog-if-generation-match"):
            probe()
    assert gcs.keys() == []


def test_a_missing_bucket_is_named(lab: CloudLab) -> None:
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


def test_a_shard_that_disappears_while_rows_are_read_is_a_one_line_error(lab: CloudLab) -> None:
    parts, root = tables(), f"{lab.root}/out"
    folder = new_folder(root, 6, 2)  # type: ignore[arg-type]
    for i in range(3):
        folder.commit(i, parts[i])
    rows = folder.scan()
    lab.client().delete("out/data/part-00001.parquet")
    with pytest.raises(StorageError, match=r"reading .*part-00001\.parquet failed: it is not there any more"):
        rows.collect()


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


def test_a_conflict_about_a_missing_object_is_sent_again_and_replaces_nothing(gcs: CloudLab) -> None:
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


@pytest.mark.second
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
