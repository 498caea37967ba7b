"""How many slots a job gets, and how many drafts its rounds are planned with, by predicted times."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.config.schema import PackingConfig
from batchspec.draft.shapes import ChainShape, TreeShape, candidates
from batchspec.packing.expected_drafts import ASSUMED_OF, ExpectedDrafts, accepted_of_few
from batchspec.packing.job_time import GOOD_ENOUGH, best_round, choose_slots, decode_seconds
from batchspec.packing.planner import Demand, choose_batch, forecast
from batchspec.packing.rates import card_rates
from batchspec.tuning.cards import known_card
from tests.helpers.stand_ins import LLAMA_8B

GPU = torch.device("cuda")
LOOKUP, MTP, NONE = ExpectedDrafts(candidates(8), 0.8), ExpectedDrafts(candidates(3), 1.5), ExpectedDrafts((0,), 0.0)
CHAT = Demand(num_completions=2000, prompt_tokens=900, output_tokens=256, max_tokens=1500)
CARDS = {"H200": 120, "A100 80GB": 60, "L40S": 28}


def bound_by_reading(rows: int, num_drafts: int) -> float:
    """Every round takes 10 ms."""
    return 0.01


def bound_by_arithmetic(rows: int, num_drafts: int) -> float:
    """Ten microseconds per position."""
    return 1e-5 * rows * (num_drafts + 1)


@pytest.mark.parametrize("assumed", [0.0, 0.8, 1.5, 3.0])
def test_fewer_drafts_than_the_assumption_is_of_are_accepted_at_the_same_rate(assumed: float) -> None:
    """If all drafts of a fixed K = 1 were assumed to be accepted, it would look as good as K = 3 with 1.5 accepted drafts."""
    of_three = ExpectedDrafts((0, 1, 2, 3), accepted_of_few(assumed, ASSUMED_OF))
    assert of_three.accepted == pytest.approx(assumed)
    for count in (1, 2):
        alone = ExpectedDrafts((count,), accepted_of_few(assumed, count))
        assert alone.accepted_of(count) == pytest.approx(of_three.accepted_of(count))
    assert accepted_of_few(assumed, 8) == pytest.approx(assumed)


def shape_and_speed(card: str, demand: Demand, drafts: ExpectedDrafts) -> tuple[int, float]:
    """Slots, and output tokens per second of decoding."""
    rates, free = card_rates(known_card(card)), CARDS[card] * 10**9
    batch = choose_batch(
        PackingConfig(), LLAMA_8B, rates, demand, device=GPU, dtype=torch.bfloat16, drafts=drafts, free_bytes=free
    )
    ahead = forecast(batch, LLAMA_8B, rates, demand, drafts, dtype=torch.bfloat16)
    return batch.num_slots, demand.num_completions * demand.output_tokens / ahead.decode_s


@given(st.floats(0, 3), st.integers(4, 60))
def test_a_round_that_verifies_all_drafts_accepts_what_is_expected(accepted: float, most: int) -> None:
    drafts = ExpectedDrafts((0, most // 2, most), accepted)
    assert drafts.accepted_of(0) == 0
    assert drafts.accepted_of(most) == pytest.approx(accepted, abs=1e-6)
    assert drafts.accepted_of(most // 2) <= drafts.accepted_of(most)


def test_a_chain_may_verify_any_of_its_lengths_and_a_tree_all_nodes_or_none() -> None:
    assert ChainShape(6).verified_counts == ChainShape(6).draft_lens == (0, 1, 2, 3, 4, 6)
    tree = TreeShape(topk=4, depth=3, nodes=20)
    assert (tree.draft_lens, tree.verified_counts) == ((0, 3), (0, 20))


def test_rounds_take_drafts_only_if_they_bring_more_tokens_than_they_cost() -> None:
    assert best_round(8, MTP, bound_by_reading).num_drafts == 3
    assert best_round(8, MTP, bound_by_arithmetic).num_drafts == 0
    assert best_round(8, ExpectedDrafts((3,), 1.5), bound_by_arithmetic).num_drafts == 3  # its rounds do not choose


@pytest.mark.parametrize("seconds", [bound_by_reading, bound_by_arithmetic])
def test_the_predicted_time_is_that_of_slots_which_are_refilled_while_rows_wait(seconds: object) -> None:
    """Rows of many lengths: a slot that is free takes the next row, and a round costs what its live rows cost."""
    rng, slots = np.random.default_rng(3), 32
    lengths = rng.integers(1, 400, 1500)
    ends = [int(length) for length in lengths[:slots]]
    heapq.heapify(ends)
    last = list(ends)
    for length in lengths[slots:]:
        last.append(heapq.heappop(ends) + int(length))
        heapq.heappush(ends, last[-1])
    began, rounds, live = np.sort(last)[:-slots], max(last), 0.0
    full = int(np.sort(last)[-slots])  # from here on rows end and none begins
    assert len(began) == 1500 - slots
    for end in np.sort(last)[-slots:]:
        live += int(end) - full
    cost = partial(best_round, drafts=NONE, seconds=seconds)  # type: ignore[arg-type]
    simulated = full * cost(slots).seconds
    simulated += live * 1e-5 if seconds is bound_by_arithmetic else (rounds - full) * 0.01
    predicted = decode_seconds(slots, 1500, float(lengths.mean()), NONE, seconds)  # type: ignore[arg-type]
    assert predicted == pytest.approx(simulated, rel=0.03)


@given(st.integers(1, 40), st.integers(1, 100))
def test_rows_that_all_have_as_many_output_tokens_end_in_waves(slots: int, num_rows: int) -> None:
    ends = [0] * slots
    for _ in range(num_rows):
        heapq.heapreplace(ends, ends[0] + 7)
    live = [sum(end > wave * 7 for end in ends) for wave in range(max(ends) // 7)]
    for seconds in (bound_by_reading, bound_by_arithmetic):
        simulated = 7 * sum(seconds(rows, 0) for rows in live)
        assert decode_seconds(slots, num_rows, 7.0, NONE, seconds, equal=True) == pytest.approx(simulated)


def test_a_job_of_equal_outputs_gets_slots_that_its_rows_fill_to_the_end() -> None:
    equal = replace(CHAT, num_completions=768, max_tokens=1156, equal_outputs=True)
    assert max(-768 % shape_and_speed(card, equal, NONE)[0] for card in CARDS) < 8


def test_a_round_with_drafts_takes_the_drafters_reading_too() -> None:
    free, costly = ExpectedDrafts((0, 3), 1.5), ExpectedDrafts((0, 3), 1.5, (0, 3 * 10**9))
    assert [(free.bytes_of(count), costly.bytes_of(count)) for count in (0, 3)] == [(0, 0), (0, 3 * 10**9)]
    assert shape_and_speed("H200", CHAT, costly)[1] < shape_and_speed("H200", CHAT, free)[1]


def test_of_sizes_that_are_nearly_as_fast_the_smallest_is_chosen() -> None:
    assert choose_slots([1, 2, 4, 8, 16], 10**6, NONE, bound_by_reading) == 16
    assert choose_slots([1, 2, 4, 8, 16], 10**6, NONE, bound_by_arithmetic) == 1


def test_as_many_rows_as_a_job_has_get_slots_whether_or_not_they_are_a_power_of_two() -> None:
    few = Demand(num_completions=96, prompt_tokens=900, output_tokens=256, max_tokens=1500)
    assert {shape_and_speed(card, few, NONE)[0] for card in CARDS} == {96}


@pytest.mark.second
def test_a_drafter_that_may_not_pay_leaves_the_job_the_slots_that_it_needs_without_drafts() -> None:
    plain, drafted = (shape_and_speed("H200", CHAT, drafts)[0] for drafts in (NONE, LOOKUP))
    fixed = shape_and_speed("H200", CHAT, ExpectedDrafts((8,), 0.8))[0]
    assert drafted == plain > fixed


@pytest.mark.parametrize("demand", [CHAT, replace(CHAT, num_completions=172, prompt_tokens=200, output_tokens=900)])
@pytest.mark.parametrize("card", CARDS)
def test_a_plan_with_drafts_is_never_slower_than_one_without(card: str, demand: Demand) -> None:
    """Neither if drafts are accepted as expected, nor if none is."""
    rates = card_rates(known_card(card))
    batch = choose_batch(
        PackingConfig(), LLAMA_8B, rates, demand, device=GPU, dtype=torch.bfloat16, drafts=LOOKUP,
        free_bytes=CARDS[card] * 10**9,
    )
    slots, plain = shape_and_speed(card, demand, NONE)
    for drafts in (LOOKUP, LOOKUP.none_accepted):
        ahead = forecast(batch, LLAMA_8B, rates, demand, drafts, dtype=torch.bfloat16)
        speed = demand.num_completions * demand.output_tokens / ahead.decode_s
        assert speed > GOOD_ENOUGH * plain * min(1, batch.num_slots / slots)  # the logits of drafts need memory for rows
    assert batch.num_slots > 0.8 * slots
