"""Between the products of latent attention: it norms, rotates and writes its tokens' vectors, and reads others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.kernels.latent.write_latents import write_latents
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.fused import rms_norm
from batchspec.model.layers.attention.rope import Rope
from batchspec.model.layers.attention.rope_write import rotate
from batchspec.model.layers.latent.pages import LatentPages
from batchspec.model.layers.latent.plan import LatentPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentStore:
    """Where a layer keeps the vectors of a pass's tokens."""

    rope: Rope
    slot_mapping: Tensor
    """int64 [T]"""
    pages: LatentPages
    lora: LoraTokens | None = None

    def write(self, rows: Tensor, q: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Write what kv_a computed, rows [T, R + P], normed and rotated, to its slots; q [T, NH, N + P] with its last P numbers
        rotated, on a GPU in place. norm [R]: the weight of the latents' norm"""
        layout, at = self.pages.layout, self.rope
        if at.query_factors is not None:
            q = q * at.query_factors
        assert at.axes is None, "no model with latent attention reads images"
        if at.angles is None:
            write_latents(
                rows, q, at.positions, at.freqs, norm, self.pages.vectors, self.slot_mapping, eps=eps,
                attention_factor=at.attention_factor, interleaved=at.interleaved,
            )
            return q
        latents, k = rows.split((len(norm), layout.rope_dim), 1)
        rotated = rotate(k[:, None], *at.angles, interleaved=at.interleaved)[:, 0]
        self.pages.write(rms_norm(latents, norm, eps), rotated, self.slot_mapping)
        turned = rotate(q[..., -layout.rope_dim :], *at.angles, interleaved=at.interleaved)
        return torch.cat((q[..., : -layout.rope_dim], turned), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttend:
    """What the queries of a pass read."""

    plan: LatentPlan
    pages: LatentPages
    lora: LoraTokens | None = None
    positions: Tensor | None = None
    """int64 [T] positions of the queries if they are later than the plan's"""
