"""A draft length for each row: what rounds learn of their drafts, and the width that follows from it.

Simulated rounds, with the kernels' own arithmetic and made-up times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batchspec.draft.lookup import LookupDrafter
from batchspec.engine.rounds.draft_chances import DraftChances
from batchspec.engine.rounds.draft_lengths import LEAST_ROWS, DraftLengths
from batchspec.engine.rounds.part_trial import FEWEST, HOLD, MOST, PHASE_ROUNDS, WARM_UP
from batchspec.engine.rounds.round_widths import partial_widths
from batchspec.engine.rounds.survival import Survival
from batchspec.engine.step import RoundWidth
from batchspec.kernels.rounds.allocate_drafts import LEVELS, PER_HALF
from batchspec.kernels.sampling.argmax import CONFIDENCE_BINS, PROBABILITIES
from tests.helpers.row_lengths import trial_won

K = 3
GOOD, BAD, PLAIN = (0.9, 8 / 9, 7 / 8), (0.3, 1 / 3, 0.3), (0.6, 0.28 / 0.6, 0.12 / 0.28)
"""Chances of drafts if those before them were accepted."""


def seconds_of(num_rows: int, width: RoundWidth) -> float:
    """A round whose products wait for weights up to 200 positions and for arithmetic above them."""
    positions = width.num_positions(num_rows) or num_rows * (width.draft_len + 1)
    return 12.0 + 0.02 * max(0, positions - 200) + 0.3 * width.draft_len


def chances_of(kinds: tuple[tuple[float, ...], ...], num_rows: int) -> NDArray[np.float64]:
    """float64 [R, K]"""
    return np.array([kinds[row % len(kinds)] for row in range(num_rows)])


@dataclass
class Simulated:
    """Rounds over rows whose drafts have these chances, of which the confidence knows the logit with some noise."""

    kinds: tuple[tuple[float, ...], ...]
    num_rows: int = 256
    row_lengths: bool = True
    noise: float = 0.7
    later: tuple[int, tuple[tuple[float, ...], ...]] | None = None
    """A round, and the kinds of rows from it on."""
    host_s: Callable[[RoundWidth], float] = lambda width: 0.0
    """Seconds of the host in a round, which were not measured before the first one."""
    tokens: int = 0
    seconds: float = 0.0
    widths: list[RoundWidth] = field(default_factory=list)

    def run(self, rounds: int, *, seed: int = 0, skip: int = 100) -> float:
        """Tokens a second after the first `skip` rounds."""
        rng, device = np.random.default_rng(seed), torch.device("cpu")
        drafter = LookupDrafter(K, min_ngram=1, max_ngram=2)
        drafter.prior_chances = PROBABILITIES
        self.chances = DraftChances(drafter, self.num_rows, device)
        lengths = DraftLengths(K, row_lengths=self.row_lengths)
        for width in lengths.widths(self.num_rows):
            for prepare_next in (False, True):
                lengths.times.set_base(self.num_rows, width, seconds_of(self.num_rows, width), prepare_next=prepare_next)
        chance = chances_of(self.kinds, self.num_rows)
        live = torch.ones(self.num_rows, dtype=torch.int32)
        for number in range(rounds):
            if self.later is not None and number == self.later[0]:
                chance = chances_of(self.later[1], self.num_rows)
            width, _ = lengths.choose(self.num_rows, 0)
            turn = lengths.turn
            draft_len = width.draft_len
            self.widths.append(width)
            odds = np.log(chance / (1 - chance)) + rng.normal(0, self.noise, chance.shape)
            assert drafter.confidence is not None
            drafter.confidence.copy_(torch.from_numpy(np.clip(np.floor(4 * (odds + 3)), 0, CONFIDENCE_BINS - 1)))
            verified = torch.full((self.num_rows,), draft_len, dtype=torch.int32)
            taken = np.zeros(self.num_rows, np.int32)
            if draft_len:
                most = width.num_positions(self.num_rows) or self.num_rows * (draft_len + 1)
                levels = self.chances.allocate(live, verified, width=draft_len, num_positions=most)
                right = (rng.random((self.num_rows, draft_len)) < chance[:, :draft_len]).cumprod(1).sum(1)
                taken = np.minimum(right, verified.numpy()).astype(np.int32)
                log = torch.zeros(self.num_rows, draft_len + 5, dtype=torch.int32)
                log[:, 0], log[:, 1], log[:, 2] = torch.from_numpy(taken), verified, torch.from_numpy(taken + 1)
                self.chances.learn(log)
                if turn.counts_drafts:
                    lengths.observe_levels(levels.numpy(), self.num_rows)
            if width.mean_len is None:
                lengths.observe(draft_len, taken)
            made, took = self.num_rows + int(taken.sum()), seconds_of(self.num_rows, width) + self.host_s(width)
            if turn.phase is not None:
                lengths.made(turn.phase, self.num_rows, made / self.num_rows, took)
            if number >= skip:
                self.tokens += made
                self.seconds += took
        return self.tokens / self.seconds


@pytest.mark.second
def test_rows_of_two_kinds_gain_by_lengths_of_their_own() -> None:
    lengths, one_k = Simulated((GOOD, BAD)), Simulated((GOOD, BAD), row_lengths=False)
    gain = lengths.run(800, skip=300) / one_k.run(800, skip=300)
    assert gain > 1.08
    assert sum(width.mean_len is not None for width in lengths.widths[300:]) > 0.9 * len(lengths.widths[300:])


@pytest.mark.second
@pytest.mark.parametrize("extra", [0.5, 2.0])
def test_where_lengths_of_their_own_cost_more_than_was_measured_before_the_run_they_are_given_up(extra: float) -> None:
    """As where the host takes longer for such rounds: by the times of their graphs alone they seem to gain a tenth."""

    def host_s(width: RoundWidth) -> float:
        return extra * seconds_of(256, width) if width.mean_len is not None else 0.0

    lengths = Simulated((GOOD, BAD), host_s=host_s)
    one_k = Simulated((GOOD, BAD), row_lengths=False)
    loss = lengths.run(1200, skip=300) / one_k.run(1200, skip=300)
    assert loss > 0.99
    assert {width.mean_len for width in lengths.widths[300:]} == {None}


@pytest.mark.second
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_rows_of_one_kind_lose_nothing(noise: float) -> None:
    """Confidence that knows nothing of the outcome, too."""
    gain = Simulated((PLAIN,), noise=noise).run(1500) / Simulated((PLAIN,), row_lengths=False, noise=noise).run(1500)
    assert gain > 0.995


@pytest.mark.second
@pytest.mark.parametrize("row_lengths", [True, False])
def test_rows_that_accept_more_than_those_before_them_are_noticed_soon(row_lengths: bool) -> None:
    """For a thousand rounds no draft was worth it, so K was 0. Then drafts are accepted; a probe comes every 64 rounds."""
    hopeless = (0.02, 0.02, 0.02)
    changed = Simulated((hopeless,), row_lengths=row_lengths, later=(1000, (GOOD, BAD)))
    changed.run(1400)
    assert sum(width.draft_len == 0 for width in changed.widths[100:1000]) > 800
    assert sum(width.draft_len > 0 for width in changed.widths[1150:]) > 240


@pytest.mark.parametrize(("gain", "partial"), [(1.04, False), (1.07, True)])
def test_choosing_among_drafts_must_promise_a_twentieth_more(gain: float, partial: bool) -> None:
    """What it gains goes to rows that end first in any case. Half of the rows accept their first draft, and no other is accepted:
    that half verifies one draft, in a round that is faster by `gain` than one in which all rows do."""
    levels = np.zeros((K, LEVELS), np.int32)
    levels[0, 0], levels[0, LEVELS - 1], levels[1:, LEVELS - 1] = 128, 128, 256
    lengths = DraftLengths(K, row_lengths=True)
    trial_won(lengths)
    for width in lengths.widths(256):
        seconds = 1.0 if width == RoundWidth(1) else 1.0 / gain if width == RoundWidth(2, 0.5) else 9.0
        for prepare_next in (False, True):
            lengths.times.set_base(256, width, seconds, prepare_next=prepare_next)
    lengths.observe_levels(levels, 256)
    assert lengths.choose(256, 0)[0] == (RoundWidth(2, 0.5) if partial else RoundWidth(1))


@pytest.mark.second
def test_later_drafts_are_counted_even_if_one_draft_of_each_row_beats_two() -> None:
    """Only then can choosing among three drafts of each row be known to pay, by a tenth more than any K."""
    lengths = Simulated((GOOD, BAD))
    lengths.run(400)
    whole = Simulated((GOOD, BAD), row_lengths=False)
    whole.run(400)
    assert sum(width.draft_len == 1 for width in whole.widths[300:]) > 90
    assert lengths.widths[:50].count(RoundWidth(K)) >= 1
    assert sum(width == RoundWidth(K, 1.5) for width in lengths.widths[300:]) > 90


def test_counts_from_before_a_time_without_counting_are_forgotten() -> None:
    """Meanwhile K follows from the shares of accepted drafts alone."""
    lengths = DraftLengths(K, row_lengths=True)
    for width, prepare_next in itertools.product(lengths.widths(64), (False, True)):
        lengths.times.set_base(64, width, 1.0 + 0.1 * width.verified, prepare_next=prepare_next)
    levels = np.zeros((K, LEVELS), np.int32)
    levels[:, 0] = 64
    lengths.observe_levels(levels, 64)
    assert lengths.choose(64, 0)[0] == RoundWidth(K), "all drafts survive, as was counted"
    lengths._trial._end(pays=False)
    lengths.observe(K, np.zeros(4096, np.int32))
    found = [(lengths.choose(64, 0)[0].draft_len, lengths.turn.counts_drafts) for _ in range(HOLD)]
    assert [counts for _, counts in found[2:]] == [False] * (HOLD - 2)
    assert sum(draft_len == 0 for draft_len, _ in found) > 0.9 * HOLD, "no draft was accepted, as was observed"
    assert lengths._survival.known_len == K
    while not lengths.turn.counts_drafts:
        lengths.choose(64, 0)
    assert lengths._survival.known_len == 0


def timed_lengths(*row_buckets: int) -> DraftLengths:
    """Rounds over so many rows take a second, whatever they verify."""
    lengths = DraftLengths(K, row_lengths=True)
    for num_rows, prepare_next in itertools.product(row_buckets, (False, True)):
        for width in lengths.widths(num_rows):
            lengths.times.set_base(num_rows, width, 1.0, prepare_next=prepare_next)
    return lengths


def phases_of(lengths: DraftLengths, num_rows: int, rounds: int) -> list[int | None]:
    found = list[int | None]()
    for _ in range(rounds):
        lengths.choose(num_rows, 0)
        found.append(lengths.turn.phase)
    return found


def test_rounds_of_few_rows_belong_to_no_phase_of_a_trial() -> None:
    """Neither is the first round over other rows than those that its turn was taken for."""
    lengths = timed_lengths(4, 32, 64)
    *warm_up, first, second, third = phases_of(lengths, 64, WARM_UP + 3)
    assert set(warm_up) == {None}
    assert first is not None
    assert first == second == third
    assert set(phases_of(lengths, 4, 200)) == {None}
    assert phases_of(lengths, 64, 3) == [None, first, first]
    assert phases_of(lengths, 32, 3) == [None, first, first + 1]


def test_phases_of_two_runs_are_not_compared() -> None:
    """The last rounds of a run make less. Phases that begin in the next run are compared."""
    lengths = timed_lengths(64)
    for tokens, rounds in ((1.0, WARM_UP + PHASE_ROUNDS), (64.0, 4 * PHASE_ROUNDS)):
        lengths.restart()
        for phase in phases_of(lengths, 64, rounds):
            if phase is not None:
                lengths.made(phase, 64, tokens, 1.0)
    assert lengths._trial._gains == [0.0]


def test_the_last_rounds_of_a_run_do_not_decide_the_trial_of_the_next_one() -> None:
    """Verifying a part loses a twentieth; the run before ended with 200 rounds of 4 rows within a phase."""
    lengths = timed_lengths(4, 64)
    for num_rows, rounds in ((64, WARM_UP + 3), (4, 200), (64, 4 * PHASE_ROUNDS * MOST)):
        lengths.restart()
        for _ in range(rounds):
            lengths.choose(num_rows, 0)
            if lengths.turn.phase is not None:
                lengths.made(lengths.turn.phase, num_rows, 1 - 0.05 * lengths.turn.may_verify_part, 1.0)
    assert lengths._trial._ended
    assert not lengths._trial.pays
    assert lengths._trial._gains == pytest.approx([math.log(0.95)] * FEWEST)


def test_few_rows_verify_all_their_drafts() -> None:
    few = Simulated((GOOD, BAD), num_rows=LEAST_ROWS - 1)
    few.run(300)
    assert {width.mean_len for width in few.widths} == {None}


def test_chances_are_those_of_the_outcomes_whatever_the_confidence_says() -> None:
    """Calibration: of the drafts with a confidence, the learnt share is accepted."""
    simulated = Simulated((GOOD, BAD), noise=1.5)
    simulated.run(400)
    tried, accepted = simulated.chances.tried[0], simulated.chances.accepted[0]
    often = tried > 300
    assert often.sum() > 8
    bins = torch.arange(CONFIDENCE_BINS)
    odds = (bins + 0.5) / 4 - 3
    logits = [math.log(kind[0] / (1 - kind[0])) for kind in (GOOD, BAD)]
    weight = torch.stack([torch.exp(-0.5 * ((odds - logit) / 1.5) ** 2) for logit in logits])
    expected = (weight * torch.tensor([[GOOD[0]], [BAD[0]]])).sum(0) / weight.sum(0)
    assert (accepted / tried)[often].tolist() == pytest.approx(expected[often].tolist(), abs=0.06)


def test_survivors_of_the_best_places_are_counted() -> None:
    """Two rows: drafts that survive with 1, 1/2 and with 1/2, 1/4."""
    levels = np.zeros((2, LEVELS), np.int32)
    levels[0, 0], levels[0, PER_HALF], levels[1, PER_HALF], levels[1, 2 * PER_HALF] = 1, 1, 1, 1
    survival = Survival(4)
    assert survival.known_len == 0
    survival.observe(levels, 2)
    assert survival.known_len == 2
    assert survival.accepted(1, 0.5) == pytest.approx(0.5)
    assert survival.accepted(1, 1.0) == pytest.approx(0.75)
    assert survival.accepted(2, 1.0) == pytest.approx((1 + 0.5) / 2)
    assert survival.accepted(2, 1.75) == pytest.approx((1 + 0.5 + 0.5 + 0.125) / 2)
    assert survival.accepted(2, 9.0) == pytest.approx((1 + 0.5 + 0.5 + 0.25) / 2), "there are no more drafts"
    survival.forget()
    assert survival.known_len == 0


@pytest.mark.parametrize("draft_lens", [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 6, 8)])
def test_a_partial_round_verifies_fewer_drafts_than_it_has(draft_lens: tuple[int, ...]) -> None:
    found: list[Any] = partial_widths(draft_lens)
    assert found
    for width in found:
        assert 0 < width.mean_len < width.draft_len
        assert 16 < width.num_positions(16) < 16 * (width.draft_len + 1)
