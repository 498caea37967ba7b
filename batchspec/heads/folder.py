"""The output folder of a training.

training.json   the facts that identify the training; `weights`, the sums of the target's tensors; `complete` and its curves once
                it is complete
checkpoint.pt   weights, optimiser state, curves and the number of trained batches; deleted once the head is complete
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from batchspec.checkpoint.weight_sums import SumsOfJob, WeightSums
from batchspec.console.text import one_line
from batchspec.errors import OutputError, StorageError
from batchspec.heads.save import CONFIG, WEIGHTS, write_text
from batchspec.process.local_files import passes, unusable_name

RECORD, STATE = "training.json", "checkpoint.pt"
FIRST_RUN = "its first run"
_OWN = (RECORD, STATE, f".{STATE}", f".{RECORD}", CONFIG, f".{CONFIG}", WEIGHTS, f".{WEIGHTS}")


class HeadFolder:
    """The folder of one training. Nothing is written or deleted before `begin`.

    facts  everything that the head depends on, as JSON values; a folder of a training with other facts is refused
    """

    def __init__(self, path: Path, facts: dict[str, Any], *, overwrite: bool) -> None:
        """Raises OutputError for a folder with foreign files, and for one of another training unless `overwrite`."""
        self.path, self.facts = path, facts
        self.complete, self._overwrite = False, overwrite
        self._weights: dict[str, str] | None = None
        if why := unusable_name(path):
            raise OutputError(f"output.dir={one_line(path)} cannot be a folder: {why}; choose another one")
        if path.exists() and not path.is_dir():
            raise OutputError(f"output.dir={path} is a file; give a folder")
        record = self._record()
        if record is None:
            if path.is_dir() and any(path.iterdir()):
                raise OutputError(f"output.dir={path} holds files that do not belong to a training; give an empty folder")
        elif not overwrite:
            self._check_same(record.get("facts", {}))
            self.complete, self._weights = bool(record.get("complete")), record.get("weights")

    def check_weights(self, own: WeightSums | None) -> None:
        """Compare the target that was loaded with that of the training's earlier runs; the first run's sums are kept.

        own  None for dummy weights, which are the same in all runs
        Raises OutputError, in one line, for other weights.
        """
        if own is None:
            return
        kept = None if self._weights is None else WeightSums(tensors=self._weights, run=FIRST_RUN)
        SumsOfJob(where=str(self.path), kept=kept, kind="training").check(own)
        self._weights = dict(own.tensors)

    def begin(self) -> None:
        """Begin or resume the training: take over the folder. Call `check_weights` before."""
        if self._overwrite:
            for name in _OWN:
                (self.path / name).unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        self._write({"complete": False})

    def save_state(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint atomically. Raises StorageError if writing fails."""
        try:
            torch.save(state, self.path / f".{STATE}")
            os.replace(self.path / f".{STATE}", self.path / STATE)
        except (OSError, RuntimeError) as error:
            raise StorageError(
                f"{self.path / STATE}: cannot be written: {error}; repair the disk and run the same command again"
            ) from error

    def load_state(self, device: torch.device) -> dict[str, Any] | None:
        """The checkpoint, or None if there is none. Raises StorageError if it cannot be read."""
        path = self.path / STATE
        if not path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        except Exception as error:  # torch.load may raise anything for damaged bytes
            raise StorageError(f"{path}: cannot be read ({type(error).__name__}); remove it to start anew") from error
        return state

    def finish(self, curves: dict[str, Any]) -> None:
        """Mark the training as complete, with its curves, and delete the checkpoint. The head's files are already written."""
        self._write({"complete": True, **curves})
        (self.path / STATE).unlink(missing_ok=True)

    def _record(self) -> dict[str, Any] | None:
        try:
            record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if passes(error):
                raise StorageError(f"{self.path / RECORD}: cannot be read: {error}; run the same command again later") from error
            return None
        return record if isinstance(record, dict) else None

    def _check_same(self, facts: dict[str, Any]) -> None:
        for key in sorted(self.facts.keys() | facts.keys()):
            if self.facts.get(key) != facts.get(key):
                before, now = (json.dumps(x.get(key)) for x in (facts, self.facts))
                what = f"{key} {before[:60]}, now {now[:60]}" if len(before) < 60 else f"another {key}"
                raise OutputError(
                    f"output.dir={self.path} belongs to a training with {what}; give another folder, or output.overwrite=true"
                )

    def _write(self, state: dict[str, Any]) -> None:
        weights = {} if self._weights is None else {"weights": self._weights}
        write_text(self.path / RECORD, json.dumps({"facts": self.facts, **weights, **state}, indent=1) + "\n")
