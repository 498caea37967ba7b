"""The two operands of a matrix product x @ weight.T, read block by block: through TMA descriptors or pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.gemm.tiles import Tile

DTYPES = (torch.bfloat16, torch.float32)


@triton.jit
def read_block(source, row, column, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               TMA: tl.constexpr, EVEN_K: tl.constexpr):
    """[ROWS, COLUMNS] at (row, column) of a matrix; columns past the last are 0, rows past the last are undefined."""
    if TMA:
        block = source.load([row, column])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        columns = column + tl.arange(0, COLUMNS)
        places = source + rows[:, None] * stride + columns[None, :]
        if EVEN_K:
            block = tl.load(places)
        else:
            block = tl.load(places, mask=columns[None, :] < num_columns, other=0.0)
    return block


def operands(x: Tensor, weight: Tensor, tile: Tile) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor, bool]:
    """x [T, K] and weight [N, K] for `read_block`, and whether they are TMA descriptors: if the tile asks for them and both
    fit."""
    if not (tile.tma and _fits_tma(x) and _fits_tma(weight)):
        return x, weight, False
    left = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k])
    return left, TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]), True


def _fits_tma(matrix: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, as TMA descriptors require."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0
