"""Memory that ends with a tensor: a read after it ends the process."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="memory that may not be read is made for the interpreter")


def at_the_end_of_memory(tensor: Tensor) -> Tensor:
    """A copy after whose last byte comes a page that may not be read."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    after = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(after), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    found = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes).view(tensor.shape)
    return found.copy_(tensor)


def assert_reads_nothing_after_it(run: Callable[..., None], *args: object) -> None:
    """run, in a process of its own, ends well: with -11 it would have read after the end of memory."""
    child = multiprocessing.get_context("fork").Process(target=run, args=args)
    child.start()
    child.join(60)
    assert child.exitcode == 0
