"""Attention by torch over gathered and padded rows of a flat batch: for CPUs, fp64, and all else that no kernel supports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.model.layers.attention.kv_layout import LayerKV

if TYPE_CHECKING:
    from batchspec.batch.flat_batch import FlatBatch

_SHORT = 16
"""Rows of at most this many queries are padded and computed together; longer rows are computed one by one."""
_QUERIES = 256
"""Maximum number of queries whose scores are in memory at once, if torch's attention cannot be used."""


class TorchPlan:
    """See `plan_attention`. Row lists and masks are kept for the positions of the latest call."""

    def __init__(self, batch: FlatBatch, num_heads: int, window: int | None, sink: int) -> None:
        self._batch, self._num_heads, self._window, self._sink = batch, num_heads, window, sink
        self._at: Tensor | None = None
        self._parts: list[_Part] = []
        self._covers = False

    def attend(
        self, q: Tensor, kv: LayerKV, scale: float, positions: Tensor | None = None, sink_logits: Tensor | None = None
    ) -> Tensor:
        positions = self._batch.positions if positions is None else positions
        if positions is not self._at:
            self._plan(replace(self._batch, positions=positions), kv)
            self._at = positions
        out = torch.empty_like(q) if self._covers else torch.zeros_like(q)
        for part in self._parts:
            part.attend(q, kv, scale, out, sink_logits)
        return out

    def _plan(self, batch: FlatBatch, kv: LayerKV) -> None:
        page_size, kv_heads = kv.layout.page_size, kv.layout.num_kv_heads
        begins, lengths = batch.cu_seqlens_q.tolist(), batch.kv_len.tolist()
        skips = self._window is not None and not self._sink
        rows = [
            _Row(r, begin, end, kv_len, int(batch.positions[begin]) if skips else 0, self._window if skips else None, page_size)
            for r, (begin, end, kv_len) in enumerate(zip(begins, begins[1:], lengths, strict=False))
            if end > begin and kv_len > 0
        ]
        rows = [row for row in rows if row.num_pages > 0]  # the window of a draft far past the row's end holds no key
        sees = Sight(batch, self._window, self._sink, kv.layout.dtype)
        self._parts = [_LongRow(row, batch, kv, sees) for row in rows if row.num_q > _SHORT]
        short = sorted((row for row in rows if row.num_q <= _SHORT), key=lambda row: (-row.num_pages, row.index))
        for group in _similar(short):
            self._parts.append(_ShortRows(group, batch, kv, self._num_heads // kv_heads, sees))
        self._covers = sum(row.num_q for row in rows) == batch.token_ids.shape[0]


class _Part(Protocol):
    def attend(self, q: Tensor, kv: LayerKV, scale: float, out: Tensor, sink_logits: Tensor | None) -> None: ...


class _Row:
    """A row's queries begin .. end-1, and the pages first_page .. first_page+num_pages-1 to which these attend."""

    def __init__(self, index: int, begin: int, end: int, kv_len: int, position: int, window: int | None, page_size: int) -> None:
        self.index, self.begin, self.num_q, self.kv_len = index, begin, end - begin, kv_len
        self.first_page = 0 if window is None else max(0, position - window + 1) // page_size
        self.num_pages = -(-kv_len // page_size) - self.first_page


def _similar(rows: list[_Row]) -> list[list[_Row]]:
    """Groups of rows in which padding to the longest row at most doubles the pages. `rows` by descending number of pages."""
    groups: list[list[_Row]] = []
    for row in rows:
        if groups and 2 * row.num_pages >= groups[-1][0].num_pages:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """Attention of q [..., Q, D] over k, v [..., keys, D]; mask [..., Q, keys] of 0 and -inf, None: causal;
    sinks [..., 1 or Q, 1] or None.

    torch adds the mask to the scores. A masked key that is NaN (`kv_write` stores keys that are not finite as NaN), or whose
    score overflows, then gives NaN to every query. If the output has NaN, it is computed again with masked scores replaced by
    -inf. With sinks it always is.
    """
    if sinks is not None:
        return _by_scores(q, k, v, mask, scale, sinks)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    if not math.isnan(float(out.sum())):
        return out
    return torch.where(out.isnan(), _by_scores(q, k, v, mask, scale, None), out)


def _by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """The same computed from the definition, some queries at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_q, num_keys = q.shape[-2], k.shape[-2]
    seen = torch.ones(num_q, num_keys, dtype=torch.bool, device=q.device).tril() if mask is None else mask == 0
    k, v, out = k.to(wide), v.to(wide), []
    for begin in range(0, num_q, _QUERIES):
        own = slice(begin, begin + _QUERIES)
        scores = (q[..., own, :].to(wide) @ k.mT).mul_(scale).masked_fill_(~seen[..., own, :], float("-inf"))
        if sinks is not None:
            sink = sinks if sinks.shape[-2] == 1 else sinks[..., own, :]
            scores = torch.cat((scores, sink.to(wide).expand(*scores.shape[:-1], 1)), -1)
        out.append((scores.softmax(-1)[..., :num_keys] @ v).to(q.dtype))
    return torch.cat(out, -2)


class _LongRow:
    """One row of a prefill: scaled_dot_product_attention over its gathered keys."""

    def __init__(self, row: _Row, batch: FlatBatch, kv: LayerKV, sees: Sight) -> None:
        self._place = slice(row.begin, row.begin + row.num_q)
        pages = batch.page_table[row.index, row.first_page : row.first_page + row.num_pages].long()
        self._pages = torch.cat((pages, pages + kv.pages.shape[1]))
        first_key = row.first_page * kv.layout.page_size
        self._num_keys = row.kv_len - first_key
        self._buffer = kv.page_buffer(row.num_pages)
        self._mask = None
        # kv_len == num_q does not mean that the queries begin at position 0: drafts past the row's end are not counted as keys.
        if sees.narrow or row.kv_len > row.num_q or int(batch.positions[row.begin]):
            keys = torch.arange(first_key, row.kv_len, device=kv.pages.device)
            q_ids = torch.arange(row.begin, row.begin + row.num_q, device=kv.pages.device)[:, None]
            self._mask = sees.mask(keys, batch.positions[q_ids], q_ids)

    def attend(self, q: Tensor, kv: LayerKV, scale: float, out: Tensor, sink_logits: Tensor | None) -> None:
        kv_heads, head_dim = kv.layout.num_kv_heads, kv.layout.head_dim
        keys, values = kv.read_pages(self._pages, self._buffer).view(2, -1, kv_heads, 1, head_dim)[:, : self._num_keys]
        # Query heads that share K/V are a dimension of stride 0 in K and V: on a CPU these are not repeated in memory.
        q = q[self._place].view(-1, kv_heads, q.shape[1] // kv_heads, head_dim).permute(1, 2, 0, 3)
        k, v = (x.permute(1, 2, 0, 3).expand(-1, q.shape[1], -1, -1) for x in (keys, values))
        if kv.pages.is_cuda:  # with a mask, torch 2.11's memory-efficient kernel reads out of bounds at a stride of 0
            k, v = k.contiguous(), v.contiguous()
        sinks = None if sink_logits is None else sink_logits.view(kv_heads, -1, 1, 1)
        o = masked_attention(q, k, v, self._mask, scale, sinks)
        out[self._place] = o.permute(2, 0, 1, 3).flatten(1, 2)


class _ShortRows:
    """Rows of a round, padded to the same number of queries and pages; query heads that share K/V count as further queries."""

    def __init__(self, rows: list[_Row], batch: FlatBatch, kv: LayerKV, heads_per_kv: int, sees: Sight) -> None:
        device, page_size = kv.pages.device, kv.layout.page_size
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
        self._pages = torch.cat((pages, pages + kv.pages.shape[1]))
        self._buffer = kv.page_buffer(pages.shape[0])
        keys = first * page_size + torch.arange(page.shape[0] * page_size, device=device)
        positions = torch.minimum(batch.positions[q_ids], kv_len - 1)
        mask = sees.mask(keys[:, None], positions[:, :, None], q_ids[:, :, None])
        self._mask = mask.repeat_interleave(heads_per_kv, 1).unsqueeze(1)
        flat = q_ids.flatten()
        in_order = flat.shape[0] == batch.token_ids.shape[0] and bool((flat == torch.arange(flat.shape[0], device=device)).all())
        self._q_ids = None if in_order else flat
        self._kept = None if in_order else (place < num_q).flatten().nonzero().squeeze(1)

    def attend(self, q: Tensor, kv: LayerKV, scale: float, out: Tensor, sink_logits: Tensor | None) -> None:
        (num_heads, head_dim), kv_heads = q.shape[1:], kv.layout.num_kv_heads
        gathered = kv.read_pages(self._pages, self._buffer).view(2, self._num_rows, -1, kv_heads, head_dim).transpose(2, 3)
        padded = q if self._q_ids is None else q.index_select(0, self._q_ids)
        shape = (self._num_rows, self._num_q, kv_heads, num_heads // kv_heads, head_dim)
        folded = padded.view(shape).transpose(1, 2).flatten(2, 3)
        sinks = None if sink_logits is None else sink_logits.view(kv_heads, -1, 1).repeat(1, self._num_q, 1)
        o = masked_attention(folded, gathered[0], gathered[1], self._mask, scale, sinks)
        o = o.view(self._num_rows, kv_heads, self._num_q, -1, head_dim).transpose(1, 2)
        if self._q_ids is None or self._kept is None:
            out.view(shape).copy_(o)
        else:
            out[self._q_ids[self._kept]] = o.reshape(-1, num_heads, head_dim)[self._kept]


class Sight:
    """Which keys the queries of a batch attend to."""

    def __init__(self, batch: FlatBatch, window: int | None, sink: int, dtype: torch.dtype) -> None:
        self._batch, self._window, self._sink, self._dtype = batch, window, sink, dtype
        self._ancestors = None if batch.tree is None else batch.tree.within(window, batch)
        self.narrow = window is not None or batch.tree is not None or batch.last_keys is not None

    def mask(self, keys: Tensor, positions: Tensor, q_ids: Tensor) -> Tensor:
        """0 where query q_ids at `positions` attends to the key, -inf elsewhere; the three arguments broadcast."""
        hidden = keys > (positions if self._batch.last_keys is None else self._batch.last_keys[q_ids])
        if self._window is not None:
            hidden |= (keys <= positions - self._window) & (keys >= self._sink)
        if self._batch.tree is not None and self._ancestors is not None:
            node = keys - self._batch.tree.start[self._batch.row_ids[q_ids]]
            above = (self._ancestors[q_ids] >> node.clamp(min=0, max=63)) & 1
            hidden = torch.where(node < 0, hidden, (above == 0) | (node > 63))
        return torch.zeros(hidden.shape, dtype=self._dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
