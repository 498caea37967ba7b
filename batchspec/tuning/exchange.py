"""Which way an exchange between GPUs takes, by the number of ranks and its bytes.

A table and no measurement at run time: all ranks must take the same way. No choice changes the bits of a sum. From reductions
without a norm, in CUDA graphs on 2 and 4 H200 joined all to all by NVLink, without multicast.
"""

from __future__ import annotations

ONE_SHOT_BYTES = {2: 1 << 62, 4: 192 << 10, 8: 96 << 10}
"""Up to so many bytes each rank reads everything. Two ranks read as much in two shots as in one, with a barrier more. For 8 ranks
half of what was measured with 4."""
LIBRARY_BYTES = {2: 16 << 20, 4: 32 << 20, 8: 32 << 20}
"""Beyond so many bytes prefill takes the library, and rounds do beyond their buffers, which are as large as their largest sum."""


def takes_two_shots(ranks: int, num_bytes: int) -> bool:
    """Whether kernels add up tensors of so many bytes in two shots. ranks: 2, 4 or 8."""
    return num_bytes > ONE_SHOT_BYTES[ranks]
