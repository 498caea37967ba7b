"""The GPU's plan of a round's attention, run here by the interpreter: equal to the plan that the CPU uses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchspec.batch.flat_batch import FlatBatch, TreeTail
from batchspec.kernels.attention.work_list import SharedPrefixes
from batchspec.model.layers.attention.plan import plan_attention
from batchspec.model.layers.attention.verify import fits_verify, plan_verify
from tests.helpers.kv_pages import layer_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_SIZE, HEADS, KV_HEADS, DIM, SCALE = 16, 4, 2, 32, 0.2


LEFT_OUT = [(None, 0, torch.bfloat16), (30, 0, torch.bfloat16), (30, 4, torch.float32)]
"""Cases of window, sink and dtype that differ from others in what those differ in already."""


def make_batch() -> FlatBatch:
    """Four rows of up to 3 tokens; the third is dead but keeps its places, as the uniform layout does; padding at the end."""
    starts, q_len, kv_len = [37, 250, 0, 70], [3, 1, 2, 3], [40, 251, 0, 73]
    table = (torch.randperm(4 * 17) + 1).int().view(4, 17)
    table[3, :4] = table[0, :4]
    positions = torch.cat([torch.arange(start, start + num) for start, num in zip(starts, q_len, strict=True)])
    return FlatBatch(
        token_ids=torch.zeros(11, dtype=torch.int32, device=DEVICE),
        row_ids=torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 0, 0], dtype=torch.int32, device=DEVICE),
        positions=torch.cat([positions, torch.zeros(2, dtype=torch.int64)]).to(DEVICE),
        slot_mapping=torch.zeros(11, dtype=torch.int64, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, 3, 4, 6, 9], dtype=torch.int32, device=DEVICE),
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=DEVICE),
        page_table=table.to(DEVICE),
        max_q=3,
        max_kv=272,
    )


@pytest.mark.parametrize(
    ("window", "sink", "dtype"),
    [
        (None, 0, torch.float32),
        (30, 0, torch.float32),
        (30, 4, torch.bfloat16),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LEFT_OUT),
    ],
)
def test_the_kernel_s_plan_equals_torch_s(window: int | None, sink: int, dtype: torch.dtype) -> None:
    batch = make_batch()
    kv = torch.randn(2, 80, PAGE_SIZE, KV_HEADS, DIM, device=DEVICE).to(dtype)
    fused = torch.randn(11, HEADS + 2 * KV_HEADS, DIM, device=DEVICE).to(dtype)
    q = fused[:, :HEADS]
    plan = plan_verify(batch, layer_kv(kv), num_heads=HEADS, window=window, sink=sink, interpret=True)
    # fp64 stays with torch on every device.
    exact = plan_attention(batch, layer_kv(kv.double()), num_heads=HEADS, window=window, sink=sink)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for sink_logits in (None, torch.tensor([-2.0, 1.0, 0.0, 4.0], device=DEVICE)):
        expected = exact.attend(q.double(), layer_kv(kv.double()), SCALE, sink_logits=sink_logits)
        out = plan.attend(q, layer_kv(kv), SCALE, sink_logits=sink_logits)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("window", "sink"), [(None, 0), (30, 0), (2, 4)])
def test_the_kernel_s_plan_of_a_tree_equals_torch_s(window: int | None, sink: int) -> None:
    """Of the first and last row both drafts are children of the newest token; a window may be narrower than a path is long."""
    batch = make_batch()
    batch.positions[[2, 8]] -= 1
    chain, leaves = [0b1, 0b11, 0b111], [0b1, 0b11, 0b101]
    batch.tree = TreeTail(
        ancestors=torch.tensor([*leaves, 1, 1, 1, *leaves, 1, 1], device=DEVICE),
        start=torch.tensor([37, 250, 0, 70], dtype=torch.int32, device=DEVICE),
        max_depth=2,
        depths=torch.tensor([0, 1, 1], device=DEVICE),
    )
    kv = torch.randn(2, 80, PAGE_SIZE, KV_HEADS, DIM, device=DEVICE)
    q = torch.randn(11, HEADS, DIM, device=DEVICE)
    found = []
    for masks in (leaves, chain):
        batch.tree = replace(batch.tree, ancestors=torch.tensor([*masks, 1, 1, 1, *masks, 1, 1], device=DEVICE))
        out = plan_verify(batch, layer_kv(kv), num_heads=HEADS, window=window, sink=sink, interpret=True).attend(
            q, layer_kv(kv), SCALE
        )
        exact = plan_attention(batch, layer_kv(kv.double()), num_heads=HEADS, window=window, sink=sink)
        torch.testing.assert_close(out.double(), exact.attend(q.double(), layer_kv(kv.double()), SCALE), atol=1e-5, rtol=0)
        found.append(out)
    assert not torch.allclose(found[0][2], found[1][2])


def test_later_positions_need_no_new_plan() -> None:
    batch = make_batch()
    kv = torch.randn(2, 80, PAGE_SIZE, KV_HEADS, DIM, device=DEVICE)
    q = torch.randn(11, HEADS, DIM, device=DEVICE)
    alive = (batch.kv_len > 0).int()
    longest = replace(batch, kv_len=batch.kv_len + 5 * alive)
    plan = plan_verify(longest, layer_kv(kv), num_heads=HEADS, window=20, interpret=True)
    for step in (0, 5):
        later = replace(batch, positions=batch.positions + step, kv_len=batch.kv_len + step * alive)
        expected = plan_attention(later, layer_kv(kv.double()), num_heads=HEADS, window=20).attend(
            q.double(), layer_kv(kv.double()), SCALE
        )
        out = plan.attend(q, layer_kv(kv), SCALE, positions=later.positions)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 50])
def test_a_shared_beginning_changes_nothing(window: int | None) -> None:
    batch = make_batch()
    kv = torch.randn(2, 80, PAGE_SIZE, KV_HEADS, DIM, device=DEVICE)
    batch.page_table[3, :2] = batch.page_table[0, :2]
    q = torch.randn(11, HEADS, DIM, device=DEVICE)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    shared = SharedPrefixes(row_group=ints(0, -1, -1, 0), row_order=ints(0, 3, 1, 2), group_start=ints(0, 2), shared_len=ints(32))
    outs = [
        plan_verify(batch, layer_kv(kv), num_heads=HEADS, window=window, shared=groups, interpret=True).attend(
            q, layer_kv(kv), SCALE
        )
        for groups in (shared, None)
    ]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)


def test_long_rows_and_doubles_are_left_to_torch() -> None:
    batch = make_batch()
    assert fits_verify(batch, torch.bfloat16)
    assert not fits_verify(batch, torch.float64)
    assert not fits_verify(replace(batch, max_q=65), torch.bfloat16)
