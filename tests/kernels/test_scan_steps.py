"""scan_steps: replayed and new positions by one recurrence, with bits that depend on neither K nor what was accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.mamba2.layout import Sizes, SsmState, SsmWeights
from batchspec.kernels.mamba2.scan_steps import scan_steps
from tests.kernels.covering import covering
from tests.kernels.mamba2_cases import (
    NAN,
    ODD,
    SMALL,
    ConvRows,
    Inputs,
    Row,
    by_definition,
    copy_of,
    joined,
    poisoned_state,
    random_inputs,
    rows_of,
    weights_of,
)

TINY = Sizes(2, 18, 1, 9)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def run(
    inputs: Inputs, weights: SsmWeights, state: SsmState, rows: ConvRows, *, commits: bool, interpret: bool
) -> Tensor:
    out = inputs.xbc.new_full((len(inputs.xbc), state.sizes.inner), NAN)
    scan_steps(inputs.xbc, inputs.dt, weights, state, rows, out, commits=commits, interpret=interpret)
    return out


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE[torch.float32]) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("sizes", "dtype"), covering([SMALL, ODD, Sizes(1, 33, 1, 128)], list(TOLERANCE)))
def test_rows_from_position_0_over_slots_with_garbage(
    sizes: Sizes, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    inputs = random_inputs(9, sizes, device, dtype=dtype)
    weights = weights_of(sizes, device, torch.float64 if dtype == torch.float64 else torch.float32)
    state, rows = poisoned_state(4, sizes, device, dtype=dtype), rows_of([Row(2, 0, 5), Row(0, 0, 1), Row(3, 0, 3)], device)
    out = run(inputs.in_wider_rows(), weights, state, rows, commits=True, interpret=interpret)
    for slot, own, _ in rows.alive():
        wanted, after = by_definition(inputs.pick(own), weights, sizes)
        assert_near(out[own], wanted, TOLERANCE[dtype])
        assert_near(state.state[slot], after, TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32])
    assert state.state[1].isnan().all()
    assert state.inputs.isnan().all()
    assert state.steps.isnan().all()


@pytest.mark.parametrize("folded_back", [0, 1, 4])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_round_replays_stores_keeps_and_goes_on(
    num_draft_tokens: int, folded_back: int, interpret: bool, device: torch.device
) -> None:
    """0 to K + 1 positions are replayed, in rings that wrap around; the inputs of the round's own tokens are in them
    afterwards."""
    num_tokens, first, weights = num_draft_tokens + 1, 13, weights_of(SMALL, device)
    past, new = (random_inputs(count, SMALL, device) for count in (first, num_tokens))
    state, start = poisoned_state(3, SMALL, device), first - folded_back
    if folded_back:
        state.folded[1] = start
        run(past.pick(slice(start, first)), weights, state, rows_of([Row(1, start, folded_back)], device), commits=False,
            interpret=interpret)
    state.folded[1] = start
    state.state[1] = by_definition(past.pick(slice(0, start)), weights, SMALL)[1]
    out = run(new, weights, state, rows_of([Row(1, first, num_tokens)], device), commits=False, interpret=interpret)
    assert_near(out, by_definition(joined((past, new)), weights, SMALL)[0][first:])
    assert_near(state.state[1], by_definition(past, weights, SMALL)[1])
    assert state.state[[0, 2]].isnan().all()
    places = torch.arange(first, first + num_tokens, device=device) % state.inputs.shape[1]
    assert torch.equal(state.inputs[1, places], new.xbc[:, : state.inputs.shape[2]])
    assert torch.equal(state.steps[1, places], new.dt)


def test_the_first_round_of_a_row_of_one_token_begins_at_position_0(interpret: bool, device: torch.device) -> None:
    """Its slot's `folded` may still be that of another row."""
    inputs, state, weights = random_inputs(4, SMALL, device), poisoned_state(1, SMALL, device), weights_of(SMALL, device)
    state.folded[0] = 77
    out = run(inputs, weights, state, rows_of([Row(0, 0, 4)], device), commits=False, interpret=interpret)
    assert_near(out, by_definition(inputs, weights, SMALL)[0])


def test_dead_rows_and_padding_are_neither_read_nor_written(interpret: bool, device: torch.device) -> None:
    rows = [Row(0, 6, 2, live=False), Row(1, 0, 0), Row(2, 0, 2), Row(3, 5, 1, live=False)]
    inputs, state, weights = random_inputs(5 + 4, SMALL, device), poisoned_state(4, SMALL, device), weights_of(SMALL, device)
    for commits in (True, False):
        flat = rows_of(rows, device, padding=4)
        out = run(inputs, weights, state, flat, commits=commits, interpret=interpret)
        assert out[:2].isnan().all()
        assert out[4:].isnan().all()
        assert_near(out[2:4], by_definition(inputs.pick(slice(2, 4)), weights, SMALL)[0])
    for kept in (state.state, state.inputs, state.steps):
        assert kept[[0, 1, 3]].isnan().all()


def test_a_state_in_bf16_is_rounded_after_every_position(interpret: bool, device: torch.device) -> None:
    """Each position begins from the state that a pass up to it stores; the first outputs are near those of fp32."""
    inputs, num_tokens, weights = random_inputs(6, SMALL, device), 6, weights_of(SMALL, device)
    states = [poisoned_state(1, SMALL, device, state_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    rows = rows_of([Row(0, 0, num_tokens)], device)
    exact, out = (run(inputs, weights, state, rows, commits=True, interpret=interpret) for state in states)
    assert not torch.equal(exact, out)
    assert_near(out, exact, 2**-4)
    stepped = poisoned_state(1, SMALL, device, state_dtype=torch.bfloat16)
    for at in range(num_tokens):
        own, part = rows_of([Row(0, at, 1)], device), inputs.pick(slice(at, at + 1))
        assert torch.equal(run(part, weights, stepped, own, commits=True, interpret=interpret), out[at : at + 1])
    assert torch.equal(stepped.state, states[1].state)


@pytest.mark.second
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@given(st.data())
@settings(max_examples=12)
def test_no_bit_depends_on_draft_tokens_or_on_what_was_accepted(
    interpret: bool, device: torch.device, state_dtype: torch.dtype, data: st.DataObject
) -> None:
    """Two rows, of which each accepts other drafts in each round; rejected drafts are random."""
    num_drafts = data.draw(st.integers(0, 3), label="K")
    prompt = data.draw(st.integers(0, 5), label="prompt")
    lengths = st.lists(st.integers(0, num_drafts), min_size=2, max_size=2)
    accepted = data.draw(st.lists(lengths, min_size=1, max_size=4), label="accepted")
    weights, rows = weights_of(TINY, device), [random_inputs(prompt + 4 * len(accepted), TINY, device) for _ in range(2)]
    state = poisoned_state(3, TINY, device, state_dtype=state_dtype)
    begins, outs = [prompt, prompt], list[list[Tensor]]([[], []])
    before = run(
        joined([row.pick(slice(0, prompt)) for row in rows]), weights, state,
        rows_of([Row(1, 0, prompt), Row(2, 0, prompt)], device), commits=True, interpret=interpret,
    )
    state.folded[1:] = prompt
    for own in accepted:
        parts = [
            joined((row.pick(slice(begin, begin + length + 1)), random_inputs(num_drafts - length, TINY, device)))
            for row, begin, length in zip(rows, begins, own, strict=True)
        ]
        flat = rows_of([Row(slot, begin, num_drafts + 1) for slot, begin in enumerate(begins, 1)], device)
        out = run(joined(parts), weights, state, flat, commits=False, interpret=interpret)
        for index, length in enumerate(own):
            outs[index].append(out[index * (num_drafts + 1) :][: length + 1])
            state.folded[index + 1] = begins[index]
            begins[index] += length + 1
    for index, (inputs, end) in enumerate(zip(rows, begins, strict=True)):
        once = poisoned_state(1, TINY, device, state_dtype=state_dtype)
        whole = run(inputs.pick(slice(0, end)), weights, once, rows_of([Row(0, 0, end)], device), commits=True,
                    interpret=interpret)
        assert torch.equal(torch.cat((before[index * prompt :][:prompt], *outs[index])), whole)
        if folded := int(state.folded[index + 1]):  # the tokens that the state holds
            run(inputs.pick(slice(0, folded)), weights, once, rows_of([Row(0, 0, folded)], device), commits=True,
                interpret=interpret)
            assert torch.equal(state.state[index + 1], once.state[0])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_pass_in_parts_has_the_bits_of_one_pass(interpret: bool, device: torch.device, state_dtype: torch.dtype) -> None:
    inputs, state = random_inputs(11, SMALL, device), poisoned_state(1, SMALL, device, state_dtype=state_dtype)
    whole, weights = copy_of(state), weights_of(SMALL, device)
    out = run(inputs, weights, whole, rows_of([Row(0, 0, 11)], device), commits=True, interpret=interpret)
    for begin, end in ((0, 3), (3, 4), (4, 11)):
        rows, part = rows_of([Row(0, begin, end - begin)], device), inputs.pick(slice(begin, end))
        assert torch.equal(run(part, weights, state, rows, commits=True, interpret=interpret), out[begin:end])
    assert torch.equal(state.state, whole.state)


def test_wrong_shapes_dtypes_and_rings_that_are_too_short_are_refused(device: torch.device) -> None:
    inputs, state, rows = random_inputs(2, SMALL, device), poisoned_state(1, SMALL, device), rows_of([Row(0, 0, 2)], device)
    weights = weights_of(SMALL, device)
    for own, heads, kept, batch, name in (
        (Inputs(inputs.xbc[:, 1:], inputs.dt), weights, state, rows, "xbc"),
        (Inputs(inputs.xbc, inputs.dt.double()), weights, state, rows, "dt"),
        (inputs, replace(weights, d=weights.d.half()), state, rows, "d"),
        (inputs, weights, replace(state, steps=state.steps.double()), rows, r"steps\[0\]"),
        (inputs, weights, replace(state, state=state.state.half()), rows, r"state\[0\]"),
        (inputs, weights, replace(state, folded=state.folded.long()), rows, "folded"),
        (inputs, weights, state, replace(rows, slots=rows.slots.long()), "slots"),
    ):
        with pytest.raises(ValueError, match=f"scan_steps: {name} is "):
            run(own, heads, kept, batch, commits=True, interpret=False)
    with pytest.raises(ValueError, match="scan_steps: rings of 8 positions for 5 tokens of a row; too few"):
        run(random_inputs(5, SMALL, device), weights, state, rows_of([Row(0, 0, 5)], device), commits=False, interpret=False)
