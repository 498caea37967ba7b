"""Tiles of a product that several programs share: each leaves its part, whichever arrives last adds them up in the order of K.

Equal bits in every run, and nobody waits. How many parts of a tile have arrived is counted in a buffer of the stream's own, which
the last one sets back to zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILES = 1 << 13
MAX_STREAMS = 64


@triton.jit
def sum_parts(partials, first_slot, num_parts, offset, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOT: tl.constexpr):
    places = offset + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(num_parts):
        # Written by other SMs in this launch: past the first-level cache.
        total += tl.load(partials + (first_slot + part).to(tl.int64) * SLOT + places, cache_modifier=".cg")
    return total


@triton.jit
def join_parts(
    partials, arrived, tile, program, k_blocks, units_per_program, acc, up,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Whether this program has the whole tile now, and the tile: it was alone with it, or was the last of its programs."""
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N * (2 if GATED else 1)
    complete = True
    first_program = tile * k_blocks // units_per_program
    num_parts = (tile * k_blocks + k_blocks - 1) // units_per_program - first_program + 1
    if num_parts > 1:
        # tile + program grows with every piece of work in order, so no two pieces share a slot.
        own = partials + (tile + program).to(tl.int64) * SLOT
        places = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + places, acc)
        if GATED:
            tl.store(own + BLOCK_M * BLOCK_N + places, up)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        complete = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if complete:
            tl.store(arrived + tile, 0)  # for the next launch
            slot = tile + first_program
            acc = sum_parts(partials, slot, num_parts, 0, BLOCK_M, BLOCK_N, SLOT)
            if GATED:
                up = sum_parts(partials, slot, num_parts, BLOCK_M * BLOCK_N, BLOCK_M, BLOCK_N, SLOT)
    return complete, acc, up


_counters: dict[torch.device, Tensor] = {}
_streams: dict[torch.device, list[int]] = {}


def counters(device: torch.device) -> Tensor:
    """int32 [MAX_TILES] of the current stream, zero between launches: how many parts of each tile are written."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("linear: its counters must not be part of a CUDA graph; run the product once before the capture")
        _counters[device] = torch.zeros(MAX_STREAMS, MAX_TILES, dtype=torch.int32, device=device)
        _streams[device] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams may use them before this one has zeroed them
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    streams = _streams[device]
    if stream not in streams:
        if len(streams) == MAX_STREAMS:
            raise RuntimeError(f"linear: products cut along K run on more than {MAX_STREAMS} streams; use fewer")
        streams.append(stream)
    return _counters[device][streams.index(stream)]
