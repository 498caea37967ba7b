"""MXFP4: the kernel's order holds exactly the checkpoint's numbers, and products are those of the dequantised weights."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.moe.experts_mxfp4 import experts_mxfp4_down, experts_mxfp4_up
from batchspec.kernels.moe.experts_plain import experts_plain_down_reference, experts_plain_up_reference
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.mxfp4 import (
    PLACES,
    VALUES,
    Mxfp4Weight,
    dequantise_mxfp4,
    mxfp4_shapes,
    shuffle_mxfp4,
    unshuffle_mxfp4,
)
from batchspec.kernels.moe.route import lists_reference
from batchspec.kernels.moe.sort_rows import sort_rows
from batchspec.kernels.moe.tiles import MXFP4_PAIRS, ExpertTile, expert_tile, largest_first
from batchspec.kernels.moe.units import Routing
from tests.kernels.end_of_memory import assert_reads_nothing_after_it, at_the_end_of_memory, interpreted
from tests.kernels.moe_cases import SPREADS, assert_near, mxfp4_tile, noise, routing_of

TILE = ExpertTile(16, 64, 128, 2, 4)


def stored(*shape: int, k: int, device: torch.device, exponents: tuple[int, int] = (118, 128)) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (*shape, k // 32, 16), dtype=torch.uint8, device=device)
    return blocks, torch.randint(*exponents, (*shape, k // 32), dtype=torch.uint8, device=device)


def both(experts: int, hidden: int, width: int, device: torch.device) -> tuple[Mxfp4Weight, Mxfp4Weight]:
    """Weights of the first and of the second product."""
    return (
        shuffle_mxfp4(*stored(experts, 2 * width, k=hidden, device=device), gated=True),
        shuffle_mxfp4(*stored(experts, hidden, k=width, device=device), gated=False),
    )


def plain(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp64 [..., N, K], number by number as the format says."""
    table = torch.tensor(VALUES, dtype=torch.float64)
    values = torch.zeros(*blocks.shape[:-1], 32, dtype=torch.float64)
    values[..., 0::2], values[..., 1::2] = table[(blocks % 16).long()], table[(blocks // 16).long()]
    return (values * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)


@pytest.mark.second
@given(
    lead=st.lists(st.integers(1, 3), max_size=2), rows=st.integers(1, 300), k=st.integers(1, 12), gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_shuffling_is_undone_and_keeps_every_number(lead: list[int], rows: int, k: int, gated: bool, seed: int) -> None:
    torch.manual_seed(seed)
    rows, k = 2 * rows if gated else rows, 32 * k
    blocks, scales = stored(*lead, rows, k=k, device=torch.device("cpu"), exponents=(0, 129))
    weight = shuffle_mxfp4(blocks, scales, gated=gated)
    assert weight[2:] == (rows, k, gated)
    for part, shape in zip(weight[:2], mxfp4_shapes(rows, k), strict=True):
        assert part.shape == (*lead, *shape)
        assert part.is_contiguous()
    again = unshuffle_mxfp4(weight)
    assert torch.equal(again[0], blocks)
    assert torch.equal(again[1], scales)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(dequantise_mxfp4(weight, dtype).double(), plain(blocks, scales))
    if lead:
        one = shuffle_mxfp4(blocks[-1], scales[-1], gated=gated)
        assert torch.equal(one.words, weight.expert(-1).words)
        assert torch.equal(one.scales, weight.expert(-1).scales)


@pytest.mark.parametrize(
    ("rows", "gated"), [(130, False), (40, False), (250, False), (128, True), (140, True), (320, True), (50, True), (200, True)]
)
def test_words_and_scales_are_where_the_threads_look(rows: int, gated: bool) -> None:
    """As the module says, number by number; rows of zeros fill the last blocks."""
    k, steps = 160, 2
    blocks, scales = stored(rows, k=k, device=torch.device("cpu"))
    weight = shuffle_mxfp4(blocks, scales, gated=gated)
    words, num_blocks = weight.words.view(torch.int16).flatten(), -(-rows // 64)
    draw = random.Random(0)
    for _ in range(300):
        row, column = draw.randrange(rows), draw.randrange(k)
        part, own = divmod(row, rows // 2) if gated else (0, row)
        block, place = divmod(own, 64)
        pair, side = (block, part) if gated else divmod(block, 2)
        warp, half, eight = place // 16, place // 8 % 2, place % 8
        step, value, word = column // 128, column % 128 // 32, column % 32
        lane, own_word = 4 * eight + word % 8 // 2, word // 16 * 4 + word // 8 % 2 * 2 + word % 2
        size, first = 2048, 2 * pair * steps * 2048
        if 2 * pair + 1 < num_blocks:
            first += (step * 2 + side) * size
        else:  # in one block
            first += step * size + (1024 * side if gated else 0)
        bits = int(words[first + ((warp * 2 + half) * 32 + lane) * 8 + own_word])
        code = sum((bits >> bit & 1) << 3 - i for i, bit in enumerate(PLACES[value]))
        octet = int(blocks[row, column // 32, column % 32 // 2])
        assert code == (octet >> 4 if column % 2 else octet & 15)
        scale = int(weight.scales[pair, step, (((warp * 8 + eight) * 2 + side) * 2 + half) * 4 + value])
        assert scale == int(scales[row, column // 32]) + 126
    full = shuffle_mxfp4(torch.full_like(blocks, 0xFF), scales, gated=gated).words
    assert sum(int((full >> bit & 1).sum()) for bit in range(8)) == 4 * rows * k


@pytest.mark.parametrize(
    ("rows", "filled"), [(2880, 2880), (2 * 2880, 2 * 2880), (2 * 1440, 2 * 1440), (2 * 736, 2 * 736), (1440, 1472), (1, 64)]
)
def test_rows_that_fill_the_last_block_cost_little(rows: int, filled: int) -> None:
    """None of gpt-oss, on one GPU or on ranks, but the scales of a last pair in one block."""
    words, scales = (prod(shape) for shape in mxfp4_shapes(rows, 2880))
    assert words == filled * 2944 / 2
    assert scales == -(-filled // 128) * 128 * 2944 / 32


@pytest.mark.parametrize("exponent", [0, 1, 118, 127, 128])
def test_the_kernel_reads_all_codes_with_every_scale(exponent: int, device: torch.device) -> None:
    """One expert whose row n holds code n, and rows of x that pick one value each."""
    k = 128
    blocks = (torch.arange(16, dtype=torch.uint8, device=device) * 17)[:, None, None].expand(16, k // 32, 16).contiguous()
    scales = torch.full((1, 16, k // 32), exponent, dtype=torch.uint8, device=device)
    x = torch.zeros(4, k, dtype=torch.bfloat16, device=device)
    x[torch.arange(4), torch.tensor([0, 33, 95, 127])] = 1.0  # one of each part of a block
    routing = routing_of(4, 1, 1, SPREADS[0], 16, device)
    out = torch.full((4, 16), torch.nan, device=device)
    weight = shuffle_mxfp4(blocks[None], scales, gated=False)
    experts_mxfp4_down(x, weight, None, routing, tile=mxfp4_tile(TILE, gated=False), out=out, interpret=True)
    assert torch.equal(out.double().cpu(), torch.tensor(VALUES, dtype=torch.float64).expand(4, 16) * 2.0 ** (exponent - 127))


@pytest.mark.parametrize(
    ("spread", "gate", "biased", "tile", "sizes"),
    [
        (SPREADS[0], SWIGLU, True, TILE, (9, 160, 64)), (SPREADS[1], Gate(7.0), False, TILE._replace(tma=False), (9, 160, 64)),
        (SPREADS[2], Gate(7.0), True, TILE, (1, 32, 32)), (SPREADS[2], SWIGLU, False, TILE._replace(block_t=32), (45, 352, 224)),
        (SPREADS[1], SWIGLU, True, TILE._replace(block_t=48, joined=True), (47, 96, 320)),
        (SPREADS[0], Gate(7.0), True, TILE._replace(block_t=64, joined=True), (60, 288, 96)),
        (SPREADS[1], Gate(7.0), True, TILE._replace(block_t=128, low=32, joined=True), (200, 96, 160)),
        (SPREADS[1], SWIGLU, True, TILE._replace(block_t=96, low=32, joined=True, warps=8), (90, 160, 96)),
        (SPREADS[0], Gate(7.0), False, TILE._replace(block_t=32, warps=8, tma=False), (33, 288, 160)),
    ],
)
def test_both_products(
    spread: str, gate: Gate, biased: bool, tile: ExpertTile, sizes: tuple[int, int, int], interpret: bool, device: torch.device
) -> None:
    (tokens, hidden, width), experts, top_k = sizes, 5, 2
    routing = routing_of(tokens, experts, top_k, spread, tile.block_t, device)
    x = noise(tokens, hidden, dtype=torch.bfloat16, device=device)
    bias = noise(experts, 2 * width, dtype=torch.bfloat16, device=device) if biased else None
    up, down = both(experts, hidden, width, device)
    out = torch.full((tokens * top_k, width), torch.nan, device=device)
    rows = sort_rows(x, routing, interpret=interpret)
    experts_mxfp4_up(rows, up, bias, routing, tile=tile, gate=gate, out=out, interpret=interpret)
    wanted = experts_plain_up_reference(rows.double(), _wide(up), bias, routing, gate=gate)
    assert_near(out, wanted, tolerance=1e-5 if interpret else 4e-3)
    h = wanted.bfloat16()
    y = experts_mxfp4_down(h, down, None, routing, tile=mxfp4_tile(tile, gated=False), interpret=interpret)
    assert_near(y, experts_plain_down_reference(h.double(), _wide(down), None, routing), tolerance=8e-3)


@pytest.mark.parametrize(("low", "tokens"), [(16, 33), (16, 48), (16, 65), (32, 80), (32, 81), (32, 96), (32, 97), (32, 128)])
def test_a_unit_of_two_tiles_gives_the_bits_of_single_tiles(
    low: int, tokens: int, interpret: bool, device: torch.device
) -> None:
    """One of the two experts has all tokens. The interpreter gets numbers whose sums are exact: numpy's order of a sum depends on
    the shape."""
    hidden, width = 160, 96
    x, h = (noise(tokens, k, dtype=torch.bfloat16, device=device) for k in (hidden, width))
    x, h = (x.round(), h.round()) if interpret else (x, h)
    up, down = both(2, hidden, width, device)
    bias = noise(2, 2 * width, dtype=torch.bfloat16, device=device)
    found = []
    other = TILE._replace(block_t=96 if low == 16 else 128, low=low, joined=True, tma=tokens % 2 == 0)
    for tile in (TILE, other, other._replace(warps=8)):
        routing = routing_of(tokens, 2, 1, SPREADS[1], tile.block_t, device)
        out = torch.full((tokens, width), torch.nan, device=device)
        experts_mxfp4_up(x, up, bias, routing, tile=tile, gate=Gate(7.0), out=out, interpret=interpret)
        y = experts_mxfp4_down(h, down, None, routing, tile=mxfp4_tile(tile, gated=False), interpret=interpret)
        found.append((out, y))
    assert all(all(map(torch.equal, found[0], own)) for own in found[1:])
    assert_near(
        found[1][0], experts_plain_up_reference(x.double(), _wide(up), bias, routing, gate=Gate(7.0)), tolerance=4e-3
    )


@pytest.mark.second
@pytest.mark.parametrize("hidden", [160, 256])
def test_tiles_of_every_number_of_pairs_give_the_same_bits(hidden: int, interpret: bool, device: torch.device) -> None:
    """Widths are no multiple of a tile's rows. The last expert has 40 pairs, the others 10: large units come first."""
    tokens, experts, width = 40, 5, 224
    x, h = (noise(2 * tokens, k, dtype=torch.bfloat16, device=device) for k in (hidden, width))
    x, h = (x.round(), h.round()) if interpret else (x, h)  # see above
    up, down = both(experts, hidden, width, device)
    bias, found = noise(experts, 2 * width, dtype=torch.bfloat16, device=device), []
    ids = torch.stack((torch.full((tokens,), 4), torch.arange(tokens) % 4), 1).int().to(device)
    for pairs in MXFP4_PAIRS:
        routing = _in_units(ids, experts, pairs)
        assert int(routing.units[0, 0]) == (4 if pairs > 16 else 0)
        tiles = [expert_tile(pairs, 20, INTERPRETER, gated=gated, dtype=torch.uint8) for gated in (True, False)]
        out = torch.full((len(x), width), torch.nan, device=device)
        experts_mxfp4_up(x, up, bias, routing, tile=tiles[0], gate=Gate(7.0), out=out, interpret=interpret)
        y = torch.full((len(x), hidden), torch.nan, device=device)
        found.append((out, experts_mxfp4_down(h, down, None, routing, tile=tiles[1], out=y, interpret=interpret)))
    assert_near(found[0][0], experts_plain_up_reference(x.double(), _wide(up), bias, routing, gate=Gate(7.0)),
                tolerance=1e-5 if interpret else 4e-3)
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@pytest.mark.parametrize(("rows", "gated"), [(2 * 100, True), (2 * 70, True), (30, False), (200, False)])
def test_rows_that_fill_the_last_blocks_reach_no_output(rows: int, gated: bool, device: torch.device) -> None:
    """Whatever they hold, infinities and NaN too."""
    tokens, experts = 20, 3
    routing = routing_of(tokens, experts, 2, SPREADS[0], 16, device)
    for k in (32, 160):
        weight = shuffle_mxfp4(*stored(experts, rows, k=k, device=device), gated=gated)
        marks = torch.full((experts, rows, -(-k // 128) * 4, 16), 0xFF, dtype=torch.uint8, device=device)  # with columns past k
        used = shuffle_mxfp4(marks, torch.ones_like(marks[..., 0]), gated=gated)
        words, scales = weight.words.masked_fill(used.words == 0, 0xFF), weight.scales.masked_fill(used.scales == 126, 0xFF)
        assert not torch.equal(words, weight.words)
        assert not torch.equal(scales, weight.scales)
        x = noise(2 * tokens, k, dtype=torch.bfloat16, device=device)
        tile, product = mxfp4_tile(TILE, gated=gated), experts_mxfp4_up if gated else experts_mxfp4_down
        weights = (weight, weight._replace(words=words, scales=scales))
        found = [product(x, own, None, routing, tile=tile, interpret=True) for own in weights]
        assert torch.equal(*found)
        assert found[0].isfinite().all()


def _in_units(expert_ids: Tensor, experts: int, pairs: int) -> Routing:
    weights = torch.rand(expert_ids.shape, device=expert_ids.device)
    return lists_reference(expert_ids, weights, experts, pairs, largest_first=largest_first(pairs, torch.uint8))


def _wide(weight: Mxfp4Weight) -> Tensor:
    return dequantise_mxfp4(weight, torch.float64)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    blocks, scales = stored(3, 32, k=64, device=device)
    with pytest.raises(ValueError, match=r"a scale is 2\^2; at most 2\^1"):
        shuffle_mxfp4(blocks, torch.full_like(scales, 129), gated=True)
    with pytest.raises(ValueError, match=r"must be uint8 \[..., N, K / 32, 16\]"):
        shuffle_mxfp4(blocks[..., :8], scales, gated=True)
    with pytest.raises(ValueError, match="31 rows of gate and up; must be even"):
        shuffle_mxfp4(blocks[:, :31], scales[:, :31], gated=True)
    routing = routing_of(4, 3, 2, SPREADS[0], 16, device)
    weight, x = shuffle_mxfp4(blocks, scales, gated=True), torch.zeros(8, 64, dtype=torch.bfloat16, device=device)
    for tile in (TILE._replace(block_k=64), TILE._replace(block_n=128), TILE._replace(warps=2)):
        with pytest.raises(ValueError, match="block_n must be 64, block_k 128 and warps 4 or 8"):
            experts_mxfp4_up(x, weight, None, routing, tile=tile, interpret=True)
    with pytest.raises(ValueError, match=r"low and block_t must be of \[16, 32, 64, 128, 256\]"):
        experts_mxfp4_up(x, weight, None, routing._replace(unit_pairs=48), tile=TILE._replace(block_t=48), interpret=True)
    with pytest.raises(ValueError, match="experts_mxfp4_up: x"):
        experts_mxfp4_up(x.new_zeros(8, 160), weight, None, routing, tile=TILE, interpret=True)
    with pytest.raises(ValueError, match="experts_mxfp4_up: words"):
        experts_mxfp4_up(x, weight._replace(words=weight.words[..., :64]), None, routing, tile=TILE, interpret=True)
    with pytest.raises(ValueError, match="the weight was shuffled with gated=True; must be False"):
        experts_mxfp4_down(x, weight, None, routing, tile=mxfp4_tile(TILE, gated=False), interpret=True)


@interpreted
@pytest.mark.parametrize("width", [32, 64, 96])
def test_nothing_after_the_last_word_and_scale_is_read(width: int) -> None:
    """The last pair of the last expert, stored as one block or as two, ends where memory ends."""
    assert_reads_nothing_after_it(run_both_at_the_end_of_memory, width)


def run_both_at_the_end_of_memory(width: int) -> None:
    routing = routing_of(3, 2, 2, SPREADS[0], 16, torch.device("cpu"))
    up, down = (
        weight._replace(words=at_the_end_of_memory(weight.words), scales=at_the_end_of_memory(weight.scales))
        for weight in both(2, 64 + width, width, torch.device("cpu"))
    )
    x = sort_rows(noise(3, 64 + width, dtype=torch.bfloat16, device=torch.device("cpu")), routing)
    h = experts_mxfp4_up(x, up, None, routing, tile=mxfp4_tile(TILE, gated=True), interpret=True)
    experts_mxfp4_down(h, down, None, routing, tile=mxfp4_tile(TILE, gated=False), interpret=True)
