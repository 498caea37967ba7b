"""States and ends of processes that a test has started, by itself or by other processes."""

from __future__ import annotations

import time
from collections.abc import Collection
from multiprocessing.context import ForkServerProcess
from pathlib import Path


def state_of(pid: int) -> str:
    """One letter of proc(5): T is stopped; Z has ended, and its parent has not asked how. Empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def lives(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def until_stopped(process: ForkServerProcess) -> int:
    """Its number, once it has stopped itself; AssertionError if it ends."""
    assert process.pid is not None
    while process.exitcode is None and state_of(process.pid) != "T":
        time.sleep(0.005)
    assert process.exitcode is None, process.exitcode
    return process.pid


def wait_for_end(pids: Collection[int], within_s: float = 60.0) -> None:
    """Until none of these processes lives; AssertionError after so many seconds."""
    ends = time.monotonic() + within_s
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < ends, f"processes {left} outlive what has started them"
        time.sleep(0.01)


def ended(process: ForkServerProcess, within_s: float = 120.0) -> int:
    """Its exit code; AssertionError if it has none after so many seconds."""
    process.join(within_s)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode
