"""GPU memory that must stay free besides weights and K/V pages, in bytes, computed from the shape. Pages get the rest.

T tokens of a prefill pass, R slots, S = num_verified + 1, H hidden, I intermediate, NH / KVH heads of D numbers, V vocabulary,
L layers, e bytes a number:

    a pass    1.5 e T (6 H + A + 6 H)   residual, norm, output and three aux hidden states; A numbers inside the largest block:
              3 I of a gated MLP, 2 (NH + 2 KVH) D + NH D of attention (`activation_size`); the drafter's inputs.
              Factor 1.5 for fragmentation by the allocator
    keys      of latent attention, whose keys and values of one row at a time are made of its latents (`row_bytes_of_pass`)
    a round   the same for R S tokens, in the graphs' pool; 3 * 4 R S V of fp32 logits and their copies for sampling. Where
              nothing is decoded there are no rounds, graphs and penalties: 512 tokens have logits at a time, none without an
              output matrix
    attention partial results, merged by log-sum-exp (`partial_bytes`): with decode.deterministic 4 S NH (D + 2) for each (row,
              512 keys), else no more than the registers of a GPU hold, five times, whatever the rows' length
    state     R (5 max_len + 4 V): token buffers, page table, counts of tokens for penalties
    graphs    16 MB for each row bucket and draft length, at most 13 of these, and 0 twice: the next round may draft or not; for
              each of at most 3 row buckets and 6 numbers of drafts that are verified on average, from 12 slots on. Twice
              as many if rows may be longer than those surveyed: their graphs are captured when the first such row comes. All of
              them twice if rows share prefixes, samples of a row too, and it may pay to read them once
              (`cache/sharing_cost.py`); as `shared_tokens` the longest surveyed prompt counts
    adapters  of a model with LoRA adapters of rows: the values between their two products, of T and of R S tokens
    exchanges 4 e R S H + 128 MiB, of a model that several GPUs compute: buffers that they read from each other
    fixed     2 GB: workspaces of matrix products and attention, compiled kernels, fragmentation
    passes as graphs (ablation.prefill_graphs)  a pass of `graph_tokens` tokens once more, in the graphs' pool; K and V of 4 times
              as many keys; 16 MB for each of 16 graphs

Llama-3.1-8B, T = 16384, R = 92, S = 4: 4.5 + 0.1 + 0.6 + 0.1 + 0.1 + 1.1 + 2 = 8.5 GB of the 132 that one H200 has after the
weights; the pages hold 900 thousand tokens, 80 rows of 8192 + 3072.
"""

from __future__ import annotations

import torch

from batchspec.model.spec import ModelSpec
from batchspec.packed_batch import KEYS_PER_TOKEN, PREFILL_GRAPHS, SCORED_TOKENS
from batchspec.packing.cost import num_multiplied

FIXED_BYTES = 2 * 10**9
PREFILL_EXCHANGE_BYTES = 1 << 27
GRAPH_BYTES = 16 * 10**6
MOST_LENGTHS = 13
MOST_PARTS, MOST_PARTIAL_BUCKETS, LEAST_PARTIAL_ROWS = 6, 3, 12
"""Graphs of rounds that verify a part of their drafts (`engine/rounds/draft_lengths.py`): at most so many for each of so many row
buckets, none for fewer slots."""
ODD_BLOCKS = 1.5
LOGIT_COPIES = 3
LAYER_LAUNCH_S, PREFILL_FLOP_S = 1.5e-3, 8e14
"""Seconds in which a slow host launches a layer's kernels of a prefill pass, and flop/s of a fast GPU. Beside an H200, whose
products run at 6.9e14, the host took 1.1 ms for a layer of SmolLM2 (2026-11)."""
NUM_AUX = 3


def reserve_bytes(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    slots: int,
    num_buckets: int,
    num_verified: int,
    prefill_tokens: int,
    max_len: int,
    longest_row: int | None = None,
    shared_tokens: int = 0,
    decodes: bool = True,
) -> int:
    """Bytes that must stay free besides weights and pages; the formula is in the module's docstring.

    longest_row    tokens of the longest row surveyed, up to max_len; None: no row was surveyed, and all graphs are for max_len
    shared_tokens  tokens of the longest prefix that rows may share; 0: rows share none
    decodes        as in `PackedBatch`
    """
    verified = slots * (num_verified + 1) if decodes else 0
    passes = _activation_bytes(spec, dtype, prefill_tokens) + _activation_bytes(spec, dtype, verified)
    keys = pass_key_bytes(spec, dtype, max_len)
    logits = 4 * LOGIT_COPIES * (verified if decodes else SCORED_TOKENS) * spec.num_logits
    # The saved bytes of a prefix do not depend on how many tokens its pages have.
    shares = spec.sharing_cost(dtype, page_size=1, max_q=num_verified + 1).may_pay(slots, shared_tokens)
    run = spec.computing(dtype, draft_len=num_verified)
    partials = max((mixer.partial_bytes(run, slots, max_len, shares=shares) for _, mixer in spec.mixers), default=0)
    state = slots * (5 * max_len + 4 * spec.vocab_size * decodes)
    num_graphs = num_buckets * (min(num_verified + 1, MOST_LENGTHS) + 1) * decodes
    if num_verified and slots >= LEAST_PARTIAL_ROWS:
        num_graphs += min(num_buckets, MOST_PARTIAL_BUCKETS) * min(num_verified + 1, MOST_PARTS)
    graphs = GRAPH_BYTES * num_graphs
    if longest_row is not None and longest_row < max_len:
        graphs *= 2
    if shares:
        graphs *= 2
    of_ranks = 4 * dtype.itemsize * slots * (num_verified + 1) * spec.hidden_size
    exchanges = 0 if spec.shard.ranks == 1 else of_ranks + PREFILL_EXCHANGE_BYTES
    adapters = 0 if spec.lora is None else spec.lora.temporary_bytes(prefill_tokens) + spec.lora.temporary_bytes(verified)
    return round(passes) + keys + logits + partials + state + graphs + adapters + exchanges + FIXED_BYTES


def pass_key_bytes(spec: ModelSpec, dtype: torch.dtype, max_len: int) -> int:
    """Bytes that a layer makes at once of the keys of a row of `max_len` tokens, in a pass."""
    run = spec.computing(dtype, draft_len=0)
    return max((mixer.row_bytes_of_pass(run, max_len) for _, mixer in spec.mixers), default=0)


def graph_tokens(spec: ModelSpec, prefill_tokens: int) -> int:
    """Tokens of the largest prefill pass that is worth a CUDA graph: computing more takes longer than launching their kernels."""
    launches_s = LAYER_LAUNCH_S * spec.num_layers
    return min(prefill_tokens, max(1, round(launches_s * PREFILL_FLOP_S / (2 * num_multiplied(spec)))))


def prefill_graph_bytes(spec: ModelSpec, *, dtype: torch.dtype, tokens: int) -> int:
    """Bytes that CUDA graphs of prefill passes of up to `tokens` tokens need in addition to the passes."""
    keys = KEYS_PER_TOKEN * tokens * max((own.read_bytes for own in spec.page_formats(dtype, 1)), default=0)
    return round(_activation_bytes(spec, dtype, tokens)) + keys + PREFILL_GRAPHS * GRAPH_BYTES


def _activation_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int) -> float:
    """Bytes of activations of a forward pass over `tokens` tokens, the drafter's included."""
    stream = (3 + NUM_AUX) * spec.hidden_size
    return ODD_BLOCKS * dtype.itemsize * tokens * (2 * stream + max(block.activation_size for _, block in spec.blocks()))
