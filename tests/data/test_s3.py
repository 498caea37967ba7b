"""S3 as a job's store and as its input, against an emulator: once, whole, in bounded time, without a word of the credentials."""

from __future__ import annotations

import gzip
import time
from base64 import b64encode
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import Source, open_source
from batchspec.data.runstate.output_folder import OutputFolder
from batchspec.data.storage import retry
from batchspec.data.storage.open_store import open_store
from batchspec.data.storage.s3_client import filesystem
from batchspec.data.storage.s3_store import S3Store
from batchspec.data.storage.store import STALE_S
from batchspec.errors import ConfigError, InputError, OutputError, StorageError
from batchspec.job.report.stats import job_stats
from tests.data.s3_lab import BUCKET, KEY_ID, SECRET, Faults, Lab, Proxy, running_lab, running_proxy
from tests.helpers.io_samples import new_folder, tables

pytestmark = pytest.mark.second


@pytest.fixture(scope="module")
def server() -> Iterator[Lab]:
    with running_lab() as lab:
        yield lab


@pytest.fixture
def lab(server: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    """The emulator, emptied, as the environment's endpoint; however busy the machine is, it has time to answer."""
    server.empty()
    server.faults.__dict__.update(Faults().__dict__)
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    set_times(monkeypatch, CONNECT_S=30.0, REQUEST_S=30.0, DEADLINE_S=PATIENT_S, FIRST_PAUSE_S=0.05)
    return server


PATIENT_S, AT_ONCE_S = 60.0, 20.0
"""Until a test gives up what should work; and what does not try again takes less, on a busy machine too."""


def set_times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """For what lasts a test makes the deadline short; an answer that never comes, the request's time."""
    for name, value in seconds.items():
        monkeypatch.setattr(retry, name, value)


@pytest.fixture
def proxy(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy to the emulator, as the environment's endpoint."""
    with running_proxy(lab.port) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}")
        yield found


def store(folder: str = "out") -> S3Store:
    return S3Store(f"s3://{BUCKET}/{folder}")


class Always:
    """A fault of every request."""

    def __init__(self, answer: tuple[int, str]) -> None:
        self.answer = answer

    def __call__(self, environ: dict[str, Any]) -> tuple[int, str]:
        return self.answer


def times(count: int, answer: tuple[int, str], method: str = "PUT") -> Any:
    """A fault of the first `count` requests of a method."""
    left = [count]

    def fault(environ: dict[str, Any]) -> tuple[int, str] | None:
        if environ["REQUEST_METHOD"] != method or not left[0]:
            return None
        left[0] -= 1
        return answer

    return fault


# --- the store


def test_everything_is_sent_with_its_digest_so_that_s3_refuses_what_arrives_damaged(lab: Lab, tmp_path: Path) -> None:
    here = open_store(f"s3://{BUCKET}/out/", "tmp")
    assert isinstance(here, S3Store)
    sent: list[str] = []
    here._client.meta.events.register(
        "before-call.s3.PutObject", lambda params, **_: sent.append(params["headers"]["Content-MD5"])
    )
    here.put("put", b"one")
    here.put_if_absent("absent", b"two")
    (tmp_path / "three").write_bytes(b"three")
    here.publish(tmp_path / "three", "published")
    assert sent == [b64encode(md5(data).digest()).decode() for data in (b"one", b"two", b"three")]


@pytest.mark.parametrize("root", ["s3://", "s3://lab", "s3://lab/", "s3://lab/a//b", "hdfs://lab/x"])
def test_an_output_folder_that_cannot_be_is_refused(lab: Lab, root: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://BUCKET/FOLDER|cannot be a folder of a bucket"):
        open_store(root, "tmp")


def test_the_probe_refuses_a_store_that_overwrites(lab: Lab) -> None:
    store().probe()
    lab.faults.ignore_conditions = True
    with pytest.raises(OutputError, match="ignores If-None-Match") as caught:
        store().probe()
    assert "\n" not in str(caught.value)
    assert lab.keys() == []


PASSING = [(503, "SlowDown"), (500, "InternalError"), (409, "ConditionalRequestConflict"), (400, "BadDigest")]


@pytest.mark.parametrize("answer", PASSING)
def test_what_passes_is_sent_again(lab: Lab, answer: tuple[int, str]) -> None:
    lab.faults.before = times(2, answer)
    assert store().put_if_absent("data/x", b"x")
    lab.faults.before = times(1, answer, "GET")
    assert store().read("data/x") == b"x"


def test_a_put_whose_answer_got_lost_counts_as_ours(lab: Lab) -> None:
    lab.faults.after = times(1, (500, "InternalError"))
    assert store().put_if_absent("data/x", b"ours")
    assert lab.body("out/data/x") == b"ours"
    lab.faults.after = times(1, (500, "InternalError"))
    assert not store().put_if_absent("data/x", b"another's")
    assert lab.body("out/data/x") == b"ours"


def test_what_does_not_pass_is_said_at_once(lab: Lab) -> None:
    lab.faults.before = times(1, (403, "AccessDenied"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"publishing s3://lab/out/data/x failed: access denied.*AWS_PROFILE") as caught:
        store().put_if_absent("data/x", b"x")
    assert time.monotonic() - began < AT_ONCE_S
    assert caught.value.exit_code == 74
    lab.faults.before = Always((403, "AccessDenied"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"looking for s3://lab/in failed: .*ACCESS_DENIED.*AWS_PROFILE"):
        source_of("in")
    assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("bucket", ["elsewhere", "no name of one!"])
def test_a_missing_bucket_is_bad_input_and_named(lab: Lab, monkeypatch: pytest.MonkeyPatch, bucket: str) -> None:
    """Though a HEAD does not tell a missing bucket from a missing object."""
    set_times(monkeypatch, DEADLINE_S=0.0)  # what would be tried again is a StorageError then
    message = rf"{bucket}.*: there is no bucket {bucket}; make it or name another$"
    out: Any = f"s3://{bucket}/out"
    for act in (
        lambda: S3Store(out).put("x", b""),
        lambda: S3Store(out).read("x"),
        lambda: new_folder(out, 4, 2),
        lambda: OutputFolder(out).manifest,
        lambda: job_stats(out),
    ):
        with pytest.raises(OutputError, match=message) as caught:
            act()
        assert caught.value.exit_code == 2
    for path in ("", "/in", "/in/a.parquet", "/in/*.parquet", "/*/**"):
        with pytest.raises(InputError, match=message) as refused:
            open_source(InputConfig(path=f"s3://{bucket}{path}"))
        assert refused.value.exit_code == 2


def test_a_missing_bucket_whose_region_is_requested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(bucket: str) -> str:
        raise OSError(said.format(bucket=bucket))

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr("batchspec.data.storage.s3_client.pafs.resolve_s3_region", resolve)
    said = "Bucket '{bucket}' not found"
    with pytest.raises(InputError, match="s3://elsewhere: there is no bucket elsewhere; make it or name another"):
        filesystem("elsewhere")
    said = "When resolving region for bucket '{bucket}': AWS Error NETWORK_CONNECTION"
    with pytest.raises(StorageError, match="s3://elsewhere: no answer"):
        filesystem("elsewhere")


def test_an_unknown_profile_and_a_bad_endpoint_are_config_errors(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        store()
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        source_of("in")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"nobody.*check AWS_PROFILE"):
        store()


def test_a_public_bucket_is_read_without_credentials(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[bool] = []

    def look(environ: dict[str, Any]) -> None:
        signed.append("HTTP_AUTHORIZATION" in environ)

    put_table(lab, "in/a.parquet", 0, 3)
    lab.client.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    lab.client.put_object_acl(Bucket=BUCKET, Key="in/a.parquet", ACL="public-read")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    lab.faults.before = look
    assert ids(source_of("in")) == ["q-0", "q-1", "q-2"]
    assert signed
    assert not any(signed)


# --- the output folder


OUT: Any = f"s3://{BUCKET}/out"
ELSEWHERE: Any = f"s3://{BUCKET}/file"


def test_old_local_files_of_runs_that_died_are_cleaned(lab: Lab, tmp_path: Path) -> None:
    import os

    here = store()
    left = here.scratch()
    os.utime(left, (time.time() - STALE_S - 60,) * 2)
    young = store()
    young_folder = young.scratch()
    young.clean()
    assert (left.exists(), young_folder.exists()) == (False, True)


class Killed(BaseException):
    """The end of a process, at a request that changes something."""


@pytest.mark.parametrize("answered", [False, True], ids=["before the request", "after it"])
def test_a_run_that_dies_at_any_change_is_finished_by_the_next(lab: Lab, monkeypatch: pytest.MonkeyPatch, answered: bool) -> None:
    from botocore.httpsession import URLLib3Session

    send, parts = URLLib3Session.send, tables()
    left = 0

    def dying(self: Any, request: Any) -> Any:
        nonlocal left
        if request.method not in ("PUT", "DELETE"):
            return send(self, request)
        left -= 1
        if left == 0 and not answered:
            raise Killed
        answer = send(self, request)
        if left == 0:
            raise Killed
        return answer

    def run() -> None:
        folder = new_folder(OUT, 6, 2)
        for index in sorted(set(range(3)) - folder.committed()):
            folder.commit(index, parts[index])

    for change in range(1, 13):
        lab.empty()
        with monkeypatch.context() as patched:
            patched.setattr(URLLib3Session, "send", dying)
            left = change
            try:
                run()
            except Killed:
                pass
            else:
                break
        run()
        assert [key for key in lab.names() if "/data/" in key] == [f"out/data/part-{i:05d}.parquet" for i in range(3)]
        for index in range(3):
            assert pq.read_table(pa.BufferReader(lab.body(f"out/data/part-{index:05d}.parquet"))).equals(parts[index])
    assert change == 11  # the probe's two, its clean-up, the manifest, three shards and their sums


def test_any_file_system_that_arrow_reaches_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["q-0"], "prompt": ["say"]}), tmp_path / "x.parquet")
    for path in (tmp_path, tmp_path / "x.parquet", tmp_path / "*.parquet"):
        source = open_source(InputConfig(path=f"file://{path}"))
        assert (ids(source), source.files[0].name) == (["q-0"], "x.parquet")
    with pytest.raises(ConfigError, match=r"input\.path nonsense://.*give a local path, s3://BUCKET"):
        open_source(InputConfig(path="nonsense://x"))


# --- the input


def put_table(lab: Lab, key: str, first: int, count: int) -> None:
    sink = pa.BufferOutputStream()
    rows = range(first, first + count)
    table = pa.table({"id": [f"q-{i}" for i in rows], "prompt": [f"say {i} {'x' * 200}" for i in rows]})
    pq.write_table(table, sink, row_group_size=5)
    lab.put(key, sink.getvalue().to_pybytes())


def source_of(*paths: str) -> Source:
    return open_source(InputConfig(path=[f"s3://{BUCKET}/{path}" for path in paths]))


def ids(source: Source) -> list[str]:
    return [name for shard in source.shards(4) for name in shard.table["id"].to_pylist()]


@pytest.fixture
def data(lab: Lab) -> Lab:
    """20 rows in three Parquet files, and what is no data."""
    for name, first, count in (("a", 0, 7), ("b/c", 7, 7), ("b/d", 14, 6), ("_x/y", 90, 1)):
        put_table(lab, f"in/{name}.parquet", first, count)
    lab.put("in/README.md", b"not data")
    return lab


def test_partitions_and_saved_datasets_are_read_and_tables_are_refused(lab: Lab) -> None:
    for year in (2023, 2024):
        put_table(lab, f"hive/year={year}/a.parquet", year, 1)
    source = source_of("hive")
    assert [row["year"] for shard in source.shards(9) for row in shard.table.to_pylist()] == [2023, 2024]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema({"id": pa.string(), "prompt": pa.string()})) as writer:
        writer.write_table(pa.table({"id": ["q-0"], "prompt": ["say"]}))
    for split in ("train", "test"):
        lab.put(f"dict/{split}/data-00000-of-00001.arrow", sink.getvalue().to_pybytes())
        lab.put(f"dict/{split}/cache-1.arrow", b"no data")
        lab.put(f"dict/{split}/state.json", b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        lab.put(f"dict/{split}/dataset_info.json", b"{}")
    lab.put("dict/dataset_dict.json", b'{"splits": ["train", "test"]}')
    assert ids(source_of("dict/test")) == ["q-0"]
    assert ids(open_source(InputConfig(path=f"s3://{BUCKET}/dict", split="train"))) == ["q-0"]
    put_table(lab, "table/day=1/a.parquet", 0, 1)
    lab.put("table/_delta_log/00000000000000000000.json", b"{}")
    for path in ("dict", "table", "table/day=1", "table/*/*.parquet"):
        with pytest.raises(InputError, match=r"has the splits train, test|is a Delta Lake table"):
            source_of(path)


@pytest.mark.parametrize(
    ("paths", "names", "rows"),
    [
        (["in"], ["a.parquet", "b/c.parquet", "b/d.parquet"], range(20)),
        (["in/"], ["a.parquet", "b/c.parquet", "b/d.parquet"], range(20)),
        (["in/a.parquet"], ["a.parquet"], range(7)),
        (["in/*.parquet"], ["a.parquet"], range(7)),
        (["in/**/*.parquet"], ["a.parquet", "b/c.parquet", "b/d.parquet"], range(20)),
        (["in/?/[c]*.parquet"], ["b/c.parquet"], range(7, 14)),
        (["in/b/d.parquet", "in/a.parquet"], ["a.parquet", "b/d.parquet"], [*range(7), *range(14, 20)]),
    ],
)
def test_files_folders_globs_and_lists_are_read(data: Lab, paths: list[str], names: list[str], rows: Any) -> None:
    source = source_of(*paths)
    assert [file.name for file in source.files] == names
    assert ids(source) == [f"q-{i}" for i in rows]


def test_names_and_digests_are_those_of_the_same_files_on_a_disk(data: Lab, tmp_path: Path) -> None:
    for key in data.keys("in/"):
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.body(key))
    assert source_of("in").files == open_source(InputConfig(path=str(tmp_path / "in"))).files


def test_json_lines_are_read(lab: Lab) -> None:
    data = "".join(f'{{"id": "q-{i}", "prompt": "say"}}\n' for i in range(9)).encode()
    lab.put("in/x.jsonl", data)
    lab.put("packed/x.jsonl.gz", gzip.compress(data))
    for folder in ("in", "packed"):
        assert ids(source_of(folder)) == [f"q-{i}" for i in range(9)]


def test_a_footer_is_read_once_a_pass(data: Lab) -> None:
    """One GET for the footer and two for each row group; the HEADs ask whether the file is still the same."""
    counts = []
    for name, rows in (("in/b/d.parquet", 6), ("in/a.parquet", 7)):  # two row groups in each
        source = source_of(name)
        data.faults.requests.clear()
        assert len(ids(source)) == rows
        counts.append([sum(one.startswith(kind) for one in data.faults.requests) for kind in ("GET", "HEAD")])
    assert counts[0] == counts[1]
    assert counts[0][0] <= 5
    assert counts[0][1] <= 10


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["in/nowhere.parquet"], "s3://lab/in/nowhere.parquet: does not exist; check the path and the bucket"),
        (["in/z*.parquet"], "no data file there"),
        (["nowhere/*"], "no data file there"),
        (["in/README.md"], "is not that of a data file"),
        (["in/a.parquet", "in/a.parquet"], "twice"),
    ],
)
def test_bad_paths_are_one_line(data: Lab, paths: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("*", r"\*")) as caught:
        source_of(*paths)
    assert "\n" not in str(caught.value)


def test_files_of_two_file_systems_are_two_jobs(data: Lab, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="on local and on s3"):
        open_source(InputConfig(path=[str(tmp_path), f"s3://{BUCKET}/in"]))


# --- what goes wrong on the way


KINDS = ["latency", "reset", "truncation", "black hole"]


def read_all() -> list[str]:
    return ids(source_of("in"))


@pytest.mark.parametrize("kind", KINDS)
def test_faults_that_pass_are_not_noticed(data: Lab, proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "black hole":
        set_times(monkeypatch, REQUEST_S=1.0)
    source = source_of("in")
    proxy.kind, proxy.faulty = kind, 1 if kind == "black hole" else 2
    assert ids(source) == [f"q-{i}" for i in range(20)]
    proxy.faulty = 1
    assert store().put_if_absent("data/x", b"x" * 2000)
    proxy.faulty = 1
    assert store().read("data/x") == b"x" * 2000


@pytest.mark.parametrize("kind", KINDS[1:])
def test_faults_that_last_end_in_bounded_time_with_nothing_partial(
    data: Lab, proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "black hole":
        set_times(monkeypatch, REQUEST_S=1.0)
    source, folder, parts = source_of("in"), new_folder(OUT, 6, 2), tables()
    set_times(monkeypatch, DEADLINE_S=1.0)
    proxy.kind, proxy.faulty, proxy.good_bytes = kind, float("inf"), 5
    for act, message in (
        (lambda: ids(source), r"opening s3://lab/in/a\.parquet failed"),
        (read_all, r"looking for s3://lab/in failed"),
        (lambda: folder.commit(0, parts[0]), r"writing s3://lab/out/_batch\S+ failed for"),
    ):
        began = time.monotonic()
        with pytest.raises(StorageError, match=f"{message}.*run the same command again") as caught:
            act()
        assert time.monotonic() - began < AT_ONCE_S
        assert "\n" not in str(caught.value)
    committed = data.keys("out/data/")
    for key in committed:  # an answer was lost: what was asked is done, and whole
        assert pq.read_table(pa.BufferReader(data.body(key))).num_rows == 2
    proxy.faulty = 0
    set_times(monkeypatch, DEADLINE_S=PATIENT_S)
    assert OutputFolder(OUT).committed() == ({0} if committed else set())
    assert folder.commit(0, parts[0]) is not bool(committed)


def test_a_store_that_is_too_busy_for_long_is_said(data: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, DEADLINE_S=1.0)
    data.faults.before = Always((503, "SlowDown"))
    with pytest.raises(StorageError, match=r"publishing s3://lab/out/x failed for \d+ s .*SlowDown"):
        store().put_if_absent("x", b"")
    with pytest.raises(StorageError, match=r"looking for s3://lab/in failed for \d+ s"):
        read_all()


# --- secrets


def test_credentials_are_in_no_message(data: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, DEADLINE_S=1.0)
    said = []
    source = source_of("in")
    for wrong in ((403, "SignatureDoesNotMatch"), (403, "InvalidAccessKeyId"), (503, "SlowDown")):
        data.faults.before = Always(wrong)
        for act in (read_all, lambda: ids(source), lambda: store().put("x", b""), lambda: store().list("")):
            with pytest.raises(StorageError) as caught:
                act()
            said.append(str(caught.value))
    assert not [line for line in said if KEY_ID in line or SECRET in line]
