"""top_candidates: the best columns of each row, in a total order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.kernels.sampling import top_candidates as module
from batchspec.kernels.sampling.top_candidates import GROUP, MOST, top_candidates

INF, NAN = float("inf"), float("nan")


def best(logits: Tensor, count: int, interpret: bool) -> tuple[Tensor, Tensor]:
    values = torch.full((len(logits), count), 7.0, dtype=logits.dtype, device=logits.device)
    ids = torch.full((len(logits), count), -7, dtype=torch.int64, device=logits.device)
    top_candidates(logits, count, out_values=values, out_ids=ids, interpret=interpret)
    return values.cpu(), ids.cpu()


def by_definition(row: list[float], count: int) -> list[int]:
    """Columns by value, then by number; NaN is -inf."""
    return sorted(range(len(row)), key=lambda i: (INF if row[i] != row[i] else -row[i], i))[:count]


def check(logits: Tensor, count: int, interpret: bool) -> None:
    values, ids = best(logits, count, interpret)
    rows = logits.cpu()
    assert ids.tolist() == [by_definition(row, count) for row in rows.tolist()]
    assert torch.equal(values, torch.where(rows.isnan(), -INF, rows).gather(1, ids))


@pytest.mark.parametrize("count", [1, 5, 16, MOST])
@pytest.mark.parametrize("vocab", [MOST, GROUP - 1, GROUP, 33 * GROUP + 5])
def test_the_best_columns_are_those_of_a_sort(vocab: int, count: int, interpret: bool, device: torch.device) -> None:
    check(torch.randn(3, vocab, device=device), count, interpret)


def test_they_are_those_of_topk_where_no_two_are_equal(interpret: bool, device: torch.device) -> None:
    logits = torch.stack([torch.randperm(40 * GROUP) for _ in range(2)]).float().to(device)
    values, ids = best(logits, 16, interpret)
    expected = logits.topk(16, dim=1)
    assert torch.equal(values, expected.values.cpu())
    assert torch.equal(ids, expected.indices.cpu())


def test_of_equals_the_lowest_column_comes_first(interpret: bool, device: torch.device) -> None:
    """Within a group, between groups, and where equals do not all fit."""
    few = torch.randint(-2, 3, (4, 20 * GROUP + 3), device=device).float()
    few[1] = 0.0
    few[2, 1:] = few[2, :-1].clone()
    few[3, ::2] = -0.0  # equals 0.0
    few[3, 1::2] = 0.0
    check(few, 16, interpret)
    peaks = torch.zeros(1, 30 * GROUP, device=device)
    peaks[0, GROUP - 1 :: GROUP] = 1.0  # the last column of each group: as many groups as the count, and more
    check(peaks, 16, interpret)


def test_the_best_may_all_lie_in_one_group(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(2, 50 * GROUP + 1, device=device)
    logits[:, 7 * GROUP + 3 : 7 * GROUP + 30] += 100
    logits[1, -1] = 200.0  # in a group of one column
    check(logits, 16, interpret)


def test_nan_and_infinities(interpret: bool, device: torch.device) -> None:
    """No column is named twice, even in a row that holds nothing but NaN and -inf."""
    logits = torch.full((4, 3 * GROUP + 9), -INF, device=device)
    logits[0] = NAN
    logits[1, 5], logits[1, GROUP + 2], logits[1, 9] = NAN, 3.0, INF
    logits[2, ::3] = NAN
    logits[3] = torch.randn(logits.shape[1], device=device)
    logits[3, 1::2] = NAN
    check(logits, 16, interpret)


def test_rows_may_be_slices_of_wider_ones(interpret: bool, device: torch.device) -> None:
    wide = torch.randn(5, 3 * GROUP + 40, device=device)
    wide[:, 2 * GROUP :] = 1e9
    check(wide[::2, : 2 * GROUP], 16, interpret)


def test_a_vocabulary_of_many_groups_has_wider_ones(
    interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_GROUPS", 8)
    check(torch.randn(2, 9 * GROUP + 1, device=device), 16, interpret)


def test_fp64_is_exact(device: torch.device) -> None:
    logits = torch.zeros(1, 40, dtype=torch.float64, device=device)
    logits[0, 7], logits[0, 3] = 1 + 1e-12, 1.0
    check(logits, 4, False)


def test_arguments_that_do_not_fit_are_refused(device: torch.device) -> None:
    logits = torch.zeros(2, 20, device=device)
    values, ids = torch.zeros(2, 4, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"top_candidates: logits is float16"):
        top_candidates(logits.half(), 4, out_values=values, out_ids=ids)
    with pytest.raises(ValueError, match=r"top_candidates: out_ids is int32"):
        top_candidates(logits, 4, out_values=values, out_ids=ids.int())
    for count in (0, 21):
        shape = torch.zeros(2, count, device=device)
        with pytest.raises(ValueError, match=rf"top_candidates: count is {count}; must be 1..20"):
            top_candidates(logits, count, out_values=shape, out_ids=shape.long())
