"""The store of an output folder, chosen by the form of its name."""

from __future__ import annotations

from pathlib import Path

from batchspec.data.storage.cloud_client import SCHEMES
from batchspec.data.storage.local_store import LocalStore
from batchspec.data.storage.store import Store
from batchspec.errors import ConfigError


def open_store(root: str | Path, scratch: str) -> Store:
    """The store of an output folder; `scratch` is the folder inside it where a local store makes its files.

    Raises ConfigError for a file system on which a name cannot be taken exactly once.
    """
    scheme, mark, _ = str(root).partition("://")
    if not mark:
        return LocalStore(Path(root), scratch)
    if scheme == "s3":
        from batchspec.data.storage.s3_store import S3Store

        return S3Store(str(root))
    if scheme in SCHEMES:
        from batchspec.data.storage.cloud_store import CloudStore

        return CloudStore(str(root))
    raise ConfigError(
        f"output.dir {scheme}://...: output goes to a local folder, s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or "
        "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER; name one"
    )
