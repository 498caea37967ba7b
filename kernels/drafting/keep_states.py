"""Keep the target's states of positions for later: those of position p of a row in its place p % PLACES, and p beside them.

A round without drafts puts off what a head computes from its states, so that a later one reads the head's weights once for
several rounds. Dead rows and padding, whose slot is 0, write nothing.
Bound by memory (bytes: 2 * T * W * itemsize), by launch latency at decode sizes. Source: batchspec's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

BLOCK = 1024


@triton.jit
def keep_states_kernel(
    states, row_ids, positions, slot_mapping, out_states, out_positions, states_stride, WIDTH: tl.constexpr,
    PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Program (position, values)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_earlier(PDL)
    real = tl.load(slot_mapping + token) != 0
    position = tl.load(positions + token)
    place = tl.load(row_ids + token).to(tl.int64) * PLACES + position % PLACES
    written = column < tl.where(real, WIDTH, 0)
    value = tl.load(states + token * states_stride + column, mask=written)
    tl.store(out_states + place * WIDTH + column, value, mask=written)
    tl.store(out_positions + place, position, mask=real & (tl.program_id(1) == 0))


def keep_states(
    states: Tensor, row_ids: Tensor, positions: Tensor, slot_mapping: Tensor, *, out_states: Tensor, out_positions: Tensor,
    interpret: bool = False,
) -> None:
    """Write states and positions to their places.

    states        [T, W], any float dtype  rows may be slices of wider ones
    row_ids       int32 [T] row of each position
    positions     int64 [T]; no row has two of one place: not checked
    slot_mapping  int64 [T]; 0: nothing is written
    out_states    [R, PLACES, W] of states' dtype;  out_positions  int64 [R, PLACES]

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, width = states.shape
    num_rows, places = out_positions.shape
    check("keep_states: states", states, (num_tokens, width), *FLOATS, rows=True)
    check("keep_states: row_ids", row_ids, (num_tokens,), torch.int32)
    check("keep_states: positions", positions, (num_tokens,), torch.int64)
    check("keep_states: slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    check("keep_states: out_states", out_states, (num_rows, places, width), states.dtype)
    check("keep_states: out_positions", out_positions, (num_rows, places), torch.int64)
    if not (states.is_cuda or interpret):
        keep_states_reference(states, row_ids, positions, slot_mapping, out_states=out_states, out_positions=out_positions)
    elif states.numel():
        keep_states_kernel[num_tokens, triton.cdiv(width, BLOCK)](
            states, row_ids, positions, slot_mapping, out_states, out_positions, states.stride(0), WIDTH=width, PLACES=places,
            BLOCK=BLOCK, num_warps=4, **launch_args(states),
        )


def keep_states_reference(
    states: Tensor, row_ids: Tensor, positions: Tensor, slot_mapping: Tensor, *, out_states: Tensor, out_positions: Tensor
) -> None:
    """The same in plain torch."""
    real = slot_mapping != 0
    rows, place = row_ids[real].long(), positions[real] % out_positions.shape[1]
    out_states[rows, place] = states[real]
    out_positions[rows, place] = positions[real]
