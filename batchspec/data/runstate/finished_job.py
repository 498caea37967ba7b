"""A job whose output is the input of another one: it must be finished, and stay as it is while its files are opened."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from batchspec.config.schema import RunConfig
from batchspec.console.text import ERROR_CHARS, counted
from batchspec.data.runstate.footers import part_name
from batchspec.data.runstate.job_state import JobState
from batchspec.errors import InputError

FIRST = ("model.path", "input.path", "input.from_job", "output.dir")


class FinishedJob:
    """The job in a folder or at a URL.

    key  the key that names it, for messages
    Raises InputError if it is not finished, OutputError if there is none or its files are damaged, StorageError.
    """

    def __init__(self, path: str, key: str) -> None:
        self._state, self._path, self._where = JobState(path), path, f"{key}={path}"
        self._version = self._version_now(self._state)
        manifest, missing = self._state.manifest, self._state.missing()
        if missing:
            rows = sum(len(manifest.layout.rows_of(index)) for index in missing)
            said = f"{self._where} is not finished: {manifest.num_rows - rows:,} of {counted(manifest.num_rows, 'row')} are done"
            raise InputError(f"{said}; finish it: {self._command(ERROR_CHARS - len(said) - 14)}")
        self.config: Mapping[str, Any] = manifest.config
        self.read_files = manifest.files
        """The input files that it read."""
        self.files = [f"{path.rstrip('/')}/data/{part_name(index)}" for index in range(manifest.layout.num_shards)]
        """The file of each shard."""

    def check_unchanged(self) -> None:
        """Raise InputError if another job, or a retry or an extension of this one, has begun since this object was made."""
        if self._version_now(JobState(self._path)) != self._version:
            raise InputError(f"{self._where}: a run began to change that job just now; run the command again when it has ended")

    @staticmethod
    def _version_now(state: JobState) -> tuple[str, int]:
        """Which job the folder holds, and how often it was changed."""
        return state.manifest.job, len(state.latest_changes())

    def _command(self, most: int) -> str:
        """The command that finishes the job, as its manifest tells; of one with more characters the first keys."""
        manifest, retry = self._state.manifest, self._state.generation if self._state.to_retry() else None
        values = {**dict(_changed(manifest.config, asdict(RunConfig()))), "output.dir": self._path}
        if "why_drafter" in manifest.recorded:  # draft=auto chose it
            values = {key: value for key, value in values.items() if not key.startswith("draft.")}
        words = [f"{key}={values.pop(key)}" for key in FIRST if key in values]
        of_retry = [word for word in str(retry or "").split() if word.partition("=")[0] not in values]
        more = [*(f"{key}={value}" for key, value in values.items()), *of_retry]
        whole = f"batchspec run {shlex.join([*words, *more])}"
        return whole if len(whole) <= most else f"batchspec run {shlex.join(words)} and the other keys of its command"


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, value as an override has it) where it is not the usual one."""
    for name, value in values.items():
        key, before = f"{prefix}{name}", usual.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and before:
            yield from _changed(value, before, f"{key}.")
        elif value != before:
            yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
