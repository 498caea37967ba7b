"""The manifest: the definition of a job. Written once when its output folder is created, compared by every later run."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchspec.console.text import counted
from batchspec.data.dataset.reader import InputFile
from batchspec.data.dataset.shard_layout import ShardLayout
from batchspec.errors import OutputError

MANIFEST = "_batchspec/manifest.json"
VERSION = 3
"""Of everything in an output folder: a folder of another version is refused."""
SHORT = 64
NULL = "null"
MANY_SHARDS = 2048
MAX_SHARD_ROWS = 8192


def default_shard_rows(num_rows: int) -> int:
    """Rows of a shard if output.shard_rows is not set. It depends only on the input, so that all runs have the same shards.

    It grows with the input: up to 512 for a million rows, then so that there are about MANY_SHARDS shards, up to MAX_SHARD_ROWS
    (a run holds several shards in memory). Large shards do not make a kill expensive: finished rows are journaled.
    """
    few = min(max(num_rows // 256, 16), 512)
    return max(few, min(-(-num_rows // MANY_SHARDS), MAX_SHARD_ROWS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    version: int = VERSION
    fingerprint: Mapping[str, str]
    """Everything that changes results, key by key; another value means another job."""
    config: Mapping[str, Any]
    """The resolved configuration of the first run."""
    recorded: Mapping[str, Any]
    """Facts that are recorded but not compared: versions, the drafter, the machine."""
    num_rows: int
    """Input rows."""
    shard_rows: int
    """Input rows a shard when the job began: shard i holds rows i * shard_rows up to the next shard's first. See `layout`."""
    publish: str
    """link, rename or put (S3): how a shard's file gets its name on this file system."""
    files: tuple[InputFile, ...]
    job: str
    """Id of the job, unique among all jobs that the folder ever holds."""
    began: tuple[str, ...] = ()
    """Names of the command that began the job, see overwrite.py."""
    ready: bool = True
    """False while the folder's previous job is being deleted."""
    extended: ShardLayout | None = None
    """The shards of an extended job, computed from its extensions (extensions.py); not part of the file."""

    @property
    def layout(self) -> ShardLayout:
        """The input rows of every shard, shards of extensions included."""
        return self.extended or ShardLayout.even(self.num_rows, self.shard_rows)

    def to_json(self) -> bytes:
        values = asdict(self)
        assert values.pop("extended") is None
        return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Raises OutputError unless the bytes are a manifest of this version."""
        try:
            values = json.loads(data)
            if values["version"] != VERSION:
                raise OutputError(
                    f"{where} has version {values['version']}, this batchspec writes {VERSION}; use another output.dir"
                )
            values["files"] = tuple(InputFile(**file) for file in values["files"])
            values["began"] = tuple(values["began"])
            found = cls(**values)
            if not (found.num_rows >= 0 < found.shard_rows and isinstance(found.job, str) and isinstance(found.ready, bool)):
                raise ValueError("a field of another type")
            return found
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OutputError(f"{where} is damaged ({error}); restore it or use another output.dir") from error


def fingerprint(parts: Mapping[str, object]) -> dict[str, str]:
    """A short string for each key: the value as JSON with sorted keys, or its sha256 if that is longer than 64 characters."""
    return {key: _short(value) for key, value in sorted(parts.items())}


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text if len(text) <= SHORT else "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def differing(old: Mapping[str, str], new: Mapping[str, str]) -> set[str]:
    """Every key that differs. A key that one of them lacks is null there: null is what a key means to a version without it."""
    return {key for key in {*old, *new} if old.get(key, NULL) != new.get(key, NULL)}


def differences(old: Mapping[str, str], new: Mapping[str, str], said: Mapping[str, str]) -> list[str]:
    """`key: old value -> new value` for every key that differs, values shortened; for keys of `said` its text instead."""
    values = {key: f"{_shown(old.get(key, NULL))} -> {_shown(new.get(key, NULL))}" for key in sorted(differing(old, new))}
    return [f"{key}: {said.get(key, text)}" for key, text in values.items()]


def files_that_differ(old: Sequence[InputFile], new: Sequence[InputFile]) -> str:
    """How the files of two inputs differ, each by name, for a message."""
    before, now = ({file.name: file for file in files} for files in (old, new))
    said = dict.fromkeys(now.keys() - before.keys(), "is not in the job's input")
    said |= dict.fromkeys(before.keys() - now.keys(), "is missing")
    for name in before.keys() & now.keys():
        was, has = before[name], now[name]
        if was.num_rows != has.num_rows:
            said[name] = f"has {counted(has.num_rows, 'row')} and had {was.num_rows:,}"
        elif was.identity != has.identity:
            said[name] = "has other content"
    shown = [f"{name} {said[name]}" for name in sorted(said)[:3]] or ["the same files in another order"]
    more = len(said) - 3
    return ", ".join(shown) + (f" and {counted(more, 'more file')}" if more > 0 else "")


def _shown(value: str) -> str:
    limit = 15 if value.startswith("sha256:") else 21
    return value if len(value) <= limit + 3 else value[:limit] + "..."


def first_job_id(path: str, compared: Mapping[str, str]) -> str:
    """The id of the first job of a folder, the same in all runs that begin it at the same time: with the publishing method
    `rename`, either run's manifest may be the one that remains.
    """
    return uuid.uuid5(uuid.NAMESPACE_OID, json.dumps([path, compared], sort_keys=True)).hex


def compared_facts(fingerprint: Mapping[str, str], num_rows: int, shard_rows: int | None) -> dict[str, str]:
    """The fingerprint, and the two numbers that determine which rows a shard of a new job holds."""
    rows = str(shard_rows or default_shard_rows(num_rows))
    return {**fingerprint, "input.rows": str(num_rows), "output.shard_rows": rows}
