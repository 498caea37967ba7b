"""Attention of a later draft step in training: causal attention over the first step's keys, and J keys of the place itself.

    out = a * causal + sum_j p_j v_j      p_j = exp(q k_j * scale - lse)      a = exp(lse of the causal part - lse)

with lse the log-sum-exp of all. The way back of the causal part is that of plain attention, given out and lse (Liu et al. 2023,
arXiv 2310.01889); what is left are the single keys':

    s_j = p_j (grad v_j - grad out) * scale      d_q += sum_j s_j k_j      d_k_j = sum s_j q      d_v_j = sum p_j grad

the last two over the query heads that share a key head. Bound by memory; in torch each is some fifteen passes.
B rows of L places, H heads, KVH key heads, D head_dim, J later steps.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import FLOATS, check

PLACES = 16
SIZES = ("steps", "num_places", "length", "step_stride")
NARROW = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _heads_of(tensor, place, head, lane, heads, exists, D: tl.constexpr):
    at = (place.to(tl.int64) * heads + head)[:, None] * D + lane[None, :]
    return tl.load(tensor + at, mask=exists, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def draft_step_attention_kernel(
    q, causal, causal_lse, own_k, own_v, out, out_lse, steps, num_places, length, step_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    place, lane = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.arange(0, LANES)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    inside = place < num_places
    exists = inside[:, None] & (lane < D)[None, :]
    query = _heads_of(q, place, head, lane, HEADS, exists, D)
    mean = _heads_of(causal, place, head, lane, HEADS, exists, D)
    lse_at = (place // length * HEADS + head).to(tl.int64) * length + place % length
    top = tl.load(causal_lse + lse_at, mask=inside, other=0.0)
    total = tl.full([PLACES], 1.0, tl.float32)
    for _ in range(steps):
        key = _heads_of(own_k, place, key_head, lane, KEY_HEADS, exists, D)
        value = _heads_of(own_v, place, key_head, lane, KEY_HEADS, exists, D)
        own_k += step_stride
        own_v += step_stride
        score = tl.sum(query * key, 1) * scale
        higher = tl.maximum(top, score)
        before, weight = tl.exp(top - higher), tl.exp(score - higher)
        mean = mean * before[:, None] + value * weight[:, None]
        total = total * before + weight
        top = higher
    at = (place.to(tl.int64) * HEADS + head)[:, None] * D + lane[None, :]
    tl.store(out + at, mean / total[:, None], mask=exists)
    tl.store(out_lse + lse_at, top + tl.log(total), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def draft_step_queries_backward_kernel(
    q, grad, out, lse, own_k, own_v, grad_q, steps, num_places, length, step_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    place, lane = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.arange(0, LANES)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    inside = place < num_places
    exists = inside[:, None] & (lane < D)[None, :]
    query, slope = _heads_of(q, place, head, lane, HEADS, exists, D), _heads_of(grad, place, head, lane, HEADS, exists, D)
    drift = tl.sum(slope * _heads_of(out, place, head, lane, HEADS, exists, D), 1)
    whole = tl.load(lse + (place // length * HEADS + head).to(tl.int64) * length + place % length, mask=inside, other=0.0)
    found = _heads_of(grad_q, place, head, lane, HEADS, exists, D)
    for _ in range(steps):
        key = _heads_of(own_k, place, key_head, lane, KEY_HEADS, exists, D)
        value = _heads_of(own_v, place, key_head, lane, KEY_HEADS, exists, D)
        own_k += step_stride
        own_v += step_stride
        weight = tl.exp(tl.sum(query * key, 1) * scale - whole)
        found += (weight * (tl.sum(slope * value, 1) - drift) * scale)[:, None] * key
    at = (place.to(tl.int64) * HEADS + head)[:, None] * D + lane[None, :]
    tl.store(grad_q + at, found, mask=exists)


@triton.jit(do_not_specialize=SIZES[1:])
def draft_step_keys_backward_kernel(
    q, grad, out, lse, own_k, own_v, out_k, out_v, num_places, length, step_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    place, lane = tl.program_id(0) * PLACES + tl.arange(0, PLACES), tl.arange(0, LANES)
    key_head, base = tl.program_id(1), tl.program_id(2).to(tl.int64) * step_stride
    inside = place < num_places
    exists = inside[:, None] & (lane < D)[None, :]
    key = _heads_of(own_k + base, place, key_head, lane, KEY_HEADS, exists, D)
    value = _heads_of(own_v + base, place, key_head, lane, KEY_HEADS, exists, D)
    found_k, found_v = tl.zeros([PLACES, LANES], tl.float32), tl.zeros([PLACES, LANES], tl.float32)
    for i in range(HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + i
        query, slope = _heads_of(q, place, head, lane, HEADS, exists, D), _heads_of(grad, place, head, lane, HEADS, exists, D)
        drift = tl.sum(slope * _heads_of(out, place, head, lane, HEADS, exists, D), 1)
        whole = tl.load(lse + (place // length * HEADS + head).to(tl.int64) * length + place % length, mask=inside, other=0.0)
        weight = tl.exp(tl.sum(query * key, 1) * scale - whole)
        found_k += (weight * (tl.sum(slope * value, 1) - drift) * scale)[:, None] * query
        found_v += weight[:, None] * slope
    at = base + (place.to(tl.int64) * KEY_HEADS + key_head)[:, None] * D + lane[None, :]
    tl.store(out_k + at, found_k, mask=exists)
    tl.store(out_v + at, found_v, mask=exists)


def draft_step_attention(
    q: Tensor, causal: Tensor, causal_lse: Tensor, own: Tensor, *, scale: float, out: Tensor, out_lse: Tensor,
    interpret: bool = False,
) -> None:  # fmt: skip
    """Write the attention over both parts, and its log-sum-exp.

    q           fp32, bf16 or fp16, on a CPU also fp64 [B, L, H, D]
    causal      like q  attention over the first step's keys
    causal_lse  fp32 (fp64 for fp64) [B, H, L]
    own         [2, J, B, L, KVH, D] keys and values of the later steps, any stride between the two and between steps
    out, out_lse  like causal and causal_lse; may be the same

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("draft_step_attention", q, causal_lse, own, causal=causal, out=out)
    check("draft_step_attention: out_lse", out_lse, tuple(causal_lse.shape), causal_lse.dtype)
    if not (q.is_cuda or interpret):
        draft_step_attention_reference(q, causal, causal_lse, own, scale=scale, out=out, out_lse=out_lse)
    elif q.numel():
        draft_step_attention_kernel[(triton.cdiv(q.shape[0] * q.shape[1], PLACES), q.shape[2])](
            q, causal, causal_lse, own[0], own[1], out, out_lse, own.shape[1], *_sizes(q, own), scale, **_shape(q, own)
        )


def draft_step_attention_backward(
    q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, own: Tensor, *, scale: float, grad_q: Tensor, out_own: Tensor,
    interpret: bool = False,
) -> None:  # fmt: skip
    """Add the single keys' part to `grad_q`, and write their own gradients.

    grad       like q  of the merged output
    out, lse   what `draft_step_attention` wrote
    grad_q     like q  holds the causal part's
    out_own    like own, its strides too
    """
    _check("draft_step_attention_backward", q, lse, own, grad=grad, out=out, grad_q=grad_q)
    if out_own.shape != own.shape or out_own.dtype != q.dtype or out_own.stride() != own.stride():
        raise ValueError(
            f"draft_step_attention_backward: out_own is {list(out_own.shape)}; must be like own, {list(own.shape)}, "
            "its strides too"
        )
    if not (q.is_cuda or interpret):
        draft_step_attention_backward_reference(q, grad, out, lse, own, scale=scale, grad_q=grad_q, out_own=out_own)
    elif q.numel() and own.shape[1]:
        blocks = triton.cdiv(q.shape[0] * q.shape[1], PLACES)
        draft_step_queries_backward_kernel[(blocks, q.shape[2])](
            q, grad, out, lse, own[0], own[1], grad_q, own.shape[1], *_sizes(q, own), scale, **_shape(q, own)
        )
        draft_step_keys_backward_kernel[(blocks, own.shape[4], own.shape[1])](
            q, grad, out, lse, own[0], own[1], out_own[0], out_own[1], *_sizes(q, own), scale, **_shape(q, own)
        )


def _check(name: str, q: Tensor, lse: Tensor, own: Tensor, **others: Tensor) -> None:
    rows, length, heads, size = q.shape
    check(f"{name}: q", q, (rows, length, heads, size), *(NARROW if q.is_cuda else FLOATS))
    check(f"{name}: lse", lse, (rows, heads, length), torch.promote_types(q.dtype, torch.float32))
    for other, tensor in others.items():
        check(f"{name}: {other}", tensor, tuple(q.shape), q.dtype)
    if own.ndim != 6 or own.shape[0] != 2 or heads % max(1, own.shape[4]):
        raise ValueError(f"{name}: own is {list(own.shape)}; must be [2, J, B, L, KVH, D] with KVH a divisor of {heads} heads")
    for part in own.flatten(0, 1) if own.shape[1] and own.is_contiguous() else [x for half in own for x in half]:
        check(f"{name}: own", part, (rows, length, own.shape[4], size), q.dtype)


def _sizes(q: Tensor, own: Tensor) -> tuple[int, int, int]:
    return q.shape[0] * q.shape[1], q.shape[1], own.stride(1)


def _shape(q: Tensor, own: Tensor) -> dict[str, int]:
    size = q.shape[3]
    return {
        "HEADS": q.shape[2], "KEY_HEADS": own.shape[4], "D": size, "LANES": triton.next_power_of_2(size), "PLACES": PLACES,
        "num_warps": 4,
    }  # fmt: skip


def draft_step_attention_reference(
    q: Tensor, causal: Tensor, causal_lse: Tensor, own: Tensor, *, scale: float, out: Tensor, out_lse: Tensor
) -> None:
    """The same in plain torch."""
    own_k, own_v = _widened(own, q)
    scores = _scores(q, own_k, scale)
    merged = torch.cat([causal_lse.transpose(1, 2).unsqueeze(0), scores]).logsumexp(0)
    weights = (scores - merged).exp().unsqueeze(-1)
    share = (causal_lse.transpose(1, 2) - merged).exp().unsqueeze(-1)
    out.copy_(share * causal + (weights * own_v).sum(0))
    out_lse.copy_(merged.transpose(1, 2))


def draft_step_attention_backward_reference(
    q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, own: Tensor, *, scale: float, grad_q: Tensor, out_own: Tensor
) -> None:
    """The same in plain torch."""
    own_k, own_v = _widened(own, q)
    slope = grad.to(own_k.dtype)
    weights = (_scores(q, own_k, scale) - lse.transpose(1, 2)).exp()
    drift = (slope * out).sum(-1)
    grad_scores = (weights * ((slope * own_v).sum(-1) - drift) * scale).unsqueeze(-1)
    grad_q += (grad_scores * own_k).sum(0).to(grad_q.dtype)
    for part, by_head in enumerate((grad_scores * q, weights.unsqueeze(-1) * slope)):
        out_own[part] = by_head.unflatten(3, (own.shape[4], -1)).sum(4).to(out_own.dtype)


def _widened(own: Tensor, q: Tensor) -> Tensor:
    """[2, J, B, L, H, D]: each key head for all of its query heads."""
    wide = own.to(torch.promote_types(q.dtype, torch.float32))
    return wide.repeat_interleave(q.shape[2] // own.shape[4], 4)


def _scores(q: Tensor, own_k: Tensor, scale: float) -> Tensor:
    """[J, B, L, H]"""
    return (q.to(own_k.dtype) * own_k).sum(-1) * scale


def main() -> None:
    bench = Bench("own_keys")
    for rows, length, heads, key_heads, size in ((64, 512, 9, 3, 64), (16, 1024, 32, 8, 128)):
        for steps in (1, 5):
            qs = [torch.randn(rows, length, heads, size, device=bench.device).bfloat16() for _ in range(bench.num_copies)]
            own = torch.randn(2, steps, rows, length, key_heads, size, device=bench.device).bfloat16()
            causal, out, grad, grad_q = (torch.randn_like(qs[0]) for _ in range(4))
            lse, out_lse = torch.randn(2, rows, heads, length, device=bench.device)
            given, shape = {"scale": size**-0.5, "out": out, "out_lse": out_lse}, f"{rows}x{length} H={heads} J={steps}"
            bench.row(
                shape,
                [partial(draft_step_attention, q, causal, lse, own, **given) for q in qs],
                [partial(draft_step_attention_reference, q, causal, lse, own, **given) for q in qs],
                num_bytes=3 * out.nbytes + own.nbytes,
            )
            back = {"scale": size**-0.5, "grad_q": grad_q, "out_own": torch.empty_like(own)}
            bench.row(
                f"{shape}, way back",
                [partial(draft_step_attention_backward, q, grad, out, lse, own, **back) for q in qs],
                [partial(draft_step_attention_backward_reference, q, grad, out, lse, own, **back) for q in qs],
                num_bytes=5 * out.nbytes + 2 * own.nbytes,
            )


if __name__ == "__main__":
    main()
