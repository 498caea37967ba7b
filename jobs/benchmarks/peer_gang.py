"""Several starts of `peers.py` at the same time on one card, and then one measurement after another."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_START_S = 900.0


class Gang:
    """`size` processes that have an empty folder in common.

    None measures before each of them has started or failed: what starts a process that dies without a word calls `settle` for it.
    A process that has its turn keeps it up to its end, so that the next one is not measured while it gives its memory back.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        folder.mkdir(parents=True, exist_ok=True)

    def settle(self, pid: int | None = None) -> None:
        """From now on nobody waits for the process, by default this one: it has started, or it failed."""
        (self.folder / f"{pid or os.getpid()}.settled").touch()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of an engine."""
        try:
            yield
        finally:
            self.settle()

    def take_turn(self, longest_s: float = LONGEST_START_S, pause_s: float = 0.2) -> None:
        """Waits for all to settle and then for this process's turn. Raises TimeoutError where some still start after so long:
        they would slow what is measured.
        """
        end = time.monotonic() + longest_s
        while (settled := len(list(self.folder.glob("*.settled")))) < self.size:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.folder}: {settled} of {self.size} have started or failed in {longest_s:.0f} s")
            time.sleep(pause_s)
        self._turn = open(self.folder / "turn", "w")  # noqa: SIM115 - closed by the end of the process
        fcntl.flock(self._turn, fcntl.LOCK_EX)
