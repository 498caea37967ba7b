"""group_slot_mapping: the slots of a batch in another page table; dead rows, padding and what has no page go to slot 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.kv_cache.group_slot_mapping import group_slot_mapping
from batchspec.kernels.kv_cache.slot_mapping import BLOCK
from tests.kernels.test_slot_mapping import make_page_table, slot_by_hand

POISON = -7


def mapped(
    q_len: list[int], kv_len: list[int], positions: list[int], table: list[list[int]], interpret: bool, device: torch.device,
    page_size: int = 4,
) -> list[int]:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    out = torch.full((len(positions),), POISON, dtype=torch.int64, device=device)
    group_slot_mapping(
        torch.tensor([0, *q_len], **ints).cumsum(0, dtype=torch.int32), torch.tensor(kv_len, **ints),
        torch.tensor(positions, dtype=torch.int64, device=device), torch.tensor(table, **ints), page_size=page_size,
        out_slot_mapping=out, interpret=interpret,
    )
    return out.tolist()


def test_dead_rows_padding_and_keys_past_the_table_go_to_the_scratch_page(interpret: bool, device: torch.device) -> None:
    """Two places each: a row, a dead one, one at the end of its table; one place of padding."""
    positions = [5, 6, 0, 0, 7, 8, 0]
    assert mapped([2, 2, 2], [7, 0, 8], positions, [[1, 2], [3, 4], [5, 6]], interpret, device) == [9, 10, 0, 0, 27, 0, 0]


def test_nodes_of_a_tree_lie_by_number_whatever_their_depth(interpret: bool, device: torch.device) -> None:
    """Positions 6, 7, 7, 8: the keys are 6, 7, 8, 9."""
    assert mapped([4], [10], [6, 7, 7, 8], [[1, 2, 3]], interpret, device) == [10, 11, 12, 13]


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.booleans()), min_size=1, max_size=9),
       padding=st.integers(0, 5), page_size=st.sampled_from([1, 3, 16]))
def test_slots_equal_a_loop(
    rows: list[tuple[int, int, bool]], padding: int, page_size: int, interpret: bool, device: torch.device
) -> None:
    table = make_page_table(len(rows), 5)
    positions, slots = [], []
    for row, (start, count, alive) in enumerate(rows):
        positions += [start + j for j in range(count)]
        slots += [slot_by_hand(table[row], start + j, page_size) if alive else 0 for j in range(count)]
    kv_len = [start + count if alive else 0 for start, count, alive in rows]
    found = mapped(
        [count for _, count, _ in rows], kv_len, positions + [0] * padding, table, interpret, device, page_size=page_size
    )
    assert found == slots + [0] * padding


def test_a_row_of_a_prefill_is_longer_than_a_block(interpret: bool, device: torch.device) -> None:
    table, count = make_page_table(2, 200), 2 * BLOCK + 3
    expected = [slot_by_hand(table[1], 9 + j, 4) for j in range(count)]
    assert mapped([0, count], [0, 9 + count], [9 + j for j in range(count)], table, interpret, device) == expected


def test_wrong_arguments_are_refused() -> None:
    good: dict[str, Any] = {
        "cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "kv_len": torch.zeros(2, dtype=torch.int32),
        "positions": torch.zeros(4, dtype=torch.int64), "page_table": torch.zeros(2, 3, dtype=torch.int32), "page_size": 4,
        "out_slot_mapping": torch.zeros(4, dtype=torch.int64),
    }
    group_slot_mapping(**good)
    for name in ("cu_seqlens_q", "kv_len", "positions", "page_table", "out_slot_mapping"):
        with pytest.raises(ValueError, match=f"group_slot_mapping: {name}"):
            group_slot_mapping(**{**good, name: good[name].to(torch.float32)})
