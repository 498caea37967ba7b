"""A draft head in the output folder, for all runs of a job: config.json and model.safetensors, each replaced in one step."""

from __future__ import annotations

from pathlib import Path

from batchspec.storage.store import Store

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class HeadFiles:
    def __init__(self, store: Store, name: str) -> None:
        """name  tells heads with different beginnings apart"""
        self._store, self.folder = store, f"_batchspec/heads/{name}"

    def put(self, config: bytes, weights: bytes) -> None:
        """Replace the head. Its config is always the same one: no reader meets two parts that do not belong together."""
        self._store.put(f"{self.folder}/{WEIGHTS}", weights)
        self._store.put(f"{self.folder}/{CONFIG}", config)

    def read_into(self, folder: Path) -> bool:
        """Copy the head into a folder of this machine; False where there is none."""
        if not self._store.exists(f"{self.folder}/{CONFIG}"):
            return False
        for name in (CONFIG, WEIGHTS):
            (folder / name).write_bytes(self._store.read(f"{self.folder}/{name}"))
        return True
