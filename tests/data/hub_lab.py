"""A Hugging Face hub on this machine, for HF_ENDPOINT: models, a dataset, and a record of what was asked and given."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.helpers.forked import run_python

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""Of every model."""
REPO = "org/name"
"""The dataset."""
TOKEN = "hf_canarytoken"

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
from batchspec.job.prepare import open_job
from batchspec.config.typed import from_dict
for name, values in json.loads(sys.argv[1]).items():
    try:
        open_job(from_dict(values))
        said = "not refused"
    except BatchspecError as error:
        said = str(error)
    print("CALLED " + json.dumps([name, said]))
"""


class Hub(ThreadingHTTPServer):
    """Models are the folders owner/name under `root`; all have one commit, and main is it. There is one dataset, REPO.

    given      (file, first byte, number of bytes) of each answer with content of a model, in order
    revisions  of the dataset: name -> commit
    commits    commit -> files
    requests   paths that were asked for
    fault      of a path: the status to answer with instead
    """

    daemon_threads = True

    def __init__(self, root: Path | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.given: list[tuple[str, int, int]] = []
        self.revisions: dict[str, str] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str], int | None] = lambda path: None

    @property
    def folder(self) -> Path:
        """What the hub holds, OWNER/NAME/FILE; of a hub that was given a folder."""
        assert self.root is not None
        return self.root

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """A client that ends a connection is no news."""

    def commit(self, files: dict[str, bytes], revision: str = "main") -> str:
        """A commit of the dataset, which `revision` names from now on."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = files
        self.revisions[revision] = self.revisions[sha] = sha
        return sha

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
        done = run_python(["-c", script, json.dumps(given)], env={**os.environ, **known, **env})
        found = [json.loads(line.removeprefix("CALLED ")) for line in done.stdout.splitlines() if line.startswith("CALLED ")]
        assert len(found) == len(given), done.stderr
        return found


@contextmanager
def running_hub(root: Path | None = None) -> Iterator[Hub]:
    """With the models under `root`, and a dataset as soon as something is committed."""
    hub = Hub(root)
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its headers would wait for the client's delayed acknowledgement

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(path)
        status = self.server.fault(path)
        if status is not None:
            return self._send(status, b"injected")
        if asked := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._dataset(asked[1], asked[2] or "main")
        if asked := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._dataset_file(*asked.groups())
        return self._model(path)

    # The dataset

    def _dataset(self, repo: str, revision: str) -> None:
        if repo != REPO:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in self.server.revisions:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        sha = self.server.revisions[revision]
        files = self.server.commits[sha].items()
        siblings = [{"rfilename": n, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()} for n, data in files]
        return self._send(200, _info(repo, sha, siblings))

    def _dataset_file(self, repo: str, revision: str, name: str) -> None:
        data = self.server.commits.get(self.server.revisions.get(revision, ""), {}).get(name)
        if repo != REPO or data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if "gzip" in self.headers.get("Accept-Encoding", ""):  # as the hub may do with text
            return self._send(200, gzip.compress(data), {"Content-Encoding": "gzip"})
        return self._send(*self._part(data))

    # Models

    def _model(self, path: str) -> None:
        asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(?P<revision>[^/]+)|/tree/(?P<tree>[^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        found = asked or file
        folder = self.server.root / found[1] if found and self.server.root is not None else None
        if folder is None or not folder.is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if asked:
            names = sorted(str(place.relative_to(folder)) for place in folder.rglob("*") if place.is_file())
            if asked["tree"]:
                return self._send(200, json.dumps([_entry(folder, name) for name in names]).encode())
            if asked["revision"] not in (None, "main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return self._send(200, _info(asked[1], COMMIT, [{"rfilename": name} for name in names]))
        assert file is not None
        if not (folder / file[2]).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = (folder / file[2]).read_bytes()
        status, part, headers = self._part(content)
        if self.command == "GET":
            start = int(headers["Content-Range"].removeprefix("bytes ").split("-")[0]) if status == 206 else 0
            self.server.given.append((file[2], start, len(part)))
        headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        return self._send(status, part, headers)

    def _part(self, content: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Status, bytes and headers of what the request asks of a file."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return 200, content, {}
        start, end = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
        return 206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _entry(folder: Path, name: str) -> dict[str, object]:
    content = (folder / name).read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _info(hub_id: str, sha: str, siblings: list[dict[str, object]]) -> bytes:
    told = {
        "id": hub_id,
        "modelId": hub_id,
        "sha": sha,
        "private": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "siblings": siblings,
    }
    return json.dumps(told).encode()
