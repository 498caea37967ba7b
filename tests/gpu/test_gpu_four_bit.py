"""Products with INT4 and NVFP4 weights on a Hopper GPU, in the sizes of models: tiles, bits and graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchspec.kernels.common import pdl
from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.four_bit import FourBitWeight, dequantise, multiplied
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.gemm.four_bit_dequantise import four_bit_dequantise, multiply_dequantised
from batchspec.kernels.gemm.four_bit_linear import four_bit_linear, four_bit_swiglu
from batchspec.kernels.gemm.four_bit_tiles import candidates, ordered_four_bit_tile
from batchspec.kernels.gemm.tiles import Tile
from batchspec.model.quant.four_bit import FourBitLinear
from batchspec.tuning.policy import has_fast_experts
from tests.kernels.four_bit_cases import four_bit_weight

GPU, BF16 = torch.device("cuda"), torch.bfloat16
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_fast_experts(GPU, BF16)), reason="needs a Hopper GPU or newer"
)
SHAPES = [(6144, 4096), (4096, 14336), (5120, 2048), (720, 1096)]
KINDS = [(128, False), (32, True), (0, False), (64, True), (GROUP, False)]
"""Columns of a group, and whether it has zero points."""
COUNTS = (1, 7, 16, 64, 65, 129, 300, 1024, 2048)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU).to(BF16)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """By the norm of the difference; NaN never passes."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, float(error)


def weight_of(rows: int, k: int, group: int, *, zeros: bool = False) -> FourBitWeight:
    """Of about k columns: NVFP4 has whole groups."""
    return four_bit_weight(rows, k // GROUP * GROUP if group == GROUP else k, group, GPU, zeros=zeros)


def in_fp64(x: Tensor, weight: FourBitWeight) -> Tensor:
    return x.double() @ multiplied(weight, torch.float64).t()


@pytest.mark.parametrize(("rows", "k"), SHAPES)
@pytest.mark.parametrize(("group", "zeros"), KINDS)
def test_weights_are_dequantised_to_the_bit(rows: int, k: int, group: int, zeros: bool) -> None:
    weight = weight_of(rows, k, group, zeros=zeros)
    assert torch.equal(four_bit_dequantise(weight), dequantise(weight, BF16))


@pytest.mark.parametrize("tokens", [1, 16, 40, 64, 130, 256])
@pytest.mark.parametrize(("rows", "k"), SHAPES[1:])
@pytest.mark.parametrize("group", [128, GROUP])
def test_every_tile_that_the_tuner_times_is_right_and_the_same_each_time(group: int, rows: int, k: int, tokens: int) -> None:
    """One in three of them. Outputs are poisoned. INT4 weights that were not rounded to bf16, or NVFP4 weights that were, would
    differ by 2e-3."""
    weight = weight_of(rows, k, group)
    x = noise(tokens, weight.k)
    expected = in_fp64(x, weight)
    for tile in candidates(tokens, rows, weight.k, group, card_of(GPU))[::3]:
        outs = [torch.full((tokens, rows), torch.nan, device=GPU) for _ in range(2)]
        for out in outs:
            four_bit_linear(x, weight, tile=tile, out=out)
        assert torch.equal(*outs), tile
        assert_near(outs[0], expected, 2e-4)


@pytest.mark.parametrize(("group", "zeros"), [(128, False), (128, True), (GROUP, False)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_swiglu_is_that_of_its_rounded_product(tokens: int, group: int, zeros: bool) -> None:
    weight, x = four_bit_weight(2 * 1408, 2048, group, GPU, zeros=zeros), noise(tokens, 2048)
    for tile in candidates(tokens, 2 * 1408, 2048, group, card_of(GPU), gated=True)[::5]:
        gate, up = four_bit_linear(x, weight, tile=tile._replace(block_n=2 * tile.block_n)).chunk(2, -1)
        assert_near(four_bit_swiglu(x, weight, tile=tile), F.silu(gate.float()) * up.float(), 6e-3)


@pytest.mark.parametrize(("rows", "k"), SHAPES)
@pytest.mark.parametrize(("group", "zeros"), [(128, False), (32, True), (GROUP, False)])
def test_no_tile_and_no_number_of_tokens_changes_the_bits_of_a_product(rows: int, k: int, group: int, zeros: bool) -> None:
    """In tiles whose sums over K one program makes, with 16 to 256 tokens as the side N of the tensor cores."""
    weight = weight_of(rows, k, group, zeros=zeros)
    x = noise(max(COUNTS), weight.k)
    tiles = [Tile(t, n, 128, 3, warps, tma) for t, n, warps, tma in ((16, 64, 4, False), (64, 256, 8, True), (256, 128, 8, True))]

    def product(rows_of_x: Tensor, tile: Tile) -> Tensor:
        out = torch.empty(len(rows_of_x), rows, device=GPU)
        return four_bit_linear(rows_of_x, weight, tile=tile, out=out)

    whole = product(x, ordered_four_bit_tile(len(x)))
    for tokens in COUNTS:
        for tile in {ordered_four_bit_tile(1), ordered_four_bit_tile(2048), *tiles}:
            assert torch.equal(product(x[-tokens:], tile), whole[-tokens:]), (tile, tokens)
    order = torch.randperm(len(x), device=GPU)[:333]
    assert torch.equal(product(x[order], ordered_four_bit_tile(333)), whole[order])


@pytest.fixture(params=[True, False], ids=["early starts", "no early starts"])
def early(request: pytest.FixtureRequest) -> Iterator[None]:
    before = pdl.set_enabled(request.param)
    yield
    pdl.set_enabled(before)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("tokens", [1, 33, 1500])
def test_products_in_a_graph_read_what_the_ones_before_have_written(tokens: int) -> None:
    """A chain of products, each of which fetches its weights early, replayed on other inputs."""
    weights = [four_bit_weight(1024, 1024, 128, GPU, size=0.01) for _ in range(6)]
    products, x = [FourBitLinear([weight]) for weight in weights], noise(tokens, 1024)

    def chain(values: Tensor) -> Tensor:
        for product in products:
            values = product(values)
        return values

    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(3):
        x.copy_(noise(tokens, 1024))
        graph.replay()
        assert torch.equal(out, chain(x))


def test_the_library_multiplies_the_same_weights() -> None:
    weight, x = four_bit_weight(28672, 4096, 128, GPU), noise(2048, 4096)
    found = multiply_dequantised(x, weight)
    assert_near(found, in_fp64(x, weight), 4e-3)
    assert_near(found, four_bit_linear(x, weight, tile=ordered_four_bit_tile(2048)), 4e-3)
