"""The first of the two low-rank products of LoRA adapters: each token times the A of its own adapter.

    h[i] = x[order[i]] A[a, p]'     A [N adapters, P parts, r, K], a: the adapter of place i (`lora_tokens.py`), in fp32

The parts of a product of several projections (q, k, v; gate, up) read the same x and are one launch. Adapters of a lower rank are
padded with zero rows to r. K is split between programs, because the tokens of a few adapters do not fill a GPU; each writes its
sum to its own slot, and `lora_expand.py` adds them up in order: the bits are the same in every run.
Bound by memory (A of the adapters that have tokens) and launch. Source: Hu et al. 2021 (arXiv 2106.09685); grouped by adapter as
in Chen et al. 2023, "Punica" (arXiv 2310.18547).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.operands import DTYPES
from batchspec.kernels.lora.lora_tokens import LoraTokens, check_tokens, tokens_by_adapter

RANKS = (16, 32, 64)
"""Ranks are padded to one of these: a tensor core product sums over at least 16."""
PROGRAMS = 512
"""Number of programs that fill the GPU: about four on each of 132 SMs."""
MOST_SPLITS = 16
SPLITS = (1, 2, 4, 8, MOST_SPLITS)
_BLOCK_K = {torch.bfloat16: 128, torch.float32: 64}


def padded_rank(rank: int) -> int | None:
    """The smallest of RANKS that is at least `rank`, or None."""
    return next((padded for padded in RANKS if rank <= padded), None)


def num_splits(k: int, num_programs: int, block_k: int) -> int:
    """Parts of K, a power of two: as many as fill the GPU if an unsplit product has `num_programs`; at least two blocks each."""
    wanted = max(1, min(PROGRAMS // max(1, num_programs), MOST_SPLITS, -(-k // block_k) // 2))
    return 1 << (wanted.bit_length() - 1)


@triton.jit(do_not_specialize=["num_places", "steps"])
def lora_shrink_kernel(
    x, a, scales, order, tiles, out, num_places, steps, k, x_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """One tile of tokens, one part, one split of `steps` blocks of K. EVEN: the splits together have exactly k numbers."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else x.dtype.element_ty
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(tiles + tile * 3)  # the work list was written before the preceding launch, which writes x
    first = tl.load(tiles + tile * 3 + 1)
    count = tl.load(tiles + tile * 3 + 2)
    scale = tl.load(scales + adapter * PARTS + part)
    await_earlier(PDL)
    if (count > 0) & (scale != 0):
        lane = tl.arange(0, BLOCK_T)
        rank = tl.arange(0, RANK)
        token = tl.load(order + first + lane, mask=lane < count, other=0)
        rows = x + token.to(tl.int64)[:, None] * x_stride
        lines = a + ((adapter * PARTS + part).to(tl.int64) * RANK + rank)[None, :] * k
        acc = tl.zeros([BLOCK_T, RANK], tl.float32)
        for step in range(steps):
            at = (split * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
            if EVEN:
                values = tl.load(rows + at[None, :], mask=(lane < count)[:, None], other=0.0)
                weights = tl.load(lines + at[:, None])
            else:
                values = tl.load(rows + at[None, :], mask=(lane < count)[:, None] & (at < k)[None, :], other=0.0)
                weights = tl.load(lines + at[:, None], mask=(at < k)[:, None], other=0.0)
            acc = tl.dot(values.to(DOT), weights.to(DOT), acc, input_precision="ieee")
        places = (split * num_places + first + lane).to(tl.int64)[:, None] * PARTS + part
        tl.store(out + places * RANK + rank[None, :], acc, mask=(lane < count)[:, None])


def lora_shrink(
    x: Tensor, a: Tensor, scales: Tensor, tokens: LoraTokens, *, splits: int | None = None, interpret: bool = False
) -> Tensor:
    """h in the order of the list, as sums over the splits of K.

    x       bf16 or fp32 [T, K], or fp64, which plain torch multiplies; its rows may be slices of wider ones
    a       same dtype [N, P, r, K], contiguous, r one of RANKS
    scales  fp32 [N, P] as in `lora_expand`; 0: this adapter does not have this part, which is left out
    splits  of K, a power of two; None: `num_splits`

    Returns fp32 (fp64 for fp64) [splits, T, P, r]; undefined for tokens without an adapter and for parts that are left out. Does
    not synchronise on a GPU except in fp64. Raises ValueError for other shapes, dtypes or strides.
    """
    if interpret or (x.is_cuda and x.dtype in DTYPES):
        return launch(x, a, scales, tokens, splits)
    return lora_shrink_reference(x, a, scales, tokens)


def launch(
    x: Tensor, a: Tensor, scales: Tensor, tokens: LoraTokens, splits: int | None = None, *, compile_only: bool = False
) -> Tensor:
    """Check the arguments and start the kernel, unless `compile_only`."""
    (num_tokens, k), (num_adapters, parts, rank, _) = x.shape, a.shape
    check("lora_shrink: x", x, (num_tokens, k), *DTYPES, rows=True)
    check("lora_shrink: a", a, (num_adapters, parts, rank, k), x.dtype)
    check("lora_shrink: scales", scales, (num_adapters, parts), torch.float32)
    check_tokens("lora_shrink", tokens, num_tokens, num_adapters)
    if rank not in RANKS:
        raise ValueError(f"lora_shrink: rank {rank}; must be padded to one of {', '.join(map(str, RANKS))}")
    block_k, num_tiles = _BLOCK_K[x.dtype], len(tokens.tiles)
    splits = num_splits(k, num_tiles * parts, block_k) if splits is None else splits
    if splits not in SPLITS:
        raise ValueError(f"lora_shrink: {splits} splits; must be one of {', '.join(map(str, SPLITS))}")
    steps = -(-k // (block_k * splits))
    out = torch.empty((splits, num_tokens, parts, rank), dtype=torch.float32, device=x.device)
    if not num_tiles:
        return out
    grid = (num_tiles, parts, splits)
    start = partial(lora_shrink_kernel.warmup, grid=grid) if compile_only else lora_shrink_kernel[grid]
    stages = 4 if x.dtype is torch.bfloat16 else 2
    start(
        x, a, scales, tokens.order, tokens.tiles, out, num_tokens, steps, k, x.stride(0),
        PARTS=parts, RANK=rank, BLOCK_T=tokens.block, BLOCK_K=block_k, EVEN=k % (block_k * MOST_SPLITS) == 0,
        INTERPRETED=not x.is_cuda, num_warps=4,
        num_stages=card_of(x.device).stages_that_fit(stages, (tokens.block + rank) * block_k * x.itemsize), **launch_args(x),
    )
    return out


def lora_shrink_reference(x: Tensor, a: Tensor, scales: Tensor, tokens: LoraTokens) -> Tensor:
    """`lora_shrink` in plain torch, in one split; 0 for tokens without an adapter."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    _, parts, rank, _ = a.shape
    out = torch.zeros((1, x.shape[0], parts, rank), dtype=dtype, device=x.device)
    order = tokens.order.long()
    for adapter, own in tokens_by_adapter(tokens):
        out[0, own] = (x[order[own]].to(dtype) @ a[adapter].to(dtype).flatten(0, 1).T).unflatten(1, (parts, rank))
    return out
