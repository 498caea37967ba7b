"""Starts threads."""

from __future__ import annotations

import mmap
import resource
import threading
from collections.abc import Callable

from batchspec.process.machine import soft_limit

STACK_BYTES = 8 << 20
"""Size of a thread's stack where it is not limited."""
START_BYTES = 8 << 20
"""Memory for what Python allocates in a new thread."""


def start_thread(target: Callable[[], object], name: str) -> threading.Thread:
    """A daemon thread that has started. Raises OSError or RuntimeError if the machine refuses memory or a thread.

    If a thread has memory for its stack alone, it ends before it tells that it has started, and `Thread.start` waits for ever
    (Python 3.11 to 3.13): so that memory is asked for first.
    """
    stack_bytes = soft_limit(resource.RLIMIT_STACK) or STACK_BYTES
    mmap.mmap(-1, stack_bytes + START_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
