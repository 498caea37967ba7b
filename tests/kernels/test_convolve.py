"""convolve: a causal convolution over q, k and v whose window crosses passes, the gates, and the rings that rounds replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.gated_delta import convolve as convolve_module
from batchspec.kernels.gated_delta.convolve import convolve
from batchspec.kernels.gated_delta.layout import (
    DeltaBatch,
    DeltaColumns,
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    interleaved_columns,
    split_columns,
)
from tests.kernels.gated_delta_cases import NAN, ODD, SMALL, Row, Sizes, batch_of, copy_of, poisoned_state

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@dataclass(frozen=True)
class Layer:
    """A layer's weights and the products of `num_tokens` tokens of one row, laid out as `columns` say. z is NaN."""

    sizes: Sizes
    columns: DeltaColumns
    weights: DeltaWeights
    raw: Tensor
    """[tokens, C] in the order q | k | v"""
    a: Tensor
    b: Tensor

    def x(self, tokens: slice) -> Tensor:
        """A slice of wider rows."""
        key_heads, value_heads, key_dim, value_dim = self.sizes.four
        group, raw = value_heads // key_heads, self.raw[tokens]
        x = torch.full((len(raw), self.sizes.channels + value_heads * value_dim + 5), NAN, dtype=raw.dtype, device=raw.device)
        for head in range(2 * key_heads + value_heads):
            value = head - 2 * key_heads
            if value >= 0:
                begin = self.columns.v.offset + value // group * self.columns.v.stride + value % group * value_dim
                channel, width = 2 * key_heads * key_dim + value * value_dim, value_dim
            else:
                part = self.columns.q if head < key_heads else self.columns.k
                begin, channel, width = part.offset + head % key_heads * part.stride, head * key_dim, key_dim
            x[:, begin : begin + width] = raw[:, channel : channel + width]
        return x[:, :-5]

    def ba(self, tokens: slice) -> Tensor:
        key_heads, value_heads = self.sizes[:2]
        group = value_heads // key_heads
        ba = torch.full((len(self.a[tokens]), 2 * value_heads), NAN, dtype=self.a.dtype, device=self.a.device)
        for part, values in ((self.columns.a, self.a[tokens]), (self.columns.b, self.b[tokens])):
            for head in range(value_heads):
                ba[:, part.offset + head // group * part.stride + head % group] = values[:, head]
        return ba

    def run(self, state: DeltaState, rows: list[tuple[Row, Layer]], batch: DeltaBatch, *, interpret: bool, keeps: bool = False
            ) -> DeltaInputs:
        """A pass over tokens of several rows, each with its own products, and padding of NaN."""
        tokens = [(layer, slice(row.begin, row.begin + row.num_tokens)) for row, layer in rows]
        x, ba = torch.cat([layer.x(own) for layer, own in tokens]), torch.cat([layer.ba(own) for layer, own in tokens])
        pad = (0, 0, 0, len(batch.row_ids) - len(x))
        x, ba = F.pad(x, pad, value=NAN), F.pad(ba, pad, value=NAN)
        return convolve(x, ba, self.weights, self.columns, state, batch, keeps_inputs=keeps, interpret=interpret)

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g and beta of all tokens of the row, in fp64."""
        key_heads, value_heads, key_dim, value_dim = self.sizes.four
        padded = F.pad(self.raw.double().mT[None], (self.sizes.taps - 1, 0))
        y = F.silu(F.conv1d(padded, self.weights.conv.double()[:, None], groups=self.sizes.channels))[0].mT
        q, k, v = y.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], 1)
        q, k = (part.unflatten(1, (key_heads, key_dim)) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        g = -self.weights.a_log.double().exp() * F.softplus(self.a.double() + self.weights.dt_bias.double())
        return q / key_dim**0.5, k, v.unflatten(1, (value_heads, value_dim)), g, self.b.double().sigmoid()

    def like(self) -> Layer:
        """The same weights with products of another row."""
        return replace(self, raw=torch.randn_like(self.raw), a=torch.randn_like(self.a) * 8, b=torch.randn_like(self.b))


def layer_of(num_tokens: int, sizes: Sizes, device: torch.device, *, dtype: torch.dtype = torch.float32, columns_of=split_columns
             ) -> Layer:
    """Values of a are small and large, so that softplus is nearly exp and nearly the identity."""
    made: dict[str, Any] = {"device": device, "dtype": torch.float64}
    value_heads = sizes.value_heads
    return Layer(
        sizes=sizes, columns=columns_of(*sizes.four), raw=torch.randn(num_tokens, sizes.channels, **made).to(dtype),
        a=(torch.randn(num_tokens, value_heads, **made) * 12).to(dtype), b=torch.randn(num_tokens, value_heads, **made).to(dtype),
        weights=DeltaWeights(
            conv=torch.randn(sizes.channels, sizes.taps, **made).to(dtype), a_log=torch.randn(value_heads, **made).float().to(
                torch.promote_types(dtype, torch.float32)), dt_bias=torch.randn(value_heads, **made).to(dtype),
        ),
    )


def assert_near(found: DeltaInputs, own: slice, layer: Layer, row: Row) -> None:
    tolerance = TOLERANCE[found.q.dtype]
    gates = 1e-12 if found.gates.dtype == torch.float64 else 1e-5
    q, k, v, g, beta = (part[row.begin : row.begin + row.num_tokens] for part in layer.expected())
    for name, wanted in (("q", q), ("k", k), ("v", v)):
        torch.testing.assert_close(getattr(found, name)[own].double(), wanted, rtol=tolerance, atol=tolerance, msg=name)
    torch.testing.assert_close(found.gates[own].double(), torch.stack((g, beta), 2), rtol=gates, atol=0)


def assert_same(found: Tensor, wanted: Tensor, interpret: bool) -> None:
    """Bit for bit, on a CPU without the kernel nearly: torch computes the last exponentials of a vector by other code."""
    if interpret or found.is_cuda:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("columns_of", [split_columns, interleaved_columns])
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_rows_from_position_0_over_slots_with_garbage(
    sizes: Sizes, columns_of, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    first = layer_of(40, sizes, device, dtype=dtype, columns_of=columns_of)
    rows = [(Row(2, 0, 33), first), (Row(0, 0, 1), first.like()), (Row(3, 0, 5), first.like())]
    state, batch = poisoned_state(4, sizes, device, dtype=dtype), batch_of([row for row, _ in rows], device, padding=3)
    found = first.run(state, rows, batch, interpret=interpret)
    for (_, own, _), (row, layer) in zip(batch.rows(), rows, strict=True):
        assert_near(found, own, layer, row)
    assert state.conv_inputs[1].isnan().all()
    assert all(ring.isnan().all() for ring in (state.keys, state.values, state.gates))


@pytest.mark.parametrize("cuts", [(1, 2, 3, 7, 8), (4, 5, 30), (9, 17, 25), (3, 20)])
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_a_prefill_in_parts_has_the_bits_of_one_pass(
    sizes: Sizes, cuts: tuple[int, ...], interpret: bool, device: torch.device
) -> None:
    """Parts shorter and longer than the window and the ring; another row of the pass has another length."""
    layer = layer_of(33, sizes, device)
    other = layer.like()
    once, row = poisoned_state(1, sizes, device), Row(0, 0, 33)
    whole = layer.run(once, [(row, layer)], batch_of([row], device), interpret=interpret)
    state = poisoned_state(2, sizes, device)
    for begin, end in zip((0, *cuts), (*cuts, 33), strict=True):
        rows = [(Row(1, 0, 21), other), (Row(0, begin, end - begin), layer)]
        found = layer.run(state, rows, batch_of([row for row, _ in rows], device), interpret=interpret)
        for name in DeltaInputs.__slots__:
            assert_same(getattr(found, name)[21:], getattr(whole, name)[begin:end], interpret)
        newest = torch.arange(max(begin, end - sizes.ring), end, device=device)
        assert torch.equal(state.conv_inputs[0, newest % sizes.ring], layer.raw[newest])


@pytest.mark.parametrize(("num_tokens", "launches"), [(5, 0), (6, 1)])
def test_a_second_launch_writes_what_could_replace_an_input_that_is_still_read(
    num_tokens: int, launches: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring of 8, the sixth token's input takes the place of the one that the first of 4 taps of the first token reads."""
    second = MagicMock()
    monkeypatch.setattr(convolve_module, "keep_raw_kernel", second)
    layer, row = layer_of(num_tokens, SMALL, device), Row(0, 0, num_tokens)
    state = poisoned_state(1, SMALL, device)
    layer.run(state, [(row, layer)], batch_of([row], device), interpret=True)
    assert second.__getitem__.call_count == launches
    assert bool(state.conv_inputs.isnan().all()) == bool(launches)


def test_dead_rows_and_padding_write_nothing(interpret: bool, device: torch.device) -> None:
    layer = layer_of(30, SMALL, device)
    rows = [(Row(0, 6, 2, live=False), layer), (Row(1, 0, 0), layer), (Row(2, 0, 2), layer), (Row(3, 5, 1, live=False), layer)]
    state, batch = poisoned_state(4, SMALL, device), batch_of([row for row, _ in rows], device, padding=4)
    for keeps in (True, False):
        found = layer.run(state, rows, batch, interpret=interpret, keeps=keeps)
        assert_near(found, slice(2, 4), layer, rows[2][0])
    long = [(Row(0, 6, 20, live=False), layer), (Row(2, 0, 20), layer)]
    layer.run(state, long, batch_of([row for row, _ in long], device, padding=4), interpret=interpret)
    for ring in (state.conv_inputs, state.keys, state.values, state.gates):
        assert ring[[0, 1, 3]].isnan().all()
    assert not state.conv_inputs[2].isnan().any()


@pytest.mark.second
@given(st.data())
@settings(max_examples=12)
def test_rounds_have_the_bits_of_one_pass_whatever_was_accepted(
    interpret: bool, device: torch.device, data: st.DataObject
) -> None:
    """Also what they leave in the rings for the next round to replay."""
    num_draft_tokens = data.draw(st.integers(0, 3), label="K")
    accepted = data.draw(st.lists(st.integers(0, num_draft_tokens), min_size=1, max_size=6), label="accepted")
    begin = prompt = data.draw(st.integers(0, 11), label="prompt")
    layer = layer_of(prompt + 28, SMALL, device)
    row = Row(0, 0, prompt + 28)
    whole = layer.run(poisoned_state(1, SMALL, device), [(row, layer)], batch_of([row], device), interpret=interpret)
    state = poisoned_state(2, SMALL, device)
    if prompt:
        layer.run(state, [(Row(1, 0, prompt), layer)], batch_of([Row(1, 0, prompt)], device), interpret=interpret)
    for length in accepted:
        own = Row(1, begin, num_draft_tokens + 1)
        wrong = layer.like()
        right = slice(0, begin + length + 1)
        mixed = replace(wrong, raw=wrong.raw.clone(), a=wrong.a.clone(), b=wrong.b.clone())
        for part, values in ((mixed.raw, layer.raw), (mixed.a, layer.a), (mixed.b, layer.b)):
            part[right] = values[right]
        found = layer.run(state, [(own, mixed)], batch_of([own], device), interpret=interpret, keeps=True)
        place = torch.arange(begin, begin + length + 1, device=device) % SMALL.ring
        rings = {"k": state.keys, "v": state.values, "gates": state.gates}
        for name in DeltaInputs.__slots__:
            made = getattr(found, name)[: length + 1]
            assert_same(made, getattr(whole, name)[begin : begin + length + 1], interpret)
            assert name == "q" or torch.equal(rings[name][1, place], made), name
        begin += length + 1


def test_rounds_that_are_too_long_for_the_rings_are_refused(device: torch.device) -> None:
    layer, state = layer_of(9, SMALL, device), poisoned_state(1, SMALL, device)
    with pytest.raises(ValueError, match="rings of 8 positions for 5 tokens"):
        layer.run(state, [(Row(0, 0, 5), layer)], batch_of([Row(0, 0, 5)], device), interpret=False, keeps=True)
    short = poisoned_state(1, SMALL._replace(ring=2), device)
    with pytest.raises(ValueError, match="must have 3 for 4 taps"):
        layer.run(short, [(Row(0, 0, 1), layer)], batch_of([Row(0, 0, 1)], device), interpret=False)


def test_wrong_shapes_and_dtypes_are_refused(device: torch.device) -> None:
    layer, state, batch = layer_of(2, SMALL, device), poisoned_state(1, SMALL, device), batch_of([Row(0, 0, 2)], device)
    x, ba, weights = layer.x(slice(0, 2)), layer.ba(slice(0, 2)), layer.weights
    for wrong_ba, wrong_weights, wrong_state, name in (
        (ba[:, 1:], weights, state, "ba"),
        (ba, replace(weights, conv=weights.conv[1:]), state, "conv"),
        (ba, replace(weights, a_log=weights.a_log.half()), state, "a_log"),
        (ba, weights, replace(copy_of(state), conv_inputs=state.conv_inputs[..., 1:]), "conv_inputs"),
    ):
        with pytest.raises(ValueError, match=rf"convolve: {name}\b"):
            convolve(x, wrong_ba, wrong_weights, layer.columns, wrong_state, batch, keeps_inputs=False)
