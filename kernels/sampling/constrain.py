"""Masks of automata over tokens: mask the logits of each position, and cut drafts before the first token that is not allowed.

    logits[t, v] = -inf where bit v % 32 of masks[tables[s]][v // 32] is 0,  s = the row's state walked over the drafts before t

`token_walk.py` describes the contents of `tables` and how a state is walked. Before a row's minimum of tokens its stop ids are
masked too, unless its text can only end.
Bound by memory: only the masked logits are written and no logit is read. A walk reads a token's bytes one after the other, some 5
loads that depend on each other's results, from L2.
Source: token masks of an automaton, Willard and Louf 2023 (arXiv 2307.09702); here they stay on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.sampling.token_walk import (
    ENDS,
    check_drafts,
    check_tables,
    state_before,
    states_before_reference,
    walk,
    walk_reference,
)

BLOCK = 2048
BLOCKS = 8
"""Blocks of the vocabulary per program: they share one walk."""


@triton.jit(do_not_specialize=["vocab", "first_id", "num_tokens", "width", "num_stop_ids"])
def constrain_logits_kernel(
    logits, row_ids, states, classes, drafts, num_drafted, draft_rows, map_ids, positions, min_tokens, stop_ids, tables, masks,
    symbols, starts, stride_row, draft_stride, mask_stride, vocab, first_id, num_tokens, width, num_stop_ids,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + t).to(tl.int64)
    state = state_before(
        t, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens, width
    )
    if state > 0:
        mask = masks + tl.load(tables + state).to(tl.int64) * mask_stride
        num_masked = 0
        if positions is not None:
            early = tl.load(positions + t) < tl.load(min_tokens + row)
            num_masked = tl.where(early & (tl.load(tables + state + 1) != -2), num_stop_ids, 0).to(tl.int32)  # ENDS
        first = tl.program_id(1) * BLOCK * BLOCKS
        for block in range(0, BLOCKS):
            lane = first + block * BLOCK + tl.arange(0, BLOCK)
            ids = first_id + lane
            if map_ids is not None:
                ids = tl.load(map_ids + lane, mask=lane < vocab, other=0).to(tl.int32)
            word = tl.load(mask + (ids >> 5), mask=lane < vocab, other=0)
            forbidden = ((word >> (ids & 31)) & 1) == 0
            if stop_ids is not None:
                for i in range(0, num_masked):
                    forbidden = forbidden | (ids == tl.load(stop_ids + row * num_stop_ids + i))
            minus = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
            tl.store(logits + t * stride_row + lane, minus, mask=(lane < vocab) & forbidden)


def constrain_logits(
    logits: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, masks: Tensor, symbols: Tensor,
    starts: Tensor, *, drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None,
    map_ids: Tensor | None = None, first_id: int = 0, positions: Tensor | None = None, min_tokens: Tensor | None = None,
    stop_ids: Tensor | None = None, interpret: bool = False,
) -> None:
    """Set the logits of tokens that a row's automaton does not allow to -inf, in place.

    logits       fp32, bf16, fp16 or fp64 [T, V]  rows may be slices of wider ones
    row_ids      int32 [T]   batch row of each position
    states       int32 [R]   index in `tables` of each row's state after its committed tokens; 0: the row has no constraint
    classes      int32 [R]   index in `tables` of the class map of each row's automaton
    tables       int32 [N]   class maps and rows of states; a state's row is the number of its mask, a forced token, -1 or ENDS,
                 and the indices of the next states by class
    masks        int32 [M, W]  bit v % 32 of word v // 32: token v is allowed
    symbols      int32 [B], starts int32 [num_tokens + 1]: the symbols of token v are symbols[starts[v] : starts[v + 1]]
    drafts       int32 [L, K] tokens drafted in this round, rows may be slices of wider ones; None: there are none
    num_drafted  int64 [T]   how many of them come before the position
    draft_rows   int32 or int64 [T]  row of `drafts`; None: row_ids
    map_ids      int32 or int64 [V]  token of each column; None: first_id plus its number
    positions    int64 [T]   position of the token that is drawn; None: there is no minimum of tokens
    min_tokens   int32 [R]   at earlier positions no stop id is allowed, unless the text can only end
    stop_ids     int32 [R, N]  of each row, -1: none

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_rows, vocab), batch = logits.shape, states.numel()
    check("constrain_logits: logits", logits, (num_rows, vocab), *FLOATS, rows=True)
    check("constrain_logits: row_ids", row_ids, (num_rows,), torch.int32)
    for name, tensor in (("states", states), ("classes", classes)):
        check(f"constrain_logits: {name}", tensor, (batch,), torch.int32)
    check_tables("constrain_logits", tables, symbols, starts)
    check("constrain_logits: masks", masks, (masks.shape[0], -(-(starts.numel() - 1) // 32)), torch.int32)
    check_drafts("constrain_logits", num_rows, drafts, num_drafted, draft_rows)
    if map_ids is not None:
        check("constrain_logits: map_ids", map_ids, (vocab,), torch.int32, torch.int64)
    elif first_id + vocab > starts.numel() - 1:
        raise ValueError(
            f"constrain_logits: logits have {vocab} columns from token {first_id} on, and there are symbols of "
            f"{starts.numel() - 1} tokens"
        )
    num_stop_ids = 0
    if positions is not None and min_tokens is not None and stop_ids is not None:
        num_stop_ids = stop_ids.shape[1]
        check("constrain_logits: positions", positions, (num_rows,), torch.int64)
        check("constrain_logits: min_tokens", min_tokens, (batch,), torch.int32)
        check("constrain_logits: stop_ids", stop_ids, (batch, num_stop_ids), torch.int32)
    elif not (positions is None and min_tokens is None and stop_ids is None):
        raise ValueError("constrain_logits: positions, min_tokens and stop_ids come together; give all or none")
    if not (logits.is_cuda or interpret):
        constrain_logits_reference(
            logits, row_ids, states, classes, tables, masks, symbols, starts, drafts=drafts, num_drafted=num_drafted,
            draft_rows=draft_rows, map_ids=map_ids, first_id=first_id, positions=positions, min_tokens=min_tokens,
            stop_ids=stop_ids,
        )
    elif num_rows:
        constrain_logits_kernel[(num_rows, triton.cdiv(vocab, BLOCK * BLOCKS))](
            logits, row_ids, states, classes, drafts, num_drafted, draft_rows, map_ids, positions, min_tokens, stop_ids, tables,
            masks, symbols, starts, logits.stride(0), 0 if drafts is None else drafts.stride(0), masks.stride(0), vocab, first_id,
            starts.numel() - 1, 0 if drafts is None else drafts.shape[1], num_stop_ids, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8,
        )


@triton.jit(do_not_specialize=["num_tokens", "width"])
def mask_rows_kernel(
    row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, out_rows, draft_stride, num_tokens, width
):
    t = tl.program_id(0).to(tl.int64)
    state = state_before(
        t, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens, width
    )
    tl.store(out_rows + t, tl.load(tables + state, mask=state > 0, other=-1))


def mask_rows(
    row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor, *, out_rows: Tensor,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None, interpret: bool = False,
) -> None:
    """The row of the masks for each position's logits, for a product that applies the masks itself (`gemm/lm_head.py`).

    out_rows  int32 [T]  -1: every token is allowed
    The others as in `constrain_logits`. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows = row_ids.shape[0]
    check("mask_rows: row_ids", row_ids, (num_rows,), torch.int32)
    check("mask_rows: out_rows", out_rows, (num_rows,), torch.int32)
    for name, tensor in (("states", states), ("classes", classes)):
        check(f"mask_rows: {name}", tensor, (states.numel(),), torch.int32)
    check_tables("mask_rows", tables, symbols, starts)
    check_drafts("mask_rows", num_rows, drafts, num_drafted, draft_rows)
    if not (row_ids.is_cuda or interpret):
        state = states_before_reference(row_ids, states, classes, tables, symbols, starts, drafts, num_drafted, draft_rows)
        out_rows.copy_(torch.where(state > 0, tables[state.long()], -1))
    elif num_rows:
        mask_rows_kernel[(num_rows,)](
            row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, out_rows,
            0 if drafts is None else drafts.stride(0), starts.numel() - 1, 0 if drafts is None else drafts.shape[1], num_warps=1,
        )


@triton.jit(do_not_specialize=["num_tokens", "width"])
def constrain_drafts_kernel(
    draft_ids, draft_len, states, classes, tables, masks, symbols, starts, draft_stride, mask_stride, num_tokens, width
):
    row = tl.program_id(0).to(tl.int64)
    state, class_map = tl.load(states + row), tl.load(classes + row)
    constrained, length, count = state > 0, tl.load(draft_len + row), 0
    going, intact = constrained, constrained
    for j in range(0, width):
        at = draft_ids + row * draft_stride + j
        token = tl.load(at)
        intact = intact & going & (j < length) & (token >= 0) & (token < num_tokens)
        mask_row = tl.load(tables + state, mask=going, other=0).to(tl.int64)
        word = tl.load(masks + mask_row * mask_stride + (token >> 5), mask=intact, other=0)
        intact = intact & (((word >> (token & 31)) & 1) != 0)
        token = tl.where(intact, token, tl.load(tables + state + 1, mask=going, other=-1))
        going = going & (token >= 0)
        tl.store(at, token, mask=going)
        count += going.to(tl.int32)
        state = walk(tl.where(going, state, 0), class_map, token, tables, symbols, starts, num_tokens)
        going = going & (state > 0)
    tl.store(draft_len + row, count, mask=constrained)


def constrain_drafts(
    draft_ids: Tensor, draft_len: Tensor, states: Tensor, classes: Tensor, tables: Tensor, masks: Tensor, symbols: Tensor,
    starts: Tensor, *, interpret: bool = False,
) -> None:
    """Cut each row's drafts before the first that its automaton does not allow, and append the tokens that it forces, in place.

    draft_ids  int32 [R, K]  rows may be slices of wider ones
    draft_len  int32 [R]     how many of them count, before and after; after an end no draft counts
    The others as in `constrain_logits`. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, width = draft_ids.shape
    check("constrain_drafts: draft_ids", draft_ids, (num_rows, width), torch.int32, rows=True)
    for name, tensor in (("draft_len", draft_len), ("states", states), ("classes", classes)):
        check(f"constrain_drafts: {name}", tensor, (num_rows,), torch.int32)
    check_tables("constrain_drafts", tables, symbols, starts)
    check("constrain_drafts: masks", masks, (masks.shape[0], -(-(starts.numel() - 1) // 32)), torch.int32)
    if not (states.is_cuda or interpret):
        constrain_drafts_reference(draft_ids, draft_len, states, classes, tables, masks, symbols, starts)
    elif num_rows:
        constrain_drafts_kernel[(num_rows,)](
            draft_ids, draft_len, states, classes, tables, masks, symbols, starts, draft_ids.stride(0), masks.stride(0),
            starts.numel() - 1, width, num_warps=1,
        )


def constrain_logits_reference(
    logits: Tensor, row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, masks: Tensor, symbols: Tensor,
    starts: Tensor, *, drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None,
    map_ids: Tensor | None = None, first_id: int = 0, positions: Tensor | None = None, min_tokens: Tensor | None = None,
    stop_ids: Tensor | None = None,
) -> None:
    """The same in plain torch."""
    state = states_before_reference(row_ids, states, classes, tables, symbols, starts, drafts, num_drafted, draft_rows)
    constrained = (state > 0).nonzero().squeeze(1)
    ids = first_id + torch.arange(logits.shape[1], device=logits.device) if map_ids is None else map_ids.long()
    place = state[constrained].long()
    words = masks[tables[place].long()][:, ids >> 5]
    forbidden = (words >> (ids & 31).int()) & 1 == 0
    if positions is not None and min_tokens is not None and stop_ids is not None:
        rows = row_ids[constrained].long()
        early = (positions[constrained] < min_tokens[rows]) & (tables[place + 1] != ENDS)
        for stop_id in stop_ids[rows].unbind(1):
            forbidden |= early[:, None] & (ids == stop_id[:, None])
    logits[constrained] = logits[constrained].masked_fill_(forbidden, -torch.inf)


def constrain_drafts_reference(
    draft_ids: Tensor, draft_len: Tensor, states: Tensor, classes: Tensor, tables: Tensor, masks: Tensor, symbols: Tensor,
    starts: Tensor,
) -> None:
    """The same in plain torch."""
    state, constrained, count = states, states > 0, torch.zeros_like(draft_len)
    going = intact = constrained
    for j in range(draft_ids.shape[1]):
        token = draft_ids[:, j]
        intact = intact & going & (j < draft_len) & (token >= 0) & (token < starts.numel() - 1)
        place = torch.where(going, state, 0).long()
        word = masks[torch.where(going, tables[place], 0).long(), torch.where(intact, token >> 5, 0).long()]
        intact = intact & ((word >> (token & 31)) & 1 != 0)
        token = torch.where(intact, token, torch.where(going, tables[place + 1], -1))
        going = going & (token >= 0)
        draft_ids[:, j] = torch.where(going, token, draft_ids[:, j])
        count += going
        state = walk_reference(torch.where(going, state, 0), classes, token, tables, symbols, starts)
        going = going & (state > 0)
    draft_len.copy_(torch.where(constrained, count, draft_len))
