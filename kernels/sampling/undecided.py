"""Holds rows of lazy automata at states without a mask on the device, until the host has computed them.

    target_ids[t] = UNDECIDED  if the state after the drafts before t is not expanded: tables[state + 1] = NOT_EXPANDED
    live[r] = 0, finish        of a row whose committed tokens end in such a state: it takes no part until the host resumes it

`accept` ends the row's round with the token before an UNDECIDED, so no token is committed to which no mask was applied. Bound by
launch latency, and by the walk of `token_walk.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.rounds.accept import HELD, HELD_AFTER_DRAFT, UNDECIDED
from batchspec.kernels.sampling.token_walk import check_drafts, check_tables, state_before, states_before_reference

NOT_EXPANDED = -3
"""The value of the second column in the row of such a state."""


@triton.jit(do_not_specialize=["num_tokens", "width"])
def mark_undecided_kernel(
    target_ids, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens,
    width, UNDECIDED: tl.constexpr, NOT_EXPANDED: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    state = state_before(
        t, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens, width
    )
    undecided = (state > 0) & (tl.load(tables + state + 1, mask=state > 0, other=0) == NOT_EXPANDED)
    tl.store(target_ids + t, UNDECIDED, mask=undecided)


def mark_undecided(
    target_ids: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None, interpret: bool = False,
) -> None:
    """Set the target's choice to UNDECIDED if the state is not expanded, in place.

    target_ids  int32 [T]  the others as in `constrain_logits`
    Does not synchronise on a GPU. Raises ValueError for other shapes or dtypes.
    """
    (count,), batch = target_ids.shape, states.numel()
    check("mark_undecided: target_ids", target_ids, (count,), torch.int32)
    check("mark_undecided: row_ids", row_ids, (count,), torch.int32)
    for name, tensor in (("states", states), ("classes", classes)):
        check(f"mark_undecided: {name}", tensor, (batch,), torch.int32)
    check_tables("mark_undecided", tables, symbols, starts)
    check_drafts("mark_undecided", count, drafts, num_drafted, draft_rows)
    if not (target_ids.is_cuda or interpret):
        mark_undecided_reference(
            target_ids, row_ids, states, classes, tables, symbols, starts, drafts=drafts, num_drafted=num_drafted,
            draft_rows=draft_rows,
        )
    elif count:
        mark_undecided_kernel[(count,)](
            target_ids, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts,
            0 if drafts is None else drafts.stride(0), starts.numel() - 1, 0 if drafts is None else drafts.shape[1],
            UNDECIDED=UNDECIDED, NOT_EXPANDED=NOT_EXPANDED, num_warps=1,
        )


def mark_undecided_reference(
    target_ids: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    state = states_before_reference(row_ids, states, classes, tables, symbols, starts, drafts, num_drafted, draft_rows)
    undecided = (state > 0) & (tables[torch.where(state > 0, state + 1, 0).long()] == NOT_EXPANDED)
    target_ids.masked_fill_(undecided, UNDECIDED)


@triton.jit
def hold_undecided_kernel(
    states, tables, live, log, log_stride, LANES: tl.constexpr, num_rows, HELD: tl.constexpr, AFTER_DRAFT: tl.constexpr,
    NOT_EXPANDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = row < num_rows
    state = tl.load(states + row, mask=there, other=0)
    held = there & (state > 0) & (tl.load(live + row, mask=there, other=0) != 0)
    held = held & (tl.load(tables + state + 1, mask=held, other=0) == NOT_EXPANDED)
    tl.store(live + row, 0, mask=held)
    is_marked = tl.load(log + row * log_stride + 3, mask=held, other=0) == AFTER_DRAFT
    tl.store(log + row * log_stride + 3, HELD, mask=held & (is_marked == 0))
    took_part = tl.load(log + row * log_stride, mask=held, other=0) >= 0
    tl.store(log + row * log_stride, 0, mask=held & (took_part == 0))


def hold_undecided(states: Tensor, tables: Tensor, *, live: Tensor, log: Tensor, interpret: bool = False) -> None:
    """Hold rows whose state is not expanded: they take no part until the host resumes them.

    states  int32 [R]     indices in `tables` int32 [N] of the states after the committed tokens
    live    int32 [R]     in: the rows that take part and have not ended; out: 0 for those that are held
    log     int32 [R, L]  as in `accept`: `finish` of those becomes HELD unless it is HELD_AFTER_DRAFT. The line
            of one that took no part becomes that of one that accepts and keeps nothing, which the host reads
    Does not synchronise on a GPU. Raises ValueError for other shapes or dtypes.
    """
    (num_rows,) = states.shape
    check("hold_undecided: states", states, (num_rows,), torch.int32)
    check("hold_undecided: tables", tables, (tables.numel(),), torch.int32)
    check("hold_undecided: live", live, (num_rows,), torch.int32)
    check("hold_undecided: log", log, (num_rows, log.shape[1]), torch.int32)
    if not (states.is_cuda or interpret):
        hold_undecided_reference(states, tables, live=live, log=log)
    elif num_rows:
        lanes = 128
        hold_undecided_kernel[(triton.cdiv(num_rows, lanes),)](
            states, tables, live, log, log.stride(0), LANES=lanes, num_rows=num_rows, HELD=HELD,
            AFTER_DRAFT=HELD_AFTER_DRAFT, NOT_EXPANDED=NOT_EXPANDED, num_warps=4,
        )


def hold_undecided_reference(states: Tensor, tables: Tensor, *, live: Tensor, log: Tensor) -> None:
    """The same in plain torch."""
    held = (states > 0) & (live != 0) & (tables[torch.where(states > 0, states + 1, 0).long()] == NOT_EXPANDED)
    live.masked_fill_(held, 0)
    log[:, 3].masked_fill_(held & (log[:, 3] != HELD_AFTER_DRAFT), HELD)
    log[:, 0].masked_fill_(held & (log[:, 0] < 0), 0)
