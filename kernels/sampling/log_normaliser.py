"""Log of the softmax denominator of each row of logits: out[t] = log(sum over v of exp(logits[t, v])).

Unlike torch.logsumexp, whose sums are ordered by the number of rows, a row's bits depend on the row alone: each lane sums its
columns in order, and the lanes are summed in one order. NaN gives NaN, +inf gives +inf, nothing but -inf gives -inf.
Bound by memory: the row is read twice, the second time from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

BLOCK = 4096
NUM_WARPS = 16


@triton.jit
def log_normaliser_kernel(logits, out, stride_row, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + lanes
        most = tl.maximum(most, tl.load(logits + row * stride_row + ids, mask=ids < vocab, other=float("-inf")))
    top = tl.max(most, 0)  # ignores NaN, which the sum keeps
    shift = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + lanes
        sums += tl.exp(tl.load(logits + row * stride_row + ids, mask=ids < vocab, other=float("-inf")) - shift)
    tl.store(out + row, tl.log(tl.sum(sums, 0)) + shift)


def log_normaliser(logits: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write the log of the softmax denominator of each row.

    logits  fp32 or fp64 [T, V]  rows may be slices of wider ones
    out     [T] of the same dtype

    fp64 takes the reference on a GPU too. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, vocab = logits.shape
    check("log_normaliser: logits", logits, (num_tokens, vocab), torch.float32, torch.float64, rows=True)
    check("log_normaliser: out", out, (num_tokens,), logits.dtype)
    if logits.dtype == torch.float64 or not (logits.is_cuda or interpret):
        log_normaliser_reference(logits, out=out)
    elif num_tokens:
        block = min(BLOCK, max(16, triton.next_power_of_2(vocab)))
        log_normaliser_kernel[(num_tokens,)](
            logits, out, logits.stride(0), vocab, BLOCK=block, num_warps=min(NUM_WARPS, max(1, block // 128))
        )


def log_normaliser_reference(logits: Tensor, *, out: Tensor) -> None:
    """The same in plain torch."""
    torch.logsumexp(logits, 1, out=out)
