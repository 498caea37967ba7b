"""Matrix products of dense models with FP8 weights and activations (W8A8): y = x @ weight.T + bias, and the same with SwiGLU.

They run the kernel of `batchspec.kernels.moe.experts_fp8` with one expert that multiplies every row: the formula, the order of
sums and the tiles are the same. Bound by memory (the weights) up to about 175 tokens, then by the tensor cores.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchspec.kernels.benchmarks.continue_on_error import continue_on_error
from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.moe.experts_fp8 import Fp8Weight, fp8_product_reference, launch
from batchspec.kernels.moe.gate import SWIGLU, Gate
from batchspec.kernels.moe.quantise import Fp8Rows, quantise_rows
from batchspec.kernels.moe.tiles import ExpertTile, expert_tile, unit_pairs_of


def fp8_linear(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, tile: ExpertTile,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """x @ weight.T + bias.

    x       [T, K], from `quantise_rows`: one scale per 128 values if the weight has block scales, else one per row
    weight  e4m3 [N, K], contiguous
    scales  fp32, contiguous: [ceil(N / 128), ceil(K / 128)] of blocks, [N] of rows, or [] of the whole weight
    bias    bf16 or fp32 [N], or None
    tile    block_k is 128; with block scales block_n divides 128
    dtype   of the result: bf16 or fp32; on a CPU any float dtype

    Returns [T, N]. Does not synchronise on a GPU. The launch raises ValueError for other shapes, dtypes or strides.
    """
    return _product(x, weight, scales, bias, None, tile, dtype, interpret)


def fp8_swiglu(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, tile: ExpertTile, gate: Gate = SWIGLU,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """gate(g, u) [T, I], where [g, u] = x @ weight.T + bias and weight [2 * I, K] has the gate rows first. See `fp8_linear`.

    scales  of blocks: [2 * ceil(I / 128), ceil(K / 128)], ceil(I / 128) rows for the gate, then as many for up
    """
    return _product(x, weight, scales, bias, gate, tile, dtype, interpret)


def _product(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None, gate: Gate | None, tile: ExpertTile, dtype: torch.dtype,
    interpret: bool,
) -> Tensor:  # fmt: skip
    if not (x.values.is_cuda or interpret):
        return fp8_linear_reference(x, weight, scales, bias, gate=gate).to(dtype)
    n = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = x.values.new_empty(x.values.shape[0], n, dtype=dtype)
    bias = None if bias is None else bias[None]
    launch("fp8_linear", x, Fp8Weight(weight[None], scales[None]), bias, None, tile, out, gate=gate)
    return out


def fp8_linear_reference(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, gate: Gate | None = None
) -> Tensor:
    """`fp8_linear`, or `fp8_swiglu` if a gate is given, in plain torch: in the dtype of x.scales (fp32 or fp64)."""
    y = fp8_product_reference(x, weight, scales, gated=gate is not None)
    y = y if bias is None else y + bias.to(y.dtype)
    return y if gate is None else gate(*y.chunk(2, dim=-1))


def main() -> None:
    bench = Bench("fp8_linear")
    for tokens in (64, 256, 2048):
        for rows, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
            shape = f"T={tokens} {rows}x{k} blocks of 128"
            with continue_on_error(shape):
                weight = [torch.randn(rows, k, device=bench.device).to(E4M3) for _ in range(bench.num_copies)]
                scales = torch.rand(rows // 128, k // 128, device=bench.device) / k
                x = quantise_rows(torch.randn(tokens, k, device=bench.device).bfloat16())
                tile = expert_tile(unit_pairs_of(tokens, 1, 1, E4M3), tokens, gated=False, dtype=E4M3)
                found, wanted = fp8_linear(x, weight[0], scales, tile=tile), fp8_linear_reference(x, weight[0], scales)
                assert (found - wanted).norm() < 4e-3 * wanted.norm(), "differs from the reference"
                bench.row(
                    shape,
                    [partial(fp8_linear, x, w, scales, tile=tile) for w in weight],
                    [partial(fp8_linear_reference, x, w, scales) for w in weight[:1]],
                    num_bytes=rows * k + x.values.nbytes + found.nbytes,
                )


if __name__ == "__main__":
    main()
