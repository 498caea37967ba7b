"""The interface of an output store (`Store`), which publishes a name whole and at most once, and what all stores share."""

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

import pyarrow.fs as pafs

from batchspec.errors import OutputError, StorageError
from batchspec.process.local_files import told

STALE_S = 24 * 3600
"""A temporary file that was not written to for this long is abandoned: writing one takes seconds."""
LONGEST_NAME = 255
"""Bytes of the longest name that a store is given, with room to spare."""
TMP = "_batchspec/tmp"
"""The folder of an output folder in which a local store makes its files."""
AT_ONCE = 16
CURES = {
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR), "move away what is in its place"),
    **dict.fromkeys((errno.EINVAL, errno.ENOSYS, errno.ENOTSUP), "repair the file system, or use one that can do it"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EFBIG: "raise the limit of the size of a file (ulimit -f)",
}
"""What to do by error number."""

Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tail:
    """The last bytes of a file, and the version that they were read from, in one step."""

    data: bytes
    version: str


class Store(Protocol):
    """Files under one root, by names such as `data/part-00042.parquet`.

    Every method may raise StorageError, and OutputError if the root's bucket does not exist.
    """

    method: str
    """How a name is published: link, rename or put. The same in every process of a job."""
    where: str
    """The root, as the user wrote it."""

    def check_root(self) -> None:
        """Raise ConfigError if the root cannot become a folder to write to, StorageError if it holds a job and cannot be written
        now. Leaves nothing in it.
        """

    def check_bucket(self) -> None:
        """Raise OutputError if the root's bucket does not exist; for `exists` that is the same as a missing file."""

    def probe(self) -> None:
        """Find out what the file system supports and set `method`."""

    def clean(self) -> None:
        """Delete unfinished files of runs that ended long ago."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Publish the bytes under a free name; False, and nothing changes, if the name is taken."""

    def put(self, name: str, data: bytes) -> None:
        """Write the bytes under the name, replacing what is there, in one atomic step."""

    def publish(self, path: Path, name: str) -> bool:
        """Publish a finished file made under `scratch()`, as `put_if_absent` does bytes. The file is gone afterwards."""

    def version(self, name: str) -> str:
        """Identifies the present file of this name: no earlier or later one has the same version. On S3 the ETag."""

    def versions(self, name: str) -> dict[str, str]:
        """As `list`, each name with its `version` (any text for a folder). On S3 one request lists 1,000."""

    def tail(self, name: str, num_bytes: int) -> Tail | None:
        """The last bytes of a file, or the whole of a shorter one; None if there is no such file. On S3 one ranged GET."""

    def delete(self, name: str, version: str) -> None:
        """Delete the file if it has this version. On S3 a HEAD compares: a file published right after the HEAD is deleted too."""

    def replace(self, path: Path, name: str, version: str) -> bool:
        """Replace that version by a finished file made under `scratch()`, in one atomic step; False if the version is gone.

        The file is gone afterwards. S3 compares and replaces in one step. On other stores two runs may both find the version that
        they read; then the later file stays, which is equivalent, as all runs of a retry write equivalent files.
        """

    def probe_replace(self) -> None:
        """Raise OutputError if this store cannot keep the promise of `replace`."""

    def read(self, name: str) -> bytes:
        """The bytes under the name."""

    def ages_s(self, names: Sequence[str]) -> list[float]:
        """Seconds since each file was written, by the store's own clock; infinite for a missing one."""

    def discard(self, prefix: str) -> None:
        """Delete all runs' unfinished files with this prefix, so that they can no longer be published."""

    def list(self, name: str) -> list[str]:
        """Names directly in a folder ("" is the root), sorted; none if there is no such folder."""

    def exists(self, name: str) -> bool: ...

    def delete_tree(self, name: str) -> None:
        """Delete a folder with everything in it; no error if there is none."""

    def delete_empty_folders(self) -> None:
        """Delete the folders that hold no file; the root only if it did not exist when the store was opened. A folder that
        can't be deleted stays: it harms nothing."""

    def scratch(self) -> Path:
        """A folder of the local file system from which `publish` takes files."""

    def arrow_paths(self, names: Sequence[str]) -> tuple[Sequence[str], pafs.FileSystem | None]:
        """Paths of files for Arrow, and the Arrow file system that has them; None: the local one."""


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Within this block, raise an OSError as a StorageError that says what failed and what to do; a name that is too long, which
    no repair mends, as an OutputError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise OutputError(f"{what} failed: a name is too long for the file system; choose a shorter one") from error
        cure = CURES.get(error.errno or 0, "free space or repair the file system")
        raise StorageError(
            f"{what} failed: {told(error)}; nothing committed is lost: {cure} and run the same command again"
        ) from error


def storage_errors(store: type[T]) -> type[T]:
    """Decorator of a store's class: its public methods raise StorageError instead of OSError.

    A method with a better message uses `storing` itself.
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


def for_each(store: Store, items: Sequence[Item], act: Callable[[Item], T]) -> Iterator[T]:
    """The results of `act` for each item, in order; on S3 several at a time, because such work waits for answers."""
    if store.method != "put":
        yield from map(act, items)
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, len(items), AT_ONCE):  # bounds the memory
            yield from pool.map(act, items[first : first + AT_ONCE])
