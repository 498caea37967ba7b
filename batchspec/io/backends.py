"""The store of an output folder, by what its name says."""

from __future__ import annotations

from pathlib import Path

from batchspec.errors import ConfigError
from batchspec.io.local import LocalStore
from batchspec.io.store import Store


def open_store(root: str | Path, scratch: str) -> Store:
    """The store of an output folder; `scratch` is the folder inside it where a local store makes its files.

    Raises ConfigError for a file system on which a name cannot be taken exactly once.
    """
    scheme, mark, _ = str(root).partition("://")
    if not mark:
        return LocalStore(Path(root), scratch)
    if scheme != "s3":
        raise ConfigError(f"output.dir {scheme}://...: output goes to a local folder or to s3://BUCKET/FOLDER; name one")
    from batchspec.io.s3 import S3Store

    return S3Store(str(root))
