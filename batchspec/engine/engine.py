"""The engine: requests stream through a static batch and come out as completions.

A step is three verbs: `schedule` decides, `execute` launches, `process` reads the results that are due. The host launches rounds
before it has read the results of earlier ones (`run_ahead`); `Scheduler` explains why that is safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from batchspec.batch.automata import AutomataCapacity
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import PagePools
from batchspec.draft.base import Drafter, Rewritable
from batchspec.engine.allocator import SlotAllocator
from batchspec.engine.automaton_places import AutomatonPlaces
from batchspec.engine.completion import completion_of
from batchspec.engine.executor import Executor
from batchspec.engine.last_check import Ended, LastCheck
from batchspec.engine.lazy_states import LazyStates
from batchspec.engine.lockstep import HeadOfRanks, Lead
from batchspec.engine.messages import Prepare, Scales, Step
from batchspec.engine.output_processor import EngineTotals, OutputProcessor
from batchspec.engine.prefill_cost import PrefillCost
from batchspec.engine.request_state import RequestState
from batchspec.engine.round import RoundOptions
from batchspec.engine.round_planner import RoundPlanner
from batchspec.engine.scheduler import REST_S, RoundHook, Scheduler
from batchspec.engine.scoring import PromptScores
from batchspec.engine.slots import SlotTable
from batchspec.engine.static_batching import StaticBatching
from batchspec.engine.stop_strings import Decode, StopFinder
from batchspec.garbage import older_objects_frozen
from batchspec.kernels.rounds.accept import WAITING
from batchspec.lazy_automaton import Expanding
from batchspec.model.target import Target
from batchspec.records import Completion, Ids, PackedBatch, Request, Snapshot
from batchspec.token_automaton import TokenSymbols


class Engine:
    """One target, one drafter, one static shape. `run` may be called again with more requests."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        batch: PackedBatch,
        *,
        device: torch.device,
        options: RoundOptions | None = None,
        decode: Decode | None = None,
        defers_text: bool = False,
        eos_ids: frozenset[int] = frozenset(),
        penalties: bool = False,
        refill_dead: bool = True,
        adaptive: bool = False,
        overlap: bool = False,
        prefill_graphs: bool = False,
        expert_correlation: float = 1.0,
        lead: Lead | None = None,
        vocabulary: TokenSymbols | None = None,
        automata_capacity: AutomataCapacity | None = None,
        expanding: Expanding | None = None,
    ) -> None:
        """
        decode       token ids -> text; needed for stop strings
        defers_text  leave the decoding of text that can wait to the caller (`Completion.text_due`)
        penalties    allocate the penalty state now
        refill_dead  False: no new rows until all rows have ended (ablation)
        adaptive     choose the draft length of each round, 0 included, by measured times and acceptance (GPU only)
        overlap      prefill concurrently with the rounds, not between them (GPU only)
        prefill_graphs  run prefill passes of short rows as CUDA graphs if that pays; not with `overlap` (GPU only)
        expert_correlation  share of tokens that choose experts independently, used until rounds were counted (`ExpertReads`)
        lead         set if this process leads several ranks that compute the target together
        vocabulary   set if requests may have automata; automata_capacity: their memory on the device, None for the default
        expanding    set if requests may have lazy automata
        """
        if vocabulary is not None and automata_capacity is None:
            automata_capacity = AutomataCapacity(num_tokens=vocabulary.num_tokens)
        self._automata_capacity = automata_capacity
        self.lazy: LazyStates | None = None
        """States of lazy automata that were found are kept from run to run."""
        if expanding is not None:
            assert vocabulary is not None and automata_capacity is not None  # noqa: PT018
            self.lazy = LazyStates(expanding, vocabulary, automata_capacity)
        self._check = LastCheck(expanding)
        self.target, self.drafter, self.batch, self.options = target, drafter, batch, options or RoundOptions()
        self.lead = lead
        self.executor = Executor(
            target, drafter, batch, device=device, options=self.options, penalties=penalties, overlap=overlap,
            prefill_graphs=prefill_graphs, vocabulary=vocabulary, automata_capacity=automata_capacity,
        )  # fmt: skip
        self.planner = RoundPlanner(self.executor, batch, adaptive=adaptive, expert_correlation=expert_correlation)
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        """Called after each processed result."""
        self.hook = RoundHook()
        self._scores: PromptScores | None = None
        if self.options.scores:
            assert not overlap, "nothing is decoded that prefill could overlap"
            assert drafter.max_len == 0, "nothing is decoded that could be drafted"
            self._scores = PromptScores(batch.num_pages, batch.page_size, self.options.logprobs or 0)
        self._decode, self._defers_text, self._eos_ids, self._vocabulary = decode, defers_text, eos_ids, vocabulary
        self._allocator_kind = SlotAllocator if refill_dead else StaticBatching
        self._stopping = False
        self._prefill_cost: PrefillCost | None = None
        self._finished_rows: list[tuple[Ids, Ids]] = []
        self.keeps_prefixes = False
        """Whether prompts share K/V with prompts of an earlier run, provided that the run was not stopped."""
        self._kept_pools: PagePools | None = None
        """Pages of a run that was not stopped: no row owns one, and their prefixes can be found."""
        self._reset(iter(()))

    @torch.inference_mode()
    def prepare(self, mode: SamplingMode, *, shared: bool = False, most_rounds: int | None = None) -> None:
        """Rehearse a prefill, capture the graphs of every row bucket and draft length for `mode`, and time them.

        Only while no row is live.

        shared  also capture the graphs of rows with shared prefixes. A graph that is not prepared is captured at its first use.
        most_rounds  as for `RoundPlanner.prepare`; ignored with several ranks, which prepare all row buckets
        """
        if self.lead is not None:
            self.lead.send(Prepare(mode, shared))
        with self.executor.stream_of_rounds():
            most_rounds = most_rounds if self.lead is None else None  # compared with times, which differ between ranks
            self._prefill_cost = self.planner.prepare(mode, shared=shared, most_rounds=most_rounds)
            self.batch = replace(self.batch, row_buckets=self.planner.row_buckets)

    def run(self, requests: Iterator[Request | None]) -> Generator[Completion]:
        """Decode every request; completions come in the order in which rows end.

        requests  the engine asks for the next request while slots are free. None: there is none at present, but completions may
                  bring more. If no request is unfinished, the iterator itself must wait and not return None
        """
        with closing(self.steps(requests)) as steps:
            for done in steps:
                yield from done

    @torch.inference_mode()
    def steps(self, requests: Iterator[Request | None]) -> Generator[list[Completion]]:
        """As `run`, but yields the completions of each step as a list, which is often empty."""
        if not self.planner.ready:
            self.prepare(SamplingMode())
        with self.executor.stream_of_rounds():
            self._reset(requests)
        with older_objects_frozen():
            while True:
                # The caller's code runs at the yield: our stream must not be the current one there.
                with self.executor.stream_of_rounds():
                    ended = self._step()
                    done = [self._completed(one) for one in ended]
                    finished = self._finished
                if finished and not self.slots.num_live and self.keeps_prefixes:
                    self._kept_pools = self.pools
                yield done
                for one in ended:
                    del self._taken[one.state]
                if finished:
                    return

    def use_kv_scales(self, values: torch.Tensor) -> None:
        """As `Target.use_kv_scales`, on all ranks. Call it only while no row has K or V."""
        if self.lead is not None:
            self.lead.send(Scales(values.tolist()))
        self.pools.forget()
        self.target.use_kv_scales(values)

    def _reset(self, requests: Iterator[Request | None]) -> None:
        """Forget rows and results of an earlier run, which may have been interrupted; its pages too, unless prefixes are kept."""
        if self.lead is not None:
            self.lead.begin()
        self.executor.clear()
        self.planner.restart()
        groups, round_ = self.executor.cache.groups, self.executor.round
        kept, self._kept_pools = self._kept_pools, None
        self.pools = kept or PagePools(
            groups,
            self.batch.group_pages(groups.num_groups),
            self.batch.page_size,
            lookahead=self.batch.run_ahead * round_.max_emitted + round_.kv_per_round,
        )
        self._taken: dict[RequestState, None] = {}
        """Requests that were taken from the stream and whose completions the caller does not have yet: they wait, are in a slot,
        are preempted, or have ended and are not checked. A dict, because it keeps their order."""
        self._ended_at_once: list[RequestState] = []
        self._check.restart()
        lazy = self.lazy
        if lazy is not None:
            lazy.restart()
        self.slots = SlotTable(self.batch.num_slots, self.batch.max_len, self.drafter.max_len, num_groups=groups.num_groups)
        self._processor = OutputProcessor(self.slots, scores=self.options.scores)
        self._allocator = self._allocator_kind(
            self.batch,
            self.pools,
            _states(
                requests,
                self._taken,
                self._ended_at_once,
                decode=self._decode,
                draft_len=self.drafter.max_len,
                options=self.options,
                follows=lambda request: lazy is None or lazy.follows(request),
            ),
            slots=self.slots,
            lookahead=1 if self.drafter.num_kv_layers else 0,
            num_lookahead_slots=self.executor.round.num_lookahead_slots,
            prefill_cost=self._prefill_cost,
            automata=None if self._automata_capacity is None else AutomatonPlaces(self._automata_capacity),
            scores=self.options.scores,
            lazy=lazy,
        )
        self.scheduler = Scheduler(
            self._allocator,
            self.planner,
            self.executor,
            self.totals,
            hook=self.hook,
            finished=self._finished_rows,
        )
        self._steps = self.scheduler.schedule()

    def _step(self) -> list[Ended]:
        """Schedule, execute, process. Returns the requests that have ended and were checked."""
        step = self.scheduler.drain() if self._stopping else next(self._steps)
        if self.lead is not None:
            self.lead.send(Step(step))
        self.executor.execute(step)
        for _ in range(step.num_reads):
            self._process()
        self._end_failed()
        while self._ended_at_once:
            self._check.add(Ended(self._ended_at_once.pop(), -1, time.perf_counter()))
        return list(self._check.take(wait_s=REST_S if self._stopping or not self.slots.num_live else 0.0))

    def _end_failed(self) -> None:
        """End the requests that failed because a state of their automaton cannot be computed."""
        for state in () if self.lazy is None else self.lazy.take_failed():
            slot = state.slot
            if slot >= 0:
                self.scheduler.end(state, on_device=False)
            self._check.add(Ended(state, slot, time.perf_counter()))

    @property
    def _finished(self) -> bool:
        if not (self.scheduler.idle and self._check.is_idle):
            return False
        return self._stopping or (not self.slots.num_live and self._allocator.exhausted and not self._ended_at_once)

    def stop(self) -> None:
        """End the present `run`, or the next one, at its next step, and every later one: launched work is read, nothing more is
        launched.

        A signal handler may call this.
        """
        self._stopping = True

    @property
    def rewritable_head(self) -> Rewritable | None:
        """The drafter's network, on all ranks; None if it has none. Rewrite it within `changing_drafter`, or between two runs."""
        head, ranks = self.drafter.rewritable, self.target.ranks
        return head if head is None or self.lead is None or ranks is None else HeadOfRanks(self.lead, head, ranks)

    @contextmanager
    def changing_drafter(self) -> Iterator[None]:
        """Write new weights of the drafter within this block: in the stream of the rounds, and while no prefill reads them.

        At its end the measured acceptance is discarded, and new rows share no K/V with rows prefilled before.
        """
        try:
            with self.executor.prefill_paused():
                yield
        finally:  # also after an error: some weights may have changed already
            self.pools.forget()
            self.planner.forget()
            self.scheduler.drafter_version += 1

    @contextmanager
    def changing_target(self) -> Iterator[None]:
        """Write new weights of the target within this block, between two runs. K/V and measured acceptance are dropped."""
        try:
            self.executor.synchronise()  # the new weights may come from a stream of the caller's
            yield
        finally:
            self.executor.synchronise()
            self.pools.forget()
            self.planner.forget()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def unfinished(self) -> list[Snapshot]:
        """Snapshots of all requests that have tokens and whose completions the caller does not have. Call it in `on_round`, or
        after a `run` that was stopped or failed.

        Requests that have ended and are not checked yet are included: the next run checks them without decoding. Requests that
        have failed are not: the next run decodes them from the beginning. Empty if logprobs are asked for, because those of a
        row must come from one run.
        """
        if self.options.logprobs is not None:
            return []
        if self.lead is not None:
            self.lead.confirm()
        now = time.perf_counter()
        for state in self.slots.live:
            self.slots.flush(state)
        return [state.snapshot(now) for state in self._taken if state.tokens and state.finish_reason != "error"]

    def _process(self) -> None:
        """Read the oldest result; the requests that ended in it leave their slots."""
        launch, result = self.scheduler.in_flight.popleft(), self.executor.read()
        if self.lead is not None:
            self.lead.read(result)
        slots, log = result.rows_of(launch.owners, self.slots.owner)
        now = time.perf_counter()
        if self._scores is not None:
            self._scores.add(launch, result.result, self.slots)
            self.totals.tokens += sum(segment.end - segment.begin for segment in launch.segments)
        self._processor.add(result, slots, log, now)
        self.totals.add(result, log)
        self.totals.live_rows = self.slots.num_live
        self.planner.learn(launch, result, log.accepted_len)
        if self.planner.experts is not None:
            self.totals.expert_correlation = self.planner.experts.correlation
        for slot in self.slots.budgets_due(slots, log):
            state = self.slots.at(slot)
            if self._processor.enforce_budget(state):
                self.scheduler.preempt(state)
        may_end = self._processor.may_have_ended(slots, log)
        for slot, finish in zip(slots[may_end].tolist(), log.finish[may_end].tolist(), strict=True):
            ended = self.slots.requests[slot]
            if finish == WAITING and ended is not None and ended.finish_reason is None:
                self.scheduler.wait(ended)
            elif ended is not None and (finish or ended.finish_reason is not None):  # None: just preempted
                self._end(ended, finish, now)
        if self.on_round is not None:
            self.on_round(self.totals)

    def _end(self, state: RequestState, finish: int, now: float) -> None:
        """`finish` is the device's reason, or 0 if a stop string ended the request, of which the device does not know yet."""
        if self.lead is not None:
            self.lead.confirm()
        slot = state.slot
        if self._scores is not None:
            state.prompt_logprobs, state.prompt_top = self._scores.of(state)
        self.scheduler.end(state, on_device=finish not in (0, WAITING))
        if state.finish_reason is None:
            state.end(finish)
        self._check.add(Ended(state, slot, now))

    def _completed(self, ended: Ended) -> Completion:
        done = completion_of(
            ended.state, decode=self._decode, defers_text=self._defers_text, drafter=self.drafter.name, eos_ids=self._eos_ids,
            slot=ended.slot, now=ended.now, nodes=self.executor.round.nodes, vocabulary=self._vocabulary,
        )  # fmt: skip
        if done.prompt_ids is not None and done.token_ids is not None:  # no error
            self._finished_rows.append((done.prompt_ids, done.token_ids))
        return done


def _states(
    requests: Iterator[Request | None],
    taken: dict[RequestState, None],
    ended_at_once: list[RequestState],
    *,
    decode: Decode | None,
    draft_len: int,
    options: RoundOptions,
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
        finder = StopFinder(decode, request.stop) if request.stop and decode else None
        state = RequestState.of(request, draft_len, finder, num_top=options.logprobs)
        taken[state] = None
        if state.finish_reason is None:
            yield state
        else:
            ended_at_once.append(state)
