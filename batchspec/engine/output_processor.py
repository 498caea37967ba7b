"""Adds each result to the requests in slots and to the engine's totals, and says which requests the host must check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchspec.engine.request_state import RequestState
from batchspec.engine.results import PendingResult, RoundLog, Slots
from batchspec.engine.round import RoundResult
from batchspec.engine.slots import SlotTable


@dataclass(slots=True)
class EngineTotals:
    """Sums over the engine's life, of the results that the host has read."""

    rounds: int = 0
    """Launched."""
    row_rounds: int = 0
    """Sum over the rounds of their live rows."""
    tokens: int = 0
    """Output tokens; where prompts are scored, prompt tokens."""
    accepted: int = 0
    drafted: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    """Seconds of prefill, each group counted from its begin to its last result."""
    cached_tokens: int = 0
    preempted: int = 0
    """Number of preemptions: requests that lost their slot because pages ran out."""
    live_rows: int = 0
    expert_correlation: float | None = None
    """See `expert_reads.py`; None without experts."""
    _group: object = None
    """Begin of the group of the latest prefill result: all passes of a group have the same."""
    _group_s: float = 0.0

    def add(self, result: PendingResult, log: RoundLog) -> None:
        """Add a result that has arrived; `log` has the lines of its live rows."""
        self.tokens += int(log.num_kept.sum())
        if result.began is not None:
            seconds = result.seconds_since(result.began)
            self.prefill_s += seconds - (self._group_s if result.began is self._group else 0.0)
            self._group, self._group_s = result.began, seconds
        else:
            self.row_rounds += len(log.num_kept)
            self.accepted += int(log.accepted_len.sum())
            self.drafted += int(log.draft_len.sum())


class OutputProcessor:
    """Requests with stop strings get each token at once (`RequestState`), others many at a time (`SlotTable`)."""

    def __init__(self, slots: SlotTable, *, scores: bool = False) -> None:
        """scores: results have no logprobs of output tokens, but those of prompt tokens (`PromptScores`)."""
        self._slots, self._scores = slots, scores

    def add(self, result: PendingResult, slots: Slots, log: RoundLog, now: float) -> None:
        """Add a result that has arrived: line i of `log` is that of the row in slots[i]; now: seconds of the host's clock."""
        table = self._slots
        table.num_tokens[slots] += log.num_kept
        watched = table.watched[slots]
        add = table.add_round if result.began is None else table.add_prefill
        if not watched.any():
            add(slots, log)
        else:
            add(slots[~watched], log[~watched])
            self._add_watched(slots[watched], log[watched], is_prefill=result.began is not None)
        if result.began is not None:
            elapsed = result.seconds_since(result.began)
            for slot in slots.tolist():
                table.at(slot).note_prefill(elapsed, now)
        if result.result.logprobs is not None and not self._scores:
            for slot, kept in zip(slots.tolist(), log.num_kept.tolist(), strict=True):
                _keep_logprobs(table.at(slot), result.result, slot, kept)

    def _add_watched(self, slots: Slots, log: RoundLog, *, is_prefill: bool) -> None:
        lists = (slots, log.accepted_len, log.draft_len, log.num_kept, log.tokens)
        for slot, accepted_len, draft_len, num_kept, tokens in zip(*(column.tolist() for column in lists), strict=True):
            state = self._slots.at(slot)
            if is_prefill:
                state.add_prefill(tokens[:num_kept])
            else:
                state.add_round(accepted_len, draft_len, accepted_len + 1, tokens[:num_kept])

    def enforce_budget(self, state: RequestState) -> bool:
        """Close a thought that has used up its budget; returns whether the shortened request must be prefilled with its new
        tokens."""
        table = self._slots
        table.flush(state)
        if not state.enforce_budget():
            table.watch_budget(state)
            return False
        if state.finish_reason is None:
            return True
        table.watched[state.slot] = True  # its closing tokens ended it, which the device does not know
        return False

    def may_have_ended(self, slots: Slots, log: RoundLog) -> NDArray[np.bool_]:
        """bool [n]: the device ended the row, or a stop string or the thinking budget may have."""
        ended: NDArray[np.bool_] = (log.finish != 0) | self._slots.watched[slots]
        return ended


def _keep_logprobs(state: RequestState, result: RoundResult, slot: int, count: int) -> None:
    if result.logprobs is not None:
        state.logprobs += result.logprobs[slot, :count].tolist()
    if result.top_ids is not None and result.top_logprobs is not None:
        ids, values = result.top_ids[slot].numpy(), result.top_logprobs[slot].numpy()
        state.top += [(ids[j], values[j]) for j in range(count)]
