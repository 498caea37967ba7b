"""Walks each row's automaton over the tokens that a round committed, and fails rows whose tokens it does not allow.

Masks keep a row on its automaton: a token that the automaton does not allow can only come from an error in a table, a mask or a
kernel. Such a row ends FAILED, as an error row, instead of decoding without a constraint (`token_walk.py`: state 0). So does a
row that has lost its state: it has a class map and no state. The walk skips a stop id: its bit in the mask of the state before
must be set.
Bound by latency: one program a row, the walk of `token_walk.py`, and two loads for a stop id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.rounds.accept import FAILED, STOPPED
from batchspec.kernels.sampling.token_walk import check_tables, walk, walk_reference


@triton.jit(do_not_specialize=["num_tokens", "width"])
def advance_states_kernel(
    states, classes, log, live, tables, masks, symbols, starts, mask_stride, num_tokens, width,
    STOPPED: tl.constexpr, FAILED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = log + row * (width + 4)
    state, class_map = tl.load(states + row), tl.load(classes + row)
    count = tl.where(class_map > 0, tl.minimum(tl.load(line + 2), width), 0)
    took_part = count > 0
    stops = took_part & (tl.load(line + 3) == STOPPED)
    num_walked = count - stops.to(tl.int32)
    for j in range(0, num_walked):
        state = walk(state, class_map, tl.load(line + 4 + j), tables, symbols, starts, num_tokens)
    ends = stops & (state > 0)
    last = tl.load(line + 4 + num_walked, mask=ends, other=-1)
    ends = ends & (last >= 0) & (last < num_tokens)
    mask_row = tl.load(tables + state, mask=ends, other=0).to(tl.int64)
    word = tl.load(masks + mask_row * mask_stride + (last >> 5), mask=ends, other=0)
    may_end = ((word >> (last & 31)) & 1) != 0
    strayed = took_part & ((state == 0) | (stops & (may_end == 0)))
    tl.store(line + 3, FAILED, mask=strayed)
    goes_on = (tl.load(live + row) != 0) & (strayed == 0)
    tl.store(live + row, 0, mask=strayed)
    tl.store(states + row, tl.where(goes_on, state, 0), mask=took_part)


def advance_states(
    states: Tensor, classes: Tensor, log: Tensor, live: Tensor, tables: Tensor, masks: Tensor, symbols: Tensor, starts: Tensor, *,
    interpret: bool = False,
) -> None:
    """Walk each row's state, in place, over the tokens that were committed. Rows without a committed token stay unchanged.

    states  int32 [R]     in/out: 0 once a row has ended, because its automaton may then leave the device
    classes int32 [R]     0: the row has no constraint
    log     int32 [R, L]  as in `accept`, contiguous; `finish` of a row whose tokens its automaton does not allow becomes FAILED
    live    int32 [R]     in: 0 for rows that have ended with these tokens; out: 0 for rows that FAILED, too
    The others as in `constrain_logits`. Does not synchronise on a GPU. Raises ValueError for other shapes or dtypes.
    """
    num_rows, width = log.shape[0], log.shape[1] - 4
    for name, tensor in (("states", states), ("classes", classes), ("live", live)):
        check(f"advance_states: {name}", tensor, (num_rows,), torch.int32)
    check("advance_states: log", log, (num_rows, log.shape[1]), torch.int32)
    check_tables("advance_states", tables, symbols, starts)
    check("advance_states: masks", masks, (masks.shape[0], -(-(starts.numel() - 1) // 32)), torch.int32)
    if not (states.is_cuda or interpret):
        advance_states_reference(states, classes, log, live, tables, masks, symbols, starts)
    elif num_rows:
        advance_states_kernel[(num_rows,)](
            states, classes, log, live, tables, masks, symbols, starts, masks.stride(0), starts.numel() - 1, width,
            STOPPED=STOPPED, FAILED=FAILED, num_warps=1,
        )


def advance_states_reference(
    states: Tensor, classes: Tensor, log: Tensor, live: Tensor, tables: Tensor, masks: Tensor, symbols: Tensor, starts: Tensor
) -> None:
    """The same in plain torch."""
    kept, tokens = log[:, 2], log[:, 4:]
    took_part = (classes > 0) & (kept > 0)
    stops = took_part & (log[:, 3] == STOPPED)
    num_walked = torch.where(took_part, kept.clamp(max=tokens.shape[1]) - stops.int(), 0)
    state = states.clone()
    for j in range(tokens.shape[1]):
        after = walk_reference(state, classes, tokens[:, j], tables, symbols, starts)
        state = torch.where(num_walked > j, after, state)
    last = tokens.gather(1, num_walked.clamp(max=tokens.shape[1] - 1).long()[:, None])[:, 0]
    ends = stops & (state > 0) & (last >= 0) & (last < starts.numel() - 1)
    place = torch.where(ends, state, 0).long()
    word = masks[torch.where(ends, tables[place], 0).long(), torch.where(ends, last >> 5, 0).long()]
    may_end = ends & ((word >> (last & 31)) & 1 != 0)
    strayed = took_part & ((state == 0) | (stops & ~may_end))
    log[:, 3].masked_fill_(strayed, FAILED)
    live.masked_fill_(strayed, 0)
    states.copy_(torch.where(took_part, torch.where(live != 0, state, 0), states))
