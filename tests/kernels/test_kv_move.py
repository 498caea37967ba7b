"""kv_move: K/V of accepted nodes in the places of a chain's, bit for bit; all else untouched, overlapping moves included."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.kv_cache.kv_move import kv_move
from tests.kernels.trees import ints

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_equals_a_plain_loop_over_a_copy(data: st.DataObject, interpret: bool, device: torch.device) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    rows, depth = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    nodes = depth + data.draw(st.integers(1, 30))
    layers, heads, dim = data.draw(st.sampled_from([(1, 1, 4), (3, 2, 5), (2, 3, 64), (1, 8, 128)]))
    page_size, dtype = data.draw(st.sampled_from([2, 16])), data.draw(st.sampled_from(DTYPES))
    pages = 1 + -(-rows * nodes // page_size)
    kv = (torch.randn(layers, 2, pages, page_size, heads, dim, device=device) * 5).to(dtype)
    slots = torch.randperm(rows * nodes, generator=torch.Generator().manual_seed(rng.randint(0, 999))).to(device) + page_size
    chain = slots.view(rows, nodes)[:, : depth + 1]
    path = [[0, *sorted(rng.sample(range(1, nodes), depth))] for _ in range(rows)]
    accepted = [rng.randint(0, depth) for _ in range(rows)]
    expected, before = kv.clone().flatten(2, 3), kv.clone().flatten(2, 3)
    for row in range(rows):
        for level in range(1, accepted[row] + 1):
            expected[:, :, chain[row, level]] = before[:, :, slots.view(rows, nodes)[row, path[row][level]]]
    kv_move(kv, slots, ints(path, device), chain.flatten(), ints(accepted, device), interpret=interpret)
    assert torch.equal(kv.flatten(2, 3), expected)


def test_a_place_that_is_read_and_written_moves_its_old_value(interpret: bool, device: torch.device) -> None:
    """Nodes 2, 3, 4 accepted: place 2 goes to place 1 before node 3 is written over it."""
    kv = torch.arange(2 * 8, dtype=torch.float32, device=device).view(1, 2, 1, 8, 1, 1)
    slots = torch.arange(6, device=device)
    kv_move(kv, slots, ints([[0, 2, 3, 4]], device), slots[:4].clone(), ints([3], device), interpret=interpret)
    assert kv[0, 0, 0, :, 0, 0].tolist() == [0, 2, 3, 4, 4, 5, 6, 7]
    assert kv[0, 1, 0, :, 0, 0].tolist() == [8, 10, 11, 12, 12, 13, 14, 15]


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    kv, slots = torch.zeros(1, 2, 2, 4, 1, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    path, accepted = ints([[0, 1]], device), ints([1], device)
    with pytest.raises(ValueError, match=r"kv_move: kv is \[2, 2, 4, 1, 4\]; must be \[layers, 2, pages"):
        kv_move(kv[0], slots, path, slots[:2], accepted)
    with pytest.raises(ValueError, match=r"kv_move: chain_slots is int64 \[3\].*must be int64 \[2\]"):
        kv_move(kv, slots, path, slots[:3], accepted)
    with pytest.raises(ValueError, match="kv_move: 4 tree_slots for 3 rows"):
        kv_move(kv, slots, path.repeat(3, 1), slots[:1].repeat(6), accepted.repeat(3))
