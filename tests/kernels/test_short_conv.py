"""short_conv: a convolution between two gates whose window crosses passes and rounds, and what it keeps of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.short_conv.short_conv import TOKENS, ConvRows, short_conv

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2**-6, torch.float16: 2**-9}
NAN = float("nan")
CHANNELS, TAPS, RING = 1100, 3, 6  # more channels than one program has


class Row(NamedTuple):
    """`num_tokens` tokens from position `begin` on, of the row in `slot`."""

    slot: int
    begin: int
    num_tokens: int
    live: bool = True


def rows_of(rows: Sequence[Row], device: torch.device, *, padding: int = 0) -> ConvRows:
    counts = [row.num_tokens for row in rows]
    positions = [row.begin + at for row in rows for at in range(row.num_tokens)]
    return ConvRows(
        cu_seqlens=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        positions=torch.tensor(positions + padding * [0], dtype=torch.int64, device=device),
        slots=torch.tensor([row.slot for row in rows], dtype=torch.int32, device=device),
        live=torch.tensor([int(row.live) for row in rows], dtype=torch.int32, device=device), max_tokens=max(counts),
    )


class Layer(NamedTuple):
    """A layer's weights: [W, C], and [C] or None."""

    weight: Tensor
    bias: Tensor | None

    def run(
        self, inputs: Sequence[Tensor], ring: Tensor, rows: Sequence[Row], *, interpret: bool, padding: int = 0,
        gated: bool = True,
    ) -> Tensor:
        """inputs: of each row, [tokens, 3 C] or [tokens, C]. They are laid out as a slice of wider rows, and padding is NaN."""
        flat = F.pad(torch.cat(list(inputs)), (0, 5, 0, padding), value=NAN)[:, :-5]
        own = rows_of(rows, flat.device, padding=padding)
        return short_conv(flat, self.weight, self.bias, ring, own, gated=gated, interpret=interpret)

    def expected(self, inputs: Tensor) -> Tensor:
        """In fp64, of a row from position 0 on. Inputs of the convolution are rounded as the ring keeps them."""
        b, c, x = inputs.chunk(3, 1)
        u = F.pad((b * x).double().mT[None], (len(self.weight) - 1, 0))
        bias = None if self.bias is None else self.bias.double()
        return c.double() * F.conv1d(u, self.weight.double().mT[:, None], bias, groups=CHANNELS)[0].mT


def layer_of(device: torch.device, dtype: torch.dtype = torch.float32, *, taps: int = TAPS, bias: bool = False) -> Layer:
    weight = torch.randn(taps, CHANNELS, device=device).to(dtype)
    return Layer(weight, torch.randn(CHANNELS, device=device).to(dtype) if bias else None)


def inputs_of(num_tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, 3 * CHANNELS, device=device).to(dtype)


def garbage(slots: int, device: torch.device, dtype: torch.dtype = torch.float32, places: int = RING) -> Tensor:
    """Rings of NaN, as parts of a larger tensor."""
    return torch.full((slots, places * CHANNELS + 7), NAN, dtype=dtype, device=device)[:, :-7].view(slots, places, CHANNELS)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("taps", "bias"), [(3, False), (4, True), (1, True)])
def test_rows_from_position_0_over_slots_with_garbage(
    taps: int, bias: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    layer, rows = layer_of(device, dtype, taps=taps, bias=bias), [Row(2, 0, 2 * TOKENS + 3), Row(0, 0, 1), Row(3, 0, 5)]
    inputs, ring = [inputs_of(row.num_tokens, device, dtype) for row in rows], garbage(4, device, dtype)
    found = layer.run(inputs, ring, rows, interpret=interpret, padding=3)
    begin = 0
    for row, own in zip(rows, inputs, strict=True):
        made = found[begin : begin + row.num_tokens].double()
        torch.testing.assert_close(made, layer.expected(own), rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])
        begin += row.num_tokens
        newest = torch.arange(max(0, row.num_tokens - RING), row.num_tokens, device=device)
        b, _, x = own[newest].chunk(3, 1)
        cut = 2**-7 if dtype == torch.bfloat16 else 0  # Triton's interpreter does not round to bf16, it cuts
        torch.testing.assert_close(ring[row.slot, newest % RING], b * x, rtol=cut, atol=0)
    assert ring[1].isnan().all()


@pytest.mark.parametrize("cuts", [(1, 2, 3, 7, 8), (5, 30), (17, 34), (20,)])
def test_a_prefill_in_parts_has_the_bits_of_one_pass(cuts: tuple[int, ...], interpret: bool, device: torch.device) -> None:
    """Parts shorter and longer than the ring and than what one program computes; another row of the pass has another length."""
    layer, length = layer_of(device), 41
    inputs, other = inputs_of(length, device), inputs_of(21, device)
    whole = layer.run([inputs], garbage(1, device), [Row(0, 0, length)], interpret=interpret)
    ring = garbage(2, device)
    for begin, end in zip((0, *cuts), (*cuts, length), strict=True):
        rows = [Row(1, 0, 21), Row(0, begin, end - begin)]
        found = layer.run([other, inputs[begin:end]], ring, rows, interpret=interpret)
        assert torch.equal(found[21:], whole[begin:end])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("taps", "bias"), [(4, True), (3, False), (16, False), (1, True)])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_any_size_give_the_same_bits(
    gated: bool, taps: int, bias: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """Of one row, in rounds of as many tokens as every tile has, and one fewer, in a ring as small as it may be. Another row of
    the round is dead, and one has fewer tokens."""
    if not (gated or interpret) and device.type == "cpu":
        pytest.skip("torch's SiLU of a number depends on its place in a tensor")
    layer, length = layer_of(device, dtype, taps=taps, bias=bias), 47
    inputs = torch.randn(length, (3 if gated else 1) * CHANNELS, device=device).to(dtype)
    whole = layer.run([inputs], garbage(1, device, dtype, taps), [Row(0, 0, length)], interpret=interpret, gated=gated)
    ring, begin = garbage(3, device, dtype, 16 + taps), 0
    for count in (1, 1, 2, 3, 4, 7, 8, 16, 1, 4):
        own = inputs[begin : begin + count]
        rows = [Row(2, 5, 1, live=False), Row(1, begin, count), Row(0, 0, min(count, 2))]
        found = layer.run([own[:1], own, inputs[: min(count, 2)]], ring, rows, interpret=interpret, gated=gated, padding=1)
        assert torch.equal(found[1 : count + 1], whole[begin : begin + count]), count
        assert torch.equal(found[count + 1 : -1], whole[: min(count, 2)])
        begin += count
    assert begin == length
    assert ring[2].isnan().all()


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_rounds_have_the_bits_of_one_pass_whatever_was_accepted(
    interpret: bool, device: torch.device, data: st.DataObject
) -> None:
    """In the smallest ring for so many drafts and taps."""
    num_drafts, taps = data.draw(st.integers(0, 3), label="K"), data.draw(st.integers(1, 4), label="W")
    accepted = data.draw(st.lists(st.integers(0, num_drafts), min_size=1, max_size=6), label="accepted")
    begin = prompt = data.draw(st.integers(0, 11), label="prompt")
    layer, inputs = layer_of(device, taps=taps), inputs_of(prompt + 28, device)
    whole = layer.run([inputs], garbage(1, device, places=taps), [Row(0, 0, prompt + 28)], interpret=interpret)
    ring = garbage(2, device, places=num_drafts + taps)
    if prompt:
        layer.run([inputs[:prompt]], ring, [Row(1, 0, prompt)], interpret=interpret)
    for length in accepted:
        drafted = inputs_of(num_drafts + 1, device)
        drafted[: length + 1] = inputs[begin : begin + length + 1]
        found = layer.run([drafted], ring, [Row(1, begin, num_drafts + 1)], interpret=interpret)
        assert torch.equal(found[: length + 1], whole[begin : begin + length + 1])
        begin += length + 1


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bias", [False, True])
def test_without_gates_the_inputs_are_convolved_and_go_through_silu(
    bias: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """In two passes, of which the second reads the ring; the first has more tokens than one program."""
    layer, ring, length = layer_of(device, dtype, taps=4, bias=bias), garbage(2, device, dtype), TOKENS + 7
    u = torch.randn(length, CHANNELS, device=device).to(dtype)
    wider, parts = F.pad(u, (2, 5), value=NAN)[:, 2:-5], list[Tensor]()
    for begin, end in ((0, TOKENS + 3), (TOKENS + 3, length)):
        rows = rows_of([Row(1, begin, end - begin)], device)
        parts.append(short_conv(wider[begin:end], layer.weight, layer.bias, ring, rows, gated=False, interpret=interpret))
    y = F.conv1d(F.pad(u.double().mT[None], (3, 0)), layer.weight.double().mT[:, None], groups=CHANNELS)[0].mT
    wanted = F.silu(y if layer.bias is None else y + layer.bias.double())
    torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])
    newest = torch.arange(length - RING, length, device=device)
    assert torch.equal(ring[1, newest % RING], u[newest])


def test_dead_rows_and_padding_write_nothing(interpret: bool, device: torch.device) -> None:
    layer, ring = layer_of(device), garbage(4, device)
    rows = [Row(0, 6, 2, live=False), Row(1, 0, 0), Row(2, 0, 2), Row(3, 5, 1, live=False)]
    inputs = [inputs_of(row.num_tokens, device) for row in rows]
    found = layer.run(inputs, ring, rows, interpret=interpret, padding=4)
    torch.testing.assert_close(found[2:4].double(), layer.expected(inputs[2]), rtol=2e-6, atol=2e-5)
    assert ring[[0, 1, 3]].isnan().all()


def test_wrong_shapes_and_rings_that_are_too_short_are_refused(device: torch.device) -> None:
    layer, rows = layer_of(device), rows_of([Row(0, 0, 2)], device)
    inputs, ring = inputs_of(2, device), garbage(1, device)
    for own, weight, kept, name in (
        (inputs[:, 1:], layer.weight, ring, "inputs"),
        (inputs, layer.weight.half(), ring, "weight"),
        (inputs, layer.weight, ring[..., 1:], r"ring\[0\]"),
    ):
        with pytest.raises(ValueError, match=rf"short_conv: {name} is"):
            short_conv(own, weight, None, kept, rows)
    for taps, places in ((3, 2), (17, 20)):
        with pytest.raises(ValueError, match=f"{taps} taps and rings of {places} positions; must be at most 16 taps"):
            short_conv(inputs, layer_of(device, taps=taps).weight, None, garbage(1, device, places=places), rows)
