"""Dense INT4 and NVFP4 products: those of the weights, of INT4 rounded once to bf16, whatever the groups are and however K is
divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.common.card import INTERPRETER, Card, assumed
from batchspec.kernels.common.four_bit import FourBitWeight, dequantise, multiplied
from batchspec.kernels.common.fp4 import GROUP
from batchspec.kernels.common.int4 import arrange, pack
from batchspec.kernels.common.nvfp4 import Nvfp4Weight, arranged
from batchspec.kernels.common.nvfp4 import dequantise as nvfp4_dequantise
from batchspec.kernels.gemm import four_bit_dequantise as dequantising
from batchspec.kernels.gemm.four_bit_dequantise import four_bit_dequantise, multiply_dequantised
from batchspec.kernels.gemm.four_bit_linear import four_bit_linear, four_bit_linear_reference, four_bit_swiglu
from batchspec.kernels.gemm.four_bit_tiles import MOST_TOKENS, candidates, fits, fitted, four_bit_tile, ordered_four_bit_tile
from batchspec.kernels.gemm.split_k import counters
from batchspec.kernels.gemm.tiles import Tile
from batchspec.tuning import policy
from batchspec.tuning.cards import known_card, known_cards
from tests.helpers.interpreter import dots_of_one_order
from tests.kernels.covering import covering
from tests.kernels.four_bit_cases import GROUPS, four_bit_weight
from tests.kernels.moe_cases import assert_near, noise

TILE = Tile(16, 64, 128, 2, 4, True)
TILES = [
    TILE, TILE._replace(split=2), Tile(16, 128, 128, 3, 4, False, split=4), Tile(32, 64, 128, 3, 4, False),
    Tile(16, 128, 128, 3, 8, True, split=3),
]
N, K, TOKENS = 208, 656, 21  # tails of tiles over rows of W, of blocks of K and of tiles over tokens; K has 6 blocks
TOLERANCE = 2e-5  # of sums in fp32; weights that were not rounded to bf16 would differ by 2e-3


def x_of(tokens: int, k: int, device: torch.device) -> Tensor:
    return noise(tokens, k, dtype=torch.bfloat16, device=device)


def by_definition(x: Tensor, weight: FourBitWeight, bias: Tensor | None = None) -> Tensor:
    """In fp64, with INT4 weights in bf16 and NVFP4 weights as they are."""
    y = x.double() @ multiplied(weight, torch.float64).t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("group", "zeros", "tile"), covering(GROUPS, [False, True], TILES))
def test_the_product_is_that_of_the_dequantised_weight(
    group: int, zeros: bool, tile: Tile, interpret: bool, device: torch.device
) -> None:
    """With 4 parts of 2 blocks the last part is empty."""
    weight, x = four_bit_weight(N, K, group, device, zeros=zeros), x_of(TOKENS, K, device)
    bias, out = noise(N, dtype=torch.bfloat16, device=device), torch.full((TOKENS, N), torch.nan, device=device)
    assert four_bit_linear(x, weight, bias, tile=tile, out=out, interpret=interpret) is out
    assert_near(out, by_definition(x, weight, bias), tolerance=TOLERANCE)
    assert_near(out, four_bit_linear_reference(x.double(), weight, bias), tolerance=TOLERANCE)
    assert four_bit_linear(x, weight, tile=tile, interpret=interpret).dtype is torch.bfloat16


@pytest.mark.parametrize(("rows", "k"), [(1, 8), (5, 128), (64, 120), (72, 264), (17, 136)])
@pytest.mark.parametrize("group", [16, 32])
def test_odd_sizes(group: int, rows: int, k: int, interpret: bool, device: torch.device) -> None:
    k = -(-k // group) * group if group == GROUP else k
    weight, x = four_bit_weight(rows, k, group, device, zeros=True), x_of(3, k, device)
    for tile in (TILE, TILE._replace(tma=False, split=2)):
        out = torch.full((3, rows), torch.nan, device=device)
        four_bit_linear(x, weight, tile=tile, out=out, interpret=interpret)
        assert_near(out, by_definition(x, weight), tolerance=TOLERANCE)


@pytest.mark.parametrize("zeros", [False, True])
def test_every_code_with_every_zero_point_and_extreme_scales(zeros: bool, device: torch.device) -> None:
    """Row n has code n % 16 and zero point n / 16; rows of x pick one column of each part of a block. To the bit."""
    k, n = 128, 256
    codes = (torch.arange(n, device=device) % 16).to(torch.uint8)[:, None].expand(n, k).contiguous()
    points = (torch.arange(n, device=device) // 16).to(torch.uint8)[:, None] if zeros else None
    x = torch.zeros(4, k, dtype=torch.bfloat16, device=device)
    x[torch.arange(4), torch.tensor([0, 33, 95, 127])] = 1.0
    for scale in (2.0**-100, -(2.0**-14) * 1.3671875, 0.00390625, 1.3671875, -7.96875):
        scales = torch.full((n, 1), scale, dtype=torch.bfloat16, device=device)
        weight = arrange(pack(codes), scales, points, k)
        out = torch.full((4, n), torch.nan, device=device)
        four_bit_linear(x, weight, tile=TILE, out=out, interpret=True)
        assert torch.equal(out, dequantise(weight, torch.bfloat16).float().t()[:1].expand(4, n))


def test_every_code_with_every_scale_of_nvfp4(device: torch.device) -> None:
    """Row n has code n % 16 and the scale of byte n / 16 in one group of a block, in the others 1; rows of x pick two columns of
    that group. To the bit, with a row scale of one bit."""
    k, n = 128, 16 * 0x7F
    codes = (torch.arange(n, device=device) % 16).to(torch.uint8)[:, None].expand(n, k // 2)
    x = torch.zeros(2, k, dtype=torch.bfloat16, device=device)
    for group in range(8):
        scales = torch.full((n, 8), 0x38, dtype=torch.uint8, device=device)
        scales[:, group] = torch.arange(n, device=device) // 16
        row_scales = torch.full((n,), 2.0**-5, device=device)
        numbers = Nvfp4Weight((codes | codes << 4).contiguous(), scales.view(torch.float8_e4m3fn), row_scales, False)
        x.zero_()
        x[torch.arange(2), torch.tensor([16 * group + 2, 16 * group + 13])] = 1.0
        out = torch.full((2, n), torch.nan, device=device)
        four_bit_linear(x, arranged(numbers), tile=Tile(16, 256, 128, 2, 4, False), out=out, interpret=True)
        assert torch.equal(out, nvfp4_dequantise(numbers, torch.float32)[:, 16 * group].expand(2, n))


def test_nvfp4_is_more_exact_than_the_product_of_rounded_weights(interpret: bool, device: torch.device) -> None:
    """By what rounding to bf16 changes of each weight: at most 2^-9 of it, about 2^-10 of a sum by the norm."""
    weight, x = four_bit_weight(N, K, GROUP, device), x_of(TOKENS, K, device)
    out = torch.full((TOKENS, N), torch.nan, device=device)
    four_bit_linear(x, weight, tile=TILE, out=out, interpret=interpret)
    exact, rounded = by_definition(x, weight), x.double() @ dequantise(weight, torch.bfloat16).double().t()
    assert_near(out, exact, tolerance=TOLERANCE)
    assert_near(out, rounded, tolerance=2.0**-9)
    assert float((out - rounded).norm() / rounded.norm()) > 2.0**-11
    most = x.double().abs() @ dequantise(weight, torch.float64).abs().t() * 2.0**-9
    assert bool(((out - rounded).abs() <= most * 1.01).all())


@pytest.mark.parametrize("group", [16, 32, 128])
def test_a_slice_of_rows_and_of_columns_of_wider_rows(group: int, interpret: bool, device: torch.device) -> None:
    weight, wide = four_bit_weight(N, 256, group, device, zeros=True), x_of(TOKENS, 264, device)
    for x in (wide[:, :256], wide[:, 8:], wide[:, 3:259]):
        for tile in (TILE, TILE._replace(split=2)):
            part = weight.rows(slice(48, 200))
            out = torch.full((TOKENS, 152), torch.nan, device=device)
            found = four_bit_linear(x, part, tile=tile, out=out, interpret=interpret)
            assert_near(found, by_definition(x, weight)[:, 48:200], tolerance=TOLERANCE)


@pytest.mark.parametrize("tile", [TILE, Tile(32, 32, 128, 2, 4, False, split=3)])
@pytest.mark.parametrize(("group", "zeros"), [(128, False), (64, True), (16, False)])
def test_swiglu(group: int, zeros: bool, tile: Tile, interpret: bool, device: torch.device) -> None:
    weight, x = four_bit_weight(2 * 80, K, group, device, zeros=zeros), x_of(TOKENS, K, device)
    bias = noise(160, dtype=torch.bfloat16, device=device)
    gate, up = by_definition(x, weight, bias).chunk(2, -1)
    out = torch.full((TOKENS, 80), torch.nan, dtype=torch.bfloat16, device=device)
    four_bit_swiglu(x, weight, bias, tile=tile, out=out, interpret=interpret)
    assert_near(out, F.silu(gate) * up, tolerance=1.5e-2)  # three roundings, in the interpreter cuts


def test_counters_are_zero_after_a_product_so_that_the_next_one_is_right(device: torch.device) -> None:
    weight, x = four_bit_weight(N, K, 128, device), x_of(TOKENS, K, device)
    first, second = (four_bit_linear(x, weight, tile=TILE._replace(split=3), interpret=True) for _ in range(2))
    assert torch.equal(first, second)
    assert not counters(device).any()


def test_nan_of_a_token_stays_in_its_row(device: torch.device) -> None:
    x = x_of(TOKENS, K, device)
    x[3, 200] = torch.nan
    y = four_bit_linear(x, four_bit_weight(N, K, 64, device), tile=TILE._replace(split=3), interpret=True)
    assert y.isfinite().all(1).tolist() == [row != 3 for row in range(TOKENS)]


def test_no_tokens(device: torch.device) -> None:
    assert four_bit_linear(x_of(0, K, device), four_bit_weight(N, K, 128, device), tile=TILE, interpret=True).shape == (0, N)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    weight, nvfp4, x = four_bit_weight(N, K, 128, device), four_bit_weight(N, K, GROUP, device), x_of(4, K, device)
    for message, rows, own, tile in [
        ("four_bit_linear: x", x.float(), weight, TILE),
        ("four_bit_linear: words", x, replace(weight, k=K + 128), TILE),
        ("four_bit_linear: scales", x, replace(weight, scales=weight.scales.float()), TILE),
        ("four_bit_linear: scales", x, replace(weight, group_size=64), TILE),
        ("four_bit_linear: scales", x, replace(nvfp4, scales=nvfp4.scales.bfloat16()), TILE),
        ("four_bit_linear: row_scales", x, replace(nvfp4, row_scales=nvfp4.scales.float()), TILE),
        ("groups of 48 columns; must be 32, 64, whole blocks of 128, or all of a row", x, replace(weight, group_size=48), TILE),
        ("block_k must be 128", x, weight, TILE._replace(block_k=64)),
        ("per_sm 0", x, weight, TILE._replace(per_sm=1)),
    ]:
        with pytest.raises(ValueError, match=message):
            four_bit_linear(rows if "words" not in message else x_of(4, K + 128, device), own, tile=tile, interpret=True)
    with pytest.raises(ValueError, match="four_bit_swiglu: 104 outputs of a weight; must be a multiple of 16"):
        four_bit_swiglu(x, weight, tile=TILE, interpret=True)
    wide = four_bit_weight(64 * 8193, 8, 0, device)
    with pytest.raises(ValueError, match="8193 tiles split along K; at most 8192"):
        four_bit_linear(x_of(1, 8, device), wide, tile=TILE._replace(split=2), interpret=True)


# --- dequantised


@pytest.mark.parametrize(("group", "zeros"), covering(GROUPS, [False, True]))
def test_a_dequantised_weight_has_the_bits_of_the_definition(
    group: int, zeros: bool, interpret: bool, device: torch.device
) -> None:
    weight = four_bit_weight(N - 3, K, group, device, zeros=zeros)
    out = torch.full((N - 3, K), torch.nan, dtype=torch.bfloat16, device=device)
    four_bit_dequantise(weight, out=out, interpret=interpret)
    expected = dequantise(weight, torch.bfloat16)
    if interpret and device.type == "cpu" and group == GROUP:  # the interpreter cuts bf16 off
        expected = (dequantise(weight, torch.float32).view(torch.int32) & -0x10000).view(torch.float32).bfloat16()
    assert torch.equal(out, expected)
    assert torch.equal(four_bit_dequantise(weight.rows(slice(16, 100)), interpret=interpret), out[16:100])


def test_large_weights_are_dequantised_in_pieces(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    weight, x, bias = four_bit_weight(N, K, 64, device), x_of(5, K, device), noise(N, dtype=torch.bfloat16, device=device)
    whole = [multiply_dequantised(x, weight, own) for own in (bias, None)]
    monkeypatch.setattr(dequantising, "PIECE", 50 * K)
    for own, expected in zip((bias, None), whole, strict=True):
        for found in (multiply_dequantised(x, weight, own), expected):
            assert_near(found, by_definition(x, weight, own), tolerance=4e-3)


# --- tiles


CARDS = [INTERPRETER, *(known.card for known in known_cards() if known.card.computes_bf16)]
SHAPES = st.tuples(
    st.integers(1, 1200), st.integers(2, 60000), st.integers(1, 30000), st.sampled_from([0, 16, 128]), st.sampled_from(CARDS)
)


@given(shape=SHAPES, gated=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_rule_gives_tiles_that_the_kernel_takes(shape: tuple[int, int, int, int, Card], gated: bool) -> None:
    tokens, _, k, _, card = shape
    rule, every = four_bit_tile(*shape, gated=gated), candidates(*shape, gated=gated)
    assert (rule is None) == (tokens > MOST_TOKENS)
    assert every[0] == rule or rule is None
    assert len(set(every)) == len(every)
    for tile in every:
        assert (tile.block_k, tile.per_sm) == (128, 0)
        assert tile.block_n % 16 == 0
        assert fits(tile, card, gated=gated)
        assert tile.stages >= 2
        assert card.has_tma or not tile.tma
        assert tile.split == 1 or tile.split <= -(-k // 128) // 4
        if tile.direct:
            assert card.has_wgmma
            assert tile.block_n in ({16 * tile.warps} if gated else {16 * tile.warps, 32 * tile.warps})


@pytest.mark.parametrize(
    ("rows", "k", "tokens", "programs", "direct"),
    [
        (6144, 4096, 16, 384, True), (4096, 4096, 16, 256, True), (28672, 4096, 16, 224, True), (4096, 14336, 16, 256, True),
        (6144, 4096, 64, 192, True), (4096, 4096, 64, 128, True), (28672, 4096, 64, 224, True), (4096, 14336, 64, 128, True),
        (6144, 4096, 256, 192, False), (4096, 4096, 256, 256, False), (28672, 4096, 256, 448, False),
        (4096, 14336, 256, 256, False),
    ],
)
def test_the_rule_divides_products_of_an_8b_on_an_h200_as_measured(
    rows: int, k: int, tokens: int, programs: int, direct: bool
) -> None:
    tile = four_bit_tile(tokens, rows, k, 128, known_card("H200").card)
    assert tile is not None
    assert -(-rows // tile.block_n) * -(-tokens // tile.block_m) * tile.split == programs
    assert tile.direct == direct


@pytest.mark.parametrize(("tokens", "gated", "group", "direct"), [
    (256, False, 16, True), (256, False, 128, False), (64, True, 16, False), (32, True, 128, True), (65, False, 0, False),
])
def test_which_products_load_weights_directly(tokens: int, gated: bool, group: int, direct: bool) -> None:
    """On Hopper alone, as chosen for a GPU too."""
    for name, expected in (("H200", direct), ("B200", False), ("A100-80GB", False)):
        card = known_card(name).card
        tile = four_bit_tile(tokens, 4096, 4096, group, card, gated=gated)
        assert tile is not None
        assert tile.direct == expected
        with assumed(card):
            assert policy.four_bit_tile(tokens, 4096, 4096, group, torch.device("cpu"), gated=gated) == tile


def test_a_step_of_a_direct_tile_takes_two_blocks_of_x_of_shared_memory() -> None:
    tile = Tile(256, 64, 128, 2, 4, True, direct=True)
    assert fitted(tile, known_card("H200").card, gated=False).stages == 1
    assert fitted(tile._replace(block_m=128), known_card("H200").card, gated=False).stages == 2


@pytest.mark.second
@pytest.mark.parametrize(("group", "gated"), covering([16, 32, 128, 0], [False, True]))
def test_a_token_has_the_same_bits_in_every_number_of_tokens_and_in_any_order(
    group: int, gated: bool, device: torch.device
) -> None:
    """With the tiles of decode.deterministic: 1 to 200 tokens in one launch, alone, among others, shuffled."""
    k, most = 272, 200
    weight, wide = four_bit_weight(96, k, group, device, zeros=True), x_of(most, k, device)

    def product(x: Tensor) -> Tensor:
        tile = ordered_four_bit_tile(len(x), gated=gated)
        return (four_bit_swiglu if gated else four_bit_linear)(x, weight, tile=tile, interpret=True)

    with dots_of_one_order():
        whole = product(wide)
        for first, tokens in ((0, 1), (199, 1), (5, 7), (100, 64), (1, 65)):
            assert torch.equal(product(wide[first : first + tokens]), whole[first : first + tokens]), (first, tokens)
        order = torch.randperm(100, device=device)
        assert torch.equal(product(wide[order]), whole[order])


def test_one_program_sums_all_of_k_in_every_tile_of_one_order() -> None:
    assert {ordered_four_bit_tile(tokens).split for tokens in (1, 16, 64, 65, 2048)} == {1}


def test_other_splits_have_other_bits(device: torch.device) -> None:
    """A split changes the order of sums; otherwise the test above could not fail."""
    weight, x = four_bit_weight(N, K, 128, device), x_of(64, K, device)
    outs = [torch.empty(64, N, device=device) for _ in range(2)]
    for out, split in zip(outs, (1, 2), strict=True):
        four_bit_linear(x, weight, tile=TILE._replace(split=split), out=out, interpret=True)
    assert not torch.equal(*outs)
