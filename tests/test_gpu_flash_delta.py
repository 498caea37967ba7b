"""FlashInfer's kernel for recurrent layers on a Hopper GPU, against the reference and batchspec's own kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.cache.flash import delta_rule, has_delta_rule
from batchspec.kernels.common.card import card_of
from batchspec.kernels.gated_delta.delta_chunks import delta_chunks, delta_chunks_reference
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState
from batchspec.model.blocks.flash_delta import flash_delta, flash_rows
from tests.kernels.gated_delta_cases import NAN, Row, Sizes, batch_of, copy_of, pick, poisoned_state, random_inputs

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and not has_delta_rule(card_of(GPU)), reason="needs a Hopper GPU and FlashInfer 0.7.2 or later"
    ),
]
SIZES = [Sizes(16, 32, 128, 128), Sizes(16, 48, 128, 128), Sizes(2, 2, 128, 128)]

NEAR = 0.015
"""Upper bound of the difference of two kernels with bf16 operands, as a part of the norm; delta_chunks is off by 0.5 %."""


def run(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch) -> Tensor:
    """The outputs of a pass by FlashInfer, which must have taken it."""
    counts, firsts = batch.cu_seqlens.diff().tolist(), [first for _, _, first in batch.rows()]
    ends = [first + count for first, count in zip(firsts, counts, strict=True)]
    ints = torch.zeros(len(batch.positions), dtype=torch.int32, device=GPU)
    flat = FlatBatch(
        token_ids=ints, row_ids=batch.row_ids, positions=batch.positions, slot_mapping=ints.long(),
        cu_seqlens_q=batch.cu_seqlens, kv_len=torch.tensor(ends, dtype=torch.int32, device=GPU), page_table=ints[None],
        max_q=max(counts), max_kv=max(ends), host=HostLayout(counts, ends), slots=batch.slots.long(),
    )
    rows, out = flash_rows(flat, batch), torch.full_like(inputs.v, NAN)
    assert rows is not None
    assert delta_rule(GPU) is not None, "FlashInfer did not compile it"
    assert flash_delta(inputs, state, batch, rows, out)
    return out


def apart(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference as a part of that of `wanted`."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def copied(inputs: DeltaInputs) -> DeltaInputs:
    return pick(inputs, torch.arange(len(inputs.q), device=GPU))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_of_odd_lengths_that_begin_and_go_on(sizes: Sizes) -> None:
    """Slots of rows that begin hold NaN. The reference has fp32 operands."""
    rows = [Row(3, 0, 2130), Row(0, 128, 701), Row(5, 0, 63), Row(1, 64, 64), Row(4, 1984, 129), Row(2, 0, 1)]
    batch = batch_of(rows, GPU)
    inputs = random_inputs(3088, sizes, GPU, dtype=torch.bfloat16)
    state = poisoned_state(7, sizes, GPU, dtype=torch.bfloat16)
    for slot in (0, 1, 4):
        state.state[slot] = torch.randn_like(state.state[slot])
    wanted_state, wanted = copy_of(state), torch.full_like(inputs.v, NAN)
    delta_chunks_reference(copied(inputs), wanted_state, batch, wanted)
    out = run(inputs, state, batch)
    for slot, own, _ in batch.rows():
        assert apart(out[own], wanted[own]) < NEAR, slot
        assert apart(state.state[slot], wanted_state.state[slot]) < NEAR, slot
    assert state.state[6].isnan().all()


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
@pytest.mark.parametrize("count", [4096, 8192 - 37])
def test_a_whole_prefill_ends_in_the_state_of_delta_chunks_also_if_it_is_cut(sizes: Sizes, count: int) -> None:
    inputs = random_inputs(2 * count, sizes, GPU, dtype=torch.bfloat16)
    state = poisoned_state(3, sizes, GPU, dtype=torch.bfloat16)
    own_state, own, whole = copy_of(state), torch.empty_like(inputs.v), batch_of([Row(2, 0, count), Row(0, 0, count)], GPU)
    delta_chunks(inputs, own_state, whole, own)
    given = copied(inputs)
    out = run(given, state, whole)
    assert apart(out, own) < NEAR
    assert apart(state.state[[0, 2]], own_state.state[[0, 2]]) < NEAR
    cut, again = poisoned_state(3, sizes, GPU, dtype=torch.bfloat16), torch.empty_like(out[:count])
    middle = 2048 + 64
    for begin, end in ((0, middle), (middle, count)):
        again[begin:end] = run(pick(inputs, slice(begin, end)), cut, batch_of([Row(2, begin, end - begin)], GPU))
    assert apart(again, out[:count]) < NEAR
    assert apart(cut.state[2], state.state[2]) < NEAR


@pytest.mark.parametrize("name", ["q", "k", "v", "gates", "state"])
def test_numbers_that_are_not_finite_end_their_own_row_alone(name: str) -> None:
    """The kernel reads tokens of the rows that follow in the chunk in which a row ends."""
    sizes = SIZES[0]
    batch = batch_of([Row(0, 64, 2001), Row(1, 64, 30), Row(2, 64, 1000)], GPU)
    inputs = random_inputs(3031, sizes, GPU, dtype=torch.bfloat16)
    state = poisoned_state(3, sizes, GPU, dtype=torch.bfloat16)
    state.state.normal_()
    plain_state = copy_of(state)
    wanted = run(copied(inputs), plain_state, batch)
    own = slice(2001, 2031)
    if name == "state":
        state.state[1] = NAN
    else:
        getattr(inputs, name)[2001:2031:3] = NAN
    out = run(inputs, state, batch)
    assert out[own].isnan().flatten(1).any(1)[0]
    for others, slot in ((slice(0, 2001), 0), (slice(2031, 3031), 2)):
        assert torch.equal(out[others], wanted[others])
        assert torch.equal(state.state[slot], plain_state.state[slot])
    assert name == "q" or state.state[1].isnan().any()
