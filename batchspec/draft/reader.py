"""What all drafters with a head share: the head, its K/V, and the pass over positions with the target's hidden states.

Legend: T flat positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.image_inputs import AxisPositions
from batchspec.cache.layer_state import LayerState, RowTensor
from batchspec.cache.page_format import LayerPages
from batchspec.cache.pages import KVCache
from batchspec.draft.base import DrafterBase
from batchspec.draft.bound_head import DraftWeights, HeadShape, Place, head_states
from batchspec.kernels.sampling.argmax import PROBABILITIES
from batchspec.model.layers.attention.rope import Rope, rope_frequencies, rope_of
from batchspec.model.target import Target


class Reading(TypedDict, total=False):
    """Arguments that every drafter with a head takes; all are optional."""

    window: int | None
    """Number of newest keys that the head reads besides the first `sink` ones, at most; its own windows apply too. None: all."""
    sink: int
    fp8_kv: bool
    """Store K and V of the head as e4m3."""
    dead_positions: bool
    """False: every position of a catch-up runs through the whole head (ablation)."""
    argmax: bool
    """False: drafts are chosen by softmax and top-k (ablation)."""


class HeadReader(DrafterBase):
    """A head bound to a target; its K/V layers follow the target's in every page."""

    fixed_len = True
    prior_chances = PROBABILITIES

    def __init__(
        self, head: DraftWeights, target: Target, draft_len: int, *, window: int | None = None, sink: int = 0,
        fp8_kv: bool = False, dead_positions: bool = True, argmax: bool = True,
    ) -> None:
        """See `Reading`."""
        spec = head.spec
        self.draft_len = draft_len
        self.aux_layer_ids = spec.aux_layer_ids
        self.head = head.bind(target, argmax=argmax)
        self._spec, self._dtype = spec, target.dtype
        self._windows = [own if window is None else min(window, own or window) for own in spec.windows]
        self._fp8_kv, self._window = fp8_kv, window
        self._sink = sink if window is not None else 0
        self._prune, self._last = dead_positions, spec.num_layers - 1
        self._freqs = rope_frequencies(spec.rope, spec.head_dim).to(target.device)

    @property
    def prefill_by_bounds(self) -> bool:
        return not self._sink  # no prefill kernel computes attention with a sink

    def _read(
        self, batch: FlatBatch, tokens: Tensor, line: Tensor, features: Tensor, cache: KVCache, num_layers: int
    ) -> tuple[Tensor, Tensor, Place]:
        """Run all T positions through the first `num_layers` layers.

        tokens    int32 [rows, M]; line [T] the row of each position; a rejected position may read any token
        features  [T, H] of `BoundHead.features`; the layers may change them
        Returns the next layer's input, the residual stream, and rotations and slots of the positions.
        """
        at = Place(self._rope(batch.rope_positions), batch.slot_mapping)
        normed, residual = self.head.enter(
            tokens, features, row_ids=line, positions=batch.positions, images=batch.next_images
        )
        plans = self._plans(batch, cache, range(num_layers))
        for i in range(num_layers):
            normed = self.head.layer(i, normed, residual, at, self._pages(cache, i), plans[self._windows[i]])
        return normed, residual, at

    @staticmethod
    def row_tensors(spec: HeadShape, dtype: torch.dtype) -> tuple[RowTensor, ...]:
        """What it keeps of each slot's row from round to round, in `KVCache.draft_rows`."""
        raise NotImplementedError

    def layer_states(self, page_size: int) -> tuple[LayerState, ...]:
        return head_states(
            self.head.mixer, self._spec.windows, self._dtype, page_size, row=self.row_tensors(self._spec, self._dtype),
            fp8=self._fp8_kv, window=self._window, sink=self._sink,
        )

    def _rope(self, positions: Tensor | AxisPositions) -> Rope:
        return rope_of(positions, self._freqs, self._spec.rope, self._dtype)

    def _pages(self, cache: KVCache, index: int) -> LayerPages:
        found = cache.draft_kept[index].pages
        assert found is not None
        return found

    def _plans(self, batch: FlatBatch, cache: KVCache, layers: Iterable[int]) -> dict[int | None, Any]:
        pages, windows = self._pages(cache, 0), {self._windows[i] for i in layers}
        return {w: self.head.mixer.plan(batch, pages, window=w, sink=self._sink) for w in windows}


def zeros_on(device: torch.device, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """A buffer that a drafter keeps from round to round."""
    return torch.zeros(shape, dtype=dtype, device=device)
