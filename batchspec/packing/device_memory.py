"""Memory of the device of a job, and of the host: free, and in all."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from batchspec.kernels.common.card import assumed_card
from batchspec.process.cgroup import free_memory_of_cgroups

CPU_SHARE = 0.6
"""Share of the host's free memory that may be used; other programs need the rest."""
CONTEXT_BYTES = 10**9
"""Memory of an assumed card that CUDA and libraries take; on an H200 of 150 GB about 148 are free for torch."""

UNTOLD_BYTES = 4 * 10**9
"""Taken for the free memory of a host without /proc: a low guess, which packing.memory_gb overrides."""


def free_memory(device: torch.device, *, weights: int = 0) -> int:
    """Bytes that are free on the device, minus `weights` bytes that are still to be loaded."""
    card = assumed_card()
    if device.type != "cuda":
        free = _free_host_memory()
    elif card is not None:
        free = card.memory_bytes - CONTEXT_BYTES
    else:
        free = torch.cuda.mem_get_info(device)[0]
    return max(0, free - weights)


def total_memory(device: torch.device) -> int:
    """Bytes of the device's whole memory."""
    card = assumed_card()
    if device.type != "cuda":
        return _host_memory("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if card is not None:
        return card.memory_bytes
    total: int = torch.cuda.mem_get_info(device)[1]
    return total


def host_share() -> float:
    """Bytes of main memory that the pages of jobs on the CPU may take together."""
    return CPU_SHARE * _free_host_memory()


def _free_host_memory() -> int:
    """What is available, or less if the limit of a control group is lower."""
    free = _host_memory("MemAvailable") or UNTOLD_BYTES
    left = free_memory_of_cgroups()
    return free if left is None else min(free, left)


def _host_memory(name: str) -> int:
    """Bytes of a line of /proc/meminfo; 0 if there is none. `sysconf` returns any number where the system does not answer it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0
