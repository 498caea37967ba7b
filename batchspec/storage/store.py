"""Where a job's files live. What must happen once happens once here: a name is published whole, and never twice."""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import polars as pl
import pyarrow as pa

from batchspec.errors import StorageError
from batchspec.storage.retry import reason

STALE_S = 24 * 3600
"""A file is written in seconds: a temporary one untouched for this long has no writer any more."""
AT_ONCE = 16
IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR)
"""Something of another's has a name of ours."""

Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tail:
    """The last bytes of a file, and the version that they were read from, in one step."""

    data: bytes
    version: str


class Store(Protocol):
    """Files under one root, by names such as `data/part-00042.parquet`.

    Every method may raise StorageError, and OutputError where the root's bucket is not there.
    """

    method: str
    """How a name is taken; every process that works on one job uses the same."""
    where: str
    """The root, as a user names it."""

    def check_root(self) -> None:
        """Raise ConfigError where the root cannot become a folder to write to, StorageError where a job lies in it and it is
        not to be written now. Leaves nothing behind.
        """

    def check_bucket(self) -> None:
        """Raise OutputError where the root's bucket is not there, which `exists` does not tell from a missing file."""

    def probe(self) -> None:
        """Try what the file system can do and set `method`."""

    def clean(self) -> None:
        """Delete what runs that ended long ago left behind unfinished."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Publish the bytes under a name nobody has taken; False, and nothing changes, where somebody has."""

    def put(self, name: str, data: bytes) -> None:
        """Replace what stands under the name, in one atomic step."""

    def publish(self, path: Path, name: str) -> bool:
        """Publish a finished file made under `scratch()`, as `put_if_absent` does bytes. The file is gone afterwards."""

    def version(self, name: str) -> str:
        """What tells the present file under the name from any other that was or will be there. On S3 the ETag."""

    def versions(self, name: str) -> dict[str, str]:
        """As `list`, each name with its `version`, of a folder any text. On S3 one request lists 1,000 of them."""

    def tail(self, name: str, num_bytes: int) -> Tail | None:
        """The last bytes of a file, all of it where it is shorter; None where there is no such file. On S3 one ranged GET."""

    def delete(self, name: str, version: str) -> None:
        """Delete the file where it is of that version. On S3 a HEAD compares, and a file that comes right after it is deleted."""

    def replace(self, path: Path, name: str, version: str) -> bool:
        """Put a finished file made under `scratch()` in the place of that version, in one atomic step; False where that is gone.

        The file is gone afterwards. On S3 the store compares and replaces at once. Elsewhere two runs may both find the version
        they read, and the later one stays: each attempt of a retry writes an equivalent file.
        """

    def probe_replace(self) -> None:
        """Raise OutputError where `replace` would not keep what it promises."""

    def read(self, name: str) -> bytes:
        """The bytes under the name."""

    def ages_s(self, names: Sequence[str]) -> list[float]:
        """Seconds since each was written, by the store's own clock; infinite for what is gone."""

    def discard(self, prefix: str) -> None:
        """Delete unfinished files of all runs whose names begin so: they can be published no more."""

    def list(self, name: str) -> list[str]:
        """Names of what lies directly in a folder ("" is the root), sorted; none where the folder is not there."""

    def exists(self, name: str) -> bool: ...

    def delete_tree(self, name: str) -> None:
        """Delete a folder and all in it, where it is there."""

    def scratch(self) -> Path:
        """A folder of the local file system from which `publish` takes files."""

    def scan(self, names: Sequence[str]) -> pl.LazyFrame:
        """The rows of Parquet files, in the order of their names."""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Raise an OSError as a StorageError that says what failed and how to go on."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "OSError")
        cure = "move away what stands in its place" if error.errno in IN_THE_WAY else "free space or repair the file system"
        raise StorageError(
            f"{what} failed: {error.strerror or error} ({code}); nothing committed is lost: {cure} and run the same command again"
        ) from error


def storage_errors(store: type[T]) -> type[T]:
    """Decorator of a store's class: an OSError that leaves any of its public methods is a StorageError, by construction.

    A method that has better words for what failed says them itself, by `storing`.
    """
    for name, method in [*vars(store).items()]:
        if not name.startswith("_") and inspect.isfunction(method):
            setattr(store, name, _guarded(method))
    return store


def _guarded(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(self: Store, *args: object, **named: object) -> T:
        names = [f"{self.where}/{name}" for name in args if isinstance(name, str)]
        with storing(f"{method.__name__} in {' '.join(names[:1]) or self.where}"):
            return method(self, *args, **named)

    return call


@contextmanager
def scanning(where: str) -> Iterator[None]:
    """Raise what polars and Arrow say of the files under a root as a StorageError in one line."""
    try:
        yield
    except (pl.exceptions.ComputeError, pa.ArrowException, OSError) as error:
        raise StorageError(f"reading {where} failed: {reason(error)}; run the same command again after the repair") from error


def for_each(store: Store, items: Sequence[Item], act: Callable[[Item], T]) -> Iterator[T]:
    """What `act` gives for each item, in order; on S3 several at a time, because its answers are what such work waits for."""
    if store.method != "put":
        yield from map(act, items)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, len(items), AT_ONCE):  # so that no more than these are in memory
            yield from pool.map(act, items[first : first + AT_ONCE])
