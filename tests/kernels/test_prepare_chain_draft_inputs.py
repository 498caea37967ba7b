"""prepare_chain_draft_inputs: a chain's first token, draft lengths, and positions and slots, stored step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.drafting.prepare_chain_draft_inputs import prepare_chain_draft_inputs

POISON = -7
PAGE_SIZE = 4


def run(
    rows: list[tuple[int, int]], width: int, max_len: int, interpret: bool, device: torch.device, max_pages: int = 0
) -> dict[str, list[Any]]:
    """rows: (num_tokens, live); row r's first draft token is 50 + r, its page p is 10 * r + p + 1."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    count, max_pages = len(rows), max_pages or -(-max_len // PAGE_SIZE)
    num_tokens, live = (x.contiguous() for x in torch.tensor(rows, **ints).unbind(1))
    table = 10 * torch.arange(count, **ints)[:, None] + torch.arange(max_pages, **ints) + 1
    wide = torch.full((count, width + 2), POISON, **ints)
    out: dict[str, Any] = {
        "out_ids": wide[:, 1 : width + 1],
        "out_draft_len": torch.full((count,), POISON, **ints),
        "out_kv_len": torch.full((count,), POISON, **ints),
        "out_positions": torch.full((width - 1, count), POISON, dtype=torch.int64, device=device),
        "out_slot_mapping": torch.full((width - 1, count), POISON, dtype=torch.int64, device=device),
    }
    first_ids = 50 + torch.arange(count, **ints)
    prepare_chain_draft_inputs(
        first_ids, num_tokens, live, table.contiguous(), page_size=PAGE_SIZE, max_tokens=max_len, interpret=interpret, **out
    )
    assert bool((wide[:, 0] == POISON).all() and (wide[:, -1] == POISON).all())
    return {name.removeprefix("out_"): values.tolist() for name, values in out.items()}


def test_each_step_is_one_position_further(interpret: bool, device: torch.device) -> None:
    found = run([(6, 1), (3, 1)], 4, 20, interpret, device)
    assert found["ids"] == [[50, POISON, POISON, POISON], [51, POISON, POISON, POISON]]
    assert found["draft_len"] == [4, 4]
    assert found["positions"] == [[5, 2], [6, 3], [7, 4]]
    assert found["slot_mapping"] == [[2 * 4 + 1, 11 * 4 + 2], [2 * 4 + 2, 11 * 4 + 3], [2 * 4 + 3, 12 * 4]]
    assert found["kv_len"] == [8, 5]  # the keys of the last step


def test_one_draft_needs_no_step(interpret: bool, device: torch.device) -> None:
    found = run([(6, 1), (3, 0)], 1, 20, interpret, device)
    assert (found["ids"], found["draft_len"], found["positions"]) == ([[50], [51]], [1, 0], [])


def test_dead_rows_go_to_the_scratch_slot_and_have_no_keys(interpret: bool, device: torch.device) -> None:
    found = run([(9, 0), (0, 0)], 3, 20, interpret, device)
    assert found["draft_len"] == found["kv_len"] == [0, 0]
    assert found["positions"] == found["slot_mapping"] == [[0, 0], [0, 0]]


def test_positions_past_the_page_table_go_to_the_scratch_slot_and_are_no_keys(interpret: bool, device: torch.device) -> None:
    found = run([(7, 1)], 5, 8, interpret, device)
    assert found["positions"] == [[6], [7], [8], [9]]
    assert found["slot_mapping"] == [[2 * 4 + 2], [2 * 4 + 3], [0], [0]]
    assert found["kv_len"] == [8]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 8))
def test_kernel_and_reference_agree(rows: list[tuple[int, int]], width: int, max_pages: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = run(rows, width, 30, True, device, max_pages)
    assert kernel == run(rows, width, 30, False, torch.device("cpu"), max_pages)


def test_wrong_arguments_are_refused() -> None:
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)
    good: dict[str, Any] = {
        "first_ids": ints, "num_tokens": ints, "live": ints, "page_table": torch.zeros(2, 4, dtype=torch.int32), "page_size": 4,
        "max_tokens": 16, "out_ids": torch.zeros(2, 3, dtype=torch.int32), "out_draft_len": ints, "out_positions": longs,
        "out_slot_mapping": longs, "out_kv_len": ints,
    }
    bad: list[tuple[dict[str, Any], str]] = [
        ({"first_ids": ints.long()}, r"prepare_chain_draft_inputs: first_ids is int64 \[2\].* must be int32 \[2\]"),
        ({"out_positions": longs.t()}, "prepare_chain_draft_inputs: out_positions .* contiguous"),
        ({"out_slot_mapping": longs[:1]}, r"prepare_chain_draft_inputs: out_slot_mapping is int64 \[1, 2\]"),
        ({"out_ids": torch.zeros(3, 2, dtype=torch.int32).t()}, "prepare_chain_draft_inputs: out_ids .* last dimension"),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            prepare_chain_draft_inputs(**(good | changes))
