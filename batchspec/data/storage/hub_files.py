"""Input files in a dataset of the Hugging Face hub: hf://datasets/ORG/NAME[@REVISION]/PATH.

The revision is resolved to its commit once, and everything is read from that commit, so the files cannot change during a job.
Endpoint (HF_ENDPOINT) and token (HF_TOKEN, or the one of `hf auth login`) are those that huggingface_hub uses.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from batchspec.data.storage import retry
from batchspec.data.storage.remote_files import Kind, Opened, RemoteEntry, RemoteFiles, Stamp
from batchspec.errors import ConfigError, InputError

FORM = "hf://datasets/ORG/NAME[@REVISION]/PATH"
ENDPOINT = "the endpoint (HF_ENDPOINT where it is set)"
ACCESS = "accept its terms on its page and log in (hf auth login, or HF_TOKEN)"
LOG_IN = "the dataset's name and, for a private or gated one, the log-in (hf auth login, or HF_TOKEN)"
REVISIONS_WITH_SLASH = ("refs/convert/", "refs/pr/")


class HubFiles:
    """The files of one commit of a dataset; paths begin `datasets/ORG/NAME[@REVISION]`."""

    scheme = "hf"

    def __init__(self, root: str, repo: str, revision: str | None) -> None:
        self.root, self._repo, self._revision = root, repo, revision
        self.errors = _errors()
        self.commit = ""
        self.is_private = False
        self._files: dict[str, Stamp] = {}

    def kind(self, path: str) -> Kind:
        self._list()
        name = self._name(path)
        if name in self._files:
            return "file"
        return "folder" if any(each.startswith(f"{name}/" if name else "") for each in self._files) else "missing"

    def stamp(self, path: str) -> Stamp:
        self._list()
        try:
            return self._files[self._name(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def walk(self, path: str) -> Sequence[RemoteEntry]:
        self._list()
        name = self._name(path)
        within = f"{name}/" if name else ""
        found = ((each, stamp) for each, stamp in self._files.items() if each.startswith(within))
        return [RemoteEntry(f"{self.root}/{each}", stamp.size_bytes) for each, stamp in found]

    def open(self, path: str) -> Opened:
        from huggingface_hub import hf_hub_url

        size = self.stamp(path).size_bytes
        url = hf_hub_url(self._repo, self._name(path), repo_type="dataset", revision=self.commit)
        return _HubFile(url, size)

    def check_bucket(self, path: str) -> bool:
        self._list()
        return True

    def passing(self) -> Callable[[Exception], bool]:
        return may_pass

    def explain(self, error: Exception) -> str:
        from huggingface_hub import errors

        what = f"hf://datasets/{self._repo}"
        if isinstance(error, errors.GatedRepoError):
            raise InputError(f"{what}: the hub asks for access: {ACCESS}")
        if isinstance(error, errors.RevisionNotFoundError):
            raise InputError(f"{what}: the hub has no revision {self._revision!r} of it; correct input.path")
        if isinstance(error, errors.RepositoryNotFoundError):
            raise InputError(f"{what}: the hub has no such dataset that you may read; check {LOG_IN}")
        if isinstance(error, errors.OfflineModeIsEnabled):
            raise InputError(f"{what}: HF_HUB_OFFLINE is set; unset it, or give files of this machine")
        if isinstance(error, ValueError):
            raise InputError(f"{what}: no dataset can have that name; input.path must be {FORM}")
        return reason_of(error)

    def _list(self) -> None:
        """Ask for the commit and its files, in one request, at the first question."""
        if self.commit:
            return
        from huggingface_hub import HfApi

        what = f"asking the Hugging Face hub for hf://datasets/{self._repo}"

        def ask() -> Any:
            return HfApi().dataset_info(self._repo, revision=self._revision, files_metadata=True, timeout=retry.REQUEST_S)

        with retry.noticed(what):
            info = retry.retried(what, ask, _is_unresolved, reason_of, limit_s=retry.UNRESOLVED_S, notice_s=0.0)
        self._files = {
            each.rfilename: Stamp(int(each.size or 0), str(each.lfs.sha256 if each.lfs else each.blob_id))
            for each in info.siblings or ()
        }
        self.is_private = bool(info.private)
        self.commit = str(info.sha)

    def _name(self, path: str) -> str:
        return path.removeprefix(self.root).strip("/")


@dataclass(slots=True)
class _HubFile:
    url: str
    num_bytes: int

    def size(self) -> int:
        return self.num_bytes

    def read_at(self, size: int, offset: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        # Ranges count the file's bytes only if the answer is not compressed.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + size - 1}"}
        answer: Any = get_session().get(self.url, headers=headers, timeout=retry.REQUEST_S)
        hf_raise_for_status(answer)
        data: bytes = answer.content
        if answer.status_code == 200:  # a mirror that does not support ranges
            data = data[offset : offset + size]
        if len(data) < size:
            raise OSError(f"{len(data)} of {size} bytes came at {offset}")
        return data

    def close(self) -> None:
        pass


def _errors() -> tuple[type[Exception], ...]:
    """The errors of huggingface_hub and of the HTTP library that it uses (requests, httpx, ...)."""
    from huggingface_hub import errors

    return OSError, ValueError, errors.HfHubHTTPError, *_transport_errors()


def _transport_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    library = sys.modules[type(get_session()).__module__.partition(".")[0]]
    return tuple(found for name in ("HTTPError", "TransportError") if isinstance(found := getattr(library, name, None), type))


def _status(error: Exception) -> int | None:
    number = getattr(getattr(error, "response", None), "status_code", None)
    return number if isinstance(number, int) else None


def reason_of(error: Exception) -> str:
    """What a temporary error says."""
    status = _status(error)
    if status in (401, 403):
        return f"access denied (HTTP status {status}); check {LOG_IN}"
    if status:
        return f"HTTP status {status}; check {ENDPOINT} and the hub's health"
    if _is_unresolved(error):
        return f"the name of its server cannot be resolved; check the network and {ENDPOINT}"
    return f"no complete answer ({type(error).__name__}); check {ENDPOINT} and the network"


def _is_unresolved(error: BaseException | None) -> bool:
    """Whether the name of the server could not be resolved, by the error or one that led to it."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def may_pass(error: Exception) -> bool:
    """Whether an error of huggingface_hub may be temporary."""
    if (status := _status(error)) is not None:
        return status in (408, 429) or status >= 500
    from huggingface_hub import errors

    return isinstance(error, _errors()) and not isinstance(error, FileNotFoundError | ValueError | errors.OfflineModeIsEnabled)


def hub_files(entry: str) -> tuple[RemoteFiles, str]:
    """The dataset of a URL, and the path in it. Raises ConfigError if the URL names no dataset."""
    kind, *parts = entry.partition("://")[2].split("/")
    if kind != "datasets" or len(parts) < 2 or not all(parts[:2]):
        raise ConfigError(f"input.path {entry} must be {FORM}; name a dataset of the hub")
    owner, name, *rest = parts
    name, _, revision = name.partition("@")
    inner = "/".join(rest)
    for long in REVISIONS_WITH_SLASH if revision == "refs" else ():
        if f"{revision}/{inner}".startswith(long) and len(rest) > 1:
            revision, inner = f"{long}{rest[1]}", "/".join(rest[2:])
    root = f"datasets/{owner}/{name}" + (f"@{revision.replace('/', '%2F')}" if revision else "")
    return HubFiles(root, f"{owner}/{name}", unquote(revision) or None), f"{root}/{inner}"
