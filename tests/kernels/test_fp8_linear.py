"""Dense FP8 products: those of the quantised numbers, whatever the scales are of and however K is divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.common.card import INTERPRETER, Card
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.gemm.fp8_linear import fp8_linear, fp8_linear_reference
from batchspec.kernels.gemm.fp8_tiles import Fp8Tile, candidates, fp8_tile, ordered_fp8_tile
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_tokens
from batchspec.kernels.gemm.split_k import counters
from batchspec.tuning.cards import known_card
from tests.helpers.interpreter import dots_of_one_order
from tests.kernels.covering import covering
from tests.kernels.moe_cases import assert_near, fp8_tolerance, noise

TILE = Fp8Tile(16, 64, 2, 4)
SCALES = ["block", "row", "tensor"]
N, K, TOKENS = 208, 656, 21  # tails of tiles over rows of W, of blocks of K and of tiles over tokens


def weight_of(scales_of: str, device: torch.device, n: int = N, k: int = K) -> tuple[Tensor, Tensor]:
    shape = {"block": (-(-n // 128), -(-k // 128)), "row": (n,), "tensor": ()}[scales_of]
    return (torch.randn(n, k, device=device) * 50).to(E4M3), (torch.rand(shape, device=device) + 0.1) / 500


def tokens_of(num_tokens: int, scales_of: str, device: torch.device, k: int = K) -> Fp8Tokens:
    x = noise(num_tokens, k, dtype=torch.float32, device=device)
    return quantise_tokens(x, Fp8Form(whole=scales_of != "block"), interpret=True)


def by_definition(x: Fp8Tokens, weight: Tensor, scales: Tensor) -> Tensor:
    """In fp64, from dequantised matrices."""
    (n, k), rows = weight.shape, x.rows
    wide = rows.scales.T[: x.num_tokens].repeat_interleave(k if len(rows.scales) == 1 else 128, 1)[:, :k].double()
    if scales.dim() == 2:
        scales = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    elif scales.dim() == 1:
        scales = scales[:, None]
    return (rows.values[: x.num_tokens].double() * wide) @ (weight.double() * scales.double()).T


@pytest.mark.parametrize("scales_of", SCALES)
@pytest.mark.parametrize("tile", [TILE, TILE._replace(split=3), TILE._replace(split=4, tma=False), Fp8Tile(32, 128, 3, 4, 2)])
def test_the_product_is_that_of_the_quantised_numbers(
    scales_of: str, tile: Fp8Tile, interpret: bool, device: torch.device
) -> None:
    """K has 6 blocks: with 4 parts of 2 the last part is empty."""
    x, (weight, scales) = tokens_of(TOKENS, scales_of, device), weight_of(scales_of, device)
    bias = noise(N, dtype=torch.bfloat16, device=device)
    y = fp8_linear(x, weight, scales, bias, tile=tile, dtype=torch.float32, interpret=interpret)
    assert y.shape == (TOKENS, N)
    assert_near(y, by_definition(x, weight, scales) + bias.double(), tolerance=fp8_tolerance(device))
    assert_near(y, fp8_linear_reference(x, weight, scales, bias), tolerance=fp8_tolerance(device))
    assert fp8_linear(x, weight, scales, tile=tile, interpret=interpret).dtype == torch.bfloat16


def test_counters_are_zero_after_a_product_so_that_the_next_one_is_right(device: torch.device) -> None:
    x, (weight, scales) = tokens_of(TOKENS, "block", device), weight_of("block", device)
    tile = TILE._replace(split=3)
    first, second = (fp8_linear(x, weight, scales, tile=tile, interpret=True) for _ in range(2))
    assert torch.equal(first, second)
    assert not counters(device).any()


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("tma", [True, False])
def test_rows_past_the_tokens_change_nothing(split: int, tma: bool, device: torch.device) -> None:
    """They may hold NaN, in values and in scales."""
    x, (weight, scales) = tokens_of(TOKENS, "block", device), weight_of("block", device)
    tile = TILE._replace(split=split, tma=tma)
    outs = []
    for byte, scale in ((0x00, 1.0), (0x7F, torch.nan)):
        x.rows.values.view(torch.uint8)[TOKENS:] = byte
        x.rows.scales[:, TOKENS:] = scale
        outs.append(fp8_linear(x, weight, scales, tile=tile, interpret=True))
    assert len(x.rows.values) == 24
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def test_nan_of_a_token_stays_in_its_row(device: torch.device) -> None:
    wide = noise(TOKENS, K, dtype=torch.float32, device=device)
    wide[3, 200] = torch.nan
    weight, scales = weight_of("block", device)
    x = quantise_tokens(wide, Fp8Form(whole=False), interpret=True)
    y = fp8_linear(x, weight, scales, tile=TILE._replace(split=3), interpret=True)
    assert y.isfinite().all(1).tolist() == [row != 3 for row in range(TOKENS)]


def test_no_tokens(device: torch.device) -> None:
    weight, scales = weight_of("block", device)
    y = fp8_linear(tokens_of(0, "block", device), weight, scales, tile=TILE, interpret=True)
    assert y.shape == (0, N)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    x, (weight, scales) = tokens_of(4, "block", device), weight_of("block", device)
    cases = [
        ("scales of weight", x, weight, scales[:1], TILE),
        ("scales of x", x._replace(rows=x.rows._replace(scales=x.rows.scales[:1])), weight, scales, TILE),
        ("5 tokens in 4 rows", x._replace(num_tokens=5), weight, scales, TILE),
        ("block_n must divide 128", x, weight, scales, TILE._replace(block_n=256)),
        ("fp8_linear: weight", x, weight.float(), scales, TILE),
    ]
    for message, rows, w, s, tile in cases:
        with pytest.raises(ValueError, match=message):
            fp8_linear(rows, w, s, tile=tile, interpret=True)
    many, short = tokens_of(TOKENS, "row", device, 16), weight_of("row", device, 64 * 4097, 16)
    with pytest.raises(ValueError, match="tiles split along K; at most 8192"):
        fp8_linear(many, *short, tile=TILE._replace(split=2), interpret=True)


CARDS = [INTERPRETER, *(known_card(name).card for name in ("L40S", "H100-PCIe", "H200", "RTX-5090"))]
SHAPES = st.tuples(st.integers(1, 600), st.integers(1, 60000), st.integers(1, 30000), st.sampled_from(CARDS))


@given(shape=SHAPES, library=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_rule_gives_tiles_that_the_kernel_takes(shape: tuple[int, int, int, Card], library: bool) -> None:
    tile = fp8_tile(*shape, library=library)
    tokens, rows, k, card = shape
    assert tile is not None or (library and tokens > 32)
    assert tile is None or not library or tokens <= 128
    for own in [tile] if tile else []:
        assert own.block_t in (16, 32, 64, 128)
        assert own.block_n in (64, 128)
        assert own.stages >= 2
        assert own.tma == card.has_tma
        assert own.split == 1 or own.split <= -(-k // 128) // 8
        assert own.split == 1 or -(-tokens // own.block_t) * -(-rows // own.block_n) <= 8192
    every = candidates(*shape)
    assert every[0] == fp8_tile(*shape, library=False)
    assert len(set(every)) == len(every)
    assert all(own.block_t * own.block_n <= 64 * 32 * own.warps for own in every)


@pytest.mark.parametrize(
    ("rows", "k", "programs"), [(4096, 14336, 256), (6144, 4096, 192), (28672, 4096, 224), (2048, 4096, 128)]
)
def test_the_rule_fills_an_h200_at_few_tokens(rows: int, k: int, programs: int) -> None:
    tile = fp8_tile(32, rows, k, known_card("H200").card, library=True)
    assert tile is not None
    assert -(-rows // tile.block_n) * tile.split == programs


@pytest.mark.second
@pytest.mark.parametrize(("scales_of", "with_bias"), covering(SCALES, [False, True]))
def test_a_token_has_the_same_bits_in_every_number_of_tokens_and_in_any_order(
    scales_of: str, with_bias: bool, device: torch.device
) -> None:
    """With the tiles of decode.deterministic: 1 to 384 tokens in one launch, alone, among others, shuffled."""
    n, k, most = 72, 272, 384
    weight, scales = weight_of(scales_of, device, n, k)
    bias = noise(n, dtype=torch.bfloat16, device=device) if with_bias else None
    wide = noise(most, k, dtype=torch.bfloat16, device=device)
    form = Fp8Form(whole=scales_of != "block", scale=0.01 if scales_of == "tensor" else None)

    def product(x: Tensor) -> Tensor:
        rows, tile = quantise_tokens(x, form, interpret=True), ordered_fp8_tile(len(x))
        return fp8_linear(rows, weight, scales, bias, tile=tile, dtype=torch.float32, interpret=True)

    with dots_of_one_order():
        whole = product(wide)
        for first, tokens in ((0, 1), (383, 1), (5, 7), (100, 64), (1, 65), (3, 300)):
            assert torch.equal(product(wide[first : first + tokens]), whole[first : first + tokens]), (first, tokens)
        order = torch.randperm(200, device=device)
        assert torch.equal(product(wide[order]), whole[order])


def test_one_program_sums_all_of_k_in_every_tile_of_one_order() -> None:
    tiles = {ordered_fp8_tile(tokens) for tokens in (1, 2, 16, 64, 65, 128, 2048, 10**6)}
    assert all(tile.split == 1 and tile.block_n == 64 and tile.warps == 4 and tile.block_t >= 64 for tile in tiles)
    assert len(tiles) == 2


def test_other_splits_have_other_bits(device: torch.device) -> None:
    """A split changes the order of sums; otherwise the test above could not fail."""
    x, (weight, scales) = tokens_of(64, "block", device), weight_of("block", device)
    one, two = (fp8_linear(x, weight, scales, tile=TILE._replace(split=n), dtype=torch.float32, interpret=True) for n in (1, 2))
    assert not torch.equal(one, two)
