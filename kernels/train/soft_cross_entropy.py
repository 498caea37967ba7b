"""Cross entropy of each row with a teacher's distribution, and its gradient in place of the logits: the loss of a draft head.

    loss = weight * (logsumexp(x) - sum p x)    gradient = weight * (softmax(x) - p)    hit = weight if argmax x is the teacher's

with x the logits and p the teacher's probabilities over the draft vocabulary. With a share of the distance, and q = softmax(x):

    loss = weight * ((1 - share) * (logsumexp(x) - sum p x) + share * d)      d = sum |q - p|
    gradient = weight * ((1 - share) * (q - p) + share * q (s - sum q s))     s = sign(q - p)

Bound by memory: logits and probabilities are read and the gradient is written; later reads of a row hit the cache. Rows of weight
0 are not read. Plain torch takes some fifteen passes.
Source: the losses of EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def soft_cross_entropy_kernel(
    logits, probs, weights, best_ids, out_loss, out_hits, out_distance, vocab, SHARE: tl.constexpr, ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x_row, p_row = logits + row * vocab, probs + row * vocab
    weight = tl.load(weights + row).to(ACC)
    has_weight = weight != 0
    best = tl.full([BLOCK], float("-inf"), ACC)
    best_column = tl.zeros([BLOCK], tl.int32)
    total, dot = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
    end = tl.where(has_weight, vocab, 0)
    for first in range(0, end, BLOCK):
        ids = first + lanes
        x = tl.load(x_row + ids, mask=ids < vocab, other=float("-inf")).to(ACC)
        p = tl.load(p_row + ids, mask=ids < vocab, other=0.0).to(ACC)
        higher = tl.maximum(best, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(best - shift) + tl.exp(x - shift)
        dot += p * tl.where(ids < vocab, x, 0.0)
        best_column = tl.where(x > best, ids, best_column)
        best = higher
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, best_column, vocab), 0)
    top = tl.where(has_weight, top, 0.0)
    lse = top + tl.log(tl.where(has_weight, tl.sum(total * tl.exp(best - top), 0), 1.0))
    loss, turn = lse - tl.sum(dot, 0), 0.0
    if out_distance is not None:
        distance, signs = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
        for first in range(0, end, BLOCK):
            ids = first + lanes
            q = tl.exp(tl.load(x_row + ids, mask=ids < vocab, other=float("-inf")).to(ACC) - lse)
            above = q - tl.load(p_row + ids, mask=ids < vocab, other=0.0).to(ACC)
            distance += tl.abs(above)
            signs += tl.where(above > 0, q, tl.where(above < 0, -q, 0.0))
        apart, turn = tl.sum(distance, 0), tl.sum(signs, 0)
        tl.store(out_distance + row, apart)
        loss = (1 - SHARE) * loss + SHARE * apart
    tl.store(out_loss + row, weight * loss)
    tl.store(out_hits + row, tl.where(winner == tl.load(best_ids + row), weight, 0.0))
    for first in range(0, vocab, BLOCK):
        ids = first + lanes
        inside = ids < end
        x = tl.load(x_row + ids, mask=inside, other=0.0).to(ACC)
        p = tl.load(p_row + ids, mask=inside, other=0.0).to(ACC)
        q = tl.exp(x - lse)
        grad = q - p
        if out_distance is not None:
            sign = tl.where(grad > 0, 1.0, tl.where(grad < 0, -1.0, 0.0))
            grad = (1 - SHARE) * grad + SHARE * q * (sign - turn)
        grad = tl.where(inside, weight * grad, 0.0)
        tl.store(x_row + ids, grad.to(logits.dtype.element_ty), mask=ids < vocab)


def soft_cross_entropy(
    logits: Tensor, probs: Tensor, weights: Tensor, best_ids: Tensor, *, out_loss: Tensor, out_hits: Tensor,
    out_distance: Tensor | None = None, share: float = 0.0, interpret: bool = False,
) -> None:
    """Write loss (nats) and hits of each row, and overwrite finite logits with the gradient of the loss.

    logits    fp32, bf16, fp16 or fp64 [N, V]  in: logits, out: gradient
    probs     floating [N, V]  rows of sum 1
    weights   fp32 or fp64 [N]  0 skips a row
    best_ids  int64 [N]  the teacher's likeliest column; a tie of logits counts as its lowest column
    out_loss, out_hits  fp32 [N], fp64 for fp64 logits
    out_distance  like out_loss: d of each row, 0 where it is skipped; None: there is no such part of the loss
    share     of d in the loss

    Does not synchronise. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, vocab = logits.shape
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    check("soft_cross_entropy: logits", logits, (num_rows, vocab), *FLOATS)
    check("soft_cross_entropy: probs", probs, (num_rows, vocab), *FLOATS)
    check("soft_cross_entropy: weights", weights, (num_rows,), torch.float32, torch.float64)
    check("soft_cross_entropy: best_ids", best_ids, (num_rows,), torch.int64)
    check("soft_cross_entropy: out_loss", out_loss, (num_rows,), wide)
    check("soft_cross_entropy: out_hits", out_hits, (num_rows,), wide)
    if out_distance is not None:
        check("soft_cross_entropy: out_distance", out_distance, (num_rows,), wide)
    elif share:
        raise ValueError("soft_cross_entropy: share without out_distance; give both")
    if not (logits.is_cuda or interpret):
        soft_cross_entropy_reference(
            logits, probs, weights, best_ids, out_loss=out_loss, out_hits=out_hits, out_distance=out_distance, share=share
        )
    elif num_rows:
        soft_cross_entropy_kernel[(num_rows,)](
            logits, probs, weights, best_ids, out_loss, out_hits, out_distance, vocab, SHARE=share,
            ACC=tl.float64 if wide is torch.float64 else tl.float32, BLOCK=min(BLOCK, max(16, triton.next_power_of_2(vocab))),
            num_warps=NUM_WARPS,
        )


def soft_cross_entropy_reference(
    logits: Tensor, probs: Tensor, weights: Tensor, best_ids: Tensor, *, out_loss: Tensor, out_hits: Tensor,
    out_distance: Tensor | None = None, share: float = 0.0,
) -> None:
    """The same in plain torch."""
    x, p, w = (t.to(out_loss.dtype) for t in (logits, probs, weights))
    logp = x.log_softmax(-1)
    q = logp.exp()
    loss, gradient = -(p * logp).sum(-1), q - p
    if out_distance is not None:
        sign, apart = gradient.sign(), gradient.abs().sum(-1)
        out_distance.copy_(torch.where(w != 0, apart, 0))
        loss = (1 - share) * loss + share * apart
        gradient = (1 - share) * gradient + share * q * (sign - (q * sign).sum(-1, keepdim=True))
    out_loss.copy_(loss * w)
    out_hits.copy_((x.argmax(-1) == best_ids) * w)
    logits.copy_(gradient * w[:, None])
