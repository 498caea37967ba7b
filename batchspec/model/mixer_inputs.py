"""What the mixers of a forward pass read besides the stream: pages, plans of attention, rotations, states."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.attention import plan_attention
from batchspec.cache.pages import KVCache
from batchspec.distributed.collectives import Collectives
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.decoder import PagedAttend, PagedStore
from batchspec.model.rope import Rope
from batchspec.model.spec import ModelSpec


class MixerInputs:
    """Of one pass over a flat batch. Layers are counted among those that attend: 0 .. num_kv_layers - 1."""

    def __init__(
        self, spec: ModelSpec, batch: FlatBatch, cache: KVCache, ropes: list[Rope], *, lora: LoraTokens | None,
        ranks: Collectives | None, window: int | None, sink: int,
    ) -> None:
        """
        ropes         the rotations of each layer
        window, sink  every layer reads only its newest `window` keys and the first `sink` ones; smaller own windows apply too
        """
        self._spec, self._cache, self._ropes, self._lora, self._ranks = spec, cache, ropes, lora, ranks
        self._group_of = cache.groups.target_layers
        self._batches = [batch.of_group(group) for group in range(cache.groups.num_groups)]
        # Layers with the same window are in one group, and one plan fits all of them.
        any_layer = {own: i for i, own in enumerate(spec.windows)}
        self._ranges = {own: _narrowed(own, window, sink) for own in any_layer}
        self._plans = {
            own: plan_attention(self._batch(i), cache.layer(i), num_heads=spec.num_heads, **self._ranges[own])
            for own, i in any_layer.items()
        }

    def store(self, layer: int) -> PagedStore:
        """Where a layer keeps K and V of the pass's tokens."""
        norm_ranks = self._ranks if self._spec.attentions[layer].qk_norm_rows else None
        return PagedStore(
            rope=self._ropes[layer], slot_mapping=self._batch(layer).slot_mapping, kv=self._cache.layer(layer), lora=self._lora,
            norm_ranks=norm_ranks,
        )

    def attend(self, layer: int) -> PagedAttend:
        """The attention of all tokens."""
        return PagedAttend(kv=self._cache.layer(layer), plan=self._plans[self._spec.windows[layer]], lora=self._lora)

    def attend_at(self, layer: int, places: Tensor, lora: LoraTokens | None) -> PagedAttend:
        """The attention of each row's last token alone. places int64 [R] their flat indices; lora: their adapters."""
        kv, ends = self._cache.layer(layer), ends_of(self._batch(layer), places)
        plan = plan_attention(ends, kv, num_heads=self._spec.num_heads, **self._ranges[self._spec.windows[layer]])
        return PagedAttend(kv=kv, plan=plan, lora=lora)

    def _batch(self, layer: int) -> FlatBatch:
        return self._batches[self._group_of[layer]]


class _Range(TypedDict):
    window: int | None
    sink: int


def _narrowed(own: int | None, window: int | None, sink: int) -> _Range:
    """The keys that a layer with its own window reads if `window` and `sink` are asked for."""
    if window is None or (own is not None and own <= window):
        return {"window": own, "sink": 0}
    return {"window": window, "sink": sink if own is None else 0}


def ends_of(batch: FlatBatch, places: Tensor) -> FlatBatch:
    """The batch of each row's last token, which attends to all of the row's keys."""
    count = torch.arange(len(places) + 1, dtype=torch.int32, device=places.device)
    return replace(
        batch,
        token_ids=batch.token_ids.index_select(0, places),
        row_ids=count[:-1],
        positions=batch.positions.index_select(0, places),
        slot_mapping=batch.slot_mapping.index_select(0, places),
        cu_seqlens_q=count,
        max_q=1,
        host=None,
    )
