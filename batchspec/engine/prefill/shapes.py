"""Decides which prefill passes are padded to a fixed shape, so that a CUDA graph can hold them, and to which shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill.cost import PrefillCost, padded_rows
from batchspec.engine.rounds.round import Round
from batchspec.engine.step import Segment
from batchspec.kernels.attention.settings import MAX_QUERIES
from batchspec.model.layers.attention.flash import SHORT
from batchspec.packed_batch import KEYS_PER_TOKEN, PackedBatch


@dataclass(frozen=True, slots=True)
class PassShape:
    """The shape that a prefill graph is captured for. A pass fits if no number exceeds the shape's; the rest is padding.

    num_tokens  T, padding included
    num_rows    R, dead rows of one token included
    max_q, max_kv  tokens and keys of a row
    max_keys    keys of all rows together
    """

    num_tokens: int
    num_rows: int
    max_q: int
    max_kv: int
    max_keys: int
    mode: SamplingMode

    @staticmethod
    def exact(segments: Sequence[Segment], mode: SamplingMode) -> PassShape:
        """The exact numbers of a pass, without padding."""
        lengths, ends = [s.end - s.begin for s in segments], [s.end for s in segments]
        return PassShape(sum(lengths), len(lengths), max(lengths), max(ends), sum(ends), mode)

    def holds(self, exact: PassShape) -> bool:
        """Whether a pass with exactly these numbers can be padded to this shape."""
        num_dead = self.num_rows - exact.num_rows
        return (
            num_dead >= 0
            and exact.num_tokens + num_dead <= self.num_tokens
            and exact.max_q <= self.max_q
            and exact.max_kv <= self.max_kv
            and exact.max_keys <= self.max_keys
            and exact.mode == self.mode
        )

    def with_bounds_of(self, other: PassShape) -> PassShape:
        """The shape with the larger of each bound. `other` must have the same number of tokens and the same mode."""
        assert (self.num_tokens, self.mode) == (other.num_tokens, other.mode)
        return PassShape(
            self.num_tokens,
            max(self.num_rows, other.num_rows),
            max(self.max_q, other.max_q),
            max(self.max_kv, other.max_kv),
            max(self.max_keys, other.max_keys),
            self.mode,
        )


class PassShapes:
    """Chooses the shapes of an engine's padded passes."""

    def __init__(self, round_: Round, batch: PackedBatch) -> None:
        self._num_slots, self._max_tokens = batch.num_slots, batch.most_graph_tokens
        # Where nothing is decoded passes are full, and one shape should hold most of them: the longest row may be in any.
        self._least_kv = 0 if batch.decodes else min(SHORT, batch.longest_prompt or 0)
        self._layouts = {kv.layout for kv in round_.cache.layers}
        self._on_gpu = round_.target.device.type == "cuda"
        # Never padded: passes of several ranks, which exchange in buffers of the largest pass; passes of layers whose launches
        # depend on the rows; deterministic passes, because products may depend on the padded number of tokens.
        self._never = (
            round_.target.ranks is not None
            or round_.target.spec.refuses("padded_prefill") is not None
            or round_.target.spec.ordered
            or not round_.drafter.prefill_by_bounds
        )

    def of(self, segments: Sequence[Segment], mode: SamplingMode, cost: PrefillCost | None) -> PassShape | None:
        """The shape to which this pass is padded; None: the pass is launched kernel by kernel.

        None if

        - ranks compute the target together, a layer refuses it, the job is deterministic, or the drafter's prefill reads host
          lists (`Drafter.prefill_by_bounds`);
        - a row may have to wait in its slot;
        - a row has more than SHORT keys: FlashInfer plans its attention on the host;
        - attention needs host lists for another reason, as in float32 with rows of more than 64 tokens;
        - padded it has more than `max_tokens` tokens, or its rows have many more keys than tokens (KEYS_PER_TOKEN);
        - the padding would take longer than the launches that a graph saves, or no pass was timed.
        """
        return self.fitting(PassShape.exact(segments, mode), cost)

    def fitting(self, exact: PassShape, cost: PrefillCost | None) -> PassShape | None:
        """As `of`, for a pass with exactly these numbers."""
        num_tokens, num_rows, mode = exact.num_tokens, exact.num_rows, exact.mode
        if self._never or mode.may_hold or exact.max_kv > SHORT or cost is None:
            return None
        rows = padded_rows(num_rows, self._num_slots)
        least = num_tokens + rows - num_rows
        padded = min(_padded(least), self._max_tokens)
        max_kv = max(MAX_QUERIES, _power(max(exact.max_kv, self._least_kv)))
        max_q = MAX_QUERIES if exact.max_q <= MAX_QUERIES else max_kv
        if self._on_gpu and not all(layout.plans_by_bounds(max_q) for layout in self._layouts):
            return None
        max_keys = padded
        while max_keys < exact.max_keys:
            max_keys *= 2
        if least > padded or max_keys > KEYS_PER_TOKEN * self._max_tokens or not cost.pays_padding(num_tokens, padded):
            return None
        return PassShape(padded, rows, max_q, max_kv, max_keys, mode)


def _power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def _padded(number: int) -> int:
    """The smallest power of two, or midpoint between two, that is at least `number`: padding is at most half of a pass, a fifth
    on average."""
    power = _power(number)
    return power * 3 // 4 if number <= power * 3 // 4 else power
