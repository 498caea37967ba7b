"""The local file that a command writes, checked before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchspec.errors import OutputError
from batchspec.process.local_files import unusable_name


def target_file(name: str, overwrite: bool, suffixes: Sequence[str], form: str) -> Path:
    """The file to write. Raises OutputError if it is not a possible file name, exists already, or has another suffix."""
    if "://" in name:
        raise OutputError(f"{name}: export writes a local file; give a path, and copy the file where you need it")
    target = Path(name)
    if why := unusable_name(target):
        raise OutputError(f"{name!r} cannot be written: {why}; give another name")
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"lies in {target.parent}, which is not a folder"
        raise OutputError(f"{name} {what}; give the name of a file in a folder that exists")
    if target.exists() and not overwrite:
        raise OutputError(f"{name} exists; give another name, or --overwrite to replace it")
    if target.suffix not in suffixes:
        raise OutputError(f"{name}: {form} is written as {' or '.join(suffixes)}; give a file name with such a suffix")
    return target
