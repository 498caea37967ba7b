"""Direct tiles have the bits of the other ones for the same parts of K, and for every division of K the product's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton

from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.gemm.four_bit_linear import four_bit_linear, four_bit_swiglu
from batchspec.kernels.gemm.four_bit_tiles import AHEAD
from batchspec.kernels.gemm.split_k import counters
from batchspec.kernels.gemm.tiles import Tile
from tests.kernels.covering import pairwise
from tests.kernels.end_of_memory import assert_reads_nothing_after_it, at_the_end_of_memory, interpreted
from tests.kernels.four_bit_cases import GROUPS, four_bit_weight
from tests.kernels.moe_cases import assert_near, noise
from tests.kernels.test_four_bit_linear import TOLERANCE, by_definition, x_of

DIRECT = Tile(16, 128, 128, 3, 8, False, direct=True)
# Rows of W, K and tokens: K that ends within a block, within a step of two blocks and within a part; rows that end within 16 and
# within a tile.
SHAPES = [(200, 528, 5), (72, 384, 19), (300, 640, 16), (136, 1296, 70), (264, 512, 33)]
TILES = [
    DIRECT, DIRECT._replace(block_n=256), DIRECT._replace(block_n=64, warps=4, tma=True), DIRECT._replace(block_m=64, tma=True),
    DIRECT._replace(block_m=32, warps=4), DIRECT._replace(split=2), DIRECT._replace(split=3), DIRECT._replace(split=8),
]


@pytest.mark.parametrize(("group", "zeros", "shape", "tile"), pairwise(GROUPS, [False, True], SHAPES, TILES))
def test_bits_and_product(
    group: int, zeros: bool, shape: tuple[int, int, int], tile: Tile, interpret: bool, device: torch.device
) -> None:
    rows, k, tokens = shape
    weight, x = four_bit_weight(rows, k, group, device, zeros=zeros and group != GROUP), x_of(tokens, k, device)
    bias, out = noise(rows, dtype=torch.bfloat16, device=device), torch.full((tokens, rows), torch.nan, device=device)
    four_bit_linear(x, weight, bias, tile=tile, out=out, interpret=interpret)
    assert_near(out, by_definition(x, weight, bias), tolerance=TOLERANCE)
    if tile.split == 1 or triton.cdiv(triton.cdiv(k, 128), tile.split) % AHEAD == 0:  # the same parts of K
        other = four_bit_linear(x, weight, bias, tile=tile._replace(direct=False), out=torch.empty_like(out), interpret=interpret)
        assert torch.equal(out, other)
    assert not counters(device).any()


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("group", "zeros"), [(128, False), (64, True), (16, False)])
def test_swiglu(group: int, zeros: bool, split: int, interpret: bool, device: torch.device) -> None:
    weight, x = four_bit_weight(2 * 80, 656, group, device, zeros=zeros), x_of(21, 656, device)
    bias = noise(160, dtype=torch.bfloat16, device=device)
    tile = Tile(16, 64, 128, 3, 4, False, split, direct=True)
    found = four_bit_swiglu(x, weight, bias, tile=tile, interpret=interpret)
    gate, up = by_definition(x, weight, bias).chunk(2, -1)
    assert_near(found, F.silu(gate) * up, tolerance=1.5e-2)
    other = four_bit_swiglu(x, weight, bias, tile=tile._replace(direct=False, split=1), interpret=interpret)
    assert split > 1 or torch.equal(found, other)


@pytest.mark.parametrize("group", [16, 32, 128])
def test_a_slice_of_rows_and_of_columns_of_wider_rows(group: int, interpret: bool, device: torch.device) -> None:
    weight, x = four_bit_weight(208, 256, group, device, zeros=True), x_of(9, 264, device)[:, 3:259]
    for tile in TILES:
        found = four_bit_linear(x, weight.rows(slice(48, 200)), tile=tile, interpret=interpret)
        assert_near(found, by_definition(x, weight)[:, 48:200], tolerance=4e-3)


@pytest.mark.second
@interpreted
@pytest.mark.parametrize("group", [16, 64, 128])
def test_nothing_after_the_last_word_and_scale_is_read(group: int) -> None:
    """Of a weight and of its last rows; its last step has a block less than the others, its last tile fewer rows."""
    assert_reads_nothing_after_it(multiply_at_the_end_of_memory, group)


def multiply_at_the_end_of_memory(group: int) -> None:
    device = torch.device("cpu")
    weight, x = four_bit_weight(200, 640, group, device, zeros=True), x_of(5, 640, device)
    shifts = None if weight.shifts is None else at_the_end_of_memory(weight.shifts)
    weight = replace(
        weight, words=at_the_end_of_memory(weight.words), scales=at_the_end_of_memory(weight.scales), shifts=shifts
    )
    for own in (weight, weight.rows(slice(48, 200))):
        for tile in TILES:
            four_bit_linear(x, own, tile=tile, interpret=True)


def test_nan_of_a_token_stays_in_its_row(device: torch.device) -> None:
    x = x_of(21, 656, device)
    x[3, 200] = torch.nan
    y = four_bit_linear(x, four_bit_weight(208, 656, 64, device), tile=DIRECT._replace(split=3), interpret=True)
    assert y.isfinite().all(1).tolist() == [row != 3 for row in range(21)]


def test_tiles_that_the_kernel_does_not_take_are_refused(device: torch.device) -> None:
    weight, x = four_bit_weight(160, 256, 128, device), x_of(4, 256, device)
    for tile in (DIRECT._replace(block_n=64), DIRECT._replace(split=9), DIRECT._replace(warps=2)):
        with pytest.raises(ValueError, match="direct=True needs 16 or 32 rows of W for each warp and a split of at most 8"):
            four_bit_linear(x, weight, tile=tile, interpret=True)
    with pytest.raises(ValueError, match="direct=True needs 32 rows of W for each warp"):
        four_bit_swiglu(x, weight, tile=DIRECT._replace(block_n=64), interpret=True)
