"""The files of a folder of this machine, or of a pattern. Links are followed, and nothing is left out without a word: a folder
that cannot be listed, a link to nothing and one that leads in a circle raise OSError, which names it.

Hidden names are left out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from stat import S_ISDIR

from batchspec.process.local_files import mode_of

ANY_DEPTH = "**"
"""A part of a pattern that stands for any number of folders."""


def is_hidden(name: str) -> bool:
    """Whether a file or a folder of this name is no data: it begins with a dot or an underscore, as in Arrow's datasets. A
    folder `_key=value` is a Hive partition, as to Spark.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


@dataclass(frozen=True, slots=True)
class Found:
    """A file, or whatever else is no folder; by a pattern without `**` also a folder."""

    path: Path
    linked: bool
    """Whether a link led to it: it may have been found under another name too."""


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    linked: bool
    above: frozenset[tuple[int, int]]
    """Device and inode of this folder and of those that it was found in."""

    def inner(self, name: str) -> _Folder:
        """Raises OSError for a folder that this one lies in."""
        path = self.path / name
        facts = path.stat()
        own = (facts.st_dev, facts.st_ino)
        if own in self.above:
            raise OSError(errno.ELOOP, "a link to a folder that it lies in", str(path))
        return _Folder(path, self.linked or path.is_symlink(), self.above | {own})

    def found(self, name: str) -> Found:
        path = self.path / name
        return Found(path, self.linked or path.is_symlink())

    def entries(self, pattern: str = "*") -> list[tuple[str, bool]]:
        """Names that match, in order, and whether each is a folder's."""
        if not has_magic(pattern):
            path = self.path / pattern
            there = os.path.lexists(path) and not is_hidden(pattern)
            return [(pattern, S_ISDIR(mode_of(path)))] if there else []
        with os.scandir(self.path) as entries:
            chosen = [each for each in entries if fnmatchcase(each.name, pattern) and not is_hidden(each.name)]
        return sorted((each.name, S_ISDIR(mode_of(each.path)) if each.is_symlink() else each.is_dir()) for each in chosen)


def files_below(path: Path) -> Iterator[Found]:
    """Every file of a folder and of the folders in it."""
    return _below(_opened(path))


def files_matching(path: Path) -> tuple[Path, Iterator[Found]]:
    """The folder above the first wildcard of a pattern, and what matches.

    The name of a folder, such as run[1], stands for that folder and for no others, if it is what the pattern begins with.
    """
    above, *parts = Path(path.anchor), *path.parts[1:]
    while parts and (not has_magic(parts[0]) or (above / parts[0]).is_dir()):
        above /= parts.pop(0)
    return above, iter(dict.fromkeys(_matching(_opened(above), parts, ANY_DEPTH in parts) if above.is_dir() else ()))


def _opened(path: Path) -> _Folder:
    facts = path.stat()
    return _Folder(path, linked=False, above=frozenset([(facts.st_dev, facts.st_ino)]))


def _below(folder: _Folder) -> Iterator[Found]:
    for name, is_folder in folder.entries():
        if is_folder:
            yield from _below(folder.inner(name))
        else:
            yield folder.found(name)


def _matching(folder: _Folder, parts: Sequence[str], any_depth: bool) -> Iterator[Found]:
    first, rest = parts[0], parts[1:]
    if first == ANY_DEPTH and not rest:
        yield from _below(folder)
    elif first == ANY_DEPTH:
        yield from _matching(folder, rest, any_depth)
        for name, is_folder in folder.entries():
            if is_folder:
                yield from _matching(folder.inner(name), parts, any_depth)
    else:
        for name, is_folder in folder.entries(first):
            if rest and is_folder:
                yield from _matching(folder.inner(name), rest, any_depth)
            elif not rest and not (is_folder and any_depth):
                yield folder.found(name)
