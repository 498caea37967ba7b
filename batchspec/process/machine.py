"""CPUs, cache folder and limits of this process, also where a container or a batch system hides what is usually known."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path


def num_cpus() -> int:
    """CPUs that this process may use; all of the machine if the system does not tell."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


def user_cache() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache. Raises FileNotFoundError for a user without home folder, such as a number in a container."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    with suppress(RuntimeError):
        return Path.home() / ".cache"
    raise FileNotFoundError("this user has no home folder; set HOME or XDG_CACHE_HOME")


def soft_limit(kind: int) -> int | None:
    """The limit that holds for this process; None: there is none, or the system does not tell. kind: of `resource.RLIMIT_...`"""
    with suppress(OSError):
        if (soft := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            return soft
    return None


def lower_limit(kind: int, value: int) -> None:
    """Limit this process to `value`, or to what it is limited to already if that is less. kind: of `resource.RLIMIT_...`"""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
