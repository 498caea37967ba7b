"""delta_chunks: the recurrence by chunks of 64 positions, on one grid of positions however a prefill is cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from batchspec.kernels.gated_delta.delta_chunks import delta_chunks, delta_chunks_reference
from batchspec.kernels.gated_delta.delta_steps import delta_steps
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState
from tests.kernels.covering import covering
from tests.kernels.gated_delta_cases import (
    NAN,
    ODD,
    SMALL,
    Row,
    Sizes,
    batch_of,
    by_definition,
    copy_of,
    in_double,
    joined,
    pick,
    poisoned_state,
    random_inputs,
)

TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-11, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def run(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, *, interpret: bool) -> Tensor:
    out = torch.full_like(inputs.v, NAN)
    delta_chunks(inputs, state, batch, out, interpret=interpret)
    return out


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("sizes", "dtype"), covering([SMALL, ODD], [torch.float32, torch.float64, torch.bfloat16, torch.float16])
)
def test_rows_from_position_0_over_slots_with_garbage(
    sizes: Sizes, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    rows = [Row(2, 0, 70), Row(0, 0, 1), Row(3, 0, 64), Row(4, 0, 129)]
    inputs, state = random_inputs(264, sizes, device, dtype=dtype), poisoned_state(5, sizes, device, dtype=dtype)
    batch = batch_of(rows, device, padding=0)
    out = run(inputs, state, batch, interpret=interpret)
    for slot, own, _ in batch.rows():
        wanted, after = by_definition(pick(inputs, own))
        assert_near(out[own], wanted, TOLERANCE[dtype])
        assert_near(state.state[slot], after, TOLERANCE[dtype])
    assert state.state[1].isnan().all()


@pytest.mark.parametrize(("begin", "count"), [(1, 3), (63, 1), (63, 2), (64, 64), (70, 58), (70, 59), (100, 200), (127, 66)])
def test_a_segment_begins_and_ends_anywhere_in_a_chunk(begin: int, count: int, interpret: bool, device: torch.device) -> None:
    inputs, state = random_inputs(count, SMALL, device), poisoned_state(2, SMALL, device)
    state.state[1] = before = torch.randn_like(state.state[1])
    out = run(inputs, state, batch_of([Row(1, begin, count)], device), interpret=interpret)
    wanted, after = by_definition(inputs, before)
    assert_near(out, wanted, TOLERANCE[torch.float32])
    assert_near(state.state[1], after, TOLERANCE[torch.float32])


def test_rows_of_all_lengths_in_one_pass(interpret: bool, device: torch.device) -> None:
    """More rows than chunks, chunks of every row found without a list; dead rows and padding between and after them."""
    rows = [Row(slot, begin, count, live) for slot, (begin, count, live) in enumerate([
        (0, 2, True), (63, 3, True), (5, 0, True), (190, 130, False), (0, 67, True), (64, 1, True), (9, 1, False), (62, 68, True),
    ])]
    total = sum(row.num_tokens for row in rows)
    inputs, state = random_inputs(total + 70, SMALL, device), poisoned_state(9, SMALL, device)
    for row in rows:
        if row.begin and row.live:
            state.state[row.slot] = torch.randn_like(state.state[row.slot])
    batch, before = batch_of(rows, device, padding=70), copy_of(state)
    out = run(inputs, state, batch, interpret=interpret)
    untouched = torch.ones(total + 70, dtype=torch.bool, device=device)
    for slot, own, first in batch.rows():
        wanted, after = by_definition(pick(inputs, own), before.state[slot] if first else None)
        assert_near(out[own], wanted, TOLERANCE[torch.float32])
        assert_near(state.state[slot], after, TOLERANCE[torch.float32])
        untouched[own] = False
    assert out[untouched].isnan().all()
    assert torch.equal(state.state[[2, 3, 6, 8]].nan_to_num(7.0), before.state[[2, 3, 6, 8]].nan_to_num(7.0))


@pytest.mark.second
def test_chunks_agree_with_steps(interpret: bool, device: torch.device) -> None:
    inputs, states = random_inputs(80, SMALL, device), [poisoned_state(1, SMALL, device) for _ in range(2)]
    batch = batch_of([Row(0, 0, 80)], device)
    outs = [torch.full_like(inputs.v, NAN) for _ in range(2)]
    delta_chunks(inputs, states[0], batch, outs[0], interpret=interpret)
    delta_steps(inputs, states[1], batch, outs[1], commits=True, interpret=interpret)
    assert_near(outs[0], outs[1], TOLERANCE[torch.float32])
    assert_near(states[0].state, states[1].state, TOLERANCE[torch.float32])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, 64, 192, 230), (70, 128, 192, 193), (127, 128, 200)])
def test_passes_cut_at_chunks_have_the_bits_of_one_pass(
    cuts: tuple[int, ...], interpret: bool, device: torch.device, state_dtype: torch.dtype
) -> None:
    """Wherever the first begins, and whatever else is in them: another row comes first, with another number of tokens in each."""
    first, end = cuts[0], cuts[-1]
    inputs, other = random_inputs(end - first, SMALL, device), random_inputs(70, SMALL, device)
    state, once = (poisoned_state(slots, SMALL, device, state_dtype=state_dtype) for slots in (2, 1))
    if first:
        state.state[1] = once.state[0] = torch.randn_like(once.state[0])
    whole = run(inputs, once, batch_of([Row(0, first, end - first)], device), interpret=interpret)
    for index, (begin, stop) in enumerate(pairwise(cuts)):
        beside = 3 * index + 1
        together = joined((pick(other, slice(0, beside)), pick(inputs, slice(begin - first, stop - first))))
        batch = batch_of([Row(0, 0, beside), Row(1, begin, stop - begin)], device)
        assert torch.equal(run(together, state, batch, interpret=interpret)[beside:], whole[begin - first : stop - first])
    assert torch.equal(state.state[1], once.state[0])


@pytest.mark.parametrize("beta", [0.999, 0.5])
def test_one_key_again_and_again(beta: float, interpret: bool, device: torch.device) -> None:
    """Without decay: powers of the matrix that is inverted have numbers up to 1e18."""
    inputs, state = random_inputs(130, SMALL, device), poisoned_state(1, SMALL, device)
    gates = torch.stack((torch.zeros_like(inputs.gates[..., 0]), torch.full_like(inputs.gates[..., 0], beta)), 2)
    inputs = replace(inputs, k=inputs.k[:1].expand_as(inputs.k).contiguous(), gates=gates)
    out = run(inputs, state, batch_of([Row(0, 0, 130)], device), interpret=interpret)
    wanted, after = by_definition(inputs)
    assert_near(out, wanted, TOLERANCE[torch.float32])
    assert_near(state.state[0], after, TOLERANCE[torch.float32])


def test_a_decay_to_nothing_gives_numbers(interpret: bool, device: torch.device) -> None:
    inputs, state = random_inputs(100, SMALL, device), poisoned_state(1, SMALL, device)
    inputs.gates[::7, :, 0] = -200.0
    out = run(inputs, state, batch_of([Row(0, 0, 100)], device), interpret=interpret)
    assert_near(out, by_definition(inputs)[0], TOLERANCE[torch.float32])


def test_the_reference_has_the_accuracy_of_its_dtype(device: torch.device) -> None:
    inputs = in_double(random_inputs(150, SMALL, device))
    state, out = poisoned_state(1, SMALL, device, dtype=torch.float64), torch.empty_like(inputs.v)
    delta_chunks_reference(inputs, state, batch_of([Row(0, 0, 150)], device), out)
    assert_near(out, by_definition(inputs)[0], 1e-12)
