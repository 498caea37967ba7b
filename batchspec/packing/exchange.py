"""What the exchanges between ranks add to the cost of a forward pass (tensor parallelism).

Each layer adds up the ranks' outputs of two products, T tokens of H numbers each; with norms over all heads it exchanges two more
numbers per token. One exchange of few tokens is one kernel that reads all ranks' numbers, one of many is the library's:

    min(6 us + (R - 1) b / 120 GB/s,  20 us + 2 (R - 1) / R b / 300 GB/s)        b bytes of one rank, R ranks

Not measured with batchspec yet. Source: figures of others for H100 and H200 over NVLink, two and four GPUs
(https://github.com/vllm-project/vllm/pull/24111, pull/24532).
"""

from __future__ import annotations

import torch

from batchspec.model.spec import ModelSpec

KERNEL_S, KERNEL_BYTES_S = 6e-6, 120e9
LIBRARY_S, LIBRARY_BYTES_S = 20e-6, 300e9


def exchange_seconds(spec: ModelSpec, dtype: torch.dtype, tokens: float) -> float:
    """Of a pass over so many tokens; 0 for a model that one process computes."""
    ranks = spec.shard.ranks
    if ranks == 1:
        return 0.0
    norms = sum(attention.qk_norm_rows for attention in spec.attentions)
    sums = 2 * spec.num_layers * _one(ranks, tokens * spec.hidden_size * dtype.itemsize)
    return sums + (norms + 1) * _one(ranks, 8 * tokens)  # and the choice of tokens


def _one(ranks: int, num_bytes: float) -> float:
    kernel = KERNEL_S + (ranks - 1) * num_bytes / KERNEL_BYTES_S
    return min(kernel, LIBRARY_S + 2 * (ranks - 1) / ranks * num_bytes / LIBRARY_BYTES_S)
