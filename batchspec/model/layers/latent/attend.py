"""Attention over latents, row by row in plain torch. NH heads, Q queries of a row, K keys; other letters as in `block.py`.

    expanded   keys and values of all heads are made of the row's latents: K (N + V) R operations a head, then Q K (N + P + V)
    absorbed   queries are multiplied by the keys' matrix and results by the values' matrix, so that heads read the latents
               themselves: Q (N + V) R operations, then Q K (2 R + P)

Both compute the same. The one with fewer operations is taken: mostly the first in a prefill, the second in a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.model.layers.attention.padded import Sight, masked_attention
from batchspec.model.layers.latent.pages import LatentLayout, LatentPages


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """How many numbers a head has."""

    key_dim: int
    """N, of a query or key without rotation"""
    rope_dim: int
    """P, of a query or key with rotation"""
    value_dim: int
    """V"""
    latent_dim: int
    """R, of a latent"""

    @property
    def made(self) -> int:
        """Number of multiplications that make a key and a value from a latent."""
        return (self.key_dim + self.value_dim) * self.latent_dim

    def absorbs(self, num_queries: int, num_keys: int) -> bool:
        """Whether the absorbed form has fewer multiplications."""
        pairs = num_queries * num_keys
        expanded = num_keys * self.made + pairs * (self.key_dim + self.rope_dim + self.value_dim)
        return num_queries * self.made + pairs * (2 * self.latent_dim + self.rope_dim) < expanded


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    place: slice
    """Its queries in the batch."""
    page_ids: Tensor
    """int64"""
    num_keys: int
    mask: Tensor
    """[Q, K] 0 where a query attends to a key, -inf elsewhere"""


class LatentPlan:
    """Which latents the queries of a pass read: the same for all layers."""

    def __init__(self, batch: FlatBatch, layout: LatentLayout, *, window: int | None, sink: int) -> None:
        """window, sink: as of `Pass`."""
        sees, device = Sight(batch, window, sink, layout.dtype), batch.positions.device
        begins, lengths = batch.cu_seqlens_q.tolist(), batch.kv_len.tolist()
        self._rows = []
        for r, (begin, end, num_keys) in enumerate(zip(begins, begins[1:], lengths, strict=False)):
            if begin == end or not num_keys:
                continue
            q_ids = torch.arange(begin, end, device=device)[:, None]
            positions = batch.positions[q_ids].clamp(max=num_keys - 1)  # drafts past the row's end are not among its keys
            mask = sees.mask(torch.arange(num_keys, device=device), positions, q_ids)
            page_ids = batch.page_table[r, : -(-num_keys // layout.page_size)].long()
            self._rows.append(_Row(slice(begin, end), page_ids, num_keys, mask))

    def attend(self, q: Tensor, pages: LatentPages, kv_b: Tensor, sizes: HeadSizes, scale: float) -> Tensor:
        """q [T, NH, N + P], its last P numbers rotated, kv_b [NH, N + V, R] -> attended values [T, NH, V], 0 for dead rows."""
        out = q.new_zeros(*q.shape[:2], sizes.value_dim)
        for row in self._rows:
            own, vectors = q[row.place], pages.read(row.page_ids, row.num_keys)
            form = absorbed if sizes.absorbs(len(own), row.num_keys) else expanded
            out[row.place] = form(own, vectors, row.mask, kv_b, sizes, scale)
        return out


def expanded(q: Tensor, vectors: Tensor, mask: Tensor, kv_b: Tensor, sizes: HeadSizes, scale: float) -> Tensor:
    """q [Q, NH, N + P], vectors [K, R + P] -> [Q, NH, V]. See the module's docstring."""
    latents, rotated = _finite_latents(vectors, sizes)
    made = torch.einsum("kr,hnr->hkn", latents, kv_b)
    keys = torch.cat((made[..., : sizes.key_dim], rotated.expand(len(kv_b), -1, -1)), -1)
    return masked_attention(q.transpose(0, 1), keys, made[..., sizes.key_dim :], mask, scale, None).transpose(0, 1)


def absorbed(q: Tensor, vectors: Tensor, mask: Tensor, kv_b: Tensor, sizes: HeadSizes, scale: float) -> Tensor:
    """The same."""
    latents, rotated = _finite_latents(vectors, sizes)
    queries = torch.einsum("qhn,hnr->hqr", q[..., : sizes.key_dim], kv_b[:, : sizes.key_dim])
    queries = torch.cat((queries, q[..., sizes.key_dim :].transpose(0, 1)), -1)
    keys, values = (own.expand(len(kv_b), -1, -1) for own in (torch.cat((latents, rotated), -1), latents))
    found = masked_attention(queries, keys, values, mask, scale, None)
    return torch.einsum("hqr,hvr->qhv", found, kv_b[:, sizes.key_dim :])


def _finite_latents(vectors: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor]:
    """Latents [K, R], 0 where they are not finite, and the rotated parts [K, P]: these stay NaN, so that scores are NaN for the
    queries that read such a key, and values for no other."""
    latents, rotated = vectors.split((sizes.latent_dim, sizes.rope_dim), -1)
    return latents.nan_to_num(0.0), rotated
