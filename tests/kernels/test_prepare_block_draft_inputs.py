"""prepare_block_draft_inputs: the newest token and S - 1 masks a row, their positions, slots and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.drafting.prepare_block_draft_inputs import prepare_block_draft_inputs

POISON = -7
PAGE_SIZE = 4
MASK = 99


def run(
    rows: list[tuple[int, int, int]], width: int, interpret: bool, device: torch.device, max_pages: int = 8
) -> dict[str, Any]:
    """rows: (num_tokens, limit, live). Row r's token at position p is 1000 * r + p, its page p is 10 * r + p + 1."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    count = len(rows)
    num_tokens, limit, live = (x.contiguous() for x in torch.tensor(rows, **ints).unbind(1))
    tokens = 1000 * torch.arange(count, **ints)[:, None] + torch.arange(40, **ints)
    table = 10 * torch.arange(count, **ints)[:, None] + torch.arange(max_pages, **ints) + 1
    out = {name: torch.full((count,), POISON, **ints) for name in ("out_start", "out_kv_len", "out_draft_len")}
    out["out_ids"] = torch.full((count * width,), POISON, **ints)
    for name in ("out_positions", "out_slot_mapping", "out_seen"):
        out[name] = torch.full((count * width,), POISON, dtype=torch.int64, device=device)
    prepare_block_draft_inputs(
        tokens[:, :37], num_tokens, limit, live, table.contiguous(), mask_id=MASK, draft_len=3, page_size=PAGE_SIZE,
        interpret=interpret, **out,
    )
    return {name.removeprefix("out_"): values.tolist() for name, values in out.items()}


def test_the_newest_token_is_followed_by_masks_that_all_read_each_other(interpret: bool, device: torch.device) -> None:
    found = run([(6, 30, 1), (1, 30, 1)], 3, interpret, device)
    assert found["ids"] == [5, MASK, MASK, 1000, MASK, MASK]
    assert found["positions"] == [5, 6, 7, 0, 1, 2]
    assert found["slot_mapping"] == [2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 11 * 4, 11 * 4 + 1, 11 * 4 + 2]
    assert (found["start"], found["kv_len"], found["draft_len"]) == ([5, 0], [8, 3], [3, 3])
    assert found["seen"] == [0b111] * 6


def test_positions_that_are_never_verified_are_no_keys_and_go_to_the_scratch_slot(interpret: bool, device: torch.device) -> None:
    found = run([(6, 8, 1), (6, 7, 1)], 4, interpret, device)
    assert found["slot_mapping"] == [2 * 4 + 1, 2 * 4 + 2, 0, 0, 12 * 4 + 1, 0, 0, 0]
    assert (found["kv_len"], found["seen"]) == ([7, 6], [0b11] * 4 + [0b1] * 4)


def test_dead_rows_have_no_keys(interpret: bool, device: torch.device) -> None:
    found = run([(9, 30, 0), (0, 0, 0), (0, 0, 1)], 2, interpret, device)
    for name in ("positions", "slot_mapping", "seen", "start", "kv_len", "draft_len"):
        assert set(found[name]) == {0}, name


@pytest.mark.parametrize("width", [63, 64])
def test_the_widest_blocks(width: int, interpret: bool, device: torch.device) -> None:
    seen = run([(3, 200, 1)], width, interpret, device)["seen"]
    assert {bits % 2**64 for bits in seen} == {2**width - 1}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=5), st.integers(1, 20),
    st.integers(1, 8),
)
def test_kernel_and_reference_agree(rows: list[tuple[int, int, int]], width: int, max_pages: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert run(rows, width, True, device, max_pages) == run(rows, width, False, torch.device("cpu"), max_pages)


def test_wrong_arguments_are_refused() -> None:
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    good: dict[str, Any] = {
        "tokens": torch.zeros(2, 9, dtype=torch.int32), "num_tokens": ints, "limit": ints, "live": ints,
        "page_table": torch.zeros(2, 4, dtype=torch.int32), "mask_id": 0, "draft_len": 3, "page_size": 4,
        "out_ids": torch.zeros(6, dtype=torch.int32), "out_positions": longs, "out_slot_mapping": longs, "out_seen": longs,
        "out_start": ints, "out_kv_len": ints, "out_draft_len": ints,
    }
    prepare_block_draft_inputs(**good)
    wide = torch.zeros(130, dtype=torch.int64)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"limit": ints.long()}, r"prepare_block_draft_inputs: limit is int64 \[2\].* must be int32 \[2\]"),
        ({"out_ids": torch.zeros(5, dtype=torch.int32)}, r"prepare_block_draft_inputs: out_ids is int32 \[5\]"),
        ({"out_seen": longs[:5]}, r"prepare_block_draft_inputs: out_seen is int64 \[5\]"),
        (
            {"out_ids": wide.int(), "out_positions": wide, "out_slot_mapping": wide, "out_seen": wide},
            "prepare_block_draft_inputs: 65 queries a row; a mask has 64 bits",
        ),
    ]
    for changes, said in bad:
        with pytest.raises(ValueError, match=said):
            prepare_block_draft_inputs(**(good | changes))
