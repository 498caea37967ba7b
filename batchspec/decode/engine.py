"""The engine: requests stream through a static batch - refill, round, collect - and come out as completions.

The host launches rounds ahead of what it has seen (`run_ahead`). What keeps that safe: death by stop id or length is
decided on the device; a result belongs to the row that was in the slot at launch; pages reach as far as all launched
rounds can write; and everything runs in one stream, so that a page's next owner writes it after the rounds of the last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from batchspec.cache.pages import KVCache, PagePool
from batchspec.decode.output import Decode, Progress, StopFinder
from batchspec.decode.prefill import chunks, prefill_chunk
from batchspec.decode.round import Round, RoundOptions, RoundResult
from batchspec.decode.rows import Rows
from batchspec.decode.sampling import SamplingMode
from batchspec.decode.scheduler import Row, Scheduler
from batchspec.draft.base import Drafter
from batchspec.model.target import Target
from batchspec.records import Completion, PackedBatch, Request, SamplingParams


@dataclass(slots=True)
class EngineTotals:
    """Running sums over the engine's life, as far as the host has collected."""

    rounds: int = 0
    row_rounds: int = 0
    """Rounds times the rows that lived in them."""
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    set_back: int = 0
    live_rows: int = 0


@dataclass(slots=True)
class _Launched:
    """A result on its way to the host, with the rows that owned the slots at launch."""

    result: RoundResult
    rows: list[Row | None]
    is_prefill: bool


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
    ) -> None:
        """`decode` turns ids into text (needed for stop strings); `penalties` makes room for penalty state."""
        spec = target.spec
        self.batch, self.drafter, self.options = batch, drafter, options or RoundOptions()
        self.cache = KVCache.allocate(
            num_layers=spec.num_layers,
            num_pages=batch.num_pages,
            page_size=batch.page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=target.dtype,
            device=device,
            num_draft_layers=drafter.num_kv_layers,
            draft_shape=drafter.kv_shape,
        )
        self.pool = PagePool(batch.num_pages)
        self.rows = Rows.allocate(batch, vocab_size=spec.vocab_size, penalties=penalties, device=device)
        self.round = Round(target, drafter, self.cache, batch, self.options, device)
        self.totals = EngineTotals()
        self.on_round: Callable[[EngineTotals], None] | None = None
        self._decode, self._eos_ids, self._refill_dead = decode, eos_ids, refill_dead
        self._launched: deque[_Launched] = deque()

    @torch.inference_mode()
    def run(self, requests: Iterator[Request]) -> Generator[Completion]:
        """Decode every request; completions come in the order in which rows die."""
        # An earlier run may have been left half-way: rows, results and pages start anew.
        self.pool = PagePool(self.batch.num_pages)
        self._launched.clear()
        self.rows.live.zero_()
        self._bucket = self.batch.slots
        self._scheduler = Scheduler(self.batch, self.pool, map(self._begin, requests), refill_dead=self._refill_dead)
        while True:
            yield from self._refill()
            if self._scheduler.live:
                yield from self._make_room()
                self._launch_round()
            while len(self._launched) > (self.batch.run_ahead if self._scheduler.live else 0):
                yield from self._collect()
            if not self._scheduler.live and not self._launched and self._scheduler.exhausted:
                return

    def _begin(self, request: Request) -> Progress:
        finder = StopFinder(self._decode, request.stop) if request.stop and self._decode else None
        return Progress(request=request, draft_len=self.drafter.max_len, finder=finder)

    def _refill(self) -> Iterator[Completion]:
        """Fill free slots and prefill what came in; with an empty stream shrink to the next smaller bucket."""
        group = self._scheduler.refill()
        if group:
            self._bucket = self.batch.slots
            self._prefill(group)
        elif self._scheduler.live and self._scheduler.exhausted and self._refill_dead:
            bucket = min(b for b in self.batch.row_buckets if b >= len(self._scheduler.live))
            if bucket < self._bucket:
                while self._launched:
                    yield from self._collect()
                moves = self._scheduler.compact(bucket)
                if moves:
                    self.rows.move(moves, self.drafter.state)
                self._bucket = bucket

    def _prefill(self, group: list[Row]) -> None:
        began = time.perf_counter()
        spans = []
        for row in group:
            cached = row.num_shared * self.batch.page_size
            if row.progress.num_prefills == 0:
                row.progress.cached_tokens = cached
            self.totals.cached_tokens += cached
            self.totals.prefill_tokens += row.num_tokens - cached
            spans.append((row.slot, cached, row.num_tokens))
        slots = [row.slot for row in group]
        self.rows.begin(slots, [row.progress.request for row in group], [row.progress.tokens for row in group])
        self.rows.grant([(row.slot, 0, row.pages) for row in group])
        mode = self._mode(group)
        by_slot = {row.slot: row for row in group}
        for segments in chunks(spans, self.batch.prefill_tokens):
            result = prefill_chunk(self.round, self.rows, segments, mode)
            if result is not None:
                ending: list[Row | None] = [None] * self.batch.slots
                for segment in segments:
                    if segment.last:
                        ending[segment.slot] = by_slot[segment.slot]
                self._launched.append(_Launched(result, ending, True))
        elapsed = time.perf_counter() - began
        for row in group:
            row.progress.prefill_s += elapsed

    def _mode(self, rows: list[Row]) -> SamplingMode:
        """The least that serves all of `rows`."""
        params: list[SamplingParams] = [row.progress.request.sampling for row in rows]
        drawn = [p for p in params if p.temperature > 0]
        return SamplingMode(
            random=bool(drawn),
            filters=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in drawn),
            penalties=any(p.repetition_penalty != 1 or p.presence_penalty != 0 for p in params),
            min_tokens=any(row.progress.request.min_new_tokens > 0 for row in rows),
        )

    def _make_room(self) -> Iterator[Completion]:
        """Pages for everything that the launched rounds and the next one may write; the youngest rows go where there are none."""
        for row in sorted(self._scheduler.live, key=lambda row: row.order):
            while row.slot >= 0 and self._scheduler.slots[row.slot] is row:
                ahead = (len(self._launched) + 1) * self.round.width
                columns = len(row.pages)
                pages = self._scheduler.grow(row, row.num_tokens + ahead)
                if pages is not None:
                    if pages:
                        self.rows.grant([(row.slot, columns, pages)])
                    break
                if self._launched:  # what is not collected yet may free pages, and the tokens of a row set back must all be known
                    yield from self._collect()
                    continue
                victim = self._scheduler.youngest()
                self.rows.kill([victim.slot])
                self._scheduler.set_back(victim)
                self.totals.set_back += 1

    def _launch_round(self) -> None:
        live = self._scheduler.live
        if not live:
            return
        result = self.round.run(self.rows.first(self._bucket), self._mode(live))
        self._launched.append(_Launched(result, list(self._scheduler.slots), False))
        self.totals.rounds += 1

    def _collect(self) -> Iterator[Completion]:
        """Read the oldest launched result; rows that ended in it leave their slot and come out."""
        launched = self._launched.popleft()
        result = launched.result
        log = result.log.cpu().numpy()
        now = time.perf_counter()
        self.totals.live_rows = len(self._scheduler.live)
        for slot, line in enumerate(log.tolist()):
            row = launched.rows[slot]
            accepted, drafted, kept = line[:3]
            if row is None or accepted < 0 or row.slot < 0 or self._scheduler.slots[row.slot] is not row:
                continue
            progress, before = row.progress, len(row.progress.tokens)
            if launched.is_prefill:
                progress.add_prefill(line[3:4])
                progress.first_token_at = progress.first_token_at or now
            else:
                progress.add_round(accepted, drafted, accepted + 1, line[3 : 3 + kept])
                self.totals.row_rounds += 1
                self.totals.accepted += accepted
                self.totals.drafted += drafted
            count = len(progress.tokens) - before
            self.totals.tokens += count
            _keep_logprobs(progress, result, slot, count)
            if progress.finish_reason is not None:
                if progress.stop_string is not None:
                    self.rows.kill([row.slot])
                yield self._finish(row, now)
        if self.on_round is not None:
            self.on_round(self.totals)

    def _finish(self, row: Row, now: float) -> Completion:
        slot = row.slot
        self._scheduler.release(row)
        return row.progress.completion(decode=self._decode, drafter=self.drafter.name, eos_ids=self._eos_ids, slot=slot, now=now)


def _keep_logprobs(progress: Progress, result: RoundResult, slot: int, count: int) -> None:
    if result.logprobs is not None:
        progress.logprobs += result.logprobs[slot, :count].tolist()
    if result.top_ids is not None and result.top_logprobs is not None:
        ids, values = result.top_ids[slot].cpu().numpy(), result.top_logprobs[slot].cpu().numpy()
        progress.top += [(ids[j], values[j]) for j in range(count)]
