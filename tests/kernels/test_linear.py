"""Matrix products: whatever the cut, the result is that of the plain product; cut along K, it is the same in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.kernels.gemm.linear import (
    linear,
    linear_add,
    norm_linear,
    norm_reference,
    norm_swiglu,
    swiglu,
    swiglu_reference,
)
from batchspec.kernels.gemm.split_k import counters
from batchspec.kernels.gemm.tiles import BLOCKS, WHOLE, Tile, candidates
from batchspec.tuning.cards import known_card
from tests.kernels.covering import covering

DTYPES = [torch.float32, torch.bfloat16]
WHOLE_TILE = Tile(16, 32, 32, 2, 4, False)
SPLIT_2, SPLIT_3 = WHOLE_TILE._replace(split=2), WHOLE_TILE._replace(split=3)
STREAM = WHOLE_TILE._replace(per_sm=1)
CUTS = [WHOLE_TILE, SPLIT_2, SPLIT_3, STREAM, STREAM._replace(per_sm=2)]
EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def operands(tokens: int, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight of variance 1 / K, bias"""
    weight = torch.randn(rows, k, device=device) * k**-0.5
    return noise(tokens, k, dtype=dtype, device=device), weight.to(dtype), noise(rows, dtype=dtype, device=device)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_close(y: Tensor, wanted: Tensor) -> None:
    assert y.dtype == wanted.dtype
    tolerance = 1e-5 if y.dtype is torch.float32 else 0.03  # bf16: one place at values up to 8
    torch.testing.assert_close(y.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("tile", "tma", "dtype"), covering(CUTS, [False, True], DTYPES))
def test_every_cut_gives_the_product(tile: Tile, tma: bool, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    x, weight, bias = operands(21, 40, 136, dtype, device)  # no block divides its dimension
    out = poisoned(21, 40, dtype=dtype, device=device)
    assert linear(x, weight, bias, tile=tile._replace(tma=tma), out=out, interpret=interpret) is out
    assert_close(out, F.linear(x.float(), weight.float(), bias.float()).to(dtype))


@settings(max_examples=12, deadline=None)
@given(
    tokens=st.integers(1, 40), rows=st.integers(1, 70), k=st.integers(1, 150),
    split=st.integers(1, 5), per_sm=st.integers(0, 3), tma=st.booleans(),
)
def test_any_shape_and_cut(
    tokens: int, rows: int, k: int, split: int, per_sm: int, tma: bool, interpret: bool, device: torch.device
) -> None:
    x, weight, _ = operands(tokens, rows, k, torch.float32, device)  # K not a multiple of 4 cannot be read by descriptor
    tile = Tile(16, 32, 32, 2, 4, tma, split, per_sm)
    assert_close(linear(x, weight, tile=tile, interpret=interpret), F.linear(x, weight))


@settings(deadline=None)
@given(
    tokens=st.integers(1, 2000), n=st.integers(1, 9000), k=st.integers(1, 9000), split=st.integers(1, 20),
    per_sm=st.integers(0, 3), num_sms=st.integers(1, 200),
)
def test_programs_take_every_unit_once_and_pieces_have_slots_of_their_own(
    tokens: int, n: int, k: int, split: int, per_sm: int, num_sms: int
) -> None:
    tile = Tile(64, 128, 64, 4, 4, True, split, per_sm)
    work = tile.work(tokens, n, k, num_sms)
    k_blocks = -(-k // 64)
    units = work.num_tiles * k_blocks
    assert (work.num_programs - 1) * work.units_per_program < units <= work.num_programs * work.units_per_program
    if per_sm:
        assert work.num_programs <= num_sms * per_sm
    slots = []
    for program in range(min(work.num_programs, 200)):
        begin = program * work.units_per_program
        end = min(begin + work.units_per_program, units)
        slots += [t + program for t in range(begin // k_blocks, -(-end // k_blocks))]
    assert len(slots) == len(set(slots))
    assert max(slots) < work.num_slots


@pytest.mark.parametrize("tile", [SPLIT_3, STREAM])
def test_a_cut_product_repeats_bit_for_bit_and_leaves_its_counters_at_zero(tile: Tile, device: torch.device) -> None:
    x, weight, _ = operands(24, 64, 256, torch.float32, device)
    first = linear(x, weight, tile=tile, interpret=True)
    for _ in range(2):
        assert torch.equal(linear(x, weight, tile=tile, interpret=True), first)
    assert int(counters(device).abs().sum()) == 0


@pytest.mark.parametrize(("with_bias", "tile", "dtype"), covering([False, True], CUTS, DTYPES))
def test_residual_is_added_in_place(
    with_bias: bool, tile: Tile, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    x, weight, bias = operands(21, 40, 96, dtype, device)
    residual = noise(21, 40, dtype=dtype, device=device)
    wanted = residual + F.linear(x.float(), weight.float(), bias.float() if with_bias else None).to(dtype)
    linear_add(x, weight, bias if with_bias else None, residual=residual, tile=tile, interpret=interpret)
    assert_close(residual, wanted)


@pytest.mark.parametrize(("tile", "tma", "dtype"), covering(CUTS, [False, True], DTYPES))
def test_swiglu_is_silu_of_the_first_half_times_the_second(
    tile: Tile, tma: bool, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    x, weight, bias = operands(21, 2 * 40, 96, dtype, device)
    out = poisoned(21, 40, dtype=dtype, device=device)
    swiglu(x, weight, bias, tile=tile._replace(tma=tma), out=out, interpret=interpret)
    gate_up = F.linear(x.float(), weight.float(), bias.float()).to(dtype)  # rounded before the activation
    assert_close(out, F.silu(gate_up[:, :40]) * gate_up[:, 40:])


@pytest.mark.parametrize(("k", "tma", "dtype"), covering([64, 136], [False, True], DTYPES))
def test_norm_comes_before_the_product(k: int, tma: bool, dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    x, weight, bias = operands(21, 40, k, dtype, device)
    x *= torch.logspace(-2, 2, 21, device=device)[:, None].to(dtype)  # rows of very different size
    x[3] = 0
    norm = noise(k, dtype=dtype, device=device)
    tile = WHOLE_TILE._replace(tma=tma)
    normed = norm_reference(x, norm, EPS)
    out = poisoned(21, 40, dtype=dtype, device=device)
    norm_linear(x, norm, weight, bias, eps=EPS, tile=tile, out=out, interpret=interpret)
    assert_close(out, F.linear(normed.float(), weight.float(), bias.float()).to(dtype))
    gated = norm_swiglu(x, norm, weight, bias, eps=EPS, tile=tile, interpret=interpret)
    assert_close(gated, swiglu_reference(normed.float(), weight.float(), bias.float()).to(dtype))


def test_rows_of_a_wider_input_are_read_in_place(interpret: bool, device: torch.device) -> None:
    wide = poisoned(20, 200, dtype=torch.float32, device=device)
    x, weight, _ = operands(10, 24, 64, torch.float32, device)
    wide[::2, 8:72] = x
    for tma in (False, True):
        y = linear(wide[::2, 8:72], weight, tile=SPLIT_2._replace(tma=tma), interpret=interpret)
        assert_close(y, F.linear(x, weight))


def test_no_tokens_is_no_work(interpret: bool, device: torch.device) -> None:
    x, weight, _ = operands(0, 24, 64, torch.float32, device)
    assert linear(x, weight, tile=SPLIT_2, interpret=interpret).shape == (0, 24)


def test_wrong_arguments_are_refused() -> None:
    x, weight = torch.zeros(4, 64), torch.zeros(24, 64)
    with pytest.raises(ValueError, match=r"linear: weight is float32 \[24, 64\].*must be float32 \[24, 32\]"):
        linear(x[:, :32], weight, tile=WHOLE_TILE, interpret=True)
    with pytest.raises(ValueError, match="linear: weight is bfloat16"):
        linear(x, weight.bfloat16(), tile=WHOLE_TILE, interpret=True)
    with pytest.raises(ValueError, match="linear: x is float64"):
        linear(x.double(), weight, tile=WHOLE_TILE, interpret=True)
    with pytest.raises(ValueError, match=r"linear: out is float32 \[4, 23\]"):
        linear(x, weight, tile=WHOLE_TILE, out=torch.zeros(4, 23), interpret=True)
    with pytest.raises(ValueError, match="the norm needs whole rows"):
        norm_linear(x, torch.ones(64), weight, eps=EPS, tile=SPLIT_2, interpret=True)
    with pytest.raises(ValueError, match="tiles split along K; at most"):
        linear(x, torch.zeros(16 * 8200, 64), tile=Tile(16, 16, 32, 2, 4, False, 2), interpret=True)


@pytest.mark.parametrize("op", BLOCKS)
@pytest.mark.parametrize("tokens", [1, 64, 192, 256, 1024])
@pytest.mark.parametrize(("rows", "k"), [(6144, 4096), (28672, 4096), (4096, 14336), (960, 576), (3072, 576), (576, 1536)])
def test_candidates_fit_the_op_and_the_gpu(op: str, tokens: int, rows: int, k: int) -> None:
    card = known_card("H200").card
    tiles = candidates(op, tokens, rows, k, card)
    assert len(tiles) == len(set(tiles))
    assert bool(tiles) == (not op.startswith("norm") or k <= 2048)
    gated = op.endswith("swiglu")
    for tile in tiles:
        assert (tile.block_m + tile.block_n * (1 + gated)) * tile.block_k * 2 * tile.stages <= card.block_shared_bytes
        assert not (op in WHOLE and tile.work(tokens, rows // (1 + gated), k, 132).split)
        assert tile._replace(tma=not tile.tma) in tiles
