"""expand_tree: path scores of all children and the nodes that branch next, against a plain loop over lists."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.tree.expand_tree import Frontier, expand_tree
from tests.kernels.trees import ints


def make_frontier(scores: Tensor, node_ids: list[list[int]], ancestors: list[list[int]]) -> Frontier:
    device, count = scores.device, scores.numel()
    none = torch.zeros(count, dtype=torch.int64, device=device)
    return Frontier(scores, ints(node_ids, device), torch.tensor(ancestors, device=device), none.int(), none)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_a_loop_over_every_child(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    """Logits are quarters and normalisers too, so that many scores are equal; NaN and -inf occur."""
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    rows, branches = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([2, 3, 8, 10]))
    parents = data.draw(st.sampled_from([1, branches]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    mapped, more = data.draw(st.booleans()), data.draw(st.booleans())
    odd = [float("nan"), float("-inf")] if data.draw(st.booleans()) else []
    best = [[rng.choice([*(-q / 4 for q in range(6)), *odd]) for _ in range(branches)] for _ in range(rows * parents)]
    norm = [rng.choice([0.0, 0.25, 1.0]) for _ in range(rows * parents)]
    drafts = [[rng.randrange(50) for _ in range(branches)] for _ in range(rows * parents)]
    scores = [[-rng.randrange(5) / 4 for _ in range(parents)] for _ in range(rows)]
    node_ids = [[rng.randrange(-1, 40) for _ in range(parents)] for _ in range(rows)]
    ancestors = [[rng.getrandbits(20) for _ in range(parents)] for _ in range(rows)]
    columns, first, bit = parents * branches, 40, 33
    out_scores = torch.full((rows, first + columns + 1), 7.0, dtype=dtype, device=device)
    out_ids, out_parents = (ints([[-7] * (first + columns + 1)] * rows, device) for _ in range(2))
    found = expand_tree(
        torch.tensor(best, dtype=dtype, device=device), torch.tensor(norm, dtype=dtype, device=device),
        torch.tensor(drafts, device=device), torch.arange(50, device=device) * 3 if mapped else None,
        make_frontier(torch.tensor(scores, dtype=dtype, device=device), node_ids, ancestors),
        first_node_id=first, first_bit=bit if more else None, all_scores=out_scores, all_ids=out_ids, all_parents=out_parents,
        interpret=interpret,
    )
    for row in range(rows):
        children = []
        for p in range(parents):
            index = row * parents + p
            for b in range(branches):
                likely = best[index][b] - norm[index]
                likely = -math.inf if math.isnan(likely) else likely
                score = scores[row][p] + likely
                children.append((score, drafts[index][b] * (3 if mapped else 1), p))
        assert out_scores[row, first:-1].tolist() == pytest.approx([score for score, _, _ in children], rel=1e-6)
        assert out_ids[row].tolist() == [-7] * first + [token for _, token, _ in children] + [-7]
        assert out_parents[row].tolist() == [-7] * first + [node_ids[row][p] for _, _, p in children] + [-7]
        if found is not None:
            exact = out_scores[row, first:-1].tolist()
            chosen = sorted(range(columns), key=lambda child: (-exact[child], child))[:branches]
            assert found.scores[row].tolist() == [exact[child] for child in chosen]
            assert found.node_ids[row].tolist() == [first + child for child in chosen]
            assert found.token_ids.view(rows, -1)[row].tolist() == [children[child][1] for child in chosen]
            assert found.parent_index.view(rows, -1)[row].tolist() == [row * parents + children[child][2] for child in chosen]
            assert found.ancestors[row].tolist() == [
                ancestors[row][children[child][2]] | 1 << (bit + i) for i, child in enumerate(chosen)
            ]
    assert (found is None) == (not more)


def test_a_probability_that_rounding_makes_greater_than_1_counts_as_1(interpret: bool, device: torch.device) -> None:
    """Its score is then its parent's, so it is never ranked before its parent."""
    scores, ids = torch.zeros(1, 2, device=device), ints([[0, 0]], device)
    expand_tree(
        torch.tensor([[1.0000001, 0.5]], device=device), torch.ones(1, device=device), torch.zeros(1, 2, device=device).long(),
        None, make_frontier(torch.zeros(1, 1, device=device), [[-1]], [[0]]), first_node_id=0, first_bit=None,
        all_scores=scores, all_ids=ids, all_parents=ids.clone(), interpret=interpret,
    )
    assert scores.tolist() == [[0.0, -0.5]]


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    best, ids = torch.zeros(1, 2, device=device), ints([[0, 0]], device)
    root = make_frontier(torch.zeros(1, 1, device=device), [[-1]], [[0]])

    def level(first_node_id: int, first_bit: int) -> None:
        expand_tree(
            best, best[:, 0].clone(), ids.long(), None, root, first_node_id=first_node_id, first_bit=first_bit,
            all_scores=best, all_ids=ids, all_parents=ids,
        )

    with pytest.raises(ValueError, match="2 children from node id 1 on, but 2 columns"):
        level(1, 0)
    with pytest.raises(ValueError, match=r"bits 63 .. 64 exceed the 64 bits of a mask"):
        level(0, 63)
