"""What may go wrong in an MTP drafter and changes no token: each fault as a patch of the drafter."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.pages import KVCache
from batchspec.draft import mtp_head
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.mtp_head import MtpHead, MtpShape
from batchspec.kernels.drafting.eagle_head_input import eagle_head_input
from batchspec.model.layers.latent.block import LatentAttention, LatentSpec
from batchspec.model.layers.latent.store import LatentStore

_KEEPER = LatentAttention.keeper
_FEATURES, _PREFILL, _CATCH_UP = MtpHead.features, ChainDrafter.prefill, ChainDrafter.catch_up


def _of_the_position_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MtpHead, "features", lambda self, aux_hidden_states: _FEATURES(self, aux_hidden_states).roll(1, 0))


def _before_the_final_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MtpHead, "features", lambda self, aux_hidden_states: aux_hidden_states.clone())


def _stale(patch: pytest.MonkeyPatch) -> None:
    """Accepted positions keep the K/V of the drafting pass. New are that of the one that drafts next and what drafting leaves
    out."""

    def catch_up(
        self: ChainDrafter, batch: FlatBatch, aux: Tensor | None, accepted_len: Tensor, *rest: Any, **options: Any
    ) -> None:
        row_ids = batch.row_ids.long().clamp(max=len(accepted_len) - 1)
        place = torch.arange(len(row_ids), device=row_ids.device) - batch.cu_seqlens_q[row_ids]
        kept = place < accepted_len[row_ids].clamp(max=batch.max_q - 2)
        slots = batch.slot_mapping.masked_fill(kept, 0)
        _CATCH_UP(self, replace(batch, slot_mapping=slots), aux, accepted_len, *rest, **options)

    patch.setattr(ChainDrafter, "catch_up", catch_up)


def _not_shifted(patch: pytest.MonkeyPatch) -> None:
    """A position of the prompt reads its own token in place of the one after it."""

    def prefill(
        self: ChainDrafter, batch: FlatBatch, slot_ids: Tensor, aux: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        own = copy(rows)
        own.tokens = rows.tokens.roll(1, 1)
        _PREFILL(self, batch, slot_ids, aux, own, cache)

    patch.setattr(ChainDrafter, "prefill", prefill)


def _exchanged(patch: pytest.MonkeyPatch) -> None:
    """fc reads the hidden state where the embedding should be, and the reverse."""

    def head_input(*args: Any, out: Tensor, **options: Any) -> None:
        eagle_head_input(*args, out=out, **options)
        out.copy_(out.roll(out.shape[1] // 2, 1))

    patch.setattr(mtp_head, "eagle_head_input", head_input)


def _fed_before_its_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MtpShape, "feed_normed", False)


def _of_the_first_step(patch: pytest.MonkeyPatch) -> None:
    """Queries of later steps of a chain attend to the keys of the first step."""
    attend = LatentSpec.attend
    patch.setattr(LatentSpec, "attend", lambda self, pages, plan, positions=None: attend(self, pages, plan))


def _kept_without_norm(patch: pytest.MonkeyPatch) -> None:
    """Tokens that only leave a latent leave one that is not normed."""

    def keeper(self: LatentAttention) -> Callable[[Tensor, LatentStore], Tensor]:
        own = copy(self)
        own._kv_norm = torch.ones_like(self._kv_norm)
        return _KEEPER(own)

    patch.setattr(LatentAttention, "keeper", keeper)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the hidden state of the position before": _of_the_position_before,
    "the hidden state before the final norm": _before_the_final_norm,
    "K/V of accepted positions not rewritten": _stale,
    "tokens of the prompt not shifted by one": _not_shifted,
    "halves of fc exchanged": _exchanged,
}
SMALL_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a step fed with the state before the layer's norm": _fed_before_its_norm,
}
"""Those that drafts show, but acceptance need not."""
LATENT_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "later steps read the keys of the first one": _of_the_first_step,
    "a latent that is kept alone is not normed": _kept_without_norm,
}
"""Those of an MTP layer with latent attention."""
