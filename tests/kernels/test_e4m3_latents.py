"""Latents in e4m3: their scales and errors, their place in pages, and both kernels against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchspec.kernels.common.card import INTERPRETER
from batchspec.kernels.latent.e4m3_latents import Fp8Latents, scales_of, token_bytes
from batchspec.kernels.latent.settings import keys_first, latent_config, latent_tile
from batchspec.kernels.latent.write_latents import write_latents
from batchspec.tuning.cards import known_card
from tests.kernels.attention_cases import PAGE_SIZE
from tests.kernels.covering import covering
from tests.kernels.test_verify_latents import NAN, RAGGED, TOLERANCE, by_hand
from tests.kernels.test_verify_latents import Case as Attended
from tests.kernels.test_write_latents import EPS, SLOTS
from tests.kernels.test_write_latents import Case as Written

NUM_PAGES = 3


def empty_pages(num_pages: int, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Fp8Latents:
    """What nothing has written is NaN, in e4m3 and in other dtypes."""
    width = token_bytes(*sizes, dtype)
    return Fp8Latents.of(torch.full((num_pages, PAGE_SIZE, width), 0xFF, dtype=torch.uint8, device=device), *sizes, dtype)


def test_a_token_of_glm_4_7_flash_takes_644_bytes_and_the_parts_of_a_page_begin_at_multiples_of_16() -> None:
    assert token_bytes(512, 64, torch.bfloat16) == 512 + 2 * 64 + 4
    pages = empty_pages(2, (512, 64), torch.bfloat16, torch.device("cpu"))
    for part in (pages.latents, pages.rotated, pages.scales):
        assert all(part[page].data_ptr() % 16 == 0 for page in range(2))
    assert token_bytes(256, 64, torch.bfloat16) == 388
    assert [token_bytes(7, 4, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [20, 28, 48]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 2, 3, 7])
def test_parts_of_a_page_do_not_overlap(page_size: int, dtype: torch.dtype) -> None:
    pages = Fp8Latents.of(torch.zeros(3, page_size, token_bytes(7, 4, dtype), dtype=torch.uint8), 7, 4, dtype)
    for value, part in enumerate((pages.latents, pages.rotated, pages.scales), 1):
        part.fill_(value)
    assert [part.unique().tolist() for part in (pages.latents, pages.rotated, pages.scales)] == [[1], [2], [3]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_scale_is_the_least_power_of_two_with_which_all_numbers_fit(dtype: torch.dtype) -> None:
    largest = torch.tensor([448.0, 449.0, 1.0, 0.875, 0.0, 3e-38, 2.0**100, 1.5], dtype=dtype)
    expected = [1.0, 2.0, 2.0**-8, 2.0**-9, 2.0**-100, 2.0**-100, 2.0**92, 2.0**-8]
    latents = torch.stack((-largest, largest / 3, largest * 0), 1)
    if dtype is torch.bfloat16:
        largest[1], latents[1] = 450.0, torch.tensor([450.0, 1.0, 0.0])
    assert scales_of(latents).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_differs_by_a_16th_of_it_or_a_1024th_of_the_scale(dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(40, 24, generator=noise, dtype=torch.float64)
    latents *= 10.0 ** torch.randint(-9, 6, (40, 24), generator=noise)
    latents, rotated = latents.to(dtype), torch.randn(40, 6, generator=noise).to(dtype)
    pages, slots = empty_pages(NUM_PAGES, (24, 6), dtype, torch.device("cpu")), torch.randperm(NUM_PAGES * PAGE_SIZE)[:40]
    pages.write(latents, rotated, slots)
    found, turned = pages.read(slots)
    assert torch.equal(turned, rotated)
    error, limit = (found - latents).abs().double(), latents.abs().double() / 16
    least = scales_of(latents).double()[:, None] / 1024
    assert bool((error <= torch.maximum(limit, least)).all())
    assert float((error / torch.maximum(limit, least)).max()) > 0.9, "the bound is not tight"
    again = empty_pages(NUM_PAGES, (24, 6), dtype, torch.device("cpu"))
    again.write(found, rotated, slots)
    assert torch.equal(again.read(slots)[0], found), "what was read is written without another error"


def written(case: Written, *, interpret: bool) -> Fp8Latents:
    sizes = len(case.weight), 2 * len(case.freqs)
    pages = empty_pages(NUM_PAGES, sizes, case.rows.dtype, case.rows.device)
    write_latents(
        case.rows, case.q.clone(), case.positions, case.freqs, case.weight, pages, SLOTS.to(case.rows.device), eps=EPS,
        attention_factor=case.factor, interleaved=case.interleaved, interpret=interpret,
    )
    return pages


@pytest.mark.parametrize(
    ("dtype", "sizes"), covering([torch.float64, torch.float32, torch.bfloat16], [(24, 6), (512, 64), (7, 2)], one_in=2)
)
def test_what_is_written_is_the_rounded_vector_and_nothing_else_is(
    dtype: torch.dtype, sizes: tuple[int, int], interpret: bool, device: torch.device
) -> None:
    case = Written.of(device, dtype=dtype, sizes=sizes)
    pages, (vectors, _) = written(case, interpret=interpret), case.expected()
    found, rotated = (part.double().cpu() for part in pages.read(SLOTS.to(device)))
    exact = vectors[:, : sizes[0]]
    limit = torch.maximum(exact.abs() / 16, scales_of(exact).double()[:, None] / 512)
    slack = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2**-5}[dtype]  # of computing the vector itself
    assert bool(((found - exact).abs() <= limit + slack * (1 + exact.abs())).all())
    torch.testing.assert_close(rotated, vectors[:, sizes[0] :], atol=slack, rtol=slack)
    untouched = torch.ones(NUM_PAGES * PAGE_SIZE, dtype=torch.bool).index_fill(0, SLOTS, False)
    for part in (pages.latents, pages.rotated, pages.scales):
        raw = part.contiguous().view(torch.uint8).cpu().reshape(len(untouched), -1)
        assert bool((raw[untouched] == 0xFF).all())


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("place", [3, 25])
def test_a_token_that_is_not_finite_has_finite_latents_and_keys_of_nan(
    value: float, place: int, interpret: bool, device: torch.device
) -> None:
    case = Written.of(device)
    case.rows[2, place] = value
    latents, rotated = written(case, interpret=interpret).read(SLOTS.to(device))
    assert bool(latents.isfinite().all())
    assert rotated.isnan().all(1).tolist() == [False, False, True, False, False]


def in_e4m3(case: Attended) -> tuple[Attended, Fp8Latents]:
    """The same rows with their latents in e4m3; and with the numbers that these stand for."""
    size = case.q_latent.shape[2]
    rope = case.latents.shape[2] - size
    pages = empty_pages(len(case.latents), (size, rope), case.latents.dtype, case.latents.device)
    vectors = case.latents.flatten(0, 1)
    slots = vectors.isfinite().all(1).nonzero().flatten()
    pages.write(vectors[slots, :size], vectors[slots, size:], slots)
    read = case.latents.clone()
    read.flatten(0, 1)[slots] = torch.cat(pages.read(slots), 1)
    return replace(case, latents=read), pages


def attended(case: Attended, pages: Fp8Latents, *, interpret: bool, programs: int) -> Tensor:
    return replace(case, latents=pages).run(interpret=interpret, programs=programs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "sink"), [(0, 0), (20, 5)])
def test_rows_attend_to_the_numbers_that_are_stored(
    window: int, sink: int, dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    case, pages = in_e4m3(Attended.of(RAGGED, padding=3, window=window, sink=sink, dtype=dtype, device=device))
    for programs in (1, 40):
        out = attended(case, pages, interpret=interpret, programs=programs)
        torch.testing.assert_close(out.double().cpu(), by_hand(case), atol=TOLERANCE[dtype], rtol=0)
        assert not out[5:7].any()  # the dead row
        assert not out[11:].any()  # the padding


@pytest.mark.parametrize(
    ("heads", "dtype", "sizes"), covering([1, 4, 20], [torch.float32, torch.bfloat16], [(512, 64), (16, 8), (40, 6)], one_in=3)
)
def test_heads_sizes_and_dtypes(
    heads: int, dtype: torch.dtype, sizes: tuple[int, int], interpret: bool, device: torch.device
) -> None:
    tile = latent_tile(2 * heads, dtype, INTERPRETER, fp8=True)
    case, pages = in_e4m3(Attended.of([(2, 33), (1, 5)], heads=heads, dtype=dtype, sizes=sizes, tile=tile, device=device))
    out = attended(case, pages, interpret=interpret, programs=4)
    torch.testing.assert_close(out.double().cpu(), by_hand(case), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.slow
def test_tiles_of_64_lines(interpret: bool, device: torch.device) -> None:
    case, pages = in_e4m3(Attended.of([(13, 90), (1, 20)], heads=6, device=device, block=32))
    case = replace(case, shape=replace(case.shape, tile=64))
    torch.testing.assert_close(
        attended(case, pages, interpret=interpret, programs=1).double().cpu(), by_hand(case), atol=1e-5, rtol=0
    )


def test_tiles_have_64_lines_on_hopper_however_few_a_row_has_and_keys_are_second() -> None:
    hopper, ada = (known_card(name).card for name in ("H200", "L40S"))
    assert [latent_tile(20, torch.bfloat16, card, fp8=True) for card in (hopper, ada)] == [64, 32]
    assert [keys_first(32, torch.bfloat16, hopper, fp8=fp8) for fp8 in (False, True)] == [True, False]
    for dim in (256, 512):
        config = latent_config(dim, 64, torch.bfloat16, hopper, fp8=True)
        stages, copy = config.num_stages * config.block * (dim + 2 * 64 + 4), 2 * config.block * dim
        assert config.num_stages > 1
        assert stages + copy + 2 * 64 * (dim + 64 + config.block) <= hopper.block_shared_bytes


def test_each_token_is_read_with_its_own_scale(interpret: bool, device: torch.device) -> None:
    """Two tokens exchange scales that differ: their latents are multiplied by the ratio of the scales."""
    case, pages = in_e4m3(Attended.of([(1, 40)], device=device))
    before, scales, size = by_hand(case), pages.scales.flatten(), case.q_latent.shape[2]
    used = case.latents.flatten(0, 1).isfinite().all(1).nonzero().flatten()
    low, high = used[scales[used].argmin()], used[scales[used].argmax()]
    ratio = scales[high] / scales[low]
    assert ratio > 1
    latents, rest = case.latents.clone(), pages.scales.clone()
    for token, factor in ((low, ratio), (high, 1 / ratio)):
        latents.flatten(0, 1)[token, :size] *= factor
    rest.flatten()[torch.stack([low, high])] = scales[torch.stack([high, low])]
    pages.scales.copy_(rest)
    case = replace(case, latents=latents)
    out = attended(case, pages, interpret=interpret, programs=1).double().cpu()
    torch.testing.assert_close(out, by_hand(case), atol=1e-5, rtol=0)
    assert float((out - before).abs().max()) > 0.01


@pytest.mark.parametrize(("dtype", "exponents"), [(torch.float32, (-60, 60)), (torch.float16, (-14, 13))])
def test_scales_of_a_row_may_differ_by_any_factor(
    dtype: torch.dtype, exponents: tuple[int, int], interpret: bool, device: torch.device
) -> None:
    """All keys have similar weights, so that a mean is that of its largest latents; one latent is all zeros."""
    case = Attended.of([(1, 60), (2, 17)], dtype=dtype, device=device)
    factors = 2.0 ** torch.randint(*exponents, (*case.latents.shape[:2], 1)).to(device)
    latents = case.latents.clone()
    latents[..., :24] = (latents[..., :24] * factors).to(dtype).clamp(-6e4, 6e4)
    latents.flatten(0, 1)[latents.flatten(0, 1).isfinite().all(1).nonzero()[3], :24] = 0.0
    case, pages = in_e4m3(replace(case, latents=latents, q_latent=torch.zeros_like(case.q_latent)))
    expected = by_hand(case)
    for programs in (1, 40):
        out = attended(case, pages, interpret=interpret, programs=programs).double().cpu()
        torch.testing.assert_close(out / expected.abs().amax(), expected / expected.abs().amax(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 2.0**20), (torch.float16, 2.0**14)])
def test_queries_above_the_range_of_fp16_or_near_its_end(
    dtype: torch.dtype, factor: float, interpret: bool, device: torch.device
) -> None:
    case, pages = in_e4m3(Attended.of([(1, 40), (2, 17)], dtype=dtype, device=device))
    expected = by_hand(case)
    case = replace(case, q_latent=case.q_latent * factor, q_rope=case.q_rope * factor, scale=case.scale / factor)
    assert float(case.q_latent.abs().max()) > 2.0**15
    out = attended(case, pages, interpret=interpret, programs=1).double().cpu()
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_draft_that_is_not_finite_reaches_the_queries_that_see_it_and_no_others(
    dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    """It is stored as zeros and a rotated part of NaN."""
    case, pages = in_e4m3(Attended.of([(4, 100), (1, 40)], dtype=dtype, device=device))
    expected, slot = by_hand(case), (int(case.page_table[0, 98 // PAGE_SIZE]), 98 % PAGE_SIZE)
    pages.latents[slot], pages.rotated[slot], pages.scales[slot] = 0, NAN, 2.0**-100
    for programs in (1, 40):
        out = attended(case, pages, interpret=interpret, programs=programs).double().cpu()
        assert out.isnan().all(2).all(1).tolist() == [False, False, True, True, False]
        torch.testing.assert_close(out[[0, 1, 4]], expected[[0, 1, 4]], atol=TOLERANCE[dtype], rtol=0)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    case, pages = in_e4m3(Attended.of([(2, 9)], device=device))
    for wrong in (
        replace(pages, scales=pages.scales.double()), replace(pages, latents=pages.latents[..., 1:]),
        replace(pages, rotated=pages.rotated.half()),
    ):
        with pytest.raises(ValueError, match="verify_latents"):
            attended(case, wrong, interpret=True, programs=1)
