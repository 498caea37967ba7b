"""Launches the rounds, each with the draft length that pays now, and learns from their results which one that is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchspec.batch.device_batch import DeviceBatch
from batchspec.engine.draft_lengths import DraftLengths
from batchspec.engine.graphs import Graphs, Shape
from batchspec.engine.launched import Launched, RoundClock
from batchspec.engine.prefill import rehearse
from batchspec.engine.round import Round
from batchspec.engine.sampling import SamplingMode
from batchspec.engine.scheduler import PassCost, Scheduler
from batchspec.engine.shared_prefix import SharedPrefixGroups
from batchspec.records import PackedBatch


class Launcher:
    """Its rounds' results are to be collected, and shown to `learn`, in the order of their launches."""

    def __init__(
        self, round_: Round, rows: DeviceBatch, groups: SharedPrefixGroups, batch: PackedBatch, *, adaptive: bool
    ) -> None:
        """adaptive: choose the draft length of each round, 0 included, where rounds are timed; else it is the largest."""
        self.graphs = Graphs(round_, rows, groups)
        self._round, self._rows, self._groups, self._batch = round_, rows, groups, batch
        self._drafter, self._timed = round_.drafter, self.graphs.captures
        self._lengths = None
        if adaptive and self._timed:
            self._lengths = DraftLengths(self._drafter.max_len, choices=round_.draft_lens)
        self._clock = RoundClock()
        self._round_s: dict[int, float] = {}
        self._draft_len = 0

    @property
    def ready(self) -> bool:
        """Whether `launch` knows enough: to choose draft lengths it needs times, which `prepare` takes."""
        return self._lengths is None or self._lengths.ready

    def prepare(self, mode: SamplingMode, *, shared: bool = False) -> PassCost | None:
        """Rehearse a prefill, capture the graphs of every row bucket and draft length for `mode`, and time them; no row may live.

        shared  the graphs of rows with common beginnings too
        Returns what a prefill pass takes in seconds; None where rounds are no graphs (CPU, float64): nothing is timed.
        """
        batch, lengths = self._batch, self._lengths
        draft_lens = [self._drafter.max_len] if lengths is None else lengths.choices
        kinds = [(k, prepare_next) for k in draft_lens for prepare_next in ((True,) if k or lengths is None else (True, False))]
        shapes = [
            Shape(num_rows, k, mode, prepare_next=prepare_next) for num_rows in batch.row_buckets for k, prepare_next in kinds
        ]
        self._rows.live.zero_()
        cost = None
        if self._timed:
            longest = min(batch.longest_prompt or batch.max_len, batch.max_len - 1)
            cost = rehearse(self._round, self._rows, max_tokens=batch.prefill_tokens, longest=longest, mode=mode)
        self.graphs.prepare([*shapes, *(replace(shape, shared=True) for shape in shapes if shared)])
        if cost is None:
            return None
        for shape in shapes:
            whole = shape.num_rows == batch.num_slots and shape.prepare_next
            seconds = self.graphs.seconds(shape) if whole or lengths is not None else 0.0
            if whole:
                self._draft_len, self._round_s[shape.draft_len] = shape.draft_len, seconds
            if lengths is not None:
                lengths.set_base(shape.num_rows, shape.draft_len, seconds, prepare_next=shape.prepare_next)
        return cost

    @property
    def round_s(self) -> float:
        """Seconds of a round over all slots with the newest one's draft length, attention left out; 1 where nothing is timed."""
        return self._round_s.get(self._draft_len, 1.0)

    def launch(self, num_rows: int, scheduler: Scheduler, mode: SamplingMode, *, beside: bool) -> Launched:
        """One round over the first `num_rows` slots, its results on their way to the host.

        scheduler  whose rows are in the slots now, all of them in the first `num_rows`
        beside     other work runs beside it, or it waits for some: it says nothing of what rounds take
        """
        owner = scheduler.owner
        shared = self._groups.renew(scheduler.slots, owner, num_rows)
        draft_len, prepare_next, context_tokens = self._drafter.max_len, True, 0
        if self._lengths is not None:
            context_tokens = int(scheduler.num_tokens[owner >= 0].sum())
            draft_len, next_drafts = self._lengths.choose(num_rows, context_tokens)
            prepare_next = draft_len > 0 or next_drafts
        self._draft_len = draft_len
        self._drafter.refresh()
        return Launched(
            result=self.graphs.run(Shape(num_rows, draft_len, mode, shared, prepare_next)),
            owners=owner.copy(),
            num_rows=num_rows,
            draft_len=draft_len,
            prepare_next=prepare_next,
            context_tokens=context_tokens,
            beside=beside,
        ).send()

    def learn(self, launched: Launched, accepted: NDArray[np.int32]) -> None:
        """A result has arrived, of a round or a prefill; int32 [rows] draft tokens that rows of the round accepted."""
        if self._lengths is None:
            return
        seconds = self._clock.seconds_of(launched)
        if not launched.is_prefill:
            self._lengths.observe(launched.draft_len, accepted)
        if seconds is not None:
            tokens = launched.context_tokens
            self._lengths.timed(launched.num_rows, launched.draft_len, tokens, seconds, prepare_next=launched.prepare_next)

    def forget(self) -> None:
        """The drafter drafts otherwise from now on: what was learnt of its acceptance says nothing."""
        if self._lengths is not None:
            self._lengths.forget()

    def restart(self) -> None:
        """What was launched before is given up: nothing follows upon it."""
        self._clock = RoundClock()
