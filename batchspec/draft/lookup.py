"""Prompt lookup: proposes the tokens that followed the same n-gram earlier in the row's prompt or output, or in a finished row.

Source of the idea: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache
from batchspec.config.draft_schema import DraftConfig
from batchspec.draft.base import NO_UPDATE, DrafterUpdate, NoFeatures
from batchspec.draft.corpus import Corpus, corpus_bytes, default_lengths
from batchspec.draft.spec import Weightless
from batchspec.kernels.drafting.corpus_lookup import corpus_lookup
from batchspec.kernels.drafting.ngram_lookup import ngram_lookup
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS
from batchspec.model.target import Target

GROWTH = 2
"""Most drafts per matched token. Two cost no speed on text with few repetitions. Long passages are still copied whole, because
each accepted draft makes the next match longer."""


class LookupDrafter(NoFeatures):
    """The longest n-gram of max_ngram..min_ngram tokens that occurred before wins; at most GROWTH drafts per matched token.

    It needs no checkpoint and works with any model. If a corpus of finished rows has a longer match than the row's own tokens,
    the drafts come from there. There are fewer of them if the occurrences in the corpus continue differently
    (`kernels/drafting/corpus_lookup.py`).
    """

    name = "lookup"
    fixed_len = False

    def __init__(self, draft_len: int, *, min_ngram: int, max_ngram: int, corpus: Corpus | None = None) -> None:
        """corpus: an index of n-grams of min_ngram to max_ngram tokens; None: only the row's own tokens are searched"""
        self.draft_len = draft_len
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.corpus = corpus

    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        match_len = torch.empty_like(draft_len)
        self.look_up(rows, draft_ids, draft_len, match_len)
        if self.confidence is not None:
            num_rows, width = draft_ids.shape
            self.confidence[:num_rows, :width] = match_len.clamp(max=CONFIDENCE_BINS - 1).unsqueeze(1)

    def look_up(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, match_len: Tensor) -> None:
        """As `propose`; match_len out int32 [R] number of matched tokens: 0 for none, max_ngram + n for n in the corpus."""
        ngram_lookup(
            rows.tokens,
            rows.num_tokens,
            rows.live,
            max_draft_len=draft_ids.shape[1],
            min_ngram=self.min_ngram,
            max_ngram=self.max_ngram,
            growth=GROWTH,
            out_draft_ids=draft_ids,
            out_draft_len=draft_len,
            out_match_len=match_len,
        )
        if self.corpus is None:
            return
        corpus_lookup(
            rows.tokens,
            rows.num_tokens,
            rows.live,
            self.corpus.which,
            self.corpus.table,
            self.corpus.tokens,
            lengths=self.corpus.lengths,
            max_ngram=self.max_ngram,
            max_draft_len=draft_ids.shape[1],
            growth=GROWTH,
            draft_ids=draft_ids,
            draft_len=draft_len,
            match_len=match_len,
        )

    def learn(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        if self.corpus is not None:
            self.corpus.learn(prompt_ids, token_ids)

    def next_update(self) -> DrafterUpdate:
        return NO_UPDATE if self.corpus is None else self.corpus.next_update()

    def refresh(self, update: DrafterUpdate) -> None:
        if self.corpus is not None:
            self.corpus.refresh(update)


class LookupDrafterSpec(Weightless):
    """draft=lookup."""

    assumed_accepted = 0.8
    """Measured with K = 4 over 88 mixed prompts (Spec-Bench) of a small model, replayed."""

    def corpus_bytes(self) -> int:
        return corpus_bytes(self.config.draft.corpus_tokens)

    def build(self, weights: None, target: Target, *, slots: int) -> LookupDrafter:
        return build_lookup(self.config.draft, target.device)


def build_lookup(draft: DraftConfig, device: torch.device) -> LookupDrafter:
    """The lookup of these settings, with a corpus if they ask for one."""
    corpus = None
    if draft.corpus_tokens:
        lengths = default_lengths(draft.prompt_lookup_min, draft.prompt_lookup_max)
        corpus = Corpus(draft.corpus_tokens, lengths=lengths, device=device)
    return LookupDrafter(
        draft.draft_len,
        min_ngram=draft.prompt_lookup_min,
        max_ngram=draft.prompt_lookup_max,
        corpus=corpus,
    )


SPEC = LookupDrafterSpec
