"""Keeps Python's garbage collector from traversing modules and models during imports, launches of rounds and graph capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTHON = 1000
"""Up to this many frozen objects (`gc.get_freeze_count()`) are Python's own: 3.12.1 starts with 375, 3.11 and 3.13 with none. A
program that calls `gc.freeze()` has thousands: an interpreter that has imported nothing already has more than 5,000 objects."""
RARE = 20_000
"""Number of new objects after which garbage is collected during a run; with Python's default of 700 (3.12) it would be every few
rounds. The rows of a run have about as many objects. Almost none of them is garbage, because reference counts free them."""
_imports_frozen = False
"""Whether `imports_frozen` made the present freeze: then a run of an engine may freeze more, and unfreeze all of it."""


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Garbage collections skip the objects that exist at the start of this block, until the first run of an engine in it has
    ended.

    Compiling and loading kernels makes so much garbage that otherwise torch's modules would be traversed once every few kernels.
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
    """Within this block garbage collections are rare, and skip the objects that exist already, torch's and the model's.

    A collection that traversed all of them took 0.1 to 0.17 s (SmolLM2-135M, H200), during which no round was launched.
    If the host program or another run has frozen objects, this does nothing: Python can only unfreeze everything.
    """
    global _imports_frozen
    if not _imports_frozen and gc.get_freeze_count() > OF_PYTHON:  # counting half a million takes 15 ms
        yield
        return
    _imports_frozen = False
    gc.freeze()
    young, *older = gc.get_threshold()
    gc.set_threshold(young and max(young, RARE), *older)  # 0: the host program has switched collections off
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        gc.unfreeze()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Within this block no garbage is collected. During imports collections find little to free and take a fifth of the time;
    during a capture they could free the graphs of another engine, which CUDA forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
