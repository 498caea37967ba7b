"""prepare_ragged_inputs: the newest token and the drafts of each live row, one row after another, then padding."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.kernels.rounds.prepare_ragged_inputs import prepare_ragged_inputs

POISON, PAGE_SIZE, L = -7, 4, 20
Row = tuple[list[int], int, list[int]]
"""Committed tokens, whether it is live, drafts that are verified."""


def prepared(rows: list[Row], num_flat_tokens: int, width: int, device: torch.device, interpret: bool) -> dict[str, list[int]]:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    tokens = torch.tensor([own + [POISON] * (L - len(own)) for own, _, _ in rows], **ints)
    drafts = torch.tensor([own + [POISON] * (width + 2 - len(own)) for _, _, own in rows], **ints)[:, :width]
    table = torch.tensor([[1 + row * 4 + page for page in range(4)] for row in range(len(rows))], **ints)
    flat = {"ids": torch.int32, "row_ids": torch.int32, "positions": torch.int64, "slot_mapping": torch.int64}
    out = {f"out_{name}": torch.full((num_flat_tokens,), POISON, dtype=dtype, device=device) for name, dtype in flat.items()}
    out["out_cu_seqlens_q"] = torch.full((len(rows) + 1,), POISON, **ints)
    out["out_kv_len"] = torch.full((len(rows),), POISON, **ints)
    counts, live, lengths = (
        torch.tensor(values, **ints) for values in zip(*((len(own), live, len(taken)) for own, live, taken in rows), strict=True)
    )
    prepare_ragged_inputs(
        tokens, counts, live, drafts, lengths, table, page_size=PAGE_SIZE, interpret=interpret, **out,
    )
    return {name.removeprefix("out_"): tensor.tolist() for name, tensor in out.items()}


def by_hand(rows: list[Row], num_flat_tokens: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in ("ids", "row_ids", "positions", "slot_mapping", "kv_len")}
    ends = [0]
    for row, (tokens, live, drafts) in enumerate(rows):
        for j, token in enumerate([tokens[-1], *drafts] if live else []):
            position = len(tokens) - 1 + j
            page = position // PAGE_SIZE
            found["ids"].append(token)
            found["row_ids"].append(row)
            found["positions"].append(position)
            found["slot_mapping"].append((1 + row * 4 + page) * PAGE_SIZE + position % PAGE_SIZE if page < 4 else 0)
        found["kv_len"].append((len(tokens) + len(drafts)) * live)
        ends.append(len(found["ids"]))
    for name in ("ids", "row_ids", "positions", "slot_mapping"):
        found[name] += [0] * (num_flat_tokens - len(found[name]))
    return found | {"cu_seqlens_q": ends}


def test_rows_follow_each_other_and_dead_ones_are_left_out(device: torch.device, interpret: bool) -> None:
    found = prepared([([5, 6], 1, [7]), ([8], 0, []), ([9, 9, 4], 1, [2, 3])], 7, 2, device, interpret)
    assert found["ids"] == [6, 7, 4, 2, 3, 0, 0]
    assert found["row_ids"] == [0, 0, 2, 2, 2, 0, 0]
    assert found["positions"] == [1, 2, 2, 3, 4, 0, 0]
    assert found["cu_seqlens_q"] == [0, 2, 2, 5]
    assert found["kv_len"] == [3, 0, 5]


@settings(deadline=None, max_examples=30)
@given(st.data(), st.integers(0, 5), st.integers(0, 200))
def test_equals_a_plain_loop(device: torch.device, interpret: bool, data: st.DataObject, width: int, padding: int) -> None:
    token = st.integers(0, 99)
    row = st.tuples(
        st.lists(token, min_size=1, max_size=L), st.sampled_from([0, 1, 1]), st.lists(token, max_size=width)
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=9))
    total = sum((1 + len(drafts)) * live for _, live, drafts in rows)
    assert prepared(rows, total + padding, width, device, interpret) == by_hand(rows, total + padding)
