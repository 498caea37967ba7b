"""Whether loading a model makes progress: steps that this process counts, and the activity of any process, which /proc shows.

Loading takes a second or a day, depending on disks, networks and compilers. So its duration has no limit; only the time without
progress has one (`job/supervise/watchdog.py`). CPU time is not progress: a thread that polls a GPU uses it too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchspec.process.threads import start_thread

WINDOW_S = 60.0
"""Seconds within which activity must add up to the thresholds below. What a process that hangs still does never does."""
READ_BYTES, WRITTEN_BYTES, RESIDENT_BYTES = 1 << 12, 1 << 18, 1 << 16
"""Thresholds within WINDOW_S. A process that hangs reads almost nothing, and the memory of its other threads changes a little.
But it still draws its progress bar, up to 200 B/s, and writes heartbeats, up to 600 B/s with hundreds of open shards: 48 KB in
WINDOW_S. A slow download that writes 10 KB/s writes 600 KB in it."""
LOOK_S = 5.0
"""Seconds between two readings of the sizes of a download's files."""
PAUSE_S = 10.0
"""A thread that watches for progress and did not run for so many seconds more than usual was stopped itself, with its process or
with the whole machine: it then gives whatever it watches the whole time limit again."""
_num_steps = 0


def count_step() -> None:
    """Count a step of loading: a tensor was read, a graph was captured, a phase has ended. Any thread may call it."""
    global _num_steps
    _num_steps += 1  # even if two threads count at once and one step is lost, the number has changed


def num_steps() -> int:
    """Number of steps so far. Within a long step only `Activity` shows progress."""
    return _num_steps


@contextmanager
def steps_of_download(folder: Path) -> Iterator[None]:
    """Within this block, count a step when a file in `folder` appears, changes its size or disappears.

    The download may be another process's: the hub's client then waits for a file lock and itself reads and writes nothing. If the
    process that holds the lock hangs too, its file stops growing, and no step is counted. The folder may be missing.
    """
    over = threading.Event()

    def look() -> None:
        before = _sizes(folder)
        while not over.wait(LOOK_S):
            now = _sizes(folder)
            if now != before:
                count_step()
            before = now

    thread = start_thread(look, "download")
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_S)  # not for ever: a file system may hang


def _sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """File -> size and blocks on the disk, which alone grow if the file gets its final size first."""
    sizes = {}
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):  # it is complete meanwhile, and has another name
                found = file.stat()
                sizes[file.name] = found.st_size, found.st_blocks
    return sizes


class Activity:
    """Detects progress of a process by page faults, resident memory, and bytes read and written; of this process also by the CPU
    time of its descendants.

    Weights are pages of mapped files. Compiled kernels and downloads are written to files. Descendants, which compile and
    tokenise, use no CPU time while they wait. If /proc is missing or does not show the process, no progress is found.
    """

    def __init__(self, pid: int | None = None) -> None:
        """pid: None is this process"""
        self._folder = Path("/proc", "self" if pid is None else str(pid))
        self._is_self, self._own_bytes = pid is None, 0
        self._before: list[int] = []
        self._began_at = 0.0

    def made_progress(self) -> bool:
        """Whether there was progress since the last call that found some, within WINDOW_S; the first call finds some. Call it at
        least once in WINDOW_S: what was counted between two calls always counts as within WINDOW_S."""
        try:
            now = self._read_counters()
        except (OSError, ValueError, IndexError, KeyError):
            return False
        # A counter may fall: the system reclaims memory, children end. Progress is then counted from the lower value.
        self._before = [min(pair) for pair in zip(self._before, now, strict=False)]
        least = (1, READ_BYTES, WRITTEN_BYTES, RESIDENT_BYTES // _PAGE_BYTES, _TICKS)
        found = not self._before or any(new - old >= much for new, old, much in zip(now, self._before, least, strict=True))
        if found or time.monotonic() - self._began_at >= WINDOW_S:
            self._before, self._began_at = now, time.monotonic()
        return found

    def _read_counters(self) -> list[int]:
        """Major page faults; bytes read, without those that this method reads; bytes written; resident pages, which alone show
        reads of files that are mapped from a file system in user space; CPU time of the descendants in clock ticks."""
        stat, resident = _fields(self._read("stat")), int(self._read("statm").split()[1])
        faults, descendants = int(stat[9]), 0
        if self._is_self:
            descendants = _ticks(stat[13:15]) + self._descendants_ticks(self._folder)
        own_bytes = self._own_bytes
        totals = dict(line.split(": ") for line in self._read("io").splitlines())
        return [faults, int(totals["rchar"]) - own_bytes, int(totals["wchar"]), resident, descendants]

    def _descendants_ticks(self, parent: Path) -> int:
        """CPU time in clock ticks of all processes that descend from the one with the folder `parent` in /proc.

        That of a process that has ended is included if its own parent has waited for it, because the system adds it to the
        parent's. Compilers may end within a second: `nvcc` waits for them, and `ninja` for `nvcc`.
        """
        total = 0
        for listed in parent.glob("task/*/children"):
            with suppress(OSError):  # a thread has ended meanwhile
                for child in self._read(str(listed)).split():
                    with suppress(OSError, ValueError, IndexError):  # a child has ended meanwhile
                        total += _ticks(_fields(self._read(f"/proc/{child}/stat"))[11:15])
                        total += self._descendants_ticks(Path("/proc", child))
        return total

    def _read(self, name: str) -> str:
        text = (self._folder / name).read_text(encoding="ascii", errors="replace")
        self._own_bytes += len(text) if self._is_self else 0
        return text


def _fields(stat: str) -> list[str]:
    """Fields of /proc/PID/stat, from the state on: a name, which may hold anything, precedes it."""
    return stat.rpartition(")")[2].split()


def _ticks(fields: list[str]) -> int:
    return sum(map(int, fields))


_PAGE_BYTES, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
