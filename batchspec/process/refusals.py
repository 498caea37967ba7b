"""Turns the error of a machine that refuses memory, a thread, a process or a file into one line that names the limit to raise."""

from __future__ import annotations

import errno
import resource

from batchspec.errors import CapacityError
from batchspec.process.out_of_memory import shortage

THREAD_SIGNS = ("can't start new thread", "Resource temporarily unavailable")
"""Parts of the messages of Python and of libraries when no thread or process can be started."""


def refusal(error: Exception) -> CapacityError | None:
    """The error to show for one by which the machine refused memory, a thread, a process or an open file; None for any other."""
    code = error.errno if isinstance(error, OSError) else None
    said = " ".join(str(error).split()) or type(error).__name__
    if code in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        what, cure = "no more files can be opened", f"raise the limit of {limit:,} (ulimit -n)"
    elif code == errno.EAGAIN or (isinstance(error, OSError | RuntimeError) and any(sign in said for sign in THREAD_SIGNS)):
        what, cure = "no more threads or processes can be started", "raise their limit (ulimit -u, pids.max of the control group)"
    elif shortage(error):
        what, cure = "out of memory", "free the machine's memory or raise the limit (ulimit -v, memory.max of the control group)"
    else:
        return None
    return CapacityError(f"{what} ({said}); {cure} and run the same command again")
