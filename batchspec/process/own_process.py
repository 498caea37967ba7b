"""Guards what belongs to one process. A process that is forked from it gets a copy, which it must neither use nor close."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import ParamSpec

from batchspec.errors import EngineInUse

Given = ParamSpec("Given")


class OwnProcess:
    """The process in which this was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_this(self) -> bool:
        return self._pid == os.getpid()

    def check(self, what: str) -> None:
        """Raises EngineInUse in a fork. A fork has none of the threads that torch and polars wait for, and no GPU.

        what  belongs to the process
        """
        if not self.is_this():
            raise EngineInUse(
                f"{what} belongs to process {self._pid}, from which this one, {os.getpid()}, was forked; call it there (with "
                "datasets: map without num_proc), or start processes with multiprocessing's spawn and make an engine in each"
            )


def finalize_here(
    owner: object, function: Callable[Given, object], *args: Given.args, **named: Given.kwargs
) -> weakref.finalize[[], object]:
    """`weakref.finalize` that does nothing in a fork of this process, when it ends or drops its copy of `owner`."""
    own = OwnProcess()
    return weakref.finalize(owner, lambda: function(*args, **named) if own.is_this() else None)
