"""select_drafts and update_acceptance: which drafts promise more accepted tokens, and how both proposals fared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.drafting.select_drafts import BLOCK, MEMORY, select_drafts, update_acceptance

POISON = -7


def ints(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def floats(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def pick(
    head_rates: list[float], lookup_rates: list[float], lookup_len: list[int], match: list[int], interpret: bool,
    device: torch.device, *, head_width: int = 3, width: int = 5, live: list[int] | None = None,
) -> tuple[list[list[int]], list[int], list[int]]:
    """Draft tokens of each row, their number, and the picked side. The head proposes 10, 11, .., the lookup 20, 21, .."""
    rows = len(lookup_len)
    head = ints([[10 + j for j in range(head_width)]] * rows, device).view(rows, head_width)
    look = ints([[20 + j if j < n else 0 for j in range(width)] for n in lookup_len], device)
    wide, lens, picked = (torch.full((rows, size), POISON, dtype=torch.int32, device=device) for size in (width + 1, 1, 1))
    lens, picked = lens.flatten(), picked.flatten()
    select_drafts(
        head, look, ints(lookup_len, device), ints(match, device), floats([[8 * p, 8] for p in head_rates], device),
        floats([[4 * p, 4] for p in lookup_rates], device), ints(live or [1] * rows, device), out_draft_ids=wide[:, 1:],
        out_draft_len=lens, out_picked=picked, interpret=interpret,
    )
    assert wide[:, 0].tolist() == [POISON] * rows
    return wide[:, 1:].tolist(), lens.tolist(), picked.tolist()


def test_the_proposal_with_more_expected_tokens_is_chosen(interpret: bool, device: torch.device) -> None:
    """Both rates are those of the row's match length: the head may be better even if the lookup's rate is high."""
    ids, lens, picked = pick([0.5, 0.9, 0.4], [0.6, 0.7, 0.5], [5, 5, 5, 0], [0, 1, 2, 2], interpret, device)
    assert picked == [1, 0, 1, 0]
    assert ids[0] == ids[2] == [20, 21, 22, 23, 24]
    assert ids[1] == ids[3] == [10, 11, 12, 0, 0]
    assert lens == [5, 3, 5, 3]


def test_more_drafts_make_up_for_a_lower_rate(interpret: bool, device: torch.device) -> None:
    assert pick([0.8], [0.7], [5, 3], [0, 0], interpret, device)[2] == [0, 0]
    assert pick([0.8], [0.75], [5, 3], [0, 0], interpret, device)[2] == [1, 0]


def test_a_tie_goes_to_the_head(interpret: bool, device: torch.device) -> None:
    assert pick([0.5], [0.5], [3], [0], interpret, device)[2] == [0]
    assert pick([0.5], [0.5], [4], [0], interpret, device)[2] == [1]


def test_dead_rows_propose_nothing(interpret: bool, device: torch.device) -> None:
    assert pick([0.5], [0.9], [4, 4], [0, 0], interpret, device, live=[0, 1])[1] == [0, 4]


def test_the_confidence_says_who_drafted(interpret: bool, device: torch.device) -> None:
    """The head has 8 bins and the lookup 4. Row 0 takes the lookup's drafts, row 1 the head's, row 2 those of a longer match."""
    wide = torch.full((3, 6), POISON, dtype=torch.int32, device=device)
    rates = floats([[1, 2]] * 8, device)
    head_rates = rates.clone()
    head_rates[[2, 7], 0] = 1e-3
    own = ints([[POISON, 5, 6]] * 3, device)[:, 1:]
    select_drafts(
        ints([[10, 11]] * 3, device), ints([[20, 21, 22, 23]] * 3, device), ints([4, 0, 4], device), ints([2, 0, 7], device),
        head_rates, rates, ints([1] * 3, device), out_draft_ids=torch.zeros_like(wide[:, :4]),
        out_draft_len=ints([0] * 3, device), out_picked=ints([0] * 3, device), head_confidence=own,
        out_confidence=wide[:, 1:5], head_bins=8, lookup_bins=4,
        interpret=interpret,
    )
    assert wide[:, 1:5].tolist() == [[10] * 4, [5, 6, 8, 8], [11] * 4]
    assert (wide[:, [0, 5]] == POISON).all()


def test_confidence_of_one_side_alone_is_refused(device: torch.device) -> None:
    one, rates = ints([[1]], device), floats([[1, 2]], device)
    with pytest.raises(ValueError, match="head_confidence and out_confidence come together"):
        select_drafts(
            one, one, one[0], one[0], rates, rates, one[0], out_draft_ids=one.clone(), out_draft_len=one[0].clone(),
            out_picked=one[0].clone(), out_confidence=one.clone(),
        )


@settings(max_examples=50)
@given(data=st.data())
def test_no_other_choice_has_a_higher_expectation(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    """By brute force: the expected number of accepted drafts, summed over every possible number."""
    width, rate = data.draw(st.integers(1, 9)), st.floats(0.05, 0.95)
    head_width = data.draw(st.integers(1, width))
    rows = data.draw(st.integers(1, 5))
    heads, lookups = (data.draw(st.lists(rate, min_size=4, max_size=4)) for _ in range(2))
    lens = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    match = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    _, drafted, picked = pick(heads, lookups, lens, match, interpret, device, head_width=head_width, width=width)

    def expected(p: float, count: int) -> float:
        exactly = [p**k * (1 - p) for k in range(count)] + [p**count]
        return sum(k * chance for k, chance in enumerate(exactly))

    for row in range(rows):
        head_value, of_lookup = expected(heads[match[row]], head_width), expected(lookups[match[row]], lens[row])
        assert drafted[row] == (lens[row] if picked[row] else head_width)
        assert (of_lookup, head_value)[picked[row] == 0] >= max(head_value, of_lookup) - 1e-4


def judge(ids: list[int], emitted: list[int]) -> tuple[int, int]:
    """(kept, tried) of one proposal."""
    kept = tried = 0
    for draft, token in zip(ids, emitted, strict=False):
        tried += 1
        if draft != token:
            break
        kept += 1
    return kept, tried


@settings(max_examples=40)
@given(data=st.data())
def test_both_proposals_are_compared_with_the_emitted_tokens(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    token, width = st.integers(0, 1), data.draw(st.integers(1, 5))
    head_width, rows, num_match_lens = data.draw(st.integers(1, width)), data.draw(st.sampled_from([1, 3, BLOCK + 2])), 5
    rng = data.draw(st.randoms(use_true_random=False))
    heads = [[rng.randint(0, 1) for _ in range(head_width)] for _ in range(rows)]
    looks = [[rng.randint(0, 1) for _ in range(width)] for _ in range(rows)]
    lookup_len, match = [rng.randint(0, width) for _ in range(rows)], [rng.randint(0, num_match_lens - 1) for _ in range(rows)]
    accepted, live = [rng.randint(0, width) for _ in range(rows)], [rng.randint(0, 1) for _ in range(rows)]
    picked, first = [rng.randint(0, 1) for _ in range(rows)], data.draw(token)
    tokens = [[first, *(rng.randint(0, 1) for _ in range(width + 1)), 9] for _ in range(rows)]
    before = [rng.randint(0, 1) for _ in range(rows)]
    old = [[[rng.uniform(0, 4), rng.uniform(4, 9)] for _ in range(num_match_lens)] for _ in range(2)]
    priors = [[1.0, 2.0], [3.0, 4.0]]
    head_counts, lookup_counts = (floats(counts, device) for counts in old)
    totals = torch.zeros(4, dtype=torch.int64, device=device)
    update_acceptance(
        ints(tokens, device), ints([b + a + 1 for b, a in zip(before, accepted, strict=True)], device), ints(live, device),
        ints(accepted, device), ints(heads, device), ints(looks, device), ints(lookup_len, device), ints(match, device),
        ints(picked, device), head_prior=floats(priors[0], device), lookup_prior=floats(priors[1], device),
        head_counts=head_counts, lookup_counts=lookup_counts, totals=totals, interpret=interpret,
    )

    def faded(old: list[float], prior: list[float], kept: float, tried: float) -> list[float]:
        left = max(0.0, 1 - tried / MEMORY)
        return [p + (o - p) * left + new for o, p, new in zip(old, prior, (kept, tried), strict=True)]

    sums, expected_counts = [[[0, 0] for _ in range(num_match_lens)] for _ in range(2)], [0] * 4
    for row in range(rows):
        if not live[row]:
            continue
        emitted = tokens[row][before[row] : before[row] + accepted[row] + 1]
        for side, ids in enumerate((heads[row], looks[row][: lookup_len[row]])):
            for at, value in enumerate(judge(ids, emitted)):
                sums[side][match[row]][at] += value
        expected_counts[picked[row]] += 1
        expected_counts[2 + picked[row]] += accepted[row]
    for side, counts in enumerate((head_counts, lookup_counts)):
        wanted = [faded(before, priors[side], *seen) for before, seen in zip(old[side], sums[side], strict=True)]
        torch.testing.assert_close(counts.cpu(), torch.tensor(wanted, dtype=torch.float32))
    assert totals.tolist() == expected_counts


def test_a_round_of_more_than_memory_drafts_forgets_the_older_counts(interpret: bool, device: torch.device) -> None:
    width = 8
    rows = int(MEMORY) // width + 1
    ones, right = ints([1] * rows, device), ints([[3] * width] * rows, device)
    head_counts, lookup_counts = floats([[900, 950]], device), floats([[2, 950]], device)
    priors = floats([[4, 8], [3, 7]], device)
    update_acceptance(
        ints([[3] * (width + 1)] * rows, device), (width + 1) * ones, ones, width * ones, right, right, width * ones, 0 * ones,
        ones, head_prior=priors[0], lookup_prior=priors[1], head_counts=head_counts, lookup_counts=lookup_counts,
        totals=torch.zeros(4, dtype=torch.int64, device=device), interpret=interpret,
    )
    all_kept = rows * width
    assert head_counts.tolist() == [[4 + all_kept, 8 + all_kept]]
    assert lookup_counts.tolist() == [[3 + all_kept, 7 + all_kept]]


def test_wrong_arguments_are_refused() -> None:
    cpu = torch.device("cpu")
    row_ints, counts = ints([1, 1], cpu), floats([[1, 2], [1, 2]], cpu)
    good: dict[str, Any] = {
        "head_ids": ints([[1], [2]], cpu), "lookup_ids": ints([[1, 2], [2, 3]], cpu), "lookup_len": row_ints,
        "match_len": row_ints,
        "head_counts": counts, "lookup_counts": counts, "live": row_ints, "out_draft_ids": ints([[0, 0], [0, 0]], cpu),
        "out_draft_len": row_ints.clone(), "out_picked": row_ints.clone(),
    }
    select_drafts(**good)
    for name in good:
        with pytest.raises(ValueError, match=f"select_drafts: {name} is int64"):
            select_drafts(**{**good, name: good[name].long()})
    with pytest.raises(ValueError, match="select_drafts: head_ids"):
        select_drafts(**{**good, "head_ids": ints([[1, 2, 3]] * 2, cpu)})
    judged: dict[str, Any] = {name: good[name] for name in ("head_ids", "lookup_ids", "lookup_len", "match_len", "live")}
    judged |= {
        "tokens": good["lookup_ids"],
        "num_tokens": row_ints,
        "accepted_len": row_ints - 1,
        "picked": row_ints,
        "head_prior": counts[0],
    }
    judged |= {"lookup_prior": counts[0], "head_counts": counts.clone(), "lookup_counts": counts.clone()}
    totals = torch.zeros(4, dtype=torch.int64)
    update_acceptance(**judged, totals=totals)
    for name in judged:
        with pytest.raises(ValueError, match=f"update_acceptance: {name} is int64"):
            update_acceptance(**{**judged, name: judged[name].long()}, totals=totals)
