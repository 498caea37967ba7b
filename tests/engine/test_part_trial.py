"""The trial of rounds that verify a part of their drafts: by what the run's own rounds made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from batchspec.engine.rounds import part_trial
from batchspec.engine.rounds.part_trial import (
    FEWEST,
    HOLD,
    LEAST_ROUNDS,
    MOST,
    MOST_PHASES,
    PHASE_ROUNDS,
    WARM_UP,
    PartTrial,
    Turn,
)


def play(trial: PartTrial, rounds: int, *, gain: float, noise: float = 0.0, seed: int = 0, drift: float = 0.0) -> list[Turn]:
    """Rounds of one second, read two rounds later, which make `gain` times as many tokens if they may verify a part.

    drift  relative growth of all tokens with each round
    """
    rng, turns = np.random.default_rng(seed), [trial.next_turn() for _ in range(2)]
    for number in range(rounds):
        turns.append(trial.next_turn())
        turn = turns[number]
        if turn.phase is not None:
            tokens = (1 + gain * turn.may_verify_part) * (1 + noise * rng.normal()) * (1 + drift) ** number
            trial.add(turn.phase, 64, tokens, 1.0)
    return turns


@pytest.mark.parametrize(
    ("gain", "pays"), [(0.05, True), (0.02, True), (0.005, False), (0.0, False), (-0.02, False), (-0.3, False)]
)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_rounds_that_verify_a_part_pay_if_they_make_more_by_a_hundredth(gain: float, pays: bool, noise: float) -> None:
    trial = PartTrial()
    turns = play(trial, WARM_UP + 2 * PHASE_ROUNDS * (MOST + 1), gain=gain, noise=noise)
    assert trial.pays == pays
    assert set(turns[:WARM_UP]) == {Turn(False, True, None)}
    assert turns[-1] == Turn(pays, pays, None)
    trying = [turn for turn in turns if turn.phase is not None]
    assert len(trying) >= 2 * PHASE_ROUNDS * FEWEST
    assert all(turn.counts_drafts for turn in trying)
    assert abs(sum(turn.may_verify_part for turn in trying) - len(trying) / 2) <= PHASE_ROUNDS


def test_a_large_difference_is_known_after_few_comparisons_and_a_small_one_is_not() -> None:
    """With rounds that vary by a tenth; a trial that ends without being sure takes the more likely answer."""
    soon, late = PartTrial(), PartTrial()
    lengths = [
        sum(turn.phase is not None for turn in play(trial, WARM_UP + 2 * PHASE_ROUNDS * (MOST + 1), gain=gain, noise=0.1))
        for trial, gain in ((soon, -0.3), (late, 0.01))
    ]
    assert lengths[0] <= 2 * PHASE_ROUNDS * (FEWEST + 1)
    assert lengths[1] > 2 * lengths[0]
    assert not soon.pays


@pytest.mark.parametrize("drift", [-0.01, 0.01])
def test_rounds_that_grow_slower_or_faster_favour_neither(drift: float) -> None:
    """A hundredth a round is much: a row's context grows by less. A loss or gain of 3 % is still told."""
    for gain in (-0.03, 0.03):
        trial = PartTrial()
        play(trial, WARM_UP + 2 * PHASE_ROUNDS * (MOST + 1), gain=gain, drift=drift)
        assert trial.pays == (gain > 0)


def test_it_is_tried_again_and_what_pays_is_kept_until_it_loses() -> None:
    trial, whole = PartTrial(), WARM_UP + 2 * PHASE_ROUNDS * (MOST + 1)
    for gain, pays in ((0.05, True), (0.005, True), (-0.02, False), (0.005, False), (0.05, True)):
        turns = play(trial, HOLD + whole, gain=gain)
        assert trial.pays == pays, gain
        held = [turn for turn in turns if turn.phase is None]
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
    last = next(turn for turn in iter(trial.next_turn, None) if turn.phase is not None)
    assert last.phase is not None
    trial.restart()
    for _ in range(WARM_UP + 1):
        turn = trial.next_turn()
    assert turn.phase is not None
    assert turn.phase > last.phase
    trial.add(last.phase, 64, math.nan, 1.0)
    assert not trial._measured


@pytest.mark.parametrize("measured", [0, LEAST_ROUNDS - 1])
def test_without_measured_rounds_it_ends_all_the_same(measured: int) -> None:
    """As where nearly every round follows a refill."""
    trial = PartTrial()
    for _ in range(WARM_UP + MOST_PHASES * PHASE_ROUNDS):
        turn = trial.next_turn()
        if turn.phase is not None and (trial._at - WARM_UP) % PHASE_ROUNDS < measured:
            trial.add(turn.phase, 64, 9.0 if turn.may_verify_part else 1.0, 1.0)
    assert trial.next_turn() == Turn(False, False, None)


def test_where_too_few_phases_could_be_compared_what_won_before_is_kept() -> None:
    trial = PartTrial()
    trial.pays = True
    for _ in range(WARM_UP + MOST_PHASES * PHASE_ROUNDS):
        trial.next_turn()
    assert trial.next_turn() == Turn(True, True, None)


def test_a_trial_that_ends_with_some_comparisons_takes_the_likelier_answer() -> None:
    """They differ too much to be sure of, and most of the phases could not be measured."""
    trial, rng = PartTrial(), np.random.default_rng(0)
    trial.pays = True
    for number in range(WARM_UP + MOST_PHASES * PHASE_ROUNDS):
        turn = trial.next_turn()
        if turn.phase is not None and number < WARM_UP + 2 * PHASE_ROUNDS * (FEWEST + 2):
            trial.add(turn.phase, 64, math.exp(-0.5 * turn.may_verify_part + 3 * rng.normal()), 1.0)
    assert len(trial._gains) >= FEWEST
    assert not trial._ended
    assert float(np.mean(trial._gains)) < 0
    assert trial.next_turn() == Turn(False, False, None)


@pytest.mark.parametrize("later", [0, 1])
def test_phases_over_different_row_buckets_are_not_compared(later: int) -> None:
    """Neither where a bucket ends with a phase, nor where it ends within one."""
    trial = PartTrial()
    for _ in range(WARM_UP):
        trial.next_turn()
    for number in range(2 * PHASE_ROUNDS * FEWEST):
        turn, rows = trial.next_turn(), 64 if (number + later) // PHASE_ROUNDS % 2 else 32
        assert turn.phase is not None
        trial.add(turn.phase, rows, float(rows), 1.0)
    assert not trial._gains


@pytest.mark.parametrize("part", [True, False])
def test_phases_that_kept_no_token_are_not_compared(part: bool) -> None:
    trial = PartTrial()
    for _ in range(WARM_UP + 2 * PHASE_ROUNDS * FEWEST):
        turn = trial.next_turn()
        if turn.phase is not None:
            trial.add(turn.phase, 64, float(turn.may_verify_part == part), 1.0)
    assert not trial._gains


def test_constants_fit_together() -> None:
    """A trial is a small part of a long run, and phases can be measured."""
    assert LEAST_ROUNDS < PHASE_ROUNDS
    assert WARM_UP + 2 * PHASE_ROUNDS * FEWEST < 0.1 * HOLD
    assert part_trial.MOST_PHASES * PHASE_ROUNDS < HOLD
