"""K = auto of a model with experts is not slower than any fixed K: a simulated job, whose rounds take what a formula says."""

from __future__ import annotations

import numpy as np
import pytest

from batchspec.draft.shapes import candidates
from batchspec.engine.rounds.draft_lengths import DraftLengths
from batchspec.engine.rounds.expert_reads import ExpertReads, counted
from batchspec.engine.step import RoundWidth
from batchspec.packing.planner import row_buckets

NUM_EXPERTS, TOP_K, LAYERS = 128, 4, 3
SLOTS, LONGEST, CONTEXT = 32, 3, 1000
EXPERT_S, FIXED_S, TOKEN_S, KEY_S, DRAFT_S = 1e-4, 1e-3, 1e-6, 2e-9, 5e-5


def read(tokens: int, correlation: float) -> float:
    return float(NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** (correlation * tokens)))


def seconds_of(num_rows: int, draft_len: int, live_rows: int, context_tokens: int, correlation: float) -> float:
    """Of a round: experts of live tokens, small products of all slots, attention, drafts."""
    experts_s = EXPERT_S * read(live_rows * (draft_len + 1), correlation)
    return experts_s + FIXED_S + TOKEN_S * num_rows * (draft_len + 1) + KEY_S * context_tokens + DRAFT_S * draft_len


def timed_before_the_job() -> tuple[DraftLengths, ExpertReads]:
    """Rounds over dead rows whose tokens are random choose experts independently of each other."""
    experts = ExpertReads(NUM_EXPERTS, TOP_K)
    experts.set_cost(EXPERT_S * 50, 50)
    lengths = DraftLengths(LONGEST, candidates(LONGEST), experts)
    for bucket in row_buckets(SLOTS):
        for k in lengths.choices:
            for prepares in (True,) if k else (True, False):
                lengths.set_base(bucket, k, seconds_of(bucket, k, bucket, 0, 1.0), prepare_next=prepares)
            experts.set_base(bucket, RoundWidth(k), counts(bucket * (k + 1), 1.0))
    return lengths, experts


def counts(tokens: int, correlation: float) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.full(LAYERS, max(TOP_K, round(read(tokens, correlation))), np.int32)


def job_s(draft_len: int | None, *, acceptance: float, correlation: float) -> float:
    """Seconds of three fillings of all slots, down to the last row; draft_len None: auto."""
    rng = np.random.default_rng(0)
    waiting = rng.integers(50, 400, 3 * SLOTS).tolist()
    live = [waiting.pop() for _ in range(SLOTS)]
    lengths, experts = timed_before_the_job()
    total_s, num_rounds = 0.0, 0
    while live:
        num_live, num_rounds = len(live), num_rounds + 1
        bucket = SLOTS if waiting else min(bucket for bucket in row_buckets(SLOTS) if bucket >= num_live)
        context = num_live * CONTEXT
        k = lengths.choose(bucket, context, live_rows=num_live)[0].draft_len if draft_len is None else draft_len
        taken_s = seconds_of(bucket, k, num_live, context, correlation)
        total_s += taken_s
        accepted = (rng.random((num_live, k)) < acceptance).cumprod(1).sum(1).astype(np.int32)
        if draft_len is None:
            if counted(num_rounds):
                experts.observe(counts(num_live * (k + 1), correlation), num_live * (k + 1))
            lengths.observe(k, accepted)
            lengths.timed(bucket, k, context, taken_s, prepare_next=True, live_rows=num_live)
        left = [tokens - 1 - int(own) for tokens, own in zip(live, accepted, strict=True)]
        ended = sum(tokens <= 0 for tokens in left)
        live = [tokens for tokens in left if tokens > 0] + [waiting.pop() for _ in range(min(ended, len(waiting)))]
    return total_s


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("correlation", [1.0, 0.3, 0.05])
def test_auto_is_as_fast_as_the_best_fixed_draft_length(correlation: float, acceptance: float) -> None:
    """Also where tokens choose alike: rounds over dead rows, whose tokens are random, read several times the experts of live rows
    then, and hide how many more a round with drafts reads than one without."""
    auto_s = job_s(None, acceptance=acceptance, correlation=correlation)
    for k in range(LONGEST + 1):
        assert auto_s <= 1.03 * job_s(k, acceptance=acceptance, correlation=correlation), k


def test_rounds_over_dead_rows_alone_would_choose_drafts_that_cost_more_than_they_give() -> None:
    """Before the first count the factor is 1."""
    lengths, experts = timed_before_the_job()
    lengths.observe(1, np.repeat(np.array([0, 1], np.int32), [6_000, 4_000]))
    before = lengths.scores(SLOTS, 0)
    experts.observe(counts(SLOTS, 0.1), SLOTS)
    after = lengths.scores(SLOTS, 0)
    tokens = before * [seconds_of(SLOTS, k, SLOTS, 0, 1.0) for k in lengths.choices]
    assert after == pytest.approx(tokens / [seconds_of(SLOTS, k, SLOTS, 0, 0.1) for k in lengths.choices], rel=0.05)
    assert before[1] > before[0]
    assert after[1] < after[0]


def test_few_live_rows_of_a_bucket_are_charged_for_their_own_experts() -> None:
    """The last row of 32 slots: a draft token reads four more experts beside the first four, not three more beside 81."""
    lengths, _ = timed_before_the_job()
    many, one = lengths.scores(SLOTS, 0), lengths.scores(SLOTS, 0, live_rows=1)
    assert one[0] > 4 * many[0]
    assert one[1] / one[0] < many[1] / many[0]
