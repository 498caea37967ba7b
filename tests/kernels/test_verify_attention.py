"""verify_attention: however a batch is split, every query gets softmax attention over exactly the keys it may attend to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.attention.merge_states import partials_of
from batchspec.kernels.attention.settings import Config, config_of, tile_of, work_shape
from batchspec.kernels.attention.split_kv_schedule import split_kv_schedule
from batchspec.kernels.attention.verify_attention import verify_attention
from batchspec.kernels.common.card import INTERPRETER
from batchspec.tuning.cards import known_card
from tests.kernels.attention_cases import PAGE_SIZE, Case, make_case, share
from tests.kernels.covering import covering

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
RAGGED = [(1, 40), (4, 100), (2, 0), (3, 17), (0, 0), (1, 1)]


def check(case: Case, interpret: bool, *, programs: tuple[int, ...] = (1, 40), **tree: Any) -> None:
    """With rows whole and with rows in parts."""
    for number in programs:
        work = case.work(interpret=interpret, programs=number)
        out = case.run(work, interpret=interpret, **tree)
        expected = case.expected(work, **tree)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[out.dtype], rtol=0)


def by_hand(case: Case, window: int = 0, sink: int = 0, sink_logits: Tensor | None = None) -> Tensor:
    """One query and head at a time, in fp64, from the definition."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.shape.heads_per_kv
    for row, length in enumerate(case.kv_len.tolist()):
        for t in range(int(case.cu_seqlens_q[row]), int(case.cu_seqlens_q[row + 1]) if length else 0):
            position = int(case.positions[t])
            seen = [k for k in range(position + 1) if not window or k > position - window or k < sink]
            pages = [int(case.page_table[row, k // PAGE_SIZE]) for k in seen]
            places = [k % PAGE_SIZE for k in seen]
            for head in range(case.q.shape[1]):
                keys, values = case.kv[:, pages, places, head // group].double()
                scores = keys @ case.q[t, head].double() * case.scale
                if sink_logits is not None:
                    scores, values = torch.cat((scores, sink_logits[head : head + 1].double())), F.pad(values, (0, 0, 0, 1))
                out[t, head] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize(
    ("window", "sink"),
    [(0, 0), (20, 5), (1, 0), pytest.param(20, 0, marks=pytest.mark.slow), pytest.param(500, 3, marks=pytest.mark.slow)],
)
def test_ragged_rows_dead_rows_and_padding(window: int, sink: int, interpret: bool, device: torch.device) -> None:
    case = make_case(RAGGED, padding=3, window=window, sink=sink, device=device)
    for programs in (1, 40):
        out = case.run(case.work(interpret=interpret, programs=programs), interpret=interpret)
        torch.testing.assert_close(out.double().cpu(), by_hand(case, window, sink), atol=1e-5, rtol=0)
        assert not out[5:7].any()  # the dead row
        assert not out[11:].any()  # the padding


@pytest.mark.parametrize("window", [0, 20])
def test_a_sink_joins_each_softmax_once_however_rows_are_cut(window: int, interpret: bool, device: torch.device) -> None:
    case = make_case(RAGGED, heads=(6, 2), padding=3, window=window, device=device)
    logits = torch.tensor([-3.0, 3.0, 0.0, 40.0, -60.0, float("-inf")], device=device)
    expected = by_hand(case, window, sink_logits=logits)
    for programs in (1, 40):
        work = case.work(interpret=interpret, programs=programs)
        out = case.run(work, interpret=interpret, sink_logits=logits)
        torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(case.expected(work, sink_logits=logits).double().cpu(), expected, atol=1e-5, rtol=0)


def test_sinks_are_not_in_the_parts_of_shared_prefixes(interpret: bool, device: torch.device) -> None:
    case = share(make_case([(2, 100), (1, 120), (2, 66)], heads=(4, 2), device=device), [([0, 1], 64)])
    check(case, interpret, sink_logits=torch.tensor([-1.0, 2.0, 0.5, 5.0], device=device))


@pytest.mark.parametrize(("heads", "dtype"), covering([(1, 1), (4, 2), (9, 3), (4, 1), (16, 1)], [*TOLERANCE], one_in=3))
def test_group_sizes_and_dtypes(heads: tuple[int, int], dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    check(make_case([(2, 70), (3, 33)], heads=heads, dtype=dtype, device=device), interpret)


@pytest.mark.parametrize("head_dim", [8, 96, 256, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 128, 512))])
def test_head_sizes(head_dim: int, interpret: bool, device: torch.device) -> None:
    check(make_case([(2, 70), (1, 33)], head_dim=head_dim, fused=True, padding=1, device=device), interpret)


@pytest.mark.parametrize("num_q", [1, 5, 33, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 8, 64))])
def test_rows_of_any_number_of_queries(num_q: int, interpret: bool, device: torch.device) -> None:
    case = make_case([(num_q, 90), (1, 20), (num_q, num_q)], heads=(4, 1), head_dim=16, device=device, block=32)
    check(case, interpret, programs=(8,))
    check(replace(case, shape=replace(case.shape, tile=64)), interpret, programs=(1,))


def test_bounds_of_pages_blocks_and_parts(interpret: bool, device: torch.device) -> None:
    rows = [(1, keys) for keys in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)]
    check(make_case(rows, heads=(2, 1), head_dim=16, device=device, block=32), interpret, programs=(1, 100))


def test_a_query_is_a_slice_of_a_fused_product(interpret: bool, device: torch.device) -> None:
    case = make_case(RAGGED, heads=(6, 2), fused=True, device=device)
    assert not case.q.is_contiguous()
    check(case, interpret)


def test_one_layer_of_a_larger_cache_is_read(interpret: bool, device: torch.device) -> None:
    case = make_case([(2, 50)], device=device)
    layers = torch.randn(3, *case.kv.shape, device=device)
    layers[1] = case.kv
    check(replace(case, kv=layers[1]), interpret)


def test_unwritten_places_of_a_page_are_never_read(interpret: bool, device: torch.device) -> None:
    case = make_case([(2, 50), (3, 21)], device=device)
    expected = case.expected(case.work(interpret=False))
    kv = torch.where(case.kv.abs() >= 1e4, float("nan"), case.kv)
    assert kv.isnan().any()
    case = replace(case, kv=kv)
    for programs in (1, 40):
        out = case.run(case.work(interpret=interpret, programs=programs), interpret=interpret)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def mark(case: Case, row: int, position: int) -> None:
    """The key is not finite: as `kv_write` leaves it."""
    case.kv[0, int(case.page_table[row, position // PAGE_SIZE]), position % PAGE_SIZE] = float("nan")


@pytest.mark.parametrize("window", [0, 24])
def test_a_draft_that_is_not_finite_reaches_the_queries_that_see_it_and_no_others(
    window: int, interpret: bool, device: torch.device
) -> None:
    case = make_case([(4, 100), (1, 40), (4, 70), (2, 30)], window=window, device=device)
    expected = case.expected(case.work(interpret=False))
    for row, position in ((0, 98), (2, 69), (3, 28)):
        mark(case, row, position)
    lost = torch.tensor([2, 3, 8, 9, 10], device=device)
    kept = torch.tensor([0, 1, 4, 5, 6, 7], device=device)
    for programs in (1, 40):
        out = case.run(case.work(interpret=interpret, programs=programs), interpret=interpret)
        assert bool(out[lost].isnan().all())
        torch.testing.assert_close(out[kept], expected[kept], atol=1e-5, rtol=0)


def test_a_shared_beginning_that_is_not_finite_reaches_its_members_and_no_others(interpret: bool, device: torch.device) -> None:
    case = share(make_case([(1, 40), (2, 60), (1, 90), (1, 50), (1, 45)], device=device), [([0, 2], 32), ([1, 4], 16)])
    expected = case.expected(case.work(interpret=False))
    mark(case, 0, 17)
    members = torch.tensor([0, 3], device=device)
    others = torch.tensor([1, 2, 4, 5], device=device)
    for programs in (1, 40):
        out = case.run(case.work(interpret=interpret, programs=programs, group_programs=programs), interpret=interpret)
        assert bool(out[members].isnan().all())
        torch.testing.assert_close(out[others], expected[others], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (24, 4), pytest.param(24, 0, marks=pytest.mark.slow)])
def test_one_work_list_serves_growing_positions(window: int, sink: int, interpret: bool, device: torch.device) -> None:
    """A drafter's steps: the list is made with the last step's lengths and the first step's positions."""
    steps = 5
    case = make_case([(1, 45), (1, 80), (1, 0), (1, 16)], window=window, sink=sink, device=device)
    first = torch.where(case.kv_len > 0, case.positions - (steps - 1), 0).clamp(min=0)
    for programs in (1, 40):
        work = replace(case, positions=first).work(interpret=interpret, programs=programs)
        for step in (0, steps - 1):
            positions = first + step
            out = case.run(work, interpret=interpret, positions=positions)
            torch.testing.assert_close(out, case.expected(work, positions=positions), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_shared_prefixes_change_nothing(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    rows = [(2, 100), (1, 120), (2, 0), (2, 66), (3, 95), (1, 50), (1, 97)]
    groups = [([0, 3, 6], 64), ([], 0), ([4, 1, 2], 80), ([5], 32)]
    case = share(make_case(rows, heads=(6, 2), padding=2, dtype=dtype, device=device), groups)
    for programs, tile in ((1, 16), (30, 64)):
        work = case.work(interpret=interpret, programs=programs, group_tile=tile)
        out = case.run(work, interpret=interpret)
        alone = replace(case, shared=None)
        apart = alone.run(alone.work(interpret=interpret), interpret=interpret)
        torch.testing.assert_close(out, apart, atol=TOLERANCE[dtype], rtol=0)
        torch.testing.assert_close(out.float(), case.expected(work), atol=TOLERANCE[dtype], rtol=0)


def test_a_group_whose_first_member_died_reads_a_live_member_s_pages(interpret: bool, device: torch.device) -> None:
    case = share(make_case([(2, 0), (2, 60), (2, 70)], device=device), [([1, 0, 2], 48)])
    table = case.page_table.clone()
    table[0] = 0
    order = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    assert case.shared is not None
    case = replace(case, page_table=table, shared=replace(case.shared, row_order=order))
    check(case, interpret)


def chain_masks(case: Case) -> dict[str, Any]:
    """A chain as a tree: every query sees the tail places up to its own."""
    starts, masks = torch.zeros_like(case.kv_len), torch.zeros_like(case.positions)
    for row, (begin, end) in enumerate(zip(case.cu_seqlens_q[:-1].tolist(), case.cu_seqlens_q[1:].tolist(), strict=True)):
        if end > begin:
            starts[row] = case.positions[begin]
            masks[begin:end] = torch.tensor([(1 << (j + 1)) - 1 if j < 63 else -1 for j in range(end - begin)])
    return {"ancestors": masks, "tail_start": starts}


@pytest.mark.parametrize("window", [0, 30])
def test_a_chain_written_as_a_tree_is_a_chain(window: int, interpret: bool, device: torch.device) -> None:
    case = make_case([(5, 60), (1, 33), (3, 0), (8, 70)], padding=1, window=window, device=device)
    for programs in (1, 40):
        work = case.work(interpret=interpret, programs=programs)
        as_tree = case.run(work, interpret=interpret, **chain_masks(case))
        torch.testing.assert_close(as_tree, case.run(work, interpret=interpret), atol=1e-5, rtol=0)


def test_a_tree_s_queries_see_their_ancestors_alone(interpret: bool, device: torch.device) -> None:
    """Nodes 0; 1, 2 below 0; 3 below 1; 4 below 2: RoPE positions go by depth, keys by node."""
    case = make_case([(5, 52), (5, 30)], device=device)
    masks = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101] * 2, device=device)
    depth = torch.tensor([0, 1, 1, 2, 2] * 2, device=device)
    start = case.kv_len - 5
    case = replace(case, positions=start.long().repeat_interleave(5) + depth)
    tree: dict[str, Any] = {"ancestors": masks, "tail_start": start}
    check(case, interpret, **tree)
    out = case.run(case.work(interpret=interpret), interpret=interpret, **tree)
    # Node 4 of row 0 by hand: its keys are the prefix, node 0, node 2 and itself.
    keys = torch.tensor([*range(47), 47, 49, 51])
    k, v = case.kv[:, case.page_table[0, keys // PAGE_SIZE].long(), keys % PAGE_SIZE, 1].double()
    expected = (k @ case.q[4, 3].double() * case.scale).softmax(0) @ v
    torch.testing.assert_close(out[4, 3].double(), expected, atol=1e-5, rtol=0)


def test_bit_63_of_a_mask_counts(interpret: bool, device: torch.device) -> None:
    case = make_case([(64, 70)], heads=(1, 1), head_dim=16, device=device)
    check(case, interpret, **(chain_masks(case) | {"ancestors": torch.full((64,), -(1 << 63), device=device) | 1}))


@pytest.mark.parametrize("examples", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_any_batch_equals_the_reference(examples: int, device: torch.device) -> None:
    settings(max_examples=examples)(given(data=st.data())(any_batch_equals_the_reference))(device=device)


def any_batch_equals_the_reference(data: st.DataObject, device: torch.device) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(6, 90), st.booleans()), min_size=1, max_size=4))
    case = make_case(
        [(num_q, keys if alive else 0) for num_q, keys, alive in rows] + [(1, 8)],
        heads=data.draw(st.sampled_from([(3, 3), (6, 2), (5, 1)])), head_dim=16, padding=data.draw(st.integers(0, 2)),
        window=data.draw(st.sampled_from([0, 7, 33])), sink=data.draw(st.sampled_from([0, 2])), device=device,
        programs=data.draw(st.sampled_from([1, 10, 50])), block=data.draw(st.sampled_from([16, 32])),
    )
    work = case.work(interpret=True)
    torch.testing.assert_close(case.run(work, interpret=True), case.expected(work), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
def test_settings_exist_for_every_shape(head_dim: int, dtype: torch.dtype) -> None:
    for lanes in (1, 12, 32, 64, 1024):
        tile = tile_of(head_dim, lanes, dtype)
        assert tile in (16, 32, 64, 128)
        for fp8 in (False, True):
            config = config_of(head_dim, tile, dtype, INTERPRETER, fp8=fp8)
            assert config.block in (16, 32, 64, 128)
            assert config_of(head_dim, tile, dtype, INTERPRETER, fp8=fp8, crowded=True).block == config.block
        assert tile * head_dim <= 16384  # its sums stay in registers


@pytest.mark.parametrize(
    ("rows", "keys", "kv_heads", "window", "crowded"),
    [
        (256, 1300, 8, 0, True), (256, 8448, 8, 128, True),
        (256, 8448, 8, 0, False), (64, 8448, 8, 128, False), (256, 400, 3, 0, False),
    ],
)
def test_a_list_is_crowded_by_whole_rows_that_need_more_than_two_waves(
    rows: int, keys: int, kv_heads: int, window: int, crowded: bool
) -> None:
    """Their programs have fewer warps, with which others would take longer."""
    shape = work_shape(
        num_rows=rows, max_q=1, max_kv=keys, num_heads=8 * kv_heads, kv_heads=kv_heads, head_dim=64, page_size=16,
        dtype=torch.bfloat16, card=known_card("H200").card, window=window,
    )
    lengths = torch.full((rows,), keys, dtype=torch.int32)
    work = split_kv_schedule(torch.arange(rows + 1).int(), lengths, lengths.long() - 1, shape=shape)
    assert work.crowded == crowded


@pytest.mark.parametrize(("most_q", "tile"), [(2, 16), (4, 32)])
@pytest.mark.parametrize("window", [0, 40])
def test_a_crowded_list_gives_the_same_attention(
    most_q: int, tile: int, window: int, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel with fewer warps, which only a GPU heeds."""
    warps: list[int] = []

    def chosen(*shape: Any, **how: Any) -> Config:
        found = config_of(*shape, **how)
        warps.append(found.num_warps)
        return found

    monkeypatch.setattr("batchspec.kernels.attention.verify_attention.config_of", chosen)
    rows = [(1 + row % most_q, keys) for row, keys in enumerate((150, 17, 64, 0, 129, 300))]
    case = make_case(
        rows, heads=(16, 2), dtype=torch.bfloat16, device=device, programs=1, window=window, tile=tile, block=64, short=512,
        max_whole=512,
    )
    work = case.work(interpret=interpret)
    assert work.crowded
    logits = torch.randn(16, device=device)
    out, expected = case.run(work, interpret=interpret, sink_logits=logits), case.expected(work, sink_logits=logits)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[torch.bfloat16], rtol=0)
    assert warps == ([tile // 16] if interpret else [])


def test_wrong_arguments_are_refused() -> None:
    case = make_case([(2, 20)])
    work = case.work(interpret=False)
    good: dict[str, Any] = {
        "q": case.q, "kv": case.kv, "page_table": case.page_table, "positions": case.positions, "out": torch.empty_like(case.q)
    }

    def call(**changes: Any) -> None:
        arguments = good | changes
        verify_attention(work=work, partials=partials_of(work, 64), scale=1.0, **arguments)

    call()
    for name, wrong in (("q", case.q.double()), ("page_table", case.page_table.long()), ("positions", case.positions.int())):
        with pytest.raises(ValueError, match=f"verify_attention: {name} is"):
            call(**{name: wrong})
    with pytest.raises(ValueError, match=r"verify_attention: kv\[0\] is float32"):
        call(kv=case.kv[:, :, :8])
    with pytest.raises(ValueError, match="verify_attention: out is"):
        call(out=torch.empty(2, 4, 32))
    with pytest.raises(ValueError, match="ancestors and tail_start go together"):
        call(ancestors=case.positions)
