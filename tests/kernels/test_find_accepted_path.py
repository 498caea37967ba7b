"""find_accepted_path: the path of the target's own choices through a tree; -1 after its end."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.tree.find_accepted_path import find_accepted_path
from tests.kernels.trees import ints, path_to_root, random_parents

Walked = tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]


def run(
    ids: list[list[int]], parents: list[list[int]], target_ids: list[list[int]], draft_len: list[int], depth: int,
    device: torch.device, *, take_deepest: bool = False, interpret: bool = False,
) -> Walked:
    rows = len(ids)
    wide_ids, wide_drafts = ints([[5, *row] for row in ids], device), ints([[-7] * (depth + 1)] * rows, device)
    lengths, path = ints(draft_len, device), ints([[-7] * (depth + 1)] * rows, device)
    flat_ids = path.long()
    find_accepted_path(
        wide_ids[:, 1:], ints(parents, device), ints(target_ids, device).flatten(), take_deepest=take_deepest, draft_len=lengths,
        out_path=path, out_flat_ids=flat_ids, out_draft_ids=wide_drafts[:, 1:], interpret=interpret,
    )
    assert wide_drafts[:, 0].tolist() == [-7] * rows
    return path.tolist(), flat_ids.tolist(), wide_drafts[:, 1:].tolist(), lengths.tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_a_walk_by_hand(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    rows, nodes, depth = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([2, 9, 33, 64])), data.draw(st.integers(1, 7))
    parents = [random_parents(rng, nodes, depth) for _ in range(rows)]
    ids = [[rng.randint(0, 3) for _ in range(nodes)] for _ in range(rows)]
    target_ids = [[rng.randint(0, 3) for _ in range(nodes)] for _ in range(rows)]
    draft_len = [rng.randint(0, depth) for _ in range(rows)]
    path, flat_ids, drafts, lengths = run(ids, parents, target_ids, draft_len, depth, device, interpret=interpret)
    for row in range(rows):
        walked, emitted = [0], []
        while True:
            wanted = target_ids[row][walked[-1]]
            below = [n for n in range(1, nodes) if parents[row][n] == walked[-1] and ids[row][n] == wanted]
            if not below:
                break
            walked.append(below[0])
            emitted.append(wanted)
        assert path[row] == walked + [walked[-1]] * (depth + 1 - len(walked))
        assert flat_ids[row] == [row * nodes + node for node in path[row]]
        assert drafts[row] == emitted + [-1] * (depth - len(emitted))
        deepest = max(len(path_to_root(parents[row], node)) - 1 for node in range(nodes))
        assert lengths[row] == min(draft_len[row], deepest)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_simulated_acceptance_takes_the_first_of_the_deepest_paths(
    data: st.DataObject, interpret: bool, device: torch.device
) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    nodes, depth = data.draw(st.sampled_from([1, 2, 9, 33])), data.draw(st.integers(1, 7))
    parents, ids = [random_parents(rng, nodes, depth)], [[rng.randint(0, 9) for _ in range(nodes)]]
    path, _, drafts, lengths = run(ids, parents, [[0] * nodes], [depth], depth, device, take_deepest=True, interpret=interpret)
    ways = [path_to_root(parents[0], node)[::-1] for node in range(nodes)]
    longest = max(ways, key=len)  # the first of equally long ones
    assert path[0] == longest + [longest[-1]] * (depth + 1 - len(longest))
    assert drafts[0] == [ids[0][node] for node in longest[1:]] + [-1] * (depth + 1 - len(longest))
    assert lengths == [len(longest) - 1]


def test_a_token_is_accepted_only_below_its_own_parent(interpret: bool, device: torch.device) -> None:
    """Both branches draft 8 after different tokens; the target takes the second branch, and 8 there."""
    ids, parents, chosen = [[4, 6, 7, 8, 8]], [[-1, 0, 0, 1, 2]], [[7, 8, 8, 1, 2]]
    path, _, drafts, _ = run(ids, parents, chosen, [3], 3, device, interpret=interpret)
    assert path == [[0, 2, 4, 4]]
    assert drafts == [[7, 8, -1]]


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"find_accepted_path: parents is int32 \[1, 1\].*must be int32 \[1, 2\]"):
        run([[1, 2]], [[-1]], [[1, 2]], [1], 1, device)
    with pytest.raises(ValueError, match=r"find_accepted_path: target_ids"):
        run([[1, 2]], [[-1, 0]], [[1]], [1], 1, device)
