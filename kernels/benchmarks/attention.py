"""Attention of rounds over pages of K/V, and of prefill. Bytes of rounds are those of K and V, a shared prefix counted once.

`shared_prefixes` compares reading a prefix once with reading it for each of `samples` rows. Reading once saves the bytes of the
prefix for all rows of a group but one; its cost, in bytes, is what it saves less (by row - once) x the bandwidth of a copy
(`batchspec/cache/sharing_cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.settings import Config, work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.verify_attention import verify_attention, verify_attention_reference
from batchspec.kernels.attention.work_list import SharedPrefixes, WorkShape
from batchspec.kernels.benchmarks.case import Benchmark, Case, Ways, into, noise, unwritten
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.e4m3 import to_e4m3
from batchspec.kernels.common.graph_clock import Call

PAGE_SIZE = 16
MOST_COPIES, COPIES_NUMBERS = 8, 1 << 29
MODELS = {"8b": (32, 8, 128), "1b": (32, 8, 64), "135m": (9, 3, 64)}
"""Heads, K/V heads, size of a head."""

# Settings that `--sweep` tries, by what is attended.
WIDE_HEADS = (Config(64, 4, 3, 3), Config(32, 4, 4, 4), Config(32, 4, 5, 3), Config(64, 4, 2, 4), Config(128, 4, 2, 3))
WIDE_TILES = (Config(64, 4, 3, 2), Config(32, 4, 4, 3), Config(64, 4, 2, 3), Config(64, 8, 3, 2), Config(128, 8, 2, 2))
NARROW_HEADS = (Config(64, 4, 3, 6), Config(64, 4, 4, 4), Config(64, 2, 3, 6), Config(32, 2, 4, 8), Config(128, 4, 2, 4))
FP8 = (Config(64, 4, 3, 4), Config(64, 4, 4, 4), Config(64, 2, 3, 5), Config(64, 2, 4, 5), Config(32, 2, 5, 6),
       Config(32, 1, 4, 8), Config(128, 4, 2, 2), Config(128, 8, 3, 2))
GROUPS = (
    (32, Config(64, 4, 3, 2)), (64, Config(64, 4, 3, 2)), (64, Config(64, 4, 2, 2)), (64, Config(64, 8, 3, 1)),
    (128, Config(64, 8, 3, 1)), (128, Config(128, 8, 2, 1)),
)
"""Tile of a group of rows with a shared prefix, and the setting of its launch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows with K/V in pages anywhere; copies of the pages, so that none of them is in the L2 cache."""

    q: Tensor
    copies: Tensor
    scales: Tensor | None
    table: Tensor
    positions: Tensor
    starts: Tensor
    kv_len: Tensor
    sizes: dict[str, Any]
    """What the shape of the work depends on."""

    @classmethod
    def of(cls, model: str, lengths: Sequence[int], queries: int, kv: str, *, prefix: int = 0, samples: int = 1) -> Batch:
        """Groups of `samples` adjacent rows have their first `prefix` tokens in common. kv: `bf16` or `fp8`."""
        (heads, kv_heads, dim), rows, longest = MODELS[model], len(lengths), max(lengths)
        per_row = longest // PAGE_SIZE + 1
        table = torch.randperm(rows * per_row).int().view(rows, per_row) + 1
        table[:, : prefix // PAGE_SIZE] = table[torch.arange(rows) // samples * samples, : prefix // PAGE_SIZE]
        page_shape = (2, rows * per_row + 1, PAGE_SIZE, kv_heads, dim)
        num_copies = max(1, min(MOST_COPIES, COPIES_NUMBERS // math.prod(page_shape)))
        copies, scales = torch.empty(num_copies, *page_shape, dtype=torch.bfloat16).normal_(), None
        if kv == "fp8":
            scales = torch.full((2, kv_heads), 2.0**-6)
            copies = torch.stack([to_e4m3(copy, scales[:, None, None, :, None]) for copy in copies])
        kv_len = torch.tensor(lengths, dtype=torch.int32)
        return cls(
            q=noise(rows * queries, heads + 2 * kv_heads, dim)[:, :heads], copies=copies, scales=scales, table=table,
            positions=(kv_len[:, None] - queries + torch.arange(queries)).long().flatten(),
            starts=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32), kv_len=kv_len,
            sizes={
                "num_rows": rows, "max_q": queries, "max_kv": longest, "num_heads": heads, "kv_heads": kv_heads, "head_dim": dim,
                "page_size": PAGE_SIZE,
            },
        )

    def work_shape(self) -> WorkShape:
        return work_shape(**self.sizes, dtype=torch.bfloat16, fp8=self.scales is not None, card=card_of(self.q.device))

    def calls(
        self, shape: WorkShape, shared: SharedPrefixes | None = None, attend: Callable[..., None] = verify_attention,
        **configs: Config,
    ) -> list[Call]:
        """Attention and the merge of its parts, over each of the copies."""
        work = split_kv_schedule(self.starts, self.kv_len, self.positions, shape=shape, shared=shared)
        out, dim = unwritten(self.q).contiguous(), self.q.shape[2]
        parts = partials_of(work, dim)
        parts.out.fill_(torch.nan)
        parts.lse.fill_(torch.nan)
        rest, how = (self.table, self.positions, work, parts), {"scale": dim**-0.5, "out": out, "scales": self.scales}
        return [into(out, partial(attend, self.q, kv, *rest, **how, **configs)) for kv in self.copies]

    def reference(self) -> Tensor:
        work = split_kv_schedule(self.starts, self.kv_len, self.positions, shape=self.work_shape())
        out, scale = torch.empty_like(self.q).contiguous(), self.q.shape[2] ** -0.5
        where = (self.table, self.positions, work)
        verify_attention_reference(self.q, self.copies[0], *where, scale=scale, out=out, scales=self.scales)
        return out

    def num_bytes(self, tokens: int) -> int:
        """Bytes of K and V of so many tokens."""
        _, _, _, _, kv_heads, dim = self.copies.shape
        return 2 * tokens * kv_heads * dim * self.copies.itemsize

    def splits(self, shared: SharedPrefixes | None = None) -> dict[str, list[Call]]:
        """Other ways to cut the work."""
        shape = self.work_shape()
        found = {f"programs x{times}": replace(shape, programs=int(shape.programs * times)) for times in (0.5, 2.0)}
        found |= {f"chunk {chunk}": replace(shape, chunk=chunk) for chunk in (512, 2048)}
        return {name: self.calls(cut, shared) for name, cut in found.items()}


def verify_case(model: str, rows: int, keys: int | str, queries: int, kv: str) -> Case:
    """keys: of each row, or `lognormal`: from 512 to 32,768, with a median of 4,096."""
    lengths = [keys] * rows if isinstance(keys, int) else _lognormal(rows)
    batch = Batch.of(model, lengths, queries, kv)
    shape = batch.work_shape()

    def settings() -> Ways:
        wide = WIDE_TILES if shape.tile > 16 else WIDE_HEADS
        configs = (*(wide if model == "8b" else NARROW_HEADS), *(FP8 if kv == "fp8" else ()))
        sms = card_of(batch.q.device).num_sms
        found = {
            _shown(config): batch.calls(replace(shape, block=config.block, programs=sms * config.per_sm), config=config)
            for config in configs
        }
        return found | batch.splits()

    return Case(
        calls=batch.calls(shape), reference=batch.reference, num_bytes=batch.num_bytes(sum(lengths)), settings=settings
    )


def _lognormal(rows: int) -> list[int]:
    drawn = torch.randn(rows, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    lengths: list[int] = (drawn + math.log(4096)).exp().clamp(512, 32768).int().tolist()
    return lengths


def _shown(config: Config) -> str:
    return f"block {config.block} warps {config.num_warps} stages {config.num_stages} per SM {config.per_sm}"


def prefix_case(model: str, rows: int, keys: int, queries: int, prefix: int, samples: int, kv: str) -> Case:
    """Groups of `samples` rows have `prefix` tokens in common, which are read once."""
    batch = Batch.of(model, [keys] * rows, queries, kv, prefix=prefix, samples=samples)
    shape, groups, count = batch.work_shape(), rows // samples, partial(torch.arange, dtype=torch.int32)
    shared = SharedPrefixes(
        row_group=count(rows) // samples, row_order=count(rows), group_start=count(0, rows + 1, samples),
        shared_len=torch.full((groups,), prefix, dtype=torch.int32),
    )

    def settings() -> Ways:
        sms, found = card_of(batch.q.device).num_sms, batch.splits(shared)
        for tile, config in GROUPS:
            for waves in (1, 2):
                cut = replace(shape, group_tile=tile, group_block=config.block, group_programs=waves * sms * config.per_sm)
                found[f"group tile {tile} {_shown(config)} x{waves}"] = batch.calls(cut, shared, group_config=config)
        return found

    return Case(
        calls=batch.calls(shape, shared), reference=batch.reference, compare={"by row": batch.calls(shape)}, settings=settings,
        num_bytes=batch.num_bytes(rows * keys - (rows - groups) * prefix),
    )


ROUNDS = (
    *(("8b", 64, 8448, queries) for queries in (1, 2, 4, 6, 8)), ("8b", 16, 8448, 1), ("8b", 16, 8448, 4),
    *(("8b", 4, 8448, queries) for queries in (1, 4, 8)), ("8b", 256, 1024, 1), ("8b", 256, 1024, 2),
    ("8b", 64, "lognormal", 1), ("8b", 64, "lognormal", 4), ("1b", 256, 1280, 1), ("1b", 256, 1280, 2),
    *(("135m", 256, 768, queries) for queries in (1, 2, 3)),
)
PREFIXES = (
    ("135m", 256, 320, 4, 128, 2), ("135m", 256, 320, 4, 128, 8), ("135m", 256, 320, 4, 256, 2), ("135m", 256, 320, 4, 256, 32),
    ("135m", 256, 320, 1, 256, 2), ("135m", 256, 1280, 4, 1024, 2), ("135m", 256, 1280, 4, 1024, 4),
    ("135m", 256, 1280, 4, 1024, 256), ("135m", 64, 1280, 4, 1024, 8), ("1b", 256, 1024, 4, 256, 2), ("1b", 256, 1024, 4, 512, 8),
    ("8b", 256, 1024, 4, 128, 2), ("8b", 256, 1024, 4, 256, 4), ("8b", 64, 1024, 4, 512, 2), ("8b", 64, 1024, 4, 512, 8),
    ("8b", 64, 1024, 1, 512, 8), ("8b", 8, 8448, 4, 8192, 2), ("8b", 8, 8448, 4, 8192, 8), ("8b", 64, 8448, 1, 8192, 8),
    ("8b", 64, 8448, 4, 8192, 8),
)

ATTENTION = (
    Benchmark(
        "verify_attention", verify_case, "model rows keys queries kv",
        tuple((*shape, kv) for kv in ("bf16", "fp8") for shape in ROUNDS), ("135m", 2, 40, 2, "bf16"),
    ),
    Benchmark(
        "shared_prefixes", prefix_case, "model rows keys queries prefix samples kv",
        tuple((*shape, kv) for kv in ("bf16", "fp8") for shape in PREFIXES), ("135m", 4, 50, 2, 32, 2, "bf16"),
    ),
)
