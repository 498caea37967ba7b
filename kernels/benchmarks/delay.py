"""A launch that takes a given time, for checks of concurrency. The device reads that time, so replays of a graph can differ."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def delay_kernel(steps, scratch):
    for _ in range(tl.load(steps)):
        tl.atomic_add(scratch, 1)


def delay(steps: Tensor, scratch: Tensor) -> None:
    """Take about half a microsecond for each step. steps, scratch: int32 [1] each."""
    delay_kernel[(1,)](steps, scratch)
