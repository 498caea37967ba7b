"""Compiles kernels several at a time, before they are launched.

Triton compiles a kernel when it is first launched, and launches come one after the other: on a machine that has compiled none,
the 100 to 200 kernels of a model take a third of a second each. Here dry runs find out which kernels will be launched
(`dry_run.py`), and they are compiled meanwhile, as launches would compile them, into Triton's caches in memory and on disk. A
compilation holds Python's global lock for most of its time. So each thread has a process that compiles into the cache on disk
(`compile_process.py`), from where the thread loads the kernel. The 92 kernels of gpt-oss-20b for sm_90 took 46 s on two cores
with one thread, 49 s with two threads and 17 s with two processes (Triton 3.9, 2026-11; with Triton 3.6 34 and 12 s).

Kernels that are not compiled ahead, for whatever reason, are compiled at their first launch. Several programs may share a cache
on disk, and may compile the same kernel at once: Triton writes files under other names and renames them.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from batchspec.kernels.common.compile_process import Compiler, Order
from batchspec.kernels.common.dry_run import dry_run

log = logging.getLogger(__name__)
MOST_THREADS, MOST_PROCESSES = 8, 16
"""Maximum number of threads that compile by themselves, and of threads with a process each."""
PROBE_S = 0.5
"""Maximum time to wait for the kernels of the probes, in seconds. Loading them from disk takes less."""


def num_threads(*, processes: bool) -> int:
    """Number of CPUs that this process may use, within the maximum for threads with or without processes."""
    try:
        num_cpus = len(os.sched_getaffinity(0))
    except OSError:  # the system does not tell
        num_cpus = os.cpu_count() or 1
    return min(MOST_PROCESSES if processes else MOST_THREADS, num_cpus)


def compile_ahead(
    runs: Sequence[Callable[[], object]], device: torch.device, *, num_probes: int, command: Sequence[str] = ()
) -> bool:
    """Compile the kernels that the runs would launch on the device, without launching them (`dry_run`).

    num_probes  number of runs to try first: if all their kernels are on disk, the other runs are left out
    command     starts a process of `compile_process.py`; empty: threads compile by themselves
    Returns whether all that were tried were found on disk. Raises nothing but AssertionError, as `dry_run`.
    """
    compiled: list[str] = []
    found, pool = True, ThreadPoolExecutor(num_threads(processes=bool(command)), "kernels")
    compilers = _Compilers(list(command), compiled)
    launchers = _Launchers(pool)
    try:
        with warnings.catch_warnings(), _told(compiled), _Compilations(launchers, compilers):
            for i, run in enumerate(runs):
                if i == num_probes and not wait(launchers.futures, PROBE_S).not_done and not compiled:
                    break
                if ended := dry_run(run, device):
                    found = False
                    log.info("kernels after this are compiled at their first launch: %s", ended)
        found = found and all(future.done() and not future.exception() for future in launchers.futures)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        compilers.close()
    return found and not compiled


class _Compilations(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode in which compilations go to an executor. Each of a kernel that is not on disk first goes to a process."""

    def __init__(self, launchers: _Launchers, compilers: _Compilers) -> None:
        super().__init__(launchers, ignore_errors=True)
        self._compilers = compilers

    def submit(self, key: str, compiling: Callable[[], Any], *others: Any) -> Any:
        return super().submit(key, partial(self._compilers.compile, key, compiling), *others)


class _Compilers:
    """Processes that compile, started as they are needed. compiled: gets the names of the kernels that they compile."""

    def __init__(self, command: list[str], compiled: list[str]) -> None:
        self._command, self._compiled = command, compiled
        self._idle: SimpleQueue[Compiler] = SimpleQueue()
        self._all: list[Compiler] = []
        self._lock, self._closed = Lock(), False

    def compile(self, key: str, compiling: Callable[[], Any]) -> Any:
        """The compiled kernel with this key of Triton's cache."""
        if self._command and not on_disk(key):
            with suppress(Exception):  # then it is compiled here
                order = order_of(compiling)
                compiler = self._take()
                if compiler.compile(pickle.dumps(order)):
                    self._compiled.append(order.name)
                self._idle.put(compiler)
        return compiling()

    def _take(self) -> Compiler:
        if not self._idle.empty():
            with suppress(Exception):
                return self._idle.get_nowait()
        with self._lock:
            if self._closed:
                raise RuntimeError("closed")
            made = Compiler(self._command)
            self._all.append(made)
        return made

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for compiler in self._all:
            compiler.close()


def on_disk(key: str) -> bool:
    """Whether Triton's cache on disk holds the kernel with this key. False for a cache of another kind."""
    folder = getattr(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    return folder is not None and any(Path(folder).glob("__grp__*"))


def order_of(compiling: Callable[[], Any]) -> Order:
    """What Triton's function would compile. Raises an exception of some kind if it is made in another way than in 3.6 to 3.9."""
    own = inspect.getclosurevars(compiling).nonlocals
    source = own["src"]
    function = source.fn.fn
    return Order(
        function.__module__, function.__name__, source.signature, source.constants, source.attrs, own["target"],
        own["options"].__dict__,
    )


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
