"""The time that exchanges between ranks add to a forward pass (tensor parallelism).

Each block adds up the ranks' outputs of a product, T tokens of H numbers each, or of two; with norms over all heads a layer
exchanges two more numbers per token. b bytes of one rank, R ranks:

    one-shot   3.9 us + 0.9 us (R - 1) + (R - 1) b / 300 GB/s
    two-shot   8.5 us + 2 (R - 1) / R b / 300 GB/s
    library    15 us + 2 (R - 1) / R b / 230 GB/s

`tuning/exchange.py` chooses one of them. Fitted to the table there: sums with residual sum and norm of 64 KB to 8 MB, on 2 and on
4 H200. The fit of the kernels is within 12 percent, that of NCCL's all-reduce within 30 from 1 MB on. Eight ranks, and more than
8 MB, are extrapolated.
"""

from __future__ import annotations

import torch

from batchspec.model.spec import ModelSpec
from batchspec.tuning.exchange import LIBRARY_BYTES, takes_two_shots

ONE_SHOT_S, ONE_SHOT_RANK_S, TWO_SHOT_S, KERNEL_BYTES_S = 3.9e-6, 0.9e-6, 8.5e-6, 300e9
LIBRARY_S, LIBRARY_BYTES_S = 15e-6, 230e9


def exchange_seconds(spec: ModelSpec, dtype: torch.dtype, tokens: float) -> float:
    """Seconds of the exchanges of a pass over `tokens` tokens; 0 for a model that one process computes."""
    ranks = spec.shard.ranks
    if ranks == 1:
        return 0.0
    norms = sum(mixer.num_rank_sums for _, mixer in spec.mixers)
    sums = sum(block.num_sums for _, block in spec.blocks()) * sum_seconds(ranks, tokens * spec.hidden_size * dtype.itemsize)
    return sums + (norms + 1) * sum_seconds(ranks, 8 * tokens)  # and the choice of tokens


def sum_seconds(ranks: int, num_bytes: float) -> float:
    """Seconds of one sum over 2, 4 or 8 ranks."""
    others = ranks - 1
    shared = 2 * others / ranks * num_bytes
    if num_bytes > LIBRARY_BYTES[ranks]:
        return LIBRARY_S + shared / LIBRARY_BYTES_S
    if takes_two_shots(ranks, round(num_bytes)):
        return TWO_SHOT_S + shared / KERNEL_BYTES_S
    return ONE_SHOT_S + others * (ONE_SHOT_RANK_S + num_bytes / KERNEL_BYTES_S)
