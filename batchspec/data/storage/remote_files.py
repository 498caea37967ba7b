"""Remote file systems of the input: their interface (`RemoteFiles`), and those that Arrow supports (s3://, hdfs://)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import pyarrow.fs as pafs

from batchspec.console.text import cut
from batchspec.data.storage.retry import arrow_passing, reason
from batchspec.data.storage.s3_client import filesystem, head
from batchspec.errors import ConfigError

READ = "a local path, s3://BUCKET/..., gs://BUCKET/..., abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/... or hf://datasets/..."
Kind = Literal["file", "folder", "missing"]
REASON_CHARS = 150
"""Maximum length of a library's reason in a message, so that the advice after it is whole."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies the contents of a file without reading it: a replaced or rewritten file has another stamp."""

    size_bytes: int
    mark: str
    """The ETag on object stores, the id of the contents on the Hugging Face hub, elsewhere the mtime in ns."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    path: str
    size_bytes: int


class Opened(Protocol):
    """A file that is open for reading."""

    def size(self) -> int: ...

    def read_at(self, size: int, offset: int) -> bytes: ...

    def close(self) -> None: ...


class RemoteFiles(Protocol):
    """One remote file system; paths begin with the bucket or the repository. It does not retry: places.py does.

    Every method may raise FileNotFoundError, InputError, and one of `errors`.
    """

    scheme: str
    errors: tuple[type[Exception], ...]

    def kind(self, path: str) -> Kind: ...

    def stamp(self, path: str) -> Stamp: ...

    def walk(self, path: str) -> Sequence[RemoteEntry]:
        """Every file below a folder."""

    def open(self, path: str) -> Opened: ...

    def check_bucket(self, path: str) -> bool:
        """Whether the bucket of a path exists; True if that is unknown."""

    def passing(self) -> Callable[[Exception], bool]:
        """A function that tells whether an error may be temporary, for the tries of one request."""

    def explain(self, error: Exception) -> str:
        """In one line without credentials: what is wrong, and what to check."""


class ArrowFiles:
    """A file system that Arrow supports."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, scheme: str, files: pafs.FileSystem) -> None:
        self.scheme, self._files = scheme, files

    def kind(self, path: str) -> Kind:
        found = self._files.get_file_info(path).type
        return "file" if found == pafs.FileType.File else "folder" if found == pafs.FileType.Directory else "missing"

    def stamp(self, path: str) -> Stamp:
        if self.scheme == "s3":
            bucket, _, key = path.partition("/")
            return Stamp(*head(bucket, key))
        info = self._files.get_file_info(path)
        return Stamp(int(info.size or 0), str(info.mtime_ns))

    def walk(self, path: str) -> Sequence[RemoteEntry]:
        found = self._files.get_file_info(pafs.FileSelector(path, recursive=True))
        return [RemoteEntry(info.path, info.size) for info in found if info.type == pafs.FileType.File]

    def open(self, path: str) -> Opened:
        opened: Opened = self._files.open_input_file(path)
        return opened

    def check_bucket(self, path: str) -> bool:
        return self.scheme != "s3" or self.kind(path.partition("/")[0]) != "missing"

    def passing(self) -> Callable[[Exception], bool]:
        return arrow_passing

    def explain(self, error: Exception) -> str:
        if self.scheme != "s3":
            return f"{reason(error)}; check the path"
        said = cut(reason(error), REASON_CHARS)
        return f"{said}; check the credentials (AWS_PROFILE, ...), the bucket's policy, the network and AWS_ENDPOINT_URL"


def s3_files(bucket: str) -> RemoteFiles:
    return ArrowFiles("s3", filesystem(bucket))


def arrow_files(entry: str) -> tuple[RemoteFiles, str]:
    """The file system of a URL, and the path in it. Raises ConfigError if Arrow does not know it."""
    scheme = entry.partition("://")[0]
    try:
        found, inner = pafs.FileSystem.from_uri(entry)
    except (ValueError, OSError, NotImplementedError) as error:
        raise ConfigError(f"input.path {scheme}://...: {reason(error)}; give {READ}") from error
    return ArrowFiles(scheme, found), inner
