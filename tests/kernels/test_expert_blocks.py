"""What all grouped products share: every height of tile, the borders of units, and numbers past them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from batchspec.kernels.benchmarks.case import relative_error
from batchspec.kernels.benchmarks.moe_weights import FORMATS, MoeShape, Product, make_products
from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.moe.experts_fp8 import Fp8Weight, experts_fp8_up, experts_fp8_up_quantised
from batchspec.kernels.moe.gate import Gate
from batchspec.kernels.moe.quantise import Fp8Rows, quantise_rows, quantise_rows_reference
from batchspec.kernels.moe.route import lists_reference
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile
from tests.kernels.moe_cases import SPREADS, assert_near, mxfp4_tile, noise, routing_of

SHAPE = MoeShape(4, 2, 160, 96, Gate(7.0), True)  # tails of the blocks of K and of the tiles over rows of W
TILE = ExpertTile(16, 64, 128, 2, 4)


def products_of(form: str, device: torch.device) -> tuple[Product, Product]:
    torch.manual_seed(3)
    return make_products(SHAPE, form, device)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("spread", "tile"),
    [
        (SPREADS[0], ExpertTile(64, 64, 128, 2, 4)),
        (SPREADS[1], ExpertTile(16, 64, 128, 2, 4)),
        (SPREADS[2], ExpertTile(32, 64, 128, 2, 4, tma=False, low=32)),
    ],
)
def test_every_height_of_tile_gives_the_product_of_each_pair(
    form: str, spread: str, tile: ExpertTile, device: torch.device
) -> None:
    tokens = 45  # units of 1 to 64 pairs
    for product in products_of(form, device):
        tile = mxfp4_tile(tile, gated=product.gated) if form == "mxfp4" else tile
        routing = routing_of(tokens, SHAPE.experts, SHAPE.top_k, spread, tile.block_t, device)
        x = product.inputs(tokens)
        wanted = product.reference(x, routing)
        assert relative_error(product.result(x, routing, tile), wanted) < 2 * product.tolerance  # the interpreter cuts bf16 off
        last = routing.pairs[-1].long()
        assert relative_error(product.result(x, routing, tile)[last], wanted[last]) < 4 * product.tolerance


@pytest.mark.second
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    "tile", [ExpertTile(128, 128, 128, 2, 8, turned=True), ExpertTile(64, 64, 128, 2, 4, tma=False, turned=True)]
)
def test_turned_tiles_of_fp8_give_the_numbers_of_others(tile: ExpertTile, spread: str, device: torch.device) -> None:
    """Units of 1 to 128 pairs, and rows of W whose tiles end inside the first or the second half. On a GPU the bits are equal; in
    the interpreter the order of sums depends on which side a number is on."""
    for shape in (SHAPE, replace(SHAPE, hidden=272, width=144)):
        for product in make_products(shape, "fp8", device):
            tokens = 150
            own = tile if product.gated else tile._replace(block_n=2 * tile.block_n)
            routing = routing_of(tokens, shape.experts, shape.top_k, spread, tile.block_t, device)
            x = product.inputs(tokens)
            found = product.result(x, routing, own)
            assert relative_error(found, product.reference(x, routing)) < 2 * product.tolerance  # the interpreter cuts bf16 off
            others = lists_reference(routing.expert_ids, routing.weights, shape.experts, 32)
            narrow = product.result(x, others, ExpertTile(32, 64, 128, 2, 4))
            assert torch.equal(found, narrow) if device.type == "cuda" else relative_error(found, narrow.float()) < 1e-3


@pytest.mark.second
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("form", "tile"),
    [("bf16", TILE._replace(block_t=32)), ("bf16", TILE._replace(tma=False)), ("fp8", TILE._replace(block_t=32)),
     ("fp8", ExpertTile(64, 64, 128, 2, 4, turned=True)), ("fp8", TILE._replace(tma=False))],
)
def test_rows_that_are_gathered_give_the_bits_of_sorted_ones(
    form: str, tile: ExpertTile, spread: str, device: torch.device
) -> None:
    """Rows of x past the last token, which FP8 tokens may have, are not read."""
    product, tokens = products_of(form, device)[0], 75
    routing = routing_of(tokens, SHAPE.experts, SHAPE.top_k, spread, tile.block_t, device)
    x, (found, wanted) = product.inputs(tokens), (product.empty(tokens * SHAPE.top_k).fill_(torch.nan) for _ in range(2))
    by_token: Any = quantise_rows(x, interpret=not x.is_cuda) if form == "fp8" else x
    product.run(product.rows_of(x, routing), routing, tile, wanted)
    product.run(by_token, routing, tile, found, by_token=True)
    assert torch.equal(found, wanted)
    if form == "fp8":
        more = Fp8Rows(torch.cat([by_token.values, by_token.values[:3]]), torch.cat([by_token.scales, by_token.scales[:, :3]], 1))
        product.run(more, routing, tile, found.fill_(torch.nan), by_token=True)
        assert torch.equal(found, wanted)
        by_token = Fp8Rows(by_token.values[:-1], by_token.scales[:, :-1].contiguous())
    else:
        by_token = x[:-1]
    with pytest.raises(ValueError, match=r"x is|rows of x"):
        product.run(by_token, routing, tile, found, by_token=True)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tile", [TILE, TILE._replace(tma=False), ExpertTile(64, 128, 128, 2, 4, low=64, turned=True)])
def test_rows_past_the_pairs_of_a_unit_change_nothing(form: str, tile: ExpertTile, device: torch.device) -> None:
    """A tile reads rows of the next expert, which may hold any numbers."""
    product = products_of(form, device)[1]
    tile = mxfp4_tile(tile, gated=False) if form == "mxfp4" else tile
    routing = routing_of(20, SHAPE.experts, SHAPE.top_k, SPREADS[0], tile.block_t, device)
    first = int(routing.offsets[1])
    rows = product.rows_of(noise(40, product.k, dtype=torch.bfloat16, device=device), routing)
    changed = Fp8Rows(*(part.clone() for part in rows)) if isinstance(rows, Fp8Rows) else rows.clone()
    if isinstance(changed, Fp8Rows):
        changed.values.view(torch.uint8)[first:] = 0x7F  # NaN
        changed.scales[:, first:] = torch.nan
    else:
        changed[first:] = torch.nan
    outs = []
    for own in (rows, changed):
        outs.append(product.empty(40))
        product.run(own, routing, tile, outs[-1])
    own_pairs = routing.pairs[:first].long()
    assert first % 16
    assert torch.equal(outs[0][own_pairs], outs[1][own_pairs])
    assert outs[1][routing.pairs[first:].long()].isnan().all()


@pytest.mark.parametrize(("tokens", "unit_pairs", "turned"), [(21, 32, False), (70, 32, False), (150, 128, True)])
def test_a_quantised_result_is_that_of_quantise_rows(tokens: int, unit_pairs: int, turned: bool, device: torch.device) -> None:
    """For more than one height of tile."""
    product = make_products(replace(SHAPE, width=160, gate=Gate(), bias=False), "fp8", device)[0]
    tile = ExpertTile(unit_pairs, 128, 128, 2, 4, turned=turned)
    routing = routing_of(tokens, SHAPE.experts, SHAPE.top_k, SPREADS[0], unit_pairs, device)
    x = quantise_rows(product.inputs(tokens), routing, interpret=True)
    weight = product.weight
    assert isinstance(weight, Fp8Weight)
    found = experts_fp8_up_quantised(x, weight, None, routing, tile=tile, interpret=True)
    plain = experts_fp8_up(x, weight, None, routing, tile=tile, interpret=True)
    assert_near(found.scales, quantise_rows_reference(plain).scales, tolerance=1e-2)
    scales = found.scales.T.repeat_interleave(128, 1)[:, :160]
    assert_near(found.values.float() * scales, plain, tolerance=4e-2)


@pytest.mark.parametrize("form", FORMATS)
def test_default_tiles_of_few_and_many_tokens_agree_in_every_bit(form: str, device: torch.device) -> None:
    for product in products_of(form, device):
        x, outs = product.inputs(30), []
        for unit_pairs in (16, 64):
            routing = routing_of(30, SHAPE.experts, SHAPE.top_k, SPREADS[1], unit_pairs, device)
            tile = expert_tile(unit_pairs, len(routing.units), INTERPRETER, gated=product.gated, dtype=product.dtype)
            if device.type == "cpu" and form == "bf16":  # tensor cores add up 16 columns at a time, the interpreter a whole block
                tile = tile._replace(block_k=64)
            outs.append(product.result(x, routing, tile))
        assert torch.equal(*outs)
