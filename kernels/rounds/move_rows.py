"""Move rows of a state tensor: state[dst_ids[m]] = state[src_ids[m]]; entries of -1 are skipped.

Used by compaction, which packs live rows for a smaller graph. Sources and destinations are disjoint, so the order does not
matter.
Bound by memory (bytes read + written: 2 * M * W * itemsize), by launch latency for state vectors. Values are copied as integers
of their size, so that four kernels serve all dtypes, bit for bit.
Source: row compaction for static batches, as in https://github.com/vllm-project/vllm (InputBatch.condense).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

BLOCK = 1024
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# The caller's two lists of ids are rows of one tensor, so the alignment of the second depends on their length: a kernel for each
# alignment would be compiled in the middle of a job.
@triton.jit(do_not_specialize_on_alignment=["src_ids", "dst_ids"])
def move_rows_kernel(state, src_ids, dst_ids, stride_row, width, BLOCK: tl.constexpr):
    move = tl.program_id(0)
    src = tl.load(src_ids + move).to(tl.int64)
    dst = tl.load(dst_ids + move).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < tl.where((src >= 0) & (dst >= 0), width, 0)
    tl.store(state + dst * stride_row + column, tl.load(state + src * stride_row + column, mask=exists), mask=exists)


def move_rows(state: Tensor, src_ids: Tensor, dst_ids: Tensor, *, interpret: bool = False) -> None:
    """Copy rows to other rows of the same tensor, in place.

    state    any dtype of 1, 2, 4 or 8 bytes, [R, W] or [R]  rows may be slices of wider ones
    src_ids  int32 [M]  -1 skips the entry
    dst_ids  int32 [M]  no row may be both source and destination, or destination twice: not checked

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_moves = src_ids.numel()
    rows = state.unsqueeze(1) if state.dim() == 1 else state
    check("move_rows: state", rows, (*rows.shape[:2],), state.dtype, rows=True)
    check("move_rows: src_ids", src_ids, (num_moves,), torch.int32)
    check("move_rows: dst_ids", dst_ids, (num_moves,), torch.int32)
    if not (state.is_cuda or interpret):
        move_rows_reference(state, src_ids, dst_ids)
    elif num_moves and rows.numel():
        words = rows.view(WORDS[state.itemsize])
        grid = (num_moves, triton.cdiv(rows.shape[1], BLOCK))
        move_rows_kernel[grid](words, src_ids, dst_ids, words.stride(0), rows.shape[1], BLOCK=BLOCK, num_warps=4)


def move_rows_reference(state: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """The same in plain torch."""
    wanted = (src_ids >= 0) & (dst_ids >= 0)
    state[dst_ids[wanted]] = state[src_ids[wanted]]
