"""How many threads torch computes with on a CPU that other processes use too.

Threads of a product wait for each other. If one of them has to wait for a CPU, all others wait for it, so a machine that is busy
computes many times faster with as many threads as it has CPUs free: one thread gave 15 to 22 tok/s and two gave 2.0 on 2 cores
with a load of 17 (SmolLM2-135M's shape, fp32, 8 rows).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from batchspec.process.cgroup import MEMBERSHIP, ROOT, cgroups

WATCHED_S = 0.25
"""Seconds in which the use of the CPUs is measured: 25 ticks of the kernel's clock."""
GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which the user, or the parent of several workers, sets the number."""


def limit_threads() -> str:
    """Lower the number of torch's threads to the CPUs that are free; returns one line about it, empty if nothing changed.

    Does nothing if the environment sets the number. A number that is lower already is kept.
    """
    usual = torch.get_num_threads()
    if usual == 1 or any(name in os.environ for name in GIVEN):
        return ""
    used, quota = cpus_in_use(WATCHED_S), cpu_quota()
    number = num_threads(usual, used, quota)
    if number == usual:
        return ""
    torch.set_num_threads(number)
    limited = quota is not None and int(quota) <= number
    why = f"its cgroup has {quota:.1f} CPUs" if limited else f"other processes use {used:.1f} CPUs of {os.cpu_count()}"
    return f"{number} of {usual} threads compute, because {why}; OMP_NUM_THREADS={usual} sets another number"


def num_threads(usual: int, used: float, quota: float | None) -> int:
    """The number of threads: at least one, and at most `usual`, the free CPUs and the quota.

    used   CPUs of the machine that other processes use
    quota  CPUs that this process may use; None: no limit
    """
    free = round((os.cpu_count() or 1) - used)
    return max(1, min(usual, free, usual if quota is None else int(quota)))


def cpus_in_use(seconds: float) -> float:
    """CPUs of the machine that other processes use, on average of the next `seconds`; 0 if the kernel does not say it."""
    begin, own, at = _busy_s(), time.process_time(), time.monotonic()
    time.sleep(seconds)
    return max(0.0, (_busy_s() - begin - (time.process_time() - own)) / (time.monotonic() - at))


def _busy_s() -> float:
    """CPU seconds that all processes have used since the machine started."""
    with suppress(OSError, ValueError, IndexError):
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs that the cgroup of this process, or one around it, may use at a time; None without a limit."""
    found = []
    for place in cgroups(root, membership):
        with suppress(OSError, ValueError, ZeroDivisionError):  # `max 100000` is no limit
            quota, period = map(int, (place / "cpu.max").read_text().split())
            found.append(quota / period)
    with suppress(OSError, ValueError, ZeroDivisionError):  # version 1
        quota, period = (int((root / "cpu" / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        found += [quota / period] * (quota > 0)
    return min(found, default=None)
