"""cutoff: the smallest logit of each kept set: top-k with ties, top-p of what top-k keeps, min-p as a lower bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.sampling import cutoff as module
from batchspec.kernels.sampling.cutoff import cutoff

INF, NAN = float("inf"), float("nan")


def cut(logits: Tensor, interpret: bool, *, temp: float = 1.0, k: int = 0, p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Cutoffs of T flat tokens that share their settings."""
    num_tokens, device = logits.shape[0], logits.device
    row_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    out = torch.full((num_tokens,), NAN, dtype=logits.dtype, device=device)
    floats = (torch.tensor([x], dtype=torch.float32, device=device) for x in (p, min_p))
    row_settings = (torch.tensor([temp], device=device), torch.tensor([k], dtype=torch.int32, device=device), *floats)
    cutoff(logits, row_ids, *row_settings, out_cutoff=out, interpret=interpret)
    return out


def separated(*shape: int, device: torch.device) -> Tensor:
    """Logits that are far apart, and whose cumulative masses are not close to round numbers."""
    order = torch.argsort(torch.randn(*shape), -1).float()
    return (order * 0.37 - 3.01).to(device)


def kept_mass(logits: Tensor, low: float, temp: float, k: int) -> tuple[float, float]:
    """Of the mass that top-k keeps: the share of the logits >= low and the share of those > low, in float64."""
    x = logits.double().cpu()
    if 0 < k < len(x):
        x = x[x >= x.topk(k).values[-1]]
    mass = torch.softmax(x / temp, 0)
    return float(mass[x >= low].sum()), float(mass[x > low].sum())


# top-k


@pytest.mark.parametrize("k", [1, 2, 7, 39, 40])
def test_top_k_is_the_kth_largest(k: int, interpret: bool, device: torch.device) -> None:
    logits = separated(1, 41, device=device)
    assert cut(logits, interpret, k=k).tolist() == logits.topk(k).values[:, -1].tolist()


@pytest.mark.parametrize("k", [0, -1, 41, 5000])
def test_top_k_switched_off_or_as_large_as_the_vocabulary_cuts_nothing(k: int, interpret: bool, device: torch.device) -> None:
    assert cut(separated(2, 41, device=device), interpret, k=k).tolist() == [-INF, -INF]


def test_ties_with_the_kth_are_kept_and_zero_ties_with_minus_zero(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, -0.0, -1.0, -2.0]], device=device)
    assert cut(logits, interpret, k=2).tolist() == [2.0, 1.0, 0.0]
    kept = logits >= cut(logits, interpret, k=1)[:, None]
    assert kept.sum(1).tolist() == [1, 4, 2]


def test_forbidden_ids_are_kept_only_when_top_k_reaches_them(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[1.0, -INF, 3.0, -INF, 2.0]], device=device)
    assert [cut(logits, interpret, k=k).item() for k in (2, 3, 4)] == [2.0, 1.0, -INF]


# top-p


@pytest.mark.parametrize("temp", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_is_the_end_of_the_smallest_likeliest_set_that_reaches_it(
    p: float, temp: float, interpret: bool, device: torch.device
) -> None:
    logits = separated(1, 33, device=device)
    expected = []
    for row in logits.tolist():
        falling = sorted(row, reverse=True)
        mass = [math.exp((x - falling[0]) / temp) for x in falling]
        expected.append(next(x for i, x in enumerate(falling) if sum(mass[: i + 1]) >= p * sum(mass)))
    assert cut(logits, interpret, p=p, temp=temp).tolist() == torch.tensor(expected).tolist()


def test_ties_at_the_end_of_the_nucleus_are_all_kept(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.0, 1.0, -1.0]], device=device)
    assert cut(logits, interpret, p=0.6).tolist() == [1.0]
    assert cut(torch.zeros(2, 50, device=device), interpret, p=0.3).tolist() == [0.0, 0.0]


def test_forbidden_ids_carry_no_mass(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[2.0, -INF, 1.0, -INF, 0.0]], device=device)
    assert [cut(logits, interpret, p=p).item() for p in (0.6, 0.8, 0.95)] == [2.0, 1.0, 0.0]
    assert cut(torch.full((1, 9), -INF, device=device), interpret, k=2, p=0.5, min_p=0.1).tolist() == [-INF]


def test_top_p_measures_what_top_k_keeps(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.9, 1.8, 1.7, 1.6, 1.5]], device=device)
    assert cut(logits, interpret, p=0.6).item() == pytest.approx(1.7)
    assert cut(logits, interpret, k=2, p=0.6).item() == pytest.approx(1.9)
    assert cut(logits, interpret, k=2, p=0.5).item() == pytest.approx(2.0)
    ties = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]], device=device)  # top-k 2 leaves four
    assert cut(ties, interpret, k=2, p=0.9).item() == 1.0
    assert cut(ties, interpret, k=2, p=0.45).item() == 2.0


# min-p and the rest


def test_min_p_is_a_bound_relative_to_the_likeliest(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 0.0]], device=device)
    assert cut(logits, interpret, min_p=0.1, temp=2.0).item() == pytest.approx(5 + 2 * math.log(0.1), abs=1e-5)
    assert cut(logits, interpret, min_p=1.0).item() == 5.0
    assert cut(logits, interpret, min_p=0.5, k=2).item() == pytest.approx(5 + math.log(0.5), abs=1e-5)
    assert cut(logits, interpret, min_p=1e-4, k=2).item() == 4.0
    assert cut(logits, interpret, min_p=1e-4, p=0.7).item() == 4.0


def test_greedy_rows_and_rows_without_filters_have_no_cutoff(interpret: bool, device: torch.device) -> None:
    logits = separated(2, 41, device=device)
    assert cut(logits, interpret, temp=0.0, k=3, p=0.5, min_p=0.5).tolist() == [-INF, -INF]
    assert cut(logits, interpret).tolist() == [-INF, -INF]


def test_each_token_takes_the_settings_of_its_row(interpret: bool, device: torch.device) -> None:
    logits = separated(1, 41, device=device).expand(5, -1)
    falling = logits[0].sort(descending=True).values.tolist()
    out = torch.full((5,), NAN, device=device)
    cutoff(
        logits,
        torch.tensor([3, 1, 0, 2, 1], dtype=torch.int32, device=device),
        torch.tensor([1.0, 1.0, 0.0, 1.0], device=device),
        torch.tensor([0, 5, 5, 2], dtype=torch.int32, device=device),
        torch.tensor([1e-3, 1.0, 0.5, 1.0], device=device),
        torch.zeros(4, device=device),
        out_cutoff=out,
        interpret=interpret,
    )
    assert out.tolist() == [falling[1], falling[4], falling[0], -INF, falling[4]]


def test_rows_of_a_wider_tensor_are_read_in_place(interpret: bool, device: torch.device) -> None:
    wide = torch.full((2, 80), 99.0, device=device)
    wide[:, 8:49] = separated(2, 41, device=device)
    logits = wide[:, 8:49]
    assert cut(logits, interpret, k=6, p=0.8).tolist() == cut(logits.contiguous(), interpret, k=6, p=0.8).tolist()


def test_a_vocabulary_of_one(interpret: bool, device: torch.device) -> None:
    assert cut(torch.tensor([[-7.5]], device=device), interpret, k=1, p=0.5).tolist() == [-7.5]


def test_float64_logits_are_cut_in_float64(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64, device=device)
    assert cut(logits, interpret, k=1).tolist() == [1.0 + 1e-12]


@pytest.mark.parametrize("row", [[-0.0, 0.0], [-0.0, -0.0], [0.0, -1.0], [-0.0, -1e-3, -5.0]])
def test_zeros_of_either_sign_are_one_value(row: list[float], interpret: bool, device: torch.device) -> None:
    """Their bit patterns differ: as different search keys they would make an empty bracket."""
    logits = torch.tensor([row], device=device)
    assert cut(logits, interpret, k=1).tolist() == [0.0]
    assert cut(logits, interpret, p=0.3, temp=0.3).tolist() == [0.0]


# any logits


KEPT = given(
    seed=st.integers(0, 999), vocab=st.sampled_from([2, 17, 300, 1003]), scale=st.sampled_from([0.01, 1.0, 6.0, 1e4]),
    levels=st.sampled_from([0, 3, 40]), forbidden=st.booleans(), temp=st.sampled_from([0.3, 1.0, 2.0]),
    k=st.sampled_from([0, 1, 20, 299, 5000]), p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]), short_list=st.booleans(),
)


@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_the_kept_set_is_that_of_the_reference_up_to_the_rounding_of_sums(
    examples: int, interpret: bool, device: torch.device
) -> None:
    settings(max_examples=examples)(KEPT(check_kept_set))(interpret=interpret, device=device)


def check_kept_set(
    seed: int, vocab: int, scale: float, levels: int, forbidden: bool, temp: float, k: int, p: float, min_p: float,
    short_list: bool, interpret: bool, device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab, generator=generator) * scale
    if levels:  # ties
        logits = (logits / scale * levels / 4).round() * scale
    if forbidden:
        logits[0, torch.randperm(vocab, generator=generator)[: vocab // 3]] = -INF
    with pytest.MonkeyPatch.context() as patch:
        if short_list:  # a list that overflows: brackets shrink, or ties are searched in the row itself
            patch.setattr(module, "BLOCK", 64)
            patch.setattr(module, "DEPTH", 2)
            patch.setattr(module, "MAX_PASSES", 4)
        low = cut(logits.to(device), interpret, temp=temp, k=k, p=p, min_p=min_p).item()
    assert low == -INF or min_p > 0 or bool((logits == low).any())
    expected = cut(logits, False, temp=temp, k=k, p=p, min_p=min_p).item()
    if p == 1:
        assert low == pytest.approx(expected, rel=1e-6)
    elif min_p == 0:
        with_it, without = kept_mass(logits[0], low, temp, k)
        assert with_it >= p - 1e-5
        assert without < p + 1e-5
    elif low != pytest.approx(expected, rel=1e-6):
        floor = float(logits.max()) + temp * math.log(min_p)
        assert min(low, expected) >= floor - 1e-4


@pytest.mark.parametrize("scale", [0.05, pytest.param(8.0, marks=pytest.mark.slow)])
def test_long_rows_whatever_the_capacity_of_the_list(
    scale: float, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(1, 2000, device=device) * scale
    cases: list[dict[str, Any]] = [{"k": 900}, {"k": 1500, "p": 0.9}]
    usual = [cut(logits, interpret, **case).tolist() for case in cases]
    monkeypatch.setattr(module, "BLOCK", 512)
    monkeypatch.setattr(module, "DEPTH", 2)
    assert [cut(logits, interpret, **case).tolist() for case in cases] == usual
    monkeypatch.setattr(module, "MAX_PASSES", 1)
    assert [cut(logits, interpret, **case).tolist() for case in cases] == usual


def test_a_cutoff_does_not_depend_on_the_rest_of_the_batch(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(2, 700, device=device) * torch.tensor([[0.1], [3.0]], device=device)
    together = cut(logits, interpret, k=600, p=0.95)
    for t in range(2):
        assert cut(logits[t : t + 1], interpret, k=600, p=0.95)[0] == together[t]


def test_a_row_that_is_not_finite_leaves_the_others_alone(interpret: bool, device: torch.device) -> None:
    """Its own cutoff is undefined and not used by `sample`, but the search must end."""
    logits = separated(6, 300, device=device)
    healthy = cut(logits[::5], interpret, k=20, p=0.7, min_p=0.01).tolist()
    logits[1, 3], logits[2, 3], logits[3], logits[4] = NAN, INF, NAN, INF
    assert cut(logits, interpret, k=20, p=0.7, min_p=0.01)[::5].tolist() == healthy


def test_wrong_arguments_are_refused() -> None:
    good: dict[str, Any] = {
        "logits": torch.zeros(2, 8),
        "row_ids": torch.zeros(2, dtype=torch.int32),
        "temperature": torch.ones(3),
        "top_k": torch.zeros(3, dtype=torch.int32),
        "top_p": torch.ones(3),
        "min_p": torch.zeros(3),
        "out_cutoff": torch.zeros(2),
    }
    cutoff(**good)
    for name, bad in (
        ("logits", torch.zeros(2, 8, dtype=torch.bfloat16)),
        ("row_ids", torch.zeros(3, dtype=torch.int32)),
        ("temperature", torch.ones(3, dtype=torch.float64)),
        ("top_k", torch.zeros(3, dtype=torch.int64)),
        ("top_p", torch.ones(2)),
        ("min_p", torch.zeros(6)[::2]),
        ("out_cutoff", torch.zeros(2, dtype=torch.float64)),
    ):
        with pytest.raises(ValueError, match=f"cutoff: {name} is "):
            cutoff(**{**good, name: bad})
