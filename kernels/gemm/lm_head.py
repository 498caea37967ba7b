"""Greedy tokens without stored logits: out_ids[t] = the lowest id among the largest of (hidden[t] @ weight.T)[:vocab].

Each program of the first kernel multiplies one tile and keeps, for each row, its largest fp32 logit with the lowest id; the
second kernel takes the first maximum over a row's tiles. The logits are those of a product with fp32 output, up to the order of
summation. The contract is that of `batchspec.kernels.sampling.argmax`: NaN counts as -inf, a row of nothing but -inf gives 0, an
id is always below `vocab`; with `flag_nonfinite` NaN, +inf or no finite logit give NO_TOKEN.
With `masks` a row chooses among the tokens that its mask allows, as if the others' logits were -inf: 32 tokens a word, read after
the product, one load for 32 columns. A load for each element took 128 of them a thread and spilled registers: 67 of 98 us at T =
256, V = 49152, H = 576 on an H200.
With `out_confidence` each tile also sums exp(logit - its largest logit) for each row, and the second kernel joins these sums.
Bound by the product. It saves 2 * 4 * T * V bytes of memory traffic, 0.25 ms at T = 1024, V = 128256 on an H200.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.operands import DTYPES, operands, read_block
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.sampling.argmax import add_exponentials, argmax, confidence_bin, sum_of_lanes

TILE = Tile(128, 128, 64, 3, 4, True)
BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens", "vocab"])
def lm_head_kernel(
    x, w, masks, mask_rows, top, top_ids, totals, num_tokens, width, vocab, num_parts, k, stride_x, stride_w, mask_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, FLAG: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    m_tiles = tl.cdiv(num_tokens, BLOCK_M)
    m = (tl.program_id(0) % m_tiles) * BLOCK_M
    part = tl.program_id(0) // m_tiles
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    await_earlier(PDL)
    for at in range(0, k, BLOCK_K):
        a = read_block(x, m, at, num_tokens, k, stride_x, BLOCK_M, BLOCK_K, TMA, EVEN_K)
        b = read_block(w, part * BLOCK_N, at, width, k, stride_w, BLOCK_N, BLOCK_K, TMA, EVEN_K)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    ids = part * BLOCK_N + tl.arange(0, BLOCK_N)
    if FLAG:
        acc = tl.where(acc == acc, acc, float("inf"))  # NaN becomes +inf, which the maximum keeps and which is flagged too
    acc = tl.where((acc == acc) & (ids < vocab)[None, :], acc, float("-inf"))
    rows = m + tl.arange(0, BLOCK_M)
    if masks is not None:
        # A word of the mask serves 32 columns: it is read once and spread, not once for each element of the product.
        lines = tl.load(mask_rows + rows, mask=rows < num_tokens, other=-1)
        word_ids = part * BLOCK_N // 32 + tl.arange(0, WORDS)
        words = masks + lines.to(tl.int64)[:, None] * mask_stride + word_ids[None, :]
        word = tl.load(words, mask=(lines >= 0)[:, None] & (word_ids * 32 < vocab)[None, :], other=-1)
        bits = word[:, :, None] >> (part * BLOCK_N % 32 + tl.arange(0, BLOCK_N // WORDS))[None, None, :]
        allowed = tl.reshape((bits & 1).to(tl.int8), [BLOCK_M, BLOCK_N])
        acc = tl.where(allowed != 0, acc, float("-inf"))
    best = tl.max(acc, 1)
    winner = tl.min(tl.where(acc == best[:, None], ids[None, :], vocab), 1)
    places = rows.to(tl.int64) * num_parts + part
    tl.store(top + places, best, mask=rows < num_tokens)
    tl.store(top_ids + places, winner, mask=rows < num_tokens)
    if totals is not None:
        above = tl.where(best > float("-inf"), best, 0)  # of a tile without a choice every term is exp(-inf)
        tl.store(totals + places, tl.sum(tl.exp(acc - above[:, None]), 1), mask=rows < num_tokens)


@triton.jit
def first_top_kernel(
    top, top_ids, totals, map_ids, out_ids, out_confidence, out_stride, confidence_stride, num_parts,
    FLAG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    await_earlier(PDL)
    for first in range(0, num_parts, BLOCK):
        exists = first + lanes < num_parts
        x = tl.load(top + row * num_parts + first + lanes, mask=exists, other=float("-inf"))
        ids = tl.load(top_ids + row * num_parts + first + lanes, mask=exists, other=0)
        if totals is not None:
            part = tl.load(totals + row * num_parts + first + lanes, mask=exists, other=0)
            total = add_exponentials(total, best, x, part)
        better = x > best  # false for a tie: the lane keeps its lowest id
        best = tl.where(better, x, best)
        best_ids = tl.where(better, ids, best_ids)
    largest = tl.max(best, 0)
    winner = tl.min(tl.where(best == largest, best_ids, 2147483647), 0)
    if FLAG:
        winner = tl.where(tl.abs(largest) < float("inf"), winner, -1)
    if map_ids is not None:
        winner = tl.load(map_ids + winner)
    tl.store(out_ids + row * out_stride, winner.to(tl.int32))
    if totals is not None:
        tl.store(out_confidence + row * confidence_stride, confidence_bin(largest, sum_of_lanes(total, best, largest)))


def lm_head(
    hidden: Tensor, weight: Tensor, *, out_ids: Tensor, vocab: int | None = None, map_ids: Tensor | None = None,
    flag_nonfinite: bool = False, masks: Tensor | None = None, mask_rows: Tensor | None = None,
    out_confidence: Tensor | None = None, tile: Tile = TILE, interpret: bool = False, compile_only: bool = False,
) -> None:
    """Write the token of the largest logit of every row.

    hidden   bf16 or fp32 [T, H]  rows may be slices of wider ones
    weight   same dtype [V, H], contiguous
    out_ids  int32 [T]  any stride: a column of draft tokens is fine
    vocab    valid columns, 1..V (None: V); later ones are never chosen
    map_ids  int32 or int64 [V]  the token of each column (a draft vocabulary), or None
    flag_nonfinite  NO_TOKEN for a row with NaN, +inf or no finite logit among the valid columns; not with map_ids
    masks    int32 [M, W]  bit v % 32 of word v // 32: token v is allowed; None: all are
    mask_rows  int32 [T]   the row of masks of each row of hidden, -1: all tokens are allowed
    out_confidence  int32 [T] of any stride, or None: how sure each choice is among the allowed tokens, as `argmax` writes it
    tile     how the work is split, with split=1 and per_sm=0

    `compile_only` compiles without a launch. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or
    strides, and for a tile that splits H.
    """
    (num_tokens, k), width = hidden.shape, weight.shape[0]
    vocab = width if vocab is None else vocab
    check("lm_head: hidden", hidden, (num_tokens, k), *DTYPES, rows=True)
    check("lm_head: weight", weight, (width, k), hidden.dtype)
    check("lm_head: out_ids", out_ids, (num_tokens,), torch.int32, strided=True)
    if out_confidence is not None:
        check("lm_head: out_confidence", out_confidence, (num_tokens,), torch.int32, strided=True)
    if map_ids is not None:
        check("lm_head: map_ids", map_ids, (width,), torch.int32, torch.int64)
        if flag_nonfinite:
            raise ValueError("lm_head: map_ids with flag_nonfinite; drafts are mapped and not flagged")
    if not 1 <= vocab <= width:
        raise ValueError(f"lm_head: vocab is {vocab}; must be 1..{width}, the rows of weight")
    if (masks is None) != (mask_rows is None):
        raise ValueError("lm_head: masks and mask_rows come together; give both or neither")
    if masks is not None and mask_rows is not None:
        check("lm_head: masks", masks, (masks.shape[0], masks.shape[1]), torch.int32)
        check("lm_head: mask_rows", mask_rows, (num_tokens,), torch.int32)
        if 32 * masks.shape[1] < vocab:
            raise ValueError(f"lm_head: masks have {32 * masks.shape[1]} bits, and there are {vocab} tokens")
    if tile.split != 1 or tile.per_sm:
        raise ValueError(f"lm_head: {tile} splits H; use split=1, per_sm=0")
    if not (hidden.is_cuda or interpret):
        lm_head_reference(
            hidden, weight, out_ids=out_ids, vocab=vocab, map_ids=map_ids, flag_nonfinite=flag_nonfinite, masks=masks,
            mask_rows=mask_rows, out_confidence=out_confidence,
        )
    elif num_tokens:
        num_parts = triton.cdiv(vocab, tile.block_n)
        top = hidden.new_empty(num_tokens, num_parts, dtype=torch.float32)
        top_ids = hidden.new_empty(num_tokens, num_parts, dtype=torch.int32)
        totals = None if out_confidence is None else torch.empty_like(top)
        grid = (triton.cdiv(num_tokens, tile.block_m) * num_parts,)
        *matrices, tma = operands(hidden, weight, tile)
        start = partial(lm_head_kernel.warmup, grid=grid) if compile_only else lm_head_kernel[grid]
        start(
            *matrices, masks, mask_rows, top, top_ids, totals, num_tokens, width, vocab, num_parts, k, hidden.stride(0), k,
            0 if masks is None else masks.stride(0),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, WORDS=max(1, tile.block_n // 32), TMA=tma,
            EVEN_K=k % tile.block_k == 0, FLAG=flag_nonfinite, INTERPRETED=not hidden.is_cuda, num_warps=tile.warps,
            num_stages=tile.stages,
            **launch_args(hidden),
        )
        if not compile_only:
            first_top_kernel[(num_tokens,)](
                top, top_ids, totals, map_ids, out_ids, out_confidence, out_ids.stride(0),
                0 if out_confidence is None else out_confidence.stride(0), num_parts, FLAG=flag_nonfinite, BLOCK=BLOCK,
                num_warps=4, **launch_args(hidden),
            )


def lm_head_reference(
    hidden: Tensor, weight: Tensor, *, out_ids: Tensor, vocab: int | None = None, map_ids: Tensor | None = None,
    flag_nonfinite: bool = False, masks: Tensor | None = None, mask_rows: Tensor | None = None,
    out_confidence: Tensor | None = None,
) -> None:
    """The same with stored logits; on a GPU by cuBLAS and the argmax kernel."""
    if hidden.is_cuda and hidden.dtype is torch.bfloat16:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    if masks is not None and mask_rows is not None:
        ids = torch.arange(logits.shape[1], device=logits.device).clamp(max=32 * masks.shape[1] - 1)
        words = masks[mask_rows.clamp(min=0).long()][:, ids >> 5]
        forbidden = ((words >> (ids & 31).int()) & 1 == 0) & (mask_rows >= 0)[:, None]
        logits = logits.masked_fill(forbidden, float("-inf"))
    argmax(
        logits, out_ids=out_ids, vocab=vocab, map_ids=map_ids, flag_nonfinite=flag_nonfinite, out_confidence=out_confidence
    )
