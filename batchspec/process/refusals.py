"""Turns the error of a machine that refuses memory, a thread, a process or a file into one line that names the limit to raise."""

from __future__ import annotations

import errno
import resource
import sys
import traceback

from batchspec.errors import CapacityError
from batchspec.process.machine import soft_limit
from batchspec.process.out_of_memory import shortage

THREAD_SIGNS = ("can't start new thread", "unable to start watchdog thread", "Resource temporarily unavailable")
"""Parts of the messages of Python and of libraries when no thread or process can be started."""


def refusal(error: BaseException) -> CapacityError | None:
    """The error to show for one by which the machine refused memory, a thread, a process, an open file or a system call; None for
    any other."""
    code = error.errno if isinstance(error, OSError) else None
    said = " ".join(str(error).split()) or type(error).__name__
    from_library = is_panic(error) or isinstance(error, RuntimeError) or type(error).__name__ == "ArrowException"
    if code in (errno.EMFILE, errno.ENFILE):
        limit = soft_limit(resource.RLIMIT_NOFILE)
        what, cure = "no more files can be opened", f"raise the limit of {limit or 0:,} (ulimit -n)"
    elif code == errno.EAGAIN or ((from_library or code) and any(sign in said for sign in THREAD_SIGNS)):
        what = "no more threads or processes can be started"
        cure = "raise their limit (ulimit -u, pids.max of the control group), or allow clone3 (seccomp profile of the container),"
    elif shortage(error):
        what, cure = "out of memory", "free the machine's memory or raise the limit (ulimit -v, memory.max of the control group)"
    elif isinstance(error, OSError) and error.filename == sys.executable:
        what, cure = "no process can be started", "let this user execute that file"
    elif _is_refused_call(error, said):
        what, cure = f"the system refuses a call, {_place(error)}", "allow it (seccomp profile of the container)"
    else:
        return None
    return CapacityError(f"{what} ({said}); {cure} and run the same command again")


def raise_refusal(error: BaseException) -> None:
    """Of an error of a library about a file: raises the `refusal` if the machine is the cause. An OSError may mean the file."""
    if not isinstance(error, OSError) and (refused := refusal(error)) is not None:
        raise refused from error


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library in Rust, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _is_refused_call(error: BaseException, said: str) -> bool:
    """Whether the system refused a call as such: an error about a file names the file."""
    if isinstance(error, OSError):
        return error.errno in (errno.EPERM, errno.ENOSYS) and error.filename is None
    return is_panic(error) and "Operation not permitted" in said


def _place(error: BaseException) -> str:
    """The line of Python that made the call, such as `os.uname()`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"`{frames[-1].line or frames[-1].name}`" if frames else "unknown which"
