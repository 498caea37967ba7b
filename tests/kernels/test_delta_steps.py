"""delta_steps: replayed and new positions by one recurrence, with bits that depend on neither K nor what was accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.gated_delta.delta_steps import delta_steps
from batchspec.kernels.gated_delta.layout import DeltaBatch, DeltaInputs, DeltaState
from tests.kernels.gated_delta_cases import (
    NAN,
    ODD,
    SMALL,
    Row,
    Sizes,
    batch_of,
    by_definition,
    copy_of,
    joined,
    pick,
    poisoned_state,
    random_inputs,
    remember,
)

TINY = Sizes(1, 2, 9, 18)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}


def run(inputs: DeltaInputs, state: DeltaState, batch: DeltaBatch, *, commits: bool, interpret: bool) -> Tensor:
    out = torch.full_like(inputs.v, NAN)
    delta_steps(inputs, state, batch, out, commits=commits, interpret=interpret)
    return out


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
    tolerance = TOLERANCE[dtype or found.dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [SMALL, ODD, Sizes(1, 1, 128, 33)])
def test_rows_from_position_0_over_slots_with_garbage(
    sizes: Sizes, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    rows = [Row(2, 0, 5), Row(0, 0, 1), Row(3, 0, 3)]
    inputs, state = random_inputs(9, sizes, device, dtype=dtype), poisoned_state(4, sizes, device, dtype=dtype)
    batch = batch_of(rows, device)
    out = run(inputs, state, batch, commits=True, interpret=interpret)
    for slot, own, _ in batch.rows():
        wanted, after = by_definition(pick(inputs, own))
        assert_near(out[own], wanted)
        assert_near(state.state[slot], after, torch.float64 if dtype == torch.float64 else torch.float32)
    assert state.state[1].isnan().all()


@pytest.mark.parametrize("folded_back", [0, 1, 4])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_round_replays_stores_and_goes_on(
    num_draft_tokens: int, folded_back: int, interpret: bool, device: torch.device
) -> None:
    """0 to K + 1 positions are replayed, in rings that wrap around."""
    num_tokens, first = num_draft_tokens + 1, 13
    past = random_inputs(first, SMALL, device)
    new = random_inputs(num_tokens, SMALL, device)
    state = poisoned_state(3, SMALL, device)
    start = first - folded_back
    remember(pick(past, slice(start, first)), state, batch_of([Row(1, start, folded_back)], device))
    state.folded[1] = start
    state.state[1] = by_definition(pick(past, slice(0, start)))[1]
    out = run(new, state, batch_of([Row(1, first, num_tokens)], device), commits=False, interpret=interpret)
    assert_near(out, by_definition(joined((past, new)))[0][first:])
    assert_near(state.state[1], by_definition(past)[1])
    assert state.state[[0, 2]].isnan().all()


def test_the_first_round_of_a_row_of_one_token_begins_at_position_0(interpret: bool, device: torch.device) -> None:
    """Its slot's `folded` may still be that of another row."""
    inputs, state = random_inputs(4, SMALL, device), poisoned_state(1, SMALL, device)
    state.folded[0] = 77
    out = run(inputs, state, batch_of([Row(0, 0, 4)], device), commits=False, interpret=interpret)
    assert_near(out, by_definition(inputs)[0])


def test_dead_rows_and_padding_are_neither_read_nor_written(interpret: bool, device: torch.device) -> None:
    rows = [Row(0, 6, 2, live=False), Row(1, 0, 0), Row(2, 0, 2), Row(3, 5, 1, live=False)]
    inputs, state = random_inputs(5 + 4, SMALL, device), poisoned_state(4, SMALL, device)
    batch = batch_of(rows, device, padding=4)
    for commits in (True, False):
        out = run(inputs, state, batch, commits=commits, interpret=interpret)
        assert out[:2].isnan().all()
        assert out[4:].isnan().all()
        assert_near(out[2:4], by_definition(pick(inputs, slice(2, 4)))[0])
    assert state.state[[0, 1, 3]].isnan().all()


def test_a_state_in_bf16_is_rounded_after_every_position(interpret: bool, device: torch.device) -> None:
    """Each position begins from the state that a pass up to it stores; the first outputs are near those of fp32."""
    inputs, num_tokens = random_inputs(6, SMALL, device), 6
    states = [poisoned_state(1, SMALL, device, state_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    batch = batch_of([Row(0, 0, num_tokens)], device)
    exact, out = (run(inputs, state, batch, commits=True, interpret=interpret) for state in states)
    assert not torch.equal(exact, out)
    assert_near(out, exact, torch.bfloat16)
    torch.testing.assert_close(states[1].state.float(), states[0].state, rtol=2**-6, atol=2**-7)
    stepped = poisoned_state(1, SMALL, device, state_dtype=torch.bfloat16)
    for at in range(num_tokens):
        one = run(pick(inputs, slice(at, at + 1)), stepped, batch_of([Row(0, at, 1)], device), commits=True, interpret=interpret)
        assert torch.equal(one, out[at : at + 1])
    assert torch.equal(stepped.state, states[1].state)


def decode(
    rows: list[DeltaInputs], num_draft_tokens: int, accepted: list[list[int]], prompt: int, state: DeltaState, *, interpret: bool
) -> tuple[list[list[Tensor]], list[int]]:
    """Rounds over rows whose first `prompt` tokens are in the state. Row r, in slot r + 1, accepts accepted[round][r] drafts;
    those after them are random, and their outputs are not used. Returns each row's outputs and its number of tokens."""
    device, begins = state.state.device, [prompt for _ in rows]
    outs: list[list[Tensor]] = [[] for _ in rows]
    state.folded[1:] = prompt
    for lengths in accepted:
        batch = batch_of([Row(row + 1, begin, num_draft_tokens + 1) for row, begin in enumerate(begins)], device)
        parts = []
        for inputs, begin, length in zip(rows, begins, lengths, strict=True):
            rejected = random_inputs(num_draft_tokens - length, TINY, device)
            parts.append(joined((pick(inputs, slice(begin, begin + length + 1)), rejected)))
        mixed = joined(parts)
        remember(mixed, state, batch)
        out = run(mixed, state, batch, commits=False, interpret=interpret)
        for row, length in enumerate(lengths):
            first = row * (num_draft_tokens + 1)
            outs[row].append(out[first : first + length + 1])
            state.folded[row + 1] = begins[row]
            begins[row] += length + 1
    return outs, begins


@pytest.mark.second
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@given(st.data())
@settings(max_examples=12)
def test_no_bit_depends_on_draft_tokens_or_on_what_was_accepted(
    interpret: bool, device: torch.device, state_dtype: torch.dtype, data: st.DataObject
) -> None:
    num_draft_tokens = data.draw(st.integers(0, 3), label="K")
    prompt = data.draw(st.integers(0, 5), label="prompt")
    lengths = st.lists(st.integers(0, num_draft_tokens), min_size=2, max_size=2)
    accepted = data.draw(st.lists(lengths, min_size=1, max_size=4), label="accepted")
    rows = [random_inputs(prompt + 4 * len(accepted), TINY, device) for _ in range(2)]
    state = poisoned_state(3, TINY, device, state_dtype=state_dtype)
    prompts = batch_of([Row(1, 0, prompt), Row(2, 0, prompt)], device)
    before = run(joined([pick(row, slice(0, prompt)) for row in rows]), state, prompts, commits=True, interpret=interpret)
    outs, ends = decode(rows, num_draft_tokens, accepted, prompt, state, interpret=interpret)
    for row, (inputs, end) in enumerate(zip(rows, ends, strict=True)):
        once = poisoned_state(1, TINY, device, state_dtype=state_dtype)
        whole = run(pick(inputs, slice(0, end)), once, batch_of([Row(0, 0, end)], device), commits=True, interpret=interpret)
        found = torch.cat((before[row * prompt : (row + 1) * prompt], *outs[row]))
        assert torch.equal(found, whole)
        if folded := int(state.folded[row + 1]):  # the tokens that the state holds
            run(pick(inputs, slice(0, folded)), once, batch_of([Row(0, 0, folded)], device), commits=True, interpret=interpret)
            assert torch.equal(state.state[row + 1], once.state[0])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_pass_in_parts_has_the_bits_of_one_pass(interpret: bool, device: torch.device, state_dtype: torch.dtype) -> None:
    inputs, state = random_inputs(11, SMALL, device), poisoned_state(1, SMALL, device, state_dtype=state_dtype)
    whole = copy_of(state)
    out = run(inputs, whole, batch_of([Row(0, 0, 11)], device), commits=True, interpret=interpret)
    for begin, end in ((0, 3), (3, 4), (4, 11)):
        batch = batch_of([Row(0, begin, end - begin)], device)
        part = run(pick(inputs, slice(begin, end)), state, batch, commits=True, interpret=interpret)
        assert torch.equal(part, out[begin:end])
    assert torch.equal(state.state, whole.state)


def test_wrong_shapes_and_dtypes_are_refused(device: torch.device) -> None:
    inputs, state, batch = random_inputs(2, SMALL, device), poisoned_state(1, SMALL, device), batch_of([Row(0, 0, 2)], device)
    for wrong_inputs, wrong_state, wrong_batch, name in (
        (replace(inputs, v=inputs.v[:, 1:]), state, batch, "v"),
        (replace(inputs, gates=inputs.gates.double()), state, batch, "gates"),
        (inputs, replace(state, keys=state.keys.double()), batch, "keys"),
        (inputs, replace(state, state=state.state.half()), batch, "state"),
        (inputs, replace(state, folded=state.folded.long()), batch, "folded"),
        (inputs, state, replace(batch, slots=batch.slots.long()), "slots"),
        (inputs, state, replace(batch, live=torch.ones(2, dtype=torch.int32, device=device)), "live"),
    ):
        with pytest.raises(ValueError, match=rf"delta_steps: {name}\b"):
            delta_steps(wrong_inputs, wrong_state, wrong_batch, torch.empty_like(inputs.v), commits=True)
