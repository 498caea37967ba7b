"""Routing: the chosen experts, their weights and the lists of pairs are those of the plain computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.moe.list_pairs import BLOCK, MANY_PAIRS
from batchspec.kernels.moe.route import Scoring, route, route_reference
from batchspec.kernels.moe.route_few import FEW_TOKENS
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.units import SIZE_STEP, Routing, max_units
from tests.kernels.moe_cases import pairs_of_units


def assert_same_lists(found: Routing, wanted: Routing) -> None:
    for name in ("expert_ids", "pairs", "places", "offsets", "units"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def assert_same(found: Routing, wanted: Routing) -> None:
    assert_same_lists(found, wanted)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [20, 110])  # one launch with a tail, two launches
@pytest.mark.parametrize(("scoring", "norm_topk"), [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False)])
def test_scorings(scoring: Scoring, norm_topk: bool, tokens: int, interpret: bool, device: torch.device) -> None:
    logits = torch.randn(tokens, 10, device=device)
    bias = torch.randn(10, device=device) if scoring == "sigmoid" else None
    found = route(logits, 3, scoring=scoring, norm_topk=norm_topk, bias=bias, unit_pairs=8, interpret=interpret)
    assert_same(found, route_reference(logits, 3, scoring=scoring, norm_topk=norm_topk, bias=bias, unit_pairs=8))
    if norm_topk:
        torch.testing.assert_close(found.weights.sum(1), torch.ones(tokens, device=device))


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_number_may_be_added_to_the_sum_of_sigmoid_weights(tokens: int, interpret: bool, device: torch.device) -> None:
    """Of small scores it counts."""
    logits = torch.randn(tokens, 9, device=device) - 12
    how: dict[str, Any] = {"scoring": "sigmoid", "norm_topk": True, "sum_eps": 1e-6, "scale": 1.5, "unit_pairs": 16}
    found = route(logits, 3, interpret=interpret, **how)
    chosen = logits.double().sigmoid().gather(1, found.expert_ids.long())
    wanted = 1.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-6)
    assert float(wanted.sum(-1).max()) < 1.499
    torch.testing.assert_close(found.weights.double(), wanted, rtol=1e-5, atol=0)


def test_softmax_of_the_chosen_is_the_renormalised_softmax_of_all(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(9, 12, device=device)
    routing = route(logits, 4, norm_topk=True, unit_pairs=16, interpret=interpret)
    top = logits.topk(4)
    assert torch.equal(routing.expert_ids.long(), top.indices)
    torch.testing.assert_close(routing.weights, top.values.softmax(-1))
    every = logits.softmax(-1).topk(4).values
    torch.testing.assert_close(routing.weights, every / every.sum(-1, keepdim=True))


def test_a_bias_chooses_but_does_not_weigh(interpret: bool, device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=device)
    bias = torch.tensor([9.0, 0.0, 8.0, 0.0], device=device)
    routing = route(logits, 2, scoring="sigmoid", norm_topk=False, bias=bias, unit_pairs=8, interpret=interpret)
    assert routing.expert_ids.tolist() == [[2, 0]]  # by weight
    torch.testing.assert_close(routing.weights, logits[:, [2, 0]].sigmoid())
    tied = route(logits * 0, 3, scoring="sigmoid", norm_topk=True, bias=bias, unit_pairs=8, interpret=interpret)
    assert tied.expert_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("tokens", [4, 110])
def test_weights_are_multiplied_by_the_factors_of_their_experts_in_the_end(
    tokens: int, interpret: bool, device: torch.device
) -> None:
    logits, factors = torch.randn(tokens, 10, device=device), torch.randn(10, device=device)
    live = torch.arange(tokens, device=device) != 1
    found, plain = (
        route(logits, 3, norm_topk=True, factors=given, unit_pairs=8, live=live, interpret=interpret) for given in (factors, None)
    )
    assert_same_lists(found, plain)
    padded = torch.cat((factors, factors[:1]))  # dead tokens have the expert after the last one, and weights of 0
    torch.testing.assert_close(found.weights, plain.weights * padded[plain.expert_ids.long()])
    assert_same(found, route_reference(logits, 3, norm_topk=True, factors=factors, unit_pairs=8, live=live))


@pytest.mark.parametrize("tokens", [13, 140])
@pytest.mark.parametrize(
    ("experts", "groups", "top_k"), [(12, (4, 2), 5), (20, (2, 1), 3), (15, (5, 5), 4), (40, (8, 3), 8), (510, (2, 2), 22)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_experts_of_the_best_groups(
    biased: bool, experts: int, groups: tuple[int, int], top_k: int, tokens: int, interpret: bool, device: torch.device
) -> None:
    """By hand: a group's score is the sum of its two largest; no expert of another group is chosen. The weights are scaled."""
    logits = torch.randn(tokens, experts, device=device)
    bias = torch.randn(experts, device=device) if biased else None
    call: dict[str, Any] = {"scoring": "sigmoid", "norm_topk": True, "scale": 2.5, "bias": bias, "unit_pairs": 8}
    found = route(logits, top_k, groups=groups, interpret=interpret, **call)
    assert_same(found, route_reference(logits, top_k, groups=groups, **call))
    torch.testing.assert_close(found.weights.sum(1), torch.full((tokens,), 2.5, device=device))
    count, best = groups
    size, choices = experts // count, logits.sigmoid() if bias is None else logits.sigmoid() + bias
    for row, ids in zip(choices.tolist(), found.expert_ids.tolist(), strict=True):
        scores = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(count)]
        kept = sorted(range(count), key=lambda g: -scores[g])[:best]
        allowed = sorted((expert for g in kept for expert in range(g * size, (g + 1) * size)), key=lambda expert: -row[expert])
        assert sorted(ids) == sorted(allowed[:top_k])


def test_the_first_of_equal_groups_is_the_better_one(interpret: bool, device: torch.device) -> None:
    logits = torch.zeros(3, 12, device=device)
    logits[1, 10], logits[2, 4:8], logits[2, 9:] = -1.0, torch.nan, torch.nan
    call: dict[str, Any] = {"scoring": "sigmoid", "norm_topk": False, "unit_pairs": 8, "groups": (3, 2)}
    found = route(logits, 4, interpret=interpret, **call)
    assert found.expert_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert_same(found, route_reference(logits, 4, **call))


@pytest.mark.parametrize(
    ("scoring", "groups"), [("softmax", (2, 1)), *(("sigmoid", groups) for groups in ((3, 1), (4, 5), (8, 8), (4, 1)))]
)
def test_groups_that_cannot_be_are_refused(scoring: Scoring, groups: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="groups need sigmoid, equal sizes of two or more"):
        route(torch.zeros(4, 8), 3, scoring=scoring, norm_topk=True, groups=groups, unit_pairs=8)


@pytest.mark.parametrize("tokens", [3, 150])
def test_the_lowest_id_wins_ties(tokens: int, interpret: bool, device: torch.device) -> None:
    logits = torch.zeros(tokens, 7, device=device)
    logits[0] = torch.tensor([-1.0, 2.0, -0.0, 0.0, 2.0, -3.0, 0.0])
    logits[1] = torch.tensor([float("nan"), -1.0, float("-inf"), float("inf"), float("nan"), -2.0, float("-inf")])
    routing = route(logits, 5, norm_topk=True, unit_pairs=8, interpret=interpret)
    assert routing.expert_ids[:3].tolist() == [[1, 4, 2, 3, 6], [3, 1, 5, 0, 2], [0, 1, 2, 3, 4]]


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.integers(1, 80), experts=st.integers(1, 40), top_k=st.integers(1, 6), unit_pairs=st.sampled_from([8, 16, 32, 48]),
    skew=st.booleans(), largest_first=st.booleans(), seed=st.integers(0, 99),
)
def test_any_size(
    tokens: int, experts: int, top_k: int, unit_pairs: int, skew: bool, largest_first: bool, seed: int, interpret: bool,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(tokens, experts, device=device)
    if skew:  # all tokens on the same experts, the others without tokens
        logits += torch.linspace(0, 100, experts, device=device)
    top_k = min(top_k, experts)
    how: dict[str, Any] = {"norm_topk": True, "unit_pairs": unit_pairs, "largest_first": largest_first}
    found = route(logits, top_k, interpret=interpret, **how)
    assert_same(found, route_reference(logits, top_k, **how))
    assert_lists_hold_every_pair_once(found, tokens, experts)


@pytest.mark.parametrize(("tokens", "many"), [(16, False), (40, False), (150, False), (40, True), (150, True)])
@pytest.mark.parametrize("unit_pairs", [16, 48])
def test_experts_with_the_largest_units_come_first(
    tokens: int, unit_pairs: int, many: bool, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps of 16 pairs; of equal sizes the lowest id is first. The units of an expert stay side by side."""
    if many:
        monkeypatch.setattr("batchspec.kernels.moe.list_pairs.MANY_PAIRS", 1)
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, 11, device=device) + torch.linspace(-2, 2, 11, device=device).roll(4)
    how: dict[str, Any] = {"norm_topk": True, "unit_pairs": unit_pairs}
    found = route(logits, 4, largest_first=True, interpret=interpret, **how)
    by_expert = route_reference(logits, 4, **how).units.tolist()
    real = [tuple(unit) for unit in by_expert if unit[2]]
    sizes = {expert: -(-min(count, unit_pairs) // 16) for expert, _, count, _ in real}  # of an expert's largest unit
    assert len(set(sizes.values())) > 1 or unit_pairs == 16 or tokens == 16
    wanted = sorted(real, key=lambda unit: (-sizes[unit[0]], unit[0], unit[3]))
    assert found.units.tolist() == [list(unit) for unit in wanted] + [[0, 0, 0, 0]] * (len(by_expert) - len(real))


def test_the_sizes_of_few_tokens_are_equal() -> None:
    """Whatever experts they choose: the launch for few tokens need not sort by size."""
    assert SIZE_STEP.value >= FEW_TOKENS


@pytest.mark.parametrize(("blocks", "top_k"), [(1.7, 5), (1.9, 3), (4.1, 4)])
def test_lists_of_many_pairs(
    blocks: float, top_k: int, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more pairs than a program reads at once; with dead tokens, all of them at the end of the list. On a GPU a program reads
    as many as ever, elsewhere an eighth."""
    scale = 1 if device.type == "cuda" else 8
    block, unit_pairs = BLOCK // scale, 64 // scale
    monkeypatch.setattr("batchspec.kernels.moe.list_pairs.BLOCK", block)
    tokens = int(blocks * block / top_k)
    torch.manual_seed(tokens)
    logits, live = torch.randn(tokens, 7, device=device), torch.rand(tokens, device=device) < 0.8
    found = route(logits, top_k, norm_topk=True, unit_pairs=unit_pairs, interpret=interpret)
    assert_same(found, route_reference(logits, top_k, norm_topk=True, unit_pairs=unit_pairs))
    assert_lists_hold_every_pair_once(found, tokens, 7)
    found = route(logits, top_k, norm_topk=True, unit_pairs=unit_pairs, live=live, interpret=interpret)
    assert_same(found, route_reference(logits, top_k, norm_topk=True, unit_pairs=unit_pairs, live=live))
    dead = found.pairs[int(found.offsets[-1]) :].long() // top_k
    assert not live[dead].any()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "most"), [(37, 7, 4, 256), (150, 31, 3, 256), (150, 33, 1, 2), (99, 5, 5, 3)]
)
@pytest.mark.parametrize("dead", [True, False])
@pytest.mark.parametrize(("unit_pairs", "largest_first"), [(16, False), (32, True)])
def test_lists_of_very_many_pairs(
    tokens: int, experts: int, top_k: int, most: int, dead: bool, unit_pairs: int, largest_first: bool, interpret: bool,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one program per block of pairs, whose size grows with their number. All tokens but one have the same first expert."""
    monkeypatch.setattr("batchspec.kernels.moe.list_pairs.MANY_PAIRS", 1)
    monkeypatch.setattr("batchspec.kernels.moe.list_many.MOST_BLOCKS", most)
    if device.type == "cpu":
        monkeypatch.setattr("batchspec.kernels.moe.list_many.PAIRS", 32)
        monkeypatch.setattr("batchspec.kernels.moe.list_many.CHUNK", 16)
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, experts, device=device)
    logits[1:, experts // 2] += 50
    live = torch.rand(tokens, device=device) < 0.7 if dead else None
    read = torch.full((1,), -1, dtype=torch.int32, device=device)
    how: dict[str, Any] = {"norm_topk": True, "unit_pairs": unit_pairs, "largest_first": largest_first}
    found = route(logits, top_k, live=live, out_num_read=read, interpret=interpret, **how)
    assert_same(found, route_reference(logits, top_k, live=live, **how))
    if live is None:
        assert_lists_hold_every_pair_once(found, tokens, experts)
    assert int(read) == len(found.expert_ids[found.expert_ids < experts].unique())


def test_numbers_of_pairs_of_two_experts_fit_into_an_int32() -> None:
    """`list_kernel` keeps each in a half of it."""
    assert ((MANY_PAIRS - 1) << 16) + MANY_PAIRS - 1 < 1 << 31


@pytest.mark.second
@pytest.mark.parametrize(("experts", "dead"), [(32, False), (33, True), (512, True)])
def test_lists_of_the_most_pairs_of_one_launch(experts: int, dead: bool, interpret: bool, device: torch.device) -> None:
    """Where few experts have nearly all of them, so that numbers of pairs are large; the last program has one expert or two."""
    tokens, top_k = (MANY_PAIRS - 1) // 32, 32
    logits = torch.randn(tokens, experts, device=device) * 0.1 + torch.linspace(-9, 9, experts, device=device)
    live = torch.rand(tokens, device=device) < 0.9 if dead else None
    found = route(logits, top_k, norm_topk=True, unit_pairs=64, live=live, interpret=interpret)
    assert_same(found, route_reference(logits, top_k, norm_topk=True, unit_pairs=64, live=live))


@pytest.mark.parametrize("tokens", [2, 40])  # one launch and two
@pytest.mark.parametrize(("top_k", "biased"), [(22, True), (7, False)])
def test_the_chosen_weights_are_added_in_the_order_of_the_choice(
    top_k: int, biased: bool, tokens: int, interpret: bool, device: torch.device
) -> None:
    """In fp32, one by one. Without a bias that is the order of the slots, with one that of score + bias."""
    if device.type == "cuda" or not interpret:
        pytest.skip("compares bits of a division, which a GPU's fast one and torch round in other ways")
    logits = torch.randn(tokens, 48)
    bias = torch.randn(48) if biased else None
    call: dict[str, Any] = {"scoring": "sigmoid", "bias": bias, "unit_pairs": 16, "interpret": True}
    scores, normed = (route(logits, top_k, norm_topk=norm, **call) for norm in (False, True))
    choice = scores.weights if bias is None else scores.weights + bias[scores.expert_ids.long()]
    in_order = scores.weights.gather(1, choice.sort(-1, descending=True).indices)
    total = torch.zeros(tokens)
    for column in in_order.unbind(1):
        total = total + column
    assert torch.equal(normed.weights, scores.weights / total[:, None])
    assert not torch.equal(normed.weights, scores.weights / in_order.flip(1).cumsum(1)[:, -1:])


def assert_lists_hold_every_pair_once(routing: Routing, tokens: int, experts: int) -> None:
    top_k = routing.expert_ids.shape[1]
    flat = routing.expert_ids.flatten()
    assert sorted(routing.pairs.tolist()) == list(range(tokens * top_k))
    seen: list[int] = []
    for expert, first, count in pairs_of_units(routing):
        assert 0 < count <= routing.unit_pairs
        own: Tensor = routing.pairs[first : first + count]
        assert (flat[own.long()] == expert).all()
        seen += own.tolist()
    assert sorted(seen) == list(range(tokens * top_k))
    assert len(routing.units) == max_units(tokens, top_k, experts, routing.unit_pairs)


def test_rows_of_wider_logits_are_read_in_place(interpret: bool, device: torch.device) -> None:
    wide = torch.randn(6, 40, device=device)
    found = route(wide[::2, 5:25], 3, norm_topk=False, unit_pairs=8, interpret=interpret)
    assert_same(found, route_reference(wide[::2, 5:25].contiguous(), 3, norm_topk=False, unit_pairs=8))


@pytest.mark.parametrize(
    ("tokens", "top_k", "copied"), [(1, 4, True), (5, 6, True), (16, 4, True), (17, 1, False), (9, 5, False)]
)
def test_few_tokens_get_their_rows_in_the_order_of_the_list(
    tokens: int, top_k: int, copied: bool, interpret: bool, device: torch.device
) -> None:
    logits, x = torch.randn(tokens, 12, device=device), torch.randn(tokens, 600, device=device).bfloat16()[:, 290:]
    found = route(logits, top_k, norm_topk=True, unit_pairs=16, rows_of=x, interpret=interpret)
    assert_same(found, route_reference(logits, top_k, norm_topk=True, unit_pairs=16))
    if interpret and copied:
        assert found.rows is not None
        assert torch.equal(found.rows, sort_rows(x, found))
    else:
        assert found.rows is None


def test_an_expert_of_few_tokens_may_have_several_units(interpret: bool, device: torch.device) -> None:
    logits = torch.zeros(13, 9, device=device)
    found = route(logits, 2, norm_topk=True, unit_pairs=4, interpret=interpret)
    assert_same(found, route_reference(logits, 2, norm_topk=True, unit_pairs=4))
    assert [count for _, _, count in pairs_of_units(found)] == [4, 4, 4, 1] * 2


def test_no_token_has_no_pair(interpret: bool, device: torch.device) -> None:
    x = torch.zeros(0, 32, device=device)
    found = route(torch.zeros(0, 9, device=device), 2, norm_topk=True, unit_pairs=8, rows_of=x, interpret=interpret)
    assert not found.offsets.any()
    assert found.rows is None or found.rows.shape == (0, 32)


def test_rows_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="route: rows_of"):
        route(torch.zeros(4, 8), 2, norm_topk=True, unit_pairs=8, rows_of=torch.zeros(3, 32))


def test_the_largest_number_of_experts(interpret: bool, device: torch.device) -> None:
    logits = torch.randn(5, 512, device=device)
    found = route(logits, 16, norm_topk=True, unit_pairs=8, interpret=interpret)
    assert_same(found, route_reference(logits, 16, norm_topk=True, unit_pairs=8))


def test_wrong_arguments_are_refused() -> None:
    logits = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="9 of 8 experts"):
        route(logits, 9, norm_topk=True, unit_pairs=8)
    with pytest.raises(ValueError, match="route: bias"):
        route(logits, 2, scoring="sigmoid", norm_topk=True, bias=torch.zeros(7), unit_pairs=8)
    with pytest.raises(ValueError, match="softmax takes none"):
        route(logits, 2, norm_topk=True, bias=torch.zeros(8), unit_pairs=8)
    with pytest.raises(ValueError, match="softmax takes none"):
        route(logits, 2, norm_topk=True, sum_eps=1e-6, unit_pairs=8)


@pytest.mark.parametrize("tokens", [4, 150])
@pytest.mark.parametrize(("scoring", "norm_topk"), [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False)])
def test_a_token_that_is_not_finite_has_different_experts_like_any_other(
    scoring: Scoring, norm_topk: bool, tokens: int, interpret: bool, device: torch.device
) -> None:
    """The products of experts read memory by these ids. Its weights may be NaN, those of other tokens are untouched."""
    logits = torch.randn(tokens, 9, device=device)
    bias = torch.randn(9, device=device) if scoring == "sigmoid" else None
    call: dict[str, Any] = {"scoring": scoring, "norm_topk": norm_topk, "bias": bias, "unit_pairs": 16}
    logits[0], logits[1], logits[2, 3] = float("nan"), float("-inf"), float("inf")
    found = route(logits, 4, interpret=interpret, **call)
    for row in found.expert_ids.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(9))
    assert_same_lists(found, route_reference(logits, 4, **call))
    torch.testing.assert_close(found.weights[3:], route_reference(logits[3:], 4, **call).weights, rtol=1e-5, atol=1e-7)


@pytest.mark.second
@pytest.mark.parametrize("experts", [6, 16, 40])
@pytest.mark.parametrize("tokens", [20, 190])  # one launch and two
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_dead_tokens_go_through_no_expert(
    scoring: Scoring, tokens: int, experts: int, interpret: bool, device: torch.device
) -> None:
    """The others keep the bits of their weights, and only their experts count as read."""
    logits, live = torch.randn(tokens, experts, device=device), torch.rand(tokens, device=device) < 0.4
    logits[~live, -1] = 9.0  # an expert that dead tokens alone would choose
    logits[live, -1] = -9.0
    logits[~live & (torch.rand(tokens, device=device) < 0.3)] = torch.nan
    call: dict[str, Any] = {"scoring": scoring, "norm_topk": True, "unit_pairs": 8}
    call["bias"] = torch.zeros(experts, device=device) if scoring == "sigmoid" else None
    num_read = torch.full((1,), -1, dtype=torch.int32, device=device)
    found = route(logits, 3, live=live, out_num_read=num_read, interpret=interpret, **call)
    assert_same(found, route_reference(logits, 3, live=live, **call))
    whole, alone = (route(own, 3, interpret=interpret, **call) for own in (logits, logits[live]))
    assert torch.equal(found.weights[live], whole.weights[live])
    assert torch.equal(found.expert_ids[live], alone.expert_ids)
    assert (found.expert_ids[~live] == experts).all()
    assert (found.weights[~live] == 0).all()
    num_pairs = 3 * int(live.sum())
    assert int(found.offsets[-1]) == num_pairs == sum(count for _, _, count in pairs_of_units(found))
    assert live[found.pairs[:num_pairs].long() // 3].all()
    assert not live[found.pairs[num_pairs:].long() // 3].any()
    assert int(num_read) == len(alone.expert_ids.unique()) < experts


@pytest.mark.parametrize("tokens", [4, 190])
def test_no_live_token_is_no_unit(tokens: int, interpret: bool, device: torch.device) -> None:
    logits, num_read = torch.randn(tokens, 7, device=device), torch.full((1,), -1, dtype=torch.int32, device=device)
    live = torch.zeros(tokens, dtype=torch.bool, device=device)
    found = route(logits, 2, norm_topk=True, unit_pairs=8, live=live, out_num_read=num_read, interpret=interpret)
    assert_same(found, route_reference(logits, 2, norm_topk=True, unit_pairs=8, live=live))
    assert not found.units.any()
    assert not found.offsets.any()
    assert int(num_read) == 0


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="route: live"):
        route(torch.zeros(4, 8), 2, norm_topk=True, unit_pairs=8, live=torch.ones(3, dtype=torch.bool))
