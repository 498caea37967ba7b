"""Whether the loading of a model still moves: steps that this process counts, and what the system shows of any process.

Loading takes a second or a day, as disks, networks and compilers have it. So nothing limits its duration, only the time in which
nothing moves (`supervise/watchdog.py`). Used CPU time is no movement: a thread that waits for a GPU in a loop uses it too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

READ_BYTES, WRITTEN_BYTES, RESIDENT_BYTES = 1 << 12, 1 << 18, 1 << 16
"""Fewer bytes are no movement. A process that hangs reads nothing, but its progress lines come to some kilobytes an hour, and the
memory that its other threads use changes a little."""
_num_steps = 0


def step() -> None:
    """Count a step of loading: a tensor was read, a graph was captured, a phase has ended. Any thread may call it."""
    global _num_steps
    _num_steps += 1  # if two threads count at once, one step is lost; the number has changed all the same


def num_steps() -> int:
    """Number of steps so far. It counts none of a long step's parts, which `Activity` shows."""
    return _num_steps


class Activity:
    """Shows whether a process moves anything: pages of mapped files that come into memory, bytes that it reads and writes, and of
    this process also the work of its children.

    Weights come as pages of mapped files. Compiled kernels and downloads are written to files. Children, which compile and
    tokenise, compute nothing while they wait. Where /proc is missing, or shows nothing of the process, there is no movement.
    """

    def __init__(self, pid: int | None = None) -> None:
        """pid: None is this process"""
        self._folder = Path("/proc", "self" if pid is None else str(pid))
        self._is_self, self._own_bytes = pid is None, 0
        self._before: list[int] = []

    def moved(self) -> bool:
        """Whether there was a movement since the last call that found one; the first call finds one."""
        try:
            now = self._look()
        except (OSError, ValueError, IndexError, KeyError):
            return False
        # What has become less, as memory that the system takes back, is counted from there.
        self._before = [min(pair) for pair in zip(self._before, now, strict=False)]
        least = (1, READ_BYTES, WRITTEN_BYTES, RESIDENT_BYTES // _PAGE_BYTES, _TICKS)
        if self._before and all(new - old < much for new, old, much in zip(now, self._before, least, strict=True)):
            return False
        self._before = now
        return True

    def _look(self) -> list[int]:
        """Page faults that waited for a disk; bytes read, without those of this function; bytes written; pages in memory, which
        alone show what is mapped from a file system in user space; clock ticks that the children have computed."""
        faults, resident = int(_fields(self._read("stat"))[9]), int(self._read("statm").split()[1])
        children = self._children_ticks() if self._is_self else 0
        own_bytes = self._own_bytes
        totals = dict(line.split(": ") for line in self._read("io").splitlines())
        return [faults, int(totals["rchar"]) - own_bytes, int(totals["wchar"]), resident, children]

    def _children_ticks(self) -> int:
        total = 0
        for listed in self._folder.glob("task/*/children"):
            with suppress(OSError, ValueError, IndexError):  # a thread or a child has ended meanwhile
                for child in self._read(str(listed)).split():
                    total += sum(map(int, _fields(self._read(f"/proc/{child}/stat"))[11:13]))
        return total

    def _read(self, name: str) -> str:
        text = (self._folder / name).read_text(encoding="ascii", errors="replace")
        self._own_bytes += len(text) if self._is_self else 0
        return text


def _fields(stat: str) -> list[str]:
    """Fields of /proc/PID/stat, from the state on: a name, which may hold anything, precedes it."""
    return stat.rpartition(")")[2].split()


_PAGE_BYTES, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
