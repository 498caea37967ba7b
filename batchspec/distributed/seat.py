"""A process's place in the group that computes a model, without torch: the parent that starts the processes does not need it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from batchspec.distributed.channel import Channel, make_memory


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place in its group, as its parent gives it: the first words of its command line."""

    rank: int
    ranks: int
    handle: int
    """File descriptor of the channel's memory."""
    rendezvous: int
    """File descriptor of the file by which the ranks find each other."""
    sharing: int = 1
    """Number of processes, of all groups of the run, that share the machine's main memory and cores; 1 on GPUs."""

    @property
    def rendezvous_file(self) -> Path:
        """The path of that file in each process that has the descriptor."""
        return Path(f"/proc/self/fd/{self.rendezvous}")

    def channel(self) -> Channel:
        """The group's channel as the process in this seat uses it."""
        return Channel(self.handle, self.rank, self.ranks)

    def words(self) -> list[str]:
        return [str(number) for number in astuple(self)]

    @classmethod
    def of(cls, words: list[str]) -> tuple[Seat, list[str]]:
        """The seat that a program's words begin with, and the words after it."""
        count = len(fields(cls))
        return cls(*map(int, words[:count])), words[count:]


@contextmanager
def new_group(ranks: int, *, sharing: int = 1) -> Iterator[Seat]:
    """The seat of rank 0 in a new group; the others' differ in `rank`. Within this block processes that get it can be started.

    What the ranks share is in memory alone: nothing of it is left on disk, even if all processes are killed.
    """
    handle, rendezvous = make_memory(), os.memfd_create("batchspec rendezvous", 0)
    try:
        yield Seat(0, ranks, handle, rendezvous, sharing)
    finally:
        os.close(handle)
        os.close(rendezvous)
