"""model.path or draft.path -> a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.packaged import NAME, smollm2_folder
from batchspec.values import SHIPPED, shipped

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*"]


def resolve_model(path: str, revision: str | None = None, *, key: str = "model.path") -> Path:
    """The folder that `path` names: a local one, the name `smollm2-135m`, `pkg://NAME` of a head that batchspec ships, or a
    Hugging Face hub id (downloaded once).

    `revision` is a branch, tag or commit of a hub id, `key` the configuration's name of `path`. Raises CheckpointError, in one
    line, where there is no such model or it cannot be reached, and ConfigError for a revision of something that has none.
    """
    if path.startswith(SHIPPED):
        return _shipped(path, key)
    local = Path(path).expanduser()
    if path == NAME or local.exists():
        if revision is not None:
            raise ConfigError(f"model.revision={revision} goes with a hub id, and model.path={path} is none; remove it")
        if path == NAME:
            return smollm2_folder()
        if not local.is_dir():
            raise CheckpointError(f"{key}={path} is a file; give the model's folder")
        return local
    if not _HUB_ID.fullmatch(path) or path.startswith("."):
        raise CheckpointError(f"{key}={path}: no such folder; give a model folder, a hub id (owner/name) or {NAME}")
    return _download(path, revision, key)


def _shipped(path: str, key: str) -> Path:
    name, found = path.removeprefix(SHIPPED), shipped("heads")
    if name not in found:
        names = ", ".join(SHIPPED + each for each in found)
        raise CheckpointError(f"{key}={path} is not shipped with batchspec; shipped: {names}")
    return found[name]


def _download(hub_id: str, revision: str | None, key: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(str(snapshot_download(hub_id, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_OTHER_FORMATS)))
    except errors.GatedRepoError:
        said = "the hub asks for access: accept its terms on its page and log in (hf auth login, or HF_TOKEN)"
    except errors.RevisionNotFoundError:
        said = f"the hub has no revision {revision!r} of it; correct model.revision"
    except errors.RepositoryNotFoundError:
        said = "neither a folder here nor a hub model that you may read; correct it, or log in (hf auth login, or HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        said = "no such folder, and the hub cannot be reached; check the network, or give a local folder"
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        said = f"the hub does not give it ({_first_line(error)}); try again, or give a local folder"
    raise CheckpointError(f"{key}={hub_id}: {said}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
