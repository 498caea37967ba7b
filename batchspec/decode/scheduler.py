"""Which request is in which slot, and which pages it owns. Host bookkeeping only: no tensor, no model.

Requests stream through a fixed set of slots. A free slot is refilled at a round boundary, in groups; a row gets pages
for what it is expected to need and more as it grows; when pages run out the youngest row is set back: its tokens are
kept and it is prefilled again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from batchspec.cache.pages import PagePool, page_keys
from batchspec.decode.output import Progress
from batchspec.errors import CapacityError
from batchspec.records import PackedBatch

SHORT_CAP_TOKENS = 512
"""Rows that may emit at most this many tokens get pages for all of them at once."""


@dataclass(slots=True, eq=False)
class Row:
    """A request on its way through the batch."""

    progress: Progress
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
        """Prompt and output tokens that the host has seen."""
        return len(self.progress.request.prompt_ids) + len(self.progress.tokens)

    @property
    def limit(self) -> int:
        return len(self.progress.request.prompt_ids) + self.progress.request.max_new_tokens


class Scheduler:
    def __init__(self, batch: PackedBatch, pool: PagePool, rows: Iterator[Progress], *, refill_dead: bool = True) -> None:
        """`refill_dead=False` waits until every row is dead before new ones come in."""
        self.batch, self.pool = batch, pool
        self.slots: list[Row | None] = [None] * batch.slots
        self._stream = rows
        self._waiting: deque[Row] = deque()
        self._num_refills = 0
        # Refilling four at a time, or 2 % of the slots, costs less prefill passes than it leaves slots idle.
        self._group = batch.slots if not refill_dead else max(1, min(4, batch.slots // 16))

    @property
    def live(self) -> list[Row]:
        return [row for row in self.slots if row is not None]

    @property
    def exhausted(self) -> bool:
        """No request waits and none will come."""
        return self._peek() is None

    def _peek(self) -> Row | None:
        if not self._waiting:
            progress = next(self._stream, None)
            if progress is not None:
                self._waiting.append(Row(progress))
        return self._waiting[0] if self._waiting else None

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.batch.page_size)

    def _expected_pages(self, row: Row) -> int:
        """Pages the row will hold at its end, as far as anyone knows: all of a short cap; else what is predicted, and for a
        row that outgrows it half as much output again, so that a row set back is not taken in again only to be set back."""
        request = row.progress.request
        if request.max_new_tokens <= SHORT_CAP_TOKENS:
            return self.pages_for(row.limit)
        output = max(request.predicted_tokens, len(row.progress.tokens) * 3 // 2 + 4 * self.batch.page_size)
        return self.pages_for(min(row.limit, len(request.prompt_ids) + output))

    def refill(self) -> list[Row]:
        """Rows to prefill now: slots taken, pages for their present tokens granted, whole-page prefixes shared."""
        free = [slot for slot, row in enumerate(self.slots) if row is None]
        if len(free) < self._group and len(free) < self.batch.slots:
            return []
        group: list[Row] = []
        promised = sum(max(0, self._expected_pages(row) - len(row.pages)) for row in self.live)
        for slot in free:
            row = self._peek()
            if row is None or not self._admit(row, promised):
                break
            self._waiting.popleft()
            row.slot, row.order = slot, self._num_refills
            self._num_refills += 1
            self.slots[slot] = row
            group.append(row)
            promised += max(0, self._expected_pages(row) - len(row.pages))
        return group

    def _admit(self, row: Row, promised: int) -> bool:
        """Grant pages for the row's tokens and the one its prefill emits, if the rest of its life will find room too."""
        request = row.progress.request
        if self.pages_for(row.limit) > self.pool.num_pages - 1:
            raise CapacityError(
                f"request {request.request_id!r}: prompt and output of {row.limit} tokens need {self.pages_for(row.limit)} pages,"
                f" the pool has {self.pool.num_pages - 1}; raise packing.pages or packing.memory_gb"
            )
        if row.keys is None:  # a row that waits for pages asks again every round
            row.keys = page_keys(request.prompt_ids, self.batch.page_size)
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
        """Pages so that `num_tokens` (at most the row's limit) fit: the new ones, or None when the pool has too few."""
        missing = self.pages_for(min(num_tokens, row.limit)) - len(row.pages)
        if missing > self.pool.num_free:
            return None
        pages = self.pool.take(max(0, missing))
        row.pages += pages
        return pages

    def youngest(self) -> Row:
        return max(self.live, key=lambda row: row.order)

    def release(self, row: Row) -> None:
        """The row is dead: its slot and pages are free for what is launched from now on."""
        self.pool.release(row.pages)
        self.slots[row.slot] = None
        row.pages = []

    def set_back(self, row: Row) -> None:
        """Take the row's slot and pages away; it comes back before any new request."""
        self.release(row)
        row.slot = -1
        self._waiting.appendleft(row)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Move live rows into the first `num_slots` slots; (source, destination) of each move."""
        free = [slot for slot in range(num_slots) if self.slots[slot] is None]
        moves = []
        for source in range(num_slots, self.batch.slots):
            row = self.slots[source]
            if row is not None:
                row.slot = free.pop(0)
                self.slots[row.slot], self.slots[source] = row, None
                moves.append((source, row.slot))
        return moves
