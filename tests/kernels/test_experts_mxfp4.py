"""MXFP4: the kernel's order holds exactly the checkpoint's numbers, and products are those of the dequantised weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.moe.experts_mxfp4 import experts_mxfp4_down, experts_mxfp4_up
from batchspec.kernels.moe.experts_plain import experts_plain_down_reference, experts_plain_up_reference
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.mxfp4 import VALUES, Mxfp4Weight, dequantise_mxfp4, mxfp4_shapes, shuffle_mxfp4, unshuffle_mxfp4
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import FEW_UNITS, ExpertTile, expert_tile
from tests.kernels.moe_cases import SPREADS, assert_near, noise, routing_of

TILE = ExpertTile(16, 32, 128, 2, 4)


def stored(*shape: int, k: int, device: torch.device, exponents: tuple[int, int] = (118, 128)) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (*shape, k // 32, 16), dtype=torch.uint8, device=device)
    return blocks, torch.randint(*exponents, (*shape, k // 32), dtype=torch.uint8, device=device)


def plain(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp64 [..., N, K], number by number as the format says."""
    table = torch.tensor(VALUES, dtype=torch.float64)
    values = torch.zeros(*blocks.shape[:-1], 32, dtype=torch.float64)
    values[..., 0::2], values[..., 1::2] = table[(blocks % 16).long()], table[(blocks // 16).long()]
    return (values * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)


@pytest.mark.parametrize("k", [128, 96, 160, 2880])
def test_shuffling_is_undone_and_keeps_every_number(k: int) -> None:
    blocks, scales = stored(2, 3, k=k, device=torch.device("cpu"), exponents=(0, 129))
    weight = shuffle_mxfp4(blocks, scales)
    assert weight.words[0].shape == mxfp4_shapes(3, k)[0]
    assert weight.scales[0].shape == mxfp4_shapes(3, k)[1]
    again = unshuffle_mxfp4(weight, k)
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(dequantise_mxfp4(weight, k, dtype).double(), plain(blocks, scales))
    one = shuffle_mxfp4(blocks[1], scales[1])
    assert torch.equal(one.words, weight.words[1])
    assert torch.equal(one.scales, weight.scales[1])


@pytest.mark.parametrize("exponent", [0, 1, 118, 127, 128])
def test_the_kernel_reads_all_codes_with_every_scale(exponent: int, device: torch.device) -> None:
    """One expert whose row n holds code n, and rows of x that pick one value each."""
    k = 128
    blocks = (torch.arange(16, dtype=torch.uint8, device=device) * 17)[:, None, None].expand(16, k // 32, 16).contiguous()
    weight = shuffle_mxfp4(blocks[None], torch.full((1, 16, k // 32), exponent, dtype=torch.uint8, device=device))
    x = torch.zeros(4, k, dtype=torch.bfloat16, device=device)
    x[torch.arange(4), torch.tensor([0, 33, 95, 127])] = 1.0  # one of each part of a block
    routing = routing_of(4, 1, 1, SPREADS[0], 16, device)
    out = torch.full((4, 16), torch.nan, device=device)
    experts_mxfp4_down(x, weight, None, routing, tile=TILE._replace(block_n=64), out=out, interpret=True)
    assert torch.equal(out.double().cpu(), torch.tensor(VALUES, dtype=torch.float64).expand(4, 16) * 2.0 ** (exponent - 127))


@pytest.mark.parametrize(
    ("spread", "gate", "tile"),
    [(SPREADS[0], SWIGLU, TILE), (SPREADS[1], Gate(7.0), TILE._replace(tma=False)), (SPREADS[2], Gate(7.0), TILE)],
)
def test_both_products(spread: str, gate: Gate, tile: ExpertTile, interpret: bool, device: torch.device) -> None:
    tokens, experts, top_k, hidden, width = 9, 5, 2, 160, 64
    routing = routing_of(tokens, experts, top_k, spread, 16, device)
    x = noise(tokens, hidden, dtype=torch.bfloat16, device=device)
    bias = noise(experts, 2 * width, dtype=torch.bfloat16, device=device)
    up, down = (shuffle_mxfp4(*stored(experts, rows, k=k, device=device)) for rows, k in ((2 * width, hidden), (hidden, width)))
    out = torch.full((tokens * top_k, width), torch.nan, device=device)
    rows = sort_rows(x, routing, interpret=interpret)
    experts_mxfp4_up(rows, up, bias, routing, tile=tile, gate=gate, out=out, interpret=interpret)
    wanted = experts_plain_up_reference(rows.double(), _wide(up, hidden), bias, routing, gate=gate)
    assert_near(out, wanted, tolerance=1e-5 if interpret else 4e-3)
    h = wanted.bfloat16()
    y = experts_mxfp4_down(h, down, None, routing, tile=tile, interpret=interpret)
    assert_near(y, experts_plain_down_reference(h.double(), _wide(down, width), None, routing), tolerance=8e-3)


@pytest.mark.parametrize(
    ("tokens", "tma"), [(33, True), (48, False), (65, False), (80, True), (81, True), (96, False), (97, True)]
)
def test_a_unit_of_two_tiles_gives_the_bits_of_single_tiles(
    tokens: int, tma: bool, interpret: bool, device: torch.device
) -> None:
    """One of the two experts has all tokens. The interpreter gets numbers whose sums are exact: numpy's order of a sum depends on
    the shape."""
    hidden, width = 160, 72
    x = noise(tokens, hidden, dtype=torch.bfloat16, device=device)
    x = x.round() if interpret else x
    up, down = (shuffle_mxfp4(*stored(2, rows, k=k, device=device)) for rows, k in ((2 * width, hidden), (hidden, 96)))
    bias = noise(2, 2 * width, dtype=torch.bfloat16, device=device)
    h = noise(tokens, 96, dtype=torch.bfloat16, device=device)
    h = h.round() if interpret else h
    found = []
    for tile in (ExpertTile(16, 64, 128, 2, 4), ExpertTile(96, 64, 128, 2, 4, joined=True)):
        routing = routing_of(tokens, 2, 1, SPREADS[1], tile.block_t, device)
        out = torch.full((tokens, width), torch.nan, device=device)
        own = tile._replace(tma=tma)
        experts_mxfp4_up(x, up, bias, routing, tile=own, gate=Gate(7.0), out=out, interpret=interpret)
        found.append((out, experts_mxfp4_down(h, down, None, routing, tile=own, interpret=interpret)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert_near(
        found[1][0], experts_plain_up_reference(x.double(), _wide(up, hidden), bias, routing, gate=Gate(7.0)), tolerance=4e-3
    )


@pytest.mark.parametrize("hidden", [160, 256])
def test_other_tiles_give_the_same_bits(hidden: int, interpret: bool, device: torch.device) -> None:
    """With gate and up as one block of rows, too. Widths are no multiple of a tile's rows."""
    tokens, experts, width = 3, 5, 200
    x, h = (noise(2 * tokens, k, dtype=torch.bfloat16, device=device) for k in (hidden, width - 8))
    x, h = (x.round(), h.round()) if interpret else (x, h)  # see above
    up, down = (
        shuffle_mxfp4(*stored(experts, rows, k=k, device=device)) for rows, k in ((2 * width, hidden), (hidden, width - 8))
    )
    bias = noise(experts, 2 * width, dtype=torch.bfloat16, device=device)
    routing, found = routing_of(tokens, experts, 2, SPREADS[0], 16, device), []
    usual = [expert_tile(16, FEW_UNITS + 1, INTERPRETER, gated=gated, dtype=torch.uint8) for gated in (True, False)]
    narrow = ExpertTile(16, 32, 128, 3, 4), ExpertTile(16, 64, 128, 3, 4)
    for tiles in (usual, narrow, [tile._replace(registers=128) for tile in usual]):
        out = torch.full((len(x), width), torch.nan, device=device)
        experts_mxfp4_up(x, up, bias, routing, tile=tiles[0], gate=Gate(7.0), out=out, interpret=interpret)
        y = torch.full((len(x), hidden), torch.nan, device=device)
        found.append((out, experts_mxfp4_down(h, down, None, routing, tile=tiles[1], out=y, interpret=interpret)))
    assert_near(found[0][0], experts_plain_up_reference(x.double(), _wide(up, hidden), bias, routing, gate=Gate(7.0)),
                tolerance=1e-5 if interpret else 4e-3)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def _wide(weight: Mxfp4Weight, k: int) -> Tensor:
    return dequantise_mxfp4(weight, k, torch.float64)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    blocks, scales = stored(3, 32, k=64, device=device)
    with pytest.raises(ValueError, match=r"a scale is 2\^2; at most 2\^1"):
        shuffle_mxfp4(blocks, torch.full_like(scales, 129))
    with pytest.raises(ValueError, match=r"must be uint8 \[..., N, K / 32, 16\]"):
        shuffle_mxfp4(blocks[..., :8], scales)
    routing = routing_of(4, 3, 2, SPREADS[0], 16, device)
    weight, x = shuffle_mxfp4(blocks, scales), torch.zeros(8, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="block_k is 64; must be 128"):
        experts_mxfp4_up(x, weight, None, routing, tile=TILE._replace(block_k=64), interpret=True)
    with pytest.raises(ValueError, match=r"low and block_t must be of \[16, 32, 64, 128, 256\]"):
        experts_mxfp4_up(x, weight, None, routing._replace(unit_pairs=48), tile=TILE._replace(block_t=48), interpret=True)
    with pytest.raises(ValueError, match="experts_mxfp4_up: words"):
        experts_mxfp4_up(torch.zeros(8, 160).bfloat16(), weight, None, routing, tile=TILE, interpret=True)
