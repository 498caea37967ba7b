"""The target as teacher: one pass over whole rows, features for the head to read and distributions for it to learn.

B rows, L places of the longest, T tokens, N places to learn, V' draft vocabulary, H hidden, W = taps * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.cache.attention import FlatBatch, HostLayout
from batchspec.cache.pages import KVCache
from batchspec.model.target import Target
from batchspec.train.data import Row

PAGE_SIZE = 16
_CHUNK = 4096
"""Places whose logits over the target's vocabulary are in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """A batch with all that the target says of it. Places to learn: those whose next token is of the completion."""

    embedded: Tensor
    """[B, L, H] at place t the embedding of token t+1"""
    features: Tensor
    """[B, L, W]"""
    ids: Tensor
    """int64 [B, L] tokens, 0 behind a row's end"""
    rows: Tensor
    """int64 [N] the row of each place to learn"""
    places: Tensor
    """int64 [N] its place in the row"""
    probs: Tensor
    """fp32 [N, V'] the target's distribution of the next token, over the draft vocabulary alone; [0, V'] for evaluation"""
    known: Tensor
    """fp32 [N] 1 where the target's likeliest token is in the draft vocabulary, else 0"""


class Teacher:
    """Makes lessons. hot: int64 [V'] rising target ids of the draft vocabulary."""

    def __init__(self, target: Target, taps: tuple[int, ...], hot: Tensor, dtype: torch.dtype) -> None:
        self.target, self.taps, self.hot, self.dtype = target, taps, hot.to(target.device), dtype
        self._known = torch.zeros(target.spec.vocab_size, device=target.device).index_fill_(0, self.hot, 1.0)

    def lesson(self, rows: Sequence[Row], *, probs: bool = True) -> Lesson:
        """Read the rows anew; tensors on the target's device, features in the teacher's dtype."""
        device, length = self.target.device, max(len(row.ids) for row in rows)
        flat_rows = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row.ids) for row in rows]))
        flat_places = torch.cat([torch.arange(len(row.ids)) for row in rows])
        tokens = torch.cat([torch.from_numpy(row.ids) for row in rows])
        to_learn = torch.cat([_to_learn(row) for row in rows])
        at_rows, at_places = flat_rows.to(device), flat_places.to(device)
        hidden, tapped = _forward(self.target, rows, tokens.to(device), at_places, at_rows, self.taps)
        features = torch.zeros(len(rows), length, tapped.shape[1], dtype=self.dtype, device=device)
        features[at_rows, at_places] = tapped.to(self.dtype)
        ids = torch.zeros(len(rows), length, dtype=torch.int64, device=device)
        ids[at_rows, at_places] = tokens.to(device).long()
        where = to_learn.nonzero().squeeze(1)
        learnt = hidden.index_select(0, where.to(device)) if probs else hidden[:0]
        likeliest, distribution = self._distributions(learnt)
        following = F.pad(ids[:, 1:], (0, 1))
        return Lesson(
            embedded=F.embedding(following, self.target.embedding).to(self.dtype),
            features=features,
            ids=ids,
            rows=flat_rows[where].to(device),
            places=flat_places[where].to(device),
            probs=distribution,
            known=self._known[likeliest],
        )

    def _distributions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [N] likeliest ids of the whole vocabulary, and fp32 [N, V']."""
        likeliest, probs = [], []
        for chunk in hidden.split(_CHUNK) if len(hidden) else ():
            logits = self.target.logits(chunk)
            likeliest.append(logits.argmax(-1))
            probs.append(logits.index_select(1, self.hot).softmax(-1))
        if not probs:
            return self.hot[:0], self._known.new_zeros(0, len(self.hot))
        return torch.cat(likeliest).clone(), torch.cat(probs).clone()  # clone: a network cannot learn from inference tensors


def _to_learn(row: Row) -> Tensor:
    """bool [tokens]: the next token is one of the completion."""
    places = torch.arange(len(row.ids))
    return (places >= row.prompt_len - 1) & (places < len(row.ids) - 1)


def _forward(
    target: Target, rows: Sequence[Row], tokens: Tensor, places: Tensor, row_ids: Tensor, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """hidden [T, H] behind the final norm, and the taps [T, W]."""
    spec, device = target.spec, target.device
    lengths = [len(row.ids) for row in rows]
    pages = -(-max(lengths) // PAGE_SIZE)
    table = 1 + torch.arange(len(rows) * pages, dtype=torch.int32, device=device).view(len(rows), pages)
    one = KVCache.allocate(
        num_layers=1, num_pages=1 + len(rows) * pages, page_size=PAGE_SIZE, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=target.dtype, device=device,
    )  # fmt: skip
    # Nothing is read of a layer's K/V once the next one runs: all layers write to the same pages.
    cache = KVCache(one.kv.expand(spec.num_layers, *one.kv.shape[1:]), one.draft_kv, PAGE_SIZE)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = FlatBatch(
        token_ids=tokens,
        row_ids=row_ids.int(),
        positions=places,
        slots=table[row_ids, places // PAGE_SIZE].long() * PAGE_SIZE + places % PAGE_SIZE,
        q_start=starts.to(device),
        kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=table,
        max_q=max(lengths),
        max_kv=max(lengths),
        host=HostLayout(lengths, lengths),
    )
    hidden, tapped = target.forward(batch, cache, taps)
    assert tapped is not None
    return hidden, tapped
