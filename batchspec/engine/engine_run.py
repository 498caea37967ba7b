"""The state of one run of the engine: made when the run begins, dropped as a whole when the next run begins.

What one run leaves to the next belongs to the engine: weights, captured graphs, measured times and acceptance, totals, states of
lazy automata that were found (`LazyPlaces`), rows that the drafter learns from, and, if prefixes are kept, the pages.
`Engine._begin` resets the executor's rows, the planner's clock and the leader's digest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from batchspec.batch.automata import AutomataCapacity
from batchspec.cache.page_tables import PagePools
from batchspec.engine.allocator import SlotAllocator
from batchspec.engine.automaton_places import AutomatonPlaces
from batchspec.engine.executor import Executor
from batchspec.engine.last_check import Ended, LastCheck
from batchspec.engine.launch import Launch
from batchspec.engine.lazy_places import LazyPlaces
from batchspec.engine.lazy_states import LazyStates
from batchspec.engine.output_processor import EngineTotals, OutputProcessor
from batchspec.engine.prefetch import PREFETCHED_PER_ROUND, Prefetcher
from batchspec.engine.prefill_cost import PrefillCost
from batchspec.engine.request_state import RequestState
from batchspec.engine.results import PendingResult, RoundLog, Slots
from batchspec.engine.round_planner import RoundPlanner
from batchspec.engine.scheduler import REST_S, Scheduler
from batchspec.engine.scoring import PromptScores
from batchspec.engine.slots import SlotTable
from batchspec.engine.step import ScheduledStep
from batchspec.engine.stop_strings import Decode, StopFinder, decode_of_answer
from batchspec.kernels.rounds.accept import WAITING
from batchspec.lazy_automaton import Expanding
from batchspec.packed_batch import MOST_ROUNDS_BEFORE_REFILL, PackedBatch
from batchspec.records import Ids, Request, Snapshot
from batchspec.token_automaton import TokenSymbols


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedByRuns:
    """What the engine was made with, and what one run leaves to the next. Arguments as for `Engine`."""

    decode: Decode | None
    allocator_kind: type[SlotAllocator]
    vocabulary: TokenSymbols | None
    automata_capacity: AutomataCapacity | None
    expanding: Expanding | None
    lazy_places: LazyPlaces | None
    """The states of lazy automata that were found; None if no request has one."""
    scores: PromptScores | None
    """The log-probabilities of the pages' tokens; None if prompts are not scored."""
    finished_rows: list[tuple[Ids, Ids]] = field(default_factory=list)
    """Prompt and output of rows that the drafter has not learned from yet: the last rows of a run are learned in the next."""


class EngineRun:
    """All host state of one run.

    pools      pages, and the prefixes that can be found; the allocator grants them
    taken      requests whose completions the caller does not have yet
    slots      the requests in slots; the allocator fills them, the output processor adds tokens
    lazy       rows that follow lazy automata; None if no request has one
    scheduler  decides the steps; it has the launches whose results are not read
    """

    def __init__(
        self,
        requests: Iterator[Request | None],
        shared: SharedByRuns,
        *,
        batch: PackedBatch,
        executor: Executor,
        planner: RoundPlanner,
        totals: EngineTotals,
        num_ready: Callable[[], int] | None = None,
        pools: PagePools | None = None,
        prefill_cost: PrefillCost | None = None,
    ) -> None:
        """
        num_ready     as for `Prefetcher`
        pools         of an earlier run, whose prefixes can be found; None: new ones
        prefill_cost  as for `SlotAllocator`
        """
        groups, round_, drafter = executor.cache.groups, executor.round, executor.drafter
        self._requests = Prefetcher(requests, num_ready, most=batch.num_slots // 2)
        self.pools = pools or PagePools(
            groups,
            batch.group_pages(groups.num_groups),
            batch.page_size,
            lookahead=(batch.run_ahead + MOST_ROUNDS_BEFORE_REFILL) * round_.max_emitted + round_.kv_per_round,
        )
        lazy = None
        if shared.expanding is not None and shared.vocabulary is not None and shared.lazy_places is not None:
            lazy = LazyStates(shared.expanding, shared.vocabulary, shared.lazy_places)
        self.lazy, self._check = lazy, LastCheck(shared.expanding, shared.vocabulary)
        self.taken: dict[RequestState, None] = {}
        """Requests that were taken from the stream and whose completions the caller does not have yet: they wait, are in a slot,
        are preempted, or have ended and are not checked. A dict, because it keeps their order."""
        self._ended_at_once: list[RequestState] = []
        self._scores = shared.scores
        self.slots = SlotTable(batch.num_slots, batch.max_len, drafter.max_len, num_groups=groups.num_groups)
        self._processor = OutputProcessor(self.slots, scores=round_.options.scores)
        self._allocator = shared.allocator_kind(
            batch,
            self.pools,
            _states(
                self._requests,
                self.taken,
                self._ended_at_once,
                decode=shared.decode,
                vocabulary=shared.vocabulary,
                draft_len=drafter.max_len,
                num_top=round_.options.logprobs,
                follows=lambda request: lazy is None or lazy.follows(request),
            ),
            slots=self.slots,
            lookahead=round_.prefix_lookahead,
            num_lookahead_slots=round_.num_lookahead_slots,
            prefill_cost=prefill_cost,
            automata=None if shared.automata_capacity is None else AutomatonPlaces(shared.automata_capacity),
            scores=round_.options.scores,
            lazy=lazy,
        )
        self.scheduler = Scheduler(self._allocator, planner, executor, totals, finished=shared.finished_rows)
        self._steps = self.scheduler.schedule()

    def next_step(self, *, stopping: bool) -> ScheduledStep:
        """stopping: the step only reads results that are outstanding; it launches nothing."""
        return self.scheduler.drain() if stopping else next(self._steps)

    def take_ahead(self) -> None:
        """Prefetch some requests, if their stream gives them without waiting, and prepare those that the next refills need, so
        that a refill takes the host less time. Call it after each result, while the device computes."""
        self._requests.take(PREFETCHED_PER_ROUND)
        self._requests.only_taken = True  # the allocator asks for another request where one ends at once and needs no slot
        try:
            self._allocator.take_ahead(PREFETCHED_PER_ROUND)
        finally:
            self._requests.only_taken = False

    def process(
        self, launch: Launch, result: PendingResult, slots: Slots, log: RoundLog, now: float
    ) -> list[tuple[RequestState, int]]:
        """Add a result that was read.

        log  line i is that of the row in slots[i]
        now  seconds of the host's clock
        Returns the arguments of `end` for each request that ended: its state, and the device's reason, 0 if the host ended it.
        """
        if self._scores is not None:
            self._scores.add(launch, result.result, self.slots)
        self._processor.add(result, slots, log, now)
        for slot in self.slots.budgets_due(slots, log):
            state = self.slots.at(slot)
            if self._processor.enforce_budget(state):
                self.scheduler.preempt(state)
        may_end, ended = self._processor.may_have_ended(slots, log), list[tuple[RequestState, int]]()
        for slot, finish in zip(slots[may_end].tolist(), log.finish[may_end].tolist(), strict=True):
            at_slot = self.slots.requests[slot]
            if at_slot is None:  # just preempted
                continue
            if finish == WAITING and at_slot.finish_reason is None:
                self.scheduler.wait(at_slot)
            elif finish or at_slot.finish_reason is not None:
                ended.append((at_slot, finish))
        return ended

    def end(self, state: RequestState, finish: int, now: float) -> None:
        """Take a request that has ended out of its slot; it is checked next. Arguments as for `process`.

        If it ended with an error, later rows share no page of its prompt: an infinite key in one of them may be the cause.
        Nor do they share pages that other rows prefilled or read without an error: an infinite key makes the result of some
        queries NaN and has no effect on others.
        """
        slot = state.slot
        if self._scores is not None:
            state.prompt_logprobs, state.prompt_top = self._scores.of(state)
        self.scheduler.end(state, on_device=finish not in (0, WAITING))
        if state.finish_reason is None:
            state.end(finish)
        if state.finish_reason == "error":
            self.pools.forget_prefix(state.prefix_hashes or ())
        self._check.add(Ended(state, slot, now))

    def take_ended(self, *, stopping: bool) -> list[Ended]:
        """The requests that have ended and were checked, once each. Waits for a check if nothing else is left to do."""
        for state in () if self.lazy is None else self.lazy.take_failed():  # a state of its automaton cannot be computed
            slot = state.slot
            if slot >= 0:
                self.scheduler.end(state, on_device=False)
            self._check.add(Ended(state, slot, time.perf_counter()))
        while self._ended_at_once:
            self._check.add(Ended(self._ended_at_once.pop(), -1, time.perf_counter()))
        return list(self._check.take(wait_s=REST_S if stopping or not self.slots.num_live else 0.0))

    def is_over(self, *, stopping: bool) -> bool:
        """Whether nothing is left to do."""
        if not (self.scheduler.idle and self._check.is_idle):
            return False
        return stopping or (not self.slots.num_live and self._allocator.exhausted and not self._ended_at_once)

    def unfinished(self) -> list[Snapshot]:
        """Snapshots of all requests that have tokens and whose completions the caller does not have.

        Requests that have ended and are not checked yet are included: the next run checks them without decoding. Requests that
        have failed are not: the next run decodes them from the beginning.
        """
        now = time.perf_counter()
        for state in self.slots.live:
            self.slots.flush(state)
        return [state.snapshot(now) for state in self.taken if state.tokens and state.finish_reason != "error"]


def _states(
    requests: Iterator[Request | None],
    taken: dict[RequestState, None],
    ended_at_once: list[RequestState],
    *,
    decode: Decode | None,
    vocabulary: TokenSymbols | None,
    draft_len: int,
    num_top: int | None,
    follows: Callable[[Request], bool],
) -> Iterator[RequestState | None]:
    """The states of the requests that need a slot. A request that has ended already, by the tokens of an earlier run or those
    that its thinking budget forces, is added to `ended_at_once` instead. All states are added to `taken`."""
    for request in requests:
        if request is None:
            yield None
            continue
        if request.resumed is not None and not follows(request):
            request = replace(request, resumed=None)  # another version compiled it differently: decode the row anew
        of_answer = decode_of_answer(request, decode, vocabulary)
        finder = StopFinder(of_answer, request.stop) if request.stop and of_answer else None
        state = RequestState.of(request, draft_len, finder, num_top=num_top)
        taken[state] = None
        if state.finish_reason is None:
            yield state
        else:
            ended_at_once.append(state)
