"""Stops rows of lazy automata at states without a mask on the device, until the host has computed them.

    target_ids[t] = WAIT   if the state after the drafts before t is not expanded: tables[state + 1] = NOT_EXPANDED
    live[r] = 0, finish    of a row whose committed tokens end in such a state: it takes no part until the host wakes it

`accept` ends the row's round with the token before a WAIT, so no token is committed to which no mask was applied. Bound by
launch latency, and by the walk of `token_walk.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.rounds.accept import WAIT, WAITING, WAITING_AFTER_DRAFT
from batchspec.kernels.sampling.token_walk import check_drafts, check_tables, state_before, states_before_reference

NOT_EXPANDED = -3
"""The value of the second column in the row of such a state."""


@triton.jit(do_not_specialize=["num_tokens", "width"])
def mark_waiting_kernel(
    target_ids, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens,
    width, WAIT: tl.constexpr, NOT_EXPANDED: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    state = state_before(
        t, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens, width
    )
    waits = (state > 0) & (tl.load(tables + state + 1, mask=state > 0, other=0) == NOT_EXPANDED)
    tl.store(target_ids + t, WAIT, mask=waits)


def mark_waiting(
    target_ids: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None, interpret: bool = False,
) -> None:
    """Set the target's choice to WAIT if the state is not expanded, in place.

    target_ids  int32 [T]  the others as in `constrain_logits`
    Does not synchronise on a GPU. Raises ValueError for other shapes or dtypes.
    """
    (count,), batch = target_ids.shape, states.numel()
    check("mark_waiting: target_ids", target_ids, (count,), torch.int32)
    check("mark_waiting: row_ids", row_ids, (count,), torch.int32)
    for name, tensor in (("states", states), ("classes", classes)):
        check(f"mark_waiting: {name}", tensor, (batch,), torch.int32)
    check_tables("mark_waiting", tables, symbols, starts)
    check_drafts("mark_waiting", count, drafts, num_drafted, draft_rows)
    if not (target_ids.is_cuda or interpret):
        mark_waiting_reference(
            target_ids, row_ids, states, classes, tables, symbols, starts, drafts=drafts, num_drafted=num_drafted,
            draft_rows=draft_rows,
        )
    elif count:
        mark_waiting_kernel[(count,)](
            target_ids, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts,
            0 if drafts is None else drafts.stride(0), starts.numel() - 1, 0 if drafts is None else drafts.shape[1],
            WAIT=WAIT, NOT_EXPANDED=NOT_EXPANDED, num_warps=1,
        )


def mark_waiting_reference(
    target_ids: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    state = states_before_reference(row_ids, states, classes, tables, symbols, starts, drafts, num_drafted, draft_rows)
    waits = (state > 0) & (tables[torch.where(state > 0, state + 1, 0).long()] == NOT_EXPANDED)
    target_ids.masked_fill_(waits, WAIT)


@triton.jit
def park_waiting_kernel(
    states, tables, live, log, log_stride, LANES: tl.constexpr, num_rows, WAITING: tl.constexpr, AFTER_DRAFT: tl.constexpr,
    NOT_EXPANDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = row < num_rows
    state = tl.load(states + row, mask=there, other=0)
    parked = there & (state > 0) & (tl.load(live + row, mask=there, other=0) != 0)
    parked = parked & (tl.load(tables + state + 1, mask=parked, other=0) == NOT_EXPANDED)
    tl.store(live + row, 0, mask=parked)
    is_marked = tl.load(log + row * log_stride + 3, mask=parked, other=0) == AFTER_DRAFT
    tl.store(log + row * log_stride + 3, WAITING, mask=parked & (is_marked == 0))
    took_part = tl.load(log + row * log_stride, mask=parked, other=0) >= 0
    tl.store(log + row * log_stride, 0, mask=parked & (took_part == 0))


def park_waiting(states: Tensor, tables: Tensor, *, live: Tensor, log: Tensor, interpret: bool = False) -> None:
    """Take rows whose state is not expanded out of the rounds, until the host wakes them.

    states  int32 [R]     indices in `tables` int32 [N] of the states after the committed tokens
    live    int32 [R]     in: the rows that take part and have not ended; out: 0 for those that wait
    log     int32 [R, L]  as in `accept`: `finish` of those that wait becomes WAITING unless it is WAITING_AFTER_DRAFT. The line
            of one that took no part becomes that of one that accepts and keeps nothing, which the host reads
    Does not synchronise on a GPU. Raises ValueError for other shapes or dtypes.
    """
    (num_rows,) = states.shape
    check("park_waiting: states", states, (num_rows,), torch.int32)
    check("park_waiting: tables", tables, (tables.numel(),), torch.int32)
    check("park_waiting: live", live, (num_rows,), torch.int32)
    check("park_waiting: log", log, (num_rows, log.shape[1]), torch.int32)
    if not (states.is_cuda or interpret):
        park_waiting_reference(states, tables, live=live, log=log)
    elif num_rows:
        lanes = 128
        park_waiting_kernel[(triton.cdiv(num_rows, lanes),)](
            states, tables, live, log, log.stride(0), LANES=lanes, num_rows=num_rows, WAITING=WAITING,
            AFTER_DRAFT=WAITING_AFTER_DRAFT, NOT_EXPANDED=NOT_EXPANDED, num_warps=4,
        )


def park_waiting_reference(states: Tensor, tables: Tensor, *, live: Tensor, log: Tensor) -> None:
    """The same in plain torch."""
    parked = (states > 0) & (live != 0) & (tables[torch.where(states > 0, states + 1, 0).long()] == NOT_EXPANDED)
    live.masked_fill_(parked, 0)
    log[:, 3].masked_fill_(parked & (log[:, 3] != WAITING_AFTER_DRAFT), WAITING)
    log[:, 0].masked_fill_(parked & (log[:, 0] < 0), 0)
