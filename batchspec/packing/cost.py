"""The cost model: seconds of a round and of a prefill, bytes of weights that are read and of K/V.

A forward pass over T flat tokens reads every weight once (of experts, those that its tokens choose) and multiplies it with T
tokens. Attention reads each row's K/V once, whatever the number of query tokens. Each part is bound by memory or by arithmetic,
whichever is slower:

    round_s = max(W(T) / bytes_s, 2 P T / flop_s(T), L layer_s) + max(R kv sum_l C_l / bytes_s, 4 A T sum_l C_l / flop_s(T))
              + overhead

W(T) bytes of the weights that are read (without the embedding, of which rows are gathered), P weights that a token is multiplied
with, R rows, C_l keys of a row that layer l reads, T = R * tokens_per_row, kv bytes of K/V a token and layer, A query heads *
head_dim, L layers. C_l is the row's context; in a layer with a window it is min(context, window + tokens_per_row - 1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from batchspec.cache.groups import most_keys
from batchspec.model.spec import ModelSpec
from batchspec.packing.exchange import exchange_seconds

CALIBRATED_TOKENS = (8, 32, 128, 256)
SMALL_OPERATIONS = {"cpu": 3000, "cuda": 200}
"""Overhead of a forward pass of 30 layers besides its products, as a number of small additions: from Python on a CPU, in a CUDA
graph on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The speed of a device."""

    name: str
    bytes_s: float
    """Memory read, bytes/s."""
    gemm: tuple[tuple[int, float], ...]
    """(tokens, flop/s) of matrix products with this number of tokens, ascending."""
    overhead_s: float
    """Seconds of a forward pass besides memory and arithmetic."""
    layer_s: float = 0.0
    """Minimum seconds of a layer's products and norms, however small they are."""
    tile: int = 1
    """Tokens of a product's tile: above two tiles, the number of tokens is rounded up to a multiple."""

    def flop_s(self, tokens: float) -> float:
        """flop/s of products with this number of tokens, interpolated between measured points; fewer tokens than the first point
        take as long as the first."""
        first, rate = self.gemm[0]
        if tokens <= first:
            return rate * tokens / first
        return float(np.interp(tokens, [point for point, _ in self.gemm], [value for _, value in self.gemm]))


# One H200, Llama-3.1-8B shape in bf16, cuBLAS, measured 2026-11: 64 rows x 1, 2, 3, 4, 6, 8 tokens.
H200 = Rates(
    name="NVIDIA H200",
    bytes_s=4.3e12,
    gemm=((64, 200e12), (128, 365e12), (192, 456e12), (256, 512e12), (384, 565e12), (512, 582e12)),
    overhead_s=1e-4,
    layer_s=1.9e-5,
    tile=128,
)


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Stored rates for a known GPU in bf16; otherwise measured, in well under a second."""
    if device.type == "cuda" and dtype is torch.bfloat16 and "H200" in torch.cuda.get_device_name(device):
        return H200
    return calibrate(device, dtype)


def calibrate(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure matrix products with 8 to 256 tokens, and a read of more memory than the caches hold. Other load on the machine
    lowers the result."""
    size = 2048 if device.type == "cpu" else 8192
    weight = torch.ones(size, size, dtype=dtype, device=device)
    large = torch.ones(64 << 20 if device.type == "cpu" else 1 << 30, dtype=torch.uint8, device=device).view(dtype)

    def product(tokens: int) -> float:
        rows = torch.ones(tokens, size, dtype=dtype, device=device)
        return _seconds(lambda: rows @ weight.T, device)

    rates = [2.0 * size * size * tokens / product(tokens) for tokens in CALIBRATED_TOKENS]
    # The rate never falls with more tokens: a measurement that says so was disturbed by other load.
    points = tuple(zip(CALIBRATED_TOKENS, accumulate(rates, max), strict=True))
    read_s = _seconds(large.sum, device)
    overhead_s = SMALL_OPERATIONS[device.type] * _seconds(lambda: weight[0, :64] + 1, device)
    return Rates(name=f"{device.type}, measured", bytes_s=large.nbytes / read_s, gemm=points, overhead_s=overhead_s)


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


def num_multiplied(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with: the active ones of all layers, and the output matrix."""
    return sum(gemm.active * gemm.size for _, gemm in spec.gemms(1)) + spec.num_logits * spec.hidden_size


def read_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: float, *, correlation: float = 1.0) -> float:
    """Bytes of weights that a forward pass over `tokens` tokens reads; of experts, the expected number that the tokens choose.

    correlation  tokens choose as many experts as `correlation * tokens` independent ones (`packing.expert_correlation`)
    """
    layers = sum(gemm.read * spec.gemm_bytes(prefix, gemm, dtype) for prefix, gemm in spec.gemms(correlation * tokens))
    return layers + spec.num_logits * spec.hidden_size * dtype.itemsize


def kv_read_bytes(spec: ModelSpec, *, dtype: torch.dtype, rows: int, context_tokens: float, tokens_per_row: float) -> float:
    """Bytes of K/V that the target reads in one round: see `round_seconds`."""
    return rows * sum(_round_keys(spec, context_tokens, tokens_per_row)) * spec.kv_layout(dtype, 1).token_bytes


def round_seconds(
    spec: ModelSpec, rates: Rates, *, dtype: torch.dtype, rows: int, context_tokens: float, tokens_per_row: float,
    correlation: float = 1.0,
) -> float:  # fmt: skip
    """Seconds of one round: `rows` rows with `context_tokens` tokens of K/V each verify `tokens_per_row` tokens.

    correlation  as of `read_bytes`
    """
    tokens = rows * tokens_per_row
    products_s = _products_s(spec, rates, dtype, tokens, correlation)
    kv_bytes = kv_read_bytes(spec, dtype=dtype, rows=rows, context_tokens=context_tokens, tokens_per_row=tokens_per_row)
    flop = _attention_flop(spec, tokens, _round_keys(spec, context_tokens, tokens_per_row))
    attention_s = max(kv_bytes / rates.bytes_s, flop / rates.flop_s(tokens))
    return products_s + attention_s + rates.overhead_s + exchange_seconds(spec, dtype, tokens)


def prefill_seconds(spec: ModelSpec, rates: Rates, *, dtype: torch.dtype, prompt_tokens: float, pass_tokens: int) -> float:
    """Seconds to prefill one prompt, as its share of passes of `pass_tokens` tokens.

    A token attends to half of the prompt on average; in a layer with a window, to the keys within it.
    """
    share = prompt_tokens / pass_tokens
    reach = [prompt_tokens if window is None else min(window, prompt_tokens) for window in spec.windows]
    keys = [most * (1 - most / (2 * prompt_tokens)) for most in reach]
    attention_s = _attention_flop(spec, prompt_tokens, keys) / rates.flop_s(pass_tokens)
    pass_s = _products_s(spec, rates, dtype, pass_tokens) + rates.overhead_s + exchange_seconds(spec, dtype, pass_tokens)
    return share * pass_s + attention_s


def _products_s(spec: ModelSpec, rates: Rates, dtype: torch.dtype, tokens: float, correlation: float = 1.0) -> float:
    read_s = read_bytes(spec, dtype, tokens, correlation=correlation) / rates.bytes_s
    if tokens > 2 * rates.tile:
        tokens = -(-tokens // rates.tile) * rates.tile
    arithmetic_s = 2.0 * num_multiplied(spec) * tokens / rates.flop_s(tokens)
    return max(read_s, arithmetic_s, spec.num_layers * rates.layer_s)


def _round_keys(spec: ModelSpec, context_tokens: float, tokens_per_row: float) -> list[float]:
    """[num_layers] keys of a row that each layer reads in a round."""
    return [
        context_tokens if window is None else min(context_tokens, most_keys(window, tokens_per_row)) for window in spec.windows
    ]


def _attention_flop(spec: ModelSpec, tokens: float, keys: Iterable[float]) -> float:
    """keys [num_layers] that each of the tokens is multiplied with."""
    return 4.0 * tokens * sum(attention.inner_size * count for attention, count in zip(spec.attentions, keys, strict=True))
