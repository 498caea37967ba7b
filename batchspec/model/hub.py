"""model.path or draft.path -> the files of a model: a folder on this machine, or a repository of the hub, weights unfetched."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from batchspec.config.values import SHIPPED, shipped
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.files import LocalFiles, ModelFiles, weight_names
from batchspec.model.packaged import NAME, smollm2_folder

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL = ["*.json", "*.jinja"]
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]


def find_model(path: str, revision: str | None = None, *, key: str = "model.path") -> ModelFiles:
    """The files that `path` names: a local folder, the name `smollm2-135m`, `pkg://NAME` of a head that batchspec ships, or a
    Hugging Face hub id, of which everything but the weights is downloaded once.

    `revision` is a branch, tag or commit of a hub id, `key` the configuration's name of `path`. Raises CheckpointError, in one
    line, where there is no such model or it cannot be reached, and ConfigError for a revision of something that has none.
    """
    if path.startswith(SHIPPED):
        return LocalFiles(_shipped(path, key))
    local = Path(path).expanduser()
    if path == NAME or local.exists():
        if revision is not None:
            raise ConfigError(f"model.revision={revision} goes with a hub id, and model.path={path} is none; remove it")
        if path == NAME:
            return LocalFiles(smollm2_folder())
        if not local.is_dir():
            raise CheckpointError(f"{key}={path} is a file; give the model's folder")
        return LocalFiles(local)
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        raise CheckpointError(f"{key}={path}: no such folder; give a model folder, a hub id (owner/name) or {NAME}")
    return _on_hub(path, revision, key)


def resolve_model(path: str, revision: str | None = None, *, key: str = "model.path") -> Path:
    """The folder of `find_model`, with the weights in it."""
    files = find_model(path, revision, key=key)
    files.fetch()
    return files.folder


@dataclass(frozen=True, slots=True)
class HubFiles:
    """A repository of the hub at one commit; `folder` is its place in the hub's cache."""

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
        if (self.folder / name).is_file():
            return LocalFiles(self.folder).read(name, start, end)
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            http_backoff,
        )

        url = hf_hub_url(self.hub_id, name, revision=self.commit)
        with _hub_errors(self.hub_id, self.commit, self.key):
            # identity: a part of a packed file would be none of the file's bytes
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            response = http_backoff("GET", url, headers=headers, timeout=30)
            hf_raise_for_status(response)
            size = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status_code != 206 or not size.isdigit():
                raise OSError("it does not give parts of files")
            return bytes(response.content), int(size)

    def fetch(self) -> None:
        from huggingface_hub import snapshot_download

        names = list(weight_names(self))
        with _hub_errors(self.hub_id, self.commit, self.key):
            snapshot_download(self.hub_id, revision=self.commit, allow_patterns=names)


def _shipped(path: str, key: str) -> Path:
    name, found = path.removeprefix(SHIPPED), shipped("heads")
    if name not in found:
        names = ", ".join(SHIPPED + each for each in found)
        raise CheckpointError(f"{key}={path} is not shipped with batchspec; shipped: {names}")
    return found[name]


def _on_hub(hub_id: str, revision: str | None, key: str) -> ModelFiles:
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(hub_id, revision, key):
        # By branch or tag, so that the cache knows later, offline, which commit that was.
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=_SMALL, ignore_patterns=_OTHER_FORMATS))
        try:
            names = HfApi().list_repo_files(hub_id, revision=folder.name)
        except Exception:  # requests' and httpx's have no base of their own
            if not any(folder.glob("*.safetensors")):
                raise
            return LocalFiles(folder)  # offline, from the cache
    return HubFiles(hub_id, folder, key, tuple(names))


@contextmanager
def _hub_errors(hub_id: str, revision: str | None, key: str) -> Iterator[None]:
    """What the hub and its client say, as a CheckpointError in one line."""
    from huggingface_hub import errors

    try:
        yield
        return
    except CheckpointError:
        raise
    except errors.GatedRepoError:
        said = "the hub asks for access: accept its terms on its page and log in (hf auth login, or HF_TOKEN)"
    except errors.RevisionNotFoundError:
        said = f"the hub has no revision {revision!r} of it; correct model.revision"
    except errors.RepositoryNotFoundError:
        said = "neither a folder here nor a hub model that you may read; correct it, or log in (hf auth login, or HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        said = "no such folder, and the hub cannot be reached; check the network, or give a local folder"
    except Exception as error:  # requests' and httpx's have no base of their own
        said = f"the hub does not give it ({_first_line(error)}); try again, or give a local folder"
    raise CheckpointError(f"{key}={hub_id}: {said}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
