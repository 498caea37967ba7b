"""Prefill passes of short rows as CUDA graphs: one launch by the host instead of some hundred kernels.

A pass is padded to a shape (`shapes.py`), and one upload fills the buffer with all inputs that depend on its rows
(`inputs.py`).

Every token of a row is computed by the same operations as in a pass that is launched kernel by kernel (`prefill_chunk`). But a
product may choose its tile by the number of tokens, padding included. Attention may be split by the number of rows, and its
kernel depends on the longest row that the shape allows. So sums may be rounded differently, as in any other batch. With
decode.deterministic that is not allowed, and every pass is launched kernel by kernel.

A shape is captured at its third use, or before the first row if the survey tells that it will be used so often (`prepare`). Until
then a pass is padded to the smallest captured shape that holds it, if there is one; such a use counts only in part. On a CPU the
same calls run as they are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.expected_passes import expected_uses
from batchspec.engine.prefill.padded import PaddedBatch, PaddedPass, PassInputs, emitting_first
from batchspec.engine.prefill.passes import FEW, Prefilled, seconds_of
from batchspec.engine.prefill.shapes import PassShape, PassShapes
from batchspec.engine.rounds.graphs import Graphs
from batchspec.engine.rounds.round import Round
from batchspec.engine.step import Segment
from batchspec.model.layers.attention.flash import SHORT
from batchspec.packed_batch import PREFILL_GRAPHS, ExpectedRows, PackedBatch

CAPTURE_AT = 3
"""A shape is captured at this use. A capture takes about as long as two passes that are launched kernel by kernel. So rare shapes
are never captured."""
PREPARED_SHARE = 0.75
"""Share of all graphs that may be captured before the first row: the rest is left for shapes that the survey did not predict."""
PREPARE_S = 1.0
"""Seconds after which no further shape is captured before the first row. Captured in the run, they would
take about as long."""


NOTHING_EMITTED = Prefilled(None, None)


class PrefillGraphs:
    """Runs the prefill passes of an engine, padded and captured where that pays."""

    cost: PrefillCost | None = None
    """The cost of passes, once they were timed; until then no pass is padded."""

    def __init__(
        self,
        round_: Round,
        rows: DeviceBatch,
        graphs: Graphs,
        launch: Callable[[Sequence[Segment], SamplingMode], Prefilled],
        padded_pass: PaddedPass,
        batch: PackedBatch,
    ) -> None:
        """
        graphs       those of the rounds, which share memory and stream with these
        launch       launches a pass kernel by kernel
        padded_pass  what a graph holds
        """
        self._launch, self._padded_pass, self._decodes = launch, padded_pass, batch.decodes
        self._round, self._rows, self._captures, self._pool = round_, rows, graphs.captures, graphs.pool
        self._shapes = PassShapes(round_, batch)
        self._inputs = PassInputs(batch.num_slots, rows.live.device)
        self._graphs: dict[PassShape, tuple[torch.cuda.CUDAGraph, Prefilled]] = {}
        self._uses: dict[PassShape, float] = defaultdict(float)
        """For each shape without a graph, its uses: 1 for a pass launched kernel by kernel; for one padded to a larger shape, the
        time of its padding relative to what such a pass loses, at most 1."""
        self.num_padded = 0
        """Number of passes that were padded; on a GPU all but those that captured a graph were replays."""

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def learn(self, cost: PrefillCost, mode: SamplingMode, *, longest: int) -> PrefillCost:
        """cost: the times of plain passes. Captures a pass of few tokens and returns the cost with the seconds of its replay.

        longest  tokens of the longest row. Only while no row is live and all page tables are zero, as after `time_passes`.
        """
        self.cost = cost
        few = [Segment(0, 0, min(FEW, longest), True)]
        if self._captures and self._shapes.of(few, mode, cost) is not None:
            for _ in range(CAPTURE_AT):
                self.run(few, mode)
            replay_s = min(seconds_of(partial(self.run, few, mode)) for _ in range(3))
            self.cost = replace(cost, replay=replay_s, most_replayed=SHORT)
        return self.cost

    def prepare(self, expected: ExpectedRows, mode: SamplingMode, *, round_s: float) -> int:
        """Capture the shapes that passes of these rows will most likely have; returns their number.

        For each number of tokens that at least CAPTURE_AT passes are expected to have, one shape is captured. The run would
        capture it too, but later. If PREPARED_SHARE or PREPARE_S allow fewer, the most frequent ones are captured. The other
        bounds of a shape are those of all its passes, because larger bounds cost little. The largest is captured first: later
        graphs reuse its memory.

        round_s  seconds of a round over all slots
        Only after `learn`, and while no row is live and all page tables are zero.
        """
        cost, began = self.cost, time.perf_counter()
        if not self._captures or cost is None or cost.replay is None:
            return 0
        drafter = self._round.drafter
        uses = expected_uses(
            expected, self._shapes, mode, cost, num_slots=self._rows.live.shape[0], draft_len=drafter.draft_len, round_s=round_s,
            page_size=self._round.cache.page_size,
        )
        most = min(int(PREPARED_SHARE * PREFILL_GRAPHS) - len(self._graphs), int(PREPARE_S / (2 * cost.least)))
        often = [shape for shape, count in uses.items() if count >= CAPTURE_AT]
        captured = 0
        for shape in sorted(often[: max(0, most)], key=lambda shape: -shape.num_tokens):
            if time.perf_counter() - began > PREPARE_S:
                break
            self._inputs.fill([Segment(0, 0, 1, True)], shape.num_rows)  # what a pass launches depends on its shape alone
            self._run_and_capture(shape)
            captured += 1
        return captured

    def run(self, segments: Sequence[Segment], mode: SamplingMode) -> Prefilled:
        """As `launch`. The next pass or round overwrites the returned tensors: use them before it, in stream order."""
        shape = self._shape(PassShape.exact(segments, mode))
        if shape is None:
            return self._launch(segments, mode)
        self.num_padded += 1
        self._inputs.fill(emitting_first(segments) if self._decodes else segments, shape.num_rows)
        if shape in self._graphs:
            graph, whole = self._graphs[shape]
            graph.replay()
        else:
            whole = self._run_and_capture(shape)
        if self._decodes:
            return whole if any(s.last for s in segments) else NOTHING_EMITTED
        return whole.of_first(len(segments))

    def _shape(self, exact: PassShape) -> PassShape | None:
        """The shape to which a pass with these numbers is padded now: one that is captured, or about to be. None: it is launched
        kernel by kernel."""
        cost, own = self.cost, self._shapes.fitting(exact, self.cost)
        if own is None or cost is None or not self._captures or own in self._graphs:
            return own
        larger = [shape for shape in self._graphs if shape.holds(exact) and cost.pays_padding(exact.num_tokens, shape.num_tokens)]
        least = min(larger, key=lambda shape: (shape.num_tokens, shape.max_keys), default=None)
        more_tokens = 0 if least is None else max(0, least.num_tokens - own.num_tokens)
        self._uses[own] += 1.0 if least is None else min(1.0, more_tokens * cost.token / cost.least)
        return own if self._uses[own] >= CAPTURE_AT and len(self._graphs) < PREFILL_GRAPHS else least

    def _run_and_capture(self, shape: PassShape) -> Prefilled:
        """Run the pass in the buffer, which compiles its kernels, then capture it if the device can. Returns the run's result."""
        whole = self._run(shape)
        if self._captures:
            self._graphs[shape] = self._pool.capture(partial(self._run, shape))
        return whole

    @torch.inference_mode()
    def _run(self, shape: PassShape) -> Prefilled:
        """Run the pass in the buffer. Its launches depend on the shape alone, and nothing is read back."""
        round_, rows, inputs = self._round, self._rows, self._inputs
        rows.provide(shape.mode)
        batch, slot_ids = inputs.batch(shape, rows, page_size=round_.cache.page_size)
        padded = PaddedBatch(batch, slot_ids, inputs.emits, inputs.emit_ids)
        return self._padded_pass(round_, rows, padded, shape.mode)
