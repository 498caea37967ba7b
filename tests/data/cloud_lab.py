"""Emulators of Google Cloud Storage and Azure Blob Storage on this machine's loopback.

gcs     a small server in this process: the part of Cloud Storage's XML API that obstore uses, with its preconditions
        (https://cloud.google.com/storage/docs/xml-api/reference-headers).
azure   Azurite (npm install azurite), where `azurite-blob` is on PATH
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

BUCKET = "lab"
TOKEN = "canary-bearer-token"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's well-known one, no secret."""
PAGE = 100
Fault = Callable[[str, str], tuple[int, str] | None]
"""Method and path of a request -> status and code to answer with."""


@dataclass
class Object:
    data: bytes
    generation: int
    metadata: dict[str, str]
    written: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


@dataclass
class Faults:
    before: Fault = lambda method, path: None
    after: Fault = lambda method, path: None
    """When the request has been done: its own answer is lost."""
    ignore_conditions: bool = False
    requests: list[str] = field(default_factory=list)


class Gcs(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), GcsHandler)
        self.objects: dict[str, Object] = {}
        self.faults = Faults()
        self.lock = threading.Lock()
        self.generation = 1000

    def handle_error(self, *_: Any) -> None:
        """A client that ends a connection is no news."""


class GcsHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its headers would wait for the client's delayed acknowledgement
    server: Gcs

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url, faults = urlsplit(self.path), self.server.faults
        path = unquote(url.path)
        faults.requests.append(f"{self.command} {path}")
        wrong = faults.before(self.command, path)
        if wrong is None:
            bucket, _, key = path.lstrip("/").partition("/")
            with self.server.lock:
                answer = self._answer(bucket, key, {name: item[0] for name, item in parse_qs(url.query).items()}, body)
            wrong = faults.after(self.command, path)
            if wrong is None:
                return self._send(*answer)
        status, code = wrong
        self._send(status, {}, f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode())

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            return _error(401, "AuthenticationRequired")
        if bucket != BUCKET:
            return _error(404, "NoSuchBucket")
        if not key:
            return 200, {"Content-Type": "application/xml"}, self._page(query)
        found = self.server.objects.get(key)
        if self.command == "PUT":
            return self._put(key, found, body)
        if found is None:
            return _error(404, "NoSuchKey")
        if self.command == "DELETE":
            del self.server.objects[key]
            return 204, {}, b""
        wanted = self.headers.get("If-Match")
        if wanted and wanted != found.etag:
            return _error(412, "PreconditionFailed")
        return self._get(found)

    def _put(self, key: str, found: Object | None, body: bytes) -> tuple[int, dict[str, str], bytes]:
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and not self.server.faults.ignore_conditions and int(wanted) != (found.generation if found else 0):
            return _error(412, "PreconditionFailed")
        self.server.generation += 1
        metadata = {name: value for name, value in self.headers.items() if name.lower().startswith("x-goog-meta-")}
        made = self.server.objects[key] = Object(body, self.server.generation, metadata, time.time())
        return 200, {"ETag": made.etag, "x-goog-generation": str(made.generation)}, b""

    def _get(self, found: Object) -> tuple[int, dict[str, str], bytes]:
        headers = found.metadata | {
            "ETag": found.etag, "x-goog-generation": str(found.generation),
            "Last-Modified": formatdate(found.written, usegmt=True),
        }
        status, data = 200, found.data
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(data)) if last else len(data)
            if start >= len(data):
                return _error(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, data = 206, data[start:stop]
        return status, headers | {"Content-Length": str(len(data))}, data

    def _page(self, query: dict[str, str]) -> bytes:
        prefix, delimiter, after = (query.get(name, "") for name in ("prefix", "delimiter", "continuation-token"))
        items: dict[str, str] = {}
        for key, found in sorted(self.server.objects.items()):
            inner, folder, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
            if not key.startswith(prefix):
                continue
            if folder:
                name = f"{prefix}{inner}/"
                items[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                continue
            written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.written))
            items[key] = (
                f"<Contents><Key>{escape(key)}</Key><LastModified>{written}</LastModified><ETag>{found.etag}</ETag>"
                f"<Size>{len(found.data)}</Size></Contents>"
            )
        names = [name for name in items if name > after]
        more = f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>" if len(names) > PAGE else ""
        listed = "".join(items[name] for name in names[:PAGE])
        return f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{listed}{more}</ListBucketResult>".encode()


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@dataclass
class CloudLab:
    """What both emulators are to a test. `faults` is of gcs alone."""

    cloud: str
    port: int
    faults: Faults
    _gcs: Gcs | None

    @property
    def root(self) -> str:
        return f"gs://{BUCKET}" if self.cloud == "gs" else f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net"

    def environ(self, port: int | None = None) -> dict[str, str]:
        place = f"http://127.0.0.1:{port or self.port}"
        if self.cloud == "gs":
            return {"GOOGLE_BASE_URL": place, "GOOGLE_BEARER_TOKEN": TOKEN}
        return {"AZURE_STORAGE_ENDPOINT": f"{place}/{ACCOUNT}", "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}

    def keys(self, prefix: str = "") -> list[str]:
        held = self._gcs.objects if self._gcs is not None else (str(item["path"]) for item in self.client().list().collect())
        return sorted(key for key in held if key.startswith(prefix))

    def put(self, key: str, data: bytes) -> None:
        self.client().put(key, data, use_multipart=False)

    def body(self, key: str) -> bytes:
        return bytes(self.client().get(key).bytes())

    def empty(self) -> None:
        for key in self.keys():
            self.client().delete(key)

    def client(self) -> Any:
        """Past any proxy."""
        from obstore.store import AzureStore, GCSStore

        place, options = f"http://127.0.0.1:{self.port}", {"allow_http": True}
        if self.cloud == "gs":
            config: Any = {"base_url": place, "bearer_token": TOKEN}
            return GCSStore(BUCKET, config=config, client_options=options)  # type: ignore[arg-type]
        config = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY, "endpoint": f"{place}/{ACCOUNT}"}
        return AzureStore(BUCKET, config=config, client_options=options)  # type: ignore[arg-type]


@contextmanager
def running_gcs() -> Iterator[CloudLab]:
    pytest.importorskip("obstore", reason="gs:// and az:// need obstore: pip install obstore")
    server = Gcs()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield CloudLab("gs", server.server_port, server.faults, server)
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def running_azure(folder: Path) -> Iterator[CloudLab]:
    """Azurite with one empty container. Skips the test where it is not installed."""
    pytest.importorskip("obstore", reason="gs:// and az:// need obstore: pip install obstore")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("the Azure emulator is not here: npm install azurite, and its node_modules/.bin on PATH")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck"]
    process = subprocess.Popen(
        [program, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)], cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        _make_container(port)
        yield CloudLab("az", port, Faults(), None)
    finally:
        process.terminate()
        process.wait()


def _make_container(port: int) -> None:
    """obstore makes none. Signed as https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key says."""
    date, version = formatdate(usegmt=True), "2023-11-03"
    text = "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")).decode()
    headers = {
        "x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0",
    }
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/{BUCKET}?restype=container"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
