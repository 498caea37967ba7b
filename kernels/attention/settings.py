"""Launch settings of verify attention by shape: tiles, blocks, warps, stages, and how finely the work is split.

They change results by rounding only. `python -m batchspec.kernels.benchmarks verify_attention --sweep` compares the times of
these settings and others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchspec.kernels.attention.ordered_step import PART, block_of
from batchspec.kernels.attention.work_list import WorkShape
from batchspec.kernels.common.card import BARRIER_BYTES, Card

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_QUERIES = 64
"""Maximum number of queries of a row; longer rows are a prefill."""
SAMPLES = 8
"""Expected number of rows in a group with a shared prefix."""


@dataclass(frozen=True, slots=True)
class Config:
    """Keys that are read at once, warps of a program, pipeline stages, and programs that run at once on an SM."""

    block: int
    num_warps: int
    num_stages: int
    per_sm: int = 3


MEASURED_SHARED = 228 << 10
"""Shared memory of an SM of the cards for which `per_sm` holds."""


def config_of(
    head_dim: int, tile: int, dtype: torch.dtype, card: Card, *, fp8: bool = False, crowded: bool = False
) -> Config:
    """Settings for a head size and a number of (query, head) pairs in a tile: the fastest measured ones, with as many stages and
    programs as fit into the card's shared memory.

    dtype    of the queries
    fp8      K and V are in e4m3
    crowded  `AttentionWork.crowded`; the block does not depend on it, because it is chosen before the work list is made
    """
    config = _fp8_config_of(head_dim, tile, dtype) if fp8 else _plain_config_of(head_dim, tile, dtype, crowded)
    width = max(16, 1 << (head_dim - 1).bit_length())
    stage_bytes = 2 * config.block * width * (1 if fp8 else dtype.itemsize)
    other_bytes = tile * (width + config.block) * dtype.itemsize  # queries, and weights of a block of keys
    stages = card.stages_that_fit(config.num_stages, stage_bytes, other_bytes)
    if stages == config.num_stages and card.sm_shared_bytes >= MEASURED_SHARED:
        return config
    most = card.sm_shared_bytes // (stages * stage_bytes + other_bytes + BARRIER_BYTES)
    return replace(config, num_stages=stages, per_sm=max(1, min(config.per_sm, most)))


def _plain_config_of(head_dim: int, tile: int, dtype: torch.dtype, crowded: bool) -> Config:
    """The fastest settings on an H200; `main` of verify_attention times others too.

    per_sm follows from the registers and the shared memory that Triton 3.9 uses for these kernels on sm_90. With heads of 64 a
    program reads so little at a time that, with several of them waiting for each multiprocessor, fewer warps are faster: they
    need not wait for each other. With one program a slot they take longer, because each program then does.
    """
    if dtype == torch.float32:  # products without tensor cores need many registers
        return Config(32, 8, 2, 4) if head_dim <= 128 else Config(16, 8, 2, 3 if head_dim <= 256 else 1)
    if head_dim > 256:  # not measured: nothing spills, and two programs fit on a multiprocessor
        return Config(16, 4, 3, 2)
    if head_dim > 128:
        return Config(32, 4, 3, 3 if tile <= 16 else 2) if tile <= 32 else Config(32, 8, 3, 1)
    if tile >= 128:
        return Config(64, 8, 3, 2 if head_dim <= 64 else 1)
    if head_dim > 64:
        return Config(64, 4, 3, 3 if tile <= 16 else 2)
    if crowded and tile <= 32:
        return Config(64, 1, 2, 6) if tile <= 16 else Config(64, 2, 3, 4)
    return Config(64, 4, 3, {16: 6, 32: 5}.get(tile, 3))


def _fp8_config_of(head_dim: int, tile: int, dtype: torch.dtype) -> Config:
    """The same over e4m3 K/V, `dtype` that of the queries; not measured yet.

    Chosen for the fewest instructions per key that Triton 3.6 generates; per_sm follows from the registers. With heads of 64 and
    a tile of 32, Triton gives every warp all keys, so that with more than two warps the conversions of keys would be repeated.
    """
    if dtype == torch.float32:
        return _plain_config_of(head_dim, tile, dtype, crowded=False)
    if head_dim > 256:
        return Config(32, 4, 3, 2) if tile <= 16 else Config(32, 8, 2, 1)
    if head_dim > 128:
        return Config(32, 4, 3, 3) if tile <= 32 else Config(32, 8, 3, 1)
    if head_dim > 64:
        return Config(64, 4, 3, {16: 4, 32: 3}.get(tile, 2))
    return {16: Config(64, 4, 3, 5), 32: Config(64, 2, 3, 6), 64: Config(64, 4, 3, 3)}.get(tile, Config(64, 8, 3, 1))


def tile_of(head_dim: int, lanes: int, dtype: torch.dtype) -> int:
    """Number of (query, head) pairs in a program's tile, for a row or a group with `lanes` pairs."""
    most = 16 if dtype == torch.float32 else 128 if head_dim <= 64 else 64 if head_dim <= 256 else 32
    return min(most, max(16, 1 << (lanes - 1).bit_length()))


def work_shape(
    *,
    num_rows: int,
    max_q: int,
    max_kv: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    card: Card,
    window: int = 0,
    sink: int = 0,
    fp8: bool = False,
) -> WorkShape:
    """How to split the work of such a batch on a card. dtype is that of the queries; fp8: K/V in e4m3."""
    lanes = max_q * (num_heads // kv_heads)
    tile, group_tile = tile_of(head_dim, lanes, dtype), tile_of(head_dim, min(num_rows, SAMPLES) * lanes, dtype)
    config, group_config = (config_of(head_dim, own, dtype, card, fp8=fp8) for own in (tile, group_tile))
    return WorkShape(
        max_q=max_q, max_kv=max_kv, kv_heads=kv_heads, heads_per_kv=num_heads // kv_heads, page_size=page_size,
        window=window, sink=sink if window else 0, tile=tile, block=config.block,
        group_tile=group_tile, group_block=group_config.block, programs=card.num_sms * config.per_sm,
        group_programs=card.num_sms * group_config.per_sm,
    )


def ordered_work_shape(
    *, num_rows: int, max_q: int, max_kv: int, num_heads: int, kv_heads: int, head_dim: int, page_size: int, num_sms: int,
    window: int = 0,
) -> WorkShape:
    """The same for `ordered_attention`: the tile depends on the number of queries, and no bit depends on the tile."""
    heads = num_heads // kv_heads
    lanes, block = max_q * heads, block_of(head_dim)
    return WorkShape(
        max_q=max_q, max_kv=max_kv, kv_heads=kv_heads, heads_per_kv=heads, page_size=page_size, window=window,
        tile=ordered_tile_of(head_dim, lanes), block=block, group_tile=ordered_tile_of(head_dim, min(num_rows, SAMPLES) * lanes),
        group_block=block, programs=num_sms, group_programs=num_sms, part=PART,
    )


def ordered_tile_of(head_dim: int, lanes: int) -> int:
    """Number of (query, head) pairs in a program's tile, for a row or a group with `lanes` pairs."""
    return min(64 if head_dim <= 256 else 32, max(16, 1 << (lanes - 1).bit_length()))
