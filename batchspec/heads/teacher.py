"""The target as teacher: one forward pass over whole rows gives the features that the drafter reads and the distributions that it
learns.

B rows, L positions of the longest row, T tokens, N trained positions, V' draft vocabulary, H hidden, W = number of aux hidden
states * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.cache.groups import KVGroups
from batchspec.cache.kept import kept_of
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.pages import KVCache
from batchspec.heads.data import Row
from batchspec.model.target import Target

PAGE_SIZE = 16
_CHUNK = 4096
"""Number of positions whose logits over the target's vocabulary are in memory at once."""
RANKS_COPIES = 4
"""Copies of logits in memory while ranks exchange them: the rank's own, padded, those of all ranks, and these concatenated."""


class Distributions(Protocol):
    """The target's distributions of the next token at the N trained positions."""

    def __getitem__(self, part: slice) -> Tensor:
        """fp32 [n, V'] those of some positions, over the draft vocabulary."""


class WholeVocabulary:
    """Distributions over all V tokens, computed anew for each part: stored, those of 32,768 positions over 248,320 tokens would
    take 33 GB."""

    def __init__(self, target: Target, hidden: Tensor, temperature: float) -> None:
        """hidden  [N, H] of the target at these positions"""
        self._target, self._hidden, self._temperature = target, hidden, temperature

    def __getitem__(self, part: slice) -> Tensor:
        return (self._target.all_logits(self._hidden[part]) / self._temperature).softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """A batch with the target's outputs for it. Trained positions are those whose next token belongs to the completion."""

    embedded: Tensor
    """[B, L, H] at position t the embedding of token t+1"""
    features: Tensor
    """[B, L, W] aux hidden states, or the hidden states after the final norm"""
    ids: Tensor
    """int64 [B, L] tokens, 0 after a row's end"""
    rows: Tensor
    """int64 [N] the row of each trained position"""
    positions: Tensor
    """int64 [N] the position itself, in its row"""
    probs: Distributions
    """None of them, [0, V'], for evaluation."""
    best_ids: Tensor
    """int64 [N] the likeliest draft id"""
    known: Tensor
    """fp32 [N] 1 if the target's likeliest token is in the draft vocabulary, else 0"""


class Teacher:
    """Makes training batches: rows with the target's outputs for them.

    aux_layer_ids    boundaries whose aux hidden states are the features; (): the features are the hidden states after the final
                     norm
    draft_vocab_ids  int64 [V'] ascending target ids of the draft vocabulary; None: all tokens, whose distributions are not stored
    dtype            dtype of features and embeddings
    prompts          positions of the prompts are trained too
    temperature      temperature of the distributions; below 1 the likeliest token has more weight
    """

    def __init__(
        self,
        target: Target,
        aux_layer_ids: tuple[int, ...],
        draft_vocab_ids: Tensor | None,
        dtype: torch.dtype,
        *,
        prompts: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.target, self.aux_layer_ids, self.dtype = target, aux_layer_ids, dtype
        self._stores_probs, vocab_size = draft_vocab_ids is not None, target.spec.vocab_size
        self.draft_vocab_ids = (torch.arange(vocab_size) if draft_vocab_ids is None else draft_vocab_ids).to(target.device)
        self._prompts, self._temperature = prompts, temperature
        self._known = torch.zeros(vocab_size, device=target.device).index_fill_(0, self.draft_vocab_ids, 1.0)

    def training_batch(self, rows: Sequence[Row], *, probs: bool = True) -> TrainingBatch:
        """The batch of these rows, on the target's device. Does not synchronise: all indices are copied to the device at once."""
        lengths = np.array([len(row.ids) for row in rows])
        total, length, hidden_size = int(lengths.sum()), int(lengths.max()), self.target.spec.hidden_size
        starts = np.concatenate(([0], lengths.cumsum()))
        flat_rows = np.repeat(np.arange(len(rows)), lengths)
        flat_positions = np.arange(total) - starts[flat_rows]
        where = np.flatnonzero(np.concatenate([self._trained(row) for row in rows]))
        tokens, at_rows, at_positions, learnt, ends = on_device(
            self.target.device, np.concatenate([row.ids for row in rows]), flat_rows, flat_positions, where, starts
        )
        hidden, aux_hidden_states = _forward(
            self.target, lengths.tolist(), tokens, at_positions, at_rows, ends, self.aux_layer_ids
        )
        read = hidden if aux_hidden_states is None else aux_hidden_states
        flat = at_rows * length + at_positions
        features = torch.zeros(len(rows) * length, read.shape[1], dtype=self.dtype, device=self.target.device)
        features.index_copy_(0, flat, read.to(self.dtype))
        ids = torch.zeros(len(rows) * length, dtype=torch.int64, device=self.target.device)
        ids = ids.index_copy_(0, flat, tokens).view(len(rows), length)
        greedy_ids, best_ids, distributions = self._distributions(hidden.index_select(0, learnt) if probs else hidden[:0])
        following = F.pad(ids[:, 1:], (0, 1)).flatten()
        return TrainingBatch(
            embedded=self.target.embedding.index_select(0, following).view(len(rows), length, hidden_size).to(self.dtype),
            features=features.view(len(rows), length, -1),
            ids=ids,
            rows=at_rows.index_select(0, learnt),
            positions=at_positions.index_select(0, learnt),
            probs=distributions,
            best_ids=best_ids,
            known=self._known[greedy_ids],
        )

    def _trained(self, row: Row) -> npt.NDArray[np.bool_]:
        """[tokens] whether the position is trained."""
        positions = np.arange(len(row.ids))
        first = 0 if self._prompts else row.prompt_len - 1
        trained: npt.NDArray[np.bool_] = (positions >= first) & (positions < len(row.ids) - 1)
        return trained

    def _distributions(self, hidden: Tensor) -> tuple[Tensor, Tensor, Distributions]:
        """The likeliest ids int64 [N] of the whole vocabulary and of the draft vocabulary, and the distributions over the latter.

        The logits may be inference tensors, which autograd cannot save: they are copied into new tensors.
        """
        greedy_ids, stores = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device), self._stores_probs
        wide = torch.promote_types(self.target.dtype, torch.float32)
        probs = torch.empty(len(hidden), len(self.draft_vocab_ids) if stores else 0, dtype=wide, device=hidden.device)
        # Of several ranks the parts, and what they are exchanged in, are in memory besides.
        chunk = _CHUNK if self.target.ranks is None else _CHUNK // RANKS_COPIES
        for at in range(0, len(hidden), chunk):
            part = slice(at, at + chunk)
            logits = self.target.all_logits(hidden[part])
            greedy_ids[part] = logits.argmax(-1)
            if stores:
                probs[part] = logits.index_select(1, self.draft_vocab_ids).div_(self._temperature).softmax(-1)
        if stores:
            return greedy_ids, probs.argmax(-1), probs
        return greedy_ids, greedy_ids, WholeVocabulary(self.target, hidden, self._temperature)


def on_device(device: torch.device, *arrays: npt.NDArray[np.generic]) -> tuple[Tensor, ...]:
    """The arrays as int64 tensors on the device, by one copy from pinned memory that the host does not wait for."""
    whole = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
    if device.type == "cuda":
        whole = whole.pin_memory()
    return tuple(whole.to(device, non_blocking=True).split([len(array) for array in arrays]))


def _forward(
    target: Target,
    lengths: list[int],
    tokens: Tensor,
    positions: Tensor,
    row_ids: Tensor,
    starts: Tensor,
    aux_layer_ids: tuple[int, ...],
) -> tuple[Tensor, Tensor | None]:
    """hidden [T, H] after the final norm, and the aux hidden states [T, W], or None without ids."""
    spec, device = target.spec, target.device
    pages = -(-max(lengths) // PAGE_SIZE)
    table = 1 + torch.arange(len(lengths) * pages, dtype=torch.int32, device=device).view(len(lengths), pages)
    states = spec.layer_states(target.dtype, PAGE_SIZE, draft_len=0)
    # All layers of one format write to the same pages, but for those whose pages are read after them.
    read = {state.reads for state in states}
    kinds = [(state.pages, i if i in read else None) for i, state in enumerate(states) if state.pages is not None]
    memory = {kind: kind[0].allocate(1, 1 + len(lengths) * pages, device)[0] for kind in dict.fromkeys(kinds)}
    scales: Sequence[Tensor | None] = [None] * len(kinds) if target.kv_scales is None else target.kv_scales
    layers = tuple(kind[0].open(memory[kind], own) for kind, own in zip(kinds, scales, strict=True))
    rows, num_folded = _row_tensors(states, len(lengths), device)
    groups = KVGroups.single(len(layers))
    cache = KVCache(
        layers=layers, groups=groups, target_pages=(), page_size=PAGE_SIZE, table_ids=(0,),
        kept=kept_of(states, layers, groups.target_layers, rows=rows, num_folded=num_folded), num_folded=num_folded,
    )
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
    return target.forward(batch, cache, aux_layer_ids)


def _row_tensors(
    layers: Sequence[LayerState], num_rows: int, device: torch.device
) -> tuple[list[tuple[Tensor, ...]], Tensor | None]:
    """The row tensors of each layer, and `KVCache.num_folded`. Layers of one shape share them: a state is not read after its
    layer, and at the first position of a row none is read at all."""

    @cache
    def allocated(shapes: tuple[RowTensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(num_rows, *own.shape, dtype=own.dtype, device=device) for own in shapes)

    rows = [allocated(layer.row) for layer in layers]
    lags = any(layer.lags for layer in layers)
    return rows, torch.zeros(num_rows, dtype=torch.int32, device=device) if lags else None
