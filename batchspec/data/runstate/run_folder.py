"""What the runs of a job keep in its output folder besides the shards: K/V scales, sums of weights, journal, logs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from batchspec.data.runstate.attempts import Attempts
from batchspec.data.runstate.heartbeats import HeartbeatFiles
from batchspec.data.runstate.job_folder import JobFolder
from batchspec.data.runstate.job_state import SETTLE_S
from batchspec.data.runstate.journal import Journal
from batchspec.errors import OutputError

KV_SCALES = "_batchspec/kv_scales.json"
WEIGHTS = "_batchspec/weights.json"


class RunFolder(JobFolder):
    """The files of a job's runs under _batchspec/. Each is written only while the folder holds the job of this run."""

    def attempts(self) -> Attempts:
        """The records of what runs were computing when they crashed."""
        return Attempts(self._work, self.attempt)

    def heartbeats(self) -> HeartbeatFiles:
        """The heartbeats of all runs."""
        return HeartbeatFiles(self._store, self.attempt)

    def journal(self) -> Journal:
        """The journal of shards that are not committed."""
        manifest, layout = self.manifest, self.manifest.layout

        def holds(shard: int, row: int) -> bool:
            return 0 <= shard < layout.num_shards and row in layout.rows_of(shard)

        return Journal(self._work, self.attempt, manifest.job, self.check_own, holds)

    def kv_scales(self) -> bytes | None:
        """The K/V scales that all runs of the job use; None if no run has kept them yet."""
        return self._store.read(KV_SCALES) if self._store.exists(KV_SCALES) else None

    def keep_kv_scales(self, own: bytes) -> bytes:
        """Keep a run's scales if no other run was first; returns those that are kept. Raises as `check_own` does."""
        self._put_own(KV_SCALES, own, once=True)
        return self._store.read(KV_SCALES)

    def weight_sums(self) -> bytes | None:
        """The sums of the weights that all runs of the job load; None if no run has kept them yet."""
        return self._store.read(WEIGHTS) if self._store.exists(WEIGHTS) else None

    def keep_weight_sums(self, own: bytes) -> bytes:
        """Keep a run's sums if no other run was first; returns those that are kept. Raises as `check_own` does."""
        self._put_own(WEIGHTS, own, once=True)
        if self._store.method == "rename":
            time.sleep(SETTLE_S)
        return self._store.read(WEIGHTS)

    def log_run(self, facts: Mapping[str, Any]) -> None:
        """Store the summary of a run that has ended. Raises StorageError, and OutputError as `check_own`."""
        self._put_own(f"_batchspec/logs/run-{self.attempt}.json", (json.dumps(dict(facts)) + "\n").encode())

    def log_timeline(self, text: str) -> None:
        """Store the run's timeline so far, unless the folder holds another job now. Raises StorageError."""
        with suppress(OutputError):
            self._put_own(f"_batchspec/logs/run-{self.attempt}.timeline.jsonl", text.encode())

    def logs(self, ending: str) -> Iterator[str]:
        """The logs of all runs with this ending: `.timeline.jsonl`, or `.json` for the summaries."""
        for name in self._store.list("_batchspec/logs"):
            if re.fullmatch(r"run-[0-9a-f]+" + re.escape(ending), name):
                yield self._store.read(f"_batchspec/logs/{name}").decode("utf-8", "replace")

    def _put_own(self, name: str, data: bytes, *, once: bool = False) -> None:
        """Write a file of the job. If the folder holds another job afterwards (because the run was suspended), the file is
        deleted again; the next run of that job writes its card if it is missing. Raises as `check_own` does.

        once  a file that is there already stays
        """
        self.check_own()
        written = True
        if once:
            written = self._store.put_if_absent(name, data)
        else:
            self._store.put(name, data)
        try:
            self.check_own()
        except OutputError:
            if not written:
                raise
            version = self._store.version(name)
            if self._store.read(name) == data:
                self._store.delete(name, version)
            raise
