"""The files of a model's weights, and digests that tell without reading all of them whether they can be those of a job.

A run that other weights would only end after they are loaded is refused before that by these. `weight_sums.py` reads every byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from batchspec.checkpoint.config_values import readable, shown
from batchspec.checkpoint.files import MAX_HEADER_BYTES, LocalFiles, weight_names
from batchspec.errors import CheckpointError
from batchspec.process.local_files import fault_of, open_regular

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14
MOST_TENSORS = 2048
"""Of which a sample is read: a read takes up to a millisecond over a network."""
_TENSOR_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files that hold a model."""

    paths: tuple[Path, ...]

    @property
    def fingerprint(self) -> str:
        """sha256 of names, sizes, safetensors headers and samples of each file: two fine-tunes differ in the samples only."""
        digest = sha256()
        for path in self.paths:
            with readable(path), open_regular(path) as file:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                length = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(length, MAX_HEADER_BYTES)))
                data, size = file.tell(), path.stat().st_size
                for sample in range(_SAMPLES):
                    file.seek(data + (size - data) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    @property
    def state(self) -> str:
        """Changes when a file is written to or replaced: sizes and times of all files. To be compared on one machine only."""
        facts = []
        for path in self.paths:
            with readable(path):
                own = path.stat()
            facts.append((path.name, own.st_size, own.st_mtime_ns))
        return sha256(repr(facts).encode()).hexdigest()

    @property
    def tensors(self) -> str:
        """sha256 of the bytes in the middle of each tensor, evenly chosen ones of more than MOST_TENSORS.

        Two models of which only a layer, or one kind of projection, was trained differ here, and perhaps not in `fingerprint`.
        """
        digest, places = sha256(), list(self._middles())
        step = -(-len(places) // MOST_TENSORS) if places else 1
        by_path: dict[Path, list[tuple[int, int]]] = {}
        for path, start, count in places[::step]:
            by_path.setdefault(path, []).append((start, count))
        for path, reads in by_path.items():
            with readable(path), open_regular(path, buffering=0) as file:
                for start, count in reads:
                    file.seek(start)
                    digest.update(file.read(count))
        return digest.hexdigest()

    def _middles(self) -> Iterator[tuple[Path, int, int]]:
        """Of each tensor, in the order of the files: file, first byte and number of the bytes in its middle."""
        for path in self.paths:
            with readable(path), open_regular(path) as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
            spans = sorted(tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__")
            for begin, end in spans:
                count = min(end - begin, _TENSOR_BYTES)
                yield path, 8 + length + begin + (end - begin - count) // 2, count


@contextmanager
def opened_weights(path: Path) -> Iterator[Any]:
    """The tensors of a safetensors file, by safe_open. Raises as `readable`, and CheckpointError for another format."""
    where = shown(path)
    with readable(path), open_regular(path) as file:
        file.read(1)  # safe_open says of a disk that fails that the file is not there
    try:
        opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        refusal = CheckpointError(f"{where}: cannot be read as safetensors ({error}); download the file again")
        raise fault_of(error, where, refusal) from None
    with opened as tensors:
        yield tensors


def weight_files(folder: Path) -> WeightFiles:
    """Those of the index, or model.safetensors. Raises CheckpointError where there are none or some are missing."""
    return WeightFiles(tuple(folder / name for name in weight_names(LocalFiles(folder))))
