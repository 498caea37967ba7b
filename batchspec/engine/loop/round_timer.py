"""Times rounds over dead rows when an engine is prepared; of a target with experts also how many experts they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from batchspec.engine.loop.executor import Executor
from batchspec.engine.rounds.draft_lengths import DraftLengths
from batchspec.engine.rounds.expert_reads import ExpertReads
from batchspec.engine.step import RoundShape, RoundWidth


class RoundTimer:
    """Only while no row is live."""

    def __init__(self, executor: Executor, lengths: DraftLengths | None, experts: ExpertReads | None) -> None:
        """lengths, experts: get the times and the experts read; lengths None: only rounds over all slots are timed"""
        self._executor, self._lengths, self._experts = executor, lengths, experts
        self.round_s: dict[RoundWidth, float] = {}
        """Seconds of rounds over all slots that prepare the next draft, by width."""

    def time_all(self, shapes: Sequence[RoundShape], without_drafts: RoundShape) -> None:
        """Time rounds that are captured. without_drafts: one of them over all slots, which measures what an expert costs."""
        if self._experts is not None and self._lengths is not None:
            with self._executor.dead_tokens_routed():
                self._time_experts(self._experts, without_drafts)
        with self.as_live_rows():
            for shape in shapes:
                self.time(shape)

    @contextmanager
    def as_live_rows(self) -> Iterator[None]:
        """Within this block dead rows choose experts as live ones do."""
        if self._experts is None:
            yield
            return
        with self._executor.dead_tokens_routed(), self._executor.different_tokens():
            yield

    def time(self, shape: RoundShape) -> float:
        """Seconds of one round, within `as_live_rows`; it is captured before if it was not."""
        whole = shape.num_rows == self._executor.batch.num_slots and shape.prepare_next
        if self._lengths is None and not whole:
            return 0.0
        seconds = self._executor.graphs.seconds(shape)
        if whole:
            self.round_s[shape.width] = seconds
        if self._lengths is not None:
            self._lengths.times.set_base(shape.num_rows, shape.width, seconds, prepare_next=shape.prepare_next)
            if self._experts is not None:
                self._experts.set_base(shape.num_rows, shape.width, self._executor.experts_read())
        return seconds

    def _time_experts(self, experts: ExpertReads, shape: RoundShape) -> None:
        """Time one round twice: over rows with equal tokens, which choose equal experts, and over rows with different tokens."""
        graphs, executor = self._executor.graphs, self._executor
        same_s, same = graphs.seconds(shape), executor.experts_read().mean()
        with executor.different_tokens():
            many_s, many = graphs.seconds(shape), executor.experts_read().mean()
        experts.set_cost(many_s - same_s, float(many - same))
