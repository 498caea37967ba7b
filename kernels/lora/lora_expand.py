"""The second of the two low-rank products of LoRA adapters: B of each token's adapter, added to the product of the base model.

    y[order[i], part p] += s[a, p] (h[i, p] B[a, p]')     h: the sums of `lora_shrink.py` over its splits, rounded to y's dtype

B of all parts lies end to end, [N adapters, rows of all parts, r], as the rows of the base product do: one launch adds to q, k
and v. The product is in fp32 and rounded once, with the number that it is added to. Rows of tokens without an adapter are
neither read nor written. Bound by memory: B of the adapters that have tokens, and y.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.operands import DTYPES
from batchspec.kernels.lora.lora_shrink import RANKS
from batchspec.kernels.lora.lora_tokens import LoraTokens, check_tokens, tokens_by_adapter

MOST_PARTS = 3
BLOCK_N = 128


@triton.jit(do_not_specialize=["num_places", "splits"])
def lora_expand_kernel(
    h, b, scales, order, tiles, out, num_places, splits, out_stride, rows_0, rows_1, rows_2,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """One tile of tokens by BLOCK_N rows of B, all of one part. rows_0 to rows_2: rows of the parts, 0 if there is none."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else out.dtype.element_ty
    tile, block = tl.program_id(0), tl.program_id(1)
    blocks_0, blocks_1 = tl.cdiv(rows_0, BLOCK_N), tl.cdiv(rows_1, BLOCK_N)
    part, begin, own, before = 0, 0, rows_0, 0
    if PARTS > 1 and block >= blocks_0:
        part, begin, own, before = 1, rows_0, rows_1, blocks_0
    if PARTS > 2 and block >= blocks_0 + blocks_1:
        part, begin, own, before = 2, rows_0 + rows_1, rows_2, blocks_0 + blocks_1
    adapter = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    scale = tl.load(scales + adapter * PARTS + part)
    own = tl.where((count > 0) & (scale != 0), own, 0)
    lane = tl.arange(0, BLOCK_T)
    rank = tl.arange(0, RANK)
    row = (block - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = (adapter.to(tl.int64) * (rows_0 + rows_1 + rows_2) + begin + row)[None, :] * RANK
    weights = tl.load(b + lines + rank[:, None], mask=(row < own)[None, :], other=0.0)
    await_earlier(PDL)  # the work list was written before the preceding launch, which writes h
    if own > 0:
        inside = (lane < count)[:, None] & (row < own)[None, :]
        token = tl.load(order + first + lane, mask=lane < count, other=0)
        places = out + token.to(tl.int64)[:, None] * out_stride + (begin + row)[None, :]
        base = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        sums = tl.zeros([BLOCK_T, RANK], tl.float32)
        for split in range(splits):
            at = (split * num_places + first + lane).to(tl.int64)[:, None] * PARTS + part
            sums += tl.load(h + at * RANK + rank[None, :], mask=(lane < count)[:, None], other=0.0)
        rounded = sums.to(out.dtype.element_ty).to(DOT)
        added = tl.dot(rounded, weights.to(DOT), input_precision="ieee") * scale
        tl.store(places, (base + added).to(out.dtype.element_ty), mask=inside)


def lora_expand(
    h: Tensor, b: Tensor, scales: Tensor, tokens: LoraTokens, *, part_rows: Sequence[int], out: Tensor, interpret: bool = False
) -> None:
    """Add the second product to out, in place.

    h          [splits, T, P, r] of `lora_shrink`
    b          out's dtype [N, rows of all parts, r], contiguous
    scales     fp32 [N, P]; 0: nothing is added to this part
    part_rows  P numbers of rows, at most 3
    out        bf16 or fp32 [T, rows of all parts], or fp64, as in `lora_shrink`; its rows may be slices of wider ones

    Does not synchronise on a GPU except in fp64. Raises ValueError for other shapes, dtypes or strides.
    """
    if interpret or (out.is_cuda and out.dtype in DTYPES):
        launch(h, b, scales, tokens, part_rows, out)
    else:
        lora_expand_reference(h, b, scales, tokens, part_rows=part_rows, out=out)


def launch(
    h: Tensor, b: Tensor, scales: Tensor, tokens: LoraTokens, part_rows: Sequence[int], out: Tensor, *, compile_only: bool = False
) -> None:
    """Check the arguments and start the kernel, unless `compile_only`."""
    (splits, num_tokens, parts, rank), (num_adapters, rows, _) = h.shape, b.shape
    check("lora_expand: h", h, (splits, num_tokens, parts, rank), torch.float32)
    check("lora_expand: b", b, (num_adapters, rows, rank), out.dtype)
    check("lora_expand: scales", scales, (num_adapters, parts), torch.float32)
    check("lora_expand: out", out, (num_tokens, rows), *DTYPES, rows=True)
    check_tokens("lora_expand", tokens, num_tokens, num_adapters)
    if rank not in RANKS or parts != len(part_rows) or parts > MOST_PARTS or sum(part_rows) != rows:
        raise ValueError(
            f"lora_expand: rank {rank}, {parts} parts of {list(part_rows)} rows, b of {rows}; ranks are padded to "
            f"{', '.join(map(str, RANKS))}, and there are at most {MOST_PARTS} parts, whose rows are those of b"
        )
    if not len(tokens.tiles):
        return
    grid = (len(tokens.tiles), sum(triton.cdiv(own, BLOCK_N) for own in part_rows))
    start = partial(lora_expand_kernel.warmup, grid=grid) if compile_only else lora_expand_kernel[grid]
    start(
        h, b, scales, tokens.order, tokens.tiles, out, num_tokens, splits, out.stride(0),
        *part_rows, *(0,) * (MOST_PARTS - parts),
        PARTS=parts, RANK=rank, BLOCK_T=tokens.block, BLOCK_N=BLOCK_N, INTERPRETED=not out.is_cuda,
        num_warps=4, **launch_args(out),
    )


def lora_expand_reference(
    h: Tensor, b: Tensor, scales: Tensor, tokens: LoraTokens, *, part_rows: Sequence[int], out: Tensor
) -> None:
    """`lora_expand` in plain torch."""
    dtype, order, sums = torch.promote_types(out.dtype, torch.float32), tokens.order.long(), h.sum(0)
    bounds = list(accumulate(part_rows, initial=0))
    for adapter, own in tokens_by_adapter(tokens):
        for part, (begin, end) in enumerate(pairwise(bounds)):
            scale = float(scales[adapter, part])
            if scale:
                rounded = sums[own, part].to(out.dtype).to(dtype)
                added = (rounded @ b[adapter, begin:end].to(dtype).T) * scale
                out[order[own], begin:end] = (out[order[own], begin:end].to(dtype) + added).to(out.dtype)
