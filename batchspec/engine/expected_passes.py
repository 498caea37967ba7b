"""Tells, before a job's first row enters a slot, which shapes its prefill passes will most likely have.

A refill comes once idle slots have cost as much as its fixed time F (`IdleSlots`). If rows take n rounds of
t seconds each in S slots, S / n rows end in a round, and m rounds after a refill the idle slots have cost t m^2 / 2n seconds of a
full batch. So a refill has

    S / n * m = S sqrt(2 F / (n t))

rows. Acceptance, and with it n, is not known before the run, nor is the gap that the host leaves on the device, which is part of
F. Therefore refills of several sizes about this estimate are cut from the surveyed prompts, and the shapes of their passes are
counted.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill_cost import PrefillCost
from batchspec.engine.prefill_shapes import PassShape, PassShapes
from batchspec.records import ExpectedRows

SIZES = (0.6, 0.8, 1.0, 1.25)
"""Rows of the refills that are considered, relative to the estimate; each is taken to be as likely as the others."""
SAMPLED = 200
"""Maximum number of refills of each size whose shape is computed."""


def rows_of_a_refill(num_slots: int, *, fixed_s: float, round_s: float, rounds: float) -> float:
    """Number of rows of a refill.

    fixed_s  seconds of a refill that do not depend on its tokens
    round_s  seconds of a round
    rounds   number of rounds that a row takes
    """
    return min(num_slots, max(1.0, num_slots * math.sqrt(2 * fixed_s / (round_s * rounds))))


def expected_uses(
    rows: ExpectedRows, shapes: PassShapes, mode: SamplingMode, cost: PrefillCost, *,
    num_slots: int, draft_len: int, round_s: float, page_size: int, lookahead: int,
) -> dict[PassShape, float]:  # fmt: skip
    """Shapes with different numbers of tokens that hold all padded passes which the job will most likely have, and how many of
    them each holds; the most frequent first.

    cost       with the time of a replay
    draft_len  K: a round is taken to accept half of its drafts
    lookahead  number of tokens after a page that its K/V depend on too, as of `prefix_hashes`
    """
    assert cost.replay is not None
    rounds = max(1.0, rows.output_tokens / (1 + draft_len / 2))
    estimate = rows_of_a_refill(num_slots, fixed_s=cost.replay, round_s=round_s, rounds=rounds)
    ends = rows.prompt_lens.astype(np.int64)
    cached = np.minimum(max(0, rows.common_tokens - lookahead), ends - 1) // page_size * page_size
    uses: Counter[int] = Counter()
    found: dict[int, PassShape] = {}
    for size in SIZES:
        count = min(num_slots, max(1, round(size * estimate)))
        begins = range(0, len(ends) - count + 1, count)
        begins = begins[:: -(-len(begins) // SAMPLED) or 1]
        for begin in begins:
            own, lengths = ends[begin : begin + count], (ends - cached)[begin : begin + count]
            exact = PassShape(int(lengths.sum()), count, int(lengths.max()), int(own.max()), int(own.sum()), mode)
            shape = shapes.fitting(exact, cost)
            if shape is not None:
                tokens = shape.num_tokens
                found[tokens] = shape.with_bounds_of(found.get(tokens, shape))
                uses[tokens] += rows.num_rows / count / len(begins) / len(SIZES)  # type: ignore[assignment]
    return {found[tokens]: count for tokens, count in uses.most_common()}
