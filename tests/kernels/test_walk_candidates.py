"""walk_candidates: K drafts a row, each among its candidates, given the one before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.drafting.walk_candidates import walk_candidates
from batchspec.kernels.sampling.argmax import confidence_of

POISON = -7


def walk(interpret: bool, device: torch.device, **arguments: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Drafts and confidences, written to slices of wider rows."""
    rows, steps, _ = arguments["scores"].shape
    wide = torch.full((2, rows, steps + 2), POISON, dtype=torch.int32, device=device)
    on = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    walk_candidates(**on, out_ids=wide[0, :, :steps], out_confidence=wide[1, :, :steps], interpret=interpret)
    assert (wide[:, :, steps:] == POISON).all()
    ids, sure = wide[:, :, :steps].tolist()
    return ids, sure


def drawn(rows: int, steps: int, count: int, rank: int, *, tokens: int = 50, words: int = 40, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(words, generator=rng)[:count] for _ in range(rows * steps)]).view(rows, steps, count)
    return {
        "scores": torch.randn(rows, steps, count, generator=rng), "ids": ids,
        "prev": torch.randint(tokens, (rows,), generator=rng, dtype=torch.int32),
        "w1": torch.randn(tokens, rank, generator=rng), "w2": torch.randn(words, rank, generator=rng) / rank**0.5,
    }


def test_each_draft_changes_the_scores_of_the_next(interpret: bool, device: torch.device) -> None:
    found = drawn(3, 4, 5, 7)
    drafts, _ = walk(interpret, device, **found)
    for row, own in enumerate(drafts):
        before = int(found["prev"][row])
        for k, draft in enumerate(own):
            z = found["scores"][row, k] + found["w2"][found["ids"][row, k]] @ found["w1"][before]
            before = int(found["ids"][row, k, z.argmax()])
            assert draft == before


def test_drafts_are_mapped_to_the_targets_ids(interpret: bool, device: torch.device) -> None:
    found = drawn(2, 3, 4, 5, tokens=90)
    map_ids = torch.arange(40, dtype=torch.int32) * 2 + 1
    mapped, _ = walk(interpret, device, **found, map_ids=map_ids)
    first, _ = walk(interpret, device, **found)
    assert [own[0] for own in mapped] == [2 * own[0] + 1 for own in first]
    assert all(draft % 2 for own in mapped for draft in own)


def test_the_bias_is_scaled_as_the_scores_of_sampled_rows_are(interpret: bool, device: torch.device) -> None:
    found = drawn(2, 3, 6, 4)
    heat = torch.tensor([0.5, 0.0])
    drafts, _ = walk(interpret, device, **found, temperature=heat)
    doubled, _ = walk(interpret, device, **(found | {"w2": found["w2"] * 2}))
    plain, _ = walk(interpret, device, **found)
    assert drafts == [doubled[0], plain[1]]


def test_a_gate_changes_what_the_token_before_adds(interpret: bool, device: torch.device) -> None:
    found = drawn(3, 4, 5, 7)
    gate = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(1))
    drafts, sure = walk(interpret, device, **found, gate=gate)
    for row, own in enumerate(drafts):
        before = int(found["prev"][row])
        for k, draft in enumerate(own):
            z = found["scores"][row, k] + found["w2"][found["ids"][row, k]] @ (found["w1"][before] * gate[row, k])
            before = int(found["ids"][row, k, z.argmax()])
            assert draft == before
            assert sure[row][k] == int(confidence_of(torch.exp(z - z.max()).sum().unsqueeze(0)))
    assert drafts != walk(interpret, device, **found)[0]
    estimate = {"sure_of_state": torch.zeros(3, 4), "sure_of_token": torch.ones(7)}
    drafts, sure = walk(interpret, device, **found, gate=gate, **estimate)
    odds = float(found["w1"][drafts[1][2]].sum())
    assert sure[1][3] == min(31, max(0, int((4 * (odds + 3)) // 1)))  # the estimate reads the token before without the gate


def test_the_confidence_is_that_of_the_choice_or_of_the_head(interpret: bool, device: torch.device) -> None:
    found = drawn(2, 3, 6, 4)
    drafts, sure = walk(interpret, device, **found)
    z = found["scores"][0, 0] + found["w2"][found["ids"][0, 0]] @ found["w1"][int(found["prev"][0])]
    assert sure[0][0] == int(confidence_of(torch.exp(z - z.max()).sum().unsqueeze(0)))
    of_state, of_token = torch.tensor([[-9.0, 0.1, 9.0], [0.6, -0.6, 1.1]]), torch.randn(4)
    _, sure = walk(interpret, device, **found, sure_of_state=of_state)
    assert sure == [[0, 12, 31], [14, 9, 16]]
    _, sure = walk(interpret, device, **found, sure_of_state=of_state, sure_of_token=of_token)
    odds = float(of_state[1, 2] + found["w1"][drafts[1][1]] @ of_token)
    assert sure[1][2] == min(31, max(0, int((4 * (odds + 3)) // 1)))


def test_scores_that_are_not_finite_choose_another_candidate_or_any(interpret: bool, device: torch.device) -> None:
    found = drawn(3, 2, 4, 4)
    found["scores"][0, 0] = torch.tensor([float("nan"), 1.0, float("-inf"), float("-inf")])
    found["scores"][1, 0] = float("-inf")
    found["scores"][2, 0] = float("nan")
    drafts, sure = walk(interpret, device, **found)
    assert drafts[0][0] == int(found["ids"][0, 0, 1])
    for row in (1, 2):
        assert drafts[row][0] in found["ids"][row, 0].tolist()
        assert sure[row][0] == 0


def test_of_equal_candidates_the_first_wins(interpret: bool, device: torch.device) -> None:
    found = drawn(1, 1, 5, 3)
    found["scores"].zero_()
    found["w2"].zero_()
    assert walk(interpret, device, **found)[0] == [[int(found["ids"][0, 0, 0])]]


@pytest.mark.parametrize(("count", "rank", "steps"), [(16, 256, 5), (9, 3, 1), (1, 1, 2), (13, 100, 7)])
def test_kernel_and_reference_agree(count: int, rank: int, steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = drawn(4, steps, count, rank, seed=count)
    found |= {"sure_of_state": torch.randn(4, steps), "sure_of_token": torch.randn(rank)}
    for dtype in (torch.float32, torch.bfloat16):
        typed = found | {name: found[name].to(dtype) for name in ("w1", "w2")}
        gates: list[dict[str, Any]] = [{}, {"gate": torch.randn(4, steps, rank).to(dtype)}]
        for gate in gates:
            assert walk(True, device, **typed, **gate)[0] == walk(False, torch.device("cpu"), **typed, **gate)[0]


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    good = drawn(2, 3, 4, 5) | {"out_ids": torch.zeros(2, 3, dtype=torch.int32)}
    walk_candidates(**good)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"ids": good["ids"].int()}, "walk_candidates: ids is int32"),
        ({"w2": good["w2"].double()}, "walk_candidates: w2 is float64"),
        ({"out_ids": torch.zeros(2, 2, dtype=torch.int32)}, r"walk_candidates: out_ids is int32 \[2, 2\]"),
        ({"map_ids": torch.zeros(9, dtype=torch.int32)}, r"walk_candidates: map_ids is int32 \[9\]"),
        ({"gate": torch.zeros(2, 3, 4)}, r"walk_candidates: gate is float32 \[2, 3, 4\]"),
        ({"gate": torch.zeros(2, 3, 5).double()}, "walk_candidates: gate is float64"),
        ({"sure_of_token": torch.zeros(5)}, "walk_candidates: sure_of_token without sure_of_state"),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            walk_candidates(**(good | changes))
