"""The files and folders that input.path names, local or remote (remote_files.py, cloud_files.py, hub_files.py)."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar

from batchspec.data.storage.cloud_client import SCHEMES
from batchspec.data.storage.cloud_files import cloud_files
from batchspec.data.storage.hub_files import HubFiles, hub_files
from batchspec.data.storage.local_tree import ANY_DEPTH, files_below, files_matching
from batchspec.data.storage.remote_files import READ, Kind, RemoteFiles, Stamp, arrow_files, s3_files
from batchspec.data.storage.retry import retried
from batchspec.data.storage.s3_client import GONE, NO_BUCKET
from batchspec.errors import ConfigError, InputError, StorageError
from batchspec.process.local_files import check_regular, open_regular, passes

T = TypeVar("T")


class Place(Protocol):
    """A file or a folder."""

    @property
    def path(self) -> PurePosixPath | Path:
        """Within its file system."""

    def is_file(self) -> bool: ...

    def is_dir(self) -> bool: ...

    @property
    def problem(self) -> str:
        """Why a place that was found by `files` or `glob` cannot be read as a file; empty if it can."""

    def files(self) -> Iterator[Place]:
        """Every file below a folder, and what else is there but folders. On this machine raises as `local_tree.files_below`."""

    def glob(self) -> tuple[Place, Iterator[Place]]:
        """The folder above the first wildcard, and what matches; `**` stands for any number of folders. The name of a folder with
        which a pattern begins stands for that folder, whatever wildcards are in it. Raises as `files`.
        """

    def at(self, path: PurePath) -> Place:
        """Another file or folder of its file system."""

    def check_bucket(self) -> None:
        """Raise InputError if its bucket does not exist."""

    def stamp(self) -> Stamp:
        """Identifies the file's present content without reading it. Raises InputError if the file is gone; StorageError."""

    def open(self) -> BinaryIO:
        """Open for reading; unbuffered if remote."""


def place_of(entry: str) -> Place:
    """The place that an entry of input.path names. Raises ConfigError for a file system that cannot be set up."""
    scheme, mark, rest = entry.partition("://")
    if not mark:
        return LocalPlace(Path(os.path.abspath(os.path.expanduser(entry))))
    if scheme == "s3":
        path = PurePosixPath(rest)
        if not path.parts:
            raise ConfigError(f"input.path {entry} must be s3://BUCKET/...; name a bucket")
        return RemotePlace(s3_files(path.parts[0]), path)
    if scheme in ("http", "https"):
        raise ConfigError(
            f"input.path {scheme}://...: web addresses are not read; download the file, or give {READ} "
            "(a dataset of the Hugging Face hub is hf://datasets/ORG/NAME)"
        )
    files, inner = (cloud_files if scheme in SCHEMES else hub_files if scheme == "hf" else arrow_files)(entry)
    return RemotePlace(files, PurePosixPath(inner))


@dataclass(frozen=True, slots=True)
class LocalPlace:
    path: Path
    linked: bool = False
    """Whether it was found through a link, and may have been found under another name too."""

    def __str__(self) -> str:
        return str(self.path)

    def is_file(self) -> bool:
        return self.path.is_file()

    def is_dir(self) -> bool:
        return self.path.is_dir()

    @property
    def problem(self) -> str:
        try:
            check_regular(self.path)
        except OSError as error:
            if passes(error):
                raise
            return error.strerror or str(error)
        return ""

    def files(self) -> Iterator[LocalPlace]:
        return (LocalPlace(found.path, found.linked) for found in files_below(self.path))

    def glob(self) -> tuple[LocalPlace, Iterator[LocalPlace]]:
        root, matching = files_matching(self.path)
        return LocalPlace(root), (LocalPlace(found.path, found.linked) for found in matching)

    def at(self, path: PurePath) -> LocalPlace:
        return LocalPlace(Path(path))

    def check_bucket(self) -> None:
        pass

    def stamp(self) -> Stamp:
        try:
            with open_regular(self.path) as file:  # over NFS `stat` may be a minute old, but not for an open file
                facts = os.fstat(file.fileno())
        except FileNotFoundError as error:
            raise InputError(GONE.format(name=self.path)) from error
        return Stamp(facts.st_size, str(facts.st_mtime_ns))

    def open(self) -> BinaryIO:
        return open_regular(self.path)


@dataclass(frozen=True, slots=True)
class RemotePlace:
    remote: RemoteFiles
    path: PurePosixPath
    known_size: int | None = None
    """Its size according to the listing; None if it was not listed."""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.remote.scheme}://{str(self.path).lstrip('/')}"

    def is_file(self) -> bool:
        return self.kind() == "file"

    def is_dir(self) -> bool:
        return self.kind() == "folder"

    def files(self) -> Iterator[RemotePlace]:
        found = self.retried("listing", lambda: self.remote.walk(str(self.path)))
        return (self._at(PurePosixPath(entry.path), entry.size_bytes, _odd_key(entry.path)) for entry in found)

    def glob(self) -> tuple[RemotePlace, Iterator[RemotePlace]]:
        above, *pattern = self._at(PurePosixPath(self.path.parts[0])), *self.path.parts[1:]
        while pattern and (not has_magic(pattern[0]) or self._at(above.path / pattern[0]).is_dir()):
            above = self._at(above.path / pattern.pop(0))
        return above, above._matching(pattern) if above.is_dir() else iter(())

    def _matching(self, pattern: Sequence[str]) -> Iterator[RemotePlace]:
        """What matches below this folder; without `**` also folders, each once."""
        folders, depth = set[PurePosixPath](), len(pattern)
        for file in self.files():
            parts = file.path.relative_to(self.path).parts
            if matches(parts, pattern):
                yield file
            elif len(parts) > depth and ANY_DEPTH not in pattern and matches(parts[:depth], pattern):
                folder = self.path.joinpath(*parts[:depth])
                if folder not in folders:
                    folders.add(folder)
                    yield self._at(folder, problem="a folder, not a file")

    def at(self, path: PurePath) -> RemotePlace:
        return self._at(PurePosixPath(path))

    def check_bucket(self) -> None:
        with suppress(StorageError):  # access to objects is possible without access to the bucket
            if not self.retried("looking for", lambda: self.remote.check_bucket(str(self.path))):
                raise InputError(NO_BUCKET.format(where=f"input.path {self}", bucket=self.path.parts[0]))

    def stamp(self) -> Stamp:
        return self.retried("looking for", lambda: self.remote.stamp(str(self.path)))

    def open(self) -> BinaryIO:
        return RemoteFile(self, self.stamp().size_bytes if self.known_size is None else self.known_size)  # type: ignore[return-value]

    @property
    def is_hub_dataset(self) -> bool:
        """Whether it is a whole dataset of the Hugging Face hub."""
        return isinstance(self.remote, HubFiles) and str(self.path) == self.remote.root

    def read(self, name: str, most: int) -> bytes | None:
        """At most the first `most` bytes of a file of this folder; None if there is none of that name."""
        place = self._at(self.path / name)
        if not place.is_file():
            return None
        with io.BufferedReader(RemoteFile(place, place.stamp().size_bytes)) as file:
            return file.read(most)

    def _at(self, path: PurePosixPath, size: int | None = None, problem: str = "") -> RemotePlace:
        return RemotePlace(self.remote, path, size, problem)

    def kind(self) -> Kind:
        return self.retried("looking for", lambda: self.remote.kind(str(self.path)))

    def retried(self, doing: str, act: Callable[[], T]) -> T:
        """Call `act` with retries. Raises InputError if the file is gone, StorageError for other errors."""
        remote, what = self.remote, f"{doing} {self}"
        try:
            return retried(what, act, remote.passing(), remote.explain, notice_s=0.0 if remote.scheme == "hf" else None)
        except FileNotFoundError as error:
            raise InputError(GONE.format(name=self)) from error
        except remote.errors as error:
            raise StorageError(f"{what} failed: {remote.explain(error)}, and run the same command again") from error


class RemoteFile(io.RawIOBase):
    """A remote file whose reads are retried; each read is one request for just those bytes."""

    def __init__(self, place: RemotePlace, size: int) -> None:
        super().__init__()
        self._place, self._at, self._size = place, 0, size
        self._file = place.retried("opening", self._opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._at))
        if size:
            buffer[:size] = self._place.retried("reading", lambda: self._read(size))
            self._at += size
        return size

    def close(self) -> None:
        self._file.close()
        super().close()

    def _opened(self) -> Any:
        file = self._place.remote.open(str(self._place.path))
        found = file.size()
        if found == 0 < self._size:  # to Arrow, an answer that was cut within its headers is a file of 0 bytes
            raise OSError(f"it has 0 bytes, and {self._size:,} were expected; was it changed?")
        if found != self._size:
            raise InputError(f"{self._place} changed: {self._size:,} bytes -> {found:,}; run again when it changes no more")
        return file

    def _read(self, size: int) -> bytes:
        data: bytes = self._file.read_at(size, self._at)
        if len(data) < size:
            raise OSError(f"{len(data)} of {size} bytes came at {self._at}")
        return data


def _odd_key(key: str) -> str:
    """Why a key that a listing gave is not the path of a file; empty if it is."""
    odd = any(part in ("", ".", "..") for part in key.removeprefix("/").split("/"))
    return f"a part of its key {key} is empty, . or ..; copy it to another key" if odd else ""


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a pattern, part by part; `**` stands for any number of parts."""
    if not pattern:
        return not parts
    if pattern[0] == ANY_DEPTH:
        return any(matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])
