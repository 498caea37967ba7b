"""prepare_parallel_draft_inputs: the newest token with its feature and K - 1 masks a row, their positions, slots and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.drafting.prepare_parallel_draft_inputs import prepare_parallel_draft_inputs

POISON = -7
PAGE_SIZE = 4
MASK = 99


def run(
    rows: list[tuple[int, int]], k: int, max_len: int, interpret: bool, device: torch.device, max_pages: int = 0, width: int = 5
) -> dict[str, Any]:
    """rows: (num_tokens, live). Row r's token at position p is 1000 * r + p, its page p is 10 * r + p + 1, its feature r + 1."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    count, max_pages = len(rows), max_pages or -(-max_len // PAGE_SIZE)
    num_tokens, live = (x.contiguous() for x in torch.tensor(rows, **ints).unbind(1))
    tokens = 1000 * torch.arange(count, **ints)[:, None] + torch.arange(max_len + 3, **ints)
    table = 10 * torch.arange(count, **ints)[:, None] + torch.arange(max_pages, **ints) + 1
    out: dict[str, Any] = {
        "out_ids": torch.full((count * k,), POISON, **ints),
        "out_hidden": torch.full((count * k, width), float("nan"), device=device),
        "out_positions": torch.full((count * k,), POISON, dtype=torch.int64, device=device),
        "out_slot_mapping": torch.full((count * k,), POISON, dtype=torch.int64, device=device),
        "out_kv_len": torch.full((count,), POISON, **ints),
        "out_draft_len": torch.full((count,), POISON, **ints),
    }
    hidden = (torch.arange(count, device=device)[:, None] + 1).float().expand(-1, width).contiguous()
    prepare_parallel_draft_inputs(
        tokens[:, :max_len], num_tokens, live, table.contiguous(), hidden, torch.full((width,), 0.5, device=device),
        mask_id=MASK, page_size=PAGE_SIZE, interpret=interpret, **out,
    )
    return {name.removeprefix("out_"): values.tolist() for name, values in out.items()}


def test_the_newest_token_is_followed_by_masks(interpret: bool, device: torch.device) -> None:
    found = run([(6, 1), (3, 1)], 3, 20, interpret, device)
    assert found["ids"] == [5, MASK, MASK, 1002, MASK, MASK]
    assert [feature[0] for feature in found["hidden"]] == [1.0, 0.5, 0.5, 2.0, 0.5, 0.5]
    assert found["positions"] == [4, 5, 6, 1, 2, 3]
    assert found["slot_mapping"] == [0, 2 * 4 + 1, 2 * 4 + 2, 0, 11 * 4 + 2, 11 * 4 + 3]
    assert (found["draft_len"], found["kv_len"]) == ([3, 3], [7, 4])


def test_one_draft_needs_no_mask(interpret: bool, device: torch.device) -> None:
    found = run([(6, 1)], 1, 20, interpret, device)
    assert (found["ids"], found["positions"], found["kv_len"], found["draft_len"]) == ([5], [4], [5], [1])


def test_dead_rows_go_to_the_scratch_slot_and_have_no_keys(interpret: bool, device: torch.device) -> None:
    found = run([(9, 0), (0, 0), (1, 1)], 2, 20, interpret, device)
    assert found["draft_len"] == found["kv_len"] == [0, 0, 0]
    assert found["positions"] == found["slot_mapping"] == [0] * 6


def test_positions_past_the_page_table_go_to_the_scratch_slot_and_never_wrap_to_position_0(
    interpret: bool, device: torch.device
) -> None:
    found = run([(8, 1)], 5, 8, interpret, device)
    assert found["positions"] == [6, 7, 8, 9, 10]
    assert found["slot_mapping"] == [0, 2 * 4 + 3, 0, 0, 0]
    assert found["kv_len"] == [8]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 8))
def test_kernel_and_reference_agree(rows: list[tuple[int, int]], k: int, max_pages: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = run(rows, k, 30, True, device, max_pages, width=2 * k + 1)
    assert kernel == run(rows, k, 30, False, torch.device("cpu"), max_pages, width=2 * k + 1)


def test_wrong_arguments_are_refused() -> None:
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    good: dict[str, Any] = {
        "tokens": torch.zeros(2, 9, dtype=torch.int32), "num_tokens": ints, "live": ints, "hidden": torch.zeros(2, 4),
        "page_table": torch.zeros(2, 4, dtype=torch.int32), "mask_hidden": torch.zeros(4), "mask_id": 0, "page_size": 4,
        "out_ids": torch.zeros(6, dtype=torch.int32), "out_hidden": torch.zeros(6, 4), "out_positions": longs,
        "out_slot_mapping": longs, "out_kv_len": ints, "out_draft_len": ints,
    }
    prepare_parallel_draft_inputs(**good)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"live": ints.long()}, r"prepare_parallel_draft_inputs: live is int64 \[2\].* must be int32 \[2\]"),
        ({"out_ids": torch.zeros(5, dtype=torch.int32)}, r"prepare_parallel_draft_inputs: out_ids is int32 \[5\]"),
        ({"out_slot_mapping": longs[:5]}, r"prepare_parallel_draft_inputs: out_slot_mapping is int64 \[5\]"),
        ({"mask_hidden": torch.zeros(4).double()}, "prepare_parallel_draft_inputs: mask_hidden is float64"),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            prepare_parallel_draft_inputs(**(good | changes))
