"""The router's logits in fp32: logits = x @ weight.T + bias, T tokens, E experts.

The logits are not rounded to the model's dtype, so that nearly equal experts keep their order. A sum over H is that of eight
parts, in order: part p has the columns p * n to (p + 1) * n of every 8 * n. For few tokens eight warps sum a part each, because
a program takes as long as its longest chain of products; for many, all warps sum one part after another. So the order of each
sum does not depend on T. Tiles have fewer than 64 rows, because Triton uses another instruction from 64 rows on.
fp32 weights are split into two TF32 parts, which hold about 22 bits. Bound by latency at decode sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.card import card_of
from batchspec.kernels.common.checks import check
from batchspec.kernels.common.fetch import fetch_to_l2
from batchspec.kernels.common.pdl import await_earlier, launch_args

FEW_TILES = 256  # of 16 tokens and 16 experts; beyond, all warps sum one part after another
ONE_WAVE = 128  # tiles that run at once on an H200, which has 132 multiprocessors
PARTS = 8
PART_K, PART_K_WIDE = 64, 32  # WIDE: for fp32 operands, whose two TF32 parts take more registers


class RouterTile(NamedTuple):
    """How the logits are divided among programs."""

    block_t: int
    """Tokens of a program: fewer than 64."""
    block_e: int
    """Experts of a program."""
    few: bool
    """Whether each of eight warps sums a part."""
    warps: int
    stages: int


def router_tile(num_tokens: int, num_experts: int, *, wide: bool) -> RouterTile:
    """A good tile on an H200; wide: x or the weight is fp32.

    Measured on one (2026-12-01) with x and weight in bf16, 64 to 512 experts of 2,048 columns and 128 of 2,688, each with 256 to
    2,048 tokens: at most 12 % slower than the fastest of thirteen tiles. 128 experts of 2,688 columns, 1,024 tokens: 8.8 us with
    32 experts a program, 15.9 with 64 and four stages. 512 experts of 2,048 columns, 2,048 tokens: 21.8 us with three stages,
    because three programs share a multiprocessor, 30.3 with four. Limits are powers of two, so that each tile is also that of a
    power of two of tokens: a rehearsal launches these.
    """
    tiles = triton.cdiv(num_tokens, 16) * triton.cdiv(num_experts, 16)
    if tiles <= FEW_TILES:
        return RouterTile(16 if tiles <= ONE_WAVE else 32, 16, True, 8, 4)
    if wide:
        return RouterTile(32, 64, False, 4, 4)
    if triton.cdiv(num_tokens, 32) * triton.cdiv(num_experts, 64) <= ONE_WAVE:
        return RouterTile(32, 32, False, 2, 6)
    return RouterTile(32, 64, False, 4, 3)


@triton.jit
def multiply(a, b, acc, WIDE: tl.constexpr, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif WIDE:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def sum_in_order(parts, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """[8, BLOCK_T, BLOCK_E] -> the sum over the first dimension, from its beginning to its end."""
    even, odd = tl.split(parts.reshape(4, 2, BLOCK_T, BLOCK_E).permute(0, 2, 3, 1))
    p04, p26 = tl.split(even.reshape(2, 2, BLOCK_T, BLOCK_E).permute(0, 2, 3, 1))
    p15, p37 = tl.split(odd.reshape(2, 2, BLOCK_T, BLOCK_E).permute(0, 2, 3, 1))
    p0, p4 = tl.split(p04.permute(1, 2, 0))
    p1, p5 = tl.split(p15.permute(1, 2, 0))
    p2, p6 = tl.split(p26.permute(1, 2, 0))
    p3, p7 = tl.split(p37.permute(1, 2, 0))
    return (((((((0.0 + p0) + p1) + p2) + p3) + p4) + p5) + p6) + p7


@triton.jit(do_not_specialize=["num_tokens", "rounds"])
def router_kernel(
    x, w, bias, out, num_tokens, rounds, stride_x, NUM_EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PART_K: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr,
    AHEAD: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """WIDE: x or w is fp32, and products are fp32 made of three TF32 products. FEW: eight warps, a part each.
    AHEAD: the matrix is fetched into the L2 cache before the wait for x, as it is no result of an earlier launch.

    rounds: steps of a part, for many tokens. Not a constant: ptxas would unroll the loop, and Triton would turn the
    single step of a short part, `acc + dot(a, b, 0)`, into `dot(a, b, acc)`, whose sum has another order.
    """
    EXPERT_TILES: tl.constexpr = (NUM_EXPERTS + BLOCK_E - 1) // BLOCK_E
    STEP: tl.constexpr = PARTS * PART_K
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    # TF32 products (and all in the interpreter) are added block by block: blocks must be equal for few and many tokens.
    AT_ONCE: tl.constexpr = 1 if WIDE or INTERPRETED else 2
    token = tl.program_id(0) // EXPERT_TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(0) % EXPERT_TILES * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = x + (tl.minimum(token, num_tokens - 1).to(tl.int64) * stride_x)[:, None]
    columns = w + (tl.minimum(expert, NUM_EXPERTS - 1) * K)[None, :]
    if AHEAD and PDL:
        begin = tl.program_id(0) % EXPERT_TILES * BLOCK_E
        row_bytes: tl.constexpr = K * w.dtype.element_ty.primitive_bitwidth // 8
        fetch_to_l2(w + begin * K, tl.minimum(NUM_EXPERTS - begin, BLOCK_E) * row_bytes)
    await_earlier(PDL)
    if FEW:
        depth = tl.arange(0, PARTS)[:, None] * PART_K + tl.arange(0, PART_K)[None, :]
        parts = tl.zeros([PARTS, BLOCK_T, BLOCK_E], tl.float32)
        for step in range(0, STEPS):
            at = step * STEP + depth
            if K % STEP == 0:
                a = tl.load(rows[None, :, :] + at[:, None, :])
                b = tl.load(columns[None, :, :] + at[:, :, None])
            else:
                a = tl.load(rows[None, :, :] + at[:, None, :], mask=at[:, None, :] < K, other=0.0)
                b = tl.load(columns[None, :, :] + at[:, :, None], mask=at[:, :, None] < K, other=0.0)
            parts = multiply(a, b, parts, WIDE, INTERPRETED)
        acc = sum_in_order(parts, BLOCK_T, BLOCK_E)
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        part = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        lane = tl.arange(0, AT_ONCE * PART_K)
        for turn in range(0, PARTS * rounds):  # one loop, so that loads of the next part begin early
            at = turn % rounds * (AT_ONCE * STEP) + turn // rounds * PART_K + lane // PART_K * STEP + lane % PART_K
            if K % (AT_ONCE * STEP) == 0:
                a = tl.load(rows + at[None, :])
                b = tl.load(columns + at[:, None])
            else:
                a = tl.load(rows + at[None, :], mask=(at < K)[None, :], other=0.0)
                b = tl.load(columns + at[:, None], mask=(at < K)[:, None], other=0.0)
            part = multiply(a, b, part, WIDE, INTERPRETED)
            last = turn % rounds == rounds - 1
            acc = tl.where(last, acc + part, acc)
            part = tl.where(last, 0.0, part)
    if bias is not None:
        acc += tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)[None, :]
    places = out + token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(places, acc, mask=(token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])


def router_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, ahead: bool = True, interpret: bool = False
) -> Tensor:
    """The router's logits [T, E], fp32; fp64 if x is fp64.

    x       bf16 or fp32 [T, H], on a CPU also fp64  rows may be slices of wider rows
    weight  bf16 or fp32 [E, H], on a CPU also fp64; contiguous
    bias    bf16 or fp32 [E], on a CPU also fp64; or None
    ahead   for few tokens, fetch the weight into the L2 cache while the launch before still runs, which must not write it

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    (num_tokens, k), num_experts = x.shape, weight.shape[0]
    floats = (torch.bfloat16, torch.float32) if x.is_cuda or interpret else (torch.bfloat16, torch.float32, torch.float64)
    check("router_logits: x", x, (num_tokens, k), *floats, rows=True)
    check("router_logits: weight", weight, (num_experts, k), *floats)
    if bias is not None:
        check("router_logits: bias", bias, (num_experts,), *floats)
    if not (x.is_cuda or interpret):
        return router_logits_reference(x, weight, bias)
    out = x.new_empty(num_tokens, num_experts, dtype=torch.float32)
    wide = x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16
    tile, part_k = router_tile(num_tokens, num_experts, wide=wide), PART_K_WIDE if wide else PART_K
    stage_bytes = part_k * (PARTS if tile.few else 2) * (tile.block_t * x.itemsize + tile.block_e * weight.itemsize)
    rounds = triton.cdiv(k, PARTS * part_k * (1 if wide or not x.is_cuda else 2))
    if num_tokens:
        router_kernel[(triton.cdiv(num_tokens, tile.block_t) * triton.cdiv(num_experts, tile.block_e),)](
            x, weight, bias, out, num_tokens, rounds, x.stride(0), NUM_EXPERTS=num_experts, K=k,
            BLOCK_T=tile.block_t, BLOCK_E=tile.block_e, PARTS=PARTS, PART_K=part_k, FEW=tile.few, WIDE=wide,
            AHEAD=ahead and tile.few and k * weight.itemsize % 16 == 0 and weight.data_ptr() % 16 == 0,
            INTERPRETED=not x.is_cuda, num_warps=tile.warps,
            num_stages=card_of(x.device).stages_that_fit(tile.stages, stage_bytes), **launch_args(x),
        )
    return out


def router_logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`router_logits` in plain torch."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
