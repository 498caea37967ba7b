"""Whether loading a model makes progress: steps that this process counts, and the activity of any process, which /proc shows.

Loading takes a second or a day, depending on disks, networks and compilers. So its duration has no limit; only the time without
progress has one (`supervise/watchdog.py`). CPU time is not progress: a thread that polls a GPU uses it too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

READ_BYTES, WRITTEN_BYTES, RESIDENT_BYTES = 1 << 12, 1 << 18, 1 << 16
"""Fewer bytes are not progress. A process that hangs reads nothing, but it still writes progress lines, some kilobytes an hour,
and the memory of its other threads changes a little."""
_num_steps = 0


def count_step() -> None:
    """Count a step of loading: a tensor was read, a graph was captured, a phase has ended. Any thread may call it."""
    global _num_steps
    _num_steps += 1  # even if two threads count at once and one step is lost, the number has changed


def num_steps() -> int:
    """Number of steps so far. Within a long step only `Activity` shows progress."""
    return _num_steps


class Activity:
    """Detects progress of a process by page faults, resident memory, and bytes read and written; of this process also by the CPU
    time of its children.

    Weights are pages of mapped files. Compiled kernels and downloads are written to files. Children, which compile and tokenise,
    use no CPU time while they wait. If /proc is missing or does not show the process, no progress is found.
    """

    def __init__(self, pid: int | None = None) -> None:
        """pid: None is this process"""
        self._folder = Path("/proc", "self" if pid is None else str(pid))
        self._is_self, self._own_bytes = pid is None, 0
        self._before: list[int] = []

    def made_progress(self) -> bool:
        """Whether there was progress since the last call that found some; the first call finds some."""
        try:
            now = self._read_counters()
        except (OSError, ValueError, IndexError, KeyError):
            return False
        # A counter may fall: the system reclaims memory, children end. Progress is then counted from the lower value.
        self._before = [min(pair) for pair in zip(self._before, now, strict=False)]
        least = (1, READ_BYTES, WRITTEN_BYTES, RESIDENT_BYTES // _PAGE_BYTES, _TICKS)
        if self._before and all(new - old < much for new, old, much in zip(now, self._before, least, strict=True)):
            return False
        self._before = now
        return True

    def _read_counters(self) -> list[int]:
        """Major page faults; bytes read, without those that this method reads; bytes written; resident pages, which alone show
        reads of files that are mapped from a file system in user space; CPU time of the children in clock ticks."""
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
