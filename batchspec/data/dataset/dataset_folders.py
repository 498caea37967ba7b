"""Which files of a folder are its data: not the metadata that other programs put beside them, and of a folder of `save_to_disk`
the files that its state names, in this order. A table whose log alone says which of its files are current is refused.

Source: `datasets` 5.2, `Dataset.save_to_disk`, `DatasetDict.save_to_disk`; the specifications of Delta Lake, Iceberg and Hudi
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from batchspec.console.text import counted
from batchspec.data.dataset.files import ARROW
from batchspec.data.dataset.formats import format_of, is_pdf
from batchspec.data.storage.local_tree import is_hidden
from batchspec.data.storage.places import Place
from batchspec.errors import InputError

SPLITS, STATE = "dataset_dict.json", "state.json"
METADATA = ("dataset_info.json", "dataset_infos.json", SPLITS, "dataset-metadata.json", "datapackage.json", "croissant.json")
"""Files of `datasets`, the hub, Kaggle, Frictionless Data and Croissant that describe a dataset."""
OUTPUT, OUTPUT_DATA = "_batchspec", "data"
"""In the output folder of a job: what marks it, and the folder of its rows."""
_TABLES = {
    "_delta_log": ("a Delta Lake table", "polars.read_delta(TABLE).write_parquet(FILE)"),
    ".hoodie": ("a Hudi table", "spark.read.format('hudi').load(TABLE).write.parquet(FOLDER)"),
    "metadata": ("an Iceberg table", "polars.scan_iceberg(TABLE).sink_parquet(FILE)"),
}
"""The folder that marks a table -> what it is, and what makes Parquet of its current rows."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataFiles:
    files: Sequence[Place] = ()
    ranks: Mapping[PurePath, int] = field(default_factory=dict)
    """Place in the order of its folder, for a file of `save_to_disk`; others are in order of name."""


def data_files(root: Place, places: Iterator[Place], entry: str) -> DataFiles:
    """The data files among these below `root`; PDFs only if there are no others: else they are papers about the data. `entry` is
    that of input.path. Raises InputError for one that is no file or belongs to a table with a log, and for a folder with several
    splits.
    """
    found, ranks = list[Place](), dict[PurePath, int]()
    for place in places:
        if format_of(place.path) is None or any(map(is_hidden, place.path.relative_to(root.path).parts)):
            continue
        if place.path.name == SPLITS:
            raise InputError(
                f"input.path {entry}: {place.path.parent} has several splits; let input.path end there and choose one with "
                "input.split, or name files of it"
            )
        if place.path.name in METADATA:
            continue
        if place.is_dir():  # of a pattern
            suffix = place.path.suffix
            raise InputError(f"input.path {entry}: {place} is a folder, not a file; name its files with {place}/*{suffix}")
        if why := place.problem:
            raise InputError(f"input.path {entry}: {place} cannot be read: {why}; mend it, or leave it out of input.path")
        found.append(place)
    rows = [place for place in found if not is_pdf(place.path)]
    if rows and len(rows) < len(found):
        kind = counted(len(found) - len(rows), "PDF")
        log.warning("%s", f"{kind} left out: {root} has other data; name them with {root}/*.pdf")
    found = rows or found
    for folder in _folders(root, found):
        _check_no_table(folder)
        if folder.at(folder.path / OUTPUT).is_dir():
            data = folder.path / OUTPUT_DATA
            found = [place for place in found if not _below(place, folder.path) or _below(place, data)]
    for path in sorted({place.path.parent for place in found if place.path.suffix in ARROW}):
        listed = _listed(root.at(path / STATE), entry)
        if listed:
            saved = [path / name for name in listed]
            there = {place.path for place in found}
            if missing := [name for name in saved if name not in there]:
                raise InputError(f"input.path {entry}: {missing[0]} is not there, and {path / STATE} names it; copy it again")
            found = [place for place in found if place.path.parent != path or place.path in saved]
            ranks |= {name: rank for rank, name in enumerate(saved)}
    return DataFiles(found, ranks)


def splits_of(folder: Place) -> list[str]:
    """The splits in a folder of DatasetDict.save_to_disk, which are folders of it; none: it is another folder."""
    named = _read_json(folder.at(folder.path / SPLITS)).get("splits")
    return [str(name) for name in named] if isinstance(named, list) else []


def _listed(state: Place, entry: str) -> list[str]:
    """The names of the data files in a state of `save_to_disk`; none: it is no such state."""
    values = _read_json(state)
    files = values.get("_data_files")
    if values.get("_indices_data_files") or values.get("_indices_files"):
        raise InputError(
            f"input.path {entry}: {state} selects rows of its files by indices, as old versions of `datasets` do; save anew: "
            "datasets.load_from_disk(FOLDER).flatten_indices().save_to_disk(NEW)"
        )
    named = [one.get("filename") if isinstance(one, dict) else None for one in files] if isinstance(files, list) else []
    return [str(name) for name in named if name is not None]


def _read_json(place: Place) -> dict[str, Any]:
    """An object; empty if the file is not there or holds something else."""
    if not place.is_file():
        return {}
    with io.BufferedReader(place.open()) as file:  # type: ignore[type-var]
        try:
            values = json.load(file)
        except ValueError:
            return {}
    return values if isinstance(values, dict) else {}


def _folders(root: Place, found: Sequence[Place]) -> Iterator[Place]:
    """The folders that may be the table to which these files belong: those between the root and the files, and those above a root
    that is a folder of a partition or of Iceberg's data. The folder of a partition is no table itself.
    """
    paths = {folder for place in found for folder in place.path.parents if _is_below(folder, root.path)}
    above = root.path
    while found and ("=" in above.name or above.name == "data"):
        above = above.parent
        paths.add(above)
    return (root.at(path) for path in sorted(paths) if "=" not in path.name)


def _check_no_table(folder: Place) -> None:
    for mark, (what, convert) in _TABLES.items():
        log = folder.at(folder.path / mark)
        if log.is_dir() and (mark != "metadata" or any(one.path.name.endswith(".metadata.json") for one in log.files())):
            raise InputError(
                f"input.path: {folder} is {what}, whose files may hold deleted rows; write its current rows to Parquet, "
                f"{convert}, or list its current files"
            )


def _below(place: Place, folder: PurePosixPath | Path) -> bool:
    return folder in place.path.parents


def _is_below(path: PurePath, root: PurePath) -> bool:
    return path == root or root in path.parents
