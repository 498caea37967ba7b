"""Which request gets which slot and which pages. Host bookkeeping only: no tensor, no model, no clock.

Requests stream through a fixed set of slots. A free slot is refilled at a round boundary, in groups; a request gets pages
for what it is expected to need and more as it grows; when pages run out the youngest request is preempted: its tokens are
kept and it is prefilled again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from batchspec.batch.automata import AutomatonUpload, ConstraintPlace
from batchspec.cache.page_tables import Columns, Counts, PagePools
from batchspec.cache.pages import prefix_hashes
from batchspec.engine.automaton_places import AutomatonPlaces
from batchspec.engine.lazy_states import LazyStates
from batchspec.engine.prefill_cost import PrefillCost
from batchspec.engine.request_state import RequestState
from batchspec.engine.slots import SlotTable
from batchspec.errors import CapacityError
from batchspec.lazy_automaton import LazyAutomaton
from batchspec.records import PackedBatch, Request
from batchspec.token_automaton import TokenAutomaton

SHORT_CAP_TOKENS = 512
"""Requests that may emit at most this many tokens are promised pages for all of them at once."""
GROW_PAGES = 4
"""Pages a row gets at once where there are plenty: the page table is then written every few rounds, not every round."""


class SlotAllocator:
    def __init__(
        self,
        batch: PackedBatch,
        pools: PagePools,
        requests: Iterator[RequestState | None],
        *,
        slots: SlotTable | None = None,
        lookahead: int = 0,
        num_lookahead_slots: int = 0,
        prefill_cost: PrefillCost | None = None,
        automata: AutomatonPlaces | None = None,
        scores: bool = False,
        lazy: LazyStates | None = None,
    ) -> None:
        """
        requests             None: no request has come yet, others may later
        slots                None: an empty table
        lookahead            tokens after a page that its K/V depends on too: 1 with a drafter that reads the next token
        num_lookahead_slots  K/V positions after a row's last token that it needs pages for too: what a tree of drafts takes
        prefill_cost         None: the default one
        automata             None: no request has one
        scores               requests end with their prefill, so a free slot is filled at once
        lazy                 None: no request has a lazy automaton
        """
        self._scores = scores
        self._automata, self.lazy = automata, lazy
        self.batch, self.pools = batch, pools
        self.slots = slots or SlotTable(batch.num_slots, batch.max_len, batch.draft_len, num_groups=pools.groups.num_groups)
        self._stream, self._ended = requests, False
        self._waiting: deque[RequestState] = deque()
        self._num_refills = 0
        self._lookahead, self._num_lookahead_slots = lookahead, num_lookahead_slots
        self._prefill_cost = prefill_cost or PrefillCost.default(batch.prefill_tokens)
        self._idle = 0.0

    @property
    def exhausted(self) -> bool:
        """No request waits and none will come."""
        return self._peek() is None and self._ended

    def num_rows_needed(self) -> int:
        """Rows of a round: all slots while a request waits, else the smallest row bucket that the live rows fit in."""
        if self._peek() is not None:
            return self.batch.num_slots
        return min(b for b in self.batch.row_buckets if b >= len(self.slots.live))

    def num_rows_taken(self) -> int:
        """The smallest row bucket that holds every slot with a request."""
        taken = np.flatnonzero(self.slots.owner >= 0)
        return min(b for b in self.batch.row_buckets if b > taken.max(initial=-1))

    @property
    def preempted(self) -> list[RequestState]:
        """Requests that had slots and wait for pages."""
        return [state for state in self._waiting if state.tokens]

    def _peek(self) -> RequestState | None:
        """The request that waits longest; None: at present there is none."""
        while self._waiting and self._waiting[0].finish_reason is not None:  # given up before it got a slot
            self._waiting.popleft()
        if not self._waiting and not self._ended:
            try:
                state = next(self._stream)
            except StopIteration:
                self._ended = True
            else:
                self._waiting += [] if state is None else [state]
        return self._waiting[0] if self._waiting else None

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.batch.page_size)

    def _expected_pages(self, state: RequestState) -> Counts:
        """By K/V group, pages that a waiting request will hold at its end, as far as anyone knows: see `_pages_at_end`."""
        request = state.request
        one = [np.array([n]) for n in (len(request.prompt_ids), state.max_tokens, request.predicted_tokens, len(state.tokens))]
        return self.pools.most_held(self._pages_at_end(*one))[:, 0]

    def _pages_at_end(self, prompt_len: Counts, max_tokens: Counts, predicted: Counts, emitted: Counts) -> Counts:
        """All pages of a request with a short limit. Else those of the predicted length; a request that outgrows it is expected
        to emit half as much again, so that a preempted request does not come back only to be preempted."""
        output = np.maximum(predicted, emitted * 3 // 2 + 4 * self.batch.page_size)
        expected = np.minimum(max_tokens, prompt_len + output)
        at_end = np.where(max_tokens - prompt_len <= SHORT_CAP_TOKENS, max_tokens, expected) + self._num_lookahead_slots
        return -(-at_end // self.batch.page_size)

    def _promised(self) -> Counts:
        """By K/V group, pages that the requests in slots are expected to ask for still."""
        slots = self.slots
        emitted = slots.num_tokens - slots.prompt_len
        at_end = self._pages_at_end(slots.prompt_len, slots.max_tokens, slots.predicted_tokens, emitted)
        missing = self.pools.most_held(at_end) - slots.num_held.T
        promised: Counts = np.maximum(missing, 0)[:, slots.owner >= 0].sum(1)
        return promised

    def refill(self, round_s: float = 1.0) -> list[RequestState]:
        """Requests to prefill now, before the next round: slots taken, pages of their present tokens granted, whole-page prefixes
        shared.

        round_s  seconds that a round of all slots takes at present, in the unit of the prefill cost
        """
        self._free_passed_pages()
        free = self.slots.free()
        if not self._worth_a_prefill(len(free), round_s):
            return []
        self._idle = 0.0
        group: list[RequestState] = []
        promised = self._promised()
        for slot in free:
            state = self._peek()
            if state is None or not self._admit(state, promised):
                break
            self._waiting.popleft()
            self.slots.place(state, slot, self._num_refills)
            self._num_refills += 1
            group.append(state)
            promised += np.maximum(0, self._expected_pages(state) - state.pages.num_held)
        return group

    def _worth_a_prefill(self, num_free: int, round_s: float) -> bool:
        """Once slots have been idle for as long as a pass of few tokens takes, less what the waiting tokens take.

        Waiting then costs as much as the pass, which is the least of both together (Harris 1913, economic order quantity).
        """
        if num_free == self.batch.num_slots or self._scores:
            return num_free > 0
        if not num_free or (state := self._peek()) is None:
            return False
        self._idle += round_s * num_free / self.batch.num_slots
        return self._idle >= self._prefill_cost.least - self._prefill_cost.token * num_free * state.num_tokens

    def short_of_pages(self, ahead: int) -> list[RequestState]:
        """Requests whose pages end before their tokens and `ahead` more, or their limit, oldest first."""
        slots = self.slots
        wanted = np.minimum(slots.num_tokens + ahead, slots.max_tokens + self._num_lookahead_slots)
        short = np.flatnonzero((slots.owner >= 0) & (-(-wanted // self.batch.page_size) > slots.num_columns))
        return [slots.at(slot) for slot in short[np.argsort(slots.owner[short])]]

    def _admit(self, state: RequestState, promised: Counts) -> bool:
        """Grant pages for the request's tokens and the one its prefill emits, if the rest of its output will find pages too."""
        request = state.request
        most = self.pages_for(state.max_tokens + self._num_lookahead_slots)
        if most > self.pools.most_columns:
            raise CapacityError(
                f"request {request.request_id!r}: prompt and output of {state.max_tokens} tokens need {most} pages,"
                f" the pool has {self.pools.most_columns}; raise packing.pages or packing.memory_gb"
            )
        if state.prefix_hashes is None:  # a request that waits for pages asks again every round
            state.prefix_hashes = self._hashes(request)
        hashes = state.prefix_hashes
        # The last prompt token is always computed: its logits give the first output token.
        prefix = self.pools.match(hashes[: (len(request.prompt_ids) - 1) // self.batch.page_size])
        num_columns = self.pages_for(state.num_tokens)
        # A group with a window holds the whole row while it is prefilled, and less later.
        needed = np.maximum(self._expected_pages(state), num_columns - np.array(prefix.first)) - prefix.num_held
        needed += self.pools.num_idle(prefix)
        if self.slots.any_live and bool((promised + needed > self.pools.num_free).any()):
            return False
        if request.automaton is not None and not self._hold(state, request.automaton):
            return False
        state.pages, state.num_shared_pages = prefix, prefix.num_columns
        self.pools.admit(state.pages, num_columns, hashes)
        return True

    def _hashes(self, request: Request) -> list[bytes]:
        """Of the prompt's full pages, as far as they may be shared.

        Where prompts are scored the last shared token is computed again, and its window may reach a key that the next token's
        does not, and that no shared page holds.
        """
        if self._scores and self.pools.any_window:
            return []
        return prefix_hashes(request.prompt_ids, self.batch.page_size, lookahead=self._lookahead, adapter=request.adapter)

    def _hold(self, state: RequestState, automaton: TokenAutomaton | LazyAutomaton) -> bool:
        """Whether the device has, or gets, what the request follows."""
        assert self._automata is not None, "the engine was made for requests without automata"
        if isinstance(automaton, TokenAutomaton):
            return self._automata.hold(automaton)
        assert self.lazy is not None, "the engine was made for requests without lazy automata"
        return self.lazy.hold(state)

    def grow(self, state: RequestState, num_tokens: int) -> Columns | None:
        """Pages so that `num_tokens` (at most the limit and the lookahead slots) fit: the new ones, or None when a pool has too
        few."""
        most = state.max_tokens + self._num_lookahead_slots
        missing = self.pages_for(min(num_tokens, most)) - state.pages.num_columns
        num_free = min(self.pools.num_free)
        if missing > num_free:
            return None
        if 0 < missing < GROW_PAGES and num_free > GROW_PAGES * self.batch.num_slots:
            missing = min(GROW_PAGES, self.pages_for(most) - state.pages.num_columns)
        pages = self.pools.grow(state.pages, max(0, missing))
        self.slots.note_pages(state)
        return pages

    def _free_passed_pages(self) -> None:
        """Give back the pages that the windows of the rows have passed.

        Only of rows whose first token since they entered their slot is read: until then passes of their prefill may be waiting,
        which read all pages.
        """
        slots = self.slots
        if not self.pools.any_window:
            return
        passed = self.pools.passed_columns(slots.num_tokens) > slots.num_columns - slots.num_held.T
        for slot in np.flatnonzero(passed.any(0) & (slots.owner >= 0) & (slots.num_tokens > slots.num_prefilled)).tolist():
            state = slots.at(slot)
            self.pools.free_passed(state.pages, int(slots.num_tokens[slot]))
            slots.note_pages(state)

    def youngest(self) -> RequestState:
        """The request that entered its slot last."""
        return max(self.slots.live, key=lambda state: state.order)

    def release(self, state: RequestState) -> None:
        """The request leaves: its slot and pages are free for what is launched from now on."""
        self.slots.clear(state)
        self.pools.release(state.pages)
        if self._automata is not None and isinstance(state.request.automaton, TokenAutomaton):
            self._automata.release(state.request.automaton)
        if self.lazy is not None:
            self.lazy.drop(state)

    def constraint(self, state: RequestState) -> ConstraintPlace | None:
        """Where the automaton of a request that has just got its slot stands; None without one."""
        if self.lazy is not None and isinstance(state.request.automaton, LazyAutomaton):
            return self.lazy.constraint(state)
        return None if self._automata is None else self._automata.constraint(state.request, state.tokens)

    def automata_to_upload(self) -> tuple[AutomatonUpload, ...]:
        """Automata of the requests that got their slots since the last call, as far as the device does not have them."""
        return () if self._automata is None else self._automata.take_uploads()

    def preempt(self, state: RequestState) -> None:
        """Take slot and pages away; the request comes back before any new one."""
        self.release(state)
        state.slot = -1
        self._waiting.appendleft(state)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Move live rows into the first `num_slots` slots; (source, destination) of each move."""
        free = iter([slot for slot in range(num_slots) if self.slots.requests[slot] is None])
        moves = [(state.slot, next(free)) for state in self.slots.live if state.slot >= num_slots]
        self.slots.move(moves)
        return moves
