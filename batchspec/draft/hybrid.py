"""A head and a lookup together: each row verifies whichever proposal is expected to have more tokens accepted.

Both propose in every round. `kernels/drafting/select_drafts.py` describes how they are compared and what is learnt from the
result. The confidence in a draft is the head's own, or a number after those of the head for each length of the lookup's match: so
rounds measure what drafts of the two are worth apart from each other. The head's catch-up always runs, so that its K/V is the
same as if it drafted alone.
Source: the better of n-grams and a head, as an oracle, in "specdecode-bench" (arXiv 2601.11580); the rule is batchspec's own.
Legend: R rows, K draft_len.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.layer_state import LayerState
from batchspec.cache.pages import KVCache
from batchspec.draft.base import DrafterUpdate
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.corpus import corpus_bytes
from batchspec.draft.eagle3 import Eagle3DrafterSpec, build_chain
from batchspec.draft.head import Head
from batchspec.draft.lookup import LookupDrafter, build_lookup
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.reader import zeros_on
from batchspec.draft.shapes import ChainShape
from batchspec.kernels.drafting.select_drafts import select_drafts, update_acceptance
from batchspec.model.target import Target

HEAD_LEN = 3
"""Most draft tokens of the head per request and round: longer drafts are the lookup's."""
HEAD_PRIOR, LOOKUP_PRIOR = (4.8, 8.0), (4.0, 8.0)
"""(drafts accepted, drafts tried) that the estimates of head and lookup start with, for every match length."""


class HybridDrafter:
    """Keeps for each slot the head's state. Acceptance by the length of the lookup's match is counted over all rows."""

    name = "hybrid"
    fixed_len = False
    most_unprepared: int | None = None

    def __init__(self, head: ChainDrafter | ParallelDrafter, lookup: LookupDrafter, *, slots: int, device: torch.device) -> None:
        """draft_len is the larger of the two; a round with fewer drafts asks both for as many."""
        self.head, self.lookup = head, lookup
        self.prior_chances = (*head.prior_chances, *lookup.prior_chances)
        self._confidence: Tensor | None = None
        self.draft_len = width = max(head.draft_len, lookup.draft_len)
        self.aux_layer_ids = head.aux_layer_ids
        zeros = partial(zeros_on, device)
        self._head_ids, self._lookup_ids = zeros(slots, head.draft_len), zeros(slots, width)
        self._head_len, self._lookup_len, self._match_len, self._picked = (zeros(slots) for _ in range(4))
        self._head_prior, self._lookup_prior = (torch.tensor(prior, device=device) for prior in (HEAD_PRIOR, LOOKUP_PRIOR))
        kinds = 2 * lookup.max_ngram + 1
        self._head_odds, self._lookup_odds = (prior.repeat(kinds, 1) for prior in (self._head_prior, self._lookup_prior))
        self.counts = zeros(4, dtype=torch.int64)
        """int64 [4] rounds of rows that used the head's drafts, the lookup's; accepted drafts of each."""

    @property
    def shape(self) -> ChainShape:
        return ChainShape(self.draft_len)

    @property
    def prefill_by_bounds(self) -> bool:
        return self.head.prefill_by_bounds

    @property
    def mode(self) -> SamplingMode | None:
        return self.head.mode

    @mode.setter
    def mode(self, mode: SamplingMode | None) -> None:
        self.head.mode = mode

    @property
    def confidence(self) -> Tensor | None:
        return self._confidence

    @confidence.setter
    def confidence(self, confidence: Tensor | None) -> None:
        """The head writes its own to a buffer, and `propose` that of the chosen drafts."""
        self._confidence = confidence
        self.head.confidence = None if confidence is None else torch.zeros_like(confidence[:, : self.head.draft_len])

    def layer_states(self, page_size: int) -> tuple[LayerState, ...]:
        return self.head.layer_states(page_size)

    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        self.head.prefill(batch, slot_ids, aux_hidden_states, rows, cache)

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        num_rows, width = draft_ids.shape
        head_ids, lookup_ids, lookup_len, match_len, picked = self._proposals(num_rows, width)
        self.head.propose(rows, head_ids, self._head_len[:num_rows], cache)
        self.lookup.look_up(rows, lookup_ids, lookup_len, match_len)
        select_drafts(
            head_ids, lookup_ids, lookup_len, match_len, self._head_odds, self._lookup_odds, rows.live,
            out_draft_ids=draft_ids, out_draft_len=draft_len, out_picked=picked,
            head_confidence=_part(self.head.confidence, head_ids), out_confidence=_part(self._confidence, draft_ids),
            head_bins=len(self.head.prior_chances), lookup_bins=len(self.lookup.prior_chances),
        )

    @torch.inference_mode()
    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        num_rows, width = len(accepted_len), batch.max_q - 1
        if width:  # else the round had no drafts
            update_acceptance(
                rows.tokens, rows.num_tokens, rows.live, accepted_len, *self._proposals(num_rows, width),
                head_prior=self._head_prior, lookup_prior=self._lookup_prior, head_counts=self._head_odds,
                lookup_counts=self._lookup_odds, totals=self.counts,
            )
        self.head.catch_up(batch, aux_hidden_states, accepted_len, rows, cache, prepare_next=prepare_next)

    def _proposals(self, num_rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Buffers of a round with `width` drafts: head ids, lookup ids, lookup lengths, match lengths, and which of both was
        picked."""
        return (
            self._head_ids[:num_rows, :width],
            self._lookup_ids[:num_rows, :width],
            self._lookup_len[:num_rows],
            self._match_len[:num_rows],
            self._picked[:num_rows],
        )

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        self.lookup.learn(prompt_ids, token_ids)

    def next_update(self) -> DrafterUpdate:
        return self.lookup.next_update()

    def refresh(self, update: DrafterUpdate) -> None:
        self.lookup.refresh(update)


def _part(confidence: Tensor | None, drafts: Tensor) -> Tensor | None:
    """The confidence in these drafts [R, K], of buffers for all slots and the largest K."""
    return None if confidence is None else confidence[: drafts.shape[0], : drafts.shape[1]]


class HybridDrafterSpec(Eagle3DrafterSpec):
    """draft=hybrid: the head drafts up to HEAD_LEN tokens, the lookup up to K."""

    assumed_accepted = 1.2

    @property
    def shape(self) -> ChainShape:
        return ChainShape(self.config.draft.draft_len)

    def corpus_bytes(self) -> int:
        return corpus_bytes(self.config.draft.corpus_tokens)

    def build(self, weights: Head, target: Target, *, slots: int) -> HybridDrafter:
        draft = self.config.draft
        head = build_chain(self.config, weights, target, min(HEAD_LEN, draft.draft_len), slots=slots)
        return HybridDrafter(head, build_lookup(draft, target.device), slots=slots, device=target.device)


SPEC = HybridDrafterSpec
