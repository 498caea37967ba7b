"""Decides every step: refills, prefill, page grants, preemption, compaction, the shape of each round.

Clocks, free memory and what the host has read are consulted only here; the decisions are in the `ScheduledStep`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.refills import prefill_of, refill_of
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.slots.allocator import SlotAllocator
from batchspec.engine.slots.launch import UnreadLaunch, UnreadLaunches
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.prefix_groups import PrefixGroups
from batchspec.engine.slots.refill_policy import rounds_before_refill
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.engine.step import PageGrant, Prefill, Refill, RoundShape, ScheduledRound, ScheduledStep


class Scheduler:
    """`schedule` yields the steps; the caller executes each and processes `num_reads` results before it asks for the next one.

    Launching rounds before earlier results are read is safe because the device ends rows at stop ids and limits by itself; a
    result belongs to the row that owned the slot at launch; pages reach as far as all launched rounds can write; and the next
    owner of a page writes it after the rounds of its last owner, in stream order.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        planner: RoundPlanner,
        executor: Executor,
        totals: EngineTotals,
        *,
        features: RunFeatures,
        requests: OpenRequests,
    ) -> None:
        """
        executor      asked for shapes, whether passes are done and what its drafter has ready; never for data on the device
        features      of the run's rows
        requests      told of the rows that features fail; asked for those that ended, from which the drafter may learn
        """
        self.slots, self.batch, self._features = allocator.slots, allocator.batch, features
        self._allocator, self._planner, self._executor, self._totals = allocator, planner, executor, totals
        self.prefix_groups = PrefixGroups(self.batch.num_slots, executor.sharing.pays)
        self.unread = UnreadLaunches(self.slots)
        self._rounds_before_refill = 0
        """Number of further rounds that are launched before the next refill is prepared."""
        self._requests = requests
        self.num_rows = self.batch.num_slots
        """Row bucket of the next round."""

    def schedule(self) -> Iterator[ScheduledStep]:
        """Yield steps without end; some are empty. Raises CapacityError for a request that can never fit.

        The scheduler keeps no reference to this iterator, so that dropping an engine frees its graphs and pages at once.
        """
        while True:
            yield from self._poll()
            num_launched = self.unread.num_launched
            yield from self._refill()
            yield from self._compact()
            if self.slots.num_decoding:
                yield from self._round()
            if not self.slots.num_decoding:
                yield self._make_step(num_reads=self._num_reads(any_launched=self.unread.num_launched > num_launched))

    def _num_reads(self, *, any_launched: bool) -> int:
        """Number of results to read now that no row decodes: only these can free slots.

        Of a batch that decodes, read all but the newest: while the device computes that one, a prefill pass, the slots that the
        others free are refilled. If it is the only one, read it. If rows end with their prefill, every refill is one pass, and
        the device has `run_ahead` further ones to compute while the host reads a result and prepares the next refill. If none
        could be launched, because no slot or no page is free or no request is ready, one more is read.

        any_launched  whether a pass was launched since the last results were read
        """
        num_unread = len(self.unread)
        if self.batch.decodes:
            return num_unread - 1 if num_unread > 1 else num_unread
        due = max(0, num_unread - self.batch.run_ahead)
        return due if any_launched else max(due, min(1, num_unread))

    def _poll(self) -> Iterator[ScheduledStep]:
        """End the rows that features have failed, hold others, and resume those that are ready, the oldest first."""
        for state in self._features.poll():
            if state.finish_reason is None:
                self.slots.hold(state, on_device=False, num_results=self.unread.num_launched)
            else:
                self._fail(state)
        resumed: list[int] = []
        for state in sorted(self.slots.held, key=lambda state: state.order):
            if self.unread.num_read < self.slots.held[state]:
                continue
            self.slots.flush(state)  # of the rounds that had been launched when it was held
            if self._features.ready(state):
                self._features.enter(state)
                self.slots.resume(state)
                resumed.append(state.slot)
        if resumed:  # at once: another step may move rows
            yield self._make_step(resumed=tuple(resumed))

    def _fail(self, state: RequestState) -> None:
        """End a row that one of its features has failed, in a slot or not. Its features examine its newest tokens first: if these
        end it, it ends with their reason. Otherwise the number of tokens a round adds would decide which of the two it is."""
        error, state.finish_reason, state.error = state.error, None, None
        slot = state.slot
        if slot >= 0:
            self.slots.flush(state)
        self._features.examine(state)
        if state.finish_reason is None:
            state.fail(error)
        if slot >= 0:
            self._allocator.release(state)
        self._requests.end(state, slot=slot, now=time.perf_counter())

    def drain(self) -> ScheduledStep:
        """The step that ends a run that was stopped: it reads all launched work and launches nothing."""
        return self._make_step(read_all=True)

    def _refill(self) -> Iterator[ScheduledStep]:
        """Refill free slots."""
        if not self._allocator.refill_is_due(self._planner.round_s, self._planner.refill_s):
            return
        for _ in range(self._rounds_before_refill if self.slots.num_decoding else 0):
            yield from self._round(reads=False)
        group = self._allocator.refill()
        if not group:
            return
        refills = tuple(refill_of(state, self.batch.page_size) for state in group)
        self._count(group, refills)
        self.num_rows = max(self.num_rows, self._allocator.num_rows_taken())
        decoding = bool(self.unread)
        prefill = prefill_of(group, refills, self.batch, multiple=self._executor.prefill_multiple)
        yield self._make_step(refills=refills, prefill=prefill)
        if decoding:
            self._learn_from_refill()

    def _learn_from_refill(self) -> None:
        """Choose how many rounds are launched before the next refill, by what the device had left to do when this one was
        launched. None where there are no rounds, and where rows may have to wait."""
        applies = self.slots.num_decoding and not self.slots.mode.may_hold
        num_left = self._executor.num_left_at_refill if applies else None
        self._rounds_before_refill = rounds_before_refill(self._rounds_before_refill, num_left)

    def _count(self, group: Sequence[RequestState], refills: Sequence[Refill]) -> None:
        """Count the tokens of requests that enter slots."""
        for state, refill in zip(group, refills, strict=True):
            if state.num_prefills == 0:
                state.cached_tokens = refill.num_cached
            self._totals.cached_tokens += refill.num_cached
            self._totals.prefill_tokens += state.num_tokens - refill.num_cached

    def _compact(self) -> Iterator[ScheduledStep]:
        """Once no request waits, shrink to the next smaller row bucket as soon as the live rows fit."""
        if not (self.slots.num_live and self.batch.decodes):  # the rows of a pass may be in any slots
            return
        num_rows = self._allocator.num_rows_needed()
        if num_rows < self.num_rows:
            if self.unread:
                yield self._make_step(read_all=True)
            moves = self._allocator.compact(num_rows)
            self.num_rows = num_rows
            if moves:
                yield self._make_step(moves=tuple(moves))

    def _round(self, *, reads: bool = True) -> Iterator[ScheduledStep]:
        """Grant pages for all that the launched rounds and the next one may write, preempting the youngest rows if needed; then
        launch that round.

        reads  whether the step also reads the results that are due by `run_ahead`
        """
        grants: list[PageGrant] = []
        while not self._allocator.grow(self._tokens_ahead, grants):
            if self.unread:  # unread results may free pages, and the tokens of a preempted row must all be known
                yield self._make_step(num_reads=1)
            else:
                self._allocator.preempt(self._allocator.youngest())
                self._totals.preempted += 1
        if not self.slots.num_decoding:  # all of them ended, or are held, by the results that were read
            if grants:  # held rows keep their slots and pages
                yield self._make_step(grants=tuple(grants))
            return
        round_, launch = self._schedule_round()
        yield self._make_step(reads_due=reads, grants=tuple(grants), round_=round_, launch=launch)

    @property
    def _tokens_ahead(self) -> int:
        """Tokens of a row, after those read, that the launched rounds and the next one may write."""
        round_ = self._executor.round
        return len(self.unread) * round_.max_emitted + round_.kv_per_round

    def _schedule_round(self) -> tuple[ScheduledRound, UnreadLaunch]:
        """The next round, and what the host keeps of it."""
        slots, groups = self.slots, self.prefix_groups
        new_groups = groups.renew(slots.requests, slots.owner, self.num_rows)
        launch = self._planner.choose(self.num_rows, slots.num_tokens, slots.owner)
        shape = RoundShape(
            num_rows=self.num_rows,
            draft_len=launch.width.draft_len,
            mean_len=launch.width.mean_len,
            mode=slots.mode,
            shared=groups.any,
            prepare_next=launch.prepare_next,
            max_kv=self._planner.max_kv(int(slots.max_tokens[slots.owner >= 0].max(initial=0))),
        )
        round_ = ScheduledRound(
            shape=shape,
            new_prefix_groups=new_groups,
            counts_experts=launch.counts_experts,
            counts_drafts=launch.counts_drafts,
            drafter_update=self._executor.drafter.next_update(),
        )
        return round_, launch

    def _make_step(
        self, *, moves: tuple[tuple[int, int], ...] = (), refills: tuple[Refill, ...] = (), resumed: tuple[int, ...] = (),
        prefill: Prefill | None = None, grants: tuple[PageGrant, ...] = (), round_: ScheduledRound | None = None,
        launch: UnreadLaunch | None = None, num_reads: int = 0, read_all: bool = False, reads_due: bool = True,
    ) -> ScheduledStep:
        """A step with the changes since the last one; notes what it launches. Arguments are fields of `ScheduledStep`, but:

        launch     what the host keeps of the round
        read_all   read the results of all launches, those of this step included
        reads_due  if it launches a round: whether the results that are due by `run_ahead` are read
        """
        if prefill is not None:
            self.unread.add_prefill(prefill)
        if launch is not None:
            self.unread.add(launch)
            self._totals.rounds += 1
        if read_all:
            num_reads = len(self.unread)
        elif reads_due and launch is not None:
            num_reads = max(0, len(self.unread) - self.batch.run_ahead)
        return ScheduledStep(
            finished=self._requests.take_finished(), killed=self.slots.take_killed(), moves=moves, refills=refills,
            commands=self._features.take_commands(), resumed=resumed, prefill=prefill, grants=grants,
            round=round_, num_reads=num_reads,
        )
