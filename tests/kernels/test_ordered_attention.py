"""Attention with one order of sums: right, and with the same bits for a query alone, among others, in a round and in prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.attention import ordered_attention as attention_module
from batchspec.kernels.attention import ordered_prefill as prefill_module
from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.ordered_attention import ordered_attention
from batchspec.kernels.attention.ordered_prefill import ordered_prefill
from batchspec.kernels.attention.settings import ordered_work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.common.e4m3 import E4M3, from_e4m3
from tests.helpers.interpreter import dots_of_one_order
from tests.kernels.attention_cases import PAGE_SIZE, Case, make_case, share

pytestmark = pytest.mark.second

PART = 128


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 128 keys, so that short rows have several."""
    monkeypatch.setattr(prefill_module, "PART", PART)


SCALES = ((0.03, 0.5), (0.004, 0.0123))
"""Of K and of V for each head; powers of two are not needed."""


def in_e4m3(case: Case) -> tuple[Case, Tensor]:
    """The case over an e4m3 cache, and its scales. Stale keys stay NaN."""
    scales = torch.tensor(SCALES, device=case.kv.device)
    stored = case.kv.float() / scales[:, None, None, :, None]
    return replace(case, kv=stored.clamp(-448, 448).to(E4M3)), scales


def case_of(rows: list[tuple[int, int]], device: torch.device, **options: Any) -> Case:
    return make_case(rows, heads=(4, 2), head_dim=64, dtype=torch.bfloat16, device=device, **options)


def shape_of(case: Case, **changes: Any) -> Any:
    shape = ordered_work_shape(
        num_rows=len(case.kv_len), max_q=case.shape.max_q, max_kv=case.shape.max_kv, num_heads=4, kv_heads=2, head_dim=64,
        page_size=PAGE_SIZE, num_sms=3, window=case.shape.window,
    )
    return replace(shape, part=PART, **changes)


def in_round(case: Case, *, interpret: bool, sinks: Tensor | None = None, scales: Tensor | None = None, **changes: Any) -> Tensor:
    work = split_kv_schedule(
        case.cu_seqlens_q, case.kv_len, case.positions, shape=shape_of(case, **changes), shared=case.shared, interpret=interpret
    )
    partials = partials_of(work, 64)
    partials.out.fill_(float("nan"))
    partials.lse.fill_(float("nan"))
    out = torch.full(case.q.shape, float("nan"), dtype=torch.bfloat16, device=case.q.device)
    with dots_of_one_order():
        ordered_attention(
            case.q, case.kv, case.page_table, case.positions, work, partials, scale=case.scale, out=out, sink_logits=sinks,
            scales=scales, interpret=interpret,
        )
    return out


def in_prefill(case: Case, *, interpret: bool, sinks: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    out = torch.full(case.q.shape, float("nan"), dtype=torch.bfloat16, device=case.q.device)
    with dots_of_one_order():
        ordered_prefill(
            case.q, case.kv, case.page_table, case.positions, case.cu_seqlens_q, case.kv_len, scale=case.scale,
            max_q=case.shape.max_q, max_kv=case.shape.max_kv, out=out, window=case.shape.window, sink_logits=sinks,
            scales=scales, interpret=interpret,
        )
    return out


def queries(case: Case, row: int, begin: int, stop: int, *, keys: int | None = None) -> Case:
    """Queries at positions begin .. stop-1 of one row alone, over keys below `keys`, by default those that they see."""
    first = int(case.cu_seqlens_q[row]) + begin - int(case.positions[case.cu_seqlens_q[row]])
    own = slice(first, first + stop - begin)
    keys = stop if keys is None else keys
    return replace(
        case, q=case.q[own], positions=case.positions[own], page_table=case.page_table[row : row + 1],
        cu_seqlens_q=case.cu_seqlens_q.new_tensor([0, stop - begin]), kv_len=case.kv_len.new_tensor([keys]), shared=None,
        shape=replace(case.shape, max_q=stop - begin, max_kv=keys),
    )


def sinks_of(case: Case) -> Tensor:
    return torch.linspace(-1, 3, 4, device=case.q.device)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_rounds_and_prefill_give_attention(window: int, sinks: bool, interpret: bool, device: torch.device) -> None:
    case = case_of([(5, 300), (1, 40), (3, 129), (7, 7)], device, window=window)
    given = sinks_of(case) if sinks else None
    expected = case.expected(case.work(interpret=False), sink_logits=given)
    for found in (in_round(case, interpret=interpret, sinks=given), in_prefill(case, interpret=interpret, sinks=given)):
        torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


def test_dead_rows_and_padding_give_zeros(interpret: bool, device: torch.device) -> None:
    case = case_of([(2, 0), (2, 200), (0, 0)], device, padding=3)
    found = in_round(case, interpret=interpret)
    assert not found[:2].any()
    assert not found[4:].any()
    assert found[2:4].isfinite().all()


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_has_the_same_bits_alone_among_others_and_in_prefill(window: int, sinks: bool, device: torch.device) -> None:
    rows = [(40, 290), (33, 150)]
    case = case_of(rows, device, window=window)
    given = sinks_of(case) if sinks else None
    whole = in_prefill(case, interpret=True, sinks=given)
    assert torch.equal(in_round(case, interpret=True, sinks=given), whole)
    begins = case.cu_seqlens_q.tolist()
    # (row, first query, last, keys of the row): alone, with queries before and after it, with drafts that cross a part
    for row, begin, stop, keys in (
        (0, 250, 251, 251), (0, 255, 256, 256), (0, 256, 257, 257), (0, 251, 262, 262), (0, 254, 255, 262), (0, 289, 290, 290),
        (1, 117, 118, 118), (1, 125, 131, 131), (1, 127, 129, 150),
    ):
        place = begins[row] + begin - int(case.positions[begins[row]])
        wanted = whole[place : place + stop - begin]
        own = queries(case, row, begin, stop, keys=keys)
        assert torch.equal(in_round(own, interpret=True, sinks=given), wanted), (row, begin)
        assert torch.equal(in_prefill(own, interpret=True, sinks=given), wanted), (row, begin)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("sinks", [False, True])
def test_over_e4m3_rounds_and_prefill_give_attention_to_the_stored_numbers(
    window: int, sinks: bool, interpret: bool, device: torch.device
) -> None:
    case, scales = in_e4m3(case_of([(5, 300), (1, 40), (3, 129), (7, 7)], device, window=window))
    wide = replace(case, kv=from_e4m3(case.kv, scales[:, None, None, :, None], torch.float32))
    given = sinks_of(case) if sinks else None
    expected = wide.expected(case.work(interpret=False), sink_logits=given)
    for attend in (in_round, in_prefill):
        found = attend(case, interpret=interpret, sinks=given, scales=scales)
        torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("window", [0, 70])
def test_over_e4m3_a_query_has_the_same_bits_alone_among_others_and_in_prefill(window: int, device: torch.device) -> None:
    case, scales = in_e4m3(case_of([(40, 290), (33, 150)], device, window=window))
    whole = in_prefill(case, interpret=True, scales=scales)
    for tile in (16, 32, 64):
        assert torch.equal(in_round(case, interpret=True, scales=scales, tile=tile), whole), tile
    begins = case.cu_seqlens_q.tolist()
    for row, begin, stop, keys in (
        (0, 250, 251, 251),
        (0, 256, 257, 257),
        (0, 251, 262, 262),
        (1, 117, 118, 118),
        (1, 127, 129, 150),
    ):
        place = begins[row] + begin - int(case.positions[begins[row]])
        wanted = whole[place : place + stop - begin]
        own = queries(case, row, begin, stop, keys=keys)
        assert torch.equal(in_round(own, interpret=True, scales=scales), wanted), (row, begin)
        assert torch.equal(in_prefill(own, interpret=True, scales=scales), wanted), (row, begin)


@pytest.mark.parametrize("window", [0, 70])
def test_over_e4m3_with_scales_of_one_the_bits_are_those_over_the_same_numbers_in_bf16(window: int, device: torch.device) -> None:
    case, _ = in_e4m3(case_of([(40, 290), (33, 150), (1, 7)], device, window=window))
    same, ones = replace(case, kv=case.kv.bfloat16()), torch.ones(2, 2, device=device)
    for tile in (16, 32, 64):
        found = in_round(case, interpret=True, scales=ones, tile=tile)
        assert torch.equal(found, in_round(same, interpret=True, tile=tile)), tile
    assert torch.equal(in_prefill(case, interpret=True, scales=ones), in_prefill(same, interpret=True))


def test_over_e4m3_a_shared_prefix_changes_no_bit(device: torch.device) -> None:
    case, scales = in_e4m3(share(case_of([(3, 300), (3, 290), (1, 40)], device), [([0, 1], 272)]))
    wanted = in_round(replace(case, shared=None), interpret=True, scales=scales)
    assert torch.equal(in_round(case, interpret=True, scales=scales, group_tile=64), wanted)


def test_an_e4m3_cache_needs_scales(device: torch.device) -> None:
    case, scales = in_e4m3(case_of([(1, 20)], device))
    for attend in (in_round, in_prefill):
        with pytest.raises(ValueError, match=r"kv\[0\]"):
            attend(case, interpret=True)
        with pytest.raises(ValueError, match="scales"):
            attend(case, interpret=True, scales=scales[:, :1])


def test_no_tile_changes_bits(device: torch.device) -> None:
    case = case_of([(9, 270), (4, 130)], device)
    wanted = in_round(case, interpret=True, tile=16)
    for tile in (32, 64):
        assert torch.equal(in_round(case, interpret=True, tile=tile), wanted)


def test_a_shared_prefix_that_is_read_once_changes_no_bit(device: torch.device) -> None:
    case = share(case_of([(3, 300), (3, 290), (1, 40)], device), [([0, 1], 272)])
    apart = replace(case, shared=None)
    wanted = in_round(apart, interpret=True)
    for group_tile in (16, 64):
        assert torch.equal(in_round(case, interpret=True, group_tile=group_tile), wanted)


def test_programs_that_take_several_items_change_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = share(case_of([(3, 300), (3, 290), (2, 0), (1, 40)], device, padding=2), [([0, 1], 272)])
    wanted = in_round(case, interpret=True)
    for most in (1, 3):
        monkeypatch.setattr(attention_module, "MAX_ITEMS", most)
        assert torch.equal(in_round(case, interpret=True), wanted)


def test_a_group_without_live_members_writes_nothing(device: torch.device) -> None:
    case = share(case_of([(1, 200), (1, 0), (1, 0)], device), [([1, 2], 128)])
    apart = replace(case, shared=None)
    assert torch.equal(in_round(case, interpret=True), in_round(apart, interpret=True))


def test_a_key_that_is_not_finite_harms_only_queries_that_see_it(interpret: bool, device: torch.device) -> None:
    case = case_of([(3, 140)], device)
    page = case.page_table[0, 139 // PAGE_SIZE].long()
    case.kv[0, page, 139 % PAGE_SIZE] = float("nan")
    for found in (in_round(case, interpret=interpret), in_prefill(case, interpret=interpret)):
        assert found[:2].isfinite().all()
        assert found[2].isnan().all()


def test_work_without_parts_is_refused(device: torch.device) -> None:
    case = case_of([(1, 20)], device)
    work, out = case.work(interpret=False), torch.empty_like(case.q)
    with pytest.raises(ValueError, match="part=0"):
        ordered_attention(case.q, case.kv, case.page_table, case.positions, work, partials_of(work, 64), scale=1.0, out=out)
