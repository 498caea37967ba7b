"""Memory for pixels that processes share: blocks of equal size in a file without a name, which ends with the last process that
has it open."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 16 << 10
"""Bytes of a block. An image fills 1 to some hundred of them, and half a block of each is unused on average."""


class SharedBlocks:
    """Blocks 0 .. num_blocks-1. Memory is taken for those that were written, and kept. The caller decides who may write which
    one."""

    def __init__(self, fd: int, num_blocks: int) -> None:
        """fd: the open file, of another process's `create` too."""
        self.fd, self.num_blocks = fd, num_blocks
        self._blocks = np.frombuffer(mmap.mmap(fd, num_blocks * BLOCK), np.uint8).reshape(num_blocks, BLOCK)

    @classmethod
    def create(cls, num_blocks: int) -> SharedBlocks:
        """New ones. Raises OSError if the system refuses them."""
        fd = os.memfd_create("batchspec-pixels", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_blocks * BLOCK)
        return cls(fd, num_blocks)

    def write(self, blocks: Sequence[int], values: NDArray[np.uint8]) -> None:
        """Write uint8 values [n] to as many blocks as they fill (`blocks_of`)."""
        whole = len(values) // BLOCK
        self._blocks[blocks[:whole]] = values[: whole * BLOCK].reshape(whole, BLOCK)
        if rest := len(values) - whole * BLOCK:
            self._blocks[blocks[whole], :rest] = values[whole * BLOCK :]

    def read(self, blocks: Sequence[int], count: int) -> NDArray[np.uint8]:
        """A copy of `count` bytes that were written to these blocks."""
        return self._blocks[list(blocks)].reshape(-1)[:count]


def blocks_of(count: int) -> int:
    """Blocks that so many bytes fill."""
    return -(-count // BLOCK)
