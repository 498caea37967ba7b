"""The files that input.path names: files, folders and globs, local or remote."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from glob import escape, has_magic
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from batchspec.data.dataset.dataset_folders import DataFiles, data_files, splits_of
from batchspec.data.dataset.files import reading
from batchspec.data.dataset.formats import IMAGES, KNOWN, format_of
from batchspec.data.dataset.hub_splits import files_of_split, one_split
from batchspec.data.storage.local_tree import is_hidden
from batchspec.data.storage.places import LocalPlace, Place, RemotePlace, matches, place_of
from batchspec.errors import ConfigError, InputError

CARD_BYTES = 1 << 20
"""Bytes of a dataset's card that are read: its YAML comes first."""
_HUB_ID = re.compile(r"[\w.-]+/[\w-]+")
"""ORG/NAME, which may also be a local path that does not exist."""


def find_files(entries: list[Any], config_name: str | None = None, split: str | None = None) -> dict[str, Place]:
    """Relative name -> place of every data file that the entries of input.path name, sorted by name.

    config_name, split  for entries that are whole datasets of the hub; None: the only one
    Raises ConfigError if these are given for another entry, InputError if an entry does not exist or has no data files, if
    entries are on different file systems, or if a file is named twice.
    """
    found: list[Place] = []
    roots: list[str] = []
    ranks: dict[PurePath, int] = {}
    for entry in entries:
        root, data = _files_of(str(entry), config_name, split)
        found += data.files
        ranks |= data.ranks
        roots.append(str(root))
    kinds = sorted({str(entry).partition("://")[0] if "://" in str(entry) else "local" for entry in entries})
    if len(kinds) > 1:
        raise InputError(f"input.path names files on {' and on '.join(kinds)}; name those of one file system, or run two jobs")
    shared = os.path.commonpath(roots) if len(set(map(_first_part, roots))) == 1 else ""
    names = {place.path.relative_to(shared).as_posix(): place for place in found}
    for name in names:
        if not _is_text(name):
            raise InputError(f"input.path: the name of {name!r} is not valid Unicode; rename the file, in UTF-8")
    if len(names) < len(found):
        paths = [place.path for place in found]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InputError(f"input.path names {twice} twice; name each file once")
    _check_links(found)
    return _ordered(names, ranks)


def _ordered(names: Mapping[str, Place], ranks: Mapping[PurePath, int]) -> dict[str, Place]:
    """The files in order of name; those of one folder that have ranks come together, in order of rank."""
    firsts: dict[PurePath, str] = {}
    for name, place in sorted(names.items()):
        if place.path in ranks:
            firsts.setdefault(place.path.parent, name)

    def order(name: str) -> tuple[str, int]:
        path = names[name].path
        return (firsts[path.parent], ranks[path]) if path in ranks else (name, 0)

    return {name: names[name] for name in sorted(names, key=order)}


def _check_links(places: Sequence[Place]) -> None:
    """Raises InputError if links lead to one file under two names: its rows would be read twice."""
    if not any(isinstance(place, LocalPlace) and place.linked for place in places):
        return
    names: dict[str, PurePath] = {}
    for place in sorted(places, key=lambda place: place.path):
        first = names.setdefault(os.path.realpath(place.path), place.path)
        if first != place.path:
            raise InputError(f"input.path names one file twice, as {first} and as {place.path}; remove the link")


def entries_of(path: Any) -> list[Any]:
    """The entries of input.path: one, or a list of them."""
    return [path] if isinstance(path, str | os.PathLike) else list(path or ())


def check_exist(path: Any) -> None:
    """Raises InputError if a local entry of input.path does not exist: as `find_files`, without looking into any folder."""
    for entry in map(str, entries_of(path)):
        if "://" not in entry and not has_magic(entry):
            with reading(f"input.path {entry}"):
                place = place_of(entry)
                if not place.is_file() and not place.is_dir():
                    raise _missing(place, entry)


def check_apart(
    entries: Sequence[Any], name: str, *, key: str = "output.dir", file: Sequence[str] = ("data", "part-00000.parquet")
) -> None:
    """Raises ConfigError if an entry of input.path includes a file that the job writes: its next run would read it too.

    name, key  where the job writes, and the key that says so
    file       what it writes below that name
    """
    written = (*_parts(name), *file)
    for entry in map(str, entries):
        named = _parts(entry)
        below = written[len(named) :] if written[: len(named)] == named else None
        if below is None and has_magic(entry):
            fixed = next(i for i, part in enumerate(named) if has_magic(part))
            # A part that is the name of a folder may stand for that folder alone.
            pattern = [escape(part) if part in written else part for part in named]
            below = written[fixed:] if matches(written, pattern) else None
        if below is not None and not any(map(is_hidden, below)):
            raise ConfigError(
                f"{key}={name} lies in input.path={entry}, so that the next run would read the output as input; "
                "choose another place, or name the input's files"
            )


def check_not_into(job: str, output_dir: str) -> None:
    """Raises ConfigError if output.dir is the folder of the job that is the input (input.from_job), or lies in it."""
    read, written = (_parts(path if "://" in path else os.path.realpath(os.path.expanduser(path))) for path in (job, output_dir))
    if written[: len(read)] == read:
        raise ConfigError(f"output.dir={output_dir} lies in input.from_job={job}, whose files must stay; choose another place")


def _parts(path: str) -> tuple[str, ...]:
    """The parts of a path: of a local path from the root on, of a remote one from its scheme on."""
    scheme, mark, rest = path.partition("://")
    return (f"{scheme}://", *PurePosixPath(rest).parts) if mark else Path(os.path.abspath(os.path.expanduser(path))).parts


def _files_of(entry: str, config_name: str | None, split: str | None) -> tuple[PurePath, DataFiles]:
    """The folder that the names of an entry's data files are relative to, and these files, at least one. Raises as
    `find_files`."""
    with reading(f"input.path {entry}"):
        return _found(place_of(entry), entry, config_name, split)


def _found(place: Place, entry: str, config_name: str | None, split: str | None) -> tuple[PurePath, DataFiles]:
    is_file = place.is_file()
    is_folder = not is_file and place.is_dir()
    if is_folder and config_name is None and (splits := splits_of(place)):
        chosen = one_split({name: name for name in splits}, split, f"input.path {entry}")
        return _found(place.at(place.path / chosen), entry, None, None)
    whole = isinstance(place, RemotePlace) and place.is_hub_dataset
    if not whole and (config_name, split) != (None, None):
        key = "input.split" if config_name is None else "input.config_name"
        raise ConfigError(
            f"{key}={split if config_name is None else config_name} is for a whole dataset of the hub, "
            f"hf://datasets/ORG/NAME[@REVISION]{', or for the folder of a DatasetDict' if config_name is None else ''}, and "
            f"input.path {entry} is not one; remove the key, or write the dataset's name without a path after it"
        )
    if is_file:
        if format_of(place.path) is None:
            raise _no_data(entry, "the file's name is not that of a data file", [place])
        return place.path.parent, DataFiles([place])
    if is_folder:
        root, data = place.path, data_files(place, place.files(), entry)
        if whole and data.files:
            assert isinstance(place, RemotePlace)
            data = DataFiles(_of_split(place, data.files, config_name, split), data.ranks)
    elif has_magic(entry):
        above, matching = place.glob()
        root, data = above.path, data_files(above, matching, entry)
    else:
        place.check_bucket()
        raise _missing(place, entry)
    if not data.files:
        place.check_bucket()
        raise _no_data(entry, "no data file there", place.files() if is_folder else place.glob()[1])
    return root, data


def _no_data(entry: str, problem: str, places: Iterable[Place]) -> InputError:
    """places: what the entry names instead of data files."""
    advice = f"names end in one of {KNOWN}"
    if any(place.path.suffix.lower() in IMAGES for place in places):
        advice = (
            "images are no rows: let input.path be a table (Parquet, JSON lines, CSV) with a column of their names, which "
            "input.columns.images names, and input.image_root their folder"
        )
    return InputError(f"input.path {entry}: {problem}; {advice}")


def _missing(place: Place, entry: str) -> InputError:
    if isinstance(place, LocalPlace) and os.path.lexists(place.path):
        return InputError(f"input.path {entry}: cannot be read: {place.problem}; check the path")
    return InputError(f"input.path {entry}: does not exist; check the path{_hint_of(place, entry)}")


def _hint_of(place: Place, entry: str) -> str:
    """The end of the message about an entry that does not exist."""
    if not isinstance(place, LocalPlace):
        return " and the bucket"
    hub = f"; a dataset of the hub is hf://datasets/{entry}" if _HUB_ID.fullmatch(entry) else ""
    return f" (the working folder is {Path.cwd()}){hub}"


def _of_split(dataset: RemotePlace, files: Sequence[Place], config_name: str | None, split: str | None) -> list[Place]:
    named = {place.path.relative_to(dataset.path).as_posix(): place for place in files}
    card = (dataset.read("README.md", CARD_BYTES) or b"").decode("utf-8", "replace")
    return [named[name] for name in files_of_split(list(named), card, config_name, split, f"input.path {dataset}")]


def _is_text(name: str) -> bool:
    """Whether a file's name is valid UTF-8: Python represents other bytes as lone surrogates, which cannot be encoded."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_part(path: str) -> str:
    """`/` for an absolute path, the bucket for a path on S3."""
    return PurePosixPath(path).parts[0]
