"""What the mixers of a forward pass read besides the stream: pages, plans of attention, rotations, states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, Recurrence
from batchspec.cache.pages import KVCache
from batchspec.distributed.collectives import Collectives
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaState
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.paged import PagedAttend, PagedStore
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.layers.attention.rope import Rope
from batchspec.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStore:
    """The rows of a pass and their states in one recurrent layer."""

    state: DeltaState
    batch: DeltaBatch
    recurrence: Recurrence
    lora: LoraTokens | None = None


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """The tokens of the second part of a recurrent layer: a `Selected`."""

    lora: LoraTokens | None


class MixerInputs:
    """Of one pass over a flat batch."""

    def __init__(
        self, spec: ModelSpec, batch: FlatBatch, cache: KVCache, ropes: list[Rope], *, lora: LoraTokens | None,
        ranks: Collectives | None, window: int | None, sink: int, first: int = 0,
    ) -> None:
        """
        ropes         the rotations of each layer that attends
        first         the layer with which the pass begins
        window, sink  these layers read only their newest `window` keys and the first `sink` ones; smaller own windows apply too
        """
        self._spec, self._cache, self._lora, self._ranks = spec, cache, lora, ranks
        self._ropes = dict(zip(spec.attention_layers, ropes, strict=True))
        self._batch, self._window, self._sink = batch, window, sink
        self._kv_ids = spec.kv_ids
        self._group_of = cache.groups.target_layers
        self._batches = [batch.of_group(group) for group in range(cache.groups.num_groups)]
        self._plans: dict[object, AttentionPlan] = {}
        for layer in spec.attention_layers:
            if layer >= first and (kind := self._kind(layer)) not in self._plans:
                self._plans[kind] = self._plan(layer, self._batches[self._group(layer)])

    def store(self, layer: int) -> PagedStore | RecurrentStore:
        """Where a layer keeps what the pass's tokens bring."""
        index = self._kv_ids.get(layer)
        if index is None:
            return RecurrentStore(
                state=self._state(layer), batch=self._delta_batch, recurrence=self._batch.recurrence, lora=self._lora
            )
        norm_ranks = self._ranks if self._spec.layers[layer].attention.qk_norm_rows else None
        return PagedStore(
            rope=self._ropes[layer], slot_mapping=self._batches[self._group(layer)].slot_mapping,
            kv=LayerKV.of(self._cache.layer(index)), lora=self._lora, norm_ranks=norm_ranks,
        )

    def attend(self, layer: int) -> PagedAttend | SelectedTokens:
        """The second part of a layer, for all tokens."""
        index = self._kv_ids.get(layer)
        if index is None:
            return SelectedTokens(self._lora)
        return PagedAttend(kv=LayerKV.of(self._cache.layer(index)), plan=self._plans[self._kind(layer)], lora=self._lora)

    def _kind(self, layer: int) -> object:
        """What the attention of layers with one plan has in common; layers with one window are in one group."""
        own, kv = self._spec.layers[layer].attention, self._cache.layer(self._kv_ids[layer])
        return own.window, own.num_heads, kv.layout

    def _group(self, layer: int) -> int:
        return self._group_of[self._kv_ids[layer]]

    def _plan(self, layer: int, batch: FlatBatch) -> AttentionPlan:
        own, kv = self._spec.layers[layer].attention, LayerKV.of(self._cache.layer(self._kv_ids[layer]))
        return plan_attention(batch, kv, num_heads=own.num_heads, **_narrowed(own.window, self._window, self._sink))

    def _state(self, layer: int) -> DeltaState:
        state, conv_inputs, keys, values, gates = self._cache.target_rows[layer]
        assert self._cache.num_folded is not None
        return DeltaState(
            state=state, conv_inputs=conv_inputs, keys=keys, values=values, gates=gates, folded=self._cache.num_folded
        )

    @cached_property
    def _delta_batch(self) -> DeltaBatch:
        batch, num_rows = self._batch, self._batch.kv_len.shape[0]
        slots = batch.slots
        if slots is None:
            slots = torch.arange(num_rows, device=batch.kv_len.device)
        return DeltaBatch(
            cu_seqlens=batch.cu_seqlens_q, positions=batch.positions, row_ids=batch.row_ids, slots=slots.int(), live=batch.kv_len,
            max_tokens=batch.max_q,
        )


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
        more_groups=tuple(replace(own, slot_mapping=own.slot_mapping.index_select(0, places)) for own in batch.more_groups),
    )
