"""What Python's garbage collector must not do: traverse what imports made while they go on, and while rounds are launched or
captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTHON = 1000
"""More objects than Python itself has frozen when it starts: Python 3.12.1 375, 3.11 and 3.13 none. A program that freezes its
objects has thousands: those of an interpreter that has imported nothing are more than 5,000."""
_imports_frozen = False
"""What is frozen was frozen by `imports_frozen`: a run of an engine may freeze more, and unfreeze all of it."""


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Until the first run of an engine within this block has ended, garbage collections skip what exists at its beginning.

    Kernels that are compiled or loaded make much garbage: without this, every few of them the modules of torch are traversed.
    """
    global _imports_frozen
    if gc.get_freeze_count() > OF_PYTHON:
        yield
        return
    gc.freeze()
    _imports_frozen = True
    try:
        yield
    finally:
        _imports_frozen = False
        gc.unfreeze()


@contextmanager
def older_objects_frozen() -> Iterator[None]:
    """Within this block garbage collections skip the objects that exist already, torch's and the model's.

    A collection that traversed all of them took 0.1 to 0.17 s (SmolLM2-135M, H200), during which no round was launched.
    Where something is frozen already, by the host program or by another run, nothing is: Python can only unfreeze everything.
    """
    global _imports_frozen
    if gc.get_freeze_count() > OF_PYTHON and not _imports_frozen:
        yield
        return
    _imports_frozen = False
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Within this block there is none. Of imports it takes a fifth: they make objects that stay. A collection could free the
    graphs of another engine, and CUDA permits that in no capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
