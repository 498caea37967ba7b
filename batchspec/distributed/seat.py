"""A process's place in the group that computes a model, without torch: the parent that starts the processes does not need it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path


def ending(code: int) -> str:
    """How a process ended, for people: by its exit code as Popen has it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place in its group, as its parent gives it: words of its command line."""

    rank: int
    ranks: int
    handle: int
    """File descriptor of the channel's memory."""
    rendezvous: Path
    """File by which the ranks find each other."""

    def words(self) -> list[str]:
        return [str(self.rank), str(self.ranks), str(self.handle), str(self.rendezvous)]

    @classmethod
    def of(cls, words: list[str]) -> Seat:
        rank, ranks, handle, rendezvous = words
        return cls(int(rank), int(ranks), int(handle), Path(rendezvous))
