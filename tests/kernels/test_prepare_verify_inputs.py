"""prepare_verify_inputs: the newest token, the drafts that still fit, and where every place of a round lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.rounds.prepare_verify_inputs import prepare_verify_inputs

POISON = -7
PAGE_SIZE = 4


def run(
    rows: list[tuple[int, int, int]], width: int, max_len: int, interpret: bool, device: torch.device, max_pages: int = 0
) -> dict[str, list[Any]]:
    """rows: (num_tokens, limit, live); token i of row r is 100 * r + i, its page p is 10 * r + p + 1."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    count, max_pages = len(rows), max_pages or -(-max_len // PAGE_SIZE)
    num_tokens, limit, live = (x.contiguous() for x in torch.tensor(rows, **ints).unbind(1))
    wide = torch.arange(2 * max_len, **ints) + 100 * torch.arange(count, **ints)[:, None]
    table = 10 * torch.arange(count, **ints)[:, None] + torch.arange(max_pages, **ints) + 1
    out: dict[str, Any] = {
        "out_ids": torch.full((count, width), POISON, **ints),
        "out_draft_len": torch.full((count,), POISON, **ints),
        "out_kv_len": torch.full((count,), POISON, **ints),
        "out_positions": torch.full((count * width,), POISON, dtype=torch.int64, device=device),
        "out_slot_mapping": torch.full((count * width,), POISON, dtype=torch.int64, device=device),
    }
    tokens, pages = wide[:, :max_len], table.contiguous()
    prepare_verify_inputs(tokens, num_tokens, limit, live, pages, page_size=PAGE_SIZE, interpret=interpret, **out)
    return {name.removeprefix("out_"): values.tolist() for name, values in out.items()}


def test_a_live_row_verifies_its_newest_token_and_k_drafts(interpret: bool, device: torch.device) -> None:
    found = run([(6, 20, 1), (3, 20, 1)], 3, 20, interpret, device)
    assert found["ids"] == [[5, POISON, POISON], [102, POISON, POISON]]
    assert found["draft_len"] == [2, 2]
    assert found["positions"] == [5, 6, 7, 2, 3, 4]
    assert found["slot_mapping"] == [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 11 * 4 + 2, 11 * 4 + 3, 12 * 4]
    assert found["kv_len"] == [8, 5]


def test_drafts_are_cut_so_that_no_row_passes_its_limit(interpret: bool, device: torch.device) -> None:
    assert run([(9, 10, 1), (8, 10, 1), (6, 10, 1), (10, 10, 1)], 4, 20, interpret, device)["draft_len"] == [0, 1, 3, 0]


def test_dead_rows_go_to_the_scratch_slot_and_have_no_keys(interpret: bool, device: torch.device) -> None:
    found = run([(9, 10, 0), (0, 0, 0)], 2, 20, interpret, device)
    assert found["draft_len"] == found["kv_len"] == [0, 0]
    assert found["positions"] == found["slot_mapping"] == [0, 0, 0, 0]


def test_places_after_the_page_table_go_to_the_scratch_slot_and_are_no_keys(interpret: bool, device: torch.device) -> None:
    found = run([(8, 8, 1)], 4, 8, interpret, device)
    assert found["positions"] == [7, 8, 9, 10]
    assert found["slot_mapping"] == [2 * 4 + 3, 0, 0, 0]
    assert found["kv_len"] == [8]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=5), st.integers(1, 9))
def test_kernel_and_reference_agree(rows: list[tuple[int, int, int]], width: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = run(rows, width, 30, True, device)
    reference = run(rows, width, 30, False, torch.device("cpu"))
    assert kernel == reference


def test_wrong_arguments_are_refused() -> None:
    ints = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"prepare_verify_inputs: out_kv_len is int64 \[2\].* must be int32 \[2\]"):
        prepare_verify_inputs(
            torch.zeros(2, 8, dtype=torch.int32), ints, ints, ints, torch.zeros(2, 2, dtype=torch.int32), page_size=4,
            out_ids=torch.zeros(2, 3, dtype=torch.int32), out_draft_len=ints, out_kv_len=ints.long(),
            out_positions=torch.zeros(6, dtype=torch.int64), out_slot_mapping=torch.zeros(6, dtype=torch.int64),
        )
