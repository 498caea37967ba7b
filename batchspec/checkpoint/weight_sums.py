"""sha256 of every tensor of a checkpoint, computed by threads while the tensors are loaded: did two runs load the same weights?

The threads read the pages of the files that the loader reads at that time, so a file is read from the disk once. Each sum is the
sha256 of the sha256 of the tensor's pieces, which several threads compute. The sums are those of whole tensors as they are
stored, whatever dtype, device or number of GPUs a run has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.checkpoint.files import listed
from batchspec.errors import OutputError
from batchspec.process.load_progress import count_step
from batchspec.process.machine import num_cpus

PIECE_BYTES = 1 << 24
MOST_THREADS = 32
"""A core computes 1 to 2 GB/s, and a GPU's weights are loaded at a few GB/s. Of a model on several GPUs one process computes all
sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSums:
    """The sums of all tensors of a model."""

    tensors: Mapping[str, str]
    """By name. The tensors of all experts of a layer have one sum together: a model has up to 100,000 of them."""
    run: str = ""
    """What loaded them, for messages: run, machine, time, model.path."""

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> WeightSums:
        """Raises OutputError for bytes that are not sums."""
        try:
            content = json.loads(data)
            tensors, run = dict(content["tensors"]), content["run"]
            if not tensors or not all(isinstance(text, str) for text in (run, *tensors, *tensors.values())):
                raise ValueError("no names and sums")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OutputError(f"{where} is damaged ({error}); restore it or use another output.dir") from error
        return cls(tensors=tensors, run=run)

    def differing(self, other: WeightSums) -> list[str]:
        """Names of the tensors whose sums differ or are there once, in order."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsOfJob:
    """The sums that all runs of a job, or of a training, must have."""

    where: str
    """The output folder."""
    kept: WeightSums | None = None
    """Those that an earlier run has kept there; None: not known."""
    kind: str = "job"
    """`training` for one of `batchspec train`."""

    def check(self, own: WeightSums | None) -> None:
        """Raises OutputError, in one line, where the weights that this run has loaded are not those of the job."""
        assert own is not None
        if self.kept is not None and (found := self.kept.differing(own)):
            raise OutputError(
                f"output.dir {self.where} holds a {self.kind} with other weights: {listed(found)} ({len(found)} of "
                f"{len(own.tensors)} tensors) {'differs' if len(found) == 1 else 'differ'} from those of {self.kept.run}; "
                "give that model, or another output.dir"
            )


class Summing:
    """Computes the sums of tensors in threads. `close` it before the memory of the tensors goes away."""

    def __init__(self, num_threads: int | None = None) -> None:
        """num_threads  None: half of the cores of this process, MOST_THREADS at most"""
        threads = num_threads or max(1, min(MOST_THREADS, num_cpus() // 2))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight sums")
        self._pieces: dict[str, list[Future[bytes]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def begin(self, name: str, tensor: Tensor) -> None:
        """Have a tensor on the CPU summed, whose numbers do not change until `close`. Does not wait."""
        stored: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        starts = range(0, len(stored), PIECE_BYTES)
        self._pieces[name] = [self._pool.submit(_digest, stored[start : start + PIECE_BYTES]) for start in starts]

    def result(self) -> WeightSums:
        """The sums of all tensors that were begun. Waits for them."""
        groups: dict[str, list[str]] = {}
        for name, pieces in sorted(self._pieces.items()):
            whole = sha256(b"".join(piece.result() for piece in pieces)).hexdigest()
            groups.setdefault(group_of(name), []).append(f"{name} {whole}\n")
        return WeightSums(tensors={group: sha256("".join(lines).encode()).hexdigest() for group, lines in groups.items()})

    def close(self) -> None:
        """End the threads; sums that are not computed yet are given up."""
        self._pool.shutdown(cancel_futures=True)


def _digest(piece: NDArray[np.uint8]) -> bytes:
    count_step()
    return sha256(piece.data).digest()


def group_of(name: str) -> str:
    """The name under which a tensor's sum is kept: its own, or what comes before the number of an expert.

    model.layers.3.mlp.experts.17.up_proj.weight -> model.layers.3.mlp.experts
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return name if len(numbers) < 2 else ".".join(parts[: numbers[1]])
