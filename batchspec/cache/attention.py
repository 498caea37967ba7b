"""Attention over paged K/V: the batch of flat tokens that one forward reads, and the attention itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.cache.flash import FlashPlan, fits_flash
from batchspec.cache.verify import fits_verify, plan_verify

if TYPE_CHECKING:
    from batchspec.kernels.attention_work import SharedPrefixes

_SHORT = 16
"""Rows of at most this many queries are attended together, padded; longer ones row by row."""


@dataclass(slots=True, kw_only=True)
class FlatBatch:
    """Tokens of several rows laid end to end: T tokens of R rows, what one forward of a model reads.

    Row r owns the flat places q_start[r] .. q_start[r+1]-1, at consecutive positions that end at kv_len[r]-1; its keys
    are positions 0 .. kv_len[r]-1 in the pages of page_table[r]. A row may own no place (a dead row). Places behind
    q_start[R] are padding of a fixed budget: row 0, position 0, scratch slot.
    """

    token_ids: Tensor
    """int32 [T]"""
    row_ids: Tensor
    """int32 [T] the row each token belongs to"""
    positions: Tensor
    """int64 [T] position in the row, which is also its RoPE position"""
    slots: Tensor
    """int64 [T] cache location page * page_size + offset where its K/V is written; page 0 is scratch"""
    q_start: Tensor
    """int32 [R+1]"""
    kv_len: Tensor
    """int32 [R] keys that the row's last token sees, itself included; 0 for a dead row"""
    page_table: Tensor
    """int32 [R, max pages a row]"""
    max_q: int
    """No row owns more places than this (host bound)."""
    max_kv: int
    """No kv_len is larger than this (host bound)."""
    shared: SharedPrefixes | None = None
    """Rows that begin with the same pages, for attention that reads those once; None where nothing is known of it."""
    host: HostLayout | None = None
    """What the host knows of the rows: of a prefill everything, of a round nothing."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """q_len and kv_len of each row of a FlatBatch."""

    q_len: Sequence[int]
    kv_len: Sequence[int]


def attend(q: Tensor, kv: Tensor, batch: FlatBatch, *, scale: float, window: int | None, sink: int = 0) -> Tensor:
    """Causal attention of every token of the batch over its row's pages.

    q       [T, NH, D]
    kv      [2, P, page_size, KVH, D] of the same dtype, the tokens' own K/V written already; finite everywhere
    window  a query at position p sees keys p-window+1 .. p; None: 0 .. p
    sink    with a window: keys 0 .. sink-1 are seen too (StreamingLLM, arXiv 2309.17453)
    Returns [T, NH, D]; zeros for rows with kv_len 0. Exact: softmax in fp32 (fp64 for fp64).

    Many layers of one batch share the work that does not depend on q: `plan_attention` once, then `.attend`.
    On a GPU nothing is read back for rows of at most 64 queries, nor for longer ones that FlashInfer serves; torch's path, which
    fp64 and what else is left take, synchronises.
    """
    return plan_attention(batch, kv, num_heads=q.shape[1], window=window, sink=sink).attend(q, kv, scale)


def plan_attention(batch: FlatBatch, kv: Tensor, *, num_heads: int, window: int | None, sink: int = 0) -> AttentionPlan:
    """What attention of this batch needs in every layer with this window, by who serves it. `kv` is any layer's."""
    if kv.is_cuda and fits_verify(batch, kv.dtype):
        return plan_verify(batch, kv, num_heads=num_heads, window=window, sink=sink, shared=batch.shared)
    if fits_flash(batch, kv.dtype, sink):
        return FlashPlan(batch, kv, num_heads=num_heads, window=window)
    return _TorchPlan(batch, num_heads, window, sink)


class AttentionPlan(Protocol):
    """See `plan_attention`."""

    def attend(self, q: Tensor, kv: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """As the function `attend`, for one layer.

        positions  int64 [T] later ones than the batch's, each row's below its kv_len: the steps of a draft chain share a plan
        """


class _TorchPlan:
    """Rows gathered and padded by torch: a CPU, fp64, a prefill without FlashInfer. Lists and masks are those of the positions
    asked last."""

    def __init__(self, batch: FlatBatch, num_heads: int, window: int | None, sink: int) -> None:
        self._batch, self._num_heads, self._window, self._sink = batch, num_heads, window, sink
        self._at: Tensor | None = None
        self._parts: list[_Part] = []
        self._covers = False

    def attend(self, q: Tensor, kv: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        positions = self._batch.positions if positions is None else positions
        if positions is not self._at:
            self._plan(replace(self._batch, positions=positions), kv)
            self._at = positions
        out = torch.empty_like(q) if self._covers else torch.zeros_like(q)
        for part in self._parts:
            part.attend(q, kv, scale, out)
        return out

    def _plan(self, batch: FlatBatch, kv: Tensor) -> None:
        page_size, kv_heads = kv.shape[2], kv.shape[3]
        begins, lengths = batch.q_start.tolist(), batch.kv_len.tolist()
        skips = self._window is not None and not self._sink
        rows = [
            _Row(r, begin, end, kv_len, int(batch.positions[begin]) if skips else 0, self._window if skips else None, page_size)
            for r, (begin, end, kv_len) in enumerate(zip(begins, begins[1:], lengths, strict=False))
            if end > begin and kv_len > 0
        ]
        self._parts = [_LongRow(row, batch, kv, self._window, self._sink) for row in rows if row.num_q > _SHORT]
        short = sorted((row for row in rows if row.num_q <= _SHORT), key=lambda row: (-row.num_pages, row.index))
        for group in _similar(short):
            self._parts.append(_ShortRows(group, batch, kv, self._num_heads // kv_heads, self._window, self._sink))
        self._covers = sum(row.num_q for row in rows) == batch.token_ids.shape[0]


class _Part(Protocol):
    def attend(self, q: Tensor, kv: Tensor, scale: float, out: Tensor) -> None: ...


class _Row:
    """A row's queries begin .. end-1 and the pages first_page .. first_page+num_pages-1 that they see."""

    def __init__(self, index: int, begin: int, end: int, kv_len: int, position: int, window: int | None, page_size: int) -> None:
        self.index, self.begin, self.num_q, self.kv_len = index, begin, end - begin, kv_len
        self.first_page = 0 if window is None else max(0, position - window + 1) // page_size
        self.num_pages = -(-kv_len // page_size) - self.first_page


def _similar(rows: list[_Row]) -> list[list[_Row]]:
    """Rows by falling number of pages -> groups in which padding to the longest at most doubles the pages."""
    groups: list[list[_Row]] = []
    for row in rows:
        if groups and 2 * row.num_pages >= groups[-1][0].num_pages:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _gather(kv: Tensor, pages: Tensor, out: Tensor) -> Tensor:
    """K and V of `pages` (their ids, then their ids + P) in one copy: out [2 * n, page_size * KVH * D]."""
    return torch.index_select(kv.view(-1, out.shape[1]), 0, pages, out=out)


class _LongRow:
    """One row of a prefill: scaled_dot_product_attention over its gathered keys."""

    def __init__(self, row: _Row, batch: FlatBatch, kv: Tensor, window: int | None, sink: int) -> None:
        self._place = slice(row.begin, row.begin + row.num_q)
        pages = batch.page_table[row.index, row.first_page : row.first_page + row.num_pages].long()
        self._pages = torch.cat((pages, pages + kv.shape[1]))
        first_key = row.first_page * kv.shape[2]
        self._num_keys = row.kv_len - first_key
        self._buffer = kv.new_empty(2 * row.num_pages, kv[0, 0].numel())
        self._mask = None
        # Drafts behind a row's end are no keys: a round may have as many keys as places and not begin at position 0.
        if window is not None or row.kv_len > row.num_q or int(batch.positions[row.begin]):
            keys = torch.arange(first_key, row.kv_len, device=kv.device)
            self._mask = _mask(keys, batch.positions[self._place, None], window, sink, kv.dtype)

    def attend(self, q: Tensor, kv: Tensor, scale: float, out: Tensor) -> None:
        kv_heads, head_dim = kv.shape[3:]
        keys, values = _gather(kv, self._pages, self._buffer).view(2, -1, kv_heads, 1, head_dim)[:, : self._num_keys]
        # The heads that share K/V are a dimension over which K and V do not move: on a CPU nothing is repeated in memory.
        q = q[self._place].view(-1, kv_heads, q.shape[1] // kv_heads, head_dim).permute(1, 2, 0, 3)
        k, v = (x.permute(1, 2, 0, 3).expand(-1, q.shape[1], -1, -1) for x in (keys, values))
        if kv.is_cuda:  # torch 2.11's memory-efficient kernel reads past a dimension that does not move, under a mask
            k, v = k.contiguous(), v.contiguous()
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, is_causal=self._mask is None, scale=scale)
        out[self._place] = o.permute(2, 0, 1, 3).flatten(1, 2)


class _ShortRows:
    """Rows of a round, padded to the same number of queries and pages; the heads that share K/V are further queries."""

    def __init__(self, rows: list[_Row], batch: FlatBatch, kv: Tensor, heads_per_kv: int, window: int | None, sink: int) -> None:
        device, page_size = kv.device, kv.shape[2]
        self._num_rows, self._num_q = len(rows), max(row.num_q for row in rows)
        begin, num_q, kv_len, first, num_pages, index = (
            torch.tensor(
                [(row.begin, row.num_q, row.kv_len, row.first_page, row.num_pages, row.index) for row in rows], device=device
            )
            .unsqueeze(2)
            .unbind(1)
        )  # each [rows, 1]
        # Padding repeats a row's last query and reads the scratch page.
        place = torch.arange(self._num_q, device=device)
        q_ids = begin + torch.minimum(place, num_q - 1)
        page = torch.arange(max(row.num_pages for row in rows), device=device)
        table = batch.page_table[index, (first + page).clamp(max=batch.page_table.shape[1] - 1)].long()
        pages = torch.where(page < num_pages, table, 0).flatten()
        self._pages = torch.cat((pages, pages + kv.shape[1]))
        self._buffer = kv.new_empty(2 * pages.shape[0], kv[0, 0].numel())
        keys = first * page_size + torch.arange(page.shape[0] * page_size, device=device)
        positions = torch.minimum(batch.positions[q_ids], kv_len - 1)
        mask = _mask(keys[:, None], positions[:, :, None], window, sink, kv.dtype)
        self._mask = mask.repeat_interleave(heads_per_kv, 1).unsqueeze(1)
        flat = q_ids.flatten()
        in_order = flat.shape[0] == batch.token_ids.shape[0] and bool((flat == torch.arange(flat.shape[0], device=device)).all())
        self._q_ids = None if in_order else flat
        self._kept = None if in_order else (place < num_q).flatten().nonzero().squeeze(1)

    def attend(self, q: Tensor, kv: Tensor, scale: float, out: Tensor) -> None:
        (num_heads, head_dim), kv_heads = q.shape[1:], kv.shape[3]
        gathered = _gather(kv, self._pages, self._buffer).view(2, self._num_rows, -1, kv_heads, head_dim).transpose(2, 3)
        padded = q if self._q_ids is None else q.index_select(0, self._q_ids)
        shape = (self._num_rows, self._num_q, kv_heads, num_heads // kv_heads, head_dim)
        folded = padded.view(shape).transpose(1, 2).flatten(2, 3)
        o = F.scaled_dot_product_attention(folded, gathered[0], gathered[1], attn_mask=self._mask, scale=scale)
        o = o.view(self._num_rows, kv_heads, self._num_q, -1, head_dim).transpose(1, 2)
        if self._q_ids is None or self._kept is None:
            out.view(shape).copy_(o)
        else:
            out[self._q_ids[self._kept]] = o.reshape(-1, num_heads, head_dim)[self._kept]


def _mask(keys: Tensor, positions: Tensor, window: int | None, sink: int, dtype: torch.dtype) -> Tensor:
    """0 where a query at `positions` sees the key, -inf elsewhere."""
    hidden = keys > positions
    if window is not None:
        hidden |= (keys <= positions - window) & (keys >= sink)
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
