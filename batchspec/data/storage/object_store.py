"""Output as objects of a bucket, common to S3 (s3_store.py) and to Google Cloud Storage and Azure (cloud_store.py).

A name is published by one PUT on the condition that there is no such object; the store refuses it otherwise. If the answer is
lost, the request is sent again and refused: the uuid in the object's metadata tells whether the first PUT was ours. One PUT
carries a whole object, so nothing partial is ever visible.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pyarrow.fs as pafs

from batchspec.console.text import one_line
from batchspec.data.storage.store import LONGEST_NAME, STALE_S, Tail, storage_errors, storing
from batchspec.errors import ConfigError, OneLine, OutputError, StorageError
from batchspec.process.own_process import finalize_here

ABSENT = ""
"""The condition that there is no such object. Any other condition is the version that the object must have."""
NO_VERSION = '"0"'
"""A version that no object has."""
DELETED_AT_ONCE = 8
MOST_KEY_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
T = TypeVar("T")


class RefusedError(OneLine):
    """The condition of a PUT does not hold."""


class InFlightError(Exception):
    """A PUT was refused although there is no such object: another PUT is in flight. It is sent again."""


@dataclass(frozen=True, slots=True)
class Head:
    version: str
    attempt: str
    """The uuid of the PUT that made the object; empty if something else made it."""


@storage_errors
class ObjectStore(ABC):
    """A prefix of a bucket; `Store` says what each method promises. `method` is always `put`."""

    max_put_bytes = 5 << 30
    absent_condition, version_condition = "If-None-Match", "If-Match"
    """Headers with the condition of a PUT, as messages name them."""
    keep_them = "Amazon S3 and MinIO do"

    def __init__(self, where: str, bucket: str, prefix: str) -> None:
        """where  the root as the user wrote it

        Raises ConfigError for a prefix that keys of objects cannot have.
        """
        if why := _unusable(prefix):
            raise ConfigError(f"output.dir={one_line(where)} cannot be a folder of a bucket: {why}; choose another one")
        self.where, self.method = where, "put"
        self._bucket, self._prefix = bucket, prefix
        self._folder: Path | None = None

    # --- what each store implements: one request each, without retries unless said otherwise

    @abstractmethod
    def _send(self, key: str, body: bytes | Path, condition: str | None, attempt: str) -> None:
        """One PUT. Raises RefusedError if the condition does not hold."""

    @abstractmethod
    def _find(self, key: str) -> Head | None: ...

    @abstractmethod
    def _fetch(self, key: str) -> bytes: ...

    @abstractmethod
    def _fetch_tail(self, key: str, num_bytes: int) -> Tail | None: ...

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Delete the object; no error if there is none."""

    @abstractmethod
    def _folder_pages(self, name: str) -> Iterator[dict[str, str]]:
        """Names directly in a folder with their versions (empty for a folder). With retries."""

    @abstractmethod
    def _key_pages(self, name: str) -> Iterator[list[str]]:
        """Keys of all objects below a folder. With retries."""

    @abstractmethod
    def ages_s(self, names: Sequence[str]) -> list[float]: ...

    @abstractmethod
    def _files(self) -> pafs.FileSystem:
        """Arrow's view, for reading; paths begin with the bucket."""

    @abstractmethod
    def _call(self, what: str, act: Callable[[], T]) -> T:
        """Call `act` with retries; raises a StorageError that names the object, or an OutputError that names the bucket."""

    # --- what all of them share

    def check_root(self) -> None:
        if self.exists(""):
            raise OutputError(f"output.dir {self.where} is an object, so it is not a batchspec job; choose another folder")

    def check_bucket(self) -> None:
        self.list("")

    def probe(self) -> None:
        name = f"_batchspec/tmp/probe-{uuid.uuid4().hex}"
        taken = self._create(name, b"", ABSENT)
        taken_twice = self._create(name, b"", ABSENT)
        self._delete(self._key(name))
        if not taken or taken_twice:
            raise OutputError(
                f"output.dir {self.where}: this store ignores {self.absent_condition} on PUT, without which two runs could "
                f"overwrite each other's shards; use a store that honours it ({self.keep_them}) or a local folder"
            )

    def probe_replace(self) -> None:
        name = f"_batchspec/tmp/probe-{uuid.uuid4().hex}"
        self._create(name, b"", ABSENT)
        replaced = self._create(name, b"other", NO_VERSION)
        self._delete(self._key(name))
        if replaced:
            raise OutputError(
                f"output.dir {self.where}: this store ignores {self.version_condition} on PUT, without which a retry could undo "
                f"another one's shards; use a store that honours it ({self.keep_them}), or copy the job to a local folder"
            )

    def clean(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{_scratch_prefix()}*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > STALE_S:
                    shutil.rmtree(folder)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._create(name, data, ABSENT)

    def put(self, name: str, data: bytes) -> None:
        key = self._key(name)
        self._call(f"writing {self._uri(name)}", lambda: self._send(key, data, None, ""))

    def publish(self, path: Path, name: str) -> bool:
        return self._publish(path, name, ABSENT)

    def replace(self, path: Path, name: str, version: str) -> bool:
        return self._publish(path, name, version)

    def version(self, name: str) -> str:
        found = self._head(name)
        return "" if found is None else found.version

    def versions(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for page in self._folder_pages(name):
            found |= page
        found.pop("", None)  # some tools make an empty object for a folder
        return dict(sorted(found.items()))

    def tail(self, name: str, num_bytes: int) -> Tail | None:
        key = self._key(name)
        return self._call(f"reading {self._uri(name)}", lambda: self._fetch_tail(key, num_bytes))

    def delete(self, name: str, version: str) -> None:
        if self.version(name) == version:
            self._delete(self._key(name))

    def read(self, name: str) -> bytes:
        key = self._key(name)
        return self._call(f"reading {self._uri(name)}", lambda: self._fetch(key))

    def discard(self, prefix: str) -> None:  # noqa: B027
        """Nothing to do: a run's unfinished files are on its own machine."""

    def list(self, name: str) -> list[str]:
        return [*self.versions(name)]

    def exists(self, name: str) -> bool:
        return self._head(name) is not None

    def delete_empty_folders(self) -> None:
        return None  # there are none

    def delete_tree(self, name: str) -> None:
        # One by one, because not every store can delete many with one request; several at once, because there may be thousands.
        with ThreadPoolExecutor(DELETED_AT_ONCE) as pool:
            for keys in self._key_pages(name):
                for _ in pool.map(self._delete, keys):
                    pass

    def scratch(self) -> Path:
        if self._folder is None:
            with storing(f"making a folder in {tempfile.gettempdir()}"):
                self._folder = Path(tempfile.mkdtemp(prefix=_scratch_prefix()))
            finalize_here(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def arrow_paths(self, names: Sequence[str]) -> tuple[Sequence[str], pafs.FileSystem | None]:
        return [f"{self._bucket}/{self._key(name)}" for name in names], self._arrow

    @cached_property
    def _arrow(self) -> pafs.FileSystem:
        return self._files()

    def _publish(self, path: Path, name: str, condition: str) -> bool:
        try:
            with storing(f"reading {path}"):
                size = path.stat().st_size
                if size > self.max_put_bytes:
                    raise StorageError(
                        f"publishing {self._uri(name)} failed: {size:,} bytes, and the store takes {self.max_put_bytes:,} in one "
                        "PUT; start anew with a smaller output.shard_rows"
                    )
            return self._create(name, path, condition)
        finally:
            path.unlink(missing_ok=True)

    def _create(self, name: str, data: bytes | Path, condition: str) -> bool:
        """PUT under a condition; False if the condition does not hold."""
        key, attempt = self._key(name), uuid.uuid4().hex

        def act() -> bool:
            try:
                self._send(key, data, condition, attempt)
            except RefusedError:
                found = self._find(key)
                if found is None and condition == ABSENT:
                    raise InFlightError("refused, though there is no such object") from None
                return found is not None and found.attempt == attempt  # an answer to us may have got lost
            return True

        return self._call(f"publishing {self._uri(name)}", act)

    def _head(self, name: str) -> Head | None:
        key = self._key(name)
        return self._call(f"looking for {self._uri(name)}", lambda: self._find(key))

    def _delete(self, key: str) -> None:
        self._call(f"deleting {self.where}{key.removeprefix(self._prefix)}", lambda: self._remove(key))

    def _key(self, name: str) -> str:
        if name and _unusable(name):
            raise OutputError(f"{self.where}/{name}: empty names and .. are refused; take another output.dir")
        return f"{self._prefix}/{name}" if name else self._prefix

    def _uri(self, name: str) -> str:
        return f"{self.where}/{name}" if name else self.where


def _unusable(name: str) -> str:
    """Why this cannot be a part of keys that every store and every reader takes as they are; empty if it can."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "a part of it is empty, . or .."
    if _CONTROL.search(name):
        return "it has a control character"
    if (size := len(name.encode("utf-8", "replace"))) + LONGEST_NAME > MOST_KEY_BYTES:
        return f"it has {size:,} bytes, and the limit is {MOST_KEY_BYTES - LONGEST_NAME}"
    return ""


def _scratch_prefix() -> str:
    return f"batchspec-{os.getuid()}-"
