"""Output in a folder of a local or shared file system."""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pyarrow.fs as pafs

from batchspec.data.storage.exact_files import exact_path
from batchspec.data.storage.store import LONGEST_NAME, STALE_S, Tail, storage_errors, storing
from batchspec.errors import ConfigError, OutputError, StorageError
from batchspec.process.local_files import KINDS, open_regular, passes, told, unusable_name

TURNS = 20
"""Number of tries if one run deletes a folder while another one writes a file there."""
NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Errors of a file system that syncs files but no folders, such as some network ones: it writes names as it likes."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EXDEV, errno.EINVAL)
"""Errors with which file systems without hard links refuse one."""

T = TypeVar("T")


@storage_errors
class LocalStore:
    """Folders are made when they are needed; `Store` says what each method promises.

    method  `link`: the file system refuses a name that exists. `rename` replaces a file that appeared in between, which is safe
            only because all runs that publish a name write equivalent files.
    """

    def __init__(self, root: Path, scratch: str, method: str = "link") -> None:
        """Raises ConfigError for a root that no folder can have."""
        self.root, self.method, self._scratch = root, method, scratch
        self.where = str(root)
        self._check_name()
        self._is_new = not os.path.lexists(root)

    def check_root(self) -> None:
        root = self.root.absolute()
        self._check_name(LONGEST_NAME)
        with storing(f"looking for {root}"):
            place = next((path for path in (root, *root.parents) if _is_there(path)), Path(root.anchor))
        try:
            kind = stat.S_IFMT(place.stat().st_mode)
            if kind == stat.S_IFDIR and place != root:
                # The mode does not tell whether a folder can be made here (/proc). In the root itself others would see it.
                os.rmdir(tempfile.mkdtemp(prefix=".batchspec-", dir=place))
            why = "" if kind == stat.S_IFDIR else f"{place} is {KINDS.get(kind, 'no folder')}"
            if not why and not os.access(place, os.W_OK | os.X_OK):
                why = f"{place} cannot be written"
        except OSError as error:
            if passes(error):
                with storing(f"making a folder in {place}"):
                    raise
            link = f"{'it' if place == root else place} is a link to {os.readlink(place)}: " if place.is_symlink() else ""
            why = f"{link}{told(error)}"
        if why and os.path.exists(root / "_batchspec"):
            raise StorageError(f"output.dir {self.root}: {why}; mend that and run the same command again")
        if why:
            raise ConfigError(f"output.dir {self.root} cannot be a folder to write to: {why}; choose another one, or mend that")

    def _check_name(self, below: int = 0) -> None:
        if why := unusable_name(self.root, below):
            raise ConfigError(f"output.dir {self.root} cannot be a folder to write to: {why}; choose another one")

    def check_bucket(self) -> None:
        pass

    def probe(self) -> None:
        path = self._written("probe", b"")
        other = path.with_name(path.name + ".link")
        with storing(f"writing {path}"):
            try:
                self.method = "link" if _link(path, other) else "rename"
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                self.method = "rename"
            finally:
                path.unlink(missing_ok=True)
                other.unlink(missing_ok=True)

    def clean(self) -> None:
        now = self._now()
        with storing(f"cleaning {self.scratch()}"):
            for path in self.scratch().iterdir():
                with suppress(FileNotFoundError):
                    if now - path.stat().st_mtime > STALE_S:
                        path.unlink()

    def discard(self, prefix: str) -> None:
        with storing(f"cleaning {self.scratch()}"):
            for path in self.scratch().iterdir():
                if path.name.startswith(prefix):
                    path.unlink(missing_ok=True)

    def _now(self) -> float:
        """By the file system's own clock."""
        mark = self._written("now", b"")
        with storing(f"looking at {mark}"):
            now = mark.stat().st_mtime
            mark.unlink()
        return now

    def ages_s(self, names: Sequence[str]) -> list[float]:
        return [self._age_s(name, now) for now in ([self._now()] if names else []) for name in names]

    def _age_s(self, name: str, now: float) -> float:
        with storing(f"looking for {self.root / name}"), suppress(FileNotFoundError):
            return now - self._path(name).stat().st_mtime
        return math.inf

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.publish(self._written(name, data), name)

    def put(self, name: str, data: bytes) -> None:
        path = self._written(name, data)
        with storing(f"writing {self.root / name}"):
            self._into(name, lambda target: os.replace(path, target))

    def publish(self, path: Path, name: str) -> bool:
        with storing(f"publishing {self.root / name}"):
            try:
                return self._into(name, lambda target: self._taken(path, target))
            finally:
                path.unlink(missing_ok=True)

    def _taken(self, path: Path, target: Path) -> bool:
        if self.method == "link":
            return _link(path, target)
        won = not target.exists()
        if won:
            os.replace(path, target)
        return won

    def _into(self, name: str, act: Callable[[Path], T]) -> T:
        """Call `act` with the path of a name, after making and syncing its folder. If another run deletes the folder meanwhile,
        try again.
        """
        for turn in itertools.count(1):
            try:
                target = self._path(name, make_parent=True)
                done = act(target)
                break
            except FileNotFoundError:
                if turn == TURNS:
                    raise
        with suppress(FileNotFoundError):
            _sync_folder(target.parent)
        return done

    def version(self, name: str) -> str:
        with storing(f"looking for {self.root / name}"):
            return _version(self._path(name).stat())

    def versions(self, name: str) -> dict[str, str]:
        with storing(f"listing {self.root / name}"):
            found: dict[str, str] = {}
            with suppress(FileNotFoundError), os.scandir(self._path(name)) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # gone since it was listed
                        found[entry.name] = _version(entry.stat(follow_symlinks=False))
            return dict(sorted(found.items()))

    def tail(self, name: str, num_bytes: int) -> Tail | None:
        with storing(f"reading {self.root / name}"), suppress(FileNotFoundError), open_regular(self._path(name)) as file:
            facts = os.fstat(file.fileno())
            file.seek(max(0, facts.st_size - num_bytes))
            return Tail(file.read(), _version(facts))
        return None

    def delete(self, name: str, version: str) -> None:
        with storing(f"deleting {self.root / name}"), suppress(FileNotFoundError):
            path = self._path(name)
            if _version(path.stat()) == version:
                path.unlink()

    def replace(self, path: Path, name: str, version: str) -> bool:
        with storing(f"replacing {self.root / name}"):
            try:
                target, same = self._path(name), self.version(name) == version
                if same:
                    os.replace(path, target)
                    _sync_folder(target.parent)
                return same
            finally:
                path.unlink(missing_ok=True)

    def probe_replace(self) -> None:
        pass

    def read(self, name: str) -> bytes:
        with storing(f"reading {self.root / name}"), open_regular(self._path(name)) as file:
            return file.read()

    def list(self, name: str) -> list[str]:
        with storing(f"listing {self.root / name}"), suppress(FileNotFoundError):
            return sorted(os.listdir(self._path(name)))
        return []

    def exists(self, name: str) -> bool:
        with storing(f"looking for {self.root / name}"), suppress(FileNotFoundError, NotADirectoryError):
            self._path(name).stat()
            return True
        return False

    def delete_tree(self, name: str) -> None:
        with storing(f"deleting {self.root / name}"), suppress(FileNotFoundError):
            for turn in itertools.count(1):
                try:
                    return shutil.rmtree(self._path(name))
                except OSError as error:  # another run that does not know of the deletion yet put a file there
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or turn == TURNS:
                        raise

    def delete_empty_folders(self) -> None:
        folders = [folder for folder, _, _ in os.walk(self.root, topdown=False)]  # the root is the last
        for folder in folders if self._is_new else folders[:-1]:
            with suppress(OSError):  # it holds a file, perhaps a new one of another run
                os.rmdir(folder)

    def scratch(self) -> Path:
        with storing(f"making {self.root / self._scratch}"):
            folder = self._path(self._scratch)
            folder.mkdir(parents=True, exist_ok=True)
            return folder

    def arrow_paths(self, names: Sequence[str]) -> tuple[Sequence[str], pafs.FileSystem | None]:
        return [exact_path(self._path(name)) for name in names], None

    def _written(self, name: str, data: bytes) -> Path:
        path = self.scratch() / f"{self._path(name).name}.{uuid.uuid4().hex}"
        with storing(f"writing {path}"):
            try:
                with path.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                path.unlink(missing_ok=True)
                raise
        return path

    def _path(self, name: str, make_parent: bool = False) -> Path:
        """The path of a name. Raises OutputError for a name or a symbolic link that may lead out of the root."""
        path = self.root
        for part in name.split("/") if name else ():
            path = path / part
            if part in ("", ".", "..") or "\0" in part or os.path.islink(path):
                raise OutputError(f"{self.root}/{name}: links and .. are refused; remove the link or take another output.dir")
        if make_parent and not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _sync_folder(path.parent.parent)
        return path


def _is_there(path: Path) -> bool:
    """As os.path.lexists, but raises OSError for a broken disk, which lexists reports as an absent file."""
    try:
        path.lstat()
    except OSError as error:
        if passes(error):
            raise
        return False
    return True


def _version(facts: os.stat_result) -> str:
    return f"{facts.st_ino}.{facts.st_mtime_ns}.{facts.st_size}"


def _link(path: Path, target: Path) -> bool:
    try:
        os.link(path, target)
    except OSError as error:
        # Over NFS an answer can be lost: if the file has a second name, the link was made.
        if path.stat().st_nlink == 2:
            return True
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)
