"""Which request is in which slot, and which pages it owns. Host bookkeeping only: no tensor, no model.

Requests stream through a fixed set of slots. A free slot is refilled at a round boundary, in groups; a row gets pages
for what it is expected to need and more as it grows; when pages run out the youngest row is set back: its tokens are
kept and it is prefilled again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchspec.cache.pages import PagePool, prefix_hashes
from batchspec.engine.request_state import RequestState
from batchspec.errors import CapacityError
from batchspec.records import PackedBatch

SHORT_CAP_TOKENS = 512
"""Rows that may emit at most this many tokens get pages for all of them at once."""
GROW_PAGES = 4
"""Pages a row gets at once where there are plenty: the page table is then written every few rounds, not every round."""


Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a prefill pass takes: seconds where it was measured, else rounds of all slots."""

    least: float
    """Of few tokens: its launches, on the host."""
    token: float
    """Each token of a full one."""

    @staticmethod
    def usual(prefill_tokens: int) -> PassCost:
        """Where nothing is measured: a quarter of a round, and half a full pass has nothing to wait for."""
        return PassCost(least=0.25, token=0.5 / max(1, prefill_tokens))


@dataclass(slots=True, eq=False)
class Row:
    """A request on its way through the batch."""

    progress: RequestState
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    """Pages at the front whose K/V another row had prefilled."""
    order: int = 0
    """Counts refills: the highest is the youngest row."""
    keys: list[bytes] | None = None
    """Of the prompt's whole pages, once they were asked for."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens on the row's own account; a row in a slot has more in `Scheduler.num_tokens`."""
        return len(self.progress.request.prompt_ids) + len(self.progress.tokens)

    @property
    def limit(self) -> int:
        return len(self.progress.request.prompt_ids) + self.progress.request.max_new_tokens


class Scheduler:
    def __init__(
        self,
        batch: PackedBatch,
        pool: PagePool,
        rows: Iterator[RequestState],
        *,
        refill_dead: bool = True,
        lookahead: int = 0,
        num_lookahead_slots: int = 0,
        pass_cost: PassCost | None = None,
    ) -> None:
        """
        refill_dead  False: wait until every row is dead before new ones come in
        lookahead    tokens behind a page that its K/V depends on too: 1 with a drafter that reads the next token
        beyond       places behind a row's end that it needs pages for too: what a tree of drafts takes
        pass_cost    of a prefill; None: the usual one
        """
        self.batch, self.pool = batch, pool
        self.slots: list[Row | None] = [None] * batch.num_slots
        self._stream = rows
        self._waiting: deque[Row] = deque()
        self._num_refills = 0
        self._refill_dead, self._lookahead, self._num_lookahead_slots = refill_dead, lookahead, num_lookahead_slots
        self._pass_cost = pass_cost or PassCost.usual(batch.prefill_tokens)
        self._idle = 0.0
        self._live: list[Row] | None = None
        # What is asked of every row in every round, by slot; `owner` counts refills and is -1 for a free slot.
        self.owner = np.full(batch.num_slots, -1, np.int64)
        self.num_tokens = np.zeros(batch.num_slots, np.int64)
        self._num_pages, self._prompt_len, self._limit, self._predicted = np.zeros((4, batch.num_slots), np.int64)

    @property
    def live(self) -> list[Row]:
        """Rows in slots, by slot."""
        if self._live is None:
            self._live = [row for row in self.slots if row is not None]
        return self._live

    @property
    def exhausted(self) -> bool:
        """No request waits and none will come."""
        return self._peek() is None

    @property
    def preempted(self) -> list[Row]:
        """Rows that had slots and wait for pages."""
        return [row for row in self._waiting if row.progress.tokens]

    def _peek(self) -> Row | None:
        if not self._waiting:
            progress = next(self._stream, None)
            if progress is not None:
                self._waiting.append(Row(progress))
        return self._waiting[0] if self._waiting else None

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.batch.page_size)

    def _expected_pages(self, row: Row) -> int:
        """Pages a waiting row will hold at its end, as far as anyone knows: see `_pages_at_end`."""
        request, count = row.progress.request, len(row.progress.tokens)
        one = [np.array([n]) for n in (len(request.prompt_ids), row.limit, request.predicted_tokens, count)]
        return int(self._pages_at_end(*one)[0])

    def _pages_at_end(self, prompt_len: Counts, limit: Counts, predicted: Counts, emitted: Counts) -> Counts:
        """All of a short cap; else what is predicted, and for a row that outgrows it half as much output again, so that a
        row set back is not taken in again only to be set back."""
        output = np.maximum(predicted, emitted * 3 // 2 + 4 * self.batch.page_size)
        expected = np.minimum(limit, prompt_len + output)
        at_end = np.where(limit - prompt_len <= SHORT_CAP_TOKENS, limit, expected) + self._num_lookahead_slots
        return -(-at_end // self.batch.page_size)

    def _promised(self) -> int:
        """Pages that the rows in slots are expected to ask for still."""
        emitted = self.num_tokens - self._prompt_len
        at_end = self._pages_at_end(self._prompt_len, self._limit, self._predicted, emitted)
        return int(np.maximum(at_end - self._num_pages, 0)[self.owner >= 0].sum())

    def refill(self, round_s: float = 1.0) -> list[Row]:
        """Rows to prefill now, before the next round: slots taken, pages for their present tokens granted, whole-page prefixes
        shared.

        round_s  what a round of all slots takes at present, in the unit of the pass's cost
        """
        free = np.flatnonzero(self.owner < 0).tolist()
        if not self._worth_a_prefill(len(free), round_s):
            return []
        self._idle = 0.0
        group: list[Row] = []
        promised = self._promised()
        for slot in free:
            row = self._peek()
            if row is None or not self._admit(row, promised):
                break
            self._waiting.popleft()
            self._place(row, slot)
            group.append(row)
            promised += max(0, self._expected_pages(row) - len(row.pages))
        return group

    def _worth_a_prefill(self, num_free: int, round_s: float) -> bool:
        """Once slots have stood idle for as long as a pass of few tokens takes more than its tokens do.

        Waiting then costs as much as the pass, which is the least of both together (Harris 1913, economic order quantity).
        """
        if num_free == self.batch.num_slots:
            return True
        if not self._refill_dead or not num_free or (row := self._peek()) is None:
            return False
        self._idle += round_s * num_free / self.batch.num_slots
        return self._idle >= self._pass_cost.least - self._pass_cost.token * num_free * row.num_tokens

    def _place(self, row: Row, slot: int) -> None:
        request = row.progress.request
        row.slot, row.order = slot, self._num_refills
        self._num_refills += 1
        self.slots[slot], self._live = row, None
        self.owner[slot], self.num_tokens[slot], self._num_pages[slot] = row.order, row.num_tokens, len(row.pages)
        self._prompt_len[slot], self._limit[slot] = len(request.prompt_ids), row.limit
        self._predicted[slot] = request.predicted_tokens

    def short_of_pages(self, ahead: int) -> list[Row]:
        """Rows whose pages end before their tokens and `ahead` more, or their limit, oldest first."""
        wanted = -(-np.minimum(self.num_tokens + ahead, self._limit + self._num_lookahead_slots) // self.batch.page_size)
        slots = np.flatnonzero((self.owner >= 0) & (wanted > self._num_pages))
        return [row for slot in slots[np.argsort(self.owner[slots])] if (row := self.slots[slot]) is not None]

    def _admit(self, row: Row, promised: int) -> bool:
        """Grant pages for the row's tokens and the one its prefill emits, if the rest of its life will find room too."""
        request = row.progress.request
        most = self.pages_for(row.limit + self._num_lookahead_slots)
        if most > self.pool.num_pages - 1:
            raise CapacityError(
                f"request {request.request_id!r}: prompt and output of {row.limit} tokens need {most} pages,"
                f" the pool has {self.pool.num_pages - 1}; raise packing.pages or packing.memory_gb"
            )
        if row.keys is None:  # a row that waits for pages asks again every round
            row.keys = prefix_hashes(request.prompt_ids, self.batch.page_size, lookahead=self._lookahead)
        keys = row.keys
        # The last prompt token is always computed: its logits give the first output token.
        shared = self.pool.match(keys[: (len(request.prompt_ids) - 1) // self.batch.page_size])
        taken_from_free = self.pool.num_idle(shared)
        expected = self._expected_pages(row) - len(shared) + taken_from_free
        if any(self.slots) and promised + expected > self.pool.num_free:
            return False
        self.pool.share(shared)
        own = self.pool.take(self.pages_for(row.num_tokens) - len(shared))
        row.pages, row.num_shared = shared + own, len(shared)
        for page, key in zip(row.pages, keys, strict=False):
            self.pool.publish(page, key)
        return True

    def grow(self, row: Row, num_tokens: int) -> list[int] | None:
        """Pages so that `num_tokens` (at most the row's limit and what lies beyond) fit: the new ones, or None when the pool has
        too few."""
        most = row.limit + self._num_lookahead_slots
        missing = self.pages_for(min(num_tokens, most)) - len(row.pages)
        if missing > self.pool.num_free:
            return None
        if 0 < missing < GROW_PAGES and self.pool.num_free > GROW_PAGES * self.batch.num_slots:
            missing = min(GROW_PAGES, self.pages_for(most) - len(row.pages))
        pages = self.pool.take(max(0, missing))
        row.pages += pages
        self._num_pages[row.slot] = len(row.pages)
        return pages

    def youngest(self) -> Row:
        return max(self.live, key=lambda row: row.order)

    def release(self, row: Row) -> None:
        """The row is dead: its slot and pages are free for what is launched from now on."""
        self.pool.release(row.pages)
        self.slots[row.slot], self._live = None, None
        self.owner[row.slot] = -1
        row.pages = []

    def preempt(self, row: Row) -> None:
        """Take the row's slot and pages away; it comes back before any new request."""
        self.release(row)
        row.slot = -1
        self._waiting.appendleft(row)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Move live rows into the first `num_slots` slots; (source, destination) of each move."""
        free = [slot for slot in range(num_slots) if self.slots[slot] is None]
        moves = []
        for source in range(num_slots, self.batch.num_slots):
            row = self.slots[source]
            if row is not None:
                row.slot = free.pop(0)
                self.slots[row.slot], self.slots[source] = row, None
                for field in (self.owner, self.num_tokens, self._num_pages, self._prompt_len, self._limit, self._predicted):
                    field[row.slot] = field[source]
                self.owner[source] = -1
                moves.append((source, row.slot))
        self._live = None
        return moves
