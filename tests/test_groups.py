"""Which rows share a beginning: by their pages, from eight pages on, whoever is alive in the slots."""

from __future__ import annotations

import torch

from batchspec.decode.groups import MIN_PAGES, Groups, shared_beginnings
from batchspec.decode.output import Progress
from batchspec.decode.scheduler import Row
from tests.engines import request


def row(slot: int, pages: list[int]) -> Row:
    return Row(Progress(request=request(slot, [1], cap=1), draft_len=0, finder=None), slot=slot, pages=pages)


COMMON = list(range(1, 11))


def test_rows_that_begin_with_the_same_pages_are_a_group() -> None:
    rows = [row(0, [*COMMON, 50]), None, row(2, [70, 71]), row(3, [*COMMON, 60, 61])]
    assert shared_beginnings(rows) == [([0, 3], 10)]


def test_the_beginning_is_what_all_members_have_in_common() -> None:
    rows = [row(0, [*COMMON, 50]), row(1, [*COMMON, 50, 51]), row(2, [*COMMON[:9], 80])]
    assert shared_beginnings(rows) == [([0, 1, 2], 9)]


def test_short_beginnings_and_single_rows_are_no_group() -> None:
    short = COMMON[: MIN_PAGES - 1]
    assert shared_beginnings([row(0, [*short, 50, 51]), row(1, [*short, 60, 61]), row(2, [*COMMON[::-1]])]) == []


def test_the_device_learns_members_side_by_side_and_lengths_in_tokens() -> None:
    groups = Groups(6, 16, torch.device("cpu"))
    other = list(range(101, 110))
    rows = [row(0, [*other, 7]), row(1, [*COMMON, 50]), None, row(3, [*COMMON, 60]), row(4, [*other, 8]), None]
    groups.update(rows)
    found = groups.first(5)
    assert groups.any
    assert found.row_group.tolist() == [0, 1, -1, 1, 0]
    assert found.row_order.tolist() == [0, 4, 1, 3, 2]
    assert found.group_start.tolist() == [0, 2, 4]
    assert found.shared_len.tolist() == [9 * 16, 10 * 16]
    groups.update([None] * 6)
    assert not groups.any
    assert groups.first(6).row_group.tolist() == [-1] * 6
