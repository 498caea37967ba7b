"""slots: where every token of a forward lies in its row and in the cache; what has no place goes to slot 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.kv_cache.slot_mapping import BLOCK, compute_slot_mapping

POISON = -7
PAGE_SIZE = 4

Lists = tuple[list[int], ...]


def make_page_table(num_rows: int, max_pages: int) -> list[list[int]]:
    """Distinct pages 1, 2, ... in an order that is neither ascending nor by row."""
    pages = [1 + (7 * i + 3) % (num_rows * max_pages + 1) for i in range(num_rows * max_pages)]
    return [pages[row * max_pages : (row + 1) * max_pages] for row in range(num_rows)]


def slot_by_hand(pages: list[int], position: int, page_size: int) -> int:
    page = position // page_size
    return pages[page] * page_size + position % page_size if page < len(pages) else 0


def ragged(
    start: list[int], q_len: list[int], table: list[list[int]], num_flat_tokens: int, interpret: bool, device: torch.device,
    page_size: int = PAGE_SIZE,
) -> Lists:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    cu_seqlens_q = torch.full((len(start) + 1,), POISON, **ints)
    row_ids = torch.full((num_flat_tokens,), POISON, **ints)
    positions = torch.full((num_flat_tokens,), POISON, dtype=torch.int64, device=device)
    slots = torch.full_like(positions, POISON)
    compute_slot_mapping(
        torch.tensor(start, **ints), torch.tensor(q_len, **ints), torch.tensor(table, **ints), page_size=page_size,
        out_cu_seqlens_q=cu_seqlens_q, out_row_ids=row_ids, out_positions=positions, out_slot_mapping=slots, interpret=interpret,
    )
    return cu_seqlens_q.tolist(), row_ids.tolist(), positions.tolist(), slots.tolist()


def ragged_by_hand(start: list[int], q_len: list[int], table: list[list[int]], num_flat_tokens: int, page_size: int) -> Lists:
    cu_seqlens_q, row_ids, positions, slots = [0], [], [], []
    for row, length in enumerate(q_len):
        for j in range(length):
            row_ids.append(row)
            positions.append(start[row] + j)
            slots.append(slot_by_hand(table[row], start[row] + j, page_size))
        cu_seqlens_q.append(cu_seqlens_q[-1] + length)
    padding = [0] * (num_flat_tokens - len(slots))
    return cu_seqlens_q, row_ids + padding, positions + padding, slots + padding


def test_positions_after_the_page_table_keep_counting_and_use_the_scratch_page(interpret: bool, device: torch.device) -> None:
    assert ragged([6, 8], [4, 2], [[3, 5], [4, 6]], 6, interpret, device)[2:] == ([6, 7, 8, 9, 8, 9], [22, 23, 0, 0, 0, 0])


def test_slots_beyond_two_to_the_31_do_not_wrap(interpret: bool, device: torch.device) -> None:
    page = 2**31 - 1
    assert ragged([17], [1], [[1, page]], 1, interpret, device, page_size=16)[3] == [page * 16 + 1]


def test_ragged_pads_after_the_last_row(interpret: bool, device: torch.device) -> None:
    cu_seqlens_q, row_ids, positions, slots = ragged([2, 9, 4], [3, 0, 1], [[1, 2], [3, 4], [5, 6]], 7, interpret, device)
    assert cu_seqlens_q == [0, 3, 3, 4]
    assert row_ids == [0, 0, 0, 2, 0, 0, 0]
    assert positions == [2, 3, 4, 4, 0, 0, 0]
    assert slots == [6, 7, 8, 24, 0, 0, 0]


def test_ragged_with_long_and_dead_rows(interpret: bool, device: torch.device) -> None:
    table = make_page_table(4, 200)
    q_len = [0, 3 * BLOCK + 5, 0, BLOCK]
    total = sum(q_len)
    for num_flat_tokens in (total, total + BLOCK + 1):
        expected = ragged_by_hand([3, 90, 0, 200], q_len, table, num_flat_tokens, PAGE_SIZE)
        assert ragged([3, 90, 0, 200], q_len, table, num_flat_tokens, interpret, device) == expected


def test_ragged_without_a_live_row_is_all_padding(interpret: bool, device: torch.device) -> None:
    assert ragged([4, 5], [0, 0], [[1], [2]], 3, interpret, device) == ([0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0])


@settings(max_examples=40)
@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=9), padding=st.integers(0, 5),
       page_size=st.sampled_from([1, 3, 16]))
def test_ragged_equals_a_loop(
    rows: list[tuple[int, int]], padding: int, page_size: int, interpret: bool, device: torch.device
) -> None:
    start, q_len = [row[0] for row in rows], [row[1] for row in rows]
    table = make_page_table(len(rows), 5)
    num_flat_tokens = sum(q_len) + padding
    expected = ragged_by_hand(start, q_len, table, num_flat_tokens, page_size)
    assert ragged(start, q_len, table, num_flat_tokens, interpret, device, page_size=page_size) == expected


def test_wrong_arguments_are_refused() -> None:
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    good: dict[str, Any] = {
        "start": ints, "q_len": ints, "page_table": torch.zeros(2, 3, dtype=torch.int32), "page_size": 4,
        "out_cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "out_row_ids": torch.zeros(4, dtype=torch.int32),
        "out_positions": longs, "out_slot_mapping": longs.clone(),
    }
    compute_slot_mapping(**good)
    for name in ("start", "q_len", "page_table", "out_cu_seqlens_q", "out_row_ids", "out_positions", "out_slot_mapping"):
        with pytest.raises(ValueError, match=f"compute_slot_mapping: {name} is float32"):
            compute_slot_mapping(**{**good, name: good[name].float()})
