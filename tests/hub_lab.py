"""A model hub on this machine, for HF_ENDPOINT: what huggingface_hub asks of one, and a record of every byte that it gave."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"

_CALLS = """
import contextlib, io, json, sys
from batchspec import cli
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    print("CALLED " + json.dumps([code, out.getvalue(), err.getvalue()]))
"""

_REFUSED = """
import json, sys
from batchspec.errors import BatchspecError
from batchspec.prepare import open_job
from batchspec.config.typed import from_dict
for name, values in json.loads(sys.argv[1]).items():
    try:
        open_job(from_dict(values))
        said = "not refused"
    except BatchspecError as error:
        said = str(error)
    print("CALLED " + json.dumps([name, said]))
"""


@dataclass
class Hub:
    """Repositories are the folders owner/name under `root`; all have one commit, and main is it."""

    root: Path
    url: str = ""
    given: list[tuple[str, int, int]] = field(default_factory=list)
    """(file, first byte, number of bytes) of each answer with content, in order."""

    def weight_bytes(self) -> list[tuple[str, int, int]]:
        return [item for item in self.given if item[0].endswith((".safetensors", ".bin", ".gguf"))]

    def run(self, home: Path, *calls: Sequence[str], **env: str) -> list[tuple[int, str, str]]:
        """Commands of batchspec in one process that knows this hub alone: exit code, stdout, stderr of each."""
        return [(code, out, err) for code, out, err in self._called(_CALLS, home, calls, env)]

    def refusals(self, home: Path, configs: Mapping[str, object]) -> dict[str, str]:
        """Name -> what open_job says against a configuration, all in one process that knows this hub alone."""
        return dict(self._called(_REFUSED, home, configs, {}))

    def _called(self, script: str, home: Path, given: Any, env: Mapping[str, str]) -> list[Any]:
        known = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", script, json.dumps(given)]
        done = subprocess.run(words, env={**os.environ, **known, **env}, capture_output=True, text=True, timeout=300, check=False)
        found = [json.loads(line.removeprefix("CALLED ")) for line in done.stdout.splitlines() if line.startswith("CALLED ")]
        assert len(found) == len(given), done.stderr
        return found


@contextmanager
def running_hub(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(?P<revision>[^/]+)|/tree/(?P<tree>[^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        found = asked or file
        folder = self.hub.root / found[1] if found else None
        if folder is None or not folder.is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if asked:
            names = sorted(str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file())
            if asked["tree"]:
                return self._send(200, json.dumps([_entry(folder, name) for name in names]).encode())
            if asked["revision"] not in (None, "main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self._send(200, json.dumps(_info(asked[1], names)).encode())
        assert file is not None
        if not (folder / file[2]).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(file[2], (folder / file[2]).read_bytes())

    def _file(self, name: str, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        part, start, code = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")), 0, 200
        if part:
            start, end = int(part[1]), min(int(part[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content, code = content[start:end], 206
        if self.command == "GET":
            self.hub.given.append((name, start, len(content)))
        self._send(code, content, headers)

    def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _entry(folder: Path, name: str) -> dict[str, object]:
    content = (folder / name).read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _info(hub_id: str, names: list[str]) -> dict[str, object]:
    siblings = [{"rfilename": name} for name in names]
    return {"id": hub_id, "modelId": hub_id, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "siblings": siblings}
