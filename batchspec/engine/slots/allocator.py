"""Decides which request gets which slot and which pages. Host bookkeeping only: no tensor, no model, no clock.

Requests stream through a fixed set of slots. A free slot is refilled at a round boundary, in groups; a request gets pages
for the length it is predicted to reach, and more as it grows. When pages run out, the youngest request is preempted: its tokens
are kept and it is prefilled again later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchspec.cache.page_tables import PagePools
from batchspec.cache.pages import prefix_hashes
from batchspec.engine.prefill.cost import PrefillCost, padded_rows
from batchspec.engine.slots.expected_pages import ExpectedPages
from batchspec.engine.slots.prefix_plan import PrefixPlanner
from batchspec.engine.slots.refill_policy import IdleSlots
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.slots.waiting import WaitingRequests
from batchspec.engine.step import PageGrant
from batchspec.errors import CapacityError
from batchspec.packed_batch import PackedBatch

GROW_PAGES, AMPLE_PAGES = 4, 32
"""Pages that a row may get before it needs them. It gets AMPLE_PAGES if half of the pool stays free even when every slot gets as
many, GROW_PAGES if the pool has as many for every slot, else none. So page tables are written every few rounds and not every
round; for rows with a short limit once."""
SPARE = 0.125
"""Share of a pass that is left empty rather than that a row is cut, where rows end with their prefill: the rest of the row would
need another pass, at least."""
LAST_SHARE = 0.75
"""Share of the pages that rows are predicted to need later for which the last requests of a job wait, if all of them can begin
then. Otherwise the few for which pages lack begin when others have ended: with equal outputs they would double the number of
rounds. Rows are preempted at the end instead, whose second prefill takes less time: it computes as many tokens as lack pages, at
most a third of those that rows add in the rounds that are saved."""
TAKEN_AHEAD = 8
"""Maximum number of requests that are prepared beyond the free slots: of 256 rows that take 60 rounds each, about four end in a
round."""


class SlotAllocator:
    """Slots and pages of one run, and the requests that wait for them."""

    def __init__(
        self,
        batch: PackedBatch,
        pools: PagePools,
        waiting: WaitingRequests,
        *,
        features: RunFeatures | None = None,
        slots: SlotTable | None = None,
        num_lookahead_slots: int = 0,
        prefill_cost: PrefillCost | None = None,
    ) -> None:
        """
        waiting              the requests that wait for slots
        features             of the run's rows; None: they have none
        slots                None: an empty table
        num_lookahead_slots  K/V slots after a row's last token that it needs too, such as those of a tree's nodes
        prefill_cost         None: `PrefillCost.default`
        """
        self.batch, self.pools = batch, pools
        self.slots = slots or SlotTable(batch.num_slots, batch.max_len, batch.num_verified, num_groups=pools.groups.num_groups)
        self._features = features or RunFeatures()
        self._waiting = waiting
        self._num_entered = 0
        self._num_lookahead_slots = num_lookahead_slots
        self._prefixes = None if pools.states is None else PrefixPlanner(pools, pools.states)
        self._expected_pages = ExpectedPages(batch.page_size, num_lookahead_slots)
        self._idle_slots = IdleSlots(prefill_cost or PrefillCost.default(batch.prefill_tokens), batch.num_slots)

    def is_exhausted(self) -> bool:
        """As `WaitingRequests.is_exhausted`."""
        return self._waiting.is_exhausted()

    def num_rows_needed(self) -> int:
        """Rows of a round: all slots while a request waits, else the smallest row bucket that the live rows fit in."""
        if self._waiting.peek() is not None:
            return self.batch.num_slots
        return min(b for b in self.batch.row_buckets if b >= self.slots.num_live)

    def num_rows_taken(self) -> int:
        """The smallest row bucket that holds every slot with a request."""
        taken = np.flatnonzero(self.slots.owner >= 0)
        return min(b for b in self.batch.row_buckets if b > taken.max(initial=-1))

    def take_ahead(self, count: int) -> None:
        """Take up to `count` requests from their stream, prepare as many for slots that are free or will be soon, and hash their
        prompts. Then the next refill takes the host less time."""
        self._waiting.take_ahead(count, self.slots.num_free + TAKEN_AHEAD)
        for state in self._waiting:
            self._hash(state)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.batch.page_size)

    def refill_is_due(self, round_s: float = 1.0, refill_s: float | None = None) -> bool:
        """Whether to refill the free slots now. Call it once before each round: it adds up their idle time, and gives back the
        pages that rows need no longer.

        round_s   seconds that a round over all slots takes at present, in the unit of the prefill cost
        refill_s  fixed seconds of a refill whose pass is replayed (`RefillTimes`); None: not measured
        """
        self._free_passed_pages()
        return self._is_worth_a_refill(round_s, refill_s)

    def refill(self) -> list[RequestState]:
        """Choose the requests to prefill now: they get the free slots, share the pages of cached prefixes, and get pages for
        their present tokens. Requests that must wait are passed over. If rows end with their prefill, as many as fill one
        pass, also if it is padded; or more passes, if otherwise one would be far from full (SPARE)."""
        self._idle_slots.restart()
        free = self.slots.free()
        group: list[RequestState] = []
        if self._prefixes is not None:
            self._prefixes.begin_group()
        promised = self._expected_pages.promised(self.slots, self.pools).tolist()
        index: int | None = 0
        num_tokens = 0
        for slot in free:
            index = self._waiting.first_ready(index or 0, self.batch.num_slots)
            if index is None or not self._admit(
                state := self._waiting[index], promised, alone=not (self.slots.num_live or group),
                num_slots=len(free) - len(group), room=self._room(len(group), num_tokens),
            ):
                break
            del self._waiting[index]
            group.append(state)
            num_tokens += self._num_computed(state)
            state.slot = slot
            self._features.enter(state)
        if group:
            self.slots.fill(group, free[: len(group)], self._num_entered)
            self._num_entered += len(group)
        return group

    def _room(self, num_rows: int, num_tokens: int) -> int | None:
        """Maximum number of tokens that one more row may add to a refill with so many rows and tokens; None: there is none."""
        most = self.batch.prefill_tokens
        if self.batch.decodes or not num_rows:
            return None
        num_dead = padded_rows(num_rows + 1, self.batch.num_slots) - num_rows - 1  # each is padded to a token
        room = -num_tokens % most - num_dead  # in the last pass
        return None if room > SPARE * most else room

    def _num_computed(self, state: RequestState) -> int:
        """Number of tokens of an admitted request that its prefill computes."""
        return state.num_tokens - state.num_shared_pages * self.batch.page_size

    def _is_worth_a_refill(self, round_s: float, refill_s: float | None) -> bool:
        """The part of `refill_is_due` that `StaticBatching` replaces."""
        num_free = self.slots.num_free
        if not self.slots.num_decoding:
            return num_free > 0
        if not num_free or (state := self._waiting.peek()) is None:
            return False
        may_hold = state.mode.may_hold
        due = self._idle_slots.refill_is_due(num_free, state.num_tokens, may_hold=may_hold, round_s=round_s, refill_s=refill_s)
        return due or self._waiting.are_last(num_free)

    def grow(self, ahead: int, grants: list[PageGrant]) -> bool:
        """Grant pages, oldest row first, to every row that has too few for its tokens and `ahead` more, or for its limit; add
        the grants to `grants`.

        Returns False if a pool has too few pages for all of them: the youngest rows then got none.
        """
        slots, page_size = self.slots, self.batch.page_size
        most = slots.max_tokens + self._num_lookahead_slots
        missing = -(-np.minimum(slots.num_tokens + ahead, most) // page_size) - slots.num_columns
        short = np.flatnonzero((missing > 0) & (slots.owner >= 0))
        if not len(short):
            return True
        short = short[np.argsort(slots.owner[short])]
        counts, num_free = missing[short], min(self.pools.num_free)
        left_to_most = -(-most[short] // page_size) - slots.num_columns[short]
        counts = np.maximum(counts, np.minimum(self._pages_ahead(int(counts.sum())), left_to_most))
        fits = counts.cumsum() <= num_free
        for slot, count in zip(short[fits].tolist(), counts[fits].tolist(), strict=True):
            pages = slots.at(slot).pages
            grants.append(PageGrant(slot, pages.num_columns, self.pools.grow(pages, count)))
        slots.add_pages(short[fits], counts[fits])
        return bool(fits.all())

    def _pages_ahead(self, count: int) -> int:
        """Pages that a row may get before it needs them, if `count` pages are taken from each pool now."""
        num_slots, pools = self.batch.num_slots, self.pools.pools
        if all(pool.num_free - count > pool.num_pages // 2 + AMPLE_PAGES * num_slots for pool in pools):
            return AMPLE_PAGES
        return GROW_PAGES if all(pool.num_free - count > GROW_PAGES * num_slots for pool in pools) else 0

    def _admit(self, state: RequestState, promised: list[int], *, alone: bool, num_slots: int, room: int | None) -> bool:
        """Grant pages for the request's tokens and the one that its prefill emits, if the pool can also hold what all requests
        are predicted to need later, or of the last requests enough of it (`LAST_SHARE`).

        promised   by K/V group, pages that the requests in slots are predicted to need; this request's are added
        alone      True if no request is in a slot or about to enter one; then predicted needs do not delay this one
        num_slots  that are left for this request and those that wait with it
        room       as `_room`
        """
        request = state.request
        assert (request.device_limit > 0) == self.batch.decodes, f"{request.request_id!r}: the batch was planned for other rows"
        most = self.pages_for(state.max_tokens + self._num_lookahead_slots)
        if most > self.pools.most_columns:
            raise CapacityError(
                f"request {request.request_id!r}: prompt and output of {state.max_tokens} tokens need {most} pages,"
                f" the pool has {self.pools.most_columns}; raise packing.pages or packing.memory_gb"
            )
        hashes = self._hash(state)  # the last prompt token is in no such page: it is computed, and gives the first output token
        prefix, plan = (self.pools.match(hashes), None) if self._prefixes is None else self._prefixes.plan(hashes)
        if room is not None and state.num_tokens - prefix.num_columns * self.batch.page_size > room:
            return False
        num_columns = self.pages_for(state.num_tokens)
        expected, num_idle = self.pools.most_held_by_row(self._expected_pages.of_waiting(state)), self.pools.num_idle(prefix)
        for group, (first, held) in enumerate(zip(prefix.first, prefix.num_held, strict=True)):
            # A group with a window holds all pages of the row during its prefill, and fewer later.
            needed = max(expected[group], num_columns - first) - held + num_idle[group]
            if not alone and promised[group] + needed > self.pools.pools[group].num_free and not (
                self._last_ones_fit(promised, num_slots)
            ):
                return False
        state.pages, state.num_shared_pages, state.prefix_plan = prefix, prefix.num_columns, plan
        if plan is not None and self._prefixes is not None:
            self._prefixes.admit(plan, hashes)
        num_columns = min(num_columns + self._pages_ahead(num_columns), most)
        self.pools.admit(state.pages, num_columns, hashes)
        for group, held in enumerate(prefix.num_held):
            promised[group] += max(0, expected[group] - held)
        return True

    def _last_ones_fit(self, promised: Sequence[int], num_slots: int) -> bool:
        """Whether all requests that wait are the last ones, have a slot, and may begin now although pages may lack at the end
        (`LAST_SHARE`). Not if one of them was preempted: it would be preempted again.

        promised, num_slots  as in `_admit`
        """
        if not self._waiting.are_last(num_slots):
            return False
        needed = [LAST_SHARE * count for count in promised]
        for state in self._waiting:
            now = self.pages_for(state.num_tokens)
            expected = self.pools.most_held_by_row(self._expected_pages.of_waiting(state))
            for group, (own, pool) in enumerate(zip(expected, self.pools.pools, strict=True)):
                needed[group] += now + LAST_SHARE * max(0, own - now)
                if state.num_prefills or needed[group] > pool.num_free:
                    return False
        return True

    def _hash(self, state: RequestState) -> list[bytes]:
        """Hashes of the prompt's pages that may be shared; computed once."""
        if state.prefix_hashes is None:
            request = state.request
            state.prefix_hashes = prefix_hashes(
                request.prompt_ids, self.batch.page_size, key=request.prefix_key, images=request.images
            )
        return state.prefix_hashes

    def _free_passed_pages(self) -> None:
        """Give back the pages that the windows of all layers of a K/V group have passed.

        This is done only for rows whose first token after entering the slot was read: before that, passes of their prefill may
        still be queued, and these read all pages.
        """
        slots = self.slots
        if not self.pools.any_window:
            return
        passed = self.pools.passed_columns(slots.num_tokens) > slots.num_columns - slots.num_pages.T
        for slot in np.flatnonzero(passed.any(0) & (slots.owner >= 0) & (slots.num_tokens > slots.num_prefilled)).tolist():
            state = slots.at(slot)
            self.pools.free_passed(state.pages, int(slots.num_tokens[slot]))
            slots.note_pages(state)

    def youngest(self) -> RequestState:
        """The request that entered its slot last."""
        return max(self.slots.live, key=lambda state: state.order)

    def release(self, state: RequestState, *, on_device: bool = False) -> None:
        """The request leaves its slot. Steps that are scheduled from now on may use its slot and pages.

        on_device  the device has ended its row already
        """
        self._features.leave(state)
        self.slots.clear(state, on_device=on_device)
        self.pools.release(state.pages)

    def preempt(self, state: RequestState) -> None:
        """Take slot and pages away; the request is prefilled again with all its tokens, before any new one."""
        self.release(state)
        self._waiting.put_first(state)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Move live rows into the first `num_slots` slots; (source, destination) of each move."""
        free = iter([slot for slot in range(num_slots) if self.slots.requests[slot] is None])
        moves = [(state.slot, next(free)) for state in self.slots.live if state.slot >= num_slots]
        self.slots.move(moves)
        return moves
