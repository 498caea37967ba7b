"""The draft head that runs of a job train, in the output folder: config.json and model.safetensors, each replaced atomically."""

from __future__ import annotations

from pathlib import Path

from batchspec.storage.store import Store

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class HeadFiles:
    def __init__(self, store: Store, name: str) -> None:
        """name  name of the folder; heads that started from different checkpoints have different names"""
        self._store, self.folder = store, f"_batchspec/heads/{name}"

    def put(self, config: bytes, weights: bytes) -> None:
        """Replace the head. Its config never changes, so the two files that a reader gets always fit together."""
        self._store.put(f"{self.folder}/{WEIGHTS}", weights)
        self._store.put(f"{self.folder}/{CONFIG}", config)

    def read_into(self, folder: Path) -> bool:
        """Copy the head into a local folder; False if there is none."""
        if not self._store.exists(f"{self.folder}/{CONFIG}"):
            return False
        for name in (CONFIG, WEIGHTS):
            (folder / name).write_bytes(self._store.read(f"{self.folder}/{name}"))
        return True
