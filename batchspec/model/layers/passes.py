"""A pass over a flat batch, as mixers see it: the batch, and what they prepare once for several layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.distributed.collectives import Collectives
from batchspec.kernels.lora.lora_tokens import LoraTokens

T = TypeVar("T")


class Pass:
    """One pass of a model."""

    def __init__(
        self, batch: FlatBatch, tables: Mapping[Hashable, Tensor], dtype: torch.dtype, *, lora: LoraTokens | None = None,
        ranks: Collectives | None = None, window: int | None = None, sink: int = 0,
    ) -> None:
        """
        tables        `MixerSpec.tables` of all layers, on the device
        dtype         of the computation
        lora          which tokens go through which adapter; None in a model without
        ranks         those that compute the model together; None: this process alone
        window, sink  layers read only their newest `window` keys and the first `sink` ones; smaller own windows apply too
        """
        self.batch, self.tables, self.dtype, self.lora, self.ranks = batch, tables, dtype, lora, ranks
        self.window, self.sink = window, sink
        self._groups: dict[int, FlatBatch] = {}
        self._made: dict[Hashable, object] = {}

    def of_group(self, group: int) -> FlatBatch:
        """The batch in the pages of one K/V group."""
        if group not in self._groups:
            self._groups[group] = self.batch.of_group(group)
        return self._groups[group]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns for the first layer that asks with this key, such as `Kept.key`."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]  # type: ignore[assignment]  # each key has one type of value
        return found
