"""Ranks of tensor parallelism: threads whose exchanges go through a list, and processes over gloo."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from batchspec.distributed.collectives import Collectives, GlooCollectives
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import DummyWeights
from tests.helpers.engines import DEVICE
from tests.helpers.runs import fork_context

T = TypeVar("T")


@dataclass(eq=False)
class Table:
    """What the ranks of one group lay down for each other."""

    ranks: int
    places: list[Tensor] = field(default_factory=list)
    bytes_exchanged: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = [torch.empty(0)] * self.ranks
        self.barrier = threading.Barrier(self.ranks, timeout=60)


class ThreadCollectives(Collectives):
    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(rank, table.ranks)
        self._table = table

    def gather(self, x: Tensor) -> Tensor:
        table = self._table
        table.places[self.rank] = x
        table.barrier.wait()
        assert len({(part.shape, part.dtype) for part in table.places}) == 1, "ranks exchange different tensors"
        found = torch.stack(table.places)
        if table.barrier.wait() == 0:
            table.bytes_exchanged.append(x.nbytes)
        return found


def on_ranks(count: int, call: Callable[[Collectives], T], table: Table | None = None) -> list[T]:
    """What `call` returns on each of `count` ranks. The first error of a rank ends all."""
    shared = table or Table(count)

    def one(rank: int) -> T:
        try:
            return call(ThreadCollectives(rank, shared))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(one, rank) for rank in range(count)]
        errors = [error for each in found if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [each.result() for each in found]


def part_of(
    spec: ModelSpec, ranks: Collectives, noise: Callable[..., DummyWeights] = DummyWeights, dtype: torch.dtype = torch.float64
) -> Target:
    """A rank's part of the target of noise that `whole_of` makes."""
    part = spec.sharded(Shard(ranks.rank, ranks.ranks))
    return Target(part, noise(part, dtype=dtype, device=DEVICE), DEVICE, ranks)


def whole_of(spec: ModelSpec, noise: Callable[..., DummyWeights] = DummyWeights, dtype: torch.dtype = torch.float64) -> Target:
    return Target(spec, noise(spec, dtype=dtype, device=DEVICE), DEVICE)


def bits(x: Tensor) -> Any:
    """Equal for tensors with the same bits, NaN included."""
    return x.contiguous().view(torch.uint8).tolist()


def start_ranks(
    count: int, call: Callable[[Collectives, Path], object], folder: Path, timeout_s: float = 120, *, fork: bool = True
) -> None:
    """Run `call`, a function of a test module, in each of `count` processes, with a folder that they share.

    fork  False: processes that start anew, as CUDA needs it
    """
    context: BaseContext = fork_context() if fork else multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, count, call, folder)) for rank in range(count)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    assert codes == [0] * count, codes


def _rank(rank: int, count: int, call: Callable[[Collectives, Path], object], folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    code = 0
    try:
        call(GlooCollectives(rank, count, folder / "rendezvous", limit_s=60), folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)
