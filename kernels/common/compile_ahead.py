"""Compiles kernels several at a time, before they are launched.

Triton compiles a kernel when it is first launched, and launches come one after the other: on a machine that has compiled none,
the 100 to 200 kernels of a model take a third of a second each. Here dry runs find out what is going to be launched
(`dry_run.py`), and threads compile it meanwhile, by the same calls as launches would, into Triton's cache in memory and on disk.
Compiling holds the interpreter's lock for a quarter of its time (Triton 3.6: the walk over a kernel's source; LLVM and ptxas do
not), so more than about eight threads gain little.

What a thread fails to compile, and what no dry run reaches, is compiled at its launch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from triton.runtime import driver

from batchspec.kernels.common.dry_run import dry_run

MOST_THREADS = 8
PROBE_S = 0.5
"""Loading the kernels of a few runs from the disk takes less than this."""


def num_threads() -> int:
    """The CPUs that this process may use, at most MOST_THREADS."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def compile_ahead(runs: Sequence[Callable[[], object]], device: torch.device, *, num_probes: int) -> bool:
    """Compile the kernels that the runs would launch on the device; nothing is launched or computed on it.

    num_probes  if the first ones have nothing to compile, since all their kernels are on disk, the other runs are left out
    Returns whether there was something to compile. Raises nothing but AssertionError, as `dry_run`.
    """
    compiled: list[str] = []
    pool = ThreadPoolExecutor(num_threads(), "kernels")
    launchers = _Launchers(pool)
    try:
        with warnings.catch_warnings(), _told(compiled), triton.AsyncCompileMode(launchers, ignore_errors=True):
            for i, run in enumerate(runs):
                if i == num_probes and not wait(launchers.futures, PROBE_S).not_done and not compiled:
                    break
                dry_run(run, device)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return bool(compiled)


class _Launchers:
    """The executor of compilations. It also makes what launches a kernel, which Triton 3.6 compiles by the C compiler."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.futures: list[Future[Any]] = []

    def submit(self, compiling: Callable[[], Any]) -> Future[Any]:
        def work() -> Any:
            kernel = compiling()
            with suppress(Exception):  # the launch makes it too
                driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        self.futures.append(self._pool.submit(work))
        return self.futures[-1]


@contextmanager
def _told(compiled: list[str]) -> Iterator[None]:
    """Within this block the names of kernels that were not in the cache on disk are added to the list."""
    knobs = triton.knobs.compilation
    before = knobs.listener

    def listener(**event: Any) -> None:
        if not event["cache_hit"]:
            compiled.append(event["metadata"]["name"])
        if before is not None:
            before(**event)

    knobs.listener = listener
    try:
        yield
    finally:
        knobs.listener = before
