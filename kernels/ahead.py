"""Compiling side by side: passes over host code in which kernels are asked for and none is launched.

A compiler thread holds Python's lock for a tenth of its time (these kernels for sm_90, Triton 3.9), so threads are enough: two
cores take half as long as one. Triton 3.6 has the C compiler make a launcher for every signature too (0.3 s each): so do they.

The passes find out which variants there are by running the very code that will launch them: sizes, strides, alignments and
constants are the real ones, values are not. What a kernel would have written is zero, and operations of torch take place 0
wherever they index by a tensor, so that nothing reads or writes outside of one.

Nothing depends on it: what a pass misses, and what fails to compile, is compiled when it is launched, and errors show there.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

THREADS = 16
"""At most; fewer where the process may use fewer cores."""
_LAUNCHED: type[Any] = JITFunction
"""What a kernel is; tests take the interpreter's."""
_OWN = __name__.partition(".")[0]
_ATEN = torch.ops.aten
_FRESH = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
_INDEX_AT = {
    **dict.fromkeys((_ATEN.embedding, _ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_, _ATEN.take), 1),
    **dict.fromkeys(
        (_ATEN.gather, _ATEN.index_select, _ATEN.index_add, _ATEN.index_add_, _ATEN.index_copy, _ATEN.index_copy_), 2
    ),
    **dict.fromkeys(
        (_ATEN.index_fill, _ATEN.index_fill_, _ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add, _ATEN.scatter_add_), 2
    ),
    **dict.fromkeys((_ATEN.scatter_reduce, _ATEN.scatter_reduce_), 2),
}
"""The argument that indexes. On a GPU a place that is not there ends the process's use of the card."""


def compile_ahead(passes: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Run the passes without launching a kernel of this package, and return once all variants that they asked for are compiled.

    passes  what will be run for real afterwards: no pass may need what another computes, and what they write besides must not
            matter. One that fails is left out, with a warning

    Does nothing where there is nothing to gain: on a CPU, under Triton's interpreter, and for a process with one core.
    """
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    if device.type != "cuda" or triton.knobs.runtime.interpret or threads < 2:
        return
    failures = ask_for(passes, threads)
    if failures:
        warnings.warn(
            f"kernels are compiled when they are launched, not ahead: {len(failures)} times {failures[0]!r}", stacklevel=2
        )


def ask_for(passes: Iterable[Callable[[], object]], threads: int) -> list[Exception]:
    """As `compile_ahead`, wherever Triton knows what to compile for; what kept it from asking for everything."""
    failures: list[Exception] = []
    asked: set[Any] = set()
    try:
        # A kernel that does not compile is none of the failures: its error belongs to the launch.
        with _Compilers(threads, "compile") as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for run in passes:
                try:
                    with asking(asked):
                        run()
                except Exception as failure:
                    failures.append(failure.with_traceback(None))  # which would keep the pass's tensors
    except Exception as failure:
        failures.append(failure.with_traceback(None))
    try:
        _settle(asked)
    except Exception as failure:
        failures.append(failure)
    return failures


@contextmanager
def asking(asked: set[Any]) -> Iterator[None]:
    """A launch in this thread of a kernel of this package asks Triton to compile it, no more; notes the kernel in `asked`."""
    launch, thread = _LAUNCHED.run, threading.get_ident()

    def ask(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() == thread and kernel.fn.__module__.partition(".")[0] == _OWN:
            asked.add(kernel)
            warmup = True
        return launch(kernel, *args, grid=grid, warmup=warmup, **options)

    _LAUNCHED.run = ask
    try:
        with _Values():
            yield
    finally:
        _LAUNCHED.run = launch


class _Compilers(ThreadPoolExecutor):
    """Compiles a kernel and makes its launcher."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_compiled, fn)


def _compiled(compile_: Callable[[], Any]) -> Any:
    kernel = compile_()
    with suppress(Exception):  # it is made again, or found, when the kernel is launched
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _settle(asked: set[Any]) -> None:
    """Put compiled kernels where Triton looks them up, and take out what failed: Triton 3.6 would raise its error for ever."""
    for kernel in asked:
        for found, *_ in kernel.device_caches.values():
            for key, compiled in list(found.items()):
                if not isinstance(compiled, triton.FutureKernel):
                    continue
                if compiled.kernel is None:
                    del found[key]
                else:
                    found[key] = compiled.kernel


class _Values(TorchDispatchMode):
    """New memory is zero, and so is every index."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _INDEX_AT:
            at = _INDEX_AT[packet]
            args = (*args[:at], _zeroed(args[at]), *args[at + 1 :])
        out = func(*args, **(kwargs or {}))
        return out.zero_() if packet in _FRESH else out


def _zeroed(index: Any) -> Any:
    if isinstance(index, list | tuple):
        return [_zeroed(one) for one in index]
    return torch.zeros_like(index) if isinstance(index, torch.Tensor) and index.dtype in (torch.int32, torch.int64) else index
