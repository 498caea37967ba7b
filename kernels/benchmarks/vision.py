"""Attention within packed images, as a vision encoder computes it."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from batchspec.kernels.attention.bidirectional import (
    USUAL,
    Settings,
    bidirectional_attention,
    bidirectional_attention_reference,
    tiles_of,
)
from batchspec.kernels.benchmarks.case import Benchmark, Case, Ways, copies, into, noise, unwritten
from batchspec.kernels.common.graph_clock import Call

SWEPT = tuple(
    Settings(tile, block, warps, stages)
    for tile, warps in ((64, 4), (128, 4), (128, 8), (256, 8)) for block in (32, 64, 128) for stages in (2, 3)
)  # fmt: skip


def within_case(images: int, patches: int, heads: int, dim: int) -> Case:
    """Images of so many patches each."""
    cu_seqlens = [0, *accumulate([patches] * images)]
    given = copies(lambda: noise(images * patches, 3, heads, dim), 2 * 3 * images * patches * heads * dim)
    scale = dim**-0.5

    def calls(settings: Settings = USUAL) -> list[Call]:
        found: list[Call] = []
        tiles = torch.tensor(tiles_of(cu_seqlens, settings), dtype=torch.int32)
        for qkv in given:
            q, k, v = qkv.unbind(1)
            out = unwritten(q).contiguous()
            found.append(into(out, partial(bidirectional_attention, q, k, v, tiles, scale=scale, out=out, settings=settings)))
        return found

    def reference() -> Tensor:
        q, k, v = given[0].unbind(1)
        out = torch.empty_like(q).contiguous()
        tiles = torch.tensor(tiles_of(cu_seqlens), dtype=torch.int32)
        bidirectional_attention_reference(q, k, v, tiles, scale=scale, out=out)
        return out

    def settings() -> Ways:
        return {f"tile {own.tile} block {own.block} warps {own.warps} stages {own.stages}": calls(own) for own in SWEPT}

    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    flash = [partial(_flash, qkv, bounds, patches) for qkv in given] if torch.cuda.is_available() else []
    return Case(
        calls=calls(), reference=reference, num_bytes=8.0 * images * patches * heads * dim,
        flop=4.0 * images * patches**2 * heads * dim, compare={"FlashAttention 2": flash} if flash else {}, settings=settings,
    )


def _flash(qkv: Tensor, bounds: Tensor, longest: int) -> Tensor:
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *qkv.unbind(1), bounds, bounds, longest, longest, 0.0, False, False
    )[0]
    return out


VISION = (
    Benchmark(
        "bidirectional_attention", within_case, "images patches heads dim",
        ((1, 8208, 16, 72), (2, 8208, 16, 72), (20, 784, 16, 72), (2, 8208, 16, 64), (20, 784, 16, 64)), (2, 40, 2, 72),
    ),
)
