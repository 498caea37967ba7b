"""allocate_drafts: with fewer places than drafts, a round verifies those that survive most likely, of each row the first ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.rounds.allocate_drafts import LEVELS, allocate_drafts

BINS = 8


def allocated(
    confidence: list[list[int]], costs: list[list[int]], lengths: list[int], live: list[int], num_places: int | None,
    device: torch.device, interpret: bool,
) -> tuple[list[int], Tensor]:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    draft_len = torch.tensor(lengths, **ints)
    counts = torch.full((len(confidence[0]), LEVELS), -7, **ints)
    allocate_drafts(
        torch.tensor(confidence, **ints), torch.tensor(costs, **ints), torch.tensor(live, **ints), num_places=num_places,
        draft_len=draft_len, out_counts=counts, interpret=interpret,
    )
    return draft_len.tolist(), counts.cpu()


def test_the_drafts_most_likely_to_survive_are_verified(device: torch.device, interpret: bool) -> None:
    """Costs 0, 32, 64 are chances 1, 1/2, 1/4. The drafts of row 0 survive with 1, 1, 1/2, of row 1 with 1/2, 1/4, 1/8."""
    costs = [[0, 32, 64]] * 3
    confidence = [[0, 0, 1], [1, 1, 1]]
    for extra, lengths in ((0, [0, 0]), (1, [1, 0]), (2, [2, 0]), (3, [2, 1]), (4, [3, 1]), (5, [3, 2]), (9, [3, 3])):
        found, _ = allocated(confidence, costs, [3, 3], [1, 1], 2 + extra, device, interpret)
        assert found == lengths, extra


def test_a_dead_row_takes_no_place_and_a_short_row_no_more_than_its_drafts(device: torch.device, interpret: bool) -> None:
    costs = [[0, 32]] * 2
    found, counts = allocated([[0, 0], [0, 0], [1, 1]], costs, [2, 1, 2], [0, 1, 1], 2 + 3, device, interpret)
    assert found == [0, 1, 2]
    assert counts[0, 0] == 1
    assert counts[0, 32] == 1
    assert counts[1, 64] == 1
    assert counts.sum() == 3


rows = st.integers(1, 70).flatmap(
    lambda num_rows: st.tuples(
        st.lists(st.lists(st.integers(0, BINS - 1), min_size=4, max_size=4), min_size=num_rows, max_size=num_rows),
        st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows),
        st.lists(st.sampled_from([0, 1, 1, 1]), min_size=num_rows, max_size=num_rows),
    )
)


@pytest.mark.second
@settings(deadline=None, max_examples=40)
@given(rows, st.lists(st.lists(st.integers(0, 120), min_size=BINS, max_size=BINS), min_size=4, max_size=4), st.integers(0, 150))
def test_no_draft_that_is_left_out_survives_more_likely_than_one_that_is_taken(
    device: torch.device, interpret: bool, drawn: tuple[list[list[int]], list[int], list[int]], costs: list[list[int]], extra: int
) -> None:
    confidence, lengths, live = drawn
    num_live = sum(live)
    found, counts = allocated(confidence, costs, lengths, live, num_live + extra, device, interpret)
    levels: list[list[int]] = []
    for bins, length, alive in zip(confidence, lengths, live, strict=True):
        sums = [min(sum(costs[i][bins[i]] for i in range(j + 1)), LEVELS - 1) for j in range(length * alive)]
        levels.append(sums)
    assert sum(found) == min(extra, sum(len(line) for line in levels)), "places stay empty only if there are no more drafts"
    taken = [level for line, length in zip(levels, found, strict=True) for level in line[:length]]
    left = [level for line, length in zip(levels, found, strict=True) for level in line[length:]]
    assert max(taken, default=0) <= min(left, default=LEVELS)
    for j in range(4):
        expected = [0] * LEVELS
        for line in levels:
            if j < len(line):
                expected[line[j]] += 1
        assert counts[j].tolist() == expected
    kept, counts_of_all = allocated(confidence, costs, lengths, live, None, device, interpret)
    assert kept == lengths, "with places for all drafts they are only counted"
    assert counts_of_all.equal(counts)


@settings(deadline=None, max_examples=20)
@given(rows, st.integers(0, 150))
def test_kernel_and_reference_take_the_same_drafts(
    device: torch.device, interpret: bool, drawn: tuple[list[list[int]], list[int], list[int]], extra: int
) -> None:
    """Ties too: many drafts have the same level."""
    confidence, lengths, live = drawn
    costs = [[0, 0, 8, 8, 8, 16, 16, 200]] * 4
    one, counts = allocated(confidence, costs, lengths, live, sum(live) + extra, device, interpret)
    other, same = allocated(confidence, costs, lengths, live, sum(live) + extra, torch.device("cpu"), False)
    assert one == other
    assert torch.equal(counts, same)
