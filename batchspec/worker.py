"""One process of a run that has several: `python -m batchspec.worker NUMBER SHARING`, which workers.py starts.

NUMBER is for the reader of `ps`; SHARING is how many workers share the main memory that their K/V pages lie in, 1 on GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import IO

from batchspec.cli import guarded
from batchspec.compose import reported
from batchspec.config import from_json
from batchspec.run import run_here


def main() -> int:
    """Run the job whose configuration is the first line of standard input; returns the exit code."""
    config = from_json(sys.stdin.readline())
    sharing = int(sys.argv[2])
    if sharing > 1 and config.packing.memory_gb is None:
        from batchspec.packing.planner import host_share

        config.packing.memory_gb = host_share() / sharing / 1e9
    threading.Thread(target=_watch, args=(sys.stdin,), daemon=True).start()
    return reported(lambda: run_here(config))


def _watch(stdin: IO[str]) -> None:
    """The parent holds the other end open as long as it lives: without it the worker saves what it has and ends."""
    stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(guarded(main))
