"""The library's FP8 products get what they require, and nothing past the tokens reaches a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.gemm.fp8_linear import fp8_linear_reference
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, quantise_tokens
from batchspec.kernels.gemm.scaled_mm import is_right, library_scales, scaled_mm
from tests.helpers.scaled_mm import library_on_cpu
from tests.kernels.moe_cases import assert_near, noise

SIZES = [(256, 384), (128, 128), (384, 16 * 128), (128, 128 * 128)]


@pytest.fixture(autouse=True)
def library(device: torch.device) -> Iterator[None]:
    """On a GPU the library itself."""
    if device.type == "cuda":
        yield
        return
    with library_on_cpu():
        yield


def operands(n: int, k: int, tokens: int, blocked: bool, device: torch.device) -> tuple[Fp8Tokens, Tensor, Tensor]:
    x = quantise_tokens(noise(tokens, k, dtype=torch.float32, device=device), Fp8Form(whole=not blocked), interpret=True)
    for part in x.rows:  # the rows past the tokens are never written
        (part.view(torch.uint8)[tokens:] if part.dtype is E4M3 else part[:, tokens:]).fill_(
            0x7F if part.dtype is E4M3 else torch.nan
        )
    shape = (-(-n // 128), -(-k // 128)) if blocked else (n,)
    return x, (torch.randn(n, k, device=device) * 50).to(E4M3), (torch.rand(shape, device=device) + 0.1) / 500


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_the_product_is_ours(n: int, k: int, blocked: bool, tokens: int, device: torch.device) -> None:
    x, weight, scales = operands(n, k, tokens, blocked, device)
    own = library_scales(scales, n, k)
    assert own is not None
    found = scaled_mm(x, weight, own, blocked=blocked)
    assert found.shape == (tokens, n)
    assert found.dtype is torch.bfloat16
    assert_near(found, fp8_linear_reference(x, weight, scales), tolerance=4e-3)


@pytest.mark.parametrize(
    ("n", "k", "blocked", "fits"),
    [(256, 256, True, True), (272, 256, True, False), (256, 272, True, False), (272, 272, False, True), (264, 256, False, False),
     (256, 264, False, False)],
)
def test_what_the_library_cannot_multiply(n: int, k: int, blocked: bool, fits: bool, device: torch.device) -> None:
    _, _, scales = operands(n, k, 1, blocked, device)
    assert (library_scales(scales, n, k) is not None) == fits


def test_block_scales_are_padded_with_zeros(device: torch.device) -> None:
    scales = torch.rand(3, 5, device=device)
    padded = library_scales(scales, 384, 640)
    assert padded is not None
    assert padded.shape == (3, 8)
    assert torch.equal(padded[:, :5], scales)
    assert not padded[:, 5:].any()


@pytest.mark.parametrize("blocked", [True, False])
def test_no_tokens_and_rows_that_were_not_padded(blocked: bool, device: torch.device) -> None:
    x, weight, scales = operands(256, 384, 0, blocked, device)
    own = library_scales(scales, 256, 384)
    assert own is not None
    assert scaled_mm(x, weight, own, blocked=blocked).shape == (0, 256)
    odd = quantise_tokens(torch.zeros(3, 384, device=device), Fp8Form(whole=not blocked))
    if device.type == "cpu":
        with pytest.raises(ValueError, match="3 rows of x; must be a multiple of 4: use quantise_tokens"):
            scaled_mm(odd, weight, own, blocked=blocked)


@pytest.mark.parametrize("blocked", [True, False])
def test_a_library_that_is_wrong_or_refuses_is_found(
    blocked: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(device, blocked=blocked)
    place, name = (torch.nn.functional, "scaled_mm") if blocked else (torch, "_scaled_mm")
    right: Any = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **kwargs: right(*args, **kwargs) * 1.02)
    assert not is_right(device, blocked=blocked)

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("only on Hopper")

    monkeypatch.setattr(place, name, refuse)
    assert not is_right(device, blocked=blocked)
