"""A job whose output is the input of another one: it must be finished, and stay as it is while its files are opened."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from batchspec.config.schema import RunConfig
from batchspec.console.text import counted
from batchspec.errors import InputError
from batchspec.runstate.footers import part_name
from batchspec.runstate.job_state import JobState

COMMAND_CHARS = 150
"""Most characters of a command in a message, which has room for a short one: of a longer one only the first keys are shown."""
FIRST = ("model.path", "input.path", "input.from_job", "output.dir")


class FinishedJob:
    """The job in a folder or at a URL.

    key  the key that names it, for messages
    Raises InputError if it is not finished, OutputError if there is none or its files are damaged, StorageError.
    """

    def __init__(self, path: str, key: str) -> None:
        self._state, self._where = JobState(path), f"{key}={path}"
        missing = self._state.missing()
        manifest = self._state.manifest
        if missing:
            rows = sum(len(manifest.layout.rows_of(index)) for index in missing)
            raise InputError(
                f"{self._where} is not finished: {manifest.num_rows - rows:,} of {counted(manifest.num_rows, 'row')} are done; "
                f"finish it first: {self._command()}"
            )
        self.config: Mapping[str, Any] = manifest.config
        self.files = [f"{path.rstrip('/')}/data/{part_name(index)}" for index in range(manifest.layout.num_shards)]
        """The file of each shard."""

    def check_unchanged(self) -> None:
        """Raise InputError if a retry or an extension of the job has begun since this object was made, or another job."""
        before = self._state.manifest.job, len(self._state.latest_changes())
        now = JobState(self._state.path)
        if (now.manifest.job, len(now.latest_changes())) != before or now.missing():
            raise InputError(f"{self._where}: a run began to change that job just now; run the command again when it has ended")

    def _command(self) -> str:
        """The command that finishes the job, as its manifest tells."""
        manifest, retry = self._state.manifest, self._state.generation
        values = dict(_changed(manifest.config, asdict(RunConfig())))
        if "why_drafter" in manifest.recorded:  # draft=auto chose it
            values = {key: value for key, value in values.items() if not key.startswith("draft.")}
        words = [f"{key}={values.pop(key)}" for key in FIRST if key in values]
        more = [*(f"{key}={value}" for key, value in values.items()), *(str(retry).split() if retry else ())]
        whole = shlex.join([*words, *more])
        if len(whole) > COMMAND_CHARS:
            whole = f"{shlex.join(words)} ... (its other keys are in _batchspec/manifest.json)"
        return f"batchspec run {whole}"


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, value as an override has it) where it is not the usual one."""
    for name, value in values.items():
        key, before = f"{prefix}{name}", usual.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and before:
            yield from _changed(value, before, f"{key}.")
        elif value != before:
            yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
