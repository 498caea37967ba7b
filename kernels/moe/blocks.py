"""What the grouped products of experts share: the blocks that a program loads and stores, and the checks of a launch.

Rows of activations are in the order of the list of pairs (`units.py`), so the rows of a unit are one block, which TMA loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.gemm.activation import squared_relu
from batchspec.kernels.moe.gate import apply_gate
from batchspec.kernels.moe.tiles import HEIGHTS, JOINED, ExpertTile
from batchspec.kernels.moe.units import Routing, check_routing


@triton.jit
def narrowest(count, HEIGHT: tl.constexpr, LOW: tl.constexpr):
    """Whether HEIGHT is the smallest power of two, from LOW on, that is at least `count`."""
    return (count > (HEIGHT // 2 if HEIGHT > LOW else 0)) & (count <= HEIGHT)


@triton.jit
def load_rows(w, expert, first, num_rows, at, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
              EVEN_K: tl.constexpr):
    """The block [BLOCK_N, BLOCK_K] of an expert's weights [num_rows, k] that begins at row `first` and column `at`.

    Columns past the last one are 0. Rows past the last one have unspecified numbers, which `store_rows` leaves out.
    """
    if TMA:
        block = w.load([expert * num_rows + first, at])
    else:
        rows = expert.to(tl.int64) * num_rows + tl.minimum(first + tl.arange(0, BLOCK_N), num_rows - 1)
        columns = at + tl.arange(0, BLOCK_K)
        places = w + rows[:, None] * k + columns[None, :]
        if EVEN_K:
            block = tl.load(places)
        else:
            block = tl.load(places, mask=columns[None, :] < k, other=0.0)
    return block


@triton.jit
def load_tokens(x, begin, count, at, num_rows, k, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """The block [BLOCK_T, BLOCK_K] of x [num_rows, k] from row `begin`, column `at`. Rows past `count` are unspecified."""
    if TMA:
        tokens = x.load([begin, at])
    else:
        lane = tl.arange(0, BLOCK_T)[:, None]
        column = at + tl.arange(0, BLOCK_K)[None, :]
        tokens = tl.load(x + (begin + lane).to(tl.int64) * k + column, mask=(lane < count) & (column < k), other=0.0)
    return tokens


@triton.jit
def rows_of_tokens(x, pairs, begin, count, k, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr):
    """Pointers [BLOCK_T, 1] to the rows of x [T, k] of the tokens of a unit's pairs, for `load_row_blocks`."""
    lane = tl.arange(0, BLOCK_T)
    token = tl.load(pairs + begin + lane, mask=lane < count, other=0) // TOP_K
    return x + token.to(tl.int64)[:, None] * k


@triton.jit
def load_row_blocks(rows, at, k, BLOCK_K: tl.constexpr):
    """The columns [rows, BLOCK_K] from `at` on of rows whose pointers are given."""
    column = at + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(rows + column, mask=column < k, other=0.0)


@triton.jit
def store_rows(y, out, pairs, begin, count, first, n, SCATTER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile [BLOCK_N, BLOCK_T] transposed, to rows in the list's order, or with SCATTER to the rows of the pairs."""
    lane = tl.arange(0, BLOCK_T)
    row = begin + lane
    if SCATTER:
        row = tl.load(pairs + row, mask=lane < count, other=0)
    column = first + tl.arange(0, BLOCK_N)
    places = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(places, tl.trans(y.to(out.dtype.element_ty)), mask=(lane < count)[:, None] & (column < n)[None, :])


@triton.jit
def add_bias_and_gate(acc, up, bias, expert, first, n, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
                      BLOCK_N: tl.constexpr):
    """Add the bias to the fp32 sums of a tile [BLOCK_N, pairs]; if GATED, apply the gate to acc and up; otherwise relu(acc)^2,
    unless ALPHA is None."""
    column = first + tl.arange(0, BLOCK_N)
    inside = column < n
    if bias is not None:
        own = bias + expert.to(tl.int64) * n * (2 if GATED else 1) + column
        acc += tl.load(own, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(own + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = apply_gate(acc, up, LIMIT, ALPHA)
    elif ALPHA is not None:
        acc = squared_relu(acc)
    return acc


def blocks_of(x: Tensor, tile: ExpertTile, tma: bool) -> list[Tensor | TensorDescriptor | None]:
    """x [P, K] for each of `HEIGHTS`, as a descriptor of blocks of that many rows; None for heights that `tile` does not need."""
    return [
        (TensorDescriptor.from_tensor(x, [height, tile.block_k]) if tma else x) if height in tile.blocks else None
        for height in HEIGHTS
    ]


def check_launch(kernel: str, routing: Routing, tile: ExpertTile, num_experts: int) -> None:
    """Raise ValueError unless the work list was made for this tile and these experts."""
    check_routing(kernel, routing, routing.expert_ids.shape[0], num_experts)
    if tile.block_t != routing.unit_pairs:
        raise ValueError(f"{kernel}: a tile of {tile.block_t} pairs, but the routing's units have {routing.unit_pairs}")
    if tile.low > tile.block_t:
        raise ValueError(f"{kernel}: {tile}; low must be at most block_t")
    heights = (*HEIGHTS, *JOINED) if tile.joined else HEIGHTS
    if tile.low not in heights or tile.block_t not in heights:
        raise ValueError(f"{kernel}: {tile}; low and block_t must be of {sorted(heights)}")
