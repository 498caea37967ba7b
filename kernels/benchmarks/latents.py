"""Latent attention of rounds. Bytes are those of the latents, operations those of the (query, head) pairs without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.settings import Config
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.work_list import WorkShape
from batchspec.kernels.benchmarks.case import Benchmark, Case, Ways, into, noise, unwritten
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.latent.e4m3_latents import Fp8Latents, token_bytes
from batchspec.kernels.latent.settings import latent_shape
from batchspec.kernels.latent.verify_latents import verify_latents, verify_latents_reference

PAGE_SIZE = 16
MOST_COPIES, COPIES_NUMBERS = 8, 1 << 29
MODELS = {
    "glm-4.7-flash": (20, 512, 64), "mistral-small-4": (32, 256, 64), "16-heads": (16, 512, 64), "32-heads": (32, 512, 64),
    "deepseek-v3": (128, 512, 64), "tiny": (3, 32, 16),
}
"""Heads, R, P."""
SETTINGS = (
    (64, Config(64, 8, 2, 1)), (64, Config(64, 8, 4, 1)), (64, Config(32, 8, 4, 1)), (64, Config(64, 16, 2, 1)),
    (32, Config(64, 4, 2, 1)), (32, Config(64, 8, 2, 1)), (32, Config(64, 4, 4, 1)), (32, Config(64, 4, 2, 2)),
    (16, Config(64, 4, 2, 1)), (16, Config(64, 4, 4, 1)), (16, Config(64, 4, 2, 2)),
)
"""Tile of (query, head) pairs and the setting of its launch. Those that the card cannot launch are told."""
FP8_SETTINGS = (
    (64, Config(64, 8, 2, 1)), (64, Config(64, 8, 1, 1)), (64, Config(64, 4, 2, 1)), (64, Config(32, 8, 2, 1)),
    (64, Config(128, 8, 1, 1)), (32, Config(64, 4, 2, 2)),
)


def filled(num_pages: int, latent_dim: int, rope_dim: int, *, fp8: bool) -> Tensor | Fp8Latents:
    vectors = torch.empty(num_pages, PAGE_SIZE, latent_dim + rope_dim, dtype=torch.bfloat16).normal_()
    if not fp8:
        return vectors
    width = token_bytes(latent_dim, rope_dim, torch.bfloat16)
    pages = Fp8Latents.of(torch.empty(num_pages, PAGE_SIZE, width, dtype=torch.uint8), latent_dim, rope_dim, torch.bfloat16)
    latents, rotated = vectors.flatten(0, 1).split((latent_dim, rope_dim), 1)
    pages.write(latents, rotated, torch.arange(num_pages * PAGE_SIZE))
    return pages


def latents_case(model: str, kv: str, rows: int, keys: int, queries: int) -> Case:
    """kv: `bf16` or `fp8`."""
    (heads, latent_dim, rope_dim), card, fp8 = MODELS[model], card_of(torch.empty(0).device), kv == "fp8"
    per_row, size = keys // PAGE_SIZE + 1, latent_dim + rope_dim
    table = torch.randperm(rows * per_row).int().view(rows, per_row) + 1
    num_copies = max(1, min(MOST_COPIES, COPIES_NUMBERS // (rows * per_row * PAGE_SIZE * size)))
    copies = [filled(rows * per_row + 1, latent_dim, rope_dim, fp8=fp8) for _ in range(num_copies)]
    q_latent = noise(heads, rows * queries, latent_dim).transpose(0, 1)
    q_rope = noise(rows * queries, heads, 4 * rope_dim)[..., 3 * rope_dim :]
    kv_len = torch.full((rows,), keys, dtype=torch.int32)
    positions = (kv_len[:, None] - queries + torch.arange(queries)).long().flatten()
    starts, scale = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32), (3 * size) ** -0.5
    shape = latent_shape(
        num_rows=rows, max_q=queries, max_kv=keys, num_heads=heads, latent_dim=latent_dim, page_size=PAGE_SIZE,
        dtype=torch.bfloat16, card=card, fp8=fp8,
    )

    def calls(shape: WorkShape, config: Config | None = None) -> list[Call]:
        work = split_kv_schedule(starts, kv_len, positions, shape=shape)
        out, parts = unwritten(q_latent.contiguous()), partials_of(work, latent_dim)
        parts.out.fill_(torch.nan)
        parts.lse.fill_(torch.nan)
        rest = (table, positions, work, parts)
        attend: Callable[..., None] = partial(verify_latents, scale=scale, out=out, config=config)
        return [into(out, partial(attend, q_latent, q_rope, latents, *rest)) for latents in copies]

    def reference() -> Tensor:
        work, out = split_kv_schedule(starts, kv_len, positions, shape=shape), torch.empty_like(q_latent.contiguous())
        verify_latents_reference(q_latent, q_rope, copies[0], table, positions, work, scale=scale, out=out)
        return out

    def settings() -> Ways:
        found = {
            f"tile {tile} block {own.block} warps {own.num_warps} stages {own.num_stages} per SM {own.per_sm}": calls(
                replace(shape, tile=tile, block=own.block, programs=card.num_sms * own.per_sm), own
            )
            for tile, own in (FP8_SETTINGS if fp8 else SETTINGS)
        }
        found |= {f"programs x{times}": calls(replace(shape, programs=shape.programs * times)) for times in (2, 3)}
        return found | {f"chunk {chunk}": calls(replace(shape, chunk=chunk)) for chunk in (1024, 2048)}

    pairs, width = rows * keys * queries * heads, token_bytes(latent_dim, rope_dim, torch.bfloat16) if fp8 else 2 * size
    return Case(
        calls=calls(shape), reference=reference, num_bytes=rows * keys * width, settings=settings,
        flop=2.0 * pairs * (size + latent_dim),
    )


ROUNDS = (
    *(("glm-4.7-flash", kv, *shape) for kv in ("bf16", "fp8") for shape in (
        (64, 8192, 1), (64, 8192, 3), (64, 8192, 4), (256, 1150, 1), (256, 1150, 2), (256, 1150, 4), (8, 8192, 1), (8, 8192, 3),
    )),
    *(("mistral-small-4", "bf16", 64, 8192, queries) for queries in (1, 2, 4)),
    *(("mistral-small-4", kv, 256, 1150, 1) for kv in ("bf16", "fp8")), ("mistral-small-4", "fp8", 64, 8192, 1),
    *(("16-heads", "bf16", 64, 8192, queries) for queries in (1, 3, 4)), ("16-heads", "fp8", 64, 8192, 1),
    *(("32-heads", "bf16", 64, 8192, queries) for queries in (1, 3)), ("32-heads", "fp8", 64, 8192, 1),
    *(("deepseek-v3", "bf16", 64, 8192, queries) for queries in (1, 3)),
)

LATENTS = (Benchmark("verify_latents", latents_case, "model kv rows keys queries", ROUNDS, ("tiny", "fp8", 2, 40, 2)),)
