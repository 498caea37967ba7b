"""How many pages requests are predicted to need in the end, so that those that enter slots can all end there.

A request is admitted only if the pools can also hold what the requests in slots are predicted to need later.
"""

from __future__ import annotations

import numpy as np

from batchspec.cache.page_tables import Counts, PagePools
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.slot_table import SlotTable

SHORT_CAP_TOKENS = 512
"""For requests whose limit is at most this many output tokens, pages for all of them are reserved at once."""


class ExpectedPages:
    """With a short limit: all pages up to the limit. Otherwise: those of the predicted length; a request that has outgrown its
    prediction is expected to emit half as many tokens again, so that a preempted request is not preempted again soon after it
    returns."""

    def __init__(self, page_size: int, num_lookahead_slots: int) -> None:
        """num_lookahead_slots: K/V slots after a row's last token that it needs too, such as those of a tree's nodes."""
        self._page_size, self._num_lookahead_slots = page_size, num_lookahead_slots

    def of_waiting(self, state: RequestState) -> int:
        """Pages that a waiting request is predicted to need in the end: `_at_end` for one request, in Python ints."""
        request, at_end = state.request, state.max_tokens
        if request.max_new_tokens > SHORT_CAP_TOKENS:
            output = max(request.predicted_tokens, len(state.tokens) * 3 // 2 + 4 * self._page_size)
            at_end = min(at_end, len(request.prompt_ids) + output)
        return -(-(at_end + self._num_lookahead_slots) // self._page_size)

    def promised(self, slots: SlotTable, pools: PagePools) -> Counts:
        """int64 [groups] pages that the requests in slots are predicted to need in addition to those they have."""
        emitted = slots.num_tokens - slots.prompt_len
        at_end = self._at_end(slots.prompt_len, slots.max_tokens, slots.predicted_tokens, emitted)
        missing = pools.most_held(at_end) - slots.num_pages.T
        promised: Counts = np.maximum(missing, 0)[:, slots.owner >= 0].sum(1)
        return promised

    def _at_end(self, prompt_len: Counts, max_tokens: Counts, predicted: Counts, emitted: Counts) -> Counts:
        output = np.maximum(predicted, emitted * 3 // 2 + 4 * self._page_size)
        expected = np.minimum(max_tokens, prompt_len + output)
        at_end = np.where(max_tokens - prompt_len <= SHORT_CAP_TOKENS, max_tokens, expected) + self._num_lookahead_slots
        return -(-at_end // self._page_size)
