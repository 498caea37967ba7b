"""rerank_tree: the best nodes by a plain sort of all of them, parents by their new ids, many equal scores."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.tree.rerank_tree import rerank_tree
from tests.kernels.trees import ints


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_a_plain_sort_of_every_node(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    """Scores never rise along a path; that of a child is often its parent's, and -inf occurs too."""
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    rows, num_nodes = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 2, 5, 40, 110, 130]))
    kept, dtype = data.draw(st.integers(1, min(num_nodes, 63))), data.draw(st.sampled_from([torch.float32, torch.float64]))
    old_parents = [[rng.randrange(-1, node) for node in range(num_nodes)] for _ in range(rows)]
    scores: list[list[float]] = [[] for _ in range(rows)]
    for row in range(rows):
        for node in range(num_nodes):
            before = scores[row][old_parents[row][node]] if old_parents[row][node] >= 0 else 0.0
            scores[row].append(before - rng.choice([0.0, 0.0, 0.25, 0.5, 1.0, float("inf")]))
    tokens = [[rng.randrange(999) for _ in range(num_nodes)] for _ in range(rows)]
    wide = ints([[-7] * (2 * kept + 2)] * rows, device)
    rerank_tree(
        torch.tensor(scores, dtype=dtype, device=device), ints(tokens, device), ints(old_parents, device),
        out_ids=wide[:, :kept], out_parents=wide[:, kept + 1 :], interpret=interpret,
    )
    for row in range(rows):
        best = sorted(sorted(range(num_nodes), key=lambda node: (-scores[row][node], node))[:kept])
        parents = [0 if old_parents[row][node] < 0 else 1 + best.index(old_parents[row][node]) for node in best]
        assert wide[row].tolist() == [*(tokens[row][node] for node in best), -7, -7, *parents]


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    scores, ids = torch.zeros(1, 3, device=device), ints([[1, 2, 3]], device)
    with pytest.raises(ValueError, match="rerank_tree: 4 nodes to keep of 3; at most all expanded nodes can be kept"):
        rerank_tree(scores, ids, ids, out_ids=ints([[0] * 4], device), out_parents=ints([[0] * 5], device))
    with pytest.raises(ValueError, match=r"out_parents is int32 \[1, 2\].*must be int32 \[1, 3\]"):
        rerank_tree(scores, ids, ids, out_ids=ints([[0, 0]], device), out_parents=ints([[0, 0]], device))
