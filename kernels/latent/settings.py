"""Launch settings of latent attention in rounds, by shape. They change results by rounding only.

`python -m batchspec.kernels.benchmarks verify_latents --sweep` compares the times of these settings and others.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from batchspec.kernels.attention.settings import Config
from batchspec.kernels.attention.work_list import WorkShape
from batchspec.kernels.common.card import Card

LINES = 64
"""Lines of a tile on Hopper, whose tensor cores multiply as many at once."""
FEW_LINES = 32
"""Lines of a row up to which keys are the first axis of its scores on Hopper."""
SLICE = 128
"""Columns of a latent that are loaded at once on Hopper: a thread then has the addresses of few keys."""
CHUNK = 4096
"""Least number of keys of an item if the GPU is filled several times. 64 rows of 8192 keys take 14 % longer in items of 1,376
than in items of 4,096."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def latent_tile(lanes: int, dtype: torch.dtype, card: Card, *, fp8: bool = False) -> int:
    """Number of (query, head) pairs in a program's tile, for a row with `lanes` pairs. fp8: latents are in e4m3."""
    if dtype == torch.float32:  # products without tensor cores
        return 16
    if card.has_wgmma and (fp8 or lanes > FEW_LINES):
        return LINES
    tile: int = max(16, triton.next_power_of_2(lanes))
    return min(FEW_LINES, tile)


def keys_first(tile: int, dtype: torch.dtype, card: Card, *, fp8: bool = False) -> bool:
    """Whether keys are the first axis of scores (`latent_step.py`)."""
    return card.has_wgmma and dtype != torch.float32 and tile <= FEW_LINES and not fp8


def slice_of(width: int, dtype: torch.dtype, card: Card) -> int:
    """Columns that are loaded at once of latents of `width`, a power of two."""
    return min(width, SLICE) if card.has_wgmma and dtype != torch.float32 else width


def latent_config(latent_dim: int, tile: int, dtype: torch.dtype, card: Card, *, fp8: bool = False) -> Config:
    """Settings for this tile, with as many stages as fit into the card's shared memory; those of Hopper are the fastest measured.

    On Hopper the sums of 64 lines and 512 columns take 128 registers of each of 256 threads, and queries 72 of the 227 KiB of
    shared memory: there a block of 64 keys is read while another one is computed. With 32 lines, a warp group is enough.

    dtype  of the queries
    fp8    latents are in e4m3: a block of them is converted to `dtype` before it is multiplied
    """
    width = max(16, triton.next_power_of_2(latent_dim))
    if dtype == torch.float32:
        config = Config(16, 8, 2, 2)
    elif keys_first(tile, dtype, card, fp8=fp8):
        # two programs an SM, where their shared memory fits, compute while the other one waits
        config = Config(64, 4, 2, 2) if width <= 256 else Config(64, 4, 2, 1)
    else:
        config = Config(64 if tile == LINES else 32, 8, 4, 1)
    rope_bytes, row_bytes = 64 * dtype.itemsize, width * dtype.itemsize
    stage_bytes = config.block * (rope_bytes + (width + 4 if fp8 else row_bytes))
    other_bytes = tile * (width + 64 + config.block) * dtype.itemsize + (config.block * row_bytes if fp8 else 0)
    return replace(config, num_stages=card.stages_that_fit(config.num_stages, stage_bytes, other_bytes))


def latent_shape(
    *, num_rows: int, max_q: int, max_kv: int, num_heads: int, latent_dim: int, page_size: int, dtype: torch.dtype, card: Card,
    fp8: bool = False, window: int = 0, sink: int = 0,
) -> WorkShape:
    """How to split the work of such a batch on a card: as verify attention with one K/V head."""
    tile = latent_tile(max_q * num_heads, dtype, card, fp8=fp8)
    config = latent_config(latent_dim, tile, dtype, card, fp8=fp8)
    programs = card.num_sms * config.per_sm
    return WorkShape(
        max_q=max_q, max_kv=max_kv, kv_heads=1, heads_per_kv=num_heads, page_size=page_size, window=window,
        sink=sink if window else 0, tile=tile, block=config.block, programs=programs, group_programs=programs,
        chunk=CHUNK,
    )
