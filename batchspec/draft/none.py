"""No drafter: plain decoding, one token a row and round."""

from __future__ import annotations

from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.draft.base import NoFeatures
from batchspec.draft.shapes import ChainShape
from batchspec.draft.spec import Weightless
from batchspec.model.target import Target


class NoDrafter(NoFeatures):
    """A round verifies the newest token alone."""

    name = "none"
    draft_len = 0
    fixed_len = True

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        draft_len.zero_()


class NoDrafterSpec(Weightless):
    """draft=none."""

    assumed_accepted = 0.0

    @property
    def shape(self) -> ChainShape:
        return ChainShape(0)

    def build(self, weights: None, target: Target, *, slots: int) -> NoDrafter:
        return NoDrafter()


SPEC = NoDrafterSpec
