"""Walks automata over tokens on the device: shared by the kernels that mask logits, cut drafts and follow committed tokens.

    state after a token = walk over its symbols:  state = tables[state + 2 + tables[classes + symbol]],  0 where it is not allowed

`tables` holds class maps and rows of states of all automata, one after the other. A state is the index in `tables` where its row
begins; state 0 means no constraint. A position after a draft that is not allowed has state 0: no token after it is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check

ENDS = -2
"""In the column of the forced token: only the end of the text is allowed."""


@triton.jit
def walk(state, classes, token, tables, symbols, starts, num_tokens):
    """The state after one token, all scalars; state 0 stays 0, and a token outside the vocabulary gives 0."""
    known = (state > 0) & (token >= 0) & (token < num_tokens)
    state = tl.where(known, state, 0)
    begin = tl.load(starts + token, mask=known, other=0)
    end = tl.load(starts + token + 1, mask=known, other=0)
    for i in range(begin, end):
        of_symbol = tl.load(tables + classes + tl.load(symbols + i))
        state = tl.load(tables + state + 2 + of_symbol, mask=state > 0, other=0)
    return state


@triton.jit
def state_before(
    t, row_ids, states, classes, drafts, num_drafted, draft_rows, tables, symbols, starts, draft_stride, num_tokens, width
):
    """The state of the row of position t, walked over the drafts before it."""
    row = tl.load(row_ids + t).to(tl.int64)
    state, class_map = tl.load(states + row), tl.load(classes + row)
    if drafts is not None:
        line = row
        if draft_rows is not None:
            line = tl.load(draft_rows + t).to(tl.int64)
        count = tl.where(state > 0, tl.minimum(tl.load(num_drafted + t), width), 0).to(tl.int32)
        for j in range(0, count):
            state = walk(state, class_map, tl.load(drafts + line * draft_stride + j), tables, symbols, starts, num_tokens)
    return state


def check_drafts(
    kernel: str, num_rows: int, drafts: Tensor | None, num_drafted: Tensor | None, draft_rows: Tensor | None
) -> None:
    """Raises ValueError unless they are as in `constrain_logits`; num_rows: T."""
    if (drafts is None) != (num_drafted is None):
        raise ValueError(f"{kernel}: drafts and num_drafted come together; give both or neither")
    if drafts is not None and num_drafted is not None:
        check(f"{kernel}: drafts", drafts, tuple(drafts.shape), torch.int32, rows=True)
        check(f"{kernel}: num_drafted", num_drafted, (num_rows,), torch.int64)
    if draft_rows is not None:
        check(f"{kernel}: draft_rows", draft_rows, (num_rows,), torch.int32, torch.int64)


def check_tables(kernel: str, tables: Tensor, symbols: Tensor, starts: Tensor) -> None:
    """Raises ValueError unless they are int32 vectors."""
    for name, tensor in (("tables", tables), ("symbols", symbols), ("starts", starts)):
        check(f"{kernel}: {name}", tensor, (tensor.numel(),), torch.int32)


def walk_reference(state: Tensor, classes: Tensor, token: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor) -> Tensor:
    """The states [T] after one token each, token int [T]."""
    known = (state > 0) & (token >= 0) & (token < starts.numel() - 1)
    state = torch.where(known, state, 0).long()
    token = torch.where(known, token, 0).long()
    begin, length = starts[token].long(), (starts[token + 1] - starts[token]) * known
    for i in range(int(length.max()) if length.numel() else 0):
        going = (length > i) & (state > 0)
        symbol = symbols[(begin + i).clamp(max=symbols.numel() - 1)]
        of_symbol = tables[torch.where(going, classes + symbol, 0)]
        state = torch.where(going, tables[torch.where(going, state + 2 + of_symbol, 0)].long(), state)
    return state.int()


def states_before_reference(
    row_ids: Tensor, states: Tensor, classes: Tensor, tables: Tensor, symbols: Tensor, starts: Tensor, drafts: Tensor | None,
    num_drafted: Tensor | None, draft_rows: Tensor | None,
) -> Tensor:
    """The states [T] of all positions, walked over the drafts before them."""
    state, class_map = states[row_ids], classes[row_ids]
    if drafts is not None and num_drafted is not None:
        line = row_ids if draft_rows is None else draft_rows
        for j in range(drafts.shape[1]):
            after = walk_reference(state, class_map, drafts[:, j][line], tables, symbols, starts)
            state = torch.where(num_drafted > j, after, state)
    return state
