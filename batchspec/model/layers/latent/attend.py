"""Attention over latents, row by row in plain torch. NH heads, Q queries of a row, K keys; other letters as in `block.py`.

    expanded   keys and values of all heads are made of the row's latents: K (N + V) R operations a head, then Q K (N + P + V)
    absorbed   queries are multiplied by the keys' matrix and results by the values' matrix, so that heads read the latents
               themselves: Q (N + V) R operations, then Q K (2 R + P)

Both compute the same. The one with fewer operations is taken: mostly the first in a prefill, the second in a round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.kernels.common.dry_run import is_dry
from batchspec.model.layers.attention.padded import Sight, masked_attention
from batchspec.model.layers.latent.pages import LatentPages


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

    @property
    def query_dim(self) -> int:
        """N + P"""
        return self.key_dim + self.rope_dim

    def absorbs(self, num_queries: int, num_keys: int) -> bool:
        """Whether the absorbed form has fewer multiplications."""
        pairs = num_queries * num_keys
        expanded = num_keys * self.made + pairs * (self.key_dim + self.rope_dim + self.value_dim)
        return num_queries * self.made + pairs * (2 * self.latent_dim + self.rope_dim) < expanded


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """The two parts of kv_b."""

    keys: Tensor
    """[NH, N, R]"""
    values: Tensor
    """[NH, V, R]"""

    @classmethod
    def of(cls, kv_b: Tensor, sizes: HeadSizes) -> Matrices:
        """kv_b [NH (N + V), R]"""
        heads = kv_b.view(-1, sizes.key_dim + sizes.value_dim, sizes.latent_dim)
        keys, values = heads.split((sizes.key_dim, sizes.value_dim), 1)
        return cls(keys.contiguous(), values.contiguous())

    def of_heads(self, heads: slice) -> Matrices:
        return Matrices(self.keys[heads], self.values[heads])


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    place: slice
    """Its queries in the batch."""
    page_ids: Tensor
    """int64"""
    num_keys: int
    mask: Tensor
    """[Q, K] 0 where a query attends to a key, -inf elsewhere"""


class TorchLatentPlan:
    """The `LatentPlan` in plain torch, for CPUs, fp64, and all else that no kernel supports. It reads lengths on the host."""

    def __init__(self, batch: FlatBatch, *, window: int | None, sink: int) -> None:
        """window, sink: as of `Pass`."""
        self._batch, self._window, self._sink = batch, window, sink
        self._at: Tensor | None = None
        """The positions of the latest call, which `_rows` are of."""
        self._rows: list[_Row] = []

    def attend(
        self, q: Tensor, pages: LatentPages, matrices: Matrices, sizes: HeadSizes, scale: float, positions: Tensor | None = None
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:2], sizes.value_dim)
        if is_dry():  # lengths are undefined
            return out
        positions = self._batch.positions if positions is None else positions
        if positions is not self._at:
            self._at, self._rows = positions, self._listed(pages, positions)
        for row in self._rows:
            own, (latents, rotated) = q[row.place], pages.read(row.page_ids, row.num_keys)
            form = absorbed if sizes.absorbs(len(own), row.num_keys) else expanded
            out[row.place] = form(own, latents, rotated, row.mask, matrices, sizes, scale)
        return out

    def _listed(self, pages: LatentPages, at: Tensor) -> list[_Row]:
        batch, layout, found = replace(self._batch, positions=at), pages.layout, []
        sees, device = Sight(batch, self._window, self._sink, layout.dtype), batch.positions.device
        begins, lengths = batch.cu_seqlens_q.tolist(), batch.kv_len.tolist()
        for r, (begin, end, num_keys) in enumerate(zip(begins, begins[1:], lengths, strict=False)):
            if begin == end or not num_keys:
                continue
            q_ids = torch.arange(begin, end, device=device)[:, None]
            positions = batch.positions[q_ids].clamp(max=num_keys - 1)  # drafts past the row's end are not among its keys
            mask = sees.mask(torch.arange(num_keys, device=device), positions, q_ids)
            page_ids = batch.page_table[r, : -(-num_keys // layout.page_size)].long()
            found.append(_Row(slice(begin, end), page_ids, num_keys, mask))
        return found


def expanded(
    q: Tensor, latents: Tensor, rotated: Tensor, mask: Tensor, matrices: Matrices, sizes: HeadSizes, scale: float
) -> Tensor:
    """q [Q, NH, N + P], latents [K, R], rotated [K, P], mask [Q, K] -> [Q, NH, V]. See the module's docstring."""
    keys, values = (torch.einsum("kr,hnr->hkn", latents, own) for own in (matrices.keys, matrices.values))
    keys = torch.cat((keys, rotated.expand(len(keys), -1, -1)), -1)
    return masked_attention(q.transpose(0, 1), keys, values, mask, scale, None).transpose(0, 1)


def absorbed(
    q: Tensor, latents: Tensor, rotated: Tensor, mask: Tensor, matrices: Matrices, sizes: HeadSizes, scale: float
) -> Tensor:
    """The same."""
    queries = torch.einsum("qhn,hnr->hqr", q[..., : sizes.key_dim], matrices.keys)
    queries = torch.cat((queries, q[..., sizes.key_dim :].transpose(0, 1)), -1)
    keys, values = (own.expand(len(queries), -1, -1) for own in (torch.cat((latents, rotated), -1), latents))
    return torch.einsum("hqr,hvr->qhv", masked_attention(queries, keys, values, mask, scale, None), matrices.values)
