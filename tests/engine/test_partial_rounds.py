"""Which rounds that verify a part of their drafts are captured: few, and none where they cannot pay.

Times are made up: see `StandInGraphs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchspec.draft.shapes import candidates
from batchspec.engine.loop import warm_up
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.draft_lengths import LEAST_ROWS, DraftLengths, partial_buckets
from batchspec.engine.rounds.round_widths import partial_widths
from batchspec.engine.step import RoundShape
from batchspec.kernels.rounds.allocate_drafts import LEVELS
from batchspec.packed_batch import ExpectedRows
from batchspec.packing.memory import LEAST_PARTIAL_ROWS, MOST_PARTIAL_BUCKETS, MOST_PARTS
from batchspec.packing.planner import row_buckets
from tests.engine.test_round_planner import MODE, planner
from tests.helpers.engines import packed
from tests.helpers.row_lengths import trial_won

Seconds = Callable[[RoundShape], float]


def by_positions(shape: RoundShape) -> float:
    """Products that are bound by arithmetic. `StandInGraphs` scales by rows."""
    return 10.0 + 4.0 * shape.width.verified + 0.5 * shape.draft_len


def by_weights(shape: RoundShape) -> float:
    """Products that wait for weights: positions cost next to nothing, drafting does."""
    return 10.0 + 0.1 * shape.width.verified + 1.0 * shape.draft_len


def only_many_rows(shape: RoundShape) -> float:
    """Arithmetic counts from 64 rows on."""
    return by_positions(shape) if shape.num_rows >= 64 else by_weights(shape)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "time_passes", lambda *_, **__: PrefillCost(least=0.0, token=0.0))


def prepared(
    slots: int, draft_len: int, seconds: Seconds, *, row_lengths: bool = True, shared: bool = False, num_rows: int | None = None,
    ranks: object = None,
) -> Any:
    """The planner of a job with `num_rows` rows of 100 tokens, None: unknown."""
    batch = packed(slots, row_buckets=row_buckets(slots), num_verified=draft_len)
    one: Any = planner(
        batch, draft_len, draft_lens=candidates(draft_len), base=seconds, row_lengths=row_lengths, ranks=ranks
    )
    one._executor.prepare_passes = lambda *_, **__: 0
    rows = ExpectedRows(prompt_lens=np.ones(1, np.int32), common_tokens=0, output_tokens=100.0, num_rows=num_rows or 0)
    if num_rows is None:
        one.prepare(MODE, shared=shared)
    else:
        one.prepare(MODE, shared=shared, most_rounds=10**6, expected=rows)
    return one


def parts(one: Any) -> dict[int, int]:
    """Number of such graphs by row bucket."""
    counts: dict[int, int] = {}
    for shape in one._executor.graphs.prepared:
        if shape.mean_len is not None:
            counts[shape.num_rows] = counts.get(shape.num_rows, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("slots", "draft_len", "fixed", "auto"),
    [
        (8, 3, 17, 17), (11, 8, 24, 24), (12, 3, 21, 25), (16, 3, 25, 29), (32, 3, 33, 41), (64, 3, 41, 53), (256, 1, 42, 45),
        (256, 3, 57, 69), (256, 8, 60, 77), (1024, 16, 78, 98),
    ],
)
def test_the_number_of_graphs_where_positions_cost_most(slots: int, draft_len: int, fixed: int, auto: int) -> None:
    """Of all row buckets, draft lengths and means together."""
    assert prepared(slots, draft_len, by_positions, row_lengths=False)._executor.graphs.num_ever == fixed
    assert prepared(slots, draft_len, by_positions)._executor.graphs.num_ever == auto


@pytest.mark.parametrize("slots", [12, 64, 256])
def test_where_positions_cost_nothing_one_graph_is_captured_in_vain(slots: int) -> None:
    """And a round of the same draft length once more, because rounds that choose among no drafts learn nothing of them."""
    fixed, auto = (prepared(slots, 3, by_weights, row_lengths=row_lengths) for row_lengths in (False, True))
    assert auto._executor.graphs.num_ever == fixed._executor.graphs.num_ever + 2
    assert set(auto._executor.graphs.prepared) == set(fixed._executor.graphs.prepared)
    assert auto._executor.round.chances is None
    assert auto._lengths.widths(slots) == fixed._lengths.widths(slots)
    assert {auto.choose(slots, np.full(slots, 9), np.arange(slots)).width.mean_len for _ in range(40)} == {None}


@pytest.mark.parametrize("ranks", [None, object()])
def test_fewer_slots_than_a_dozen_have_none(ranks: object) -> None:
    """Their rounds learn nothing of drafts either."""
    one = prepared(LEAST_ROWS - 1, 3, by_positions, ranks=ranks)
    assert parts(one) == {}
    assert one._executor.round.chances is None
    assert one._executor.graphs.num_ever == prepared(LEAST_ROWS - 1, 3, by_positions, row_lengths=False)._executor.graphs.num_ever


def test_row_buckets_for_which_they_do_not_pay_get_one_or_none() -> None:
    """256 and 128 and 64 rows are candidates; of 64 slots 32 and 16 rows, of which the first is tried."""
    assert parts(prepared(256, 3, only_many_rows)) == {256: 4, 128: 4, 64: 4}
    assert parts(prepared(64, 3, only_many_rows)) == {64: 4, 32: 1}


@pytest.mark.parametrize(("seconds", "wanted"), [(0.94, True), (0.96, False)])
def test_they_are_captured_if_any_acceptance_could_make_them_pay(seconds: float, wanted: bool) -> None:
    """All other rounds take 1 s. A token of a round that verifies a part counts 0.95. So where it is captured it is chosen if one
    row in four accepts three drafts, the others none, and it is known which; where it is not captured, not even then."""
    one = prepared(64, 3, lambda shape: 1.0 if shape.mean_len is None else seconds)
    assert (one._lengths.partial != []) == wanted
    levels = np.zeros((3, LEVELS), np.int32)
    levels[:, 0], levels[:, -1] = 16, 48
    lengths = DraftLengths(3, row_lengths=True)
    trial_won(lengths)
    for width in lengths.widths(64):
        for prepare_next in (False, True):
            lengths.times.set_base(64, width, 1.0 if width.mean_len is None else seconds, prepare_next=prepare_next)
    lengths.observe_levels(levels, 64)
    assert (lengths.choose(64, 0)[0].mean_len is not None) == wanted


@pytest.mark.parametrize(("num_rows", "wanted"), [(None, True), (64, False), (2000, False), (6400, True)])
def test_a_short_job_captures_none(num_rows: int | None, wanted: bool) -> None:
    """A round of 64 slots takes 24 ms, and one that verifies a part takes 8 ms less, of which a twentieth counts as gained with
    each token of a slot: 0.4 ms. Capturing 12 graphs takes 1.7 s, more than is gained with the 3,125 tokens of each slot that
    2,000 rows of 100 tokens have."""
    one = prepared(64, 3, lambda shape: by_positions(shape) / 1000, num_rows=num_rows)
    assert bool(parts(one)) == wanted
    assert (one._executor.round.chances is not None) == wanted


@pytest.mark.parametrize("most_rounds", [None, 10**6])
def test_a_job_is_as_short_if_its_last_rows_may_take_any_number_of_rounds(most_rounds: int | None) -> None:
    """So is a benchmark of its rows, which runs them several times."""
    batch = packed(64, row_buckets=(64,), num_verified=3)
    one: Any = planner(batch, 3, draft_lens=candidates(3), base=lambda shape: by_positions(shape) / 1000, row_lengths=True)
    one._executor.prepare_passes = lambda *_, **__: 0
    rows = ExpectedRows(prompt_lens=np.ones(1, np.int32), common_tokens=0, output_tokens=100.0, num_rows=64)
    one.prepare(MODE, most_rounds=most_rounds, expected=rows)
    assert parts(one) == {}


def test_rounds_of_a_second_sampling_mode_are_not_decided_about_again() -> None:
    one = prepared(64, 3, by_positions)
    before = one._executor.graphs.num_ever
    one.prepare(replace(MODE, filters=True))
    assert one._executor.graphs.num_ever == 2 * before
    off = prepared(64, 3, by_weights)
    assert off._partial.shapes(off._executor.graphs.prepared[0], off.row_buckets) == []


def test_all_ranks_capture_the_same_whatever_their_clocks_say() -> None:
    """Those over all slots."""
    graphs = [prepared(64, 3, seconds, ranks=object())._executor.graphs.prepared for seconds in (by_positions, by_weights)]
    assert graphs[0] == graphs[1]
    assert {shape.num_rows for shape in graphs[0] if shape.mean_len is not None} == {64}


def test_rows_that_share_prefixes_have_them_too() -> None:
    plain, shared = (prepared(64, 3, by_positions, shared=shared) for shared in (False, True))
    assert parts(shared) == {num_rows: 2 * count for num_rows, count in parts(plain).items()}


@pytest.mark.parametrize("draft_len", [1, 2, 3, 4, 5, 8, 16, 63])
def test_memory_is_kept_for_as_many_as_there_can_be(draft_len: int) -> None:
    assert LEAST_PARTIAL_ROWS == LEAST_ROWS
    widths = partial_widths(candidates(draft_len))
    assert len(widths) <= min(draft_len + 1, MOST_PARTS)
    assert [width.mean_len for width in widths] == sorted({width.verified for width in widths})
    for slots in range(1, 300):
        buckets = partial_buckets(row_buckets(slots))
        assert len(buckets) <= MOST_PARTIAL_BUCKETS
        assert buckets == sorted(buckets, reverse=True)
        assert all(bucket >= LEAST_ROWS for bucket in buckets)
        assert buckets[:1] == [slots] * (slots >= LEAST_ROWS)
