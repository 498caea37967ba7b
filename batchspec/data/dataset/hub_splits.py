"""Which files of a hub dataset belong to a split, by the rules of `datasets`: the card's `configs:`, else names of folders and
files.

Without `configs:` the first of these rules that matches any file is used, and the files that match it form the splits:

    data/SPLIT-00000-of-00003.parquet     any name of a split
    a folder with a keyword as a word     train/, dev-v2/x.parquet
    a file with a keyword as a word       train.parquet, my.test-1.jsonl
    all files                             train

Keywords: train, training; validation, valid, dev, val; test, testing, eval, evaluation. Words are divided by one of
`-._ ` or a digit.
Source: https://huggingface.co/docs/hub/datasets-data-files-configuration and datasets/data_files.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from batchspec.console.text import quoted
from batchspec.data.storage.places import matches
from batchspec.errors import InputError

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_DIVIDES = r"[-._ 0-9]"
_SHARDED = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
T = TypeVar("T")
Splits = Mapping[str, Sequence[str]]
"""Name of each split -> its files."""


@dataclass(frozen=True, slots=True)
class _Config:
    name: str
    is_default: bool
    splits: Splits
    filters: Any = None
    """Which rows of the files `datasets` gives; None: all."""


def files_of_split(files: Sequence[str], card: str, config_name: str | None, split: str | None, where: str) -> list[str]:
    """The files of one split of a dataset, sorted.

    files        names of its data files
    card         its README.md; empty: it has none
    config_name  None: the only one, or the default one
    split        None: the only one
    where        prefix of error messages: input.path and the dataset
    Raises InputError, which lists the configs or the splits, if the requested one does not exist, or if there are several to
    choose from; and for a config that holds only some rows of its files.
    """
    configs = list(_configs(files, card, where))
    names = [config.name for config in configs]
    if config_name is None:
        usual = [config for config in configs if config.is_default] or configs
        if len(usual) > 1:
            raise InputError(f"{where} has the configs {', '.join(names)}; choose one: input.config_name={names[0]}")
        (config,) = usual
    else:
        found = [config for config in configs if config.name == config_name]
        if not found:
            raise InputError(f"{where} has no config {config_name!r}; its configs are {', '.join(names)}")
        config = found[0]
    if config.filters is not None:
        rest = [other.name for other in configs if other.filters is None]
        instead = f"choose one that holds every row: input.config_name={rest[0]}" if rest else "give files of it"
        raise InputError(
            f"{where}: its config {config.name!r} holds only the rows that pass {str(config.filters)[:120]}, and batchspec reads "
            f"whole files; {instead}"
        )
    splits, of = config.splits, f" of the config {config.name!r}" if len(configs) > 1 else ""
    chosen = one_split(splits, split, where, of)
    if not chosen:
        raise InputError(
            f"{where}: no data file is in the split {split or next(iter(splits))!r}{of}; correct its card, or give files"
        )
    return sorted(set(chosen))


def one_split(splits: Mapping[str, T], split: str | None, where: str, of: str = "") -> T:
    """What belongs to one split. `split` and `where` as in `files_of_split`; `of` names the config that has the splits. Raises
    InputError."""
    if split is None and len(splits) > 1:
        raise InputError(f"{where} has the splits {', '.join(splits)}{of}; choose one: input.split={next(iter(splits))}")
    if split is not None and split not in splits:
        said = "; parts of splits are not supported: use input.limit for the first rows" if re.search(r"[\[+]", split) else ""
        raise InputError(f"{where} has no split {split!r}; the splits{of} are {', '.join(splits)}{said}")
    return splits[split or next(iter(splits))]


def _configs(files: Sequence[str], card: str, where: str) -> Iterator[_Config]:
    """The configs of the card; at least one."""
    listed = _front_matter(card, where).get("configs")
    if not isinstance(listed, list) or not listed:
        yield _Config("default", True, _by_names(files))
        return
    for entry in listed:
        name = str(entry.get("config_name", "default")) if isinstance(entry, dict) else ""
        if not name:
            raise InputError(
                f"{where}: `configs:` on its card holds {quoted(entry)}, which is not a config; name files in input.path"
            )
        folder = str(entry.get("data_dir") or "").strip("/")
        own = [file for file in files if not folder or file.startswith(f"{folder}/")]
        given = entry.get("data_files")
        if given is None:
            inner = {file.removeprefix(f"{folder}/") if folder else file: file for file in own}
            splits = {split: [inner[file] for file in found] for split, found in _by_names(list(inner)).items()}
        else:
            splits = {split: _matching(patterns, folder, files) for split, patterns in _data_files(given, where)}
        yield _Config(name, entry.get("default") is True or name == "default", splits, entry.get("filters"))


def _front_matter(card: str, where: str) -> Mapping[str, Any]:
    found = _FRONT_MATTER.match(card)
    try:
        values = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())[:120]
        raise InputError(f"{where}: the YAML on its card cannot be read ({said}); give files of it") from None
    return values if isinstance(values, dict) else {}


def _data_files(given: Any, where: str) -> Iterator[tuple[str, list[str]]]:
    """Split and patterns of `data_files:`: text, a list of texts, a map, or a list of objects with split and path."""
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(item, str) for item in given)):
        yield "train", [given] if isinstance(given, str) else given
        return
    entries = [{"split": split, "path": path} for split, path in given.items()] if isinstance(given, dict) else given
    for entry in entries if isinstance(entries, list) else [entries]:
        paths = entry.get("path") if isinstance(entry, dict) else None
        patterns = [paths] if isinstance(paths, str) else paths
        if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
            raise InputError(
                f"{where}: `data_files:` on its card holds {quoted(entry)}, not a split and a path; give files of it"
            )
        yield str(entry.get("split", "train")), patterns


def _matching(patterns: Sequence[str], folder: str, files: Sequence[str]) -> list[str]:
    found = list[str]()
    for pattern in patterns:
        parts = PurePosixPath(folder, pattern.removeprefix("./")).parts
        found += [file for file in files if matches(PurePosixPath(file).parts, parts)]
    return found


def _by_names(files: Sequence[str]) -> Splits:
    sharded: dict[str, list[str]] = {}
    for file in sorted(files):
        if found := _SHARDED.fullmatch(file):
            sharded.setdefault(found[1], []).append(file)
    in_folders = {
        split: [file for file in files if _named(PurePosixPath(file).parts[:-1], words)] for split, words in KEYWORDS.items()
    }
    in_files = {
        split: [file for file in files if _named(PurePosixPath(file).parts[-1:], words)] for split, words in KEYWORDS.items()
    }
    for rule in (sharded, in_folders, in_files):
        if splits := {split: found for split, found in sorted(rule.items(), key=_usual_first) if found}:
            return splits
    return {"train": list(files)}


def _usual_first(item: tuple[str, Any]) -> tuple[int, str]:
    usual = list(KEYWORDS)
    return (usual.index(item[0]) if item[0] in usual else len(usual)), item[0]


def _named(parts: Sequence[str], words: Sequence[str]) -> bool:
    """Whether one of the words is in one of the names as a separate word."""
    wanted = rf"(?:^|{_DIVIDES})(?:{'|'.join(words)})(?:{_DIVIDES}|$)"
    return any(re.search(wanted, part) for part in parts)
