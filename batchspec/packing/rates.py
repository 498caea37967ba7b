"""How fast a device is: measured rates of a known card, computed ones of another, or rates that are measured here.

The cost model (`cost.py`) divides bytes and operations by them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from batchspec.errors import ConfigError
from batchspec.kernels.common.card import assumed_card, card_of
from batchspec.model.dtype import dtype_name
from batchspec.model.quant.fp8_products import product_of_ones
from batchspec.tuning.cards import KnownCard, entry_of

CALIBRATED_TOKENS = (8, 32, 128, 256)
FP8_TOKENS = {"cpu": 64, "cuda": 2048}
"""Number of tokens of the W8A8 product that is measured: enough to be bound by arithmetic."""
SMALL_OPERATIONS = {"cpu": 3000, "cuda": 200}
"""Overhead of a forward pass of 30 layers, expressed as a number of small additions: in Python on a CPU, in a CUDA graph on a
GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The speed of a device."""

    name: str
    bytes_s: float
    """Memory read, bytes/s."""
    gemm: tuple[tuple[int, float], ...]
    """(tokens, flop/s) of matrix products with plain weights and this number of tokens, ascending."""
    overhead_s: float
    """Seconds of a forward pass besides memory and arithmetic."""
    layer_s: float = 0.0
    """Minimum seconds of a layer's products and norms, however small they are."""
    tile: int = 1
    """Tokens in a product's tile: above two tiles, the number of tokens is rounded up to a multiple of it."""
    fp8_speedup: float = 1.0
    """flop/s of W8A8 products of many tokens divided by those of plain products."""
    unpack_s: float = float("inf")
    """INT4 weights that are unpacked in a second, while nothing is multiplied."""
    unpack_tokens: int = 128
    """Number of tokens for which a weight is unpacked once."""

    def weight_bytes_s(self, dtype: torch.dtype) -> float:
        """Bytes/s at which products of few tokens read weights of `dtype`: the rate of the first measurement."""
        tokens, rate = self.gemm[0]
        return min(self.bytes_s, dtype.itemsize * rate / (2 * tokens))

    def product_flop_s(self, tokens: float, *, fp8: bool) -> float:
        """flop/s of products with this number of tokens and plain weights, as measured; fp8: of the arithmetic of W8A8
        products."""
        return self.fp8_speedup * self.full_flop_s if fp8 else self.flop_s(max(tokens, self.gemm[0][0]))

    @property
    def full_flop_s(self) -> float:
        """flop/s of plain products with many tokens. For packed and W8A8 weights it is that of any number of tokens: the rate
        measured with few is bound by reading plain weights."""
        return self.gemm[-1][1]

    def flop_s(self, tokens: float) -> float:
        """flop/s of plain products with this number of tokens, interpolated between measured points; fewer tokens than the first
        point take as long as the first."""
        first, rate = self.gemm[0]
        if tokens <= first:
            return rate * tokens / first
        return float(np.interp(tokens, [point for point, _ in self.gemm], [value for _, value in self.gemm]))


WEIGHT_SHARE, FLOP_SHARE = 0.9, 0.8
"""Shares of a data sheet's bandwidth and arithmetic that products reach. On an H200 reads reach 4.3 of 4.8 TB/s, and the formula
of `card_rates` lies within 12 % of the flop/s measured at 64 to 512 tokens."""
FP8_SHARE = 0.65
"""The speedup of W8A8 products by that of a data sheet: 1.3 of 2 on an H200."""
COMPUTED_TOKENS = (64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
LAUNCH_S, LAYER_S, TILE, UNPACK_S = 1e-4, 1.9e-5, 128, 9e10
"""Those of an H200, for all cards; UNPACK_S: INT4 weights that an SM unpacks in a second."""


def device_rates(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Rates:
    """In bf16 the rates of a GPU that the table knows as measured, and those of an assumed card; otherwise measured, in well
    under a second. fp8: W8A8 products too.

    Raises ConfigError for an assumed card and another dtype, whose times are not known.
    """
    card = assumed_card()
    if card is not None and dtype is not torch.bfloat16:
        name = dtype_name(dtype)
        raise ConfigError(
            f"model.dtype={name}: the times of {card.name} are known in bfloat16 alone; add model.dtype=bfloat16, or run "
            "plan on a machine with that card"
        )
    if device.type == "cuda" and dtype is torch.bfloat16:
        known = entry_of(card_of(device).name)
        if known is not None and (known.rates is not None or card is not None):
            return card_rates(known)
    return calibrate(device, dtype, fp8=fp8)


def card_rates(known: KnownCard) -> Rates:
    """The measured rates of a card in bf16, or computed ones: a product takes the time of reading the weight once, plus that of
    its arithmetic.

    Rates of the H200: Llama-3.1-8B shape, cuBLAS, 64 rows x 1, 2, 3, 4, 6, 8 tokens, 2026-11. Rates of the H100: the products of
    16 layers of that shape, one after the other in a CUDA graph, cuBLAS, random numbers, 2026-11; its overhead, fp8_speedup and
    unpack_s are those of the H200. fp8_speedup lies between what was measured at 8,192 tokens and more: 1.5 for the dense
    products of Llama-8B, 0.9 to 1.0 for the experts of Qwen3-30B-A3B. unpack_s is an estimate: 300 instructions of four warps
    for 128 x 128 weights (`kernels/gemm/four_bit_steps.py`).
    """
    card = known.card
    if known.rates is not None:
        points = tuple((tokens, rate) for tokens, rate in known.rates["gemm"])
        return Rates(name=known.gpus[0], **{**known.rates, "gemm": points})
    bytes_s, flop_s = WEIGHT_SHARE * card.bytes_s, FLOP_SHARE * card.flop_s
    return Rates(
        name=f"{card.name}, computed, not measured", bytes_s=bytes_s,
        gemm=tuple((tokens, 1 / (1 / (tokens * bytes_s) + 1 / flop_s)) for tokens in COMPUTED_TOKENS), overhead_s=LAUNCH_S,
        layer_s=LAYER_S, tile=TILE, fp8_speedup=max(1.0, FP8_SHARE * card.fp8_flop_s / card.flop_s),
        unpack_s=UNPACK_S * card.num_sms,
    )


def calibrate(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Rates:
    """Measure matrix products with 8 to 256 tokens, and a read of more memory than the caches hold. Other load on the machine
    lowers the measured rates.

    fp8  measure W8A8 products too, as the model computes them: on Hopper and newer this compiles their kernel, for some seconds
    """
    size = 2048 if device.type == "cpu" else 8192
    weight = torch.ones(size, size, dtype=dtype, device=device)
    large = torch.ones(64 << 20 if device.type == "cpu" else 1 << 30, dtype=torch.uint8, device=device).view(dtype)

    def product(tokens: int) -> float:
        rows = torch.ones(tokens, size, dtype=dtype, device=device)
        return _seconds(lambda: rows @ weight.T, device)

    rates = [2.0 * size * size * tokens / product(tokens) for tokens in CALIBRATED_TOKENS]
    # The true rate never falls with more tokens: a measurement that shows this was disturbed by other load.
    points = tuple(zip(CALIBRATED_TOKENS, accumulate(rates, max), strict=True))
    read_s = _seconds(large.sum, device)
    overhead_s = SMALL_OPERATIONS[device.type] * _seconds(lambda: weight[0, :64] + 1, device)
    return Rates(
        name=f"{device.type}, measured", bytes_s=large.nbytes / read_s, gemm=points, overhead_s=overhead_s,
        fp8_speedup=_fp8_speedup(weight) if fp8 else 1.0,
    )


def _fp8_speedup(weight: Tensor) -> float:
    """Seconds of the plain product with weight [N, N] divided by those of the W8A8 product, which include quantising x."""
    device, size = weight.device, len(weight)
    x, product = torch.ones(FP8_TOKENS[device.type], size, dtype=weight.dtype, device=device), product_of_ones(size, device)
    return _seconds(lambda: x @ weight.T, device) / _seconds(lambda: product(x), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The fastest of a few calls, after one to warm up, in at most about 40 ms."""
    best, end = float("inf"), 0.0
    for turn in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if turn == 0:
            end = now + 0.04
        else:
            best = min(best, now - began)
            if now > end:
                break
    return max(best, 1e-9)
