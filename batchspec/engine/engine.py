"""The engine: requests stream through a static batch - refill, round, collect - and come out as completions.

The host launches rounds ahead of what it has seen (`run_ahead`). What keeps that safe: death by stop id or length is
decided on the device; a result belongs to the row that was in the slot at launch; pages reach as far as all launched
rounds can write; and a page's next owner writes it behind the rounds of the last: in the stream of the rounds, or in one that
waits for it (`beside`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch

from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.pages import KVCache, PagePool
from batchspec.draft.base import Drafter
from batchspec.engine.launched import Launched
from batchspec.engine.launcher import Launcher
from batchspec.engine.output_processor import EngineTotals, OutputProcessor
from batchspec.engine.prefill_runner import PrefillRunner
from batchspec.engine.request_state import RequestState
from batchspec.engine.round import RoundOptions
from batchspec.engine.sampling import SamplingMode
from batchspec.engine.scheduler import PassCost, Row, Scheduler
from batchspec.engine.shared_prefix import SharedPrefixGroups
from batchspec.engine.stop_strings import Decode, StopFinder
from batchspec.engine.tree_round import round_for
from batchspec.model.target import Target
from batchspec.records import Completion, PackedBatch, Request, Snapshot


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
        eos_ids: frozenset[int] = frozenset(),
        penalties: bool = False,
        refill_dead: bool = True,
        adaptive: bool = False,
        overlap: bool = False,
    ) -> None:
        """`decode` turns ids into text (needed for stop strings); `penalties` makes room for penalty state.

        adaptive  choose the draft length of each round, 0 included, by measured times and acceptance (GPU only)
        overlap   prefill beside the rounds, not between them (GPU only)
        """
        spec = target.spec
        self.target = target
        self.batch, self.drafter, self.options = batch, drafter, options or RoundOptions()
        layout = spec.kv_layout(target.dtype, batch.page_size)
        self.cache = KVCache.allocate(
            layout,
            num_layers=spec.num_layers,
            num_pages=batch.num_pages,
            device=device,
            num_draft_layers=drafter.num_kv_layers,
            draft_layout=drafter.kv_layout(batch.page_size),
        )
        self.pool = PagePool(batch.num_pages)
        self.round = round_for(target, drafter, self.cache, batch, self.options, device)
        self.rows = DeviceBatch.allocate(
            batch,
            vocab_size=spec.vocab_size,
            penalties=penalties,
            device=device,
            num_lookahead_slots=self.round.num_lookahead_slots,
        )
        self.groups = SharedPrefixGroups(batch.num_slots, batch.page_size, device)
        self._launcher = Launcher(self.round, self.rows, self.groups, batch, adaptive=adaptive)
        self.graphs = self._launcher.graphs
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self.between: Callable[[], bool] | None = None
        """Called before a round, in the stream of the rounds; true where it gave the device work, which the round waits for."""
        self._decode, self._eos_ids, self._refill_dead = decode, eos_ids, refill_dead
        self._launched: deque[Launched] = deque()
        self._entrance = PrefillRunner(self.round, self.rows, batch, overlap=overlap)
        self._stopping = self._waits = False
        self._pass_cost: PassCost | None = None
        self._reset(iter(()))

    @torch.inference_mode()
    def prepare(self, mode: SamplingMode, *, shared: bool = False) -> None:
        """Rehearse a prefill, capture the graphs of every row bucket and draft length for `mode`, and time them.

        Only while no row is live.

        shared  rows with common beginnings are to be expected: their graphs too. What is not prepared is captured when it is met
        """
        with self._entrance.stream_of_rounds():
            self._pass_cost = self._launcher.prepare(mode, shared=shared)

    @torch.inference_mode()
    def run(self, requests: Iterator[Request]) -> Generator[Completion]:
        """Decode every request; completions come in the order in which rows die."""
        with self._entrance.stream_of_rounds():
            if not self._launcher.ready:
                self._pass_cost = self._launcher.prepare(SamplingMode())
            self._reset(requests)
        while True:
            # No stream may be current while the caller has its turn.
            with self._entrance.stream_of_rounds():
                done = list(self._turn())
                finished = self._finished
            yield from done
            if finished:
                return

    def _reset(self, requests: Iterator[Request]) -> None:
        """An earlier run may have been left half-way: rows, results and pages start anew."""
        self._entrance.clear()
        self.pool = PagePool(self.batch.num_pages)
        self._launched.clear()
        self._over: list[RequestState] = []
        self.rows.live.zero_()
        self._bucket = self.batch.num_slots
        self.groups.clear()
        self._accounts = OutputProcessor(self.batch.num_slots, self.batch.max_len, self.drafter.max_len)
        self._scheduler = Scheduler(
            self.batch,
            self.pool,
            self._begun(requests),
            refill_dead=self._refill_dead,
            lookahead=1 if self.drafter.num_kv_layers else 0,
            num_lookahead_slots=self.round.num_lookahead_slots,
            pass_cost=self._pass_cost,
        )
        self._launcher.restart()

    def _turn(self) -> Iterator[Completion]:
        """Refill, one round, and the results that are due."""
        if self._stopping:
            self._launched += self._entrance.end()
            while self._launched:
                yield from self._collect()
            return
        yield from self._refill()
        while self._over:
            yield self._completed(self._over.pop(), slot=-1, now=time.perf_counter())
        if self._scheduler.live:
            self._waits = self.between is not None and self.between()
            yield from self._make_room()
            self._launch_round()
        while len(self._launched) > (self.batch.run_ahead if self._scheduler.live else 0):
            yield from self._collect()

    @property
    def _finished(self) -> bool:
        if self._stopping:
            return not self._launched and not self._entrance.busy
        return not self._scheduler.live and not self._launched and self._scheduler.exhausted and not self._over

    def stop(self) -> None:
        """End `run` at the next turn, for good, or before it begins: what is launched is read, nothing more is launched.

        A signal handler may call it.
        """
        self._stopping = True

    @contextmanager
    def changing_drafter(self) -> Iterator[None]:
        """Write the drafter's new weights within this block: in the stream of the rounds, and while no prefill reads them.

        At its end the measured acceptance is discarded, and new rows share no K/V with rows prefilled before.
        """
        try:
            with self._entrance.paused():
                yield
        finally:  # where memory ran out some weights are others already
            self.pool.forget()
            self._launcher.forget()

    @property
    def stopping(self) -> bool:
        """`stop` was called."""
        return self._stopping

    def unfinished(self) -> list[Snapshot]:
        """Behind a stopped `run`, or in `on_round`: every row that has tokens and no end, those that wait for pages too.

        None with logprobs: those of a row come from one run.
        """
        if self.options.logprobs is not None:
            return []
        now = time.perf_counter()
        for row in self._scheduler.live:
            self._accounts.settle(row)
        rows = [*self._scheduler.live, *self._scheduler.preempted]
        return [row.progress.snapshot(now) for row in rows if row.progress.tokens]

    def _begun(self, requests: Iterator[Request]) -> Iterator[RequestState]:
        """The requests' accounts. A row that ends with what its thinking budget forces at once needs no slot."""
        for request in requests:
            finder = StopFinder(self._decode, request.stop) if request.stop and self._decode else None
            progress = RequestState.of(request, self.drafter.max_len, finder, num_top=self.options.logprobs)
            if progress.finish_reason is None:
                yield progress
            else:
                self._over.append(progress)

    def _refill(self) -> Iterator[Completion]:
        """Fill free slots and prefill what came in; with an empty stream shrink to the next smaller bucket."""
        self._launched += self._entrance.land(wait=False)
        group = self._scheduler.refill(self._launcher.round_s) if self._entrance.takes_more else []
        if group:
            self._bucket = self.batch.num_slots
            self._prefill(group)
        while self._entrance.holds_up(len(self._scheduler.live)):
            self._launched += self._entrance.land(wait=True)
        if not (group or self._entrance.busy) and self._scheduler.live and self._refill_dead and self._scheduler.exhausted:
            bucket = min(b for b in self.batch.row_buckets if b >= len(self._scheduler.live))
            if bucket < self._bucket:
                while self._launched:
                    yield from self._collect()
                moves = self._scheduler.compact(bucket)
                if moves:
                    self.rows.move(moves, self.drafter.state)
                    self._accounts.move(moves)
                self._bucket = bucket

    def _prefill(self, group: list[Row]) -> None:
        for row in group:
            cached = row.num_shared * self.batch.page_size
            if row.progress.num_prefills == 0:
                row.progress.cached_tokens = cached
            self.totals.cached_tokens += cached
            self.totals.prefill_tokens += row.num_tokens - cached
            self._accounts.enter(row)
        self._launched += self._entrance.prefill(group, self._scheduler.owner)

    def _make_room(self) -> Iterator[Completion]:
        """Pages for everything that the launched rounds and the next one may write; the youngest rows go where there are none."""
        grants: list[tuple[int, int, list[int]]] = []
        while not self._grow_all(grants):
            if self._launched:  # what is not collected yet may free pages, and the tokens of a row set back must all be known
                yield from self._collect()
            elif self._entrance.busy:  # nor may a row be set back whose pages are being filled
                self._launched += self._entrance.land(wait=True)
            else:
                self._preempt(self._scheduler.youngest())
                self.totals.preempted += 1
        if grants:
            self.rows.grant(grants)

    def _grow_all(self, grants: list[tuple[int, int, list[int]]]) -> bool:
        """Pages for every row that is short of them, oldest first, noted in `grants`; False where the pool ran out."""
        ahead = len(self._launched) * self.round.width + self.round.room
        for row in self._scheduler.short_of_pages(ahead):
            columns = len(row.pages)
            pages = self._scheduler.grow(row, int(self._scheduler.num_tokens[row.slot]) + ahead)
            if pages is None:
                return False
            grants.append((row.slot, columns, pages))
        return True

    def _launch_round(self) -> None:
        if not self._scheduler.live:  # all of them ended while room was made
            return
        scheduler, beside = self._scheduler, self._waits or self._entrance.busy
        launched = self._launcher.launch(self._bucket, scheduler, self._accounts.mode, beside=beside)
        self._launched.append(launched)
        self.totals.rounds += 1

    def _collect(self) -> Iterator[Completion]:
        """Read the oldest launched result; rows that ended in it leave their slot and come out."""
        launched, scheduler = self._launched.popleft(), self._scheduler
        slots, lines = launched.read(scheduler.owner)
        now = time.perf_counter()
        scheduler.num_tokens[slots] += lines[:, 2]
        self.totals.add(launched, lines)
        self.totals.live_rows = len(scheduler.live)
        self._launcher.learn(launched, lines[:, 0])
        self._accounts.add(launched, slots, lines, scheduler.slots, now)
        for slot in self._accounts.over_budget(slots, scheduler.num_tokens[slots], lines):
            row = self._row(slot)
            if self._accounts.hold_to_budget(row, int(scheduler.num_tokens[slot])):
                self._preempt(row)
        may_end = (lines[:, 3] != 0) | self._accounts.watched(slots)
        for slot, finish in zip(slots[may_end].tolist(), lines[may_end, 3].tolist(), strict=True):
            row = scheduler.slots[slot]
            if row is not None and (finish or row.progress.finish_reason is not None):  # None: set back just now
                yield self._finish(row, finish, now)
        if self.on_round is not None:
            self.on_round(self.totals)

    def _preempt(self, row: Row) -> None:
        """The row leaves its slot and waits to be prefilled again, over all its tokens."""
        self.rows.kill([row.slot])
        self._accounts.leave(row)
        self._scheduler.preempt(row)

    def _row(self, slot: int) -> Row:
        row = self._scheduler.slots[slot]
        assert row is not None
        return row

    def _finish(self, row: Row, finish: int, now: float) -> Completion:
        """`finish` is what the device said; 0 where a stop string ended the row, which the device does not know yet."""
        slot, progress = row.slot, row.progress
        if not finish:
            self.rows.kill([slot])
        self._accounts.leave(row)
        self._scheduler.release(row)
        if progress.finish_reason is None:
            progress.end(finish)
        return self._completed(progress, slot=slot, now=now)

    def _completed(self, progress: RequestState, *, slot: int, now: float) -> Completion:
        done = progress.completion(
            decode=self._decode, drafter=self.drafter.name, eos_ids=self._eos_ids, slot=slot, now=now, nodes=self.round.nodes
        )
        if done.prompt_ids is not None and done.token_ids is not None:  # no error
            self.drafter.learn(done.prompt_ids, done.token_ids)
        return done
