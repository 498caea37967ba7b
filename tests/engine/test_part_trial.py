"""The trial of rounds that verify a part of their drafts: by what the run's own rounds made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchspec.engine.rounds import part_trial
from batchspec.engine.rounds.part_trial import BLOCK, FEWEST, HOLD, LEAST_ROUNDS, MOST, MOST_BLOCKS, WARM_UP, PartTrial, Turn


def play(trial: PartTrial, rounds: int, *, gain: float, noise: float = 0.0, seed: int = 0, drift: float = 0.0) -> list[Turn]:
    """Rounds of one second, read two rounds later, which make `gain` times as many tokens if they may verify a part.

    drift  relative growth of all tokens with each round
    """
    rng, turns = np.random.default_rng(seed), [trial.next_turn() for _ in range(2)]
    for number in range(rounds):
        turns.append(trial.next_turn())
        turn = turns[number]
        if turn.block is not None:
            tokens = (1 + gain * turn.may_verify_part) * (1 + noise * rng.normal()) * (1 + drift) ** number
            trial.add(turn.block, tokens, 1.0)
    return turns


@pytest.mark.parametrize(
    ("gain", "pays"), [(0.05, True), (0.02, True), (0.005, False), (0.0, False), (-0.02, False), (-0.3, False)]
)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_rounds_that_verify_a_part_pay_if_they_make_more_by_a_hundredth(gain: float, pays: bool, noise: float) -> None:
    trial = PartTrial()
    turns = play(trial, WARM_UP + 2 * BLOCK * (MOST + 1), gain=gain, noise=noise)
    assert trial.pays == pays
    assert set(turns[:WARM_UP]) == {Turn(False, True, None)}
    assert turns[-1] == Turn(pays, pays, None)
    trying = [turn for turn in turns if turn.block is not None]
    assert len(trying) >= 2 * BLOCK * FEWEST
    assert all(turn.counts_drafts for turn in trying)
    assert abs(sum(turn.may_verify_part for turn in trying) - len(trying) / 2) <= BLOCK


def test_a_large_difference_is_known_after_few_comparisons_and_a_small_one_is_not() -> None:
    """With rounds that vary by a tenth; a trial that ends without being sure takes the more likely answer."""
    soon, late = PartTrial(), PartTrial()
    lengths = [
        sum(turn.block is not None for turn in play(trial, WARM_UP + 2 * BLOCK * (MOST + 1), gain=gain, noise=0.1))
        for trial, gain in ((soon, -0.3), (late, 0.01))
    ]
    assert lengths[0] <= 2 * BLOCK * (FEWEST + 1)
    assert lengths[1] > 2 * lengths[0]
    assert not soon.pays


@pytest.mark.parametrize("drift", [-0.01, 0.01])
def test_rounds_that_grow_slower_or_faster_favour_neither(drift: float) -> None:
    """A hundredth a round is much: a row's context grows by less. A loss or gain of 3 % is still told."""
    for gain in (-0.03, 0.03):
        trial = PartTrial()
        play(trial, WARM_UP + 2 * BLOCK * (MOST + 1), gain=gain, drift=drift)
        assert trial.pays == (gain > 0)


def test_it_is_tried_again_and_what_pays_is_kept_until_it_loses() -> None:
    trial, whole = PartTrial(), WARM_UP + 2 * BLOCK * (MOST + 1)
    for gain, pays in ((0.05, True), (0.005, True), (-0.02, False), (0.005, False), (0.05, True)):
        turns = play(trial, HOLD + whole, gain=gain)
        assert trial.pays == pays, gain
        held = [turn for turn in turns if turn.block is None]
        assert len(held) >= HOLD - whole


def test_while_drafts_are_not_counted_none_is_verified_in_part() -> None:
    trial = PartTrial()
    turns = play(trial, 2 * HOLD, gain=-0.1)
    uncounted = [turn for turn in turns if not turn.counts_drafts]
    assert len(uncounted) >= HOLD
    assert not any(turn.may_verify_part for turn in uncounted)


def test_results_of_an_earlier_trial_are_dropped() -> None:
    """Their rounds were launched before it ended, or before a new model's rows."""
    trial = PartTrial()
    last = next(turn for turn in iter(trial.next_turn, None) if turn.block is not None)
    assert last.block is not None
    trial.restart()
    for _ in range(WARM_UP + 1):
        turn = trial.next_turn()
    assert turn.block is not None
    assert turn.block > last.block
    trial.add(last.block, math.nan, 1.0)
    assert not trial._sums


@pytest.mark.parametrize("measured", [0, LEAST_ROUNDS - 1])
def test_without_measured_rounds_it_ends_all_the_same(measured: int) -> None:
    """As where nearly every round follows a refill."""
    trial = PartTrial()
    for _ in range(WARM_UP + MOST_BLOCKS * BLOCK):
        turn = trial.next_turn()
        if turn.block is not None and (trial._at - WARM_UP) % BLOCK < measured:
            trial.add(turn.block, 9.0 if turn.may_verify_part else 1.0, 1.0)
    assert trial.next_turn() == Turn(False, False, None)


def test_constants_fit_together() -> None:
    """A trial is a small part of a long run, and blocks can be measured."""
    assert LEAST_ROUNDS < BLOCK
    assert WARM_UP + 2 * BLOCK * FEWEST < 0.1 * HOLD
    assert part_trial.MOST_BLOCKS * BLOCK < HOLD
