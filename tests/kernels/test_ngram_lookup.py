"""ngram_lookup: the tokens after the most recent earlier occurrence of the longest repeated n-gram at a row's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.drafting.ngram_lookup import BLOCK, ngram_lookup

POISON = -7
Proposals = list[list[int]]


def look_up(
    rows: list[list[int]], interpret: bool, device: torch.device, *,
    max_draft_len: int = 4, min_ngram: int = 1, max_ngram: int = 3, growth: int = 9, live: list[int] | None = None,
    width: int | None = None,
) -> Proposals:
    """Proposed tokens of each row. After a row's tokens come decoy matches, which must not be read."""
    longest = max(map(len, rows)) + 8
    tokens = torch.tensor([row + (row[-3:] * longest)[: longest - len(row)] if row else [3] * longest for row in rows])
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    width = max_draft_len if width is None else width
    draft_ids, draft_len = torch.full((len(rows), width), POISON, **ints), torch.full((len(rows),), POISON, **ints)
    ngram_lookup(
        tokens.to(**ints), torch.tensor([len(row) for row in rows], **ints), torch.tensor(live or [1] * len(rows), **ints),
        max_draft_len=max_draft_len, min_ngram=min_ngram, max_ngram=max_ngram, growth=growth,
        out_draft_ids=draft_ids, out_draft_len=draft_len, interpret=interpret,
    )
    for ids, length in zip(draft_ids.tolist(), draft_len.tolist(), strict=True):
        assert ids[length:] == [0] * (width - length)
    return [ids[:length] for ids, length in zip(draft_ids.tolist(), draft_len.tolist(), strict=True)]


def by_hand(row: list[int], max_draft_len: int, min_ngram: int, max_ngram: int, growth: int = 9) -> list[int]:
    for n in range(max_ngram, min_ngram - 1, -1):
        for begin in range(len(row) - n - 1, -1, -1):
            if row[begin : begin + n] == row[len(row) - n :]:
                return row[begin + n : begin + n + min(max_draft_len, growth * n)]
    return []


def test_the_longest_ngram_wins_over_a_more_recent_short_one(interpret: bool, device: torch.device) -> None:
    row = [1, 2, 3, 40, 41, 42, 43, 9, 3, 50, 51, 1, 2, 3]
    assert look_up([row], interpret, device) == [[40, 41, 42, 43]]
    assert look_up([row], interpret, device, max_ngram=1) == [[50, 51, 1, 2]]


def test_the_most_recent_occurrence_wins(interpret: bool, device: torch.device) -> None:
    assert look_up([[5, 6, 70, 5, 6, 71, 5, 6, 72, 5, 6]], interpret, device) == [[72, 5, 6]]


def test_fewer_drafts_if_the_committed_tokens_end(interpret: bool, device: torch.device) -> None:
    assert look_up([[8, 8], [1, 7, 7, 7], [9, 4, 9]], interpret, device) == [[8], [7], [4, 9]]


def test_a_longer_match_gives_more_drafts(interpret: bool, device: torch.device) -> None:
    rows = [[9, 1, 2, 3, 4, 5, 6, 7, 1], [9, 1, 2, 3, 4, 5, 6, 7, 9, 1], [8, 9, 1, 2, 3, 4, 5, 6, 8, 9, 1]]
    proposed = look_up(rows, interpret, device, growth=2, max_draft_len=5)
    assert proposed == [[2, 3], [2, 3, 4, 5], [2, 3, 4, 5, 6]]


def test_no_earlier_occurrence_proposes_nothing(interpret: bool, device: torch.device) -> None:
    rows = [[1, 2, 3, 4], [5], [], [0, 0, 9]]
    assert look_up(rows, interpret, device) == [[], [], [], []]
    assert look_up([[1, 2, 3, 2], [6, 1, 2, 3, 1, 2]], interpret, device, min_ngram=2) == [[], [3, 1, 2]]


def test_match_len_counts_the_matching_tokens(interpret: bool, device: torch.device) -> None:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    tokens = torch.tensor([[1, 2, 3, 1, 2], [5, 6, 7, 8, 9], [4, 4, 4, 4, 4], [1, 2, 3, 1, 2]], **ints)
    ids, lens, matched = torch.empty(4, 2, **ints), torch.empty(4, **ints), torch.full((4,), POISON, **ints)
    ngram_lookup(
        tokens, torch.full((4,), 5, **ints), torch.tensor([1, 1, 1, 0], **ints), max_draft_len=2, min_ngram=1, max_ngram=3,
        growth=9, out_draft_ids=ids, out_draft_len=lens, out_match_len=matched, interpret=interpret,
    )
    assert matched.tolist() == [2, 0, 3, 0]


def test_dead_rows_propose_nothing(interpret: bool, device: torch.device) -> None:
    rows = [[1, 2, 1], [1, 2, 1], [4, 4, 4]]
    assert look_up(rows, interpret, device, live=[0, 1, 0]) == [[], [2, 1], []]


def test_token_zero_matches_like_any_other(interpret: bool, device: torch.device) -> None:
    assert look_up([[0, 0, 5, 0, 0]], interpret, device) == [[5, 0, 0]]
    assert look_up([[0], [0, 0]], interpret, device, max_ngram=5) == [[], [0]]


def test_the_draft_limit_may_be_below_the_width(interpret: bool, device: torch.device) -> None:
    row = [1, 2, 3, 4, 5, 6, 1]
    assert look_up([row], interpret, device, max_draft_len=2, width=5) == [[2, 3]]
    assert look_up([row], interpret, device, max_draft_len=0, width=3) == [[]]
    assert look_up([row], interpret, device, max_draft_len=0, width=0) == [[]]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 30])
def test_matches_far_back_and_across_blocks(length: int, interpret: bool, device: torch.device) -> None:
    rows = []
    for begin in (0, 1, length // 2, length - 8):
        row = list(range(100, 100 + length))
        row[-3:] = row[begin : begin + 3]
        rows.append(row)
    assert look_up(rows, interpret, device) == [by_hand(row, 4, 1, 3) for row in rows]
    assert look_up(rows, interpret, device)[1][0] == 104


def test_proposals_go_to_slices_of_wider_rows(interpret: bool, device: torch.device) -> None:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    wide = torch.full((2, 6), POISON, **ints)
    tokens = torch.tensor([[1, 2, 3, 1, POISON], [7, 8, 7, 8, POISON]], **ints)[:, :4]
    ngram_lookup(
        tokens, torch.tensor([4, 4], **ints), torch.ones(2, **ints), max_draft_len=3, min_ngram=1, max_ngram=2, growth=9,
        out_draft_ids=wide[:, 1:4], out_draft_len=torch.empty(2, **ints), interpret=interpret,
    )
    assert wide.tolist() == [[POISON, 2, 3, 1, POISON, POISON], [POISON, 7, 8, 0, POISON, POISON]]


@settings(max_examples=60)
@given(data=st.data())
def test_equals_a_plain_loop(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    rows = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4))
    min_ngram = data.draw(st.integers(1, 3))
    max_ngram = data.draw(st.integers(min_ngram, 5))
    max_draft_len = data.draw(st.integers(0, 6))
    live = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    growth = data.draw(st.integers(1, 4))
    limits = {"max_draft_len": max_draft_len, "min_ngram": min_ngram, "max_ngram": max_ngram, "growth": growth}
    expected = [by_hand(row, **limits) if alive else [] for row, alive in zip(rows, live, strict=True)]
    assert look_up(rows, interpret, device, live=live, **limits) == expected


def test_wrong_arguments_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    good: dict[str, Any] = {
        "tokens": torch.zeros(2, 9, dtype=torch.int32), "num_tokens": ints, "live": ints, "max_draft_len": 4, "min_ngram": 1,
        "max_ngram": 3, "growth": 2, "out_draft_ids": torch.zeros(2, 4, dtype=torch.int32), "out_draft_len": ints.clone(),
    }
    ngram_lookup(**good)
    for name in ("tokens", "num_tokens", "live", "out_draft_ids", "out_draft_len"):
        with pytest.raises(ValueError, match=f"ngram_lookup: {name} is int64"):
            ngram_lookup(**{**good, name: good[name].long()})
    with pytest.raises(ValueError, match=r"ngram_lookup: max_draft_len is 5; must be 0\.\.4"):
        ngram_lookup(**{**good, "max_draft_len": 5})
    with pytest.raises(ValueError, match="ngram_lookup: min_ngram is 4 and max_ngram 3"):
        ngram_lookup(**{**good, "min_ngram": 4})
    with pytest.raises(ValueError, match="ngram_lookup: min_ngram is 0"):
        ngram_lookup(**{**good, "min_ngram": 0})
    with pytest.raises(ValueError, match="ngram_lookup: growth is 0"):
        ngram_lookup(**{**good, "growth": 0})
