"""Forbids the tokens that would complete an n-gram of a row's output again (`ngram_search.py`): in logits, or in masks.

    logits[t, v] = -inf,  or bit v % 32 of masks[t][v // 32] = 0,  for each token v that is forbidden at position t

Masks are for a product that chooses tokens without writing logits (`gemm/lm_head.py`). A position where nothing is forbidden, as
nearly all are, has no mask, so that the product reads none.
Bound by latency: one program per position. Rows without an n-gram size cost one load.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.sampling.ngram_search import BLOCK, SIZE, check_rows, completing, forbidden_reference
from batchspec.kernels.sampling.token_walk import check_drafts


@triton.jit(do_not_specialize=["vocab", "first_id", "num_columns", "max_len", "width"])
def forbid_ngrams_kernel(
    logits, mask_rows, row_ids, positions, tokens, prompt_len, settings, drafts, num_drafted, draft_rows, columns, stride_row,
    token_stride, setting_stride, draft_stride, vocab, first_id, num_columns, max_len, width, BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + t).to(tl.int64)
    own = settings + row * setting_stride
    size, found = tl.load(own), 0  # SIZE
    if size > 0:
        position = tl.minimum(tl.load(positions + t), max_len + width).to(tl.int32)
        first_draft, draft_line = position, None
        if drafts is not None:
            first_draft = position - tl.minimum(tl.load(num_drafted + t), width).to(tl.int32)
            draft_row = row
            if draft_rows is not None:
                draft_row = tl.load(draft_rows + t).to(tl.int64)
            draft_line = drafts + draft_row * draft_stride
        begin = tl.maximum(tl.load(prompt_len + row), position - tl.load(own + 1))  # WINDOW
        end = position - size + 1
        for first in range(begin, end, BLOCK):
            last, same = completing(
                first, end, position, own, first_draft, tokens + row * token_stride, draft_line, max_len, width, BLOCK
            )
            column = last - first_id
            if columns is not None:
                column = tl.load(columns + last, mask=same & (last >= 0) & (last < num_columns), other=-1)
            inside = same & (column >= 0) & (column < vocab)
            if mask_rows is None:
                minus = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
                tl.store(logits + t * stride_row + column, minus, mask=inside)
            else:  # logits are the masks
                tl.atomic_and(logits + t * stride_row + (column >> 5), ~(1 << (column & 31)), mask=inside)
                found = tl.maximum(found, tl.max(inside.to(tl.int32), 0))
    if mask_rows is not None:
        tl.store(mask_rows + t, tl.where(found > 0, t, -1).to(tl.int32))


def forbid_ngrams(
    logits: Tensor, row_ids: Tensor, positions: Tensor, tokens: Tensor, prompt_len: Tensor, settings: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None,
    columns: Tensor | None = None, first_id: int = 0, interpret: bool = False,
) -> None:
    """Set the logits of tokens that would complete an n-gram of the row's window again to -inf, in place.

    logits       fp32, bf16, fp16 or fp64 [T, V]  rows may be slices of wider ones
    row_ids      int32 [T]     batch row of each position
    positions    int64 [T]     position of the token that is drawn
    tokens       int32 [R, L]  prompt and committed output, rows may be slices of wider ones; drafts are not in it
    prompt_len   int32 [R]
    settings     int32 [R, LISTED + N]  of each row: SIZE, WINDOW, COUNT and the listed tokens
    drafts       int32 [., K]  tokens drafted in this round, rows may be slices of wider ones; None: there are none
    num_drafted  int64 [T]     how many of them come before the position
    draft_rows   int32 or int64 [T]  row of `drafts`; None: row_ids
    columns      int32 [.]     column of each token, -1: it has none; None: the token minus first_id

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    check("forbid_ngrams: logits", logits, tuple(logits.shape), *FLOATS, rows=True)
    given: dict[str, Any] = {"drafts": drafts, "num_drafted": num_drafted, "draft_rows": draft_rows}
    _check("forbid_ngrams", logits.shape[0], row_ids, positions, tokens, prompt_len, settings, **given)
    if columns is not None:
        check("forbid_ngrams: columns", columns, (columns.numel(),), torch.int32)
    if not (logits.is_cuda or interpret):
        forbid_ngrams_reference(
            logits, row_ids, positions, tokens, prompt_len, settings, columns=columns, first_id=first_id, **given
        )
        return
    _launch(
        logits, None, row_ids, positions, tokens, prompt_len, settings, columns=columns, first_id=first_id,
        vocab=logits.shape[1], **given,
    )


def ngram_masks(
    vocab: int, row_ids: Tensor, positions: Tensor, tokens: Tensor, prompt_len: Tensor, settings: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None, interpret: bool = False,
) -> tuple[Tensor, Tensor]:
    """Masks int32 [T, W] of the same tokens, and the row int32 [T] of each position's mask, -1 where nothing is forbidden: as in
    `lm_head`. The arguments are those of `forbid_ngrams`."""
    given: dict[str, Any] = {"drafts": drafts, "num_drafted": num_drafted, "draft_rows": draft_rows}
    _check("ngram_masks", len(row_ids), row_ids, positions, tokens, prompt_len, settings, **given)
    masks = torch.full((len(row_ids), -(-vocab // 32)), -1, dtype=torch.int32, device=row_ids.device)
    mask_rows = torch.empty_like(row_ids)
    if row_ids.is_cuda or interpret:
        _launch(
            masks, mask_rows, row_ids, positions, tokens, prompt_len, settings, columns=None, first_id=0, vocab=vocab, **given
        )
        return masks, mask_rows
    free = torch.zeros(len(row_ids), 32 * masks.shape[1], device=row_ids.device)
    forbid_ngrams_reference(free, row_ids, positions, tokens, prompt_len, settings, **given)
    forbidden = free < 0
    bits = (~forbidden).view(*masks.shape, 32).long() << torch.arange(32, device=masks.device)
    masks.copy_(bits.sum(2).to(torch.int32))
    mask_rows.copy_(torch.where(forbidden.any(1), torch.arange(len(row_ids), device=masks.device), -1))
    return masks, mask_rows


def _check(
    kernel: str, num_rows: int, row_ids: Tensor, positions: Tensor, tokens: Tensor, prompt_len: Tensor, settings: Tensor, *,
    drafts: Tensor | None, num_drafted: Tensor | None, draft_rows: Tensor | None,
) -> None:
    check(f"{kernel}: row_ids", row_ids, (num_rows,), torch.int32)
    check(f"{kernel}: positions", positions, (num_rows,), torch.int64)
    check_rows(kernel, tokens, prompt_len, settings)
    check_drafts(kernel, num_rows, drafts, num_drafted, draft_rows)


def _launch(
    out: Tensor, mask_rows: Tensor | None, row_ids: Tensor, positions: Tensor, tokens: Tensor, prompt_len: Tensor,
    settings: Tensor, *, drafts: Tensor | None, num_drafted: Tensor | None, draft_rows: Tensor | None, columns: Tensor | None,
    first_id: int, vocab: int,
) -> None:
    """out: the logits, or with mask_rows the masks."""
    if len(row_ids):
        forbid_ngrams_kernel[(len(row_ids),)](
            out, mask_rows, row_ids, positions, tokens, prompt_len, settings, drafts, num_drafted, draft_rows, columns,
            out.stride(0), tokens.stride(0), settings.stride(0), 0 if drafts is None else drafts.stride(0), vocab, first_id,
            0 if columns is None else columns.numel(), tokens.shape[1], 0 if drafts is None else drafts.shape[1], BLOCK=BLOCK,
            num_warps=4,
        )


def forbid_ngrams_reference(
    logits: Tensor, row_ids: Tensor, positions: Tensor, tokens: Tensor, prompt_len: Tensor, settings: Tensor, *,
    drafts: Tensor | None = None, num_drafted: Tensor | None = None, draft_rows: Tensor | None = None,
    columns: Tensor | None = None, first_id: int = 0,
) -> None:
    """The same, row by row in plain Python."""
    own, begins, lines, ends = settings.tolist(), prompt_len.tolist(), row_ids.tolist(), positions.tolist()
    counts = [0] * len(lines) if num_drafted is None else num_drafted.tolist()
    of_drafts = lines if draft_rows is None else draft_rows.tolist()
    for t, (row, position, count, draft_row) in enumerate(zip(lines, ends, counts, of_drafts, strict=True)):
        if not own[row][SIZE]:
            continue
        output = tokens[row, begins[row] : max(0, position - count)].tolist()
        output += drafts[draft_row, : max(0, count)].tolist() if drafts is not None else []
        found = sorted(forbidden_reference(output, own[row]))
        if columns is not None:
            places = [int(columns[token]) for token in found if 0 <= token < columns.numel()]
        else:
            places = [token - first_id for token in found]
        logits[t, [place for place in places if 0 <= place < logits.shape[1]]] = -torch.inf
