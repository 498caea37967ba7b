"""Token choices when each rank holds a part of the logits: all ranks get the same result, and no rank gathers all logits.

A rank has the logits of consecutive tokens, lower ranks those of lower ids. T rows of logits, V tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchspec.distributed.collectives import Collectives
from batchspec.kernels.sampling.argmax import argmax, confidence_of
from batchspec.model.layers.base import Shard
from batchspec.model.spec import tokens_of


def greedy_of_ranks(
    logits: Tensor, first: int, ranks: Collectives, vocab: int | None = None, *, flag_nonfinite: bool = False,
    out_confidence: Tensor | None = None,
) -> Tensor:
    """int32 [T]: the token with the largest logit of all ranks, the lowest id among equals; as `argmax`.

    logits          [T, number of this rank's tokens]; first is the id of the first of them
    vocab           choose among the first `vocab` tokens; None: among all
    flag_nonfinite  NO_TOKEN if any rank's logits hold NaN or +inf, or no rank has a finite one; otherwise NaN counts as -inf
    out_confidence  int32 [T] of any stride, or None: as `argmax` writes it, of all tokens; exchanges two more numbers per row
    Exchanges one number and one id per row.
    """
    width = logits.shape[1] if vocab is None else max(0, min(logits.shape[1], vocab - first))
    ids = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    top = logits.new_full((len(logits),), float("-inf"))
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    total = None if out_confidence is None else torch.zeros(len(logits), dtype=wide, device=logits.device)
    if width:
        argmax(logits, out_ids=ids, vocab=width, flag_nonfinite=flag_nonfinite, out_top=top, out_total=total)
    if out_confidence is not None and total is not None:
        tops, totals = ranks.gather(torch.stack((top.to(total.dtype), total))).unbind(1)
        out_confidence.copy_(confidence_of((totals * torch.exp(tops - tops.amax(0))).sum(0)))
    return best_of_ranks(top, ids + first, ranks, flag_nonfinite=flag_nonfinite)


def best_of_ranks(scores: Tensor, ids: Tensor, ranks: Collectives, *, flag_nonfinite: bool = False) -> Tensor:
    """int32 [T]: the id of the largest score of all ranks, the lowest id among equals.

    scores [T] without NaN, ids [T]: of this rank
    flag_nonfinite  NO_TOKEN if the largest score is not finite
    """
    return ranks.best(scores, ids.int(), flag_nonfinite=flag_nonfinite)


def token_logits_of_ranks(logits: Tensor, first: int, token_ids: Sequence[int], ranks: Collectives | None) -> Tensor:
    """[T, tokens]: the logits of these tokens alone, each from the rank that has it.

    logits  [T, number of this rank's tokens]; first is the id of the first of them
    """
    places = [one - first for one in token_ids]
    zero = logits.new_zeros(len(logits))
    own = torch.stack([logits[:, place] if 0 <= place < logits.shape[1] else zero for place in places], 1)
    return own if ranks is None else ranks.gather(own).sum(0)


def gather_logits(logits: Tensor, vocab_size: int, ranks: Collectives) -> Tensor:
    """The logits of all tokens [T, V] from those of this rank; `tokens_of` tells which tokens each rank has."""
    parts = [tokens_of(Shard(rank, ranks.ranks), vocab_size) for rank in range(ranks.ranks)]
    padded = torch.nn.functional.pad(logits, (0, parts[0].stop - logits.shape[1]))
    found = zip(ranks.gather(padded), parts, strict=True)
    return torch.cat([part[:, : tokens.stop - tokens.start] for part, tokens in found], 1)
