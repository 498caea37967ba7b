"""Attention of a later draft step in training: causal attention over the first step's keys, and J keys of the same position.

    out = a * causal + sum_j p_j v_j      p_j = exp(q k_j * scale - lse)      a = exp(lse of the causal part - lse)

with lse the log-sum-exp of all scores: an online softmax that continues from the causal part. The backward pass of the causal
part is that of plain attention, given out and lse (Liu et al. 2023, arXiv 2310.01889); this file adds that of the J step keys:

    s_j = p_j (grad v_j - grad out) * scale      d_q += sum_j s_j k_j      d_k_j = sum s_j q      d_v_j = sum p_j grad

The last two sum over the query heads that share a key head. Bound by memory; plain torch takes some fifteen passes each.
B rows of L positions, H heads, KVH key heads, D head_dim, J later steps; T = B * L flat tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check

TOKENS = 16
SIZES = ("steps", "num_tokens", "length", "step_stride")
NARROW = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _heads_of(tensor, token, head, lane, heads, exists, D: tl.constexpr):
    at = (token.to(tl.int64) * heads + head)[:, None] * D + lane[None, :]
    return tl.load(tensor + at, mask=exists, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def draft_step_attention_kernel(
    q, causal, causal_lse, step_k, step_v, out, out_lse, steps, num_tokens, length, step_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):
    token, lane = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, LANES)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    inside = token < num_tokens
    exists = inside[:, None] & (lane < D)[None, :]
    query = _heads_of(q, token, head, lane, HEADS, exists, D)
    acc = _heads_of(causal, token, head, lane, HEADS, exists, D)
    lse_at = (token // length * HEADS + head).to(tl.int64) * length + token % length
    top = tl.load(causal_lse + lse_at, mask=inside, other=0.0)
    total = tl.full([TOKENS], 1.0, tl.float32)
    for _ in range(steps):
        key = _heads_of(step_k, token, key_head, lane, KEY_HEADS, exists, D)
        value = _heads_of(step_v, token, key_head, lane, KEY_HEADS, exists, D)
        step_k += step_stride
        step_v += step_stride
        score = tl.sum(query * key, 1) * scale
        higher = tl.maximum(top, score)
        rescale, weight = tl.exp(top - higher), tl.exp(score - higher)
        acc = acc * rescale[:, None] + value * weight[:, None]
        total = total * rescale + weight
        top = higher
    at = (token.to(tl.int64) * HEADS + head)[:, None] * D + lane[None, :]
    tl.store(out + at, acc / total[:, None], mask=exists)
    tl.store(out_lse + lse_at, top + tl.log(total), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def draft_step_queries_backward_kernel(
    q, grad, out, lse, step_k, step_v, grad_q, steps, num_tokens, length, step_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):
    token, lane = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, LANES)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    inside = token < num_tokens
    exists = inside[:, None] & (lane < D)[None, :]
    query, grad_out = _heads_of(q, token, head, lane, HEADS, exists, D), _heads_of(grad, token, head, lane, HEADS, exists, D)
    delta = tl.sum(grad_out * _heads_of(out, token, head, lane, HEADS, exists, D), 1)
    lse_token = tl.load(lse + (token // length * HEADS + head).to(tl.int64) * length + token % length, mask=inside, other=0.0)
    grad_acc = _heads_of(grad_q, token, head, lane, HEADS, exists, D)
    for _ in range(steps):
        key = _heads_of(step_k, token, key_head, lane, KEY_HEADS, exists, D)
        value = _heads_of(step_v, token, key_head, lane, KEY_HEADS, exists, D)
        step_k += step_stride
        step_v += step_stride
        weight = tl.exp(tl.sum(query * key, 1) * scale - lse_token)
        grad_acc += (weight * (tl.sum(grad_out * value, 1) - delta) * scale)[:, None] * key
    at = (token.to(tl.int64) * HEADS + head)[:, None] * D + lane[None, :]
    tl.store(grad_q + at, grad_acc, mask=exists)


@triton.jit(do_not_specialize=SIZES[1:])
def draft_step_keys_backward_kernel(
    q, grad, out, lse, step_k, step_v, out_k, out_v, num_tokens, length, step_stride, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr,
):
    token, lane = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, LANES)
    key_head, base = tl.program_id(1), tl.program_id(2).to(tl.int64) * step_stride
    inside = token < num_tokens
    exists = inside[:, None] & (lane < D)[None, :]
    key = _heads_of(step_k + base, token, key_head, lane, KEY_HEADS, exists, D)
    value = _heads_of(step_v + base, token, key_head, lane, KEY_HEADS, exists, D)
    grad_k, grad_v = tl.zeros([TOKENS, LANES], tl.float32), tl.zeros([TOKENS, LANES], tl.float32)
    for i in range(HEADS // KEY_HEADS):
        head = key_head * (HEADS // KEY_HEADS) + i
        query, grad_out = _heads_of(q, token, head, lane, HEADS, exists, D), _heads_of(grad, token, head, lane, HEADS, exists, D)
        delta = tl.sum(grad_out * _heads_of(out, token, head, lane, HEADS, exists, D), 1)
        lse_token = tl.load(lse + (token // length * HEADS + head).to(tl.int64) * length + token % length, mask=inside, other=0.0)
        weight = tl.exp(tl.sum(query * key, 1) * scale - lse_token)
        grad_k += (weight * (tl.sum(grad_out * value, 1) - delta) * scale)[:, None] * query
        grad_v += weight[:, None] * grad_out
    at = base + (token.to(tl.int64) * KEY_HEADS + key_head)[:, None] * D + lane[None, :]
    tl.store(out_k + at, grad_k, mask=exists)
    tl.store(out_v + at, grad_v, mask=exists)


def draft_step_attention(
    q: Tensor, causal: Tensor, causal_lse: Tensor, step_kv: Tensor, *, scale: float, out: Tensor, out_lse: Tensor,
    interpret: bool = False,
) -> None:
    """Write the attention over the causal part and the step keys, and its log-sum-exp.

    q           fp32, bf16 or fp16, on a CPU also fp64 [B, L, H, D]
    causal      like q  attention over the first step's keys
    causal_lse  fp32 (fp64 for fp64) [B, H, L]
    step_kv     [2, J, B, L, KVH, D] keys and values of the later steps; any stride of the first two dimensions
    out, out_lse  like causal and causal_lse; may be the same tensors

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("draft_step_attention", q, causal_lse, step_kv, causal=causal, out=out)
    check("draft_step_attention: out_lse", out_lse, tuple(causal_lse.shape), causal_lse.dtype)
    if not (q.is_cuda or interpret):
        draft_step_attention_reference(q, causal, causal_lse, step_kv, scale=scale, out=out, out_lse=out_lse)
    elif q.numel():
        draft_step_attention_kernel[(triton.cdiv(q.shape[0] * q.shape[1], TOKENS), q.shape[2])](
            q, causal, causal_lse, step_kv[0], step_kv[1], out, out_lse, step_kv.shape[1], *_sizes(q, step_kv), scale,
            **_shape(q, step_kv),
        )


def draft_step_attention_backward(
    q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, step_kv: Tensor, *, scale: float, grad_q: Tensor, grad_step_kv: Tensor,
    interpret: bool = False,
) -> None:
    """Add the step keys' part to `grad_q`, and write the gradients of the step keys and values.

    grad          like q  gradient of `out`
    out, lse      as written by `draft_step_attention`
    grad_q        like q  in: the gradient of the causal part, out: the sum of both
    grad_step_kv  like step_kv, with the same strides

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("draft_step_attention_backward", q, lse, step_kv, grad=grad, out=out, grad_q=grad_q)
    if grad_step_kv.shape != step_kv.shape or grad_step_kv.dtype != q.dtype or grad_step_kv.stride() != step_kv.stride():
        raise ValueError(
            f"draft_step_attention_backward: grad_step_kv is {list(grad_step_kv.shape)}; must be like step_kv, "
            f"{list(step_kv.shape)}, with the same strides"
        )
    if not (q.is_cuda or interpret):
        draft_step_attention_backward_reference(q, grad, out, lse, step_kv, scale=scale, grad_q=grad_q, grad_step_kv=grad_step_kv)
    elif q.numel() and step_kv.shape[1]:
        blocks = triton.cdiv(q.shape[0] * q.shape[1], TOKENS)
        draft_step_queries_backward_kernel[(blocks, q.shape[2])](
            q, grad, out, lse, step_kv[0], step_kv[1], grad_q, step_kv.shape[1], *_sizes(q, step_kv), scale, **_shape(q, step_kv)
        )
        draft_step_keys_backward_kernel[(blocks, step_kv.shape[4], step_kv.shape[1])](
            q, grad, out, lse, step_kv[0], step_kv[1], grad_step_kv[0], grad_step_kv[1], *_sizes(q, step_kv), scale,
            **_shape(q, step_kv),
        )


def _check(name: str, q: Tensor, lse: Tensor, step_kv: Tensor, **others: Tensor) -> None:
    rows, length, heads, size = q.shape
    check(f"{name}: q", q, (rows, length, heads, size), *(NARROW if q.is_cuda else FLOATS))
    check(f"{name}: lse", lse, (rows, heads, length), torch.promote_types(q.dtype, torch.float32))
    for other, tensor in others.items():
        check(f"{name}: {other}", tensor, tuple(q.shape), q.dtype)
    if step_kv.ndim != 6 or step_kv.shape[0] != 2 or heads % max(1, step_kv.shape[4]):
        raise ValueError(
            f"{name}: step_kv is {list(step_kv.shape)}; must be [2, J, B, L, KVH, D] with KVH a divisor of {heads} heads"
        )
    for part in step_kv.flatten(0, 1) if step_kv.shape[1] and step_kv.is_contiguous() else [x for half in step_kv for x in half]:
        check(f"{name}: step_kv", part, (rows, length, step_kv.shape[4], size), q.dtype)


def _sizes(q: Tensor, step_kv: Tensor) -> tuple[int, int, int]:
    return q.shape[0] * q.shape[1], q.shape[1], step_kv.stride(1)


def _shape(q: Tensor, step_kv: Tensor) -> dict[str, int]:
    size = q.shape[3]
    return {
        "HEADS": q.shape[2], "KEY_HEADS": step_kv.shape[4], "D": size, "LANES": triton.next_power_of_2(size), "TOKENS": TOKENS,
        "num_warps": 4,
    }


def draft_step_attention_reference(
    q: Tensor, causal: Tensor, causal_lse: Tensor, step_kv: Tensor, *, scale: float, out: Tensor, out_lse: Tensor
) -> None:
    """The same in plain torch."""
    step_k, step_v = _widened(step_kv, q)
    scores = _scores(q, step_k, scale)
    merged = torch.cat([causal_lse.transpose(1, 2).unsqueeze(0), scores]).logsumexp(0)
    weights = (scores - merged).exp().unsqueeze(-1)
    share = (causal_lse.transpose(1, 2) - merged).exp().unsqueeze(-1)
    out.copy_(share * causal + (weights * step_v).sum(0))
    out_lse.copy_(merged.transpose(1, 2))


def draft_step_attention_backward_reference(
    q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, step_kv: Tensor, *, scale: float, grad_q: Tensor, grad_step_kv: Tensor
) -> None:
    """The same in plain torch."""
    step_k, step_v = _widened(step_kv, q)
    grad_out = grad.to(step_k.dtype)
    weights = (_scores(q, step_k, scale) - lse.transpose(1, 2)).exp()
    delta = (grad_out * out).sum(-1)
    grad_scores = (weights * ((grad_out * step_v).sum(-1) - delta) * scale).unsqueeze(-1)
    grad_q += (grad_scores * step_k).sum(0).to(grad_q.dtype)
    for part, per_head in enumerate((grad_scores * q, weights.unsqueeze(-1) * grad_out)):
        grad_step_kv[part] = per_head.unflatten(3, (step_kv.shape[4], -1)).sum(4).to(grad_step_kv.dtype)


def _widened(step_kv: Tensor, q: Tensor) -> Tensor:
    """[2, J, B, L, H, D]: each key head repeated for all of its query heads."""
    wide = step_kv.to(torch.promote_types(q.dtype, torch.float32))
    return wide.repeat_interleave(q.shape[2] // step_kv.shape[4], 4)


def _scores(q: Tensor, step_k: Tensor, scale: float) -> Tensor:
    """Scores of the step keys: [J, B, L, H]."""
    return (q.to(step_k.dtype) * step_k).sum(-1) * scale
