"""Whether the loading of a model still moves: steps that this process counts, and what the system shows of any process.

Loading takes a second or a day, as disks, networks and compilers have it. So nothing limits its duration, only the time in which
nothing moves (`supervise/watchdog.py`). Used CPU time is no movement: a thread that waits for a GPU in a loop uses it too.
"""

from __future__ import annotations

import os
from pathlib import Path

MOVED_BYTES = 1 << 18
"""Fewer bytes are no movement: progress lines of a process that hangs come to less in hours."""
_num_steps = 0


def step() -> None:
    """Count a step of loading: a tensor was read, a graph was captured, a phase has ended. Any thread may call it."""
    global _num_steps
    _num_steps += 1  # if two threads count at once, one step is lost; the number has changed all the same


def num_steps() -> int:
    """Number of steps so far. It counts none of a long step's parts, which `Activity` shows."""
    return _num_steps


class Activity:
    """Shows whether a process moves bytes: pages of mapped files that come into memory, and what it reads and writes.

    Bytes of weights come as pages of mapped files, from any file system; compiled kernels and downloads are written to files.
    Where /proc is missing, or shows nothing of the process, there is never a movement.
    """

    def __init__(self, pid: int | None = None) -> None:
        """pid: None is this process"""
        self._folder = Path("/proc", "self" if pid is None else str(pid))
        self._is_self, self._own_bytes = pid is None, 0
        self._faults, self._bytes, self._resident = -1, 0, 0

    def moved(self) -> bool:
        """Whether there was a movement since the last call that found one; the first call finds one."""
        try:
            faults, num_bytes, resident = self._look()
        except (OSError, ValueError, IndexError, KeyError):
            return False
        self._resident = min(self._resident, resident)  # memory that the system takes back is no movement
        if (
            faults == self._faults
            and num_bytes - self._bytes < MOVED_BYTES
            and resident - self._resident < MOVED_BYTES // _PAGE_BYTES
        ):
            return False
        self._faults, self._bytes, self._resident = faults, num_bytes, resident
        return True

    def _look(self) -> tuple[int, int, int]:
        """Page faults that waited for a disk, bytes read and written without those of this function, pages in memory."""
        faults = int(self._read("stat").rpartition(")")[2].split()[9])
        resident = int(self._read("statm").split()[1])
        before = self._own_bytes
        totals = dict(line.split(": ") for line in self._read("io").splitlines())
        return faults, int(totals["rchar"]) + int(totals["wchar"]) - before, resident

    def _read(self, name: str) -> str:
        text = (self._folder / name).read_text(encoding="ascii", errors="replace")
        self._own_bytes += len(text) if self._is_self else 0
        return text


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
