"""scan_chunks: the recurrence by chunks of 64 positions, on one grid of positions however a prefill is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from batchspec.kernels.mamba2.layout import SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_chunks import scan_chunks
from batchspec.kernels.mamba2.scan_steps import scan_steps
from tests.kernels.covering import covering
from tests.kernels.mamba2_cases import (
    NAN,
    ODD,
    SMALL,
    ConvRows,
    Inputs,
    Row,
    Sizes,
    by_definition,
    copy_of,
    joined,
    poisoned_state,
    random_inputs,
    rows_of,
    weights_of,
)

TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-11, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def run(inputs: Inputs, weights: SsmWeights, state: SsmState, rows: ConvRows, *, interpret: bool) -> Tensor:
    out = inputs.xbc.new_full((len(inputs.xbc), state.sizes.inner), NAN)
    scan_chunks(inputs.xbc, inputs.dt, weights, state, rows, out, interpret=interpret)
    return out


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE[torch.float32]) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("sizes", "dtype"), covering([SMALL, ODD], list(TOLERANCE)))
def test_rows_from_position_0_over_slots_with_garbage(
    sizes: Sizes, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    rows = rows_of([Row(2, 0, 70), Row(0, 0, 1), Row(3, 0, 64), Row(4, 0, 129)], device)
    inputs, state = random_inputs(264, sizes, device, dtype=dtype), poisoned_state(5, sizes, device, dtype=dtype)
    weights = weights_of(sizes, device, torch.float64 if dtype == torch.float64 else torch.float32)
    out = run(inputs.in_wider_rows(), weights, state, rows, interpret=interpret)
    for slot, own, _ in rows.alive():
        wanted, after = by_definition(inputs.pick(own), weights, sizes)
        assert_near(out[own], wanted, TOLERANCE[dtype])
        assert_near(state.state[slot], after, TOLERANCE[dtype])
    assert state.state[1].isnan().all()
    assert state.inputs.isnan().all()


@pytest.mark.parametrize(("begin", "count"), [(1, 3), (63, 1), (63, 2), (64, 64), (70, 58), (70, 59), (100, 200), (127, 66)])
def test_a_segment_begins_and_ends_anywhere_in_a_chunk(begin: int, count: int, interpret: bool, device: torch.device) -> None:
    inputs, state, weights = random_inputs(count, SMALL, device), poisoned_state(2, SMALL, device), weights_of(SMALL, device)
    state.state[1] = before = torch.randn_like(state.state[1])
    out = run(inputs, weights, state, rows_of([Row(1, begin, count)], device), interpret=interpret)
    wanted, after = by_definition(inputs, weights, SMALL, before)
    assert_near(out, wanted)
    assert_near(state.state[1], after)


def test_rows_of_all_lengths_in_one_pass(interpret: bool, device: torch.device) -> None:
    """Dead rows and padding between and after them."""
    rows = [Row(slot, begin, count, live) for slot, (begin, count, live) in enumerate([
        (0, 2, True), (63, 3, True), (5, 0, True), (190, 130, False), (0, 67, True), (64, 1, True), (9, 1, False), (62, 68, True),
    ])]
    total, weights = sum(row.num_tokens for row in rows), weights_of(SMALL, device)
    inputs, state = random_inputs(total + 70, SMALL, device), poisoned_state(9, SMALL, device)
    for row in rows:
        if row.begin and row.live:
            state.state[row.slot] = torch.randn_like(state.state[row.slot])
    flat, before = rows_of(rows, device, padding=70), copy_of(state)
    out = run(inputs, weights, state, flat, interpret=interpret)
    untouched = torch.ones(total + 70, dtype=torch.bool, device=device)
    for slot, own, first in flat.alive():
        wanted, after = by_definition(inputs.pick(own), weights, SMALL, before.state[slot] if first else None)
        assert_near(out[own], wanted)
        assert_near(state.state[slot], after)
        untouched[own] = False
    assert out[untouched].nan_to_num(0.0).eq(0.0).all()
    assert torch.equal(state.state[[2, 3, 6, 8]].nan_to_num(7.0), before.state[[2, 3, 6, 8]].nan_to_num(7.0))


@pytest.mark.second
def test_chunks_agree_with_steps(interpret: bool, device: torch.device) -> None:
    inputs, states = random_inputs(80, SMALL, device), [poisoned_state(1, SMALL, device) for _ in range(2)]
    rows, weights = rows_of([Row(0, 0, 80)], device), weights_of(SMALL, device)
    out = run(inputs, weights, states[0], rows, interpret=interpret)
    stepped = torch.full_like(out, NAN)
    scan_steps(inputs.xbc, inputs.dt, weights, states[1], rows, stepped, commits=True, interpret=interpret)
    assert_near(out, stepped)
    assert_near(states[0].state, states[1].state)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(0, 64, 192, 230), (70, 128, 192, 193), (127, 128, 200)])
def test_passes_cut_at_chunks_have_the_bits_of_one_pass(
    cuts: tuple[int, ...], interpret: bool, device: torch.device, state_dtype: torch.dtype
) -> None:
    """Wherever the first begins, and whatever else is in them: another row comes first, with another number of tokens in each."""
    first, end, weights = cuts[0], cuts[-1], weights_of(SMALL, device)
    inputs, other = random_inputs(end - first, SMALL, device), random_inputs(70, SMALL, device)
    state, once = (poisoned_state(slots, SMALL, device, state_dtype=state_dtype) for slots in (2, 1))
    if first:
        state.state[1] = once.state[0] = torch.randn_like(once.state[0])
    whole = run(inputs, weights, once, rows_of([Row(0, first, end - first)], device), interpret=interpret)
    for index, (begin, stop) in enumerate(pairwise(cuts)):
        beside = 3 * index + 1
        together = joined((other.pick(slice(0, beside)), inputs.pick(slice(begin - first, stop - first))))
        rows = rows_of([Row(0, 0, beside), Row(1, begin, stop - begin)], device)
        found = run(together, weights, state, rows, interpret=interpret)
        assert torch.equal(found[beside:], whole[begin - first : stop - first])
    assert torch.equal(state.state[1], once.state[0])


def test_a_decay_to_nothing_gives_numbers(interpret: bool, device: torch.device) -> None:
    inputs, state, weights = random_inputs(100, SMALL, device), poisoned_state(1, SMALL, device), weights_of(SMALL, device)
    inputs.dt[[10, 80]] = 200.0
    out = run(inputs, weights, state, rows_of([Row(0, 0, 100)], device), interpret=interpret)
    assert_near(out, by_definition(inputs, weights, SMALL)[0], 3e-4)  # sums of exponents have more digits before the point
