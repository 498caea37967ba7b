"""Attention of queries to the first keys of their row, each query to as many as its own limit says, with its gradients:

    out = sum_{j < limit} p_j v_j      p_j = exp(q k_j * scale - lse)      lse = log sum_{j < limit} exp(q k_j * scale)

The blocks of a drafter in training read the context before their anchors with it: many queries in the middle of a row, whose
score matrix is never stored. The output can be merged with other keys by lse, which therefore has a gradient of its own:

    s_j = p_j (grad v_j - delta) * scale      delta = grad out - grad_lse
    d_q = sum_j s_j k_j      d_k_j = sum s_j q      d_v_j = sum p_j grad

The last two sum over all queries that read the key, and over the query heads that share its head. Limits of a row ascend, so
tiles of queries end, and tiles of keys begin, where the limits say. Bound by arithmetic, as FlashAttention (arXiv 2205.14135).
Q queries of B rows, L keys a row, H heads, KVH key heads, D head_dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.card import Card, card_of
from batchspec.kernels.common.checks import FLOATS, check

TILES = {256: ((64, 64, 3), (64, 64, 2)), 512: ((64, 32, 2), (32, 32, 2)), 1024: ((32, 32, 1), (16, 16, 1))}
"""Queries and keys of a tile, and stages of a loop, by the most bytes of a head's lanes. The kernels of the gradients hold two
tiles of queries and two of keys a stage, and the weights: the second tile is for cards with less than LARGE_BYTES of shared
memory a block (compute capability 8.6, 8.9 and 12)."""
LARGE_BYTES = 160 << 10
NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels read."""


@triton.jit
def _tile(tensor, at, head, lane, heads, exists, D: tl.constexpr):
    return tl.load(tensor + (at.to(tl.int64) * heads + head)[:, None] * D + lane[None, :], mask=exists, other=0.0)


@triton.jit
def _weights(query, key, key_at, limit, lse, scale):
    """[queries, keys] probabilities, 0 beyond the limits."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    return tl.where(key_at[None, :] < limit[:, None], tl.exp(score - lse[:, None]), 0.0)


@triton.jit
def _queries(q, starts, limits, HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr):
    """Of a program by queries: its row, head and lanes; where its queries are, which exist, their limits, and they themselves."""
    row, head, lane = tl.program_id(2), tl.program_id(1), tl.arange(0, LANES)
    at, end = tl.load(starts + row) + tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.load(starts + row + 1)
    inside = at < end
    exists = inside[:, None] & (lane < D)[None, :]
    limit = tl.load(limits + at, mask=inside, other=0)
    return row, head, lane, at, inside, exists, limit, _tile(q, at, head, lane, HEADS, exists, D)


@triton.jit(do_not_specialize=["length"])
def prefix_attention_kernel(
    q, k, v, starts, limits, out, out_lse, length, scale, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr,
    LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    row, head, lane, at, inside, exists, limit, query = _queries(q, starts, limits, HEADS, D, LANES, QUERIES)
    key_head, last = head // (HEADS // KEY_HEADS), tl.max(limit, 0)
    acc = tl.zeros([QUERIES, LANES], tl.float32)
    top, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
    for first in range(0, last, KEYS):
        key_at = first + tl.arange(0, KEYS)
        known = (key_at < last)[:, None] & (lane < D)[None, :]
        key = _tile(k, row * length + key_at, key_head, lane, KEY_HEADS, known, D)
        value = _tile(v, row * length + key_at, key_head, lane, KEY_HEADS, known, D)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(key_at[None, :] < limit[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight, rescale = tl.exp(score - shift[:, None]), tl.exp(top - shift)
        acc = acc * rescale[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * rescale + tl.sum(weight, 1)
        top = higher
    some = total > 0
    whole = tl.where(some, total, 1.0)
    tl.store(out + (at.to(tl.int64) * HEADS + head)[:, None] * D + lane[None, :], acc / whole[:, None], mask=exists)
    tl.store(out_lse + at.to(tl.int64) * HEADS + head, tl.where(some, top + tl.log(whole), float("-inf")), mask=inside)


@triton.jit(do_not_specialize=["length"])
def prefix_queries_backward_kernel(
    q, k, v, starts, limits, grad, lse, delta, out_q, length, scale, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    row, head, lane, at, inside, exists, limit, query = _queries(q, starts, limits, HEADS, D, LANES, QUERIES)
    key_head, last = head // (HEADS // KEY_HEADS), tl.max(limit, 0)
    grad_out, own = _tile(grad, at, head, lane, HEADS, exists, D), at.to(tl.int64) * HEADS + head
    own_lse, own_delta = tl.load(lse + own, mask=inside, other=0.0), tl.load(delta + own, mask=inside, other=0.0)
    own_lse = tl.where(own_lse == float("-inf"), 0.0, own_lse)  # no key: its weights are 0
    acc = tl.zeros([QUERIES, LANES], tl.float32)
    for first in range(0, last, KEYS):
        key_at = first + tl.arange(0, KEYS)
        known = (key_at < last)[:, None] & (lane < D)[None, :]
        key = _tile(k, row * length + key_at, key_head, lane, KEY_HEADS, known, D)
        value = _tile(v, row * length + key_at, key_head, lane, KEY_HEADS, known, D)
        weight = _weights(query, key, key_at, limit, own_lse, scale)
        grad_score = weight * (tl.dot(grad_out, tl.trans(value), input_precision="ieee") - own_delta[:, None]) * scale
        acc += tl.dot(grad_score.to(key.dtype), key, input_precision="ieee")
    tl.store(out_q + own[:, None] * D + lane[None, :], acc, mask=exists)


@triton.jit(do_not_specialize=["length"])
def prefix_keys_backward_kernel(
    q, k, v, starts, limits, grad, lse, delta, out_k, out_v, length, scale, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    D: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    row, key_head, lane = tl.program_id(2), tl.program_id(1), tl.arange(0, LANES)
    first = tl.program_id(0) * KEYS
    key_at = first + tl.arange(0, KEYS)
    known = (key_at < length)[:, None] & (lane < D)[None, :]
    key = _tile(k, row * length + key_at, key_head, lane, KEY_HEADS, known, D)
    value = _tile(v, row * length + key_at, key_head, lane, KEY_HEADS, known, D)
    grad_k, grad_v = tl.zeros([KEYS, LANES], tl.float32), tl.zeros([KEYS, LANES], tl.float32)
    end = tl.load(starts + row + 1)
    for begin in range(tl.load(starts + row), end, QUERIES):
        at = begin + tl.arange(0, QUERIES)
        inside = at < end
        limit = tl.load(limits + at, mask=inside, other=0)
        if tl.max(limit, 0) > first:
            exists = inside[:, None] & (lane < D)[None, :]
            for i in range(HEADS // KEY_HEADS):
                head = key_head * (HEADS // KEY_HEADS) + i
                query, grad_out = _tile(q, at, head, lane, HEADS, exists, D), _tile(grad, at, head, lane, HEADS, exists, D)
                own = at.to(tl.int64) * HEADS + head
                own_lse, own_delta = tl.load(lse + own, mask=inside, other=0.0), tl.load(delta + own, mask=inside, other=0.0)
                own_lse = tl.where(own_lse == float("-inf"), 0.0, own_lse)
                weight = _weights(query, key, key_at, limit, own_lse, scale)
                grad_v += tl.dot(tl.trans(weight).to(grad_out.dtype), grad_out, input_precision="ieee")
                grad_score = weight * (tl.dot(grad_out, tl.trans(value), input_precision="ieee") - own_delta[:, None]) * scale
                grad_k += tl.dot(tl.trans(grad_score).to(query.dtype), query, input_precision="ieee")
    at = ((row * length + key_at).to(tl.int64) * KEY_HEADS + key_head)[:, None] * D + lane[None, :]
    tl.store(out_k + at, grad_k, mask=known)
    tl.store(out_v + at, grad_v, mask=known)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, limits: Tensor, *, most: int, scale: float, out: Tensor, out_lse: Tensor,
    interpret: bool = False,
) -> None:
    """Write the attention of each query and its log-sum-exp; a query of limit 0 gets 0 and -inf.

    q        fp32, bf16 or fp16, on a CPU also fp64 [Q, H, D], those of a row together
    k, v     like q [B, L, KVH, D]
    starts   int32 [B + 1]  the first query of each row, and Q
    limits   int32 [Q]  number of first keys that each reads, at most L; ascending within a row
    most     no row has more queries
    out      like q;  out_lse  fp32 (fp64 for fp64) [Q, H]

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("prefix_attention", q, k, starts, limits, out_lse, v=v, out=out)
    if not (q.is_cuda or interpret):
        prefix_attention_reference(q, k, v, starts, limits, scale=scale, out=out, out_lse=out_lse)
    elif q.numel():
        own = _launch_args(q, k)
        grid = (triton.cdiv(most, own["QUERIES"]), q.shape[1], len(k))
        prefix_attention_kernel[grid](q, k, v, starts, limits, out, out_lse, k.shape[1], scale, **own)


def prefix_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, limits: Tensor, *, most: int, scale: float, grad: Tensor, lse: Tensor,
    delta: Tensor, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, interpret: bool = False,
) -> None:
    """Write the gradients of q, k and v.

    grad    like q  gradient of `out`
    lse     as written by `prefix_attention`;  delta like lse: sum of grad * out, less the gradient of lse
    grad_q, grad_k, grad_v  like q, k and v

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("prefix_attention_backward", q, k, starts, limits, lse, v=v, grad_k=grad_k, grad_v=grad_v, grad=grad, grad_q=grad_q)
    check("prefix_attention_backward: delta", delta, tuple(lse.shape), lse.dtype)
    if not (q.is_cuda or interpret):
        prefix_attention_backward_reference(
            q, k, v, starts, limits, scale=scale, grad=grad, lse=lse, delta=delta, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v
        )
        return
    own = _launch_args(q, k)
    if q.numel():
        prefix_queries_backward_kernel[triton.cdiv(most, own["QUERIES"]), q.shape[1], len(k)](
            q, k, v, starts, limits, grad, lse, delta, grad_q, k.shape[1], scale, **own
        )
    if k.numel():
        prefix_keys_backward_kernel[triton.cdiv(k.shape[1], own["KEYS"]), k.shape[2], len(k)](
            q, k, v, starts, limits, grad, lse, delta, grad_k, grad_v, k.shape[1], scale, **own
        )


def _check(name: str, q: Tensor, k: Tensor, starts: Tensor, limits: Tensor, lse: Tensor, **others: Tensor) -> None:
    count, heads, size = q.shape
    if k.ndim != 4 or heads % max(1, k.shape[2]):
        raise ValueError(f"{name}: k is {list(k.shape)}; must be [B, L, KVH, D] with KVH a divisor of {heads} heads")
    check(f"{name}: q", q, (count, heads, size), *(NARROW if q.is_cuda else FLOATS))
    check(f"{name}: k", k, (*k.shape[:3], size), q.dtype)
    check(f"{name}: starts", starts, (len(k) + 1,), torch.int32)
    check(f"{name}: limits", limits, (count,), torch.int32)
    check(f"{name}: lse", lse, (count, heads), torch.promote_types(q.dtype, torch.float32))
    for other, tensor in others.items():
        like = k if other.endswith(("k", "v")) else q
        check(f"{name}: {other}", tensor, tuple(like.shape), q.dtype)


def tile_of(head_dim: int, itemsize: int, card: Card) -> tuple[int, int, int]:
    """Queries and keys of a tile, and stages of a loop. Raises ValueError for heads that are too large for every tile."""
    row_bytes = _lanes(head_dim) * itemsize
    sizes = next((tiles for most, tiles in TILES.items() if row_bytes <= most), None)
    if sizes is None:
        raise ValueError(
            f"prefix_attention: head_dim {head_dim} of {itemsize} bytes a value does not fit shared memory; "
            f"supported are at most {max(TILES)} bytes a head: choose a dtype of fewer bytes"
        )
    large, small = sizes
    return large if card.block_shared_bytes >= LARGE_BYTES else small


def runs_on_gpu(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels read heads of this size in this dtype."""
    return dtype in NARROW and _lanes(head_dim) * dtype.itemsize <= max(TILES)


def _lanes(head_dim: int) -> int:
    lanes: int = max(16, triton.next_power_of_2(head_dim))
    return lanes


def _launch_args(q: Tensor, k: Tensor) -> dict[str, int]:
    queries, keys, stages = tile_of(q.shape[2], q.element_size(), card_of(q.device))
    return {
        "HEADS": q.shape[1], "KEY_HEADS": k.shape[2], "D": q.shape[2], "LANES": _lanes(q.shape[2]), "QUERIES": queries,
        "KEYS": keys, "num_warps": 4, "num_stages": stages,
    }


def prefix_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, limits: Tensor, *, scale: float, out: Tensor, out_lse: Tensor
) -> None:
    """The same in plain torch, row by row."""
    for row, (begin, end) in enumerate(pairwise(starts.tolist())):
        scores = _scores(q[begin:end], k[row], limits[begin:end], scale)
        lse = scores.logsumexp(2)
        weights = (scores - lse.nan_to_num(neginf=0.0).unsqueeze(2)).exp()
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, _widened(v[row], q)).to(q.dtype)
        out_lse[begin:end] = lse.T


def prefix_attention_backward_reference(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, limits: Tensor, *, scale: float, grad: Tensor, lse: Tensor, delta: Tensor,
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> None:
    """The same in plain torch, row by row."""
    for row, (begin, end) in enumerate(pairwise(starts.tolist())):
        part, key, value = slice(begin, end), _widened(k[row], q), _widened(v[row], q)
        wide_q, wide_grad = q[part].to(key.dtype), grad[part].to(key.dtype)
        scores = _scores(q[part], k[row], limits[part], scale)
        weights = (scores - lse[part].nan_to_num(neginf=0.0).T.unsqueeze(2)).exp()
        grad_scores = torch.einsum("qhd,khd->hqk", wide_grad, value) - delta[part].T.unsqueeze(2)
        grad_scores = weights * grad_scores * scale
        grad_q[part] = torch.einsum("hqk,khd->qhd", grad_scores, key).to(q.dtype)
        for found, mine, other in ((grad_k, grad_scores, wide_q), (grad_v, weights, wide_grad)):
            by_head = torch.einsum("hqk,qhd->khd", mine, other)
            found[row] = by_head.unflatten(1, (k.shape[2], -1)).sum(2).to(k.dtype)


def _widened(x: Tensor, q: Tensor) -> Tensor:
    """[L, H, D]: each key head repeated for all of its query heads."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, limits: Tensor, scale: float) -> Tensor:
    """[H, Q, L], -inf beyond the limits."""
    key = _widened(k, q)
    beyond = torch.arange(len(k), device=k.device) >= limits.unsqueeze(1)
    return (torch.einsum("qhd,khd->hqk", q.to(key.dtype), key) * scale).masked_fill(beyond, -torch.inf)
