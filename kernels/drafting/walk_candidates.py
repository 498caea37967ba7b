"""Walk over the candidates of a block's drafts, where each draft changes the scores of the next:

    z[c] = scores[k, c] + factor * (w2[ids[k, c]] . (w1[prev] * gate[k])),   draft k = the candidate of the largest z, then prev

factor is 1 / temperature of a sampled row, whose scores are logits / temperature + noise, and 1 of a greedy one. gate is 1 of a
Markov head, and comes from the draft's state of DFlash2's selector. How sure each choice is, where it is asked for: as `argmax`
counts it, of the choice among the candidates; or of the estimate

    sigmoid(sure_of_state[k] + sure_of_token . w1[prev])

One program a row: K steps, and a step reads 1 + C rows of `rank` numbers. Bound by latency: K dependent reads.
Source: the Markov head of DSpark (arXiv 2607.05147), for which few candidates suffice (vLLM's `dspark_draft_topk`); the candidate
selector of DFlash2 (https://github.com/z-lab/dflash, dflash/model.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.sampling.argmax import confidence_bin, confidence_of


@triton.jit(do_not_specialize=["num_steps"])
def walk_candidates_kernel(
    scores, ids, prev, w1, w2, gate, map_ids, temperature, sure_of_state, sure_of_token, out_ids, out_confidence, num_steps,
    out_stride, confidence_stride, prev_stride, RANK: tl.constexpr, LANES: tl.constexpr, COUNT: tl.constexpr,
    CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    r, c = tl.arange(0, LANES), tl.arange(0, CANDIDATES)
    of_rank, exists = r < RANK, c < COUNT
    await_earlier(PDL)
    factor = 1.0
    if temperature is not None:
        temp = tl.load(temperature + row)
        factor = tl.where(temp > 0, 1.0 / tl.where(temp > 0, temp, 1.0), 1.0)
    if sure_of_token is not None:
        weight = tl.load(sure_of_token + r, mask=of_rank, other=0.0).to(tl.float32)
    token = tl.load(prev + row * prev_stride).to(tl.int64)
    for k in range(num_steps):
        at = (row * num_steps + k) * COUNT + c
        score = tl.load(scores + at, mask=exists, other=float("-inf")).to(tl.float32)
        draft = tl.load(ids + at, mask=exists, other=0)
        before = tl.load(w1 + token * RANK + r, mask=of_rank, other=0.0).to(tl.float32)
        context = before
        if gate is not None:
            context = before * tl.load(gate + (row * num_steps + k) * RANK + r, mask=of_rank, other=0.0).to(tl.float32)
        after = tl.load(w2 + draft[:, None] * RANK + r[None, :], mask=exists[:, None] & of_rank[None, :], other=0.0)
        z = score + factor * tl.sum(after.to(tl.float32) * context[None, :], 1)
        z = tl.where(z == z, z, float("-inf"))  # tl.max ignores NaN; such a candidate is never better than another
        top = tl.max(z, 0)
        place = tl.min(tl.where((z == top) & exists, c, CANDIDATES - 1), 0)
        chosen = tl.sum(tl.where(c == tl.minimum(place, COUNT - 1), draft, 0), 0)
        if out_confidence is not None:
            if sure_of_state is not None:
                odds = tl.load(sure_of_state + row * num_steps + k).to(tl.float32)
                if sure_of_token is not None:
                    odds += tl.sum(weight * before, 0)
                step = tl.minimum(tl.maximum(tl.floor(4 * (odds + 3)), 0), 31).to(tl.int32)
                step = tl.where(odds == odds, step, 0)
            else:
                known = tl.where(top > float("-inf"), top, 0)
                step = confidence_bin(top, tl.sum(tl.where(z > float("-inf"), tl.exp(z - known), 0), 0))
            tl.store(out_confidence + row * confidence_stride + k, step)
        if map_ids is not None:
            chosen = tl.load(map_ids + chosen).to(tl.int64)
        tl.store(out_ids + row * out_stride + k, chosen.to(tl.int32))
        token = chosen


def walk_candidates(
    scores: Tensor,
    ids: Tensor,
    prev: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    out_ids: Tensor,
    gate: Tensor | None = None,
    map_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    sure_of_state: Tensor | None = None,
    sure_of_token: Tensor | None = None,
    out_confidence: Tensor | None = None,
    interpret: bool = False,
) -> None:
    """Choose K drafts of each of R rows, one after another, each among its C candidates; the first of equals wins.

    scores       fp32, or fp64 in plain torch, [R, K, C]  NaN counts as -inf; with none above -inf any candidate is the draft
    ids          int64 [R, K, C]  draft id of each, below V
    prev         int32 [R] of any stride: the token before the first draft, as target id
    w1           [target tokens, rank];  w2 [V, rank], fp32, bf16, fp16 or fp64
    out_ids      int32 [R, K]  target ids; rows may be slices of wider ones
    gate         [R, K, rank] of the dtype of w1; None: 1
    map_ids      int32 [V] draft id -> target id; None: they are equal
    temperature  fp32 [R] of the rows whose scores hold noise; None: of no row
    sure_of_state  fp32 or fp64 [R, K], sure_of_token [rank] of its dtype: log odds that the draft is accepted; None: the
                 confidence is that of the choice among the candidates
    out_confidence  int32 [R, K] or None; rows may be slices of wider ones

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, steps, count = scores.shape
    rank, name = w1.shape[1], "walk_candidates"
    check(f"{name}: scores", scores, (num_rows, steps, count), torch.float32, torch.float64)
    check(f"{name}: ids", ids, (num_rows, steps, count), torch.int64)
    check(f"{name}: prev", prev, (num_rows,), torch.int32, strided=True)
    check(f"{name}: w1", w1, (w1.shape[0], rank), *FLOATS)
    check(f"{name}: w2", w2, (w2.shape[0], rank), w1.dtype)
    for key, out in (("out_ids", out_ids), ("out_confidence", out_confidence)):
        if out is not None:
            check(f"{name}: {key}", out, (num_rows, steps), torch.int32, rows=True)
    if gate is not None:
        check(f"{name}: gate", gate, (num_rows, steps, rank), w1.dtype)
    if map_ids is not None:
        check(f"{name}: map_ids", map_ids, (w2.shape[0],), torch.int32)
    if temperature is not None:
        check(f"{name}: temperature", temperature, (num_rows,), torch.float32)
    if sure_of_state is not None:
        check(f"{name}: sure_of_state", sure_of_state, (num_rows, steps), torch.float32, torch.float64)
        if sure_of_token is not None:
            check(f"{name}: sure_of_token", sure_of_token, (rank,), sure_of_state.dtype)
    elif sure_of_token is not None:
        raise ValueError(f"{name}: sure_of_token without sure_of_state; give both")
    if not (scores.is_cuda or interpret) or scores.dtype is torch.float64:
        walk_candidates_reference(
            scores, ids, prev, w1, w2, out_ids=out_ids, gate=gate, map_ids=map_ids, temperature=temperature,
            sure_of_state=sure_of_state, sure_of_token=sure_of_token, out_confidence=out_confidence,
        )
    elif num_rows:
        walk_candidates_kernel[(num_rows,)](
            scores, ids, prev, w1, w2, gate, map_ids, temperature, sure_of_state, sure_of_token, out_ids, out_confidence, steps,
            out_ids.stride(0), 0 if out_confidence is None else out_confidence.stride(0), prev.stride(0), RANK=rank,
            LANES=triton.next_power_of_2(rank), COUNT=count, CANDIDATES=triton.next_power_of_2(count), num_warps=4,
            **launch_args(scores),
        )


def walk_candidates_reference(
    scores: Tensor,
    ids: Tensor,
    prev: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    out_ids: Tensor,
    gate: Tensor | None = None,
    map_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    sure_of_state: Tensor | None = None,
    sure_of_token: Tensor | None = None,
    out_confidence: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    factor = torch.ones_like(scores[:, 0, 0], dtype=wide)
    if temperature is not None:
        factor = torch.where(temperature > 0, 1 / temperature.to(wide), factor)
    token = prev.long()
    for k in range(scores.shape[1]):
        before = w1[token].to(wide)
        context = before if gate is None else before * gate[:, k].to(wide)
        bias = (w2[ids[:, k]].to(wide) @ context.unsqueeze(2)).squeeze(2)
        z = scores[:, k].to(wide) + factor.unsqueeze(1) * bias
        z = torch.where(z.isnan(), float("-inf"), z)
        top, place = z.max(1)
        chosen = ids[:, k].gather(1, place.unsqueeze(1)).squeeze(1)
        if out_confidence is not None:
            if sure_of_state is None:
                sure = confidence_of(torch.where(z > float("-inf"), torch.exp(z - top.unsqueeze(1)), 0).sum(1))
                sure = torch.where(top.isfinite(), sure, 0)
            else:
                odds = sure_of_state[:, k]
                if sure_of_token is not None:
                    odds = odds + before.to(odds.dtype) @ sure_of_token
                sure = (4 * (odds.nan_to_num(-9.0) + 3)).floor().clamp(0, 31).int()
            out_confidence[:, k] = sure
        token = chosen if map_ids is None else map_ids[chosen].long()
        out_ids[:, k] = token.int()
