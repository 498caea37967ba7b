"""Prefill of latent attention on a GPU, in the expanded form: keys and values of heads are made of latents, in parts.

Latents of earlier passes and of cached prefixes are read from their pages and expanded again in each pass. All rows of a part are
attended to by the kernels of `attention/flash.py`. Values are as wide as keys there: narrower ones are padded with zeros.
A part is some rows, of KEYS keys together or one longer row, and some heads: as many as EXPANDED_BYTES hold, at least one.
FlashInfer keeps a plan of each part through all layers, so passes of many parts use torch's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.model.layers.attention.flash import RING, FlashPlan, VarlenPlan, plan_flash
from batchspec.model.layers.attention.kv_layout import KVLayout
from batchspec.model.layers.latent.attend import HeadSizes, Matrices
from batchspec.model.layers.latent.pages import LatentLayout, LatentPages

KEYS, EXPANDED_BYTES = 1 << 15, 1 << 29


def expanded_layout(layout: LatentLayout, sizes: HeadSizes, num_heads: int) -> KVLayout:
    """What the kernels of a prefill read."""
    return KVLayout(dtype=layout.dtype, num_kv_heads=num_heads, head_dim=sizes.query_dim, page_size=layout.page_size)


def fits_prefill(batch: FlatBatch, pages: LatentPages, sizes: HeadSizes, sink: int) -> bool:
    """Whether `LatentPrefillPlan` supports this batch: its lengths are known on the host, and there are kernels for the heads."""
    has_kernels = expanded_layout(pages.layout, sizes, 1).has_prefill_kernels and sizes.value_dim <= sizes.query_dim
    return pages.pages.is_cuda and batch.host is not None and not sink and has_kernels


def key_bytes(sizes: HeadSizes, dtype: torch.dtype) -> int:
    """Bytes that are made of a latent for one head."""
    padded = sizes.query_dim if sizes.value_dim < sizes.query_dim else 0
    return (sizes.key_dim + sizes.query_dim + sizes.value_dim + padded) * dtype.itemsize


def heads_at_once(num_heads: int, num_keys: int, head_bytes: int) -> int:
    """The most heads, a divisor of their number, that are expanded together. head_bytes: of `key_bytes`"""
    most = max(1, EXPANDED_BYTES // max(1, num_keys * head_bytes))
    return next(own for own in range(min(most, num_heads), 0, -1) if num_heads % own == 0)


def most_bytes(num_heads: int, num_keys: int, sizes: HeadSizes, dtype: torch.dtype) -> int:
    """Maximum bytes that a part of at most `num_keys` keys expands to."""
    head_bytes = num_keys * key_bytes(sizes, dtype)
    return min(num_heads * head_bytes, max(EXPANDED_BYTES, head_bytes))


def row_groups(lengths: HostLayout) -> Iterator[range]:
    """The rows of each part: of at most KEYS keys together, or one."""
    begin = total = 0
    for row, num_keys in enumerate(lengths.kv_len):
        if row > begin and total + num_keys > KEYS:
            yield range(begin, row)
            begin, total = row, 0
        total += num_keys
    yield range(begin, len(lengths.kv_len))


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedHeads:
    """Keys and values of some heads, made when they are read."""

    layout: KVLayout
    source: LatentPages
    matrices: Matrices

    @property
    def pages(self) -> Tensor:
        return self.source.pages

    def read_slots(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [N, heads, N + P] of the tokens at slots int64 [N]."""
        latents, rotated = self.source.read_slots(slots)
        latents = latents.contiguous()
        of_keys, of_values = self.matrices.keys, self.matrices.values
        heads, key_dim, _ = of_keys.shape
        k = latents.new_empty(len(slots), heads, self.layout.head_dim)
        k[..., :key_dim] = (latents @ of_keys.flatten(0, 1).t()).view(len(slots), heads, key_dim)
        k[..., key_dim:] = rotated[:, None]
        v = (latents @ of_values.flatten(0, 1).t()).view(len(slots), heads, -1)
        return k, F.pad(v, (0, self.layout.head_dim - v.shape[2])) if v.shape[2] < self.layout.head_dim else v


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    place: slice
    """Its rows' queries in the batch."""
    heads: int
    """Computed at once."""
    plan: FlashPlan | VarlenPlan


class LatentPrefillPlan:
    """The `LatentPlan` of a prefill pass. Does not synchronise."""

    def __init__(
        self, batch: FlatBatch, pages: LatentPages, num_heads: int, sizes: HeadSizes, *, window: int | None
    ) -> None:
        assert batch.host is not None
        self._parts, at = list[_Part](), 0
        shapes, dtype = ((1, size, sizes.latent_dim) for size in (sizes.key_dim, sizes.value_dim)), pages.layout.dtype
        nothing = Matrices(*(pages.pages.new_empty(shape, dtype=dtype) for shape in shapes))
        groups = list(row_groups(batch.host))
        for rows in groups:
            own = slice(rows.start, rows.stop)
            host = HostLayout(batch.host.q_len[own], batch.host.kv_len[own])
            place = slice(at, at + sum(host.q_len))
            at, num_keys = place.stop, sum(host.kv_len)
            heads = heads_at_once(num_heads, num_keys, key_bytes(sizes, pages.layout.dtype))
            kv = ExpandedHeads(expanded_layout(pages.layout, sizes, heads), pages, nothing)
            part = _of_rows(batch, own, place, host)
            few = len(groups) <= RING // 2
            plan = plan_flash(part, kv, num_heads=heads, window=window) if few else VarlenPlan(part, kv, window=window)
            self._parts.append(_Part(place, heads, plan))

    def attend(
        self, q: Tensor, pages: LatentPages, matrices: Matrices, sizes: HeadSizes, scale: float, positions: Tensor | None = None
    ) -> Tensor:
        assert positions is None, "of chains of drafts alone, whose steps are no prefills"
        out = q.new_empty(*q.shape[:2], sizes.value_dim)
        for part in self._parts:
            for first in range(0, q.shape[1], part.heads):
                heads = slice(first, first + part.heads)
                kv = ExpandedHeads(expanded_layout(pages.layout, sizes, part.heads), pages, matrices.of_heads(heads))
                found = part.plan.attend(q[part.place, heads].contiguous(), kv, scale)
                out[part.place, heads] = found[..., : sizes.value_dim]
        return out


def _of_rows(batch: FlatBatch, rows: slice, place: slice, host: HostLayout) -> FlatBatch:
    """The batch of some adjacent rows, whose queries are at `place`."""
    if len(host.q_len) == len(batch.kv_len):
        return batch
    return replace(
        batch, token_ids=batch.token_ids[place], row_ids=batch.row_ids[place] - rows.start, positions=batch.positions[place],
        slot_mapping=batch.slot_mapping[place], cu_seqlens_q=batch.cu_seqlens_q[rows.start : rows.stop + 1] - place.start,
        kv_len=batch.kv_len[rows], page_table=batch.page_table[rows], max_q=max(host.q_len), max_kv=max(host.kv_len), host=host,
        images=None, rope=None, more_groups=(), slots=None, shared=None,
    )
