"""Write rows of a state tensor: state[slot_ids[r]] = values[r], for rows whose mask is not 0.

A prefill pass leaves what a drafter keeps of each of its rows in the row's slot. A pass that is padded for a CUDA graph has dead
rows, which name slots of other rows: these must keep their values.
Bound by memory (bytes read + written: 2 * R * W * itemsize), by launch latency for few rows. Values are copied as integers of
their size, so that four kernels serve all dtypes, bit for bit.
Source: batchspec's own; `move_rows` copies within one tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.rounds.move_rows import BLOCK, WORDS


@triton.jit
def write_rows_kernel(state, slot_ids, mask, values, state_stride, values_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ids + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = column < tl.where(tl.load(mask + row) != 0, width, 0)
    tl.store(state + slot * state_stride + column, tl.load(values + row * values_stride + column, mask=written), mask=written)


def write_rows(state: Tensor, slot_ids: Tensor, mask: Tensor, values: Tensor, *, interpret: bool = False) -> None:
    """Copy rows of `values` to rows of `state`, in place.

    state     any dtype of 1, 2, 4 or 8 bytes, [slots, W] or [slots]  rows may be slices of wider ones
    slot_ids  int64 [R]  in 0..slots-1; no slot twice among the rows that are written: not checked
    mask      int32 [R]  0 skips the row
    values    [R, W] or [R] of state's dtype  rows may be slices of wider ones

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows = slot_ids.numel()
    rows, source = (x.unsqueeze(1) if x.dim() == 1 else x for x in (state, values))
    check("write_rows: state", rows, (*rows.shape[:2],), state.dtype, rows=True)
    check("write_rows: slot_ids", slot_ids, (num_rows,), torch.int64)
    check("write_rows: mask", mask, (num_rows,), torch.int32)
    check("write_rows: values", source, (num_rows, rows.shape[1]), state.dtype, rows=True)
    if not (state.is_cuda or interpret):
        write_rows_reference(state, slot_ids, mask, values)
    elif source.numel():
        words, read = rows.view(WORDS[state.itemsize]), source.view(WORDS[state.itemsize])
        grid = (num_rows, triton.cdiv(rows.shape[1], BLOCK))
        write_rows_kernel[grid](
            words, slot_ids, mask, read, words.stride(0), read.stride(0), rows.shape[1], BLOCK=BLOCK, num_warps=4
        )


def write_rows_reference(state: Tensor, slot_ids: Tensor, mask: Tensor, values: Tensor) -> None:
    """The same in plain torch."""
    written = mask != 0
    state[slot_ids[written]] = values[written]
