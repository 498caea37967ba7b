"""Recognises errors of running out of memory, of the host or of a GPU."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from batchspec.errors import CapacityError

SIGNS = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""Parts of the messages of torch, CUDA and its libraries when memory runs out."""

UNMAPPED = "failed to map segment from shared object"
"""Part of the loader's message about a library for which there is no memory, or, if "Operation not permitted" follows, whose file
may not be executed."""


@dataclass(slots=True)
class OutOfMemoryGuard:
    """Within this block an error of running out of memory ends the block without an exception; other exceptions pass."""

    message: str = ""
    """First line of the error; empty if memory did not run out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None or not shortage(error):
            return False
        self.message = _short((str(error).strip() or type(error).__name__).splitlines()[0])
        return True


def _short(line: str) -> str:
    """What torch says of a GPU, without the statistics of its own allocator: what is left is how much was asked for, how much the
    GPU has, and which other processes use it. A line of an error has room for that alone.
    """
    return line.partition(" Including non-PyTorch memory")[0].replace(" has a total capacity of ", " has ")


def shortage(error: BaseException) -> bool:
    """Whether it is an error of running out of memory."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, ImportError) and UNMAPPED in str(error) and "not permitted" not in str(error))
        or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)  # no process could be started
    )


@contextmanager
def within_memory(doing: str, advice: str) -> Iterator[None]:
    """Within this block running out of memory raises CapacityError: "out of memory while DOING (...); ADVICE"."""
    with OutOfMemoryGuard() as guard:
        yield
    if guard.message:
        raise CapacityError(f"out of memory while {doing} ({guard.message}); {advice}")


def admitting_rows() -> AbstractContextManager[None]:
    """`within_memory` for a block that admits rows before the engine is made: there is no batch yet that could be smaller."""
    return within_memory("rows were read and tokenised", "free the machine's memory and run the same command again")
