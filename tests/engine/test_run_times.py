"""The fixed time of a refill, without the time of its tokens, is learned from the run's own results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.loop.run_times import FIRST, RefillTimes, RoundClock
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.records import PendingResult
from batchspec.engine.slots.launch import UnreadLaunch, UnreadLaunches
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.step import Prefill, RoundWidth, Segment
from tests.helpers.engines import request

COST = PrefillCost(least=0.033, token=1e-6, replay=0.001, most_replayed=2048)
SLOTS = 8
ROUND = UnreadLaunch(owners=np.zeros(SLOTS, np.int64), num_rows=SLOTS, width=RoundWidth(3))


class ResultAt(PendingResult):
    """A result that arrived at this time, in seconds."""

    def __init__(self, second: float) -> None:
        super().__init__(cast(Any, None), arrived=cast(Any, second))

    def seconds_since(self, began: Any) -> float:
        return cast(float, cast(Any, self.arrived) - began)


class Run:
    """Rounds of 2 ms and refills whose time the test gives."""

    def __init__(self, times: RefillTimes) -> None:
        self.times, self.clock, self.now = times, RoundClock(), 0.0

    def round(self, launch: UnreadLaunch = ROUND, seconds: float = 0.002) -> None:
        self.now += seconds
        took = self.clock.add(launch, ResultAt(self.now))
        if took is not None:
            self.times.add(launch, took)

    def refill(self, num_tokens: int, seconds: float, passes: int = 1) -> None:
        for part in range(passes):
            tokens = num_tokens // passes if part else num_tokens - (passes - 1) * (num_tokens // passes)
            self.round(replace(ROUND, is_prefill=True, num_prefilled=tokens), seconds / passes)
        self.round()


def started() -> tuple[RefillTimes, Run]:
    times = RefillTimes(COST, SLOTS)
    run = Run(times)
    for _ in range(FIRST + 1):
        run.round()
    return times, run


def test_before_the_first_refill_the_fixed_time_is_that_of_a_short_replay() -> None:
    assert RefillTimes(COST, SLOTS).fixed_s == COST.replay


@pytest.mark.second
@given(
    fixed_s=st.floats(0.0, 0.008),
    token_s=st.floats(1e-6, 3e-6),
    sizes=st.lists(st.integers(200, 4000), min_size=40, max_size=60, unique=True),
    passes=st.integers(1, 3),
)
def test_fixed_time_and_time_of_tokens_are_told_apart(fixed_s: float, token_s: float, sizes: list[int], passes: int) -> None:
    """Within the weight of the assumed times, 1 ms for a replay and 1 us for a token."""
    times, run = started()
    for num_tokens in sizes:
        run.refill(num_tokens, fixed_s + token_s * num_tokens, passes)
        run.round()
    assert times.fixed_s == pytest.approx(fixed_s, abs=0.0005)
    assert times.round_s[RoundWidth(3)] == pytest.approx(0.002)


def test_for_refills_of_one_size_a_token_takes_what_it_takes_in_a_full_pass() -> None:
    times, run = started()
    for _ in range(60):
        run.refill(1000, 0.005)
        run.round()
    assert 0.003 < times.fixed_s < 0.0042


def test_the_fixed_time_is_never_negative() -> None:
    times, run = started()
    for _ in range(60):
        run.refill(4000, 0.0005)
        run.round()
    assert times.fixed_s == 0.0


def test_a_pass_that_took_as_long_as_launches_do_is_not_counted() -> None:
    """A shape's first passes run without a graph; and the host may have been busy with something else."""
    times, run = started()
    run.refill(1000, COST.least + 1e-6)
    assert times.fixed_s == COST.replay
    run.refill(1000, COST.least - 1e-6)
    assert times.fixed_s > 0.005


def test_rounds_over_fewer_rows_than_slots_are_not_counted() -> None:
    times, run = started()
    run.round(replace(ROUND, num_rows=4), seconds=0.001)
    assert times.round_s == {RoundWidth(3): pytest.approx(0.002)}


@pytest.mark.parametrize("pause_s", [0.02, 2.0])
def test_a_pause_in_one_of_the_first_rounds_changes_nothing(pause_s: float) -> None:
    """Such as the capture of the graph that the round needs. No refill is counted until five rounds were timed."""
    times = RefillTimes(COST, SLOTS)
    run = Run(times)
    run.round()
    run.round(seconds=pause_s)
    run.refill(1000, 0.005)
    assert times.fixed_s == COST.replay
    for _ in range(FIRST):
        run.round()
    assert times.round_s == {RoundWidth(3): pytest.approx(0.002)}
    run.refill(1000, 0.005)
    assert times.fixed_s > 0.002


def test_a_result_of_passes_counts_their_tokens_and_no_others() -> None:
    """A row's first pass has no result: its tokens count with those of the pass in which the row ends."""
    table = SlotTable(2, 40, 3)
    table.fill([RequestState.of(request(i, [1] * 7, cap=8), 3) for i in range(2)], [0, 1], 0)
    unread = UnreadLaunches(table)
    passes = ((Segment(0, 0, 4, last=False),), (Segment(0, 4, 7, last=True),), (Segment(1, 0, 7, last=True),))
    unread.add_prefill(Prefill(passes=passes, mode=SamplingMode()))
    assert [launch.num_prefilled for launch in unread] == [7, 7]


def test_each_draft_length_has_its_own_time_of_a_round_which_one_slow_round_hardly_changes() -> None:
    times, run = started()
    run.round(replace(ROUND, width=RoundWidth(0)), seconds=0.001)
    run.round(seconds=1.0)
    assert times.round_s == {RoundWidth(0): pytest.approx(0.001), RoundWidth(3): pytest.approx(0.0022)}
