"""The cost model: seconds of a round and of a prefill, bytes of weights that are read and of K/V.

A forward pass over T flat tokens reads every weight once (of experts, those that its tokens choose) and multiplies it with T
tokens. Attention reads each row's K/V once, whatever the number of query tokens. Attention, and each product whose weights are
not packed, takes the longer of the times of memory and of arithmetic:

    round_s = max(sum_g product_s_g, L layer_s) + max(R kv sum_l C_l / bytes_s, 4 A T sum_l C_l / flop_s(T)) + 2 R S / bytes_s
              + overhead + exchange_s
    product_s_g = max(W_g(T) / weight_bytes_s, 2 P_g T / flop_s_g(T))

g runs over the products of all layers and the output matrix. W_g(T) bytes of the weights of g that are read, in their format; P_g
weights of g with which a token is multiplied; flop_s_g the rate of their format: FP8 weights with quantised activations (W8A8)
have their own. exchange_s is the time of exchanges between GPUs (`exchange.py`).

Kernels of packed weights (INT4, NVFP4, experts in MXFP4) are taken to read first, and then to unpack while they multiply. Each of
the N_g(T) weights that are read is unpacked once for each tile of tokens:

    product_s_g = W_g(T) / bytes_s + max(2 P_g T / full_flop_s, u_g max(N_g(T), P_g T / unpack_tokens) / unpack_s)

full_flop_s is the rate of plain products with many tokens, u_g the time to unpack a weight relative to INT4
(`WeightFormat.unpacking`). The cards of the table have an unpack_s (`rates.card_rates`); elsewhere, and in plain torch, unpacking
is not counted. That many tokens are multiplied with dequantised INT4 and NVFP4 weights is not modelled.
Where no kernel runs, each pass first dequantises NVFP4 weights in plain torch, which moves NVFP4_BYTES for each weight. A GPU
does so with all experts, and multiplies each with every token. A CPU computes only the chosen experts: there the estimate is too
high.
R rows, C_l keys of a row that layer l reads, T = R * tokens_per_row, kv bytes of K/V a token and layer, A numbers of q a token,
L layers. C_l is the row's context; in a layer with a window it is min(context, window + tokens_per_row - 1). S bytes of the
states of a row in all layers: a round reads and writes them once. Each kind of layer says what it costs (`MixerSpec.round_work`,
`prompt_work`). A prefill also takes the time in which the inputs and outputs of its tokens' experts are moved (`_pair_bytes`).
LoRA adapters of rows add two products of their own to each product (`_adapters_s`).
"""

from __future__ import annotations

import torch

from batchspec.model.layers.kind import Work
from batchspec.model.spec import ModelSpec, layer_prefix
from batchspec.packing.exchange import exchange_seconds
from batchspec.packing.rates import Rates

NVFP4_BYTES = 33.0
"""Bytes that are moved to dequantise an NVFP4 weight to bf16 in plain torch, and to read it again: counted from the operations of
`kernels/common/nvfp4.py`, most of them in fp32, and not measured."""
LORA_LAUNCH_S, LORA_SLOWDOWN = 3e-6, 2.0
"""Minimum seconds of a low-rank product in a CUDA graph, and its time relative to that of its bytes or operations. Fitted to
rounds of Llama-8B on an H200 with 16 adapters of rank 16 or 64, 256 and 1,024 tokens (2026-11): within 23 percent of the 1.9 to
7.4 ms that they add."""


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
    """Bytes of pages that the target reads in one round: see `round_seconds`."""
    return rows * _round_work(spec, dtype, context_tokens, tokens_per_row).page_bytes


def moved_state_bytes(spec: ModelSpec, *, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the states that the target reads and writes in one round: each state once in both ways."""
    return 2 * rows * _round_work(spec, dtype, 0, 1).state_bytes


def round_seconds(
    spec: ModelSpec, rates: Rates, *, dtype: torch.dtype, rows: int, context_tokens: float, tokens_per_row: float,
    correlation: float = 1.0,
) -> float:
    """Seconds of one round: `rows` rows with `context_tokens` tokens of K/V each verify `tokens_per_row` tokens.

    correlation  tokens choose as many experts as `correlation * tokens` independent ones
    """
    tokens = rows * tokens_per_row
    products_s = _products_s(spec, rates, dtype, tokens, correlation)
    work = _round_work(spec, dtype, context_tokens, tokens_per_row)
    mixers_s = max(rows * work.page_bytes / rates.bytes_s, tokens * work.flop / rates.flop_s(tokens))
    states_s = rows * (2 * work.state_bytes + (tokens_per_row - 1) * work.token_bytes) / rates.bytes_s
    return products_s + mixers_s + states_s + rates.overhead_s + exchange_seconds(spec, dtype, tokens)


def prefill_seconds(
    spec: ModelSpec, rates: Rates, *, dtype: torch.dtype, prompt_tokens: float, pass_tokens: int, scores: bool = False
) -> float:
    """Seconds to prefill one prompt, as its share of passes of `pass_tokens` tokens.

    Logits are computed after the prompt's last token alone, or after every token where prompts are scored. Layers after the last
    one that keeps something of a row compute the prompt's last token alone; a drafter that reads their outputs, which makes them
    compute all, is not counted.
    """
    share = prompt_tokens / pass_tokens
    run, last_kept = spec.computing(dtype, draft_len=0), spec.last_kept
    flop = prompt_tokens * sum(
        mixer.prompt_work(run, prompt_tokens, ends_only=not scores and layer > last_kept).flop
        for layer, mixer in spec.mixers
    )
    mixers_s = flop / rates.flop_s(pass_tokens)
    pass_s = _products_s(spec, rates, dtype, pass_tokens, outputs=None if scores else 1 / share) + rates.overhead_s
    pairs_s = prompt_tokens * _pair_bytes(spec, dtype) / rates.bytes_s
    return share * (pass_s + exchange_seconds(spec, dtype, pass_tokens)) + pairs_s + mixers_s


def _pair_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the inputs and outputs of a token's experts. In a prefill pass they are more than the caches hold; rounds, which
    are short, find them there."""
    return dtype.itemsize * sum(
        gemm.active * (gemm.product.k + gemm.product.rows) for _, gemm in spec.gemms(1) if gemm.grouped
    )


def _products_s(
    spec: ModelSpec, rates: Rates, dtype: torch.dtype, tokens: float, correlation: float = 1.0, *, outputs: float | None = None
) -> float:
    """Seconds of all products of a pass over `tokens` tokens.

    outputs  number of its tokens whose logits are computed, on average, and which go through the layers after the last one that
             keeps K and V; None: all
    """
    outputs = tokens if outputs is None else outputs
    late = {layer_prefix(i) for i in range(spec.last_kept + 1, spec.num_layers)}

    total_s = 0.0
    for prefix, gemm in spec.gemms(correlation * tokens):
        count = outputs if prefix in late else tokens
        dequantised = gemm.stored if spec.dequantises(prefix, gemm) else 0
        nbytes, size = gemm.read * spec.gemm_bytes(prefix, gemm, dtype), (dequantised or gemm.active) * gemm.size
        unpacking = spec.unpacking(prefix, gemm)
        if unpacking is not None:
            unpacked = unpacking * gemm.size * max(gemm.read, gemm.active * count / rates.unpack_tokens)
            total_s += _packed_s(rates, count, nbytes, size, unpacked)
        else:
            total_s += _product_s(rates, dtype, count, nbytes, size, fp8=spec.multiplies_fp8(prefix, gemm))
            total_s += dequantised * gemm.size * NVFP4_BYTES / rates.bytes_s
    size = spec.num_logits * spec.hidden_size
    total_s += _product_s(rates, dtype, outputs, size * dtype.itemsize, size, fp8=False)
    return max(total_s, spec.num_layers * rates.layer_s) + _adapters_s(spec, rates, dtype, tokens)


def _product_s(rates: Rates, dtype: torch.dtype, count: float, nbytes: float, size: float, *, fp8: bool) -> float:
    """Seconds of a product of `count` tokens that reads while it multiplies each with `size` weights."""
    rounded = _whole_tiles(rates, count)
    return max(
        min(1.0, count) * nbytes / rates.weight_bytes_s(dtype), 2.0 * size * rounded / rates.product_flop_s(rounded, fp8=fp8)
    )


def _packed_s(rates: Rates, count: float, nbytes: float, size: float, unpacked: float) -> float:
    """Seconds of a product of `count` tokens that reads packed weights, then unpacks as many as `unpacked` of INT4 while it
    multiplies each token with `size` weights."""
    arithmetic_s = 2.0 * size * _whole_tiles(rates, count) / rates.full_flop_s
    return min(1.0, count) * nbytes / rates.bytes_s + max(arithmetic_s, unpacked / rates.unpack_s)


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


def _round_work(spec: ModelSpec, dtype: torch.dtype, context_tokens: float, tokens_per_row: float) -> Work:
    """Of all mixers together in a round."""
    run = spec.computing(dtype, draft_len=0)
    works = [mixer.round_work(run, context_tokens, tokens_per_row) for _, mixer in spec.mixers]
    return Work(
        page_bytes=sum(work.page_bytes for work in works), state_bytes=sum(work.state_bytes for work in works),
        token_bytes=sum(work.token_bytes for work in works), flop=sum(work.flop for work in works),
    )
