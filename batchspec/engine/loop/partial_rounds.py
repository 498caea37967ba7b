"""Which rounds that verify a part of their drafts are captured when an engine is prepared, and whether any are.

They save what verifying the other drafts takes. Where that is next to nothing, because a round waits for weights or its attention
for K and V whatever it verifies, one such round is captured and no other, and rounds learn nothing of their drafts either. Of a
short job they must also gain more than their capture takes.

A round that verifies a part of K drafts emits at most as many tokens as one that verifies all of them. So it is never chosen
unless it takes less than PART_WORTH of that round's time, and this is what is asked of it. That a smaller K is often the best one
for all rows is no reason to ask for more: if some rows accept all K drafts, the others none, and the confidence tells which, the
largest K is the best one too, unless a draft costs more time than it is worth. How unlike rows are is not known before the first
round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.round_timer import RoundTimer
from batchspec.engine.rounds.draft_lengths import PART_WORTH, DraftLengths, partial_buckets
from batchspec.engine.step import RoundShape, RoundWidth

LIKELY_GAIN = 0.05
"""Share of the saved time that counts as gained with each token of a row. The best K is often less than the most drafts, so it is
small: in a job of an 8B model with rows of two kinds (jobs/pages/NOTEBOOK.md) 0.5 ms per token, of 12 ms that a round could
save."""


class PartialRounds:
    """Call `decide` once, then `prepare` for each sampling mode. Both only while no row is live."""

    def __init__(self, executor: Executor, lengths: DraftLengths, timer: RoundTimer) -> None:
        self._executor, self._lengths, self._timer = executor, lengths, timer
        self._measures = executor.target.ranks is None
        """Whether times decide: those of several ranks differ, and all must capture the same rounds. Then all widths over all
        slots are captured."""
        self._is_decided = False

    def shapes(self, plain: RoundShape, row_buckets: Iterable[int]) -> list[RoundShape]:
        """All such rounds that may be captured, the largest row bucket first. plain: a round of the same mode and limits."""
        buckets = partial_buckets(tuple(row_buckets))
        return [
            self._shape(plain, num_rows, width)
            for num_rows in (buckets if self._measures else buckets[:1])
            for width in self._lengths.partial
        ]

    def decide(self, plain: RoundShape, row_buckets: Iterable[int], *, num_rounds: float | None) -> None:
        """Time a round that saves most, and stop choosing among drafts if that is too little, or if there are few slots.

        plain       over all slots
        num_rounds  of the job without drafts, approximately: tokens of a slot; None: unknown, many
        """
        if self._is_decided:
            return
        self._is_decided = True
        shapes = self.shapes(plain, row_buckets)
        if not shapes or (self._measures and not self._pays(shapes, plain, num_rounds)):
            self._lengths.verify_all()
            self._executor.round.verify_all()

    def prepare(self, plain: RoundShape, row_buckets: Iterable[int], *, shared: bool) -> None:
        """Capture and time the rounds over all slots, and those over fewer rows as long as they save enough.

        shared  also capture those of rows with shared prefixes
        """
        shapes = self.shapes(plain, row_buckets)
        for num_rows in dict.fromkeys(shape.num_rows for shape in shapes):
            if self._measures and not self._saved_s(plain, num_rows):
                return
            own = [shape for shape in shapes if shape.num_rows == num_rows]
            self._executor.graphs.prepare([*own, *(replace(shape, shared=True) for shape in own if shared)])
            with self._timer.as_live_rows():
                for shape in own:
                    self._timer.time(shape)

    def _pays(self, shapes: Sequence[RoundShape], plain: RoundShape, num_rounds: float | None) -> bool:
        graphs = self._executor.graphs
        spent_s = graphs.capture_s
        saved_s = self._saved_s(plain, plain.num_rows)
        prepare_s = (graphs.capture_s - spent_s) * len(shapes)  # two were captured; warm-up rounds take as long again
        if saved_s and (num_rounds is None or LIKELY_GAIN * saved_s * num_rounds > prepare_s):
            return True
        graphs.forget(self._probes(plain, plain.num_rows))
        return False

    def _probes(self, plain: RoundShape, num_rows: int) -> tuple[RoundShape, RoundShape]:
        """A round that verifies all its drafts, and the one that leaves out most of as many drafts."""
        width = max(self._lengths.partial, key=lambda width: width.draft_len - width.verified)
        return self._shape(plain, num_rows, RoundWidth(width.draft_len)), self._shape(plain, num_rows, width)

    def _saved_s(self, plain: RoundShape, num_rows: int) -> float:
        """Seconds by which the probe that verifies a part is shorter than the other; 0 if it would never be chosen."""
        probes = self._probes(plain, num_rows)
        self._executor.graphs.prepare(probes)
        with self._timer.as_live_rows():
            whole_s, part_s = (self._timer.time(shape) for shape in probes)
        return whole_s - part_s if part_s <= PART_WORTH * whole_s else 0.0

    def _shape(self, plain: RoundShape, num_rows: int, width: RoundWidth) -> RoundShape:
        return replace(plain, num_rows=num_rows, draft_len=width.draft_len, mean_len=width.mean_len)
