"""Work list of verify attention: every key that a query may see is in one item, the longest items come first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from batchspec.kernels.attention.settings import work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.work_list import AttentionWork, WorkShape
from batchspec.tuning.cards import known_card
from tests.kernels.attention_cases import PAGE_SIZE, make_case, share


def items_of(work: AttentionWork, group: bool = False) -> list[list[int]]:
    """(unit, tile, first, end, part, sinks, begin, count) each."""
    count = int(work.counts[int(group)])
    items: list[list[int]] = (work.group_items if group else work.items)[:count].tolist()
    return items


def equal_work(shape: WorkShape, lengths: list[int], max_q: int = 1) -> AttentionWork:
    cu_seqlens_q = torch.arange(0, len(lengths) * max_q + 1, max_q, dtype=torch.int32)
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    return split_kv_schedule(cu_seqlens_q, kv_len, torch.zeros(len(lengths) * max_q, dtype=torch.int64), shape=shape)


def h200(num_rows: int, max_kv: int, max_q: int = 1) -> WorkShape:
    return work_shape(
        num_rows=num_rows, max_q=max_q, max_kv=max_kv, num_heads=32, kv_heads=8, head_dim=128, page_size=16,
        dtype=torch.bfloat16, card=known_card("H200").card,
    )


@pytest.mark.parametrize("max_q", [1, 4])
def test_few_long_rows_fill_the_card_exactly_once_with_equal_items(max_q: int) -> None:
    shape = h200(4, 8448, max_q)
    items = items_of(equal_work(shape, [8448] * 4, max_q))
    assert {item[3] - item[2] for item in items} == {704}
    assert 0.9 * shape.programs < len(items) * 8 <= shape.programs


@pytest.mark.parametrize(("num_rows", "waves"), [(16, 2), (64, 5)])
def test_more_long_rows_fill_it_several_times_with_items_of_many_keys(num_rows: int, waves: int) -> None:
    shape = h200(num_rows, 8448)
    items = items_of(equal_work(shape, [8448] * num_rows))
    assert {item[3] - item[2] for item in items} <= set(range(1024, 4097))
    assert (waves - 2) * shape.programs < len(items) * 8 <= waves * shape.programs


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what the interpreter is given")
def test_without_shared_prefixes_the_number_of_rows_compiles_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile of a group's queries grows with it."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **constants: launched.append(constants))
    shapes = [h200(num_rows, 1536) for num_rows in (1, 4, 48)]
    assert len({(shape.group_tile, shape.group_block) for shape in shapes}) > 1
    for shape, num_rows in zip(shapes, (1, 4, 48), strict=True):
        lengths = torch.full((num_rows,), 900, dtype=torch.int32)
        cu_seqlens_q = torch.arange(num_rows + 1, dtype=torch.int32)
        split_kv_schedule(cu_seqlens_q, lengths, torch.zeros(num_rows, dtype=torch.int64), shape=shape, interpret=True)
    assert launched == [launched[0]] * 3


def test_many_short_rows_stay_whole_and_need_no_merge() -> None:
    work = equal_work(h200(256, 1536), [1024] * 256)
    assert [item[2:5] for item in items_of(work)] == [[0, 1024, -1]] * 256
    assert [item[6:] for item in items_of(work)] == [[row, 1] for row in range(256)]
    assert work.num_lines == 0


def test_few_short_rows_stay_whole_too() -> None:
    work = equal_work(h200(4, 700), [700] * 4)
    assert [item[2:5] for item in items_of(work)] == [[0, 700, -1]] * 4
    assert work.num_lines == 0


def test_items_of_ragged_rows_are_a_small_share_of_the_work() -> None:
    lengths = [512] * 50 + [4096] * 13 + [32768]
    work = equal_work(h200(64, 32768), lengths)
    items = items_of(work)
    share_of_a_multiprocessor = sum(lengths) * 8 / 132
    assert max(end - first for _, _, first, end, *_ in items) < share_of_a_multiprocessor / 4
    longest = {row: max(end - first for unit, _, first, end, *_ in items if unit == row) for row in range(64)}
    assert all(longest[a[0]] >= longest[b[0]] for a, b in pairwise(items))


def test_a_windowed_row_lists_its_window_from_a_page_on_and_the_sink_once(interpret: bool, device: torch.device) -> None:
    case = make_case([(2, 200), (1, 30)], window=40, sink=5, device=device)
    items = items_of(case.work(interpret=interpret, programs=100))
    # Row 0's first query has position 198 and sees keys from 159 on, which lie in the page from 144 on.
    assert sorted(item for item in items if item[0] == 0)[0] == [0, 0, 144, 176, 0, 5, 0, 2]
    assert {item[5] for item in items if item[0] == 0 and item[2] > 144} == {0}
    assert min(item[2] for item in items if item[0] == 1) == 0
    assert {item[5] for item in items if item[0] == 1} == {0}


def test_a_window_that_touches_the_sink_begins_at_the_first_key(interpret: bool, device: torch.device) -> None:
    case = make_case([(1, 60)], window=40, sink=17, device=device)
    items = items_of(case.work(interpret=interpret))
    assert min(item[2] for item in items) == 0
    assert {item[5] for item in items} == {0}


def test_dead_rows_and_padding_are_listed_without_keys(interpret: bool, device: torch.device) -> None:
    case = make_case([(2, 0), (1, 20), (0, 0)], padding=3, device=device)
    items = items_of(case.work(interpret=interpret, programs=1))
    assert items == [[1, 0, 0, 20, -1, 0, 2, 1], [0, 0, 0, 0, -1, 0, 0, 2], [3, 0, 0, 0, -1, 0, 3, 3]]


def test_a_group_lists_its_prefix_once_for_each_tile_of_members(interpret: bool, device: torch.device) -> None:
    rows = [(2, 100), (2, 90), (1, 70), (2, 0), (2, 99)]
    case = share(make_case(rows, heads=(4, 1), device=device), [([0, 2, 3, 4], 64)])
    work = case.work(interpret=interpret, programs=1, group_programs=1, group_tile=16)
    assert items_of(work, group=True) == [[0, 0, 0, 64, 0, 0, 0, 4], [0, 1, 0, 64, 0, 0, 0, 4]]  # 4 members * 2 queries * 4 heads
    firsts = {item[0]: (item[2], item[4]) for item in items_of(work) if item[3]}
    assert firsts == {0: (64, 1), 1: (0, -1), 2: (64, 1), 4: (64, 1)}
    assert work.row_parts[:, 1].tolist() == [2, 0, 2, 0, 2]


@pytest.mark.parametrize("examples", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_kernel_equals_the_loop_and_covers_every_key_once(examples: int, device: torch.device) -> None:
    settings(max_examples=examples)(given(data=st.data())(kernel_equals_the_loop))(device=device)


def kernel_equals_the_loop(data: st.DataObject, device: torch.device) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(0, 9), st.integers(9, 150), st.booleans()), min_size=1, max_size=6))
    shape: dict[str, Any] = {"tile": data.draw(st.sampled_from([16, 32])), "block": data.draw(st.sampled_from([16, 32]))}
    window = data.draw(st.sampled_from([0, 0, 1, 20, 70]))
    shape |= {"window": window, "sink": data.draw(st.sampled_from([0, 4])) if window else 0}
    shape |= {"min_chunk": data.draw(st.sampled_from([16, 48])), "programs": data.draw(st.sampled_from([1, 8, 60]))}
    shape |= {"chunk": data.draw(st.sampled_from([16, 1024]))}
    part = data.draw(st.sampled_from([0, 0, 32, 96]))
    shape |= {"part": part, "group_block": 16} if part else {}
    heads = data.draw(st.sampled_from([(3, 1), (4, 2), (16, 1)]))
    lengths = [(num_q, keys if alive else 0) for num_q, keys, alive in rows]
    lengths[0] = (1, 60)
    case = make_case(lengths, heads=heads, head_dim=16, padding=data.draw(st.integers(0, 3)), device=device, **shape)
    if not window and data.draw(st.booleans()):
        members = [row for row, (num_q, keys) in enumerate(lengths) if not (num_q and keys) or keys - num_q >= 16]
        shortest = min((keys - num_q for num_q, keys in (lengths[row] for row in members) if num_q and keys), default=16)
        case = share(case, [(members, data.draw(st.integers(1, shortest // 16)) * 16)] if members else [])
    kernel, loop = case.work(interpret=True), case.work(interpret=False)
    assert kernel.counts.tolist() == loop.counts.tolist()
    assert int(kernel.counts[0]) <= len(kernel.items)
    assert int(kernel.counts[1]) <= len(kernel.group_items)
    assert items_of(kernel) == items_of(loop)
    assert items_of(kernel, group=True) == items_of(loop, group=True)
    assert kernel.row_parts[:, 1].tolist() == loop.row_parts[:, 1].tolist()
    lines = [
        (int(line), int(line) + int(parts) * num_q * heads[0] // heads[1])
        for (line, parts), (num_q, _) in zip(kernel.row_parts.tolist(), lengths, strict=True)
        if parts
    ]
    assert all(0 <= a < b <= kernel.num_lines for a, b in lines)
    assert all(a[1] <= b[0] for a, b in pairwise(lines))
    covers_every_key_once(kernel, case.positions.tolist(), lengths)


def covers_every_key_once(work: AttentionWork, positions: list[int], rows: list[tuple[int, int]]) -> None:
    shape, begins = work.shape, work.cu_seqlens_q.tolist()
    for row, (num_q, length) in enumerate(rows):
        if not (num_q and length):
            continue
        mine = [item for item in items_of(work) if item[0] == row]
        tiles = -(-num_q * shape.heads_per_kv // shape.tile)
        for tile in range(tiles):
            keys = sorted(
                key for _, at, first, end, _, sinks, *_ in mine if at == tile for key in [*range(sinks), *range(first, end)]
            )
            assert len(keys) == len(set(keys))
            first = positions[begins[row]]
            needed = {key for key in range(length) if not shape.window or key > first - shape.window or key < shape.sink}
            prefix = int(work.shared.shared_len[work.shared.row_group[row]]) if in_group(work, row) and work.shared else 0
            prefix = prefix // shape.part * shape.part if shape.part else prefix
            assert needed - set(range(prefix)) <= set(keys)
            assert all(key >= prefix for key in keys)
        assert {item[1] for item in mine} == set(range(tiles))
        assert all(end - first <= shape.page_size * 100 and first % PAGE_SIZE == 0 for _, _, first, end, *_ in mine)


def test_with_parts_a_row_is_cut_at_the_same_keys_in_any_batch(interpret: bool, device: torch.device) -> None:
    def cuts_of(rows: list[tuple[int, int]], **shape: Any) -> list[list[int]]:
        case = make_case(rows, device=device, part=64, tile=16, block=16, group_block=16, **shape)
        tiles = [item for item in items_of(case.work(interpret=interpret)) if item[:2] == [0, 0]]
        return sorted(item[2:5] for item in tiles)

    alone = cuts_of([(1, 200)], programs=1000)
    assert alone == [[0, 64, 0], [64, 128, 1], [128, 192, 2], [192, 200, 3]]
    assert cuts_of([(1, 200), (3, 30), (1, 150)], programs=1) == alone
    assert cuts_of([(9, 208)], programs=1)[:3] == alone[:3]  # more queries: the last part alone grows
    # The windows of the first of 3 queries and of the first of 9 begin at keys 128 and 131: both in the block from 128 on.
    assert cuts_of([(3, 200)], window=70) == [[128, 192, 0], [192, 200, 1]]
    assert cuts_of([(9, 209)], window=70) == [[128, 192, 0], [192, 209, 1]]


def test_with_parts_whole_parts_of_a_shared_prefix_are_read_once(interpret: bool, device: torch.device) -> None:
    case = make_case([(1, 200), (1, 190), (1, 40)], device=device, part=64, tile=16, block=16, group_block=16)
    work = share(case, [([0, 1], 144)]).work(interpret=interpret)
    assert [item[2:5] for item in items_of(work, group=True)] == [[0, 64, 0], [64, 128, 1]]
    assert sorted(item[2:5] for item in items_of(work) if item[0] == 0) == [[128, 192, 2], [192, 200, 3]]
    assert work.row_parts[:, 1].tolist() == [4, 3, 0]


def test_with_parts_whole_parts_come_first_and_then_the_longest_ends(interpret: bool, device: torch.device) -> None:
    rows = [(1, 130), (1, 40), (1, 64), (1, 0), (1, 180)]
    case = make_case(rows, device=device, part=64, tile=16, block=16, group_block=16)
    items = items_of(case.work(interpret=interpret))
    assert [(item[0], item[2], item[3]) for item in items] == [
        (0, 0, 64), (0, 64, 128), (2, 0, 64), (4, 0, 64), (4, 64, 128), (4, 128, 180), (1, 0, 40), (0, 128, 130), (3, 0, 0),
    ]


def in_group(work: AttentionWork, row: int) -> bool:
    return work.shared is not None and int(work.shared.row_group[row]) >= 0


def test_wrong_arguments_are_refused() -> None:
    case = make_case([(1, 20)])
    with pytest.raises(ValueError, match=r"split_kv_schedule: kv_len is int64 \[1\]"):
        split_kv_schedule(case.cu_seqlens_q, case.kv_len.long(), case.positions, shape=case.shape)
    with pytest.raises(ValueError, match=r"split_kv_schedule: cu_seqlens_q is int32 \[1\].* must be int32 \[2\]"):
        split_kv_schedule(case.cu_seqlens_q[:1], case.kv_len, case.positions, shape=case.shape)
    shared = share(case, [([0], 16)])
    with pytest.raises(ValueError, match="shared prefixes with window=8; pass shared=None"):
        replace(shared, shape=replace(case.shape, window=8)).work(interpret=False)
