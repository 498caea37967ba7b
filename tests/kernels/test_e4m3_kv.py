"""K/V in e4m3: every kernel that writes, moves or reads it does to the bit what its reference does, and saturates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3, LARGEST, from_e4m3, movable, to_e4m3
from batchspec.kernels.kv_cache.kv_gather import kv_gather
from batchspec.kernels.kv_cache.kv_move import kv_move
from batchspec.kernels.kv_cache.kv_write import kv_write
from batchspec.kernels.norm_rope import rope_write as rope_module
from batchspec.kernels.norm_rope.rope_write import rope_write
from tests.kernels.attention_cases import Case, make_case, share
from tests.kernels.covering import covering
from tests.kernels.trees import ints

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POISON = 77
NAN = 0x7F


def pages(num_pages: int, page_size: int, heads: int, dim: int, device: torch.device) -> Tensor:
    return torch.full((2, num_pages, page_size, heads, dim), POISON, dtype=torch.uint8, device=device).view(E4M3)


def bits(kv: Tensor) -> Tensor:
    return movable(kv).flatten(1, 2)


def test_numbers_are_rounded_to_nearest_even_and_saturate() -> None:
    scale = torch.tensor([0.5])
    x = torch.tensor([0.5, 0.53125, 0.59375, 0.0, -0.5 * 2**-9, 0.5 * 2**-10, 224.0, 230.0, 1e30, -float("inf")])
    expected = [1.0, 1.0, 1.25, 0.0, -(2.0**-9), 0.0, 448.0, 448.0, 448.0, -448.0]
    assert to_e4m3(x, scale).float().tolist() == expected
    assert to_e4m3(x.double(), scale).float().tolist() == expected
    assert from_e4m3(to_e4m3(x, scale), scale, torch.float64).tolist() == [value / 2 for value in expected]


@pytest.mark.parametrize(("shape", "dtype"), covering([(3, 64), (5, 7), (8, 128)], DTYPES, one_in=2))
def test_written_keys_and_values_are_rounded_by_the_scale_of_their_head(
    shape: tuple[int, int], dtype: torch.dtype, interpret: bool, device: torch.device
) -> None:
    heads, dim = shape
    kv = pages(4, 5, heads, dim, device)
    scales = torch.rand(2, heads, device=device) * 0.1 + 0.001
    k, v = (torch.randn(2, 4, heads, dim, device=device) * torch.tensor([3.0, 300.0], device=device).view(2, 1, 1, 1)).to(dtype)
    k[0, 0, 0], k[1, 1, 1], v[2, 2, 2], v[3, 0, 0], k[3, 0, 0] = float("nan"), float("inf"), float("-inf"), 3e4, -3e4
    slots = torch.tensor([7, 19, 5, 12], device=device)
    kv_write(k, v, kv, slots, scales=scales, interpret=interpret)
    expected = bits(pages(4, 5, heads, dim, device))
    marked = torch.zeros(4, heads, dtype=torch.bool, device=device)
    marked[[0, 1, 2], [0, 1, 2]] = True
    expected[0, slots] = movable(to_e4m3(k, scales[0, :, None])).masked_fill(marked[:, :, None], NAN)
    expected[1, slots] = movable(to_e4m3(v.where(v.isfinite(), 0.0), scales[1, :, None]))
    assert torch.equal(bits(kv), expected)
    stored = kv.flatten(1, 2)[:, slots].float()
    assert stored[1, 3, 0, 0] == LARGEST
    assert stored[0, 3, 0, 0] == -LARGEST
    assert bool(stored[0][~marked].isfinite().all() and stored[1].isfinite().all())


@pytest.mark.parametrize(("many", "norms", "dtype"), covering([False, True], [False, True], DTYPES))
def test_rotated_keys_are_those_of_a_cache_of_their_dtype_rounded_once_more(
    many: bool, norms: bool, dtype: torch.dtype, interpret: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads, dim = 9, 3, 24
    monkeypatch.setattr(rope_module, "MANY_TOKENS", 1 if many else 1000)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    qkv[0, (heads + 1) * dim + 3], qkv[1, -1], qkv[2, -2] = float("nan"), float("inf"), 6e4
    gains = torch.randn(2, dim, device=device).to(dtype) if norms else [None, None]
    common: dict[str, Any] = {
        "attention_factor": 1.25, "q_norm": gains[0], "k_norm": gains[1], "eps": 1e-6, "interpret": interpret,
        "interleaved": norms,
    }
    positions, freqs = torch.randint(0, 9000, (5,), device=device), torch.rand(dim // 2, device=device)
    slots, scales = 4 + torch.randperm(5, device=device), torch.rand(2, kv_heads, device=device) * 0.02 + 0.001
    plain = torch.zeros(2, 4, 4, kv_heads, dim, dtype=dtype, device=device)
    kv, outs = pages(4, 4, kv_heads, dim, device), [qkv.new_empty(5, heads, dim) for _ in range(2)]
    rope_write(qkv, positions, freqs, plain, slots, out_q=outs[0], **common)
    rope_write(qkv, positions, freqs, kv, slots, out_q=outs[1], scales=scales, **common)
    assert torch.equal(*(out.nan_to_num() for out in outs))
    found = plain.flatten(1, 2)[:, slots]
    expected = movable(to_e4m3(found.nan_to_num(), scales[:, None, :, None])).masked_fill(found.isnan(), NAN)
    assert bool(found.isnan().any())
    assert torch.equal(bits(kv)[:, slots], expected)
    untouched = torch.ones(16, dtype=torch.bool, device=device)
    untouched[slots] = False
    assert bool((bits(kv)[:, untouched] == POISON).all())


def test_moved_keys_keep_their_bits(interpret: bool, device: torch.device) -> None:
    kv = torch.randint(0, 256, (2, 2, 5, 4, 3, 5), dtype=torch.uint8, device=device).view(E4M3)
    slots = torch.randperm(12, device=device) + 4
    before, expected = movable(kv).flatten(2, 3).clone(), movable(kv).flatten(2, 3).clone()
    expected[:, :, slots[[1, 2]]] = before[:, :, slots[[2, 5]]]
    kv_move(kv, slots, ints([[0, 2, 5, 5]], device), slots[:4].clone(), ints([2], device), interpret=interpret)
    assert torch.equal(movable(kv).flatten(2, 3), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_keys_are_rounded_once(dtype: torch.dtype, interpret: bool, device: torch.device) -> None:
    kv = torch.arange(2 * 6 * 4 * 3 * 80, device=device).to(torch.uint8).view(2, 6, 4, 3, 80).view(E4M3)
    scales, slots = torch.rand(2, 3, device=device), torch.randperm(24, device=device)[:11]
    k, v = kv_gather(kv, scales, slots, dtype=dtype, interpret=interpret)
    for found, part, scale in zip((k, v), kv, scales, strict=True):
        expected = from_e4m3(movable(part).flatten(0, 1)[slots].view(E4M3), scale[:, None], dtype)
        near = 2**-7 if interpret and dtype is torch.bfloat16 else 0.0  # the interpreter cuts bf16 off
        torch.testing.assert_close(found, expected, rtol=near, atol=0, equal_nan=True)


def in_e4m3(case: Case) -> tuple[Case, Tensor]:
    """The same batch over an e4m3 cache, and its scales."""
    scales = torch.rand(2, case.shape.kv_heads, device=case.kv.device) * 0.02 + 0.005
    stored = to_e4m3(case.kv, scales[:, None, None, :, None])
    return replace(case, kv=stored), scales


@pytest.mark.second
@pytest.mark.parametrize(
    ("dtype", "window", "tree", "shared"),
    [(torch.float32, 0, False, False), (torch.bfloat16, 20, False, False), (torch.float16, 0, True, False),
     (torch.bfloat16, 0, False, True), (torch.float32, 0, True, True), (torch.bfloat16, 24, True, False)],
)
def test_attention_reads_what_was_stored(
    dtype: torch.dtype, window: int, tree: bool, shared: bool, interpret: bool, device: torch.device
) -> None:
    case = make_case([(2, 100), (1, 120), (2, 66), (2, 0), (3, 33)], heads=(6, 2), dtype=dtype, window=window,
                     sink=3 if window else 0, padding=1, device=device)
    if shared:
        case = share(case, [([0, 2], 64), ([1], 16)])
    quantised, scales = in_e4m3(case)
    arguments: dict[str, Any] = {"scales": scales, "sink_logits": torch.linspace(-2, 2, 6, device=device)}
    if tree:
        start = (case.kv_len - 2).clamp(min=0)
        arguments |= {"tail_start": start, "ancestors": torch.full_like(case.positions, 0b101)}
    read_back = replace(case, kv=from_e4m3(quantised.kv, scales[:, None, None, :, None], torch.float32))
    for programs in (1, 40):
        work = quantised.work(interpret=interpret, programs=programs)
        out = quantised.run(work, interpret=interpret, **arguments)
        expected = read_back.expected(work, **{key: value for key, value in arguments.items() if key != "scales"})
        near = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(out.float(), expected, atol=near, rtol=0)
        assert not out[5:7].any()  # the dead row


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_queries_beyond_fp16_do_not_overflow(size: float, interpret: bool, device: torch.device) -> None:
    case = make_case([(2, 50), (1, 20)], dtype=torch.bfloat16, device=device)
    case = replace(case, q=case.q * 1.0)
    case.q[1] *= size
    quantised, scales = in_e4m3(case)
    work = quantised.work(interpret=interpret)
    out = quantised.run(work, interpret=interpret, scales=scales)
    expected = quantised.expected(work, scales=scales)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=0)


def test_a_key_that_is_not_finite_reaches_the_queries_that_see_it_and_no_others(interpret: bool, device: torch.device) -> None:
    quantised, scales = in_e4m3(make_case([(4, 100), (1, 40)], device=device))
    healthy = quantised.run(quantised.work(interpret=interpret), interpret=interpret, scales=scales)
    movable(quantised.kv)[0, int(quantised.page_table[0, 98 // 16]), 98 % 16] = NAN
    out = quantised.run(quantised.work(interpret=interpret), interpret=interpret, scales=scales)
    assert bool(out[2:4].isnan().all())
    assert torch.equal(out[[0, 1, 4]], healthy[[0, 1, 4]])


def test_wrong_arguments_are_refused() -> None:
    k, slots, scales = torch.zeros(3, 2, 8), torch.zeros(3, dtype=torch.int64), torch.ones(2, 2)
    kv = torch.zeros(2, 4, 4, 2, 8, dtype=E4M3)
    with pytest.raises(ValueError, match=r"kv_write: kv\[0\] is float8_e4m3fn .* must be float32"):
        kv_write(k, k, kv, slots)
    with pytest.raises(ValueError, match=r"kv_write: kv\[0\] is float32 .* must be float8_e4m3fn"):
        kv_write(k, k, torch.zeros(2, 4, 4, 2, 8), slots, scales=scales)
    with pytest.raises(ValueError, match=r"kv_write: scales is float32 \[2\]"):
        kv_write(k, k, kv, slots, scales=scales[0])
    with pytest.raises(ValueError, match=r"kv_gather: dtype is torch\.int32"):
        kv_gather(kv, scales, slots, dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_gather: slots is int32"):
        kv_gather(kv, scales, slots.int(), dtype=torch.float32)
