"""What a machine may refuse to a whole program, asked for before libraries are imported: without it some crash, or print
thousands of lines, and say nothing about the cause.

Each check raises the error of Python that `refusal` (refusals.py) makes one line of.
"""

from __future__ import annotations

import os
import resource
import select
import threading

from batchspec.errors import CapacityError
from batchspec.process.machine import num_cpus, soft_limit
from batchspec.process.threads import start_thread

OTHER_THREADS = 12
"""Threads of the smallest run at its end, apart from the pool of polars, which has one per CPU."""
LEAST_ADDRESS_BYTES = 3 << 30
"""Address space without which no run ends: the smallest took 3.4 GB (2 CPUs, torch without CUDA). With less than 2.7 GB libraries
crashed."""


def check_machine() -> None:
    """Raises OSError if a call that polars needs is refused, and RuntimeError if the threads of a program cannot be started."""
    os.close(os.eventfd(0))
    select.epoll().close()
    over = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for number in range(num_cpus() + OTHER_THREADS):
            threads.append(start_thread(over.wait, f"preflight {number}"))
    finally:
        over.set()
        for thread in threads:
            thread.join()


def check_address_space() -> None:
    """Raises CapacityError if torch cannot be imported within the limit of address space."""
    limit = soft_limit(resource.RLIMIT_AS)
    if limit is not None and limit < LEAST_ADDRESS_BYTES:
        raise CapacityError(
            f"this process may use {limit / 2**30:.2f} GiB of address space, and the smallest run takes "
            f"{LEAST_ADDRESS_BYTES >> 30} GiB; raise the limit (ulimit -v) and run the same command again"
        )
