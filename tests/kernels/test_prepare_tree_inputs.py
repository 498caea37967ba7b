"""prepare_tree_inputs: positions by depth, slots by node, ancestors as bits; dead rows touch only the scratch slot."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.tree.prepare_tree_inputs import prepare_tree_inputs
from tests.kernels.trees import ints, path_to_root, random_parents

PAGE_SIZE = 4


def run(
    parents: Tensor, num_tokens: list[int], live: list[int], table: Tensor, max_depth: int, *, interpret: bool
) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]:
    device, (rows, nodes) = table.device, parents.shape
    out = torch.full((3, rows * nodes), -7, dtype=torch.int64, device=device)
    kv_len = torch.full((rows,), -7, dtype=torch.int32, device=device)
    prepare_tree_inputs(
        parents, ints(num_tokens, device), ints(live, device), table, page_size=PAGE_SIZE, max_depth=max_depth,
        out_positions=out[0], out_slot_mapping=out[1], out_ancestors=out[2], out_kv_len=kv_len, interpret=interpret,
    )
    positions, slots, ancestors = (x.view(rows, nodes).tolist() for x in out)
    return positions, slots, ancestors, kv_len.tolist()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_node_agrees_with_a_plain_walk(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    rows, nodes = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 7, 16, 33, 64]))
    depth, pages = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 20))
    parents = [random_parents(rng, nodes, depth) for _ in range(rows)]
    num_tokens = [rng.randint(1, pages * PAGE_SIZE) for _ in range(rows)]
    live = [rng.randint(0, 1) for _ in range(rows)]
    table = ints([[rng.randint(1, 99) for _ in range(pages)] for _ in range(rows)], device)
    positions, slots, ancestors, kv_len = run(ints(parents, device), num_tokens, live, table, depth, interpret=interpret)
    for row in range(rows):
        start = num_tokens[row] - 1
        for node in range(nodes):
            way, page = path_to_root(parents[row], node), (start + node) // PAGE_SIZE
            inside = live[row] and page < pages
            assert positions[row][node] == live[row] * (start + len(way) - 1)
            assert slots[row][node] == (int(table[row, page]) * PAGE_SIZE + (start + node) % PAGE_SIZE if inside else 0)
            seen = {bit for bit in range(64) if ancestors[row][node] >> bit & 1}
            assert seen == (set(way) if live[row] else {node})
        assert kv_len[row] == live[row] * min(start + nodes, pages * PAGE_SIZE)


def test_one_row_of_parents_may_be_expanded_to_all_rows(interpret: bool, device: torch.device) -> None:
    parents = ints([[-1, -1, 0, 1]], device)
    table = ints([[3, 5], [7, 9]], device)
    positions, slots, ancestors, _ = run(parents.expand(2, -1), [3, 4], [1, 1], table, 1, interpret=interpret)
    assert positions == [[2, 2, 3, 3], [3, 3, 4, 4]]
    assert slots == [[14, 15, 20, 21], [31, 36, 37, 38]]
    assert ancestors == [[1, 2, 5, 10]] * 2


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    table: Any = ints([[1, 2]], device)
    with pytest.raises(ValueError, match="parents has 65 columns; at most 64 nodes a row"):
        run(ints([[-1, *range(64)]], device), [1], [1], table, 3, interpret=False)
    with pytest.raises(ValueError, match="prepare_tree_inputs: parents is int64"):
        run(ints([[-1, 0]], device).long(), [1], [1], table, 3, interpret=False)
