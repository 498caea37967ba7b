"""The host's state of all slots, one array per field: a round of a thousand rows is processed by a few numpy calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.rounds.records import PendingResult, RoundLog, Slots
from batchspec.engine.slots.request_state import NEVER, NO_TOKEN, RequestState
from batchspec.kernels.rounds.accept import HELD

FREE = -1
"""Owner of a slot without a request."""
PRIOR_ROUNDS = 8.0
"""Each row counts as if it had been in so many more rounds, at the mean speed of all rows: a few rounds tell little."""


class SlotTable:
    """Which request is in which slot, and what the host needs to know of it in every round.

    Output tokens and counts are collected here, many at a time; `flush` adds them to the slot's request. A request whose features
    want to examine its tokens is flushed when that is due. In a compaction one `move` moves all state of a slot.
    """

    def __init__(self, num_slots: int, max_len: int, draft_len: int, *, num_groups: int = 1) -> None:
        """num_groups: K/V groups."""

        def zeros(*shape: int) -> NDArray[np.int64]:
            return np.zeros((num_slots, *shape), np.int64)

        self.requests: list[RequestState | None] = [None] * num_slots
        self.owner = zeros() + FREE
        """Number of the request in the slot: each that enters a slot gets the next one. FREE without a request."""
        self.num_tokens = zeros()
        """Prompt and output tokens that the host has read. While a request has a slot, this is the only count that is up to
        date."""
        self.num_columns = zeros()
        """Number of entries in the row's page tables."""
        self.num_pages = zeros(num_groups)
        """Number of pages that the row owns in each K/V group."""
        self.num_prefilled = zeros()
        """Number of tokens with which the row entered its slot."""
        self.num_rounds = zeros()
        """Number of rounds that the row has been in since then."""
        self.prompt_len, self.max_tokens, self.predicted_tokens = zeros(), zeros(), zeros()
        self.decodes = np.zeros(num_slots, bool)
        """Whether rounds emit tokens for the row: not while it is held, nor if it ends with its prefill."""
        self.watch_at = zeros() + NEVER
        """Number of tokens at which the request's features examine it."""
        self.watch_token = zeros() + NO_TOKEN
        """A token at which they do."""
        self._tokens = np.zeros((num_slots, max_len + draft_len + 1), np.int32)
        """Buffered tokens; after the first `_num_buffered` of a row come arbitrary values."""
        width = draft_len + 1
        self._counts = zeros(3 + 2 * width)
        """What `flush` moves: the columns that follow, which are views."""
        self._num_buffered, self._num_prefills, self._num_discarded = self._counts[:, :3].T
        self._accepted, self._drafted = self._counts[:, 3 : 3 + width], self._counts[:, 3 + width :]
        self._arrays: tuple[NDArray[np.generic], ...] = (
            self.owner, self.num_tokens, self.num_columns, self.num_pages, self.num_prefilled, self.num_rounds, self.prompt_len,
            self.max_tokens, self.predicted_tokens, self.decodes, self.watch_at, self.watch_token, self._tokens, self._counts,
        )
        self.held: dict[RequestState, int] = {}
        """Requests that are held. Tokens of one may be in results that are not read yet: its value is the number of results of
        the run that must have been read before all of them are known."""
        self._killed: list[int] = []
        self._modes: Counter[SamplingMode] = Counter()
        self.num_live = 0
        """Number of requests in slots."""

    @property
    def live(self) -> list[RequestState]:
        """Requests in slots, by slot."""
        return [state for state in self.requests if state is not None]

    @property
    def mode(self) -> SamplingMode:
        """The smallest sampling mode that serves all requests in slots."""
        found = [mode for mode, count in self._modes.items() if count]
        return found[0] if len(found) == 1 else SamplingMode.union(found)

    @property
    def num_decoding(self) -> int:
        """Number of requests in slots for which rounds emit tokens."""
        return int(np.count_nonzero(self.decodes))

    @property
    def num_free(self) -> int:
        """Number of slots without a request."""
        return len(self.requests) - self.num_live

    def free(self) -> list[int]:
        """Slots without a request."""
        found: list[int] = np.flatnonzero(self.owner < 0).tolist()
        return found

    def at(self, slot: int) -> RequestState:
        """The request in a slot that has one."""
        state = self.requests[slot]
        assert state is not None, slot
        return state

    def fill(self, states: Sequence[RequestState], slots: Sequence[int], order: int) -> None:
        """Put requests, which have their pages, into free slots.

        order  number of the first request; each later one gets the next
        """
        assert (self.owner[slots] == FREE).all(), slots
        self.owner[slots] = np.arange(order, order + len(states))
        for number, (state, slot) in enumerate(zip(states, slots, strict=True), order):
            state.slot, state.order, self.requests[slot] = slot, number, state
        self.num_live += len(states)
        self._modes.update(state.mode for state in states)
        requests, pages = [state.request for state in states], [state.pages for state in states]
        prompt_len = np.array([len(request.prompt_ids) for request in requests])
        self.num_tokens[slots] = self.num_prefilled[slots] = prompt_len + [len(state.tokens) for state in states]
        self.num_rounds[slots] = 0
        self.num_columns[slots], self.num_pages[slots] = [own.num_columns for own in pages], [own.num_held for own in pages]
        self.prompt_len[slots] = prompt_len
        self.max_tokens[slots] = prompt_len + [request.max_new_tokens for request in requests]
        self.predicted_tokens[slots] = [request.predicted_tokens for request in requests]
        self.decodes[slots] = [request.device_limit > 0 for request in requests]
        self.watch_at[slots], self.watch_token[slots] = NEVER, NO_TOKEN
        for state in states:
            if state.watch is not None:
                self.watch(state)

    def watch(self, state: RequestState) -> None:
        """Note when the features of a request examine it next."""
        at, slot = state.watch, state.slot
        self.watch_at[slot] = NEVER if at is None else min(NEVER, self.prompt_len[slot] + at.num_tokens)
        self.watch_token[slot] = NO_TOKEN if at is None else at.token

    def due(self, slots: Slots, log: RoundLog) -> Slots:
        """Those of `slots`, whose lines are added, whose features examine them now."""
        token, at = self.watch_token[slots], self.watch_at[slots]
        due = self.num_tokens[slots] >= at
        if (watches_token := token != NO_TOKEN).any():
            due |= (log.tokens == token[:, None]).any(1)
        due |= ((at < NEVER) | watches_token) & (log.finish != 0) & (log.finish != HELD)
        found: Slots = slots[due]
        return found

    def token_weights(self, slots: Slots) -> NDArray[np.float64]:
        """The weight of a token of each of these rows, 1 on average: the rounds that the row takes for a token. A token of a slow
        row brings the end of the job nearer than one of a row that accepts much."""
        rounds, emitted = self.num_rounds[slots], (self.num_tokens - self.num_prefilled - 1)[slots].clip(0)
        mean_speed = (emitted.sum() + PRIOR_ROUNDS) / (rounds.sum() + PRIOR_ROUNDS)
        weights: NDArray[np.float64] = (rounds + PRIOR_ROUNDS) / (emitted + PRIOR_ROUNDS * mean_speed)
        return weights / (weights.mean() if len(slots) else 1.0)

    def hold(self, state: RequestState, *, on_device: bool, num_results: int = 0) -> None:
        """The request stays in its slot and does not decode until `resume`, which may follow once so many results of the run have
        been read. on_device: the device holds its row already."""
        self.flush(state)
        self.decodes[state.slot] = False
        self.held[state] = max(num_results, self.held.get(state, 0))
        if not on_device:
            self._killed.append(state.slot)

    def resume(self, state: RequestState) -> None:
        """The request, whose tokens are flushed, decodes again."""
        assert not self._num_buffered[state.slot], state.request.request_id
        self.decodes[state.slot] = True
        del self.held[state]

    def take_killed(self) -> tuple[int, ...]:
        """Slots whose rows the host has ended, or has begun to hold, since the last call: the device must stop to decode them."""
        killed, self._killed = tuple(self._killed), []
        return killed

    def note_pages(self, state: RequestState) -> None:
        """Update the page counts of a request that has got pages or given some back."""
        self.num_columns[state.slot], self.num_pages[state.slot] = state.pages.num_columns, state.pages.num_held

    def add_pages(self, slots: Slots, counts: NDArray[np.int64]) -> None:
        """Add counts[i] pages to the request in slots[i], in every K/V group."""
        self.num_columns[slots] += counts
        self.num_pages[slots] += counts[:, None]

    def clear(self, state: RequestState, *, on_device: bool = False) -> None:
        """Flush the request and take it out of its slot. on_device: the device has ended its row already."""
        if self._counts[state.slot].any():
            self.flush(state)
        self.held.pop(state, None)
        if not on_device:
            self._killed.append(state.slot)
        self._modes[state.mode] -= 1
        self.requests[state.slot] = None
        self.num_live -= 1
        self.owner[state.slot] = FREE
        self.decodes[state.slot] = False
        state.slot = -1

    def flush(self, *states: RequestState) -> None:
        """Add the slots' buffered tokens and counts to their requests, which stay active."""
        if not states:
            return
        slots, width = [state.slot for state in states], self._accepted.shape[1]
        for state, counts in zip(states, self._counts[slots].tolist(), strict=True):
            num_buffered, num_prefills, num_discarded = counts[:3]
            state.tokens += self._tokens[state.slot, :num_buffered].tolist()
            state.num_prefills += num_prefills
            state.num_discarded += num_discarded
            state.add_counts(counts[3 : 3 + width], counts[3 + width :])
        self._counts[slots] = 0

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Compaction: (source, destination) of each request that changes its slot; destinations are free."""
        for source, destination in moves:
            state = self.at(source)
            state.slot = destination
            self.requests[destination], self.requests[source] = state, None
            for field in self._arrays:
                field[destination] = field[source]
            self.owner[source], self.decodes[source] = FREE, False
            self._counts[source] = 0

    def add_result(self, result: PendingResult, slots: Slots, log: RoundLog, now: float) -> None:
        """Add a result that has arrived: line i of `log` is that of the row in slots[i]; now: seconds of the host's clock."""
        self.num_tokens[slots] += log.num_kept
        if result.began is None:
            self.add_round(slots, log)
            return
        self.add_prefill(slots, log)
        elapsed = result.seconds_since(result.began)
        for slot in slots.tolist():
            self.at(slot).note_prefill(elapsed, now)

    def add_prefill(self, slots: Slots, log: RoundLog) -> None:
        """Add the token that a prefill emitted for each of `slots`, none for a failed row; line i of `log` is that of
        slots[i]."""
        self._num_prefills[slots] += 1
        emitted = log.num_kept > 0
        there = slots[emitted]
        self._tokens[there, self._num_buffered[there]] = log.tokens[emitted, 0]
        self._num_buffered[there] += 1

    def add_round(self, slots: Slots, log: RoundLog) -> None:
        """Add one round of live rows; a slot occurs at most once."""
        kept = log.num_kept
        self.num_rounds[slots] += 1
        self._accepted[slots, log.accepted_len] += 1
        self._drafted[slots, log.draft_len] += 1
        self._num_discarded[slots] += log.accepted_len + 1 - kept
        before = self._num_buffered[slots]
        width = log.tokens.shape[1]
        self._tokens[slots[:, None], before[:, None] + np.arange(width)] = log.tokens
        self._num_buffered[slots] = before + kept
