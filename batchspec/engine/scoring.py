"""Scoring prompts on the host: keeps the log-probabilities of prompt tokens by page, so that rows that share pages share them.

Scoring consists of prefill passes without rounds; `score_pass.py` is the device's part. The log-probability of token i is
computed from the hidden state of token i - 1 and depends on tokens 0 .. i alone, as K and V do. A row whose first pages are
shared needs one more hidden state than it has tokens of its own: that of the last shared token. It is computed again, without
writing its K and V.

N likeliest tokens (`output.prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.launch import Launch
from batchspec.engine.request_state import RequestState
from batchspec.engine.round import RoundResult
from batchspec.engine.slots import SlotTable
from batchspec.engine.step import Segment


def reread(passes: Sequence[Sequence[Segment]], num_cached: dict[int, int]) -> tuple[tuple[Segment, ...], ...]:
    """The passes with `Segment.num_recomputed` set: the number of first tokens whose K and V are in shared pages and not written.

    num_cached  by slot: number of prompt tokens in shared pages
    """
    return tuple(
        tuple(replace(one, num_recomputed=max(0, min(one.end, num_cached[one.slot]) - one.begin)) for one in segments)
        for segments in passes
    )


class PromptScores:
    """Log-probabilities of all prompt tokens whose pages hold K and V: float32 [pages, page_size], and [pages, page_size, N]."""

    def __init__(self, num_pages: int, page_size: int, num_top: int) -> None:
        shape = (num_pages, page_size)
        self._page_size, self._num_top = page_size, num_top
        self._logprobs = np.empty(shape, np.float32)
        self._top_ids, self._top = np.empty((*shape, num_top), np.int32), np.empty((*shape, num_top), np.float32)

    def add(self, launch: Launch, result: RoundResult, slots: SlotTable) -> None:
        """Store the results of a pass that has arrived on the host. Rows that have left their slots since then are skipped."""
        assert result.logprobs is not None
        place = 0
        for segment in launch.segments:
            begin, place = place, place + segment.end - segment.begin
            if launch.owners[segment.slot] != slots.owner[segment.slot]:
                continue
            state = slots.at(segment.slot)
            first, end = segment.begin + 1, min(segment.end + 1, len(state.request.prompt_ids))
            where, count = self._where(state, first, end), max(0, end - first)
            self._logprobs[where] = result.logprobs[begin : begin + count].numpy()
            if result.top_ids is not None and result.top_logprobs is not None:
                self._top_ids[where] = result.top_ids[begin : begin + count].numpy()
                self._top[where] = result.top_logprobs[begin : begin + count].numpy()

    def of(self, state: RequestState) -> tuple[NDArray[np.float32], tuple[NDArray[np.int32], NDArray[np.float32]] | None]:
        """Log-probabilities of a row's prompt. Call it when the results of all its passes have been added.

        Returns float32 [tokens], and (int32 ids, float32 values), each [tokens, N], of the likeliest tokens; None if N is 0. The
        first token has none: NaN, and ids of -1.
        """
        count = len(state.request.prompt_ids)
        where = self._where(state, 1, count)
        logprobs = np.concatenate((np.full(1, np.nan, np.float32), self._logprobs[where]))
        if not self._num_top:
            return logprobs, None
        none = np.full((1, self._num_top), -1, np.int32), np.full((1, self._num_top), np.nan, np.float32)
        return logprobs, (np.concatenate((none[0], self._top_ids[where])), np.concatenate((none[1], self._top[where])))

    def _where(self, state: RequestState, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page, and index in the page, of the row's tokens first .. end-1."""
        tokens = np.arange(first, max(first, end))
        pages = np.array(state.pages.tables[0], np.int64)
        return pages[tokens // self._page_size], tokens % self._page_size
