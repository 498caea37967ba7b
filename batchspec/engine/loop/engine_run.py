"""The state of one run of the engine: made when the run begins, dropped as a whole when the next run begins.

What one run leaves to the next belongs to the engine: weights, captured graphs, measured times and acceptance, totals, what its
`Features` keep, rows that the drafter learns from, and, if prefixes are kept, the pages. `Engine._begin` resets the executor's
rows, the planner's clock and the leader's digest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from batchspec.cache.page_tables import PagePools
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.ranks.lead import Lead
from batchspec.engine.rounds.records import PendingResult, RoundLog, Slots
from batchspec.engine.slots.allocator import SlotAllocator
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import Features, RunFeatures
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.slots.waiting import WaitingRequests
from batchspec.kernels.rounds.accept import HELD
from batchspec.packed_batch import MOST_ROUNDS_BEFORE_REFILL, PackedBatch
from batchspec.records import Completion, Ids, Snapshot
from batchspec.request_stream import RequestStream

PREFETCHED_PER_ROUND = 8
"""Requests prefetched after each result: twice as many as end in a round of 256 rows that take 60 rounds each."""
REST_S = 0.05
"""Longest time, in seconds, that the host waits for what features wait for when it has nothing else to do."""


class EngineRun:
    """All host state of one run, and its steps.

    pools      pages, and the prefixes that can be found; the allocator grants them
    slots      the requests in slots; the allocator fills them, results add tokens
    features   what rows of this run may ask for
    requests   those that were taken from the stream and whose completions the caller does not have yet
    scheduler  decides the steps; it has the launches whose results are not read
    """

    def __init__(
        self,
        stream: RequestStream,
        *,
        batch: PackedBatch,
        executor: Executor,
        planner: RoundPlanner,
        totals: EngineTotals,
        features: Features,
        allocator_kind: type[SlotAllocator],
        eos_ids: frozenset[int],
        finished: Sequence[tuple[Ids, Ids]] = (),
        lead: Lead | None = None,
        pools: PagePools | None = None,
        prefill_cost: PrefillCost | None = None,
    ) -> None:
        """
        finished      prompt and output of rows of an earlier run that the drafter has not learned from yet
        eos_ids       of the model
        lead          set if this process leads several ranks that compute the target together
        pools         of an earlier run, whose prefixes can be found; None: new ones
        prefill_cost  None: `PrefillCost.default`
        """
        self._executor, self._planner, self._totals, self._lead = executor, planner, totals, lead
        groups, round_, drafter = executor.cache.groups, executor.round, executor.drafter
        self.pools = pools or PagePools(
            groups,
            batch.group_pages(groups.num_groups),
            batch.page_size,
            lookahead=(batch.run_ahead + MOST_ROUNDS_BEFORE_REFILL) * round_.max_emitted + round_.kv_per_round,
            states=executor.prefix_states(),
        )
        self.slots = SlotTable(batch.num_slots, batch.max_len, drafter.draft_len, num_groups=groups.num_groups)
        self.features = RunFeatures(features.begin(self.slots, self.pools))
        self.requests = OpenRequests(
            self.features, drafter=drafter.name, draft_len=drafter.draft_len, num_nodes=round_.num_nodes, eos_ids=eos_ids,
            finished=finished,
        )
        self._waiting = WaitingRequests(stream, self.requests, most_prefetched=batch.num_slots // 2)
        self._allocator = allocator_kind(
            batch,
            self.pools,
            self._waiting,
            features=self.features,
            slots=self.slots,
            num_lookahead_slots=round_.num_lookahead_slots,
            prefill_cost=prefill_cost,
        )
        self.scheduler = Scheduler(
            self._allocator, planner, executor, totals, requests=self.requests, features=self.features
        )
        self._steps = self.scheduler.schedule()

    def step(self, *, stopping: bool, on_round: Callable[[EngineTotals], None] | None = None) -> list[Completion]:
        """Schedule, execute, process. Returns the completions of the requests that have ended and wait for nothing. If nothing
        else is left to do, waits for a while.

        stopping  the step only reads results that are outstanding; it launches nothing
        on_round  called after each processed result
        """
        step = self.scheduler.drain() if stopping else next(self._steps)
        if self._lead is not None:
            self._lead.send_step(step)
        self._executor.execute(step)
        for _ in range(step.num_reads):
            self._process()
            if on_round is not None:
                on_round(self._totals)
            self.take_ahead()
        done = self.requests.take_completions()
        if not (done or self.scheduler.unread) and (stopping or not self.slots.num_decoding):
            self.features.wait(REST_S)
        return done

    def take_ahead(self) -> None:
        """Prefetch some requests, if their stream gives them without waiting, and prepare those that the next refills need, so
        that a refill takes the host less time. Call it after each result, while the device computes."""
        self._allocator.take_ahead(PREFETCHED_PER_ROUND)

    def _process(self) -> None:
        """Read the oldest result, add it to its rows, and end those that have ended in it."""
        launch, result = self.scheduler.unread.take_oldest(), self._executor.read()
        if self._lead is not None:
            self._lead.read(result)
        slots, log = result.rows_of(launch.owners, self.slots.owner)
        self._learn(launch, result, slots, log)
        now = time.perf_counter()
        self.features.read(launch, result, slots, log)
        self.slots.add_result(result, slots, log, now)
        ending = [(self.slots.at(slot), finish) for slot, finish in self._examine_due(slots, log)]
        self.slots.flush(*(state for state, _ in ending))  # all at once, which takes a row less time
        for state, finish in ending:
            if finish == HELD and state.finish_reason is None:
                self.slots.hold(state, on_device=True)
                continue
            if self._lead is not None:  # all ranks must agree on what was read
                self._lead.confirm()
            self._end(state, finish, now)

    def _end(self, state: RequestState, finish: int, now: float) -> None:
        """Take a request that has ended out of its slot.

        finish  the device's reason; 0 if a feature ended it
        now     seconds of the host's clock
        If it ended with an error, later rows share no page of its prompt: an infinite key in one of these pages may be the cause.
        All pages of its prefix are forgotten, even those that other rows read without an error: a query to which the infinite
        key is masked, or gets no weight, has finite results.
        """
        slot = state.slot
        self._allocator.release(state, on_device=finish not in (0, HELD))
        if state.finish_reason is None:
            state.set_finish_reason(finish)
        if state.finish_reason == "error":
            self.pools.forget_prefix(state.prefix_hashes or ())
        self.requests.end(state, slot=slot, now=now)

    def _learn(self, launch: UnreadLaunch, result: PendingResult, slots: Slots, log: RoundLog) -> None:
        """Add a result to what outlives the run: the totals, and what the planner measures."""
        totals, planner = self._totals, self._planner
        totals.add(result, log)
        if not self._allocator.batch.decodes:
            totals.tokens += launch.num_prefilled
        totals.live_rows = self.slots.num_live
        planner.learn(launch, result, log, self.slots.token_weights(slots) if planner.counts_acceptance(launch) else None)
        if planner.experts is not None:
            totals.expert_correlation = planner.experts.correlation

    def _examine_due(self, slots: Slots, log: RoundLog) -> list[tuple[int, int]]:
        """Let features examine the rows that are due after a result; line i of `log` is that of the row in slots[i].

        Returns the slots of rows that must leave or be held: those that the device has ended or holds, each with its reason, and
        those that features have ended, with 0.
        """
        on_device = log.finish != 0
        ended: dict[int, int] = dict(zip(slots[on_device].tolist(), log.finish[on_device].tolist(), strict=True))
        due = self.slots.due(slots, log).tolist()
        rows = [self.slots.at(slot) for slot in due]
        self.slots.flush(*rows)
        for slot, state in zip(due, rows, strict=True):
            self._examine(state)
            if state.slot < 0:  # preempted
                ended.pop(slot, None)
            elif state.finish_reason is not None:
                ended.setdefault(slot, 0)
        return sorted(ended.items())

    def _examine(self, state: RequestState) -> None:
        """Let the features examine a row, whose tokens are flushed. If they have replaced some, prefill it with the new ones."""
        before = state.watch
        self.features.examine(state)
        if state.watch != before:
            self.slots.watch(state)
        if state.replaced and state.finish_reason is None:
            self._allocator.preempt(state)
        state.replaced = False

    def close(self) -> None:
        """Drop the stream of requests: the engine keeps this object until its next run begins."""
        self._waiting.close()

    def is_over(self, *, stopping: bool) -> bool:
        """Whether nothing is left to do."""
        if self.requests.any_ended or self.scheduler.unread:
            return False
        # `is_exhausted` takes requests from the stream: of these some may have ended already. A row that a feature has failed
        # waits no more, and ends in the next step.
        return stopping or (not self.slots.num_live and self._allocator.is_exhausted() and not self.requests.any_left)

    def unfinished(self) -> list[Snapshot]:
        """Snapshots of all requests that another run may continue: see `OpenRequests.snapshots`."""
        self.slots.flush(*self.slots.live)
        return self.requests.snapshots(time.perf_counter())
