"""Prompt lookup: propose what followed the same n-gram earlier in the row's prompt or output.

Source of the idea: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from batchspec.draft.base import NoFeatures
from batchspec.kernels.ngram import ngram

if TYPE_CHECKING:
    from batchspec.cache.pages import KVCache
    from batchspec.decode.rows import Rows


class LookupDrafter(NoFeatures):
    """The longest n in max_ngram..min_ngram that occurred before wins; at most `growth` draft tokens for each matched token.

    No checkpoint, any model. Two draft tokens a matched one pay for themselves on text that hardly repeats (README,
    Performance) and still copy whole passages, where matches grow.
    """

    name = "lookup"
    fixed_len = False

    def __init__(self, max_len: int, *, min_ngram: int = 2, max_ngram: int = 6, growth: int = 2) -> None:
        self.max_len = max_len
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.growth = growth

    def propose(self, rows: Rows, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        ngram(
            rows.tokens,
            rows.num_tokens,
            rows.live,
            max_draft_len=draft_ids.shape[1],
            min_ngram=self.min_ngram,
            max_ngram=self.max_ngram,
            growth=self.growth,
            out_draft_ids=draft_ids,
            out_draft_len=draft_len,
        )
