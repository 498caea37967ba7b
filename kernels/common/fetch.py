"""Asks the L2 cache to fetch bytes that a program will read soon, without waiting for them and without registers for them.

A kernel that starts early (`pdl.py`) asks for its weights before it waits for earlier launches, so that they arrive meanwhile.
Source: PTX ISA, cp.async.bulk.prefetch; CUTLASS example 63 fetches weights in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch_to_l2(begin, num_bytes):
    """One thread of the program asks for num_bytes from the pointer `begin` on; both are multiples of 16. Needs Hopper."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r", [begin, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )
