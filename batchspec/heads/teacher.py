"""The target as teacher: one forward pass over whole rows gives the features that the head reads and the distributions that it
learns.

B rows, L positions of the longest row, T tokens, N trained positions, V' draft vocabulary, H hidden, W = number of aux hidden
states * H.
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
from batchspec.heads.data import Row
from batchspec.model.target import Target

PAGE_SIZE = 16
_CHUNK = 4096
"""Number of positions whose logits over the target's vocabulary are in memory at once."""
RANKS_COPIES = 4
"""Copies of logits in memory while ranks exchange them: the rank's own, padded, those of all ranks, and these concatenated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """A batch with the target's outputs for it. Trained positions are those whose next token belongs to the completion."""

    embedded: Tensor
    """[B, L, H] at position t the embedding of token t+1"""
    features: Tensor
    """[B, L, W] aux hidden states"""
    ids: Tensor
    """int64 [B, L] tokens, 0 after a row's end"""
    rows: Tensor
    """int64 [N] the row of each trained position"""
    positions: Tensor
    """int64 [N] the position itself, in its row"""
    probs: Tensor
    """fp32 [N, V'] the target's distribution of the next token over the draft vocabulary; [0, V'] for evaluation"""
    best_ids: Tensor
    """int64 [N] the likeliest draft id"""
    known: Tensor
    """fp32 [N] 1 if the target's likeliest token is in the draft vocabulary, else 0"""


class Teacher:
    """Makes training batches: rows with the target's outputs for them.

    draft_vocab_ids  int64 [V'] ascending target ids of the draft vocabulary
    dtype            dtype of features and embeddings
    prompts          positions of the prompts are trained too
    temperature      temperature of the distributions; below 1 the likeliest token has more weight
    """

    def __init__(
        self,
        target: Target,
        aux_layer_ids: tuple[int, ...],
        draft_vocab_ids: Tensor,
        dtype: torch.dtype,
        *,
        prompts: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.target, self.aux_layer_ids, self.draft_vocab_ids, self.dtype = (
            target,
            aux_layer_ids,
            draft_vocab_ids.to(target.device),
            dtype,
        )
        self._prompts, self._temperature = prompts, temperature
        self._known = torch.zeros(target.spec.vocab_size, device=target.device).index_fill_(0, self.draft_vocab_ids, 1.0)

    def training_batch(self, rows: Sequence[Row], *, probs: bool = True) -> TrainingBatch:
        """The batch of these rows, on the target's device. Does not synchronise: all indices are copied to the device at once."""
        lengths = np.array([len(row.ids) for row in rows])
        total, length, hidden_size = int(lengths.sum()), int(lengths.max()), self.target.spec.hidden_size
        starts = np.concatenate(([0], lengths.cumsum()))
        flat_rows = np.repeat(np.arange(len(rows)), lengths)
        flat_positions = np.arange(total) - starts[flat_rows]
        where = np.flatnonzero(np.concatenate([self._trained(row) for row in rows]))
        tokens, at_rows, at_positions, learnt, ends = self._on_device(
            np.concatenate([row.ids for row in rows]), flat_rows, flat_positions, where, starts
        )
        hidden, aux_hidden_states = _forward(
            self.target, lengths.tolist(), tokens, at_positions, at_rows, ends, self.aux_layer_ids
        )
        flat = at_rows * length + at_positions
        features = torch.zeros(len(rows) * length, aux_hidden_states.shape[1], dtype=self.dtype, device=self.target.device)
        features.index_copy_(0, flat, aux_hidden_states.to(self.dtype))
        ids = torch.zeros(len(rows) * length, dtype=torch.int64, device=self.target.device)
        ids = ids.index_copy_(0, flat, tokens).view(len(rows), length)
        greedy_ids, distribution = self._distributions(hidden.index_select(0, learnt) if probs else hidden[:0])
        following = F.pad(ids[:, 1:], (0, 1)).flatten()
        return TrainingBatch(
            embedded=self.target.embedding.index_select(0, following).view(len(rows), length, hidden_size).to(self.dtype),
            features=features.view(len(rows), length, -1),
            ids=ids,
            rows=at_rows.index_select(0, learnt),
            positions=at_positions.index_select(0, learnt),
            probs=distribution,
            best_ids=distribution.argmax(-1),
            known=self._known[greedy_ids],
        )

    def _trained(self, row: Row) -> npt.NDArray[np.bool_]:
        """[tokens] whether the position is trained."""
        positions = np.arange(len(row.ids))
        first = 0 if self._prompts else row.prompt_len - 1
        trained: npt.NDArray[np.bool_] = (positions >= first) & (positions < len(row.ids) - 1)
        return trained

    def _on_device(self, *arrays: npt.NDArray[np.generic]) -> tuple[Tensor, ...]:
        """The arrays as int64 tensors on the device, by one copy from pinned memory that the host does not wait for."""
        whole = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
        if self.target.device.type == "cuda":
            whole = whole.pin_memory()
        parts = whole.to(self.target.device, non_blocking=True).split([len(array) for array in arrays])
        return tuple(parts)

    def _distributions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest ids int64 [N] of the whole vocabulary, and the distributions fp32 [N, V'] over the draft vocabulary.

        The logits may be inference tensors, which autograd cannot save: they are copied into new tensors.
        """
        greedy_ids = torch.empty(len(hidden), dtype=torch.int64, device=self.draft_vocab_ids.device)
        wide = torch.promote_types(self.target.dtype, torch.float32)
        probs = torch.empty(len(hidden), len(self.draft_vocab_ids), dtype=wide, device=self.draft_vocab_ids.device)
        # Of several ranks the parts, and what they are exchanged in, are in memory besides.
        chunk = _CHUNK if self.target.ranks is None else _CHUNK // RANKS_COPIES
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            logits = self.target.all_logits(hidden[part])
            greedy_ids[part] = logits.argmax(-1)
            probs[part] = logits.index_select(1, self.draft_vocab_ids).div_(self._temperature).softmax(-1)
        return greedy_ids, probs


def _forward(
    target: Target,
    lengths: list[int],
    tokens: Tensor,
    positions: Tensor,
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
    # A layer's K/V are not read after that layer: all layers write to the same pages.
    layers = kv.expand(spec.num_kv_layers, *kv.shape[1:])
    cache = KVCache.of(layout, KVGroups.single(spec.num_kv_layers), (layers,), scales=target.kv_scales)
    batch = FlatBatch(
        token_ids=tokens.int(),
        row_ids=row_ids.int(),
        positions=positions,
        slot_mapping=PAGE_SIZE * (1 + row_ids * pages) + positions,  # a row's pages are consecutive; page 0 is scratch
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
