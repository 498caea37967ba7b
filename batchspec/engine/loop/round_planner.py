"""Chooses the draft length of each round by measured times and acceptance, and learns from the results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.groups import most_keys
from batchspec.cache.layer_state import windows_read
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.partial_rounds import PartialRounds
from batchspec.engine.loop.round_timer import RoundTimer
from batchspec.engine.loop.run_times import RefillTimes, RoundClock
from batchspec.engine.loop.warm_up import compile_kernels, rehearse
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.draft_lengths import NO_TRIAL, DraftLengths, choices_of
from batchspec.engine.rounds.expert_reads import ExpertReads, counted
from batchspec.engine.rounds.records import PendingResult, RoundLog
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.step import NO_DRAFTS, RoundShape, RoundWidth
from batchspec.packed_batch import ExpectedRows, PackedBatch

SPARE = 1.25
"""Margin over the longest surveyed row. Rounds with longer rows plan attention for the longest row that the job allows."""


def usual_kv(batch: PackedBatch) -> int | None:
    """Limit on the tokens of a row, drafts included, that few rows exceed: a power of two. None: no row was surveyed, or max_len
    is less."""
    if batch.longest_row is None:
        return None
    most = 1 << (int(SPARE * batch.longest_row) + drafted_keys(batch)).bit_length()
    return most if most < batch.max_len else None


def drafted_keys(batch: PackedBatch) -> int:
    """Keys after a row's last token that a round may read: those of drafts past the row's limit, and those of a parallel head's
    mask tokens."""
    return 2 * (batch.num_verified + 1)


class RoundPlanner:
    """Call `learn` with each result, in the order of their launches."""

    def __init__(self, executor: Executor, batch: PackedBatch, *, adaptive: bool, expert_correlation: float = 1.0) -> None:
        """
        adaptive            choose the draft length of each round, 0 included, if rounds are timed; otherwise always the largest
        expert_correlation  share of tokens that choose experts independently, used until rounds have been counted
        """
        self._executor, self._batch = executor, batch
        self._draft_len = executor.drafter.draft_len
        page_size, target = executor.batch.page_size, executor.target
        layers = target.spec.layer_states(target.dtype, page_size, draft_len=batch.num_verified)
        self._windows = Counter(windows_read((*layers, *executor.drafter.layer_states(page_size))))
        experts = executor.target.spec.experts
        self.seconds: dict[str, float] = {}
        """Seconds that each part of `prepare` took."""
        self.experts = None if experts is None else ExpertReads(*experts, expert_correlation)
        """The model of how many experts rounds read; None for a target without experts."""
        self._num_rounds = 0
        self._lengths: DraftLengths | None = None
        self._partial: PartialRounds | None = None
        if adaptive and executor.graphs.captures and executor.round.draft_lens:
            self._lengths = DraftLengths(
                self._draft_len, executor.round.draft_lens, self.experts, executor.round.num_nodes,
                row_lengths=executor.round.chances is not None,
            )
        self._timer = RoundTimer(executor, self._lengths, self.experts)
        if self._lengths is not None and executor.round.chances is not None:
            self._partial = PartialRounds(executor, self._lengths, self._timer)
        self.usual_kv = None if executor.round.num_nodes is not None else usual_kv(batch)
        """Rounds are prepared for rows of at most this many tokens; None: of any number. A tree's plan does not depend on it."""
        self.row_buckets = batch.row_buckets
        """Row counts with which rounds may run: those that `prepare` did not leave out."""
        self._clock = RoundClock()
        self._refills: RefillTimes | None = None
        self._width = NO_DRAFTS
        self._unprepared = 0
        """Number of rounds in a row up to the newest one that prepared no draft."""

    @property
    def ready(self) -> bool:
        """Whether `choose` may be called: choosing draft lengths needs times, which `prepare` measures."""
        return self._lengths is None or self._lengths.ready

    def prepare(
        self, mode: SamplingMode, *, shared: bool = False, most_rounds: int | None = None, expected: ExpectedRows | None = None
    ) -> PrefillCost | None:
        """Run a prefill; capture the graphs of every row bucket and draft length for `mode`; time them. No row may be live.

        shared       also capture the graphs of rows with shared prefixes, if the longest prompt is long enough for them
        most_rounds  after the job's last row began, its rows end within this many rounds; None: unknown, the rows may come more
                     than once. Row buckets smaller than all slots serve only these rounds: they are left out if preparing them
                     takes longer than they would save
        expected     also capture the prefill passes that these rows will most likely need (`PrefillGraphs.prepare`); if they
                     have few rounds, none that verify a part of their drafts (`PartialRounds`)
        Returns the cost of prefill passes in seconds; None if rounds are not CUDA graphs (CPU, float64): then nothing is timed.
        """
        batch, graphs, shapes = self._batch, self._executor.graphs, self._shapes(mode)
        most_pages = (batch.longest_prompt or batch.max_len) // batch.page_size
        shared = shared and self._executor.sharing.may_pay(batch.num_slots, most_pages)
        variants = [*shapes, *(replace(shape, shared=True) for shape in shapes if shared)]
        plain, partial = RoundShape(batch.num_slots, self._draft_len, mode, max_kv=self.usual_kv), self._partial
        started = time.perf_counter()
        found = compile_kernels(self._executor, mode, [*variants, *(partial.shapes(plain, batch.row_buckets) if partial else ())])
        began = time.perf_counter()
        cost = rehearse(self._executor, mode, found=found)
        rehearsed = time.perf_counter()
        if partial is not None:
            num_rounds = None if expected is None else expected.rounds(batch.num_slots)
            partial.decide(plain, batch.row_buckets, num_rounds=num_rounds)
        graphs.prepare(shape for shape in variants if shape.num_rows == batch.num_slots)
        if most_rounds is not None and self._ends_before_smaller_rounds_pay(most_rounds, shapes):
            self.row_buckets = (batch.num_slots,)
            shapes = [shape for shape in shapes if shape.num_rows == batch.num_slots]
        else:
            graphs.prepare(shape for shape in variants if shape.num_rows < batch.num_slots)
        if cost is None or not shapes:
            return cost
        self._refills = None if cost.replay is None else RefillTimes(cost, batch.num_slots)
        self._timer.time_all(shapes, replace(plain, draft_len=0, prepare_next=False))
        self._width = shapes[-1].width
        if partial is not None:
            partial.prepare(plain, self.row_buckets, shared=shared)
        timed = time.perf_counter()
        passes = 0 if expected is None else self._executor.prepare_passes(expected, mode, round_s=self.round_s)
        self.seconds = {
            **({} if found else {"compiling kernels": began - started}),
            "prefill (compile, time)": rehearsed - began,
            "kernels of rounds": graphs.warm_up_s,
            f"capture of {graphs.num_captured + passes} graphs": graphs.capture_s + time.perf_counter() - timed,
        }
        return cost

    def _shapes(self, mode: SamplingMode) -> list[RoundShape]:
        """The rounds of every row bucket and draft length that may be chosen, without shared prefixes, and that verify all
        drafts; none if there are no rounds."""
        lengths = self._lengths
        return [
            RoundShape(num_rows, draft_len, mode, prepare_next=prepare_next, max_kv=self.usual_kv)
            for num_rows in self._batch.row_buckets
            for draft_len in (
                self._executor.round.draft_lens[-1:] if lengths is None
                else choices_of(lengths.choices, all_slots=num_rows == self._batch.num_slots)
            )
            for prepare_next in ((True,) if draft_len or lengths is None else (True, False))
        ]

    def _ends_before_smaller_rounds_pay(self, most_rounds: int, shapes: Sequence[RoundShape]) -> bool:
        """Whether `most_rounds` rounds over all slots take less time than preparing the graphs of all smaller row buckets.

        The estimate takes a capture to last as long as its warm-up round (factor 2).
        """
        graphs = self._executor.graphs
        whole = [shape for shape in shapes if shape.num_rows == self._batch.num_slots]
        if not graphs.captures or len(whole) == len(shapes):
            return False
        prepare_s = 2 * graphs.capture_s / graphs.num_captured * (len(shapes) - len(whole))
        return most_rounds * min(graphs.seconds(shape) for shape in whole) < prepare_s

    @property
    def round_s(self) -> float:
        """Seconds of a round over all slots with the newest round's width: measured in the run once two such rounds have
        followed each other, before that as timed by `prepare`, without attention; 1 if nothing is timed."""
        measured = {} if self._refills is None else self._refills.round_s
        return measured.get(self._width) or self._timer.round_s.get(self._width, 1.0)

    @property
    def refill_s(self) -> float | None:
        """Fixed seconds of a refill whose pass is replayed (`RefillTimes`); None if no pass is."""
        return None if self._refills is None else self._refills.fixed_s

    def max_kv(self, longest: int) -> int | None:
        """`RoundShape.max_kv` of a round whose rows may reach `longest` tokens, its own drafts not counted."""
        return self.usual_kv if longest + drafted_keys(self._batch) <= (self.usual_kv or 0) else None

    def choose(self, num_rows: int, num_tokens: NDArray[np.int64], owners: NDArray[np.int64]) -> UnreadLaunch:
        """Choose width and preparation of the round to launch now. Returns what the host keeps of it until its result is read.

        num_tokens, owners  int64 [slots] of the `SlotTable`
        """
        width, prepare_next, context_tokens, turn = RoundWidth(self._draft_len), True, 0, NO_TRIAL
        live_rows = int((owners[:num_rows] >= 0).sum())
        if self._lengths is not None:
            context_tokens = self._context_tokens(num_tokens[owners >= 0])
            width, next_drafts = self._lengths.choose(num_rows, context_tokens, live_rows=live_rows)
            prepare_next, turn = width.draft_len > 0 or next_drafts, self._lengths.turn
            prepare_next |= self._unprepared == self._executor.drafter.most_unprepared
            self._unprepared = 0 if prepare_next else self._unprepared + 1
        self._width = width
        self._num_rounds += 1
        return UnreadLaunch(
            owners=owners.copy(),
            num_rows=num_rows,
            live_rows=live_rows,
            width=width,
            prepare_next=prepare_next,
            context_tokens=context_tokens,
            counts_experts=self.experts is not None and counted(self._num_rounds),
            counts_drafts=turn.counts_drafts,
            trial_phase=turn.phase,
        )

    def _context_tokens(self, num_tokens: NDArray[np.int64]) -> int:
        """Keys that a round reads for rows with these numbers of tokens, on average over the layers of target and drafter."""
        total = 0
        for window, num_layers in self._windows.items():
            keys = num_tokens if window is None else np.minimum(num_tokens, most_keys(window, self._batch.num_verified + 1))
            total += num_layers * int(keys.sum())
        return total // max(1, self._windows.total())

    def counts_acceptance(self, launch: UnreadLaunch) -> bool:
        """Whether `learn` counts what the rows of this round accept. Rows that verified fewer drafts than others say nothing of
        what others would accept."""
        width = launch.width
        return self._lengths is not None and not launch.is_prefill and width.draft_len > 0 and width.mean_len is None

    def learn(
        self, launch: UnreadLaunch, result: PendingResult, log: RoundLog, weights: NDArray[np.float64] | None = None
    ) -> None:
        """Learn from the result of a round or prefill pass; `log` has the lines of its live rows.

        weights  float64 [lines] of the tokens of each row (`SlotTable.token_weights`); None: all are 1
        """
        if launch.counts_experts and self.experts is not None and result.result.experts_read is not None:
            self.experts.observe(result.result.experts_read.numpy(), self.positions(launch, result))
        took = self._clock.add(launch, result)
        if took is not None and self._refills is not None:
            self._refills.add(launch, took)
        if self._lengths is None:
            return
        took_part = log.num_kept > 0
        own = None if weights is None else weights[took_part]
        if not launch.is_prefill:
            self._observe(self._lengths, launch, result, log, took_part, own)
        if took is not None and not took.num_prefilled:
            self._lengths.timed(
                launch.num_rows, launch.width, launch.context_tokens, took.seconds, prepare_next=launch.prepare_next,
                live_rows=launch.live_rows,
            )
            if launch.trial_phase is not None and took_part.any():
                tokens = float(np.average(log.num_kept[took_part], weights=own))
                self._lengths.made(launch.trial_phase, launch.num_rows, tokens, took.seconds)

    def _observe(
        self, lengths: DraftLengths, launch: UnreadLaunch, result: PendingResult, log: RoundLog,
        took_part: NDArray[np.bool_], weights: NDArray[np.float64] | None,
    ) -> None:
        """Note the acceptance of a round. took_part: which lines are of rows that kept tokens; weights: of these rows."""
        if self.counts_acceptance(launch):
            lengths.observe(launch.width.draft_len, log.accepted_len[took_part], log.after_draft[took_part], weights)
        if (levels := result.result.levels) is not None:
            lengths.observe_levels(levels.numpy(), int((result.result.log.numpy()[:, 0] >= 0).sum()))

    def positions(self, launch: UnreadLaunch, result: PendingResult) -> int:
        """Positions of live rows that a round verified: newest tokens and drafts, of a tree its nodes."""
        log, round_ = result.result.log.numpy(), self._executor.round
        live = log[:, 0] >= 0
        num_live = int(np.count_nonzero(live))
        if round_.is_uniform and launch.width.mean_len is None:  # it also verifies drafts past a row's limit
            return num_live * round_.row_positions(launch.width.draft_len)
        return num_live + int(log[live, 1].sum())

    def forget(self) -> None:
        """Discard the measured acceptance: the target's weights have changed."""
        if self._lengths is not None:
            self._lengths.forget()

    def restart(self) -> None:
        """A run begins: its first round follows no earlier launch, and no draft length was chosen for it."""
        self._clock = RoundClock()
        if self._lengths is not None:
            self._lengths.restart()
