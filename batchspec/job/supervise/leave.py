"""Ends a process that is one of several."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from batchspec.process.program import drop_unwritable


def leave(code: int) -> NoReturn:
    """End the process without clean-up: everything is written, and tearing down torch and CUDA takes seconds of the grace period,
    or hangs.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        drop_unwritable(stream)
    os._exit(code)
