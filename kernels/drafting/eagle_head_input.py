"""What a draft head reads, in one launch: out[t] = concat(norm(embedding[token]), norm(hidden[t])).

The token of flat token t is given, or it is the next one of its row: token_ids[row_ids[t], positions[t] + 1].
Rounding is that of `batchspec.kernels.norm_rope.norm`: the normed value, then its product with the weight; with a weight in fp32
once. fp32 inside (fp64 for fp64).
Bound by memory at prefill sizes (4 * H * itemsize bytes a token), by launch latency at decode sizes, where it replaces a gather,
two norms and two copies. Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.norm_rope.norm import VALUES_PER_THREAD, rms_norm_reference


@triton.jit
def store_norm(source, weight, out, lane, EPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr):
    exists = lane < WIDTH
    x = tl.load(source + lane, mask=exists, other=0.0).to(ACC)
    scale = tl.load(weight + lane, mask=exists, other=0.0)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) * (1.0 / WIDTH) + EPS))
    if weight.dtype.element_ty == out.dtype.element_ty:
        normed = normed.to(out.dtype.element_ty).to(ACC)
    tl.store(out + lane, (normed * scale.to(ACC)).to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_ids"])
def eagle_head_input_kernel(
    token_ids, row_ids, positions, hidden, embedding, embedding_norm, hidden_norm, out, token_stride, hidden_stride, out_stride,
    max_len, num_ids, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr,
):
    """With `positions` None, token_ids holds one id for each flat token, token_stride apart."""
    await_earlier(PDL)
    t = tl.program_id(0).to(tl.int64)
    index = t * token_stride
    if positions is not None:
        index = tl.load(row_ids + t).to(tl.int64) * max_len + tl.load(positions + t) + 1
        index = tl.minimum(index, num_ids - 1)
    token_id = tl.load(token_ids + index).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    out_row = out + t * out_stride
    store_norm(embedding + token_id * WIDTH, embedding_norm, out_row, lane, EPS, WIDTH, ACC)
    store_norm(hidden + t * hidden_stride, hidden_norm, out_row + WIDTH, lane, EPS, WIDTH, ACC)


def eagle_head_input(
    token_ids: Tensor, hidden: Tensor, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float, *,
    out: Tensor, row_ids: Tensor | None = None, positions: Tensor | None = None, interpret: bool = False,
) -> None:
    """Write both halves of the input of each flat token.

    token_ids       int32 [T] of any stride, or with positions [R, M], contiguous: the tokens of each row
    hidden          fp32, bf16, fp16 or fp64 [T, H]  rows may be slices of wider ones
    embedding       [V, H] of the same dtype
    embedding_norm  [H], hidden_norm [H] of the same dtype, or fp32: then the result is rounded once
    out             [T, 2H] of the same dtype: the embedding's half first
    row_ids         int32 or int64 [T], positions int64 [T]: row and position of each flat token, or both None

    A flat token at position M - 1 of its row has no next token and gets an arbitrary one: its draft is never used. Ids are not
    checked, which would read the device. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, width = hidden.shape
    check("eagle_head_input: hidden", hidden, (num_tokens, width), *FLOATS, rows=True)
    check("eagle_head_input: embedding", embedding, (embedding.shape[0], width), hidden.dtype)
    for name, norm in (("embedding_norm", embedding_norm), ("hidden_norm", hidden_norm)):
        check(f"eagle_head_input: {name}", norm, (width,), hidden.dtype, torch.promote_types(hidden.dtype, torch.float32))
    check("eagle_head_input: out", out, (num_tokens, 2 * width), hidden.dtype, rows=True)
    if (row_ids is None) != (positions is None):
        raise ValueError("eagle_head_input: row_ids and positions go together; give both or neither")
    if row_ids is not None and positions is not None:
        check("eagle_head_input: row_ids", row_ids, (num_tokens,), torch.int32, torch.int64)
        check("eagle_head_input: positions", positions, (num_tokens,), torch.int64)
    shape = (num_tokens,) if positions is None else (token_ids.shape[0], token_ids.shape[-1])
    check("eagle_head_input: token_ids", token_ids, shape, torch.int32, strided=positions is None)
    if not (hidden.is_cuda or interpret):
        eagle_head_input_reference(
            token_ids, hidden, embedding, embedding_norm, hidden_norm, eps, out=out, row_ids=row_ids, positions=positions
        )
    elif num_tokens:
        block = max(16, triton.next_power_of_2(width))
        eagle_head_input_kernel[(num_tokens,)](
            token_ids, row_ids, positions, hidden, embedding, embedding_norm, hidden_norm, out, token_ids.stride(-1),
            hidden.stride(0), out.stride(0), token_ids.shape[-1], token_ids.numel(), EPS=eps, WIDTH=width, BLOCK=block,
            ACC=tl.float64 if hidden.dtype == torch.float64 else tl.float32,
            num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))), **launch_args(hidden),
        )


def eagle_head_input_reference(
    token_ids: Tensor, hidden: Tensor, embedding: Tensor, embedding_norm: Tensor, hidden_norm: Tensor, eps: float, *,
    out: Tensor, row_ids: Tensor | None = None, positions: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    width = hidden.shape[1]
    if row_ids is not None and positions is not None:
        indices = (row_ids * token_ids.shape[1] + positions + 1).clamp_(max=token_ids.numel() - 1)
        token_ids = token_ids.view(-1).index_select(0, indices)
    rms_norm_reference(embedding.index_select(0, token_ids), embedding_norm, eps, out=out[:, :width])
    rms_norm_reference(hidden, hidden_norm, eps, out=out[:, width:])
