"""Resolves model.path and draft.path: a local folder, or a repository of the hub, whose weights are fetched on demand."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchspec.checkpoint.config_values import has_file, has_folder
from batchspec.checkpoint.files import LocalFiles, ModelFiles, weight_names
from batchspec.checkpoint.packaged import NAME, smollm2_folder
from batchspec.config.values import SHIPPED, shipped
from batchspec.errors import BatchspecError, CheckpointError, ConfigError
from batchspec.process.load_progress import steps_of_download
from batchspec.process.local_files import fault_of, passes

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL = ["*.json", "*.jinja"]
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]


def find_model(path: str, revision: str | None = None, *, key: str = "model.path") -> ModelFiles:
    """The files of the model or head at `path`.

    path      a local folder, the name `smollm2-135m`, `pkg://NAME` for a model or head shipped with batchspec, or a Hugging Face
              hub id; of a hub id everything but the weights is downloaded, once
    revision  branch, tag or commit of a hub id
    key       the configuration key of `path`, for messages

    Raises CheckpointError, in one line, if there is no such model or it cannot be reached, and ConfigError if `revision` is given
    for something other than a hub id.
    """
    if any("\ud800" <= character <= "\udfff" for character in path):  # safetensors opens no such file
        raise CheckpointError(f"{key}={path!a} is not valid Unicode; rename the folder, in UTF-8")
    local, is_shipped = Path(os.path.expanduser(path)), path.startswith(SHIPPED)
    if is_shipped or path == NAME or has_folder(local, key):
        if revision is not None:
            raise ConfigError(f"model.revision={revision} needs a hub id, and model.path={path} is not one; remove it")
        if path == NAME:
            return LocalFiles(smollm2_folder())
        return LocalFiles(_shipped(path, key) if is_shipped else local)
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        given = f"a model folder, a hub id (owner/name) or {NAME}" if key == "model.path" else "a folder or a hub id (owner/name)"
        raise CheckpointError(f"{key}={path}: no such folder; give {given}")
    return _on_hub(path, revision, key)


def resolve_model(path: str, revision: str | None = None, *, key: str = "model.path") -> Path:
    """The folder of `find_model`, with the weights downloaded."""
    files = find_model(path, revision, key=key)
    files.fetch()
    return files.folder


@dataclass(frozen=True, slots=True)
class HubFiles:
    """A repository of the hub at one commit; `folder` is its folder in the hub's cache."""

    hub_id: str
    folder: Path
    key: str
    listing: tuple[str, ...]

    @property
    def where(self) -> str:
        return self.hub_id

    @property
    def commit(self) -> str:
        return self.folder.name

    def names(self) -> Collection[str]:
        return self.listing

    def read(self, name: str, start: int, end: int) -> tuple[bytes, int]:
        if has_file(self.folder / name):
            return LocalFiles(self.folder).read(name, start, end)
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        url = hf_hub_url(self.hub_id, name, revision=self.commit)
        with _hub_errors(self.hub_id, self.commit, self.key):
            # identity: a byte range of a compressed response would not be a range of the file
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            response = http_backoff("GET", url, headers=headers, timeout=30)
            hf_raise_for_status(response)
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code != 206 or not size.isdigit():
                raise OSError("it does not support range requests")
            return bytes(response.content), int(size)

    def fetch(self) -> None:
        from huggingface_hub import snapshot_download

        names = list(weight_names(self))
        with _hub_errors(self.hub_id, self.commit, self.key), steps_of_download(_blobs(self.hub_id)):
            snapshot_download(self.hub_id, revision=self.commit, allow_patterns=names)


def _blobs(hub_id: str) -> Path:
    """The folder of the hub's cache to which the files of a repository are downloaded, by this process or another one."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=hub_id, repo_type="model"), "blobs")


def _shipped(path: str, key: str) -> Path:
    name, found = path.removeprefix(SHIPPED), shipped("models") | shipped("heads")
    if name not in found:
        names = ", ".join(SHIPPED + each for each in found)
        raise CheckpointError(f"{key}={path} is not shipped with batchspec; shipped: {names}")
    return found[name]


def _on_hub(hub_id: str, revision: str | None, key: str) -> ModelFiles:
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(hub_id, revision, key):
        # By branch or tag, not by commit: the cache then maps it to its commit when offline later.
        with steps_of_download(_blobs(hub_id)):
            folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=_SMALL, ignore_patterns=_OTHER_FORMATS))
        try:
            names = HfApi().list_repo_files(hub_id, revision=folder.name)
        except Exception:  # errors of requests and httpx have no common base class
            if not any(folder.glob("*.safetensors")):
                raise
            return LocalFiles(folder)  # offline, from the cache
    return HubFiles(hub_id, folder, key, tuple(names))


@contextmanager
def _hub_errors(hub_id: str, revision: str | None, key: str) -> Iterator[None]:
    """Turn errors of the hub and its client into a CheckpointError of one line."""
    from huggingface_hub import errors

    try:
        yield
        return
    except BatchspecError:
        raise
    except errors.GatedRepoError:
        problem = "the hub asks for access: accept its terms on its page and log in (hf auth login, or HF_TOKEN)"
    except errors.RevisionNotFoundError:
        problem = f"the hub has no revision {revision!r} of it; correct model.revision"
    except errors.RepositoryNotFoundError:
        problem = "neither a folder here nor a hub model that you may read; correct it, or log in (hf auth login, or HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        problem = "no such folder, and the hub cannot be reached; check the network, or give a local folder"
    except Exception as error:  # errors of requests and httpx have no common base class
        problem = f"the download from the hub failed ({_first_line(error)}); try again, or give a local folder"
        if passes(error):  # the disk of the hub's cache
            raise fault_of(error, f"{key}={hub_id}", CheckpointError(problem)) from error
    meant = f"; did you mean {NAME}?" if difflib.get_close_matches(hub_id, [NAME], cutoff=0.8) else ""
    raise CheckpointError(f"{key}={hub_id}: {problem}{meant}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
