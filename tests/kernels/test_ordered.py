"""Products with one order of sums: right, and with the same bits for a token wherever and with whomever it is multiplied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.kernels.gemm.linear import swiglu_reference
from batchspec.kernels.gemm.ordered import ordered_linear, ordered_swiglu
from batchspec.kernels.gemm.tiles import Tile
from tests.helpers.interpreter import dots_of_one_order

SMALL, WIDE = Tile(64, 32, 32, 2, 4, False), Tile(128, 64, 32, 2, 4, True)
CUTS = [(1, SMALL), (1, WIDE), (2, SMALL), (2, SMALL._replace(split=2)), (4, WIDE), (4, WIDE._replace(split=4))]


def operands(tokens: int, rows: int, k: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    weight = torch.randn(rows, k, device=device) * k**-0.5
    return torch.randn(tokens, k, device=device).to(dtype), weight.to(dtype), torch.randn(rows, device=device).to(dtype)


@pytest.mark.parametrize(("segments", "tile"), CUTS)
def test_every_cut_gives_the_product_in_the_asked_dtype(segments: int, tile: Tile, interpret: bool, device: torch.device) -> None:
    x, weight, bias = operands(131, 70, 256, device)
    wanted = x.float() @ weight.float().t() + bias.float()
    logits = torch.full((131, 70), torch.nan, device=device)
    assert ordered_linear(x, weight, bias, segments=segments, tile=tile, out=logits, interpret=interpret) is logits
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    narrow = ordered_linear(x, weight, bias, segments=segments, tile=tile, interpret=interpret)
    torch.testing.assert_close(narrow.float(), logits, atol=1e-4, rtol=2**-7)  # Triton's interpreter rounds to zero


@pytest.mark.parametrize(("segments", "tile"), CUTS)
def test_a_token_has_the_same_bits_in_any_company_and_place(segments: int, tile: Tile, device: torch.device) -> None:
    x, weight, _ = operands(200, 70, 256, device)

    def multiplied(rows: Tensor, own: Tile) -> Tensor:
        out = torch.empty(len(rows), 70, device=device)
        with dots_of_one_order():
            return ordered_linear(rows, weight, segments=segments, tile=own, out=out, interpret=True).view(torch.int32)

    whole = multiplied(x, tile)
    assert torch.equal(multiplied(x[:1], tile), whole[:1])
    assert torch.equal(multiplied(x[37:150], tile), whole[37:150])
    assert torch.equal(multiplied(x.flip(0), tile), whole.flip(0))
    other = tile._replace(split=segments if tile.split == 1 else 1)
    assert torch.equal(multiplied(x[:70], other), whole[:70])


def test_segments_are_summed_apart_and_in_order(device: torch.device) -> None:
    """In fp32 1e8 + 1 is 1e8: (1e8 + 1) - 1e8 is 0 in one sum, and 1 where -1e8 is of the second segment and 1 too."""
    x = torch.zeros(1, 128, device=device)
    x[0, 0], x[0, 64], x[0, 65] = 1e8, -1e8, 1.0
    weight = torch.ones(1, 128, device=device)
    tile = Tile(64, 16, 64, 2, 4, False)
    first_part, second_part = (float(x[0, half].sum()) for half in (slice(0, 64), slice(64, 128)))
    for split in (1, 2):
        found = ordered_linear(x, weight, segments=2, tile=tile._replace(split=split), interpret=True)
        assert float(found) == float(torch.tensor(first_part) + torch.tensor(second_part))


@pytest.mark.parametrize("segments", [1, 2])
def test_the_gate_rounds_as_separate_kernels_do(segments: int, interpret: bool, device: torch.device) -> None:
    x, weight, bias = operands(70, 96, 128, device)
    gate_up = ordered_linear(x, weight, bias, segments=segments, tile=SMALL, interpret=interpret)
    found = ordered_swiglu(x, weight, bias, segments=segments, tile=SMALL, interpret=interpret)
    assert found.shape == (70, 48)
    gate, up = gate_up.chunk(2, 1)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, atol=0.02, rtol=0.02)
    torch.testing.assert_close(found, swiglu_reference(x, weight, bias), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("segments", "tile", "said"),
    [
        (1, SMALL._replace(block_m=32), "block_m >= 64"),
        (2, SMALL._replace(split=4), "split 1 or 2"),
        (1, SMALL._replace(per_sm=1), "per_sm=0"),
        (3, SMALL, "multiple of 3 segments"),
    ],
)
def test_tiles_that_would_change_bits_are_refused(segments: int, tile: Tile, said: str, device: torch.device) -> None:
    x, weight, _ = operands(3, 16, 128, device)
    with pytest.raises(ValueError, match=said):
        ordered_linear(x, weight, segments=segments, tile=tile, interpret=True)


def test_nothing_is_computed_of_no_tokens(interpret: bool, device: torch.device) -> None:
    x, weight, _ = operands(0, 16, 128, device)
    assert ordered_linear(x, weight, segments=1, tile=SMALL, interpret=interpret).shape == (0, 16)
