"""Writes a trainer's tensors as a temporary checkpoint that other processes can read: in /dev/shm if they fit, else on disk."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from torch import Tensor

from batchspec.errors import ConfigError
from batchspec.job.prepare import JobModel

MEMORY = Path("/dev/shm")
PART_BYTES = 1 << 31
"""Approximate size of each file: this many bytes at a time are copied from the GPU and written."""


@contextmanager
def written(tensors: Mapping[str, Tensor], model: Path) -> Iterator[Path]:
    """A checkpoint folder with these tensors and config.json of the folder `model`; it is deleted when the context ends."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > size + PART_BYTES
    with tempfile.TemporaryDirectory(prefix="batchspec-", dir=MEMORY if room else None) as made:
        folder, places = Path(made), dict[str, str]()
        for number, names in enumerate(_parts(tensors)):
            file = f"model-{number:05}.safetensors"
            part = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in names}
            safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(names, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        shutil.copyfile(model / "config.json", folder / "config.json")
        yield folder


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names, size = list[str](), 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > PART_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def check_scales(model: JobModel) -> None:
    """Raises ConfigError if K/V scales should come from a checkpoint but the new weights are tensors in memory."""
    if model.spec.has_kv_scales and model.config.cache.scales == "checkpoint":
        raise ConfigError("cache.scales=checkpoint: tensors in memory bring no K/V scales; give a folder")
