"""Which experts a token goes through, and what their outputs are weighed by. T tokens, E experts, k experts of a token.

All is computed in fp32 (fp64 of fp64). Experts of a token come in slots of falling weight, the lowest id first of equal weights;
of equal scores the lowest id is chosen. A pair is a token and one of its experts: pair p = t * k + s is slot s of token t, and
P = T * k. Sources: transformers, models/qwen3_moe, models/gpt_oss and models/minimax_m2 (their routers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """What grouped products read: the experts of each token, and the pairs of each expert."""

    expert_ids: Tensor
    """int32 [T, k]"""
    weights: Tensor
    """fp32 (fp64 of fp64) [T, k]"""
    pairs: Tensor
    """int32 [P], sorted by (expert, pair)"""
    offsets: Tensor
    """int32 [E + 1] expert e's pairs are pairs[offsets[e] : offsets[e + 1]]"""


def routing_of(weights: Tensor, expert_ids: Tensor, num_experts: int) -> Routing:
    """With the pairs of each expert listed. Does not synchronise."""
    by_expert = torch.sort(expert_ids.flatten(), stable=True)
    ids = torch.arange(num_experts + 1, dtype=by_expert.values.dtype, device=expert_ids.device)
    return Routing(
        expert_ids=expert_ids.int(),
        weights=weights,
        pairs=by_expert.indices.int(),
        offsets=torch.searchsorted(by_expert.values, ids, out_int32=True),
    )


def softmax_topk(logits: Tensor, top_k: int, *, norm_topk: bool) -> tuple[Tensor, Tensor]:
    """Logits [T, E] -> weights and int64 ids [T, k]: the largest of the softmax over all experts.

    Chosen by the logits: rounding may tie probabilities whose logits differ.
    norm_topk  divided by their sum
    """
    expert_ids = _largest(logits, top_k)[1]
    weights = torch.softmax(logits, -1).gather(-1, expert_ids)
    return weights / weights.sum(-1, keepdim=True) if norm_topk else weights, expert_ids


def topk_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Logits [T, E] -> weights and int64 ids [T, k]: the softmax over the k largest logits alone.

    Equal to `softmax_topk` with norm_topk up to rounding.
    """
    largest, expert_ids = _largest(logits, top_k)
    return torch.softmax(largest, -1), expert_ids


def sigmoid_topk(logits: Tensor, selection_bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Logits [T, E] -> weights and int64 ids [T, k]: chosen by sigmoid + selection_bias [E], weighed by the sigmoid alone.

    The weights are divided by their sum.
    """
    scores = torch.sigmoid(logits)
    chosen = _largest(scores + selection_bias, top_k)[1].sort(-1).values
    weights, order = _largest(scores.gather(-1, chosen), top_k)
    return weights / weights.sum(-1, keepdim=True), chosen.gather(-1, order)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Falling, the lowest place first of equals. torch.topk leaves the order of equals open."""
    ordered = torch.sort(values, dim=-1, descending=True, stable=True)
    return ordered.values[:, :count], ordered.indices[:, :count]


def combine(values: Tensor, weights: Tensor) -> Tensor:
    """Outputs of all pairs [P, H] and weights [T, k] -> their weighted sum over the slots of each token, in slot order [T, H]."""
    by_slot = values.view(*weights.shape, values.shape[1]).unbind(1)
    out = by_slot[0] * weights[:, :1]
    for slot, value in enumerate(by_slot[1:], 1):
        out += value * weights[:, slot : slot + 1]
    return out.to(values.dtype)
