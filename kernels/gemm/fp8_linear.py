"""Matrix products with FP8 weights and activations (W8A8) of a dense model: y = x @ weight.T + bias, and the same with SwiGLU.

The grouped product of `batchspec.kernels.moe.experts_fp8` with one expert that has every row: the same formula, order of sums and
tiles. Bound by the weights' bytes up to about 175 tokens, then by the tensor cores.
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

    x       [T, K], from `quantise_rows`: a scale for each 128 values where the weight's scales are of blocks, else one a row
    weight  e4m3 [N, K], contiguous
    scales  fp32 [ceil(N / 128), ceil(K / 128)], [N], or [] of the whole weight; contiguous
    bias    bf16 or fp32 [N], or None

    Returns [T, N] of `dtype`. Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    return _product(x, weight, scales, bias, None, tile, dtype, interpret)


def fp8_swiglu(
    x: Fp8Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, *, tile: ExpertTile, gate: Gate = SWIGLU,
    dtype: torch.dtype = torch.bfloat16, interpret: bool = False,
) -> Tensor:  # fmt: skip
    """The gate of gate_up = x @ weight.T + bias, weight [2 * I, K] with the gate's rows first -> [T, I]. See `fp8_linear`.

    scales  of blocks: [2 * ceil(I / 128), ceil(K / 128)], those of the up rows begin a block of their own
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
    """fp32 (fp64 of fp64): the same in plain torch."""
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
                tile = expert_tile(unit_pairs_of(tokens, 1, 1), gated=False, dtype=E4M3)
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
