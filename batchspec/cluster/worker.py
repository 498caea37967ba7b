"""One worker process: `python -m batchspec.cluster.worker NUMBER SHARING`, started by workers.py.

NUMBER is for readers of `ps`; SHARING is the number of workers whose K/V pages share the main memory (1 on GPUs).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading

from batchspec.cli import guarded
from batchspec.config.compose import reported
from batchspec.config.typed import from_json
from batchspec.run import run_here


def main() -> int:
    """Run the job whose configuration is the first line of standard input; returns the exit code."""
    config = from_json(sys.stdin.readline())
    sharing = int(sys.argv[2])
    if sharing > 1 and config.packing.memory_gb is None:
        from batchspec.packing.planner import host_share

        config.packing.memory_gb = host_share() / sharing / 1e9
    threading.Thread(target=_watch, daemon=True).start()
    return reported(lambda: run_here(config))


def _watch() -> None:
    """The parent holds the other end open while it lives; when it is gone the worker saves its work and ends."""
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def leave(code: int) -> None:
    """End the process without clean-up: everything is written, and tearing down torch and CUDA takes seconds of a grace time, or
    hangs.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(guarded(main))
