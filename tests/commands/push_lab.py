"""A Hugging Face hub on this machine that takes datasets, for HF_ENDPOINT: repositories, contents (git LFS) and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_pushcanary"
CUT, CUT_AFTER, SILENT = -1, -2, -3
"""Faults: the connection ends before the request has an effect, or after it; no answer comes."""


@dataclass
class Dataset:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    num_commits: int = 0

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode(), usedforsecurity=False).hexdigest()


class PushHub(ThreadingHTTPServer):
    """
    blobs     contents that came up, by sha256
    requests  method and path of each request, in order
    fault     of a method and a path: None, or the status to answer with, CUT or CUT_AFTER
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.datasets: dict[str, Dataset] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.ended = threading.Event()
        self.fault: Callable[[str, str], int | None] = lambda method, path: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that ends a connection is no news."""

    def num(self, method: str, part: str) -> int:
        """Requests of this method whose path holds this part."""
        return sum(one.startswith(f"{method} ") and part in one for one in self.requests)


@contextmanager
def running_push_hub() -> Iterator[PushHub]:
    hub = PushHub()
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.ended.set()
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PushHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        body = self._body()
        fault = self.server.fault(self.command, path)
        if fault == SILENT:
            self.server.ended.wait()
        if fault in (CUT, SILENT):
            return self._cut()
        if fault not in (None, CUT_AFTER):
            return self._send(int(fault or 0), b"injected")
        if not path.startswith("/upload/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"{}")
        status, content, headers = self._act(path, body)
        return self._cut() if fault == CUT_AFTER else self._send(status, content, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _act(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, b'{"errors": [], "warnings": []}', {}
        if asked := re.fullmatch(r"/upload/(\w{64})", path):
            assert hashlib.sha256(body).hexdigest() == asked[1]
            self.server.blobs[asked[1]] = body
            return 200, b"", {}
        asked = re.match(r"(?:/api)?/datasets/([^/]+/[^/]+?)(?:\.git|/|$)", path)
        dataset = self.server.datasets.get(asked[1]) if asked else None
        if asked is None or dataset is None:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if path.endswith("/preupload/main"):
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".parquet") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return 200, json.dumps({"files": modes}).encode(), {}
        if path.endswith("/info/lfs/objects/batch"):
            return (
                200,
                json.dumps({"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]}).encode(),
                {},
            )
        if path.endswith("/commit/main"):
            return self._commit(asked[1], dataset, body)
        if file := re.search(r"/resolve/[^/]+/(.+)", path):
            return 200, dataset.files[file[1]], {}
        return 200, json.dumps(_info(asked[1], dataset)).encode(), {}

    def _create(self, asked: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        repo = f"{asked['organization']}/{asked['name']}"
        told = json.dumps({"url": f"{self.server.url}/datasets/{repo}", "name": repo, "id": repo}).encode()
        if repo in self.server.datasets:
            return 409, told, {}
        private = asked.get("private") or asked.get("visibility") == "private"
        self.server.datasets[repo] = Dataset(bool(private), {".gitattributes": b"*.parquet filter=lfs\n"})
        return 200, told, {}

    def _object(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.server.blobs:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.server.url}/upload/{one['oid']}"}}}

    def _commit(self, repo: str, dataset: Dataset, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        files = dict(dataset.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    if value.get("parentCommit") != dataset.sha:
                        return 412, b'{"error": "A commit has happened since. Please refresh and try again."}', {}
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.blobs[value["oid"]]
                case "deletedFile":
                    if files.pop(value["path"], None) is None:
                        return 404, b'{"error": "A file with this name does not exist"}', {"X-Error-Code": "EntryNotFound"}
        dataset.files, dataset.num_commits = files, dataset.num_commits + 1
        told = {"commitUrl": f"{self.server.url}/datasets/{repo}/commit/{dataset.sha}", "commitOid": dataset.sha, "success": True}
        return 200, json.dumps(told).encode(), {}

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _info(repo: str, dataset: Dataset) -> dict[str, Any]:
    return {
        "id": repo,
        "sha": dataset.sha,
        "private": dataset.private,
        "siblings": [_entry(*file) for file in dataset.files.items()],
    }


def _mode(name: str) -> str:
    return "lfs" if name.endswith(".parquet") else "regular"


def _entry(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    sha256 = hashlib.sha256(content).hexdigest()
    lfs = {"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 130}} if _mode(name) == "lfs" else {}
    return {"rfilename": name, "size": len(content), "blobId": blob, **lfs}
