"""The target as teacher: one pass over whole rows, features for the head to read and distributions for it to learn.

B rows, L places of the longest, T tokens, N places to learn, V' draft vocabulary, H hidden, W = taps * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.cache.groups import KVGroups
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
    """int64 [B, L] tokens, 0 after a row's end"""
    rows: Tensor
    """int64 [N] the row of each place to learn"""
    places: Tensor
    """int64 [N] its place in the row"""
    probs: Tensor
    """fp32 [N, V'] the target's distribution of the next token, over the draft vocabulary alone; [0, V'] for evaluation"""
    best_ids: Tensor
    """int64 [N] its likeliest draft id"""
    known: Tensor
    """fp32 [N] 1 where the target's likeliest token is in the draft vocabulary, else 0"""


class Teacher:
    """Makes lessons.

    hot      int64 [V'] rising target ids of the draft vocabulary
    dtype    of features and embeddings
    prompts  places of the prompts are learnt too: the target has an opinion on every token, whoever wrote it
    heat     temperature of the distributions that are learnt; below 1 the likeliest token counts for more
    """

    def __init__(
        self,
        target: Target,
        aux_layer_ids: tuple[int, ...],
        hot: Tensor,
        dtype: torch.dtype,
        *,
        prompts: bool = False,
        heat: float = 1.0,
    ) -> None:
        self.target, self.aux_layer_ids, self.hot, self.dtype = target, aux_layer_ids, hot.to(target.device), dtype
        self._prompts, self._heat = prompts, heat
        self._known = torch.zeros(target.spec.vocab_size, device=target.device).index_fill_(0, self.hot, 1.0)

    def lesson(self, rows: Sequence[Row], *, probs: bool = True) -> Lesson:
        """Read the rows anew; tensors on the target's device. The host does not wait for it: one copy takes all indices there."""
        lengths = np.array([len(row.ids) for row in rows])
        total, length, hidden_size = int(lengths.sum()), int(lengths.max()), self.target.spec.hidden_size
        starts = np.concatenate(([0], lengths.cumsum()))
        flat_rows = np.repeat(np.arange(len(rows)), lengths)
        flat_places = np.arange(total) - starts[flat_rows]
        where = np.flatnonzero(np.concatenate([self._to_learn(row) for row in rows]))
        tokens, at_rows, at_places, learnt, ends = self._on_device(
            np.concatenate([row.ids for row in rows]), flat_rows, flat_places, where, starts
        )
        hidden, aux_hidden_states = _forward(self.target, lengths.tolist(), tokens, at_places, at_rows, ends, self.aux_layer_ids)
        flat = at_rows * length + at_places
        features = torch.zeros(len(rows) * length, aux_hidden_states.shape[1], dtype=self.dtype, device=self.target.device)
        features.index_copy_(0, flat, aux_hidden_states.to(self.dtype))
        ids = torch.zeros(len(rows) * length, dtype=torch.int64, device=self.target.device)
        ids = ids.index_copy_(0, flat, tokens).view(len(rows), length)
        greedy_sample, distribution = self._distributions(hidden.index_select(0, learnt) if probs else hidden[:0])
        following = F.pad(ids[:, 1:], (0, 1)).flatten()
        return Lesson(
            embedded=self.target.embedding.index_select(0, following).view(len(rows), length, hidden_size).to(self.dtype),
            features=features.view(len(rows), length, -1),
            ids=ids,
            rows=at_rows.index_select(0, learnt),
            places=at_places.index_select(0, learnt),
            probs=distribution,
            best_ids=distribution.argmax(-1),
            known=self._known[greedy_sample],
        )

    def _to_learn(self, row: Row) -> npt.NDArray[np.bool_]:
        """[tokens]: the next token is one to learn."""
        places = np.arange(len(row.ids))
        wanted: npt.NDArray[np.bool_] = (places >= (0 if self._prompts else row.prompt_len - 1)) & (places < len(row.ids) - 1)
        return wanted

    def _on_device(self, *arrays: npt.NDArray[np.generic]) -> tuple[Tensor, ...]:
        """int64 tensors, by one copy; from pinned memory, so that the host goes on at once."""
        whole = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
        if self.target.device.type == "cuda":
            whole = whole.pin_memory()
        parts = whole.to(self.target.device, non_blocking=True).split([len(array) for array in arrays])
        return tuple(parts)

    def _distributions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [N] likeliest ids of the whole vocabulary, and fp32 [N, V']; a network could save no inference tensors."""
        greedy_sample = torch.empty(len(hidden), dtype=torch.int64, device=self.hot.device)
        wide = torch.promote_types(self.target.dtype, torch.float32)
        probs = torch.empty(len(hidden), len(self.hot), dtype=wide, device=self.hot.device)
        for at in range(0, len(hidden), _CHUNK):
            part = slice(at, at + _CHUNK)
            logits = self.target.logits(hidden[part])
            greedy_sample[part] = logits.argmax(-1)
            probs[part] = logits.index_select(1, self.hot).div_(self._heat).softmax(-1)
        return greedy_sample, probs


def _forward(
    target: Target,
    lengths: list[int],
    tokens: Tensor,
    places: Tensor,
    row_ids: Tensor,
    starts: Tensor,
    aux_layer_ids: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """hidden [T, H] after the final norm, and the aux hidden states [T, W]."""
    spec, device = target.spec, target.device
    pages = -(-max(lengths) // PAGE_SIZE)
    table = 1 + torch.arange(len(lengths) * pages, dtype=torch.int32, device=device).view(len(lengths), pages)
    layout = spec.kv_layout(target.dtype, PAGE_SIZE)
    kv = layout.allocate(1, 1 + len(lengths) * pages, device)
    # Nothing is read of a layer's K/V once the next one runs: all layers write to the same pages.
    cache = KVCache.of(layout, KVGroups.single(spec.num_layers), (kv.expand(spec.num_layers, *kv.shape[1:]),))
    batch = FlatBatch(
        token_ids=tokens.int(),
        row_ids=row_ids.int(),
        positions=places,
        slot_mapping=PAGE_SIZE * (1 + row_ids * pages) + places,  # a row's pages lie in order, after the first one
        cu_seqlens_q=starts.int(),
        kv_len=starts.diff().int(),
        page_table=table,
        max_q=max(lengths),
        max_kv=max(lengths),
        host=HostLayout(lengths, lengths),
    )
    hidden, aux_hidden_states = target.forward(batch, cache, aux_layer_ids)
    assert aux_hidden_states is not None
    return hidden, aux_hidden_states
