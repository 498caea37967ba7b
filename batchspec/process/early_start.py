"""Starts slow work of a GPU job early, in threads, while this process imports modules and reads its input: the CUDA context and
Triton's checksum of its compiler. Both mostly run without the interpreter's lock.

Work that fails here is done again where it is needed, and fails there with a message.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from batchspec.process.threads import start_thread

_begun: set[str] = set()


def one_gpu() -> bool:
    """Whether a process started here would see exactly one GPU, as far as this can be known without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = num_nodes()
    return nodes > 0 and (nodes if named is None else sum(1 for name in named.split(",") if name.strip())) == 1


def num_nodes() -> int:
    """Number of GPU device files in this machine or container."""
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))


def begin_context() -> None:
    """Have the driver create the primary context of the first visible GPU, which torch then uses; it takes about a second."""
    if num_nodes():
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, but torch would be too late
        _begin("context", _make_context)


def begin_compiler_hash() -> None:
    """Have Triton compute the checksum of its compiler, part of every kernel's name in its cache: it reads some 400 MB.

    Call it once Triton is imported.
    """
    if num_nodes():
        from batchspec.kernels.common.compiler_hash import compiler_hash

        _begin("compiler hash", compiler_hash)


def _begin(name: str, work: Callable[[], object]) -> None:
    if name not in _begun:
        _begun.add(name)
        start_thread(partial(_quietly, work), name)


def _quietly(work: Callable[[], object]) -> None:
    with suppress(Exception):
        work()


def _make_context() -> None:
    """By ctypes, which releases the interpreter's lock during calls."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
