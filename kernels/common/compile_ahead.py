"""Compiles kernels several at a time, before they are launched.

Triton compiles a kernel when it is first launched, and launches come one after the other: on a machine that has compiled none,
the 100 to 200 kernels of a model take a third of a second each. Here dry runs find out which kernels will be launched
(`dry_run.py`), and threads compile them meanwhile, by the same calls as launches would, into Triton's caches in memory and on
disk. In Triton 3.6 a compilation holds Python's global lock for a quarter of its time, while it walks a kernel's source; LLVM and
ptxas run without it. So more than about eight threads gain little.

Kernels that a thread fails to compile, or that no dry run reaches, are compiled at their first launch.
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
"""Maximum time to wait for the kernels of the probes, in seconds. Loading them from disk takes less."""


def num_threads() -> int:
    """Number of CPUs that this process may use, at most MOST_THREADS."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def compile_ahead(runs: Sequence[Callable[[], object]], device: torch.device, *, num_probes: int) -> bool:
    """Compile the kernels that the runs would launch on the device, without launching them (`dry_run`).

    num_probes  number of runs to try first: if all their kernels are on disk, the other runs are left out
    Returns whether any kernel was compiled. Raises nothing but AssertionError, as `dry_run`.
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
    """Executor for Triton's compilations. It also makes each kernel's launcher, which Triton 3.6 compiles with the C compiler."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.futures: list[Future[Any]] = []

    def submit(self, compiling: Callable[[], Any]) -> Future[Any]:
        def work() -> Any:
            kernel = compiling()
            with suppress(Exception):  # then the launch makes it
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
