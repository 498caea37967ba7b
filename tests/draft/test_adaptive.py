"""The draft length of a round: the one that promises the most tokens a second, found from any start and kept in view."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.draft.shapes import candidates
from batchspec.engine.loop.run_times import RoundClock, RoundTime
from batchspec.engine.rounds.draft_lengths import (
    HALF_LIFE_ROWS,
    LEAST_WEIGHT,
    PRIOR_RATE,
    PRIOR_ROWS,
    PROBE_EVERY,
    PROBE_SHARE,
    DraftLengths,
    choices_of,
)
from batchspec.engine.rounds.records import PendingResult
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.step import RoundWidth
from batchspec.kernels.rounds.allocate_drafts import LEVELS
from tests.helpers.row_lengths import trial_won

ROWS = 64


def chosen(
    rates: list[float], costs: list[float], *, rounds: int = 3000, seed: int = 0, attention: list[float] | None = None
) -> np.ndarray:
    """Draft lengths of each round; rates[k]: share that accepts draft k after accepted ones; costs[K]: seconds of a round over
    dead rows, attention[K]: what live ones add."""
    rng = np.random.default_rng(seed)
    lengths = DraftLengths(len(rates))
    for k, cost in enumerate(costs):
        lengths.set_base(ROWS, k, cost)
    taken = []
    for _ in range(rounds):
        k = lengths.choose(ROWS, 1000)[0].draft_len
        kept = np.cumprod(rng.random((ROWS, k)) < np.array(rates[:k]), axis=1).sum(axis=1) if k else np.zeros(ROWS)
        lengths.observe(k, kept.astype(np.int32))
        lengths.timed(ROWS, k, 1000, costs[k] + (attention[k] if attention else 0.0))
        taken.append(k)
    return np.array(taken)


def expected(rates: list[float], costs: list[float]) -> np.ndarray:
    tokens = 1 + np.concatenate(([0.0], np.cumprod(rates).cumsum()))
    speeds: np.ndarray = tokens / np.array(costs)
    return speeds


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=6)), max_size=6))
def test_acceptance_is_counted_as_row_by_row(rounds: list[tuple[int, list[int]]]) -> None:
    """Rounds of up to four drafts; of each row how many it accepted. p_k is kept / tried, with a prior and a half-life."""
    lengths = DraftLengths(4, choices=(0, 1, 2, 3, 4))
    for k in range(5):
        lengths.set_base(ROWS, k, 1.0)
    tried, kept = np.full(4, PRIOR_ROWS), np.full(4, PRIOR_RATE * PRIOR_ROWS)
    for draft_len, drawn in rounds:
        accepted = [min(count, draft_len) for count in drawn]
        lengths.choose(ROWS, 0, live_rows=1000)
        lengths.observe(draft_len, np.array(accepted, np.int32))
        rates, tried = kept / tried, np.maximum(LEAST_WEIGHT, 0.5 ** (1000 / HALF_LIFE_ROWS) * tried)
        kept = rates * tried
        for k in range(draft_len):
            tried[k] += sum(count >= k for count in accepted)
            kept[k] += sum(count > k for count in accepted)
    assert lengths.scores(ROWS, 0) == pytest.approx(expected(list(kept / tried), [1.0] * 5), rel=1e-12)


def test_a_row_that_waits_after_a_right_draft_has_rejected_none() -> None:
    """Of 1,000 rows all drafts are right, and every second one waits after its second: its log counts one draft as accepted."""
    lengths = DraftLengths(3, choices=(0, 1, 2, 3))
    for k in range(4):
        lengths.set_base(ROWS, k, 1.0)
    waits = np.arange(1000) % 2 == 0
    lengths.observe(3, np.where(waits, 1, 3).astype(np.int32), waits)
    tried = PRIOR_ROWS + np.array([1000, 1000, 500])
    kept = PRIOR_RATE * PRIOR_ROWS + np.array([1000, 1000, 500])
    assert lengths.scores(ROWS, 0) == pytest.approx(expected(list(kept / tried), [1.0] * 4), rel=1e-12)


@pytest.mark.parametrize(
    ("rates", "costs", "best"),
    [
        ([0.9, 0.9, 0.9], [1.0, 1.1, 1.2, 1.3], 3),
        ([0.6, 0.47, 0.43], [1.0, 1.1, 1.2, 1.4], 2),
        ([0.6, 0.47, 0.43], [1.0, 1.3, 1.8, 2.3], 1),
        ([0.3, 0.3, 0.3], [1.0, 1.5, 2.0, 2.5], 0),
    ],
)
def test_the_best_length_is_found_and_kept(rates: list[float], costs: list[float], best: int) -> None:
    late = chosen(rates, costs)[1000:]
    assert np.argmax(expected(rates, costs)) == best
    assert (late == best).mean() > 0.95


def test_what_drafts_cost_in_attention_is_not_charged_to_rounds_without() -> None:
    """256 rows of 1,280 tokens of an 8B model, in ms, and drafts that are kept one time in ten: nothing beats K = 0, where
    attention is cheapest, which only a probe of K = 0 shows."""
    base, attention = [7.6, 10.5, 13.0, 15.5], [10.7, 13.2, 15.0, 17.0]
    late = chosen([0.1, 0.2, 0.6], base, attention=attention)[200:]
    assert (late == 0).mean() > 0.95


@pytest.mark.parametrize("cost", [3.0, 1.2])
def test_no_drafts_are_found_to_pay_where_every_length_costs_the_same(cost: float) -> None:
    """A tree verifies all of its nodes whatever its depth: no step to the length beside leads towards 0."""
    costs, attention = [1.0, *[cost] * 6], [1.0, *[8.0] * 6]
    late = chosen([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], costs, attention=attention)[300:]
    assert (late == 0).mean() > 0.95


@pytest.mark.parametrize(
    ("rates", "costs", "attention", "shares"),
    [
        ([0.3, 0.3], [1.0, 1.5, 2.0], 0.0, {1: 1.0}),
        ([0.1, 0.1], [1.0, 1.5, 2.0], 1.0, {1: 1.0}),
        ([0.7, 0.2, 0.2], [1.0, 1.2, 1.8, 2.4], 1.0, {0: 0.5, 2: 0.5}),
        ([0.7, 0.7, 0.2], [1.0, 1.2, 1.4, 2.4], 1.0, {0: 1 / 3, 1: 1 / 3, 3: 1 / 3}),
    ],
)
def test_one_round_in_sixty_four_probes_another_length(
    rates: list[float], costs: list[float], attention: float, shares: dict[int, float]
) -> None:
    """At the next longer one, the next shorter one and none, in turn."""
    late = chosen(rates, costs, rounds=64 * 40, attention=[attention] * len(costs))[64 * 10 :]
    best = int(np.argmax(expected(rates, [cost + attention for cost in costs])))
    assert set(late.tolist()) == {best, *shares}
    for length, share in shares.items():
        assert (late == length).sum() == pytest.approx(share * len(late) / PROBE_EVERY, abs=1)


@pytest.mark.parametrize(("cost", "looked_at"), [(2.0, True), (2.25, False)])
def test_a_length_that_would_not_pay_with_all_its_drafts_accepted_is_never_probed(cost: float, looked_at: bool) -> None:
    """One draft makes 1.7 tokens in 1.2 s; two could make 3."""
    assert (2 in chosen([0.7, 0.0], [1.0, 1.2, cost])) == looked_at


@pytest.mark.second
def test_probes_of_an_expensive_length_cost_one_percent_of_all_rounds() -> None:
    """A round with the tree takes as long as 8.5 rounds without drafts, and one draft token is accepted."""
    lengths, rounds = DraftLengths(8, choices=(0, 8)), 20_000
    for k, cost in ((0, 1.0), (8, 8.5)):
        lengths.set_base(ROWS, k, cost)
    probes = 0
    for _ in range(rounds):
        k = lengths.choose(ROWS, 0)[0].draft_len
        lengths.observe(k, np.full(ROWS, min(k, 1), np.int32))
        probes += k == 8
    lost = probes * (8.5 - 2.0)
    assert 0.8 * PROBE_SHARE * rounds < lost < 1.2 * PROBE_SHARE * rounds


def test_lengths_are_probed_more_often_while_they_are_new() -> None:
    """Twice each, the one that promises most first; to another head they are new again."""
    lengths = DraftLengths(3)
    for k, cost in enumerate([1.0, 1.2, 1.4, 2.4]):
        lengths.set_base(ROWS, k, cost)
        lengths.timed(ROWS, k, 1000, cost + 1.0)
    taken = {place: k for place in range(1, 201) if (k := lengths.choose(ROWS, 1000)[0].draft_len) != 2}
    assert taken == {8: 1, 16: 1, 24: 3, 32: 3, 40: 0, 48: 0, 192: 3}
    lengths.forget()
    taken = {place: k for place in range(201, 257) if (k := lengths.choose(ROWS, 1000)[0].draft_len) != 2}
    assert taken == {208: 1, 216: 1, 224: 3, 232: 3, 240: 0, 248: 0}


def test_a_probe_is_next_to_the_length_that_pays_now() -> None:
    """Second drafts are lost in masses just before the eighth round, which tries two drafts, not three."""
    lengths = DraftLengths(2)
    for k, cost in enumerate([1.0, 1.2, 1.4]):
        lengths.set_base(ROWS, k, cost)
    taken = [lengths.choose(ROWS, 0)[0].draft_len for _ in range(6)]
    lengths.observe(2, np.ones(10_000, np.int32))
    taken += [lengths.choose(ROWS, 0)[0].draft_len for _ in range(3)]
    assert taken == [2] * 7 + [2, 1]


@pytest.mark.parametrize(("gain", "taken"), [(1.003, 1), (1.007, 0)])
def test_another_draft_length_is_chosen_if_its_estimate_is_half_a_percent_better(gain: float, taken: int) -> None:
    """At first the longest one is the present one."""
    lengths = DraftLengths(1)
    for k, cost in enumerate((1.0, 1.7 * gain)):
        lengths.set_base(ROWS, k, cost)
    assert lengths.choose(ROWS, 0)[0].draft_len == taken


def test_attention_of_few_rows_does_not_speak_of_many() -> None:
    """Launches are most of it there. A length seen among few rows alone is judged by the nearest one that many rows took."""
    lengths = DraftLengths(3)
    for rows, k in itertools.product((8, 1024), range(4)):
        lengths.set_base(rows, k, 3.0 + k)
    lengths.timed(8, 3, 1_000, 6.6)
    lengths.timed(1024, 2, 170_000, 6.0)
    tokens = lengths.scores(8, 0) * np.array([3.0, 4.0, 5.0, 6.0])
    assert tokens / lengths.scores(1024, 170_000) == pytest.approx([4.0, 5.0, 6.0, 7.0])
    assert tokens / lengths.scores(8, 1_000) == pytest.approx([3.6, 4.6, 5.6, 6.6])


def test_attention_of_a_length_that_was_never_timed_is_like_that_of_the_nearest_that_was() -> None:
    lengths = DraftLengths(6)
    for k in lengths.choices:
        lengths.set_base(ROWS, k, 1.0)
    lengths.timed(ROWS, 1, 1000, 1.25)
    lengths.timed(ROWS, 4, 1000, 1.5)
    seconds = lengths.scores(ROWS, 0) / lengths.scores(ROWS, 1000)
    assert dict(zip(lengths.choices, seconds, strict=True)) == pytest.approx({0: 1.25, 1: 1.25, 2: 1.25, 3: 1.5, 4: 1.5, 6: 1.5})


@pytest.mark.parametrize(("rows", "added"), [(256, 0.5), (16, 0.5), (8, 1.0)])
def test_what_a_length_takes_beside_another_is_learnt_from_a_similar_number_of_rows(rows: int, added: float) -> None:
    """There its attention took half as long as that of three drafts, and here that of three drafts took a second. Among few rows
    launches are most of it, so nothing is learnt from these."""
    lengths = DraftLengths(3)
    for num_rows, k in itertools.product((rows, ROWS), range(4)):
        lengths.set_base(num_rows, k, 1.0)
    lengths.timed(rows, 3, 1000, 1.0 + 4.0)
    lengths.timed(rows, 1, 1000, 1.0 + 2.0)
    lengths.timed(ROWS, 3, 1000, 1.0 + 1.0)
    seconds = lengths.scores(ROWS, 0) / lengths.scores(ROWS, 1000)
    assert seconds[[1, 3]].tolist() == pytest.approx([1.0 + added, 2.0])


@pytest.mark.parametrize(("rows", "added"), [(96, 0.6), (512, 1.0)])
def test_as_many_rows_as_were_never_timed_are_like_the_nearest_that_were(rows: int, added: float) -> None:
    lengths = DraftLengths(1)
    for num_rows, k in itertools.product((32, rows, 1024), range(2)):
        lengths.set_base(num_rows, k, 1.0 + k)
    lengths.timed(32, 1, 1_000, 2.6)
    lengths.timed(1024, 1, 1_000, 3.0)
    assert 1 / lengths.scores(rows, 1_000)[0] == pytest.approx(1.0 + added)


def test_another_head_is_measured_from_the_beginning() -> None:
    """What was seen of the old one would keep drafting off until a probe in every 64 rounds has outweighed it."""
    lengths = DraftLengths(2)
    for k, cost in enumerate((1.0, 1.2, 1.4)):
        lengths.set_base(ROWS, k, cost)
    for _ in range(2000):
        k = lengths.choose(ROWS, 1000)[0].draft_len
        lengths.observe(k, np.zeros(ROWS, np.int32))
    assert lengths.scores(ROWS, 1000).argmax() == 0
    lengths.forget()
    taken = []
    for _ in range(20):
        k = lengths.choose(ROWS, 1000)[0].draft_len
        lengths.observe(k, np.full(ROWS, k, np.int32))
        taken.append(k)
    assert taken[2:6].count(2) >= 3
    assert taken.count(2) >= 15


@pytest.mark.parametrize("longest", [1, 8])
def test_a_head_that_improves_is_used_again(longest: int) -> None:
    lengths = DraftLengths(longest, choices=(0, longest))
    for k, cost in ((0, 1.0), (longest, 1.2)):
        lengths.set_base(ROWS, k, cost)
    for rate, wanted in ((0.0, 0), (0.9, longest)):
        for _ in range(64 * 60):
            k = lengths.choose(ROWS, 0)[0].draft_len
            if k:
                lengths.observe(k, np.full(ROWS, k if rate > 0.5 else 0, np.int32))
        assert lengths.choose(ROWS, 0)[0].draft_len == wanted


def test_without_drafts_there_is_nothing_to_choose() -> None:
    lengths = DraftLengths(0)
    lengths.set_base(ROWS, 0, 1.0)
    assert {lengths.choose(ROWS, 1000) for _ in range(3 * PROBE_EVERY)} == {(RoundWidth(0), False)}


def test_long_contexts_make_drafts_cheap() -> None:
    """Attention costs the same for every K: with much of it a round with drafts is hardly slower."""
    lengths = DraftLengths(2)
    for k, cost in enumerate([1.0, 1.7, 2.4]):
        lengths.set_base(ROWS, k, cost)
        lengths.timed(ROWS, k, 1000, cost + 1.0)
    for _ in range(200):
        lengths.observe(2, np.array([0, 1, 2, 0, 1, 0], np.int32))
    assert lengths.scores(ROWS, 0).argmax() == 0
    assert lengths.scores(ROWS, 100_000).argmax() == 2


def test_a_draft_is_judged_by_the_rounds_that_kept_those_before_it() -> None:
    """Every other row keeps both drafts or none: the second one is accepted whenever the first is."""
    lengths = DraftLengths(2)
    for k, cost in enumerate([1.0, 1.0, 1.25]):
        lengths.set_base(ROWS, k, cost)
    for _ in range(200):
        lengths.observe(2, np.array([0, 2] * (ROWS // 2), np.int32))
    assert lengths.scores(ROWS, 0) == pytest.approx([1.0, 1.5, 2.0 / 1.25], rel=0.01)


def test_a_round_does_not_count_drafts_that_it_did_not_make() -> None:
    lengths = DraftLengths(2)
    for k in lengths.choices:
        lengths.set_base(ROWS, k, 1.0)
    lengths.observe(1, np.ones(1000, np.int32))
    first, second = np.diff(lengths.scores(ROWS, 0))
    assert first > 0.99
    assert second / first == pytest.approx(0.7)


def test_a_tree_is_credited_with_every_level() -> None:
    lengths = DraftLengths(3, choices=(0, 3))
    for k in lengths.choices:
        lengths.set_base(ROWS, k, 1.0)
    assert lengths.scores(ROWS, 0) == pytest.approx([1.0, 1 + 0.7 + 0.7**2 + 0.7**3])


@pytest.mark.parametrize("rows", [1, 64, 1024])
def test_what_rows_showed_counts_half_after_rounds_over_4096_rows(rows: int) -> None:
    """The prior and 288 rows count as 320; after the half-life as 160. Then 160 rows reject their second draft."""
    lengths = DraftLengths(2)
    for k in lengths.choices:
        lengths.set_base(ROWS, k, 1.0)
    lengths.observe(2, np.full(288, 2, np.int32))
    for _ in range(4096 // rows):
        lengths.choose(ROWS, 0, live_rows=rows)
    first, second = np.diff(lengths.scores(ROWS, 0))
    before = (0.7 * 32 + 288) / 320
    assert second / first == pytest.approx(before), "nothing was observed since"
    lengths.observe(2, np.full(160, 1, np.int32))
    first, second = np.diff(lengths.scores(ROWS, 0))
    assert second / first == pytest.approx(before / 2)


def test_rounds_that_waited_for_the_host_do_not_count() -> None:
    """As long as one of the newest few did not."""
    lengths = DraftLengths(1)
    for k in range(2):
        lengths.set_base(ROWS, k, 0.0)
        lengths.timed(ROWS, k, 1000, 1.0)
    before = lengths.scores(ROWS, 1000)
    for _ in range(4):
        lengths.timed(ROWS, 1, 1000, 100.0)
    assert lengths.scores(ROWS, 1000) == pytest.approx(before)
    lengths.timed(ROWS, 1, 1000, 0.5)
    assert lengths.scores(ROWS, 1000)[1] == pytest.approx(2 * before[1])


def test_a_round_that_took_less_than_one_over_dead_rows_makes_no_token_a_gain() -> None:
    """Nor does one that held none say what they cost."""
    lengths = DraftLengths(1)
    for k in range(2):
        lengths.set_base(ROWS, k, 1.0)
    before = lengths.scores(ROWS, 100_000)
    lengths.timed(ROWS, 1, 1000, 0.9)
    lengths.timed(ROWS, 0, 0, 9.0)
    assert lengths.scores(ROWS, 100_000) == pytest.approx(before)


def test_a_round_without_drafts_that_prepares_one_is_not_taken_for_one_that_does_not() -> None:
    """A probe of 0 between rounds that draft ends with the first draft of the next; staying at 0 would not pay for that."""
    lengths = DraftLengths(1)
    for k, cost in enumerate((1.0, 1.5)):
        lengths.set_base(ROWS, k, cost)
    lengths.set_base(ROWS, 0, 1.3, prepare_next=True)
    lengths.timed(ROWS, 0, 1000, 1.3 + 0.2, prepare_next=True)
    assert lengths.scores(ROWS, 1000)[0] == pytest.approx(1 / 1.2)


def test_a_token_that_costs_more_than_before_is_noticed() -> None:
    lengths = DraftLengths(1)
    for k in range(2):
        lengths.set_base(ROWS, k, 0.0)
    for seconds in (1.0, *[2.0] * 5):
        lengths.timed(ROWS, 1, 1000, seconds)
    assert lengths.scores(ROWS, 1000)[1] == pytest.approx((1 + 0.7) / 2.0)


def test_a_first_round_that_waited_is_soon_forgotten() -> None:
    """The first timing of a length may hold whatever the host did meanwhile; the length that pays is found all the same."""
    rng = np.random.default_rng(0)
    lengths = DraftLengths(3)
    costs, rates, token_s = [1.0, 1.1, 1.25, 1.6], np.array([0.6, 0.47, 0.43]), 1e-3
    for k, cost in enumerate(costs):
        lengths.set_base(ROWS, k, cost)
    seen, taken = set[int](), []
    for _ in range(300):
        k = lengths.choose(ROWS, 1000)[0].draft_len
        kept = np.cumprod(rng.random((ROWS, k)) < rates[:k], axis=1).sum(axis=1) if k else np.zeros(ROWS)
        lengths.observe(k, kept.astype(np.int32))
        waited = 20.0 if k == 2 and 2 not in seen else 0.0
        lengths.timed(ROWS, k, 1000, costs[k] + 1000 * token_s + waited)
        seen.add(k)
        taken.append(k)
    assert np.mean(np.array(taken[150:]) == 2) > 0.9


def test_the_drafter_is_told_one_round_ahead() -> None:
    """A round says whether the next one drafts: what it says is what comes."""
    rng = np.random.default_rng(1)
    lengths = DraftLengths(2)
    for k, cost in enumerate([1.0, 1.3, 1.6]):
        lengths.set_base(ROWS, k, cost)
    told = None
    for _ in range(500):
        (k, _), more = lengths.choose(ROWS, 0)
        assert told is None or told == (k > 0)
        told = more
        lengths.observe(k, rng.integers(0, k + 1, ROWS).astype(np.int32))


@pytest.mark.second
@given(st.integers(1, 64), st.lists(st.booleans(), min_size=40, max_size=200), st.integers(0, 9))
def test_rounds_over_fewer_rows_choose_among_fewer_lengths(draft_len: int, full: list[bool], seed: int) -> None:
    """Rows come and go: every round has a length that was timed for its number of rows."""
    lengths, rng = DraftLengths(draft_len), np.random.default_rng(seed)
    few = choices_of(lengths.choices, all_slots=False)
    assert {0, draft_len} <= set(few) <= set(choices_of(lengths.choices, all_slots=True)) == set(lengths.choices)
    for rows, known in ((ROWS, lengths.choices), (ROWS // 2, few)):
        for k in known:
            lengths.set_base(rows, k, 1 + 0.1 * k * rng.random())
    for all_rows in full:
        rows, known = (ROWS, lengths.choices) if all_rows else (ROWS // 2, few)
        k = lengths.choose(rows, 0)[0].draft_len
        assert k in known
        lengths.observe(k, rng.integers(0, k + 1, rows).astype(np.int32))


@given(st.integers(1, 64))
def test_long_drafts_are_tried_in_steps(draft_len: int) -> None:
    """A graph for every length of a long lookup would be captured for nothing."""
    lengths = candidates(draft_len)
    assert lengths[0] == 0
    assert lengths[-1] == draft_len
    assert list(lengths) == sorted(set(lengths))
    assert set(range(min(draft_len, 4) + 1)) <= set(lengths)
    assert all(later <= 1.5 * earlier for earlier, later in itertools.pairwise(lengths) if earlier >= 4)


@pytest.mark.second
@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4), st.floats(0.02, 0.6), st.integers(0, 99))
def test_it_is_never_much_slower_than_no_drafts(rates: list[float], step: float, seed: int) -> None:
    costs = [1 + step * k for k in range(len(rates) + 1)]
    late = chosen(rates, costs, seed=seed)[500:]
    speeds = expected(rates, costs)
    assert speeds[late].mean() > 0.97 * speeds[0]
    assert speeds[late].mean() > 0.9 * speeds.max()


def test_a_round_is_timed_from_the_one_before_it_or_with_the_passes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingResult, "seconds_since", lambda result, began: result.arrived - began)

    def launched(arrived: float, **kind: Any) -> tuple[UnreadLaunch, PendingResult]:
        result: Any = None
        at: Any = arrived
        return UnreadLaunch(owners=np.zeros(1, np.int64), num_rows=1, **kind), PendingResult(result, arrived=at)

    clock = RoundClock()
    passes = [launched(4.0, is_prefill=True, num_prefilled=70), launched(5.0, is_prefill=True, num_prefilled=30)]
    results = [launched(1.0), launched(3.0), *passes, launched(6.0), launched(9.0)]
    expected_ = [None, (2.0, 0), None, None, (3.0, 100), (3.0, 0)]
    assert [clock.add(*one) for one in results] == [None if one is None else RoundTime(*one) for one in expected_]


GOOD, BAD = (0.9, 8 / 9, 7 / 8), (0.3, 1 / 3, 0.3)
MS = {k: 22.4 + 6.95 * k for k in range(4)}
"""Assumed for a round over 256 rows of an 8B model: 11.8 for the newest tokens, 10.6 for keys and values, 6.6 + 0.35 for each
draft."""


def job_ms(slots: int, requests: int, *, fixed: int | None = None) -> float:
    """Time of a job whose rows, of 512 tokens each, are of two kinds in turn. A round takes less with fewer rows, at the end."""
    rng, lengths, table = np.random.default_rng(0), DraftLengths(3), SlotTable(slots, 1, 3)
    for k, cost in MS.items():
        for prepare_next in (False, True):
            lengths.set_base(slots, k, cost, prepare_next=prepare_next)
    chances, left, taken = np.array([GOOD, BAD] * (requests // 2)), requests - slots, 0.0
    row, live = np.arange(slots), np.ones(slots, bool)
    table.num_tokens[:] = 1
    while live.any():
        k = lengths.choose(slots, 0, live_rows=int(live.sum()))[0].draft_len if fixed is None else fixed
        there = np.flatnonzero(live)
        accepted = (rng.random((len(there), k)) < chances[row[there], :k]).cumprod(1).sum(1)
        lengths.observe(k, accepted.astype(np.int32), None, table.token_weights(there))
        table.num_tokens[there] += accepted + 1
        table.num_rounds[there] += 1
        taken += MS[k] * max(0.25, len(there) / slots)
        for slot in np.flatnonzero(live & (table.num_tokens > 512)):
            live[slot], row[slot], left = left > 0, requests - left if left else 0, max(0, left - 1)
            table.num_tokens[slot], table.num_rounds[slot] = 1, 0
    return taken


def test_what_rows_that_end_soon_accept_does_not_decide_for_the_others() -> None:
    """Two drafts make 4 % more tokens a second than one while slots have as many rows of either kind. But most of these tokens
    are those of rows that need few rounds anyway, and slots are full of the others soon: one draft ends the job earlier."""
    assert expected([0.6, 1.05 / 0.6 - 1], [MS[0], MS[1], MS[2]]).argmax() == 2
    fixed = {k: job_ms(256, 768, fixed=k) for k in MS}
    assert min(fixed, key=fixed.__getitem__) == 1
    assert fixed[1] / job_ms(256, 768) > 0.995


def test_rows_count_by_what_their_tokens_are_worth() -> None:
    """One of four rows waits after a right draft; the two that count three times as much reject the first draft or the second."""
    lengths = DraftLengths(2, choices=(0, 1, 2))
    for k in range(3):
        lengths.set_base(ROWS, k, 1.0)
    weights, waits = np.array([0.5, 1.5, 1.5, 0.5]) * 1000, np.array([False, False, False, True])
    lengths.observe(2, np.array([2, 0, 1, 0], np.int32), waits, weights)
    tried = PRIOR_ROWS + np.array([4000, 2000])
    kept = PRIOR_RATE * PRIOR_ROWS + np.array([2500, 500])
    assert lengths.scores(ROWS, 0) == pytest.approx(expected(list(kept / tried), [1.0] * 3), rel=1e-12)


BASE = {RoundWidth(0): 7.3, RoundWidth(1): 13.1, RoundWidth(2): 22.0, RoundWidth(3): 26.3}
BASE |= {RoundWidth(2, 0.5): 10.4, RoundWidth(3, 1.0): 14.1, RoundWidth(3, 1.5): 15.4, RoundWidth(3, 2.0): 21.9}
FEW = {width: 4.6 + 0.27 * width.draft_len for width in BASE}
"""Times in ms, about those of Llama-3-8B on an H200 over 256 and 8 dead rows; attention over 256 live ones of 1,200 tokens takes
10.6 more, in rounds that verify a part of their drafts 1.3 times that."""


def widths_over_many_rows(levels: np.ndarray, phases: list[tuple[int, int, dict[RoundWidth, float], float]]) -> list[RoundWidth]:
    """Widths of all rounds. levels: int32 [3, LEVELS] of 256 drafts each; phases: rows, rounds, times of dead rows, attention."""
    lengths, taken = DraftLengths(3, row_lengths=True), []
    trial_won(lengths)
    for num_rows, rounds, costs, attention in phases:
        for width, prepare_next in itertools.product(BASE, (False, True)):
            lengths.times.set_base(num_rows, width, costs[width], prepare_next=prepare_next)
        for _ in range(rounds):
            width, _ = lengths.choose(num_rows, 1200 * num_rows)
            if width.draft_len:
                lengths.observe_levels(levels[: width.draft_len], 256)
            added = attention * (1.3 if width.mean_len else 1.0)
            lengths.timed(num_rows, width, 1200 * num_rows, costs[width] + added)
            taken.append(width)
    return taken


def test_what_a_few_rows_showed_is_tried_again_with_many() -> None:
    """By times over dead rows a mean of 1.5 drafts of 3 is best. Its attention takes longer than that of others, which is charged
    to K = 1 too, until a round of as many rows has had it. The eight rows before have tried all K."""
    levels = np.zeros((3, LEVELS), np.int32)  # the first drafts of half of the rows survive with .88, of the others with .52
    levels[0, [6, 30]], levels[1, [16, 70]], levels[2, [34, 110]] = 128, 128, 128
    taken = widths_over_many_rows(levels, [(8, 100, FEW, 0.5), (256, 250, BASE, 10.6)])
    assert RoundWidth(3, 1.5) in taken[100:150]
    assert taken[200:].count(RoundWidth(1)) > 130


def test_a_part_that_does_not_pay_is_left_after_a_dozen_rounds() -> None:
    """Some drafts promise more than others: verifying those seems best by a tenth, until one draft of each row was tried. When
    fewer rows are left, that is known of them too."""
    levels = np.zeros((3, LEVELS), np.int32)
    levels[0, [2, 14, 60]] = levels[1, [20, 45, 110]] = levels[2, [45, 90, 160]] = (85, 86, 85)
    half = {width: seconds / 2 + 2 for width, seconds in BASE.items()}
    taken = widths_over_many_rows(levels, [(8, 100, FEW, 0.5), (256, 120, BASE, 10.6), (128, 120, half, 5.3)])
    partial = np.array([width.mean_len is not None for width in taken])
    assert 0 < partial[100:220].sum() <= 12
    assert not partial[220:].any()
