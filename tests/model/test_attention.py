"""Paged attention against a plain softmax over each row's keys, in every layout that a flat batch can have."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout, TreeTail
from batchspec.model.layers.attention import flash
from batchspec.model.layers.attention.plan import attend, plan_attention
from tests.helpers.kv_pages import layer_kv
from tests.kernels.trees import path_to_root, random_parents

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
PAGE_SIZE = 4


def make_batch(rows: list[tuple[int, int]], generator: torch.Generator) -> FlatBatch:
    """Rows of (number of queries, number of keys); a row without queries is dead. Pages in random order, page 0 is scratch."""
    q_len, kv_len = [q for q, _ in rows], [n if q else 0 for q, n in rows]
    per_row = max(-(-n // PAGE_SIZE) for _, n in rows) + 1
    pages = torch.randperm(len(rows) * per_row, generator=generator) + 1
    table = pages.int().view(len(rows), per_row)
    positions = torch.cat([torch.arange(n - q, n) for q, n in rows])
    row_ids = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(q_len))
    return FlatBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        row_ids=row_ids.int(),
        positions=positions,
        slot_mapping=table[row_ids, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE,
        cu_seqlens_q=torch.tensor([0, *q_len]).cumsum(0).int(),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        page_table=table,
        max_q=max(q_len),
        max_kv=max(kv_len),
    )


def make_tensors(
    batch: FlatBatch, heads: tuple[int, int], dtype: torch.dtype, rng: torch.Generator, head_dim: int = 8
) -> tuple[Tensor, Tensor]:
    """q [T, NH, D] and kv with noise in every page, the scratch page included."""
    num_heads, kv_heads = heads
    q = torch.randn(batch.token_ids.shape[0], num_heads, head_dim, dtype=torch.float64, generator=rng)
    kv = torch.randn(2, batch.page_table.numel() + 1, PAGE_SIZE, kv_heads, head_dim, dtype=torch.float64, generator=rng)
    return q.to(dtype), kv.to(dtype)


def by_hand(q: Tensor, kv: Tensor, batch: FlatBatch, scale: float, window: int | None, sink: int = 0) -> Tensor:
    """One query at a time, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        row, position = int(batch.row_ids[t]), int(batch.positions[t])
        if batch.kv_len[row] == 0:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        seen = torch.tensor([key for key in range(position + 1) if key >= first or key < sink])
        k, v = kv.double()[:, batch.page_table[row, seen // PAGE_SIZE].long(), seen % PAGE_SIZE].repeat_interleave(
            q.shape[1] // kv.shape[3], 2
        )
        weights = (torch.einsum("hd,khd->hk", q[t].double(), k) * scale).softmax(1)
        out[t] = torch.einsum("hk,khd->hd", weights, v)
    return out


def check(
    rows: list[tuple[int, int]], heads: tuple[int, int], window: int | None, dtype: torch.dtype, seed: int = 0, sink: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(rows, generator)
    q, kv = make_tensors(batch, heads, dtype, generator)
    out = attend(q, layer_kv(kv), batch, scale=1 / math.sqrt(8), window=window, sink=sink)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), by_hand(q, kv, batch, 1 / math.sqrt(8), window, sink), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 5), (1, 17), (1, 8)],
        [(3, 3), (3, 30), (3, 11), (3, 4)],
        [(2, 9), (0, 7), (5, 6), (1, 40)],
        [(20, 20)],
        [(17, 33), (1, 3), (40, 40), (0, 5), (16, 16)],
    ],
    ids=["first token", "one token a row", "a verification", "ragged with a dead row", "a prefill", "mixed"],
)
def test_every_query_sees_its_window_of_its_row(rows: list[tuple[int, int]], window: int | None, dtype: torch.dtype) -> None:
    check(rows, (6, 2), window, dtype)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 1)])
def test_heads_share_keys_and_values_in_order(heads: tuple[int, int]) -> None:
    check([(4, 9), (30, 31), (1, 12)], heads, None, torch.float64)


one_row = st.integers(0, 24).flatmap(lambda q: st.tuples(st.just(q), st.integers(max(q, 1), q + 40)))
some_rows = st.lists(one_row, min_size=1, max_size=6).filter(lambda rows: any(q for q, _ in rows))


@pytest.mark.second
@settings(max_examples=60, deadline=None)
@given(some_rows, st.none() | st.integers(1, 30), st.integers(0, 12), st.integers(0, 99))
def test_any_mix_of_rows_is_exact_in_fp64(rows: list[tuple[int, int]], window: int | None, sink: int, seed: int) -> None:
    """The first `sink` keys are seen too, whatever the window."""
    check(rows, (4, 2), window, torch.float64, seed, sink)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_a_key_that_is_not_finite_reaches_the_queries_that_see_it_and_no_others(window: int | None, dtype: torch.dtype) -> None:
    """As `kv_write` leaves it: NaN in K. In every page place that no row owns too, the scratch page among them."""
    rows = [(1, 5), (3, 30), (20, 20), (17, 33), (0, 7), (16, 16)]
    generator = torch.Generator().manual_seed(1)
    batch = make_batch(rows, generator)
    q, kv = make_tensors(batch, (4, 2), dtype, generator)
    expected = attend(q, layer_kv(kv), batch, scale=0.3, window=window)
    owned = torch.zeros(kv.shape[1:3], dtype=torch.bool)
    for row, (_, keys) in enumerate(rows):
        at = torch.arange(keys)
        owned[batch.page_table[row, at // PAGE_SIZE].long(), at % PAGE_SIZE] = True
    kv[0, ~owned] = float("nan")
    torch.testing.assert_close(
        attend(q, layer_kv(kv), batch, scale=0.3, window=window), expected, atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=0
    )
    kv[0, ~owned] = torch.finfo(dtype).max  # its score overflows
    again = attend(q, layer_kv(kv), batch, scale=0.3, window=window)
    torch.testing.assert_close(again, expected, atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=0)
    kv[0, ~owned] = float("nan")
    bad = {0: 4, 1: 29, 2: 10, 3: 2, 5: 0}  # positions by row: its own token, a draft, in a prefill, before it
    for row, position in bad.items():
        kv[0, batch.page_table[row, position // PAGE_SIZE].long(), position % PAGE_SIZE, 1] = float("nan")
    out = attend(q, layer_kv(kv), batch, scale=0.3, window=window)
    at = torch.tensor([bad.get(int(row), 0) for row in batch.row_ids])
    sees = (at <= batch.positions) & (at > batch.positions - (window or 10**6))
    assert 0 < int(sees.sum()) < len(sees)
    assert bool(out[sees, 2:].isnan().all())  # the heads that read K/V head 1
    torch.testing.assert_close(out[~sees], expected[~sees], atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=0)
    torch.testing.assert_close(out[:, :2], expected[:, :2], atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("num_nodes", [1, 7, 40, 64])
def test_nodes_of_a_tree_see_the_tokens_before_it_and_their_own_path(num_nodes: int, window: int | None) -> None:
    """Keys by node, positions by depth: a query at depth d has the first node's position plus d, whatever its number."""
    rng, generator = random.Random(num_nodes), torch.Generator().manual_seed(0)
    starts, parents = [5, 11, 0], [random_parents(rng, num_nodes, 5) for _ in range(3)]
    batch = make_batch([(num_nodes, start + num_nodes) for start in starts], generator)
    ways = [path_to_root(line, node) for line in parents for node in range(num_nodes)]
    row_start = torch.tensor(starts).repeat_interleave(num_nodes)
    batch.positions = row_start + torch.tensor([len(way) - 1 for way in ways])
    batch.tree = TreeTail(
        ancestors=torch.tensor([sum(1 << node for node in way) - (1 << 64) * (63 in way) for way in ways]),
        start=torch.tensor(starts).int(), max_depth=5,
    )
    q, kv = make_tensors(batch, (4, 2), torch.float64, generator)
    out = attend(q, layer_kv(kv), batch, scale=0.3, window=window)
    for t, way in enumerate(ways):
        row, start = t // num_nodes, starts[t // num_nodes]
        path = [*range(start), *(start + node for node in way[::-1])]
        keys = torch.tensor(path[-window:] if window else path)
        k, v = kv[:, batch.page_table[row, keys // PAGE_SIZE].long(), keys % PAGE_SIZE].repeat_interleave(2, 2)
        weights = (torch.einsum("hd,khd->hk", q[t], k) * 0.3).softmax(1)
        torch.testing.assert_close(out[t], torch.einsum("hk,khd->hd", weights, v), atol=1e-12, rtol=0)


def on_gpu(batch: FlatBatch) -> FlatBatch:
    """The batch with its tensors on the GPU."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values |= {name: value.cuda() for name, value in values.items() if isinstance(value, Tensor)}
    return FlatBatch(**values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 30, 700])
@pytest.mark.parametrize("way", ["both, by length", "torch alone"])
@pytest.mark.parametrize("longest", [flash.SHORT, flash.SHORT + 1])
def test_prefill_on_a_gpu_is_that_of_the_cpu(longest: int, way: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch alone":
        monkeypatch.setattr(flash, "_flashinfer_compiles", lambda *_: False)  # it keeps what earlier tests found
    elif longest > flash.SHORT:
        pytest.importorskip("flashinfer")
    rows = [(70, 90), (1, 33), (200, longest), (64, 64)]
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(rows, generator)
    batch.host = HostLayout([q for q, _ in rows], [n for _, n in rows])
    q, kv = make_tensors(batch, (6, 2), torch.bfloat16, generator, head_dim=64)
    expected = attend(q, layer_kv(kv), batch, scale=1 / 8, window=window)
    plan = plan_attention(on_gpu(batch), layer_kv(kv.cuda()), num_heads=6, window=window)
    assert type(plan) is (flash.VarlenPlan if way == "torch alone" or longest <= flash.SHORT else flash.FlashPlan)
    torch.testing.assert_close(plan.attend(q.cuda(), layer_kv(kv.cuda()), 1 / 8).cpu(), expected, atol=2e-2, rtol=0)
    sinks = torch.tensor([-2.0, 1.0, 0.0, 4.0, -9.0, 2.0])
    expected = plan_attention(batch, layer_kv(kv), num_heads=6, window=window).attend(q, layer_kv(kv), 1 / 8, sink_logits=sinks)
    out = plan.attend(q.cuda(), layer_kv(kv.cuda()), 1 / 8, sink_logits=sinks.cuda()).cpu()
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)


@pytest.mark.usefixtures("no_kernel_known")
@pytest.mark.parametrize(("longest", "asks"), [(flash.SHORT, False), (flash.SHORT + 1, True)])
def test_flashinfer_is_imported_for_long_prompts_alone(longest: int, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import takes a second or two of a job's start-up."""
    asked = []
    monkeypatch.setattr(flash, "flashinfer", lambda: asked.append(longest))
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([(70, 90), (200, longest)], generator)
    batch.host = HostLayout([70, 200], [90, longest])
    _, kv = make_tensors(batch, (6, 2), torch.bfloat16, generator, head_dim=64)
    assert type(flash.plan_flash(batch, layer_kv(kv), num_heads=6, window=None)) is flash.VarlenPlan
    assert bool(asked) == asks


@pytest.fixture
def no_kernel_known() -> Iterator[None]:
    """Whether FlashInfer has a kernel is asked anew within the test."""
    flash._flashinfer_compiles.cache_clear()
    yield
    flash._flashinfer_compiles.cache_clear()


def long_rows(head_dim: int) -> tuple[FlatBatch, Tensor, Tensor]:
    """One row of more than SHORT keys, its queries and its K/V."""
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([(200, flash.SHORT + 1)], generator)
    batch.host = HostLayout([200], [flash.SHORT + 1])
    return batch, *make_tensors(batch, (6, 2), torch.bfloat16, generator, head_dim=head_dim)


@pytest.mark.usefixtures("no_kernel_known")
def test_where_flashinfer_cannot_compile_torch_attends_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its build needs nvcc and ninja, which a machine that only runs jobs may lack."""
    wrapper = SimpleNamespace(plan=Mock(side_effect=RuntimeError("Could not find nvcc\nand much more")))
    monkeypatch.setattr(flash, "flashinfer", lambda: object())
    monkeypatch.setattr(flash, "_ring", lambda _: SimpleNamespace(take=lambda: wrapper))
    batch, _, kv = long_rows(64)
    for _ in range(2):
        assert type(flash.plan_flash(batch, layer_kv(kv), num_heads=6, window=None)) is flash.VarlenPlan
    assert len(caplog.messages) == 1
    assert "FlashInfer cannot compile its prefill kernel (Could not find nvcc): torch's attention is used" in caplog.messages[0]


@pytest.mark.usefixtures("no_kernel_known")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_the_flashinfer_that_is_installed_takes_all_that_it_is_given(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and numbers of arguments alone: this needs no GPU."""
    installed = pytest.importorskip("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
    wrapper = create_autospec(installed)
    monkeypatch.setattr(flash, "flashinfer", lambda: SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=wrapper))
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", 16)
    ring = flash._Ring(torch.device("cpu"))
    monkeypatch.setattr(flash, "_ring", lambda _: SimpleNamespace(take=lambda: ring._wrappers[0]))
    batch, q, kv = long_rows(64)
    wrapper.return_value.run.return_value = q, torch.zeros(q.shape[:2])
    plan = flash.plan_flash(batch, layer_kv(kv), num_heads=6, window=window)
    assert type(plan) is flash.FlashPlan, "else it did not take what it is asked for its kernel with"
    plan.attend(q, layer_kv(kv), 1 / 8, sink_logits=torch.zeros(6) if sinks else None)
    assert wrapper.return_value.plan.call_count == 2
    assert wrapper.return_value.run.call_count == 1


@pytest.mark.parametrize(
    ("error", "warnings"),
    [
        (ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"), []),
        (ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"), ["be imported (No module named 'tvm_ffi')"]),
        (AttributeError("module 'torch' has no attribute 'x'\n"), ["be imported (module 'torch' has no attribute 'x')"]),
    ],
)
def test_a_flashinfer_that_fails_as_it_is_imported_is_not_used_and_a_warning_says_so(
    error: Exception, warnings: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not installed is not missed: it is an extra."""
    finder = Mock(find_spec=Mock(side_effect=error))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder])
    assert flash.flashinfer.__wrapped__() is None
    texts = [f"FlashInfer cannot {text}: torch's attention is used, slower above 2048 keys" for text in warnings]
    assert caplog.messages == texts


@pytest.mark.usefixtures("no_kernel_known")
@pytest.mark.parametrize("head_dim", [32, 80, 96, 192])
def test_head_sizes_that_flashinfer_does_not_have_are_never_compiled(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "flashinfer", Mock(side_effect=AssertionError))
    batch, _, kv = long_rows(head_dim)
    assert type(flash.plan_flash(batch, layer_kv(kv), num_heads=6, window=None)) is flash.VarlenPlan


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [32, 96])
def test_long_rows_of_any_head_size_are_prefilled_on_a_gpu(head_dim: int) -> None:
    batch, q, kv = long_rows(head_dim)
    expected = attend(q, layer_kv(kv), batch, scale=head_dim**-0.5, window=None)
    plan = plan_attention(on_gpu(batch), layer_kv(kv.cuda()), num_heads=6, window=None)
    out = plan.attend(q.cuda(), layer_kv(kv.cuda()), head_dim**-0.5)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("longest", [flash.SHORT, flash.SHORT + 1])
def test_a_key_that_is_not_finite_stays_with_its_row_in_a_prefill_on_a_gpu(longest: int, window: int | None) -> None:
    """Of the first row one in the middle of its queries: those before it do not see it."""
    if longest > flash.SHORT:
        pytest.importorskip("flashinfer")
    rows = [(70, 90), (1, 33), (200, longest), (64, 64)]
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(rows, generator)
    batch.host = HostLayout([q for q, _ in rows], [n for _, n in rows])
    q, kv = make_tensors(batch, (6, 2), torch.bfloat16, generator, head_dim=64)
    kv[0, 0] = float("nan")  # the scratch page
    plan = plan_attention(on_gpu(batch), layer_kv(kv.cuda()), num_heads=6, window=window)
    healthy = plan.attend(q.cuda(), layer_kv(kv.cuda()), 1 / 8).cpu()
    assert bool(healthy.isfinite().all())
    kv[0, batch.page_table[0, 60 // PAGE_SIZE].long(), 60 % PAGE_SIZE] = float("nan")
    out = plan.attend(q.cuda(), layer_kv(kv.cuda()), 1 / 8).cpu()
    sees = (batch.row_ids == 0) & (batch.positions >= 60) & (batch.positions < 60 + (window or 1000))
    assert bool(out[sees].isnan().all())
    assert torch.equal(out[~sees], healthy[~sees])


@pytest.mark.parametrize("window", [None, 30])
def test_a_sink_takes_its_share_of_each_softmax(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([(300, 320), (3, 40), (1, 7), (20, 20)], generator)
    q, kv = make_tensors(batch, (4, 2), torch.float64, generator)
    sinks = torch.tensor([-1.0, 2.0, 0.0, 30.0])
    plan = plan_attention(batch, layer_kv(kv), num_heads=4, window=window)
    found = plan.attend(q, layer_kv(kv), 0.5, sink_logits=sinks)
    for t, (row, position) in enumerate(zip(batch.row_ids.tolist(), batch.positions.tolist(), strict=True)):
        keys = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
        k, v = kv[:, batch.page_table[row, keys // PAGE_SIZE].long(), keys % PAGE_SIZE].repeat_interleave(2, 2)
        scores = torch.einsum("hd,khd->hk", q[t], k) * 0.5
        weights = scores.exp() / (scores.exp().sum(1, keepdim=True) + sinks.double().exp()[:, None])
        torch.testing.assert_close(found[t], torch.einsum("hk,khd->hd", weights, v), atol=1e-12, rtol=1e-9)


def test_places_of_rows_without_keys_and_padding_are_zero() -> None:
    """The uniform layout gives a dead row its places, and a fixed token budget ends in padding."""
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([(2, 5), (2, 9), (2, 2)], generator)
    batch = replace(batch, kv_len=torch.tensor([5, 0, 2]).int(), cu_seqlens_q=torch.tensor([0, 2, 4, 5]).int())
    q, kv = make_tensors(batch, (4, 2), torch.float32, generator)
    out = attend(q, layer_kv(kv), batch, scale=1.0, window=None)
    assert out[2:4].eq(0).all()
    assert out[5].eq(0).all()
    assert out[[0, 1, 4]].ne(0).all()


def test_page_table_entries_after_a_row_are_never_read() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([(1, 30), (1, 3), (20, 22)], generator)
    q, kv = make_tensors(batch, (4, 2), torch.float32, generator)
    expected = attend(q, layer_kv(kv), batch, scale=1.0, window=None)
    table = batch.page_table.clone()
    for row_id, num_keys in enumerate(batch.kv_len.tolist()):
        table[row_id, -(-num_keys // PAGE_SIZE) :] = 2**30
    out = attend(q, layer_kv(kv), replace(batch, page_table=table), scale=1.0, window=None)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_one_plan_serves_every_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = make_batch([(1, 30), (3, 3), (20, 22)], generator)
    layers = [make_tensors(batch, (4, 2), torch.float32, generator) for _ in range(3)]
    plan = plan_attention(batch, layer_kv(layers[0][1]), num_heads=4, window=5)
    for q, kv in layers:
        assert torch.equal(plan.attend(q, layer_kv(kv), 0.5), attend(q, layer_kv(kv), batch, scale=0.5, window=5))


def flash_by_hand(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, Tensor]:
    """What torch's operator computes on a GPU; NaN where no row has a token, which it leaves as memory was."""
    assert (dropout, causal, debug, window_size_right) == (0.0, True, False, 0)
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float64)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for begin, end, first, last in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        assert end - begin <= max_q
        assert last - first <= max_k
        out[begin:end] = 0
        if first == last:
            continue
        place = torch.arange(last - first)
        seen = place <= torch.arange(last - first - (end - begin), last - first)[:, None]
        if window_size_left >= 0:
            seen &= place >= torch.arange(last - first - (end - begin), last - first)[:, None] - window_size_left
        keys, values = (x[first:last].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys).mul(scale).masked_fill(~seen, -math.inf)
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(2), values)
        lse[:, begin:end] = scores.logsumexp(2)
    return out, lse


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("sinks", [False, True])
def test_torchs_attention_needs_bounds_alone(window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens, keys and rows: a dead row and padding after the last one change nothing, and the host knows no length."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_by_hand)
    generator = torch.Generator().manual_seed(0)
    rows = [(70, 90), (1, 33), (3, 3), (100, 130)]
    exact = make_batch(rows, generator)
    q, kv = make_tensors(exact, (6, 2), torch.float64, generator)
    kv[:, 0] = math.nan  # the scratch page, where the keys after the last row's are gathered
    exact.kv_len[2] = 0
    padding = 50
    bounded = replace(
        exact, max_q=128, max_kv=256, max_keys=300, positions=torch.cat((exact.positions, torch.zeros(padding).long())),
        token_ids=torch.zeros(len(q) + padding).int(), row_ids=torch.cat((exact.row_ids, torch.zeros(padding).int())),
    )
    with_sinks = torch.tensor([-2.0, 1.0, 0.0, 4.0, -9.0, 2.0]).double() if sinks else None
    expected = plan_attention(exact, layer_kv(kv), num_heads=6, window=window).attend(
        q, layer_kv(kv), 0.3, sink_logits=with_sinks
    )
    plan = flash.plan_flash(bounded, layer_kv(kv), num_heads=6, window=window)
    padded = torch.cat((q, torch.full((padding, *q.shape[1:]), math.nan, dtype=q.dtype)))
    found = plan.attend(padded, layer_kv(kv), 0.3, sink_logits=with_sinks)
    alive = exact.row_ids != 2
    torch.testing.assert_close(found[: len(q)][alive], expected[alive], atol=1e-12, rtol=1e-9)


def test_bounds_are_used_if_a_gpu_s_attention_reads_no_work_list() -> None:
    layout = layer_kv(torch.zeros(2, 2, 4, 2, 64)).layout
    kinds = {dtype: replace(layout, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    assert [own.plans_by_bounds(64) for own in kinds.values()] == [False, True, True, True]
    assert [own.plans_by_bounds(65) for own in kinds.values()] == [False, False, True, True]
    assert not replace(layout, dtype=torch.bfloat16, head_dim=520).plans_by_bounds(65)


def with_last_keys(batch: FlatBatch, rows: list[tuple[int, int]]) -> FlatBatch:
    """A third of each row's queries, and those after the first half, see each other."""
    found = batch.positions.clone()
    for begin, (count, _) in zip(batch.cu_seqlens_q.tolist(), rows, strict=False):
        for first, end in ((begin + count // 6, begin + count // 2), (begin + count // 2, begin + count)):
            found[first:end] = batch.positions[end - 1] if end > first else 0
    return replace(batch, last_keys=found.int(), host=HostLayout([q for q, _ in rows], [n for _, n in rows]))


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("rows", [[(3, 8), (1, 5), (12, 12)], [(70, 90), (2, 33), (40, 40), (17, 18)]])
def test_tokens_of_images_attend_to_their_last_one_on_a_cpu_and_on_a_gpu(rows: list[tuple[int, int]], window: int | None) -> None:
    """On a GPU by one kernel, of any number of queries, since neither that of rounds nor FlashAttention can do it."""
    generator = torch.Generator().manual_seed(0)
    batch = with_last_keys(make_batch(rows, generator), rows)
    assert batch.last_keys is not None
    q, kv = make_tensors(batch, (6, 2), torch.float64, generator)
    expected = torch.empty_like(q)
    for row, (begin, (count, num_keys)) in enumerate(zip(batch.cu_seqlens_q.tolist(), rows, strict=False)):
        own = torch.arange(num_keys)
        pages = batch.page_table[row].long()
        k, v = kv[:, pages[own // PAGE_SIZE], own % PAGE_SIZE].repeat_interleave(3, 2)
        for place in range(begin, begin + count):
            low = 0 if window is None else int(batch.positions[place]) - window + 1
            seen = (own <= int(batch.last_keys[place])) & (own >= low)
            weights = (torch.einsum("hd,khd->hk", q[place], k) / 3).masked_fill(~seen, -torch.inf).softmax(1)
            expected[place] = torch.einsum("hk,khd->hd", weights, v)
    found = attend(q, layer_kv(kv), batch, scale=1 / 3, window=window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert (attend(q, layer_kv(kv), replace(batch, last_keys=None), scale=1 / 3, window=window) - expected).abs().max() > 0.01
    half = layer_kv(kv.bfloat16())
    on_card: Any = SimpleNamespace(layout=half.layout, pages=SimpleNamespace(is_cuda=True, device=torch.device("cuda")))
    plan = plan_attention(batch, on_card, num_heads=6, window=window)
    assert type(plan) is flash.VarlenPlan
    torch.testing.assert_close(plan.attend(q.bfloat16(), half, 1 / 3).double(), expected, atol=5e-2, rtol=0)


@pytest.mark.usefixtures("no_kernel_known")
def test_long_rows_with_images_that_see_ahead_do_not_ask_for_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are causal."""
    monkeypatch.setattr(flash, "flashinfer", Mock(side_effect=AssertionError))
    batch, _, kv = long_rows(64)
    batch = replace(batch, last_keys=batch.positions.int())
    assert type(flash.plan_flash(batch, layer_kv(kv), num_heads=6, window=30)) is flash.VarlenPlan
