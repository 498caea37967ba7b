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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def latent_tile(lanes: int, dtype: torch.dtype, card: Card) -> int:
    """Number of (query, head) pairs in a program's tile, for a row with `lanes` pairs."""
    if dtype == torch.float32:  # products without tensor cores
        return 16
    return LINES if card.has_wgmma else min(32, max(16, triton.next_power_of_2(lanes)))


def latent_config(latent_dim: int, tile: int, dtype: torch.dtype, card: Card) -> Config:
    """Settings for this tile, with as many stages as fit into the card's shared memory. Not measured.

    On Hopper the sums of 64 lines and 512 columns take 128 registers of each of 256 threads, and queries 72 of the 227 KiB of
    shared memory: there blocks of 32 keys leave room for three that are read while one is computed. With 64 keys there would be
    none, because Triton issues a load after the products of its step.
    """
    width = max(16, triton.next_power_of_2(latent_dim))
    if dtype == torch.float32:
        config = Config(16, 8, 2, 2)
    else:
        config = Config(64, 8, 3, 1) if tile == 64 and width <= 256 else Config(32, 8, 4, 1)
    stage_bytes = config.block * (width + 64) * dtype.itemsize
    other_bytes = tile * (width + 64 + config.block) * dtype.itemsize
    return replace(config, num_stages=card.stages_that_fit(config.num_stages, stage_bytes, other_bytes))


def latent_shape(
    *, num_rows: int, max_q: int, max_kv: int, num_heads: int, latent_dim: int, page_size: int, dtype: torch.dtype, card: Card,
    window: int = 0, sink: int = 0,
) -> WorkShape:
    """How to split the work of such a batch on a card: as verify attention with one K/V head."""
    tile = latent_tile(max_q * num_heads, dtype, card)
    config = latent_config(latent_dim, tile, dtype, card)
    programs = card.num_sms * config.per_sm
    return WorkShape(
        max_q=max_q, max_kv=max_kv, kv_heads=1, heads_per_kv=num_heads, page_size=page_size, window=window,
        sink=sink if window else 0, tile=tile, block=config.block, programs=programs, group_programs=programs,
    )
