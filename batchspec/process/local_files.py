"""Files of this machine that others named: only regular ones are opened, because to open a pipe waits for its writer and to read
a device may never end; and names that no file can have.

Every file of a model, an input or a job is opened here (tests/house/test_file_rules.py); errors are OSErrors whose `strerror`
says what is in the file's place. `fault_of` tells a broken disk from a wrong file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from batchspec.errors import BatchspecError, StorageError

KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
PASSING = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
"""Errors of a disk or network that is full, broken or out of reach: after the repair the same command succeeds."""


def open_regular(path: Path | str, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else, and never waits."""
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(handle).st_mode, path)  # in case it was replaced since
        return open(handle, "rb", buffering=buffering)
    except OSError:
        os.close(handle)
        raise


def check_regular(path: Path | str) -> None:
    """Raise OSError unless the path leads to a regular file. For libraries that open a file by its path."""
    _check(mode_of(path), path)


def mode_of(path: Path | str) -> int:
    """`st_mode` of what the path leads to. Raises OSError, which names a link to nothing."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError as error:
        if not os.path.islink(path):
            raise
        raise FileNotFoundError(errno.ENOENT, f"a link to {os.readlink(path)}, which is not there", str(path)) from error


def is_given(path: Path | str) -> bool:
    """Whether a file has this name; False if nothing has. Raises OSError if it is no regular file, such as a link to a file that
    is not there: to go on without it would be to read something else than was given.
    """
    if not _is_there(path):
        return False
    check_regular(path)
    return True


def is_folder(path: Path | str) -> bool:
    """As `is_given`, for a folder."""
    if not _is_there(path):
        return False
    kind = stat.S_IFMT(mode_of(path))
    if kind != stat.S_IFDIR:
        raise NotADirectoryError(errno.ENOTDIR, f"{KINDS.get(kind, 'something else')}, not a folder", str(path))
    return True


def told(error: OSError) -> str:
    """What failed, with the name of its code, as in `Input/output error (EIO)`."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'OSError')})"


def passes(error: BaseException) -> bool:
    """Whether the error is one of PASSING: it says nothing about the file, and the run ends with 74 instead of a refusal."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in PASSING
    code = re.search(r"\(os error (\d+)\)", str(error))  # so libraries in Rust end their messages, whose errors have no errno
    return code is not None and int(code[1]) in PASSING


def fault_of(error: BaseException, what: str, refusal: BatchspecError) -> BatchspecError:
    """What to raise for an error of reading or writing `what`: a StorageError if it passes, else the refusal."""
    if not passes(error):
        return refusal
    reason = told(error) if isinstance(error, OSError) else " ".join(str(error).split())
    return StorageError(f"{what}: reading or writing failed: {reason}; run the same command again after the repair")


def unusable_name(path: Path | str, below: int = 0) -> str:
    """Why nothing can be made at this path: it is too long, or no text. Empty if it fits.

    below  bytes of the longest path that will be made below it
    """
    if "\0" in str(path) or any("\ud800" <= character <= "\udfff" for character in str(path)):
        return "it is not valid Unicode, or holds a NUL"
    whole = Path(os.path.abspath(path))
    there = next((place for place in (whole, *whole.parents) if os.path.exists(place)), whole.anchor)
    longest = max(map(os.fsencode, whole.parts), key=len)
    if len(longest) > (limit := _limit(there, "PC_NAME_MAX", 255)):
        return f"a name in it has {len(longest):,} bytes, and the file system takes {limit:,}"
    if len(os.fsencode(whole)) + below > (limit := _limit(there, "PC_PATH_MAX", 4096) - 1):
        return f"it has {len(os.fsencode(whole)):,} bytes, and the file system takes {limit - below:,}"
    return ""


def _limit(place: Path | str, name: str, usual: int) -> int:
    try:
        return os.pathconf(place, name)
    except OSError:  # the file system does not tell
        return usual


def _is_there(path: Path | str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a NUL in it
        return False
    return True


def _check(mode: int, path: Path | str) -> None:
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        code = errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL
        raise OSError(code, f"{KINDS.get(kind, 'something else')}, not a file", str(path))
