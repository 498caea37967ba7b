"""Matrix products of dense models with weights of four bits, INT4 or NVFP4 (W4A16): y = x @ W.T + bias, 1 to about 1,000 tokens.

    four_bit_linear    y = x W' + b
    four_bit_swiglu    y = silu(x Wg' + bg) * (x Wu' + bu)      W = [Wg; Wu]

INT4 weights are rounded once to bf16, as `dequantise` gives them (`common/four_bit.py`), but only in registers: memory is read 4
bits and scales a number (`four_bit_steps.py`). So the result is that of the product with dequantised weights, up to the order of
sums. NVFP4 weights are not rounded (`common/nvfp4.py`). Direct tiles have a kernel of their own, `four_bit_direct.py`; this one
passes weights through shared memory.

A tile of the output can be shared by several programs, each of which sums a part of the blocks of K. The last one to finish adds
their sums in the order of K (`split_k.py`): the bits are the same in every run. They depend on how K is divided, not on the sizes
of a tile. Bound by memory up to about 40 tokens, then by the tensor cores. In between, loads of x from the L2 cache count too:
each tile of rows of W reads all of x, so tiles have many rows. Each tile unpacks its weights once.
Few weights are read in as much time as a launch takes, so a program asks for its first ones while earlier launches still run.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.fetch import fetch_to_l2
from batchspec.kernels.common.four_bit import BLOCK, ROWS, WORDS, FourBitWeight, multiplied, pairs_of, scale_dtype
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.four_bit_direct import launch_direct
from batchspec.kernels.gemm.four_bit_steps import SIZE, sum_blocks
from batchspec.kernels.gemm.four_bit_tiles import MOST_PARTS
from batchspec.kernels.gemm.linear import write_tile
from batchspec.kernels.gemm.split_k import MAX_TILES, counters, join_parts
from batchspec.kernels.gemm.tiles import Tile
from batchspec.kernels.moe.packed_tiles import in_two, whole_tile

FETCH_BYTES = 1 << 16
"""Bytes of weights that a program fetches to the L2 cache while earlier launches still run."""
REGISTERS = 128
"""Most of a thread in a tile of 128 x 128 with 8 warps: so two programs of it run on a Hopper multiprocessor."""


@triton.jit
def fetch_words(words, block, stop, first, n, w_rows, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr):
    """Ask for the words of the first blocks of a program's first tile."""
    num_bytes = tl.minimum(BLOCK_N, n - first) * 64
    for ahead in tl.static_range(BLOCKS):
        if block + ahead < stop:
            own = words + ((block + ahead) * w_rows + first).to(tl.int64) * 32
            fetch_to_l2(own, num_bytes)
            if GATED:
                fetch_to_l2(own + n.to(tl.int64) * 32, num_bytes)


@triton.jit(do_not_specialize=["num_tokens", "split"])  # no recompilation for other token counts
def four_bit_linear_kernel(
    x, w, words, scales, shifts, row_scales, bias, out, partials, arrived, num_tokens, n, w_rows, k, stride_x, split,
    GROUP: tl.constexpr, GATED: tl.constexpr, TWO: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, FETCHED: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """w: `words`, or with TMA a descriptor of them, see `load_words`; w_rows: rows of a block of columns in memory.

    split: programs of a tile, 1 unless SPLIT. Neighbours have the same rows of W, then the same tokens.
    """
    ROWS: tl.constexpr = (BLOCK_N if TWO else 2 * BLOCK_N) if GATED else (BLOCK_N // 2 if TWO else BLOCK_N)
    program = tl.program_id(0)
    t_tiles, k_blocks = tl.cdiv(num_tokens, BLOCK_T), tl.cdiv(k, 128)
    tile, part_blocks = program // split, tl.cdiv(k_blocks, split)
    t, first = tile % t_tiles * BLOCK_T, tile // t_tiles * BLOCK_N
    start = program % split * part_blocks
    stop = tl.minimum(start + part_blocks, k_blocks)
    if PDL:
        fetch_words(words, start, stop, first, n, w_rows, GATED, BLOCK_N, FETCHED)
    await_earlier(PDL)
    acc, up, _, _ = sum_blocks(
        x, None, w, scales, shifts, program * 0, t, first, num_tokens, n, w_rows, k, stride_x, 1, start, stop,
        GROUP, GATED, TWO, BLOCK_T, 0, BLOCK_N, TMA, EVEN_K, INTERPRETED,
    )
    complete = True
    if SPLIT:
        complete, acc, up = join_parts(
            partials, arrived, tile, program, split * part_blocks, part_blocks, acc, up, ROWS, BLOCK_T, TWO
        )
    if complete:
        y, second = whole_tile(acc, up, row_scales, 0, first, n, GATED, TWO, BLOCK_T, BLOCK_N)
        y, second = tl.trans(y) * SIZE, tl.trans(second) * SIZE
        write_tile(bias, None, None, out, y, second, y, t, first, num_tokens, n, k, n, 0.0, BLOCK_T, BLOCK_N, GATED)


def four_bit_linear(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None = None, *, tile: Tile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """x @ W.T + bias.

    x       bf16 [T, K], its columns in the order of the weight in memory (`FourBitWeight.columns`); rows may be slices of wider
            ones
    weight  INT4 with scales in bf16 below 8 (`bf16_scales`) and groups that kernels read (`FourBitWeight.kernel_group`), or NVFP4
            (`nvfp4.arranged`)
    bias    bf16 [N], or None
    tile    block_m tokens, block_n rows of W (of outputs, if gated), block_k 128; how the work is split: the result's bits
            depend on how K is
    out     bf16 or fp32 [T, N], contiguous; None: a new one in bf16

    Returns out. Does not synchronise. Call it once before it is captured in a CUDA graph: the first call of a split product
    allocates counters. Graphs captured on one stream must not run at the same time. Raises ValueError for other shapes, dtypes or
    strides.
    """
    out = x.new_empty(len(x), weight.num_rows) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, out=out, tile=tile)
        return out
    return out.copy_(four_bit_linear_reference(x, weight, bias))


def four_bit_swiglu(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None = None, *, tile: Tile, out: Tensor | None = None,
    interpret: bool = False,
) -> Tensor:
    """silu(gate) * up of gate_up = x @ W.T + bias, W [2 * N, K] with the gate's rows first and N a multiple of 16 -> [T, N].

    See `four_bit_linear`. Rounds as a product and `silu_and_mul` do.
    """
    out = x.new_empty(len(x), weight.num_rows // 2) if out is None else out
    if x.is_cuda or interpret:
        launch(x, weight, bias, out=out, tile=tile, gated=True)
        return out
    gate, up = four_bit_linear_reference(x, weight, bias).to(x.dtype).chunk(2, dim=-1)
    return out.copy_(F.silu(gate) * up)


def four_bit_linear_reference(x: Tensor, weight: FourBitWeight, bias: Tensor | None = None) -> Tensor:
    """`four_bit_linear` in plain torch, in fp32 (fp64 if x is fp64), with the weights that the kernel multiplies."""
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = multiplied(weight, wide)
    matrix = matrix if weight.columns is None else matrix.index_select(1, weight.columns)
    y = x.to(wide) @ matrix.t()
    return y if bias is None else y + bias.to(wide)


def launch(
    x: Tensor, weight: FourBitWeight, bias: Tensor | None, *, out: Tensor, tile: Tile, gated: bool = False,
    compile_only: bool = False,
) -> None:
    """Check the arguments and start the kernel; `compile_only` compiles without a launch."""
    num_tokens, k, rows = len(x), weight.k, weight.num_rows
    n = rows // 2 if gated else rows
    group = check_weight("four_bit_linear", weight)
    _check(x, weight, bias, out, tile, n, gated=gated)
    if not num_tokens:
        return
    num_tiles, split = -(-num_tokens // tile.block_m) * -(-n // tile.block_n), tile.split > 1
    if split and num_tiles > MAX_TILES:
        raise ValueError(f"four_bit_linear: {num_tiles} tiles split along K; at most {MAX_TILES}: use larger tiles or split=1")
    if tile.direct:
        launch_direct(x, weight, bias, out=out, tile=tile, gated=gated, group=group, compile_only=compile_only)
        return
    height, grid = tile.block_n * (2 if gated else 1), (num_tiles * tile.split,)
    slots = (num_tiles + grid[0]) * height * tile.block_m
    partials = x.new_empty(slots, dtype=torch.float32) if split else None
    start = partial(four_bit_linear_kernel.warmup, grid=grid) if compile_only else four_bit_linear_kernel[grid]
    tma = tile.tma and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    start(
        TensorDescriptor.from_tensor(x, [tile.block_m, BLOCK]) if tma else x,
        words_operand(weight.words, n, tile.block_n, gated=gated) if tma else weight.words, weight.words,
        pairs_of(weight.scales), pairs_of(weight.shifts), weight.row_scales, bias, out, partials,
        counters(x.device) if split else None, num_tokens, n, weight.words.stride(0) // WORDS, k, x.stride(0), tile.split,
        GROUP=group, GATED=gated, TWO=in_two(tile.block_n, tile.warps, gated=gated), SPLIT=split,
        BLOCK_T=tile.block_m, BLOCK_N=tile.block_n, FETCHED=FETCH_BYTES // (64 * height), TMA=tma, EVEN_K=k % BLOCK == 0,
        INTERPRETED=not x.is_cuda, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=REGISTERS if (tile.block_m, height, tile.warps) == (128, 128, 8) else None, **launch_args(x),
    )


def words_operand(words: Tensor, n: int, block_n: int, *, gated: bool) -> TensorDescriptor:
    """The descriptor of words [..., blocks, rows / 16, 512], perhaps a slice of rows, as `load_words` reads it. n: outputs."""
    blocks, stride = words.shape[:-2].numel(), words.stride(-3)
    if gated:
        return TensorDescriptor.from_tensor(words.view(2 * blocks, n, WORDS), [2, block_n, WORDS])
    rows = (blocks - 1) * stride // WORDS + words.shape[-2] * ROWS
    return TensorDescriptor.from_tensor(words.as_strided((rows, WORDS), (WORDS, 1)), [block_n, WORDS])


def check_weight(kernel: str, weight: FourBitWeight) -> int:
    """The size of the groups as the kernels take it. Raises ValueError for a weight that they cannot read."""
    k, rows, group = weight.k, weight.num_rows, weight.kernel_group
    if group is None:
        raise ValueError(f"{kernel}: groups of {weight.group_size} columns; must be 32, 64, whole blocks of 128, or all of a row")
    paired, blocks = -(-rows // ROWS) * ROWS, -(-k // BLOCK)
    groups = 1 if not group else blocks * (BLOCK // max(group, 32)) if group < BLOCK else -(-k // group)
    check(f"{kernel}: words", weight.words, (blocks, paired // ROWS, ROWS * WORDS), torch.int16, strided=True)
    check(f"{kernel}: scales", weight.scales, (groups, paired), scale_dtype(weight.row_scales), rows=True)
    if weight.row_scales is not None:
        check(f"{kernel}: row_scales", weight.row_scales, (1, paired), torch.float32, rows=True)
    if weight.shifts is not None:
        check(f"{kernel}: shifts", weight.shifts, (groups, paired), torch.bfloat16, rows=True)
    return group


def _check(x: Tensor, weight: FourBitWeight, bias: Tensor | None, out: Tensor, tile: Tile, n: int, *, gated: bool) -> None:
    """Raise ValueError unless the arguments fit each other."""
    check("four_bit_linear: x", x, (len(x), weight.k), torch.bfloat16, rows=True)
    check("four_bit_linear: out", out, (len(x), n), torch.bfloat16, torch.float32)
    if bias is not None:
        check("four_bit_linear: bias", bias, (weight.num_rows,), torch.bfloat16)
    if gated and (n % ROWS or not weight.words.is_contiguous()):
        raise ValueError(f"four_bit_swiglu: {n} outputs of a weight; must be a multiple of {ROWS}, and not a slice of its rows")
    if tile.block_k != BLOCK or tile.block_n % ROWS or tile.per_sm:
        raise ValueError(f"four_bit_linear: {tile}; block_k must be {BLOCK}, block_n a multiple of {ROWS}, and per_sm 0")
    rows, of_a_warp = tile.block_n * (2 if gated else 1), (2 * ROWS,) if gated else (ROWS, 2 * ROWS)
    if tile.direct and (rows not in [own * tile.warps for own in of_a_warp] or tile.split > MOST_PARTS):
        needed = f"{' or '.join(map(str, of_a_warp))} rows of W for each warp and a split of at most {MOST_PARTS}"
        raise ValueError(f"four_bit_linear: {tile}; direct=True needs {needed}")
