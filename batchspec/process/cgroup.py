"""The control groups around this process. The limits of all of them hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """The folders of the group of this process and of those around it, from the inside out.

    root        where the groups are mounted
    membership  the file that names the group of this process; without it only `root` itself is known
    """
    own = "/"
    with suppress(OSError):
        own = next((line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")), own)
    folder = root / own.strip("/")
    return (place for place in (folder, *folder.parents) if place.is_relative_to(root))


def free_memory_of_cgroups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process may still allocate within the limits of its groups; None without a limit.

    Of groups of version 1 only `root`'s limit is known: in a container that is its own.
    """
    found = []
    for place in cgroups(root, membership):
        with suppress(OSError, ValueError):  # `max` is no limit
            found.append(int((place / "memory.max").read_text()) - int((place / "memory.current").read_text()))
    with suppress(OSError, ValueError):
        limit, used = (int((root / "memory" / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
        found.append(limit - used)  # without a limit it is about 2**63
    return min(found, default=None)
