"""How ranks of a group ended, in words, and which of them made the others end."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from batchspec.errors import RankLost

STATES = {
    "R": "runs", "S": "waits", "D": "waits for a device or a file system", "T": "was stopped by a signal",
    "t": "was stopped by a debugger",
}


def culprit(codes: Mapping[int, int | None], *, silent: Collection[int] = (), waited: Collection[int] = ()) -> int:
    """The rank that made the others end.

    Ranks that waited for it in vain end with RankLost's exit code, and so does a rank whose watchdog found no progress.

    codes   exit code of each rank, as from Popen; None: it did not end by itself
    silent  ranks whose process did not run when it was killed
    waited  ranks that waited for another one when they ended
    """
    usual = (0, RankLost.exit_code)

    def order(rank: int) -> tuple[bool, bool, bool, bool, bool, int]:
        code = codes[rank]
        return (
            code is None or code >= 0, code is None or code in usual, rank not in silent, rank in waited, code is not None, rank
        )

    return min(codes, key=order)


def ending(code: int) -> str:
    """How a process ended, for people: by its exit code as Popen has it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def state_of(pid: int) -> str:
    """What a process is doing, in words, by the letter of its state in /proc/PID/stat."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        letter = "?"
    return STATES.get(letter, f"is in state {letter}")
