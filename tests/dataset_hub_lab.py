"""The part of the Hugging Face hub that a dataset is read through, as a server of this process (HF_ENDPOINT)."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "org/name"
TOKEN = "hf_canarytoken"


class Hub(ThreadingHTTPServer):
    """revisions  name -> commit; commits -> files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.revisions: dict[str, str] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str], int | None] = lambda path: None

    def handle_error(self, *_: Any) -> None:
        """A client that ends a connection is no news."""

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        sha = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = files
        self.revisions[revision] = self.revisions[sha] = sha
        return sha


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(unquote(path))
        status = self.server.fault(path)
        if status is not None:
            return self._send(status, b"injected")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "datasets"]:
            return self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        if parts[0] == "datasets" and parts[3] == "resolve":
            return self._file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        self._send(404, b"")

    def _info(self, repo: str, revision: str) -> None:
        if repo != REPO:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in self.server.revisions:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        sha = self.server.revisions[revision]
        files = self.server.commits[sha].items()
        siblings = [{"rfilename": n, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()} for n, data in files]
        told = {"id": repo, "sha": sha, "siblings": siblings, "private": False, "tags": [], "downloads": 0, "likes": 0}
        self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        data = self.server.commits.get(self.server.revisions.get(revision, ""), {}).get(name)
        if repo != REPO or data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if "gzip" in self.headers.get("Accept-Encoding", ""):  # as the hub may do with text
            return self._send(200, gzip.compress(data), {"Content-Encoding": "gzip"})
        asked = self.headers.get("Range")
        if asked is None:
            return self._send(200, data)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1]
        self._send(206, piece, {"Content-Range": f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
