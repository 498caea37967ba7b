"""How a process of several ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process without clean-up: everything is written, and tearing down torch and CUDA takes seconds of a grace time, or
    hangs.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
