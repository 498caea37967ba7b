"""Split-K: tiles of a product that several programs share. Each program writes its partial sum, and the last one to finish adds
them up in the order of K.

The bits are the same in every run, and no program waits. The finished parts of each tile are counted in a buffer of the current
stream; the last program resets the count to zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILES = 1 << 13
MAX_STREAMS = 64


@triton.jit
def sum_parts(
    partials, first_slot, num_parts, offset, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOT: tl.constexpr, AHEAD: tl.constexpr
):
    places = offset + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.range(0, num_parts, loop_unroll_factor=AHEAD):
        # Written by other SMs in this launch: bypass the L1 cache.
        total += tl.load(partials + (first_slot + part).to(tl.int64) * SLOT + places, cache_modifier=".cg")
    return total


@triton.jit
def join_parts(
    partials, arrived, tile, program, k_blocks, units_per_program, acc, up,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr = 1,
):
    """Whether this program has the complete tile, and the tile. It has it if it computed the tile alone or finished last.

    AHEAD: number of parts that are read before they are added: their latencies overlap, for as many more registers.
    """
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N * (2 if GATED else 1)
    complete = True
    first_program = tile * k_blocks // units_per_program
    num_parts = (tile * k_blocks + k_blocks - 1) // units_per_program - first_program + 1
    if num_parts > 1:
        # In the order of the units, tile + program increases with every part, so no two parts share a slot.
        own = partials + (tile + program).to(tl.int64) * SLOT
        places = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(own + places, acc)
        if GATED:
            tl.store(own + BLOCK_M * BLOCK_N + places, up)
        tl.debug_barrier()  # all threads have written before one thread counts the part
        complete = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if complete:
            tl.store(arrived + tile, 0)  # for the next launch
            slot = tile + first_program
            acc = sum_parts(partials, slot, num_parts, 0, BLOCK_M, BLOCK_N, SLOT, AHEAD)
            if GATED:
                up = sum_parts(partials, slot, num_parts, BLOCK_M * BLOCK_N, BLOCK_M, BLOCK_N, SLOT, AHEAD)
    return complete, acc, up


_counters: dict[torch.device, Tensor] = {}
_streams: dict[torch.device, list[int]] = {}


def counters(device: torch.device) -> Tensor:
    """int32 [MAX_TILES] number of finished parts of each tile, for the current stream; zero between launches."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("linear: its counters must not be part of a CUDA graph; run the product once before the capture")
        _counters[device] = torch.zeros(MAX_STREAMS, MAX_TILES, dtype=torch.int32, device=device)
        _streams[device] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams may use them before this stream has zeroed them
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    streams = _streams[device]
    if stream not in streams:
        if len(streams) == MAX_STREAMS:
            raise RuntimeError(f"linear: products split along K run on more than {MAX_STREAMS} streams; use fewer")
        streams.append(stream)
    return _counters[device][streams.index(stream)]
