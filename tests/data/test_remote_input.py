"""Input on gs://, abfss:// and hf:// reads as from a disk; a failure is one line, in bounded time, with its store's advice."""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchspec.config.checks import URLS
from batchspec.config.schema import InputConfig, RunConfig
from batchspec.config.values import check_credentials
from batchspec.data.dataset.reader import Source, open_source
from batchspec.data.storage import retry
from batchspec.data.storage.cloud_client import ANSWERED, Bucket, Passing
from batchspec.errors import BatchspecError, ConfigError, InputError, StorageError
from tests.data.cloud_lab import ACCOUNT_KEY, BUCKET, TOKEN, CloudLab, Faults, running_azure, running_gcs
from tests.data.hub_lab import TOKEN as HUB_TOKEN
from tests.data.hub_lab import Hub, running_hub
from tests.data.s3_lab import running_proxy

pytestmark = pytest.mark.second

BOUND_S = 60.0
"""What ends after one try, or a deadline of a second, takes less on a busy machine too."""
FOREIGN = {"gs": ("AWS", "AZURE"), "az": ("AWS", "GOOGLE"), "hf": ("AWS", "AZURE", "GOOGLE")}


@pytest.fixture(scope="module", params=["gs", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudLab]:
    with running_gcs() if request.param == "gs" else running_azure(tmp_path_factory.mktemp("azurite")) as lab:
        yield lab


@pytest.fixture
def lab(server: CloudLab, monkeypatch: pytest.MonkeyPatch) -> CloudLab:
    server.empty()
    server.faults.__dict__.update(Faults().__dict__)
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    set_times(monkeypatch)
    return server


def set_times(monkeypatch: pytest.MonkeyPatch, request_s: float = 30.0, deadline_s: float = 15.0) -> None:
    for name, value in (("CONNECT_S", 5.0), ("REQUEST_S", request_s), ("DEADLINE_S", deadline_s), ("FIRST_PAUSE_S", 0.05)):
        monkeypatch.setattr(retry, name, value)


def table(first: int, count: int) -> bytes:
    rows = range(first, first + count)
    sink = io.BytesIO()
    pq.write_table(
        pa.table({"id": [f"q-{i}" for i in rows], "prompt": [f"say {i} {'x' * 200}" for i in rows]}), sink, row_group_size=5
    )
    return sink.getvalue()


DATA = {
    "in/a.parquet": table(0, 7),
    "in/b/c.parquet": table(7, 7),
    "in/b/d.parquet": table(14, 6),
    "in/_x/y.parquet": table(90, 1),
}
DATA |= {"in/README.md": b"no data", "lines/x y.jsonl": b"".join(b'{"id": "q-%d", "prompt": "say"}\n' % i for i in range(9))}


def source_of(*paths: str) -> Source:
    return open_source(InputConfig(path=list(paths)))


def ids(source: Source) -> list[str]:
    return [name for shard in source.shards(4) for name in shard.table["id"].to_pylist()]


def refusal(kind: type[BatchspecError], *paths: str) -> str:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        ids(source_of(*paths))
    assert time.monotonic() - began < BOUND_S
    said = str(caught.value)
    assert "\n" not in said
    return said


# --- Google Cloud Storage and Azure


@pytest.fixture
def data(lab: CloudLab) -> CloudLab:
    for name, content in DATA.items():
        lab.put(name, content)
    return lab


@pytest.mark.parametrize(
    ("paths", "names", "rows"),
    [
        (["in"], ["a.parquet", "b/c.parquet", "b/d.parquet"], range(20)),
        (["in/"], ["a.parquet", "b/c.parquet", "b/d.parquet"], range(20)),
        (["in/a.parquet"], ["a.parquet"], range(7)),
        (["in/**/*.parquet"], ["a.parquet", "b/c.parquet", "b/d.parquet"], range(20)),
        (["in/?/[c]*.parquet"], ["b/c.parquet"], range(7, 14)),
        (["in/b/d.parquet", "in/a.parquet"], ["a.parquet", "b/d.parquet"], [*range(7), *range(14, 20)]),
        (["lines/x y.jsonl"], ["x y.jsonl"], range(9)),
        ([""], ["in/a.parquet", "in/b/c.parquet", "in/b/d.parquet", "lines/x y.jsonl"], [*range(20), *range(9)]),
    ],
)
def test_files_folders_globs_and_lists_are_read(data: CloudLab, paths: list[str], names: list[str], rows: Any) -> None:
    source = source_of(*(f"{data.root}/{path}" for path in paths))
    assert [file.name for file in source.files] == names
    assert ids(source) == [f"q-{i}" for i in rows]


def test_names_and_digests_are_those_of_the_same_files_on_a_disk(data: CloudLab, tmp_path: Path) -> None:
    for name, content in DATA.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert source_of(f"{data.root}/in").files == source_of(str(tmp_path / "in")).files


def test_a_folder_of_more_files_than_a_page_is_listed_in_full(lab: CloudLab) -> None:
    for i in range(103):
        lab.put(f"many/{i:03d}.parquet", DATA["in/a.parquet"])
    assert len(source_of(f"{lab.root}/many").files) == 103


def test_a_file_that_changes_while_it_is_read_is_named(data: CloudLab) -> None:
    source = source_of(f"{data.root}/in/a.parquet")
    data.put("in/a.parquet", table(50, 7))
    with pytest.raises(InputError, match=r"a\.parquet changed while the job runs"):
        ids(source)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("in/nowhere.parquet", "does not exist; check the path and the bucket"),
        ("in/z*.parquet", "no data file there; names end in one of"),
        ("nowhere/*", "no data file there; names end in one of"),
        ("in/README.md", "is not that of a data file; names end in one of"),
    ],
)
def test_bad_paths_are_one_line(data: CloudLab, path: str, message: str) -> None:
    assert message in refusal(InputError, f"{data.root}/{path}")


@pytest.mark.parametrize("path", ["", "/in", "/in/a.parquet", "/in/*.parquet"])
def test_a_missing_bucket_is_named(lab: CloudLab, path: str) -> None:
    root = lab.root.replace(f"//{BUCKET}", "//elsewhere")
    assert "there is no bucket elsewhere" in refusal(InputError, root + path)


def test_a_store_that_never_answers_ends_in_bounded_time_in_its_own_words(
    data: CloudLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(f"{data.root}/in")
    with running_proxy(data.port) as proxy:
        for name, value in data.environ(proxy.port).items():
            monkeypatch.setenv(name, value)
        for kind in ("reset", "truncation", "black hole"):
            proxy.kind, proxy.faulty, proxy.good_bytes = kind, float("inf"), 5
            set_times(monkeypatch, 1.0 if kind == "black hole" else 30.0, 1.0)
            said = refusal(StorageError, f"{data.root}/in")
            assert said.startswith(f"looking for {data.root}/in failed for ")
            assert "run the same command again" in said
            assert not [word for word in FOREIGN[data.cloud] if word in said]
            with pytest.raises(StorageError):
                ids(source)
        proxy.kind, proxy.faulty, proxy.good_bytes = "truncation", 2, 5
        set_times(monkeypatch)
        assert ids(source) == [f"q-{i}" for i in range(20)]


WRONG = {
    "gs": {"GOOGLE_BEARER_TOKEN": "wrong-canary"},
    "az": {"AZURE_STORAGE_ACCOUNT_KEY": "d3JvbmctY2FuYXJ5"},
}


def test_wrong_credentials_are_said_at_once_and_never_quoted(data: CloudLab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WRONG[data.cloud].items():
        monkeypatch.setenv(name, value)
    said = refusal(StorageError, f"{data.root}/in")
    assert "access denied" in said
    assert {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_KEY"}[data.cloud] in said
    assert not [word for word in (*FOREIGN[data.cloud], *WRONG[data.cloud].values(), TOKEN, ACCOUNT_KEY) if word in said]


def test_a_signature_in_the_environment_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore quotes the URL that it asked for, and a shared access signature is part of it."""
    with running_gcs() as lab:
        set_times(monkeypatch, deadline_s=0.5)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{lab.port}/account")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2024-01-01&sig=canary%2Bsignature")
        for status in (403, 500, 400):
            lab.faults.before = lambda method, path, status=status: (status, "Injected")  # type: ignore[misc]
            said = refusal(StorageError, f"abfss://{BUCKET}@account.dfs.core.windows.net/in")
            assert "canary" not in said
            assert "AZURE_STORAGE_" in said


def test_without_credentials_nothing_is_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without an identity: the address that would give one does not answer."""
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    set_times(monkeypatch, request_s=1.0)
    with running_gcs() as lab, running_proxy(lab.port) as proxy:
        proxy.kind, proxy.faulty = "black hole", float("inf")
        monkeypatch.setenv("AZURE_IDENTITY_ENDPOINT", f"http://127.0.0.1:{proxy.port}/token")
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"http://127.0.0.1:{proxy.port}/token")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{lab.port}/account")
        said = refusal(StorageError, f"abfss://{BUCKET}@account.dfs.core.windows.net/in")
    assert "no credentials were found or accepted" in said
    assert "AZURE_STORAGE_ACCOUNT_KEY" in said


def test_a_missing_credentials_file_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    assert "no credentials file /nowhere/key.json" in refusal(ConfigError, "gs://lab/in")
    (tmp_path / "key.json").write_text('{"type": "external_account", "secret": "canary"}')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    said = refusal(ConfigError, "gs://lab/in")
    assert "a credentials file of an unknown form" in said
    assert "canary" not in said


def test_an_unknown_host_is_reported_soon_unless_the_store_has_answered_before() -> None:
    from obstore.exceptions import BaseError
    from obstore.store import GCSStore

    bucket = Bucket("gs", "never-answered")
    config: Any = {"base_url": "http://nowhere.invalid", "skip_signature": True}
    with pytest.raises(BaseError) as caught:
        GCSStore("lab", config=config, client_options={"allow_http": True}, retry_config={"max_retries": 0}).head("x")
    first = Passing(bucket)
    assert [first(caught.value) for _ in range(3)] == [True, True, False]
    ANSWERED.add(bucket)
    later = Passing(bucket)
    assert [later(caught.value) for _ in range(9)] == 9 * [True]


# --- URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://", "name a bucket"),
        ("gs:///in", "name a bucket"),
        ("az://", "abfss://CONTAINER@ACCOUNT"),
        ("abfss://lab@/in", "abfss://CONTAINER@ACCOUNT"),
        ("az://lab/in", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("https://huggingface.co/datasets/org/name", "hf://datasets/ORG/NAME"),
        ("http://example.com/x.parquet", "web addresses are not read"),
        ("hf://org/name/x.parquet", "must be hf://datasets/ORG/NAME"),
        ("hf://datasets/org", "must be hf://datasets/ORG/NAME"),
        ("hf://buckets/org/name", "must be hf://datasets/ORG/NAME"),
        ("adl://x/y", "give a local path"),
    ],
)
def test_a_url_that_names_nothing_to_read_is_one_line(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert message in refusal(ConfigError, url)


@pytest.mark.parametrize(
    "url",
    [
        "abfs://data@account.dfs.core.windows.net/in/*.parquet", "abfss://data@account.dfs.core.windows.net",
        "az://data@account.blob.core.windows.net/x", "hf://datasets/org/name@v1.0/x.parquet", "hf://datasets/o/n@refs/pr/1/x",
        "gs://bucket/in@home/x", "s3://bucket/in",
    ],
)
def test_a_container_and_a_revision_are_no_credentials(url: str) -> None:
    check_credentials(_config(url), URLS)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("abfss://data:canary@account.dfs.core.windows.net/in", "AZURE_STORAGE_"),
        ("abfss://CanaryKey==@account.dfs.core.windows.net/in", "AZURE_STORAGE_"),
        ("abfss://data@account.dfs.core.windows.net/in?sv=1&sig=canary", "AZURE_STORAGE_"),
        ("abfss://data@account.dfs.core.windows.net:canary@x/in", "AZURE_STORAGE_"),
        ("gs://canary@bucket/in", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("s3://key:canary@bucket/in", "AWS_PROFILE"),
        ("hf://user:canary@datasets/org/name", "HF_TOKEN"),
        ("https://user:canary@host/x.parquet", "environment or profile"),
        ("https://host/x.parquet?X-Amz-Signature=canary", "environment or profile"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=r"input\.path holds credentials in a URL") as caught:
        check_credentials(_config(url), URLS)
    assert "anary" not in str(caught.value)
    assert advice in str(caught.value)


def _config(url: str) -> RunConfig:
    config = RunConfig()
    config.input.path = url
    return config


# --- the Hugging Face hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    set_times(monkeypatch)
    with running_hub() as server:
        set_endpoint(monkeypatch, server.server_port)
        monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
        server.commit(DATA)
        yield server


def set_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """As HF_ENDPOINT does, which huggingface_hub reads when it is imported."""
    place = f"http://127.0.0.1:{port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/resolve/{revision}/{filename}"
    )


NAME = "hf://datasets/org/name"


@pytest.mark.parametrize(
    ("path", "rows"),
    [
        ("/in", range(20)),
        ("/in/a.parquet", range(7)),
        ("/in/**/*.parquet", range(20)),
        ("@main/in/b", range(7, 20)),
        ("/lines/x y.jsonl", range(9)),
    ],
)
def test_a_dataset_of_the_hub_is_read(hub: Hub, path: str, rows: Any) -> None:
    assert ids(source_of(NAME + path)) == [f"q-{i}" for i in rows]


@pytest.mark.parametrize("written", ["v1.0", "refs/convert/parquet", "refs%2Fconvert%2Fparquet", "refs/pr/1"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, written: str) -> None:
    from urllib.parse import unquote

    sha = hub.commit({"x.parquet": table(70, 3)}, unquote(written))
    assert ids(source_of(f"{NAME}@{written}/x.parquet")) == ids(source_of(f"{NAME}@{sha}")) == ["q-70", "q-71", "q-72"]


def test_the_commit_is_resolved_once_so_that_a_push_changes_nothing_under_a_job(hub: Hub) -> None:
    source = source_of(f"{NAME}/in")
    hub.commit({"in/a.parquet": table(50, 1)})
    assert ids(source) == [f"q-{i}" for i in range(20)]
    assert len([path for path in hub.requests if path.startswith("/api/")]) == 1


def test_only_the_bytes_that_are_needed_are_fetched(hub: Hub) -> None:
    source_of(f"{NAME}/in/a.parquet")
    assert {path.rpartition("/")[2] for path in hub.requests if "/resolve/" in path} == {"a.parquet"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://datasets/org/none/x.parquet", "no such dataset that you may read; .*HF_TOKEN"),
        (f"{NAME}@none/x.parquet", "no revision 'none'"),
        (f"{NAME}/nowhere.parquet", "does not exist"),
        ("hf://datasets/o r g/na--me/x.parquet", "no dataset can have that name"),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(hub: Hub, url: str, message: str) -> None:
    import re

    assert re.search(message, refusal(InputError, url))


def test_a_hub_that_fails_or_never_answers_is_one_line_in_bounded_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    source = source_of(f"{NAME}/in")
    set_times(monkeypatch, deadline_s=0.5)
    for status in (403, 500, 503):
        hub.fault = lambda path, status=status: status  # type: ignore[misc]
        said.append(refusal(StorageError, f"{NAME}/in"))
        with pytest.raises(StorageError):
            ids(source)
    set_times(monkeypatch, 1.0, 1.0)
    with running_proxy(hub.server_port) as proxy:
        set_endpoint(monkeypatch, proxy.port)
        for proxy.kind in ("reset", "truncation", "black hole"):
            proxy.faulty, proxy.good_bytes = float("inf"), 5
            said.append(refusal(StorageError, f"{NAME}/in"))
    assert not [line for line in said if HUB_TOKEN in line or any(word in line for word in FOREIGN["hf"])]
    assert "HF_TOKEN" in said[0]
    assert all("HF_ENDPOINT" in line for line in said[1:])


def test_a_hub_that_does_not_answer_is_reported_before_the_request_ends(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten seconds in production; then it waits again."""
    set_times(monkeypatch, 1.0, 0.5)
    monkeypatch.setattr(retry, "NOTICE_S", 0.2)
    with running_proxy(hub.server_port) as proxy:
        set_endpoint(monkeypatch, proxy.port)
        proxy.kind, proxy.faulty, proxy.good_bytes = "black hole", float("inf"), 5
        refusal(StorageError, f"{NAME}/in")
    first, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"asking the Hugging Face hub for hf://datasets/\S+ has taken 0 s without an answer; still waiting", first
    )


def test_a_store_that_fails_for_long_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_times(monkeypatch, deadline_s=0.5)
    monkeypatch.setattr(retry, "NOTICE_S", 0.1)

    def fail() -> None:
        raise OSError("no route")

    with pytest.raises(StorageError):
        retry.retried("reading x", fail, lambda error: True, str)
    assert capsys.readouterr().err.splitlines() == ["reading x fails (no route); it is tried again for up to 0 s"]


def test_tries_that_are_slow_end_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No try begins that would end after the limit if it took as long as those before it."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def fail() -> None:
        now[0] += 50.0
        raise OSError("no route")

    with pytest.raises(StorageError, match=r"failed for 10\d s"):
        retry.retried("reading x", fail, lambda error: True, str)
    assert 100 < now[0] <= retry.DEADLINE_S


def test_without_a_network_the_hub_is_given_up_in_seconds(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that cannot be resolved before the hub has ever answered will not be in two minutes either."""
    set_times(monkeypatch, deadline_s=60.0)
    monkeypatch.setattr(retry, "UNRESOLVED_S", 1.0)
    tries = []

    def unresolved(host: object, *_: object, **__: object) -> None:
        tries.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.test")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://hub.test", raising=False)
    began = time.monotonic()
    said = refusal(StorageError, f"{NAME}/in")
    assert time.monotonic() - began < 30.0
    assert len(tries) > 1
    assert "the name of its server cannot be resolved; check the network and the endpoint" in said
    assert capsys.readouterr().err.splitlines()[0].endswith("it is tried again for up to 1 s")


def test_a_hub_that_is_switched_off_is_said_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refusal(InputError, f"{NAME}/in")
