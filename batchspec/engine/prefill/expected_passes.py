"""Estimates, before a job's first row enters a slot, which shapes its prefill passes will most likely have.

A refill comes once idle slots have cost as much as its fixed time F (`IdleSlots`). If rows take n rounds of
t seconds each in S slots, S / n rows end in a round, and m rounds after a refill the idle slots have cost t m^2 / 2n seconds of a
full batch. So a refill has

    S / n * m = S sqrt(2 F / (n t))

rows. n depends on acceptance, which is not known before the run; nor is the time that the device waits for the host, a part of F.
Therefore `expected_uses` cuts refills of several sizes around this estimate from the surveyed prompts, and counts the shapes
of their passes.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.shapes import PassShape, PassShapes
from batchspec.packed_batch import ExpectedRows

SIZES = (0.6, 0.8, 1.0, 1.25)
"""Numbers of rows of the considered refills, relative to the estimate. All are taken to be equally likely."""
SAMPLED = 200
"""Maximum number of refills of each size whose shapes are computed."""


def rows_of_a_refill(num_slots: int, *, fixed_s: float, round_s: float, rounds: float) -> float:
    """Number of rows of a refill.

    fixed_s  seconds of a refill that do not depend on its tokens
    round_s  seconds of a round
    rounds   number of rounds that a row takes
    """
    return min(num_slots, max(1.0, num_slots * math.sqrt(2 * fixed_s / (round_s * rounds))))


def expected_uses(
    rows: ExpectedRows, shapes: PassShapes, mode: SamplingMode, cost: PrefillCost, *,
    num_slots: int, draft_len: int, round_s: float, page_size: int,
) -> dict[PassShape, float]:
    """Shapes for the padded passes that the job will most likely have, one for each number of tokens, with the expected number of
    passes of each; the most frequent first.

    cost       in seconds, with the time of a replay
    draft_len  K; a round is assumed to accept half of its drafts
    round_s    seconds of a round over all slots
    """
    assert cost.replay is not None
    rounds = max(1.0, rows.output_tokens / (1 + draft_len / 2))
    estimate = rows_of_a_refill(num_slots, fixed_s=cost.replay, round_s=round_s, rounds=rounds)
    ends = rows.prompt_lens.astype(np.int64)
    # a page is shared only if the token after it is common too: see `prefix_hashes`
    cached = np.minimum(max(0, rows.common_tokens - 1), ends - 1) // page_size * page_size
    uses: defaultdict[int, float] = defaultdict(float)
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
                uses[tokens] += rows.num_rows / count / len(begins) / len(SIZES)
    return {found[tokens]: uses[tokens] for tokens in sorted(uses, key=uses.__getitem__, reverse=True)}
