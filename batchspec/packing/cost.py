"""The cost model: seconds of a round and of a prefill, bytes of weights that are read and of K/V.

A forward pass over T flat tokens reads every weight once (of experts, those that its tokens choose) and multiplies it with T
tokens. Attention reads each row's K/V once, whatever the number of query tokens. Each product, and attention, is bound by memory
or by arithmetic, whichever is slower:

    round_s = max(sum_g max(W_g(T) / weight_bytes_s, 2 P_g T / flop_s_g(T)), L layer_s)
              + max(R kv sum_l C_l / bytes_s, 4 A T sum_l C_l / flop_s(T)) + 2 R S / bytes_s + overhead

g runs over the products of all layers and the output matrix. W_g(T) bytes of the weights of g that are read, in their format; P_g
weights of g with which a token is multiplied; flop_s_g the rate of their format: FP8 weights with quantised activations (W8A8)
have their own; MXFP4 weights are unpacked and multiplied like plain ones. INT4 weights take time to be unpacked besides, once for
each tile of tokens: P_g max(1, T / unpack_tokens) / unpack_s is added to the arithmetic; for many tokens they are dequantised
instead, if that takes less (`_unpacking_s`). The rate is known of an H200 and of assumed cards
(`card_rates`); elsewhere, and in plain torch, it is not counted.
NVFP4 weights are dequantised in plain torch in each pass, which moves NVFP4_BYTES for each, before they are multiplied; a GPU
does so with all experts, and multiplies each with every token. A CPU computes chosen experts alone, so it takes less.
R rows, C_l keys of a row that layer l reads, T = R * tokens_per_row, kv bytes of K/V a token and layer, A query heads * head_dim,
L layers. C_l is the row's context; in a layer with a window it is min(context, window + tokens_per_row - 1). S bytes of the
states of a row in all recurrent layers: a round reads and writes them once. In prefill these layers take the arithmetic of
`GatedDeltaSpec.prefill_flop` for each token. LoRA adapters of rows add two products of their own to each product (`_adapters_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from batchspec.cache.groups import most_keys
from batchspec.kernels.common.card import assumed_card, card_of
from batchspec.model.quant.fp8_products import product_of_ones
from batchspec.model.spec import ModelSpec, layer_prefix
from batchspec.packing.exchange import exchange_seconds
from batchspec.tuning.cards import KnownCard, entry_of

CALIBRATED_TOKENS = (8, 32, 128, 256)
FP8_TOKENS = {"cpu": 64, "cuda": 2048}
"""Number of tokens of the W8A8 product that is measured: enough to be bound by arithmetic."""
DEQUANTISED_BYTES = 4.5
"""Bytes that are moved to dequantise an INT4 weight to bf16 and to read it again."""
NVFP4_BYTES = 33.0
"""Bytes that are moved to dequantise an NVFP4 weight to bf16 and to read it again: counted from the operations of
`kernels/common/nvfp4.py`, most of them in fp32, and not measured."""
LORA_LAUNCH_S, LORA_SLOWDOWN = 3e-6, 2.0
"""Minimum seconds of a low-rank product in a CUDA graph, and its time relative to that of its bytes or operations. Fitted to
rounds of Llama-8B on an H200 with 16 adapters of rank 16 or 64, 256 and 1,024 tokens (2026-11): within 23 percent of the 1.9 to
7.4 ms that they add."""
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
    """INT4 weights that are unpacked in a second."""
    unpack_tokens: int = 128
    """Number of tokens for which a weight is unpacked once."""

    def weight_bytes_s(self, dtype: torch.dtype) -> float:
        """Bytes/s at which products of few tokens read weights of `dtype`: the rate of the first measurement."""
        tokens, rate = self.gemm[0]
        return min(self.bytes_s, dtype.itemsize * rate / (2 * tokens))

    def product_flop_s(self, tokens: float, *, fp8: bool) -> float:
        """flop/s of products with this number of tokens, without the reading of weights; fp8: of W8A8 products.

        Plain products of few tokens are bound by reading, which tells nothing about W8A8 products: their rate is one number.
        """
        return self.fp8_speedup * self.gemm[-1][1] if fp8 else self.flop_s(max(tokens, self.gemm[0][0]))

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
    under a second. fp8: W8A8 products too."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        known = entry_of(card_of(device).name)
        if known is not None and (known.rates is not None or assumed_card() is not None):
            return card_rates(known)
    return calibrate(device, dtype, fp8=fp8)


def card_rates(known: KnownCard) -> Rates:
    """The measured rates of a card in bf16, or computed ones: a product takes the time of reading the weight once, plus that of
    its arithmetic.

    Measured: one H200, Llama-3.1-8B shape, cuBLAS, 2026-11: 64 rows x 1, 2, 3, 4, 6, 8 tokens. fp8_speedup lies between what was
    measured at 8,192 tokens and more: 1.5 for the dense products of Llama-8B, 0.9 to 1.0 for the experts of Qwen3-30B-A3B.
    unpack_s is an estimate: 300 instructions of four warps for 128 x 128 weights (`kernels/gemm/int4_steps.py`).
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


def num_multiplied(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with: the active ones of all layers, and the output matrix."""
    return sum(gemm.active * gemm.size for _, gemm in spec.gemms(1)) + spec.num_logits * spec.hidden_size


def read_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: float, *, correlation: float = 1.0) -> float:
    """Bytes of weights that a forward pass over `tokens` tokens reads; of experts, the expected number that the tokens choose.

    correlation  tokens choose as many experts as `correlation * tokens` independent ones (`packing.expert_correlation`)
    """
    layers = sum(gemm.read * spec.gemm_bytes(prefix, gemm, dtype) for prefix, gemm in spec.gemms(correlation * tokens))
    return layers + spec.num_logits * spec.hidden_size * dtype.itemsize + adapter_bytes(spec, dtype, tokens)


def kv_read_bytes(spec: ModelSpec, *, dtype: torch.dtype, rows: int, context_tokens: float, tokens_per_row: float) -> float:
    """Bytes of K/V that the target reads in one round: see `round_seconds`."""
    keys = _round_keys(spec, context_tokens, tokens_per_row)
    kept = spec.kv_layouts(dtype, 1)
    layouts = [kept[index] for index in spec.kv_ids.values()]
    return rows * sum(count * layout.token_bytes for count, layout in zip(keys, layouts, strict=True))


def moved_state_bytes(spec: ModelSpec, *, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the states of recurrent layers that the target reads and writes in one round: each state once in both ways."""
    return 2 * rows * sum(state.nbytes for state in spec.states(dtype))


def round_seconds(
    spec: ModelSpec, rates: Rates, *, dtype: torch.dtype, rows: int, context_tokens: float, tokens_per_row: float,
    correlation: float = 1.0,
) -> float:
    """Seconds of one round: `rows` rows with `context_tokens` tokens of K/V each verify `tokens_per_row` tokens.

    correlation  tokens choose as many experts as `correlation * tokens` independent ones
    """
    tokens = rows * tokens_per_row
    products_s = _products_s(spec, rates, dtype, tokens, correlation)
    kv_bytes = kv_read_bytes(spec, dtype=dtype, rows=rows, context_tokens=context_tokens, tokens_per_row=tokens_per_row)
    flop = _attention_flop(spec, tokens, _round_keys(spec, context_tokens, tokens_per_row))
    attention_s = max(kv_bytes / rates.bytes_s, flop / rates.flop_s(tokens))
    states_s = moved_state_bytes(spec, dtype=dtype, rows=rows) / rates.bytes_s
    return products_s + attention_s + states_s + rates.overhead_s + exchange_seconds(spec, dtype, tokens)


def prefill_seconds(
    spec: ModelSpec, rates: Rates, *, dtype: torch.dtype, prompt_tokens: float, pass_tokens: int, scores: bool = False
) -> float:
    """Seconds to prefill one prompt, as its share of passes of `pass_tokens` tokens.

    Logits are computed after the prompt's last token alone, or after every token where prompts are scored. A token attends to
    half of the prompt on average; in a layer with a window, to the keys within it. Recurrent layers take the same time for each
    token. Layers after the last one that keeps K and V compute the prompt's last token alone; a drafter that reads their outputs,
    which makes them compute all, is not counted.
    """
    share = prompt_tokens / pass_tokens
    reach = [prompt_tokens if window is None else min(window, prompt_tokens) for window in spec.windows]
    keys = [most * (1 - most / (2 * prompt_tokens)) for most in reach]
    if not scores:
        keys = [
            count if layer <= spec.last_kept else most / prompt_tokens
            for layer, count, most in zip(spec.attention_layers, keys, reach, strict=True)
        ]
    flop = _attention_flop(spec, prompt_tokens, keys) + prompt_tokens * sum(own.prefill_flop for own in spec.recurrences)
    mixers_s = flop / rates.flop_s(pass_tokens)
    pass_s = _products_s(spec, rates, dtype, pass_tokens, outputs=None if scores else 1 / share) + rates.overhead_s
    return share * (pass_s + exchange_seconds(spec, dtype, pass_tokens)) + mixers_s


def _products_s(
    spec: ModelSpec, rates: Rates, dtype: torch.dtype, tokens: float, correlation: float = 1.0, *, outputs: float | None = None
) -> float:
    """Seconds of all products of a pass over `tokens` tokens.

    outputs  number of its tokens whose logits are computed, on average, and which go through the layers after the last one that
             keeps K and V; None: all
    """
    outputs = tokens if outputs is None else outputs
    late = {layer_prefix(i) for i in range(spec.last_kept + 1, spec.num_layers)}

    def times(count: float, nbytes: float, size: float, *, fp8: bool) -> tuple[float, float]:
        """Seconds in which weights are read, and those of the arithmetic."""
        rounded = _whole_tiles(rates, count)
        arithmetic_s = 2.0 * size * rounded / rates.product_flop_s(rounded, fp8=fp8)
        return min(1.0, count) * nbytes / rates.weight_bytes_s(dtype), arithmetic_s

    total_s = 0.0
    for prefix, gemm in spec.gemms(correlation * tokens):
        count = outputs if prefix in late else tokens
        dequantised = gemm.stored if spec.dequantises(prefix, gemm) else 0
        nbytes, size = gemm.read * spec.gemm_bytes(prefix, gemm, dtype), (dequantised or gemm.active) * gemm.size
        read_s, arithmetic_s = times(count, nbytes, size, fp8=spec.multiplies_fp8(prefix, gemm))
        if spec.unpacks(prefix, gemm):
            tiles = max(gemm.read, gemm.active * count / rates.unpack_tokens)
            arithmetic_s += _unpacking_s(rates, gemm.size, tiles, dense=not gemm.grouped)
        total_s += max(read_s, arithmetic_s) + dequantised * gemm.size * NVFP4_BYTES / rates.bytes_s
    size = spec.num_logits * spec.hidden_size
    total_s += max(times(outputs, size * dtype.itemsize, size, fp8=False))
    return max(total_s, spec.num_layers * rates.layer_s) + _adapters_s(spec, rates, dtype, tokens)


def _unpacking_s(rates: Rates, size: int, tiles: float, *, dense: bool) -> float:
    """Seconds in which `size` INT4 weights are unpacked in each of these tiles of tokens, besides the arithmetic; or, of a dense
    product, dequantised once to memory, if that takes less."""
    unpacked_s = size * tiles / rates.unpack_s
    return min(unpacked_s, size * DEQUANTISED_BYTES / rates.bytes_s) if dense else unpacked_s


def _adapters_s(spec: ModelSpec, rates: Rates, dtype: torch.dtype, tokens: float) -> float:
    """Seconds of the low-rank products of LoRA adapters if every token has one: two launches per product."""
    if spec.lora is None:
        return 0.0
    own = [product for prefix, block in spec.blocks() for product in block.products if spec.lora.rank_of(prefix, product)]
    added = 2.0 * tokens * dtype.itemsize * sum(product.rows for product in own)  # read, and written with the sum
    moved_s = (adapter_bytes(spec, dtype, tokens) + added) / rates.bytes_s
    flop = 2.0 * tokens * spec.lora_bytes(dtype) / dtype.itemsize / spec.lora.num_adapters
    least_s = max(moved_s, flop / rates.product_flop_s(tokens, fp8=False))
    return LORA_SLOWDOWN * least_s + 2 * len(own) * LORA_LAUNCH_S


def adapter_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: float) -> float:
    """Bytes of LoRA adapters that a forward pass over `tokens` tokens reads: those of all adapters, or of one per token."""
    return 0.0 if spec.lora is None else spec.lora_bytes(dtype) * min(1.0, tokens / spec.lora.num_adapters)


def _whole_tiles(rates: Rates, tokens: float) -> float:
    """`tokens` rounded up to what products compute."""
    return tokens if tokens <= 2 * rates.tile else -(-tokens // rates.tile) * rates.tile


def _round_keys(spec: ModelSpec, context_tokens: float, tokens_per_row: float) -> list[float]:
    """[num_layers] keys of a row that each layer reads in a round."""
    return [
        context_tokens if window is None else min(context_tokens, most_keys(window, tokens_per_row)) for window in spec.windows
    ]


def _attention_flop(spec: ModelSpec, tokens: float, keys: Iterable[float]) -> float:
    """Operations of attention. keys: [num_layers] number of keys with which each token is multiplied."""
    return 4.0 * tokens * sum(attention.inner_size * count for attention, count in zip(spec.attentions, keys, strict=True))
