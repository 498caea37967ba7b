"""The engine: requests stream through a static batch and come out as completions.

A step (`EngineRun.step`) is three verbs: schedule, execute, and process the results that are due. The host launches rounds before
it has read the results of earlier ones (`run_ahead`); `Scheduler` explains why that is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.page_tables import PagePools
from batchspec.draft.base import Drafter
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.ranks.lead import Lead
from batchspec.engine.ranks.messages import Prepare, Scales
from batchspec.engine.rounds.draft_chances import Calibration
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.slots.allocator import SlotAllocator
from batchspec.engine.slots.row_feature import Features
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.slots.static_batching import StaticBatching
from batchspec.errors import EngineInUse
from batchspec.model.target import Target
from batchspec.packed_batch import ExpectedRows, PackedBatch
from batchspec.process.garbage import older_objects_frozen
from batchspec.records import Completion, Ids, Request, Snapshot
from batchspec.request_stream import ListedRequests, RequestStream, stream_of


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
        features: Features | None = None,
        eos_ids: frozenset[int] = frozenset(),
        refill_dead: bool = True,
        adaptive: bool = False,
        prefill_graphs: bool = False,
        expert_correlation: float = 1.0,
        lead: Lead | None = None,
    ) -> None:
        """
        features     what rows may ask for beyond tokens; None: nothing
        eos_ids      the model's EOS ids, which are not reported as stop_reason
        refill_dead  False: no new rows until all rows have ended (ablation)
        adaptive     choose the draft length of each round, 0 included, by measured times and acceptance (GPU only)
        prefill_graphs  run prefill passes of short rows as CUDA graphs if that pays (GPU only)
        expert_correlation  share of tokens that choose experts independently, used until rounds were counted (`ExpertReads`)
        lead         set if this process leads several ranks that compute the target together
        """
        self.features = features or Features()
        self.target, self.drafter, self.batch = target, drafter, batch
        self.lead = lead
        self.executor = Executor(
            target, drafter, batch, device=device, features=self.features, prefill_graphs=prefill_graphs,
            options=replace(options or RoundOptions(), reader=self.features.reader),
        )
        self.planner = RoundPlanner(self.executor, batch, adaptive=adaptive, expert_correlation=expert_correlation)
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        """Called after each processed result."""
        self._allocator_kind: type[SlotAllocator] = SlotAllocator if refill_dead else StaticBatching
        self._eos_ids = eos_ids
        self._stopping = False
        self._prefill_cost: PrefillCost | None = None
        self.keeps_prefixes = False
        """Whether prompts share K/V with prompts of an earlier run, provided that the run was not stopped."""
        self._kept_pools: PagePools | None = None
        """Pages of a run that was not stopped: no row owns one, and their prefixes can be found."""
        self._begin(ListedRequests(()))  # an empty run, so that `_current` always is one: it has pools, slots and a scheduler

    @property
    def pools(self) -> PagePools:
        """Pages and prefixes of the present run, or of the last one."""
        return self._current.pools

    @property
    def slots(self) -> SlotTable:
        """Requests of the present run, or of the last one, by slot."""
        return self._current.slots

    @property
    def scheduler(self) -> Scheduler:
        """Decides the steps of the present run, or of the last one."""
        return self._current.scheduler

    @torch.inference_mode()
    def prepare(
        self, mode: SamplingMode, *, shared: bool = False, most_rounds: int | None = None, expected: ExpectedRows | None = None
    ) -> None:
        """Rehearse a prefill, capture the graphs of every row bucket and draft length for `mode`, and time them.

        Only while no row is live.

        shared  also capture the graphs of rows with shared prefixes. A graph that is not prepared is captured at its first use.
        most_rounds  after the last row began, all rows end within this many rounds; None: unknown
        expected     also capture the prefill passes that these rows will most likely need
        Both are ignored with several ranks, which prepare all row buckets and launch prefill passes kernel by kernel.
        """
        if self.lead is not None:
            self.lead.send(Prepare(mode, shared))
        if self.lead is not None:  # both are compared with times, which differ between ranks
            most_rounds = expected = None
        self._prefill_cost = self.planner.prepare(mode, shared=shared, most_rounds=most_rounds, expected=expected)
        self.batch = replace(self.batch, row_buckets=self.planner.row_buckets)

    def run(self, requests: RequestStream | Iterable[Request]) -> Generator[Completion]:
        """Decode every request; completions come in the order in which rows end.

        requests  asked for the next request while slots are free; an iterable is made a stream
        """
        with closing(self.steps(requests)) as steps:
            for done in steps:
                yield from done

    @torch.inference_mode()
    def steps(self, requests: RequestStream | Iterable[Request]) -> Generator[list[Completion]]:
        """Decode every request; yields the completions of each step as a list, which is often empty."""
        if not self.planner.ready:
            self.prepare(SamplingMode())
        run = self._begin(stream_of(requests), self._current.requests.take_finished())
        with older_objects_frozen(), closing(run):
            while run is self._current:  # until another run has begun, which replaces this one
                done = run.step(stopping=self._stopping, on_round=self.on_round)
                is_over = run.is_over(stopping=self._stopping)
                if is_over and not run.slots.num_live and self.keeps_prefixes:  # no row owns a page: the next run may have them
                    self._kept_pools = run.pools
                yield done
                run.requests.handed_out()
                if is_over:
                    return
        raise EngineInUse(
            "another run of this engine has begun and dropped the rows of this one; end one run before the next begins"
        )

    def use_kv_scales(self, values: torch.Tensor) -> None:
        """Set the K/V scales, fp32 [L, 2, KVH] for all heads of the model, on all ranks. Call it only while no row has K or V."""
        if self.lead is not None:
            self.lead.send(Scales(values.tolist()))
        self.pools.forget()
        self.target.use_kv_scales(values)

    def _begin(self, requests: RequestStream, finished: Sequence[tuple[Ids, Ids]] = ()) -> EngineRun:
        """Replace the present run, wherever it was interrupted. Its pages are dropped too, unless their prefixes are kept.

        finished  prompt and output of its rows that the drafter has not learned from yet
        """
        if self.lead is not None:
            self.lead.begin()
        self.executor.clear()
        self.planner.restart()
        kept, self._kept_pools = self._kept_pools, None
        self._current = EngineRun(
            requests, batch=self.batch, executor=self.executor, planner=self.planner, totals=self.totals, features=self.features,
            allocator_kind=self._allocator_kind, finished=finished, lead=self.lead, pools=kept,
            prefill_cost=self._prefill_cost, eos_ids=self._eos_ids,
        )
        return self._current

    def stop(self) -> None:
        """End the present `run`, or the next one, at its next step, and every later one: launched work is read, nothing more is
        launched.

        A signal handler may call this.
        """
        self._stopping = True

    @contextmanager
    def changing_target(self) -> Iterator[None]:
        """Write new weights of the target within this block, between two runs. K/V and measured acceptance are dropped."""
        try:
            self.executor.synchronise()  # the new weights may come from a stream of the caller's
            yield
        finally:
            self.executor.forget_acceptance()
            self.executor.synchronise()
            self.pools.forget()
            self.planner.forget()

    def calibration(self) -> Mapping[int, Calibration]:
        """By the drafter's confidence, how many drafts were expected to be accepted, and were, over the engine's life; empty if
        rounds do not choose among drafts. Synchronises."""
        chances = self.executor.round.chances
        return {} if chances is None else chances.calibration()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def unfinished(self) -> list[Snapshot]:
        """As `EngineRun.unfinished`, after all ranks agree on what was read. Call it in `on_round`, or after a `run` that was
        stopped or failed."""
        if self.lead is not None:
            self.lead.confirm()
        return self._current.unfinished()
