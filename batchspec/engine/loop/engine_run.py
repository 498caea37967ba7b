"""The state of one run of the engine: made when the run begins, dropped as a whole when the next run begins.

What one run leaves to the next belongs to the engine: weights, captured graphs, measured times and acceptance, totals, what its
`Features` keep, rows that the drafter learns from, and, if prefixes are kept, the pages. `Engine._begin` resets the executor's
rows, the planner's clock and the leader's digest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from batchspec.cache.page_tables import PagePools
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.loop.totals import EngineTotals, add_result
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.results import PendingResult, RoundLog, Slots
from batchspec.engine.slots.allocator import SlotAllocator
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import Features
from batchspec.engine.slots.run_features import RunFeatures
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.slots.waiting import WaitingRequests
from batchspec.engine.step import ScheduledStep
from batchspec.kernels.rounds.accept import HELD
from batchspec.packed_batch import MOST_ROUNDS_BEFORE_REFILL, PackedBatch
from batchspec.records import Ids, Request, Snapshot
from batchspec.request_stream import RequestStream

PREFETCHED_PER_ROUND = 8
"""Requests prefetched after each result: twice as many as end in a round of 256 rows that take 60 rounds each."""
REST_S = 0.05
"""Longest time, in seconds, that the host waits for what features wait for when it has nothing else to do."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: the slot that it had, -1 for none, and the host's clock in seconds."""

    state: RequestState
    slot: int
    now: float


class EngineRun:
    """All host state of one run.

    pools      pages, and the prefixes that can be found; the allocator grants them
    taken      requests whose completions the caller does not have yet
    slots      the requests in slots; the allocator fills them, results add tokens
    features   what rows of this run may ask for
    scheduler  decides the steps; it has the launches whose results are not read
    """

    def __init__(
        self,
        requests: RequestStream,
        *,
        batch: PackedBatch,
        executor: Executor,
        planner: RoundPlanner,
        totals: EngineTotals,
        features: Features,
        allocator_kind: type[SlotAllocator],
        finished: list[tuple[Ids, Ids]],
        pools: PagePools | None = None,
        prefill_cost: PrefillCost | None = None,
    ) -> None:
        """
        finished      prompt and output of rows that the drafter has not learned from yet
        pools         of an earlier run, whose prefixes can be found; None: new ones
        prefill_cost  None: `PrefillCost.default`
        """
        groups, round_, drafter = executor.cache.groups, executor.round, executor.drafter
        self.pools = pools or PagePools(
            groups,
            batch.group_pages(groups.num_groups),
            batch.page_size,
            lookahead=(batch.run_ahead + MOST_ROUNDS_BEFORE_REFILL) * round_.max_emitted + round_.kv_per_round,
            states=executor.prefix_states(),
        )
        self.taken: dict[RequestState, None] = {}
        """Requests that were taken from the stream and whose completions the caller does not have yet: they wait, are in a slot,
        are preempted, or have ended and wait for their completion. A dict, because it keeps their order."""
        self._ended: list[Ended] = []
        """Those that have ended."""
        self.slots = SlotTable(batch.num_slots, batch.max_len, drafter.draft_len, num_groups=groups.num_groups)
        self.features = RunFeatures(features.begin(self.slots, self.pools))
        self._waiting = WaitingRequests(
            requests, partial(_arrive, self.features, drafter.draft_len, self.taken, self._ended), self.features.ready,
            most_prefetched=batch.num_slots // 2,
        )
        self._allocator = allocator_kind(
            batch,
            self.pools,
            self._waiting,
            features=self.features,
            slots=self.slots,
            num_lookahead_slots=round_.num_lookahead_slots,
            prefill_cost=prefill_cost,
        )
        self.scheduler = Scheduler(self._allocator, planner, executor, totals, features=self.features, finished=finished)
        self._steps = self.scheduler.schedule()

    def next_step(self, *, stopping: bool) -> ScheduledStep:
        """stopping: the step only reads results that are outstanding; it launches nothing."""
        return self.scheduler.drain() if stopping else next(self._steps)

    def take_ahead(self) -> None:
        """Prefetch some requests, if their stream gives them without waiting, and prepare those that the next refills need, so
        that a refill takes the host less time. Call it after each result, while the device computes."""
        self._allocator.take_ahead(PREFETCHED_PER_ROUND)

    def process(
        self, launch: UnreadLaunch, result: PendingResult, slots: Slots, log: RoundLog, now: float
    ) -> list[tuple[RequestState, int]]:
        """Add a result that was read.

        log  line i is that of the row in slots[i]
        now  seconds of the host's clock
        Returns the arguments of `end_request` for each request that ended: its state, and the device's reason, 0 if a feature
        ended it.
        """
        self.features.read(launch, result, slots, log)
        add_result(self.slots, result, slots, log, now)
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
        found = [(self.slots.at(slot), finish) for slot, finish in sorted(ended.items())]
        for state, finish in found:
            if finish == HELD and state.finish_reason is None:
                self.slots.hold(state, on_device=True)
        return [(state, finish) for state, finish in found if finish != HELD or state.finish_reason is not None]

    def _examine(self, state: RequestState) -> None:
        """Let the features examine a row, whose tokens are flushed. If they have replaced some, prefill it with the new ones."""
        before = state.watch
        self.features.examine(state)
        if state.watch != before:
            self.slots.watch(state)
        if state.replaced and state.finish_reason is None:
            self._allocator.preempt(state)
        state.replaced = False

    def end_request(self, state: RequestState, finish: int, now: float) -> None:
        """Take a request that has ended out of its slot.

        finish  the device's reason; 0 if a feature ended it
        now     seconds of the host's clock
        If it ended with an error, later rows share no page of its prompt: an infinite key in one of them may be the cause.
        Pages of the whole prefix are forgotten, even if other rows read them without an error: an infinite key breaks some
        queries only.
        """
        slot = state.slot
        self._allocator.release(state, on_device=finish not in (0, HELD))
        if state.finish_reason is None:
            state.set_finish_reason(finish)
        if state.finish_reason == "error":
            self.pools.forget_prefix(state.prefix_hashes or ())
        self._ended.append(Ended(state, slot, now))

    def take_ended(self, *, stopping: bool) -> list[Ended]:
        """The requests that have ended and wait for nothing, once each. If nothing else is left to do, waits for a while."""
        now, done, waiting = time.perf_counter(), list[Ended](), list[Ended]()
        self._ended += [Ended(state, slot, now) for state, slot in self.scheduler.take_stopped()]
        for one in self._ended:
            (done if self.features.ready(one.state) else waiting).append(one)
        self._ended[:] = waiting
        if not done and self.scheduler.idle and (stopping or not self.slots.num_decoding):
            self.features.wait(REST_S)
        return done

    def close(self) -> None:
        """Drop the stream of requests: the engine keeps this object until its next run begins."""
        self._waiting.close()

    def is_over(self, *, stopping: bool) -> bool:
        """Whether nothing is left to do."""
        if self._ended or not self.scheduler.idle:
            return False
        return stopping or (not self.slots.num_live and self._allocator.exhausted and not self._ended)

    def unfinished(self) -> list[Snapshot]:
        """Snapshots of all requests that another run may continue: they have tokens, and the caller has no completion of them.

        Requests that have ended and wait for their completion are included: the next run completes them without decoding.
        Requests that have failed are not: the next run decodes them from the beginning.
        """
        now = time.perf_counter()
        self.slots.flush(*self.slots.live)
        left = (state for state in self.taken if state.continues and state.tokens and state.finish_reason != "error")
        return [state.snapshot(now) for state in left]


def _arrive(
    features: RunFeatures, draft_len: int, taken: dict[RequestState, None], ended: list[Ended], request: Request
) -> RequestState | None:
    """The state of a request that needs a slot, which is added to `taken`. A request that has ended already, by the tokens of an
    earlier run or by what its features force, is added to `ended` too; None for it."""
    state = features.arrive(request, draft_len)
    taken[state] = None
    if state.finish_reason is None:
        return state
    ended.append(Ended(state, -1, time.perf_counter()))
    return None
