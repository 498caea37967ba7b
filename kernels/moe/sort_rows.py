"""Copies rows of x into the order of the list of pairs, so that the rows of one expert follow each other.

    out[i] = x[pairs[i] // slots]        slots: number of pairs that read one row of x, top_k before the first product

The grouped products then read the rows of a unit as one block by TMA. Scales of FP8 rows are written transposed, [blocks, P], so
that a product reads one block's scales of neighbouring rows at once.
Each program copies one row. Bound by launch latency at decode sizes, by memory at prefill sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.e4m3 import E4M3, movable
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.quantise import Fp8Rows
from batchspec.kernels.moe.units import Routing


@triton.jit
def sort_rows_kernel(
    x, scales, pairs, out, out_scales, num_pairs, stride_x, k, num_scales, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scales None: x has no scales."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    await_earlier(PDL)
    source = tl.load(pairs + row).to(tl.int64) // SLOTS
    tl.store(out + row * k + lane, tl.load(x + source * stride_x + lane, mask=lane < k), mask=lane < k)
    if scales is not None:
        block = tl.arange(0, SCALES)
        scale = tl.load(scales + source * num_scales + block, mask=block < num_scales)
        tl.store(out_scales + block.to(tl.int64) * num_pairs + row, scale, mask=block < num_scales)


def sort_rows(x: Tensor, routing: Routing, *, interpret: bool = False) -> Tensor:
    """Rows of x [T, K], of any float dtype, in the order of the list of pairs: [P, K]. Does not synchronise on a GPU.

    Rows may be slices of wider rows. Raises ValueError for other shapes or strides.
    """
    top_k = _check(x, routing)
    if not (x.is_cuda or interpret):
        return sort_rows_reference(x, routing)
    out = x.new_empty(len(routing.pairs), x.shape[1])
    _launch(x, None, routing, out, None, top_k)
    return out


def sort_fp8_rows(x: Fp8Rows, routing: Routing, *, interpret: bool = False) -> Fp8Rows:
    """`sort_rows` of quantised rows: values [P, K], scales transposed [blocks, P]."""
    top_k = _check(x.values, routing)
    check("sort_fp8_rows: scales", x.scales, (len(x.values), x.scales.shape[1]), torch.float32)
    if not (x.values.is_cuda or interpret):
        return sort_fp8_rows_reference(x, routing)
    out = Fp8Rows(
        x.values.new_empty(len(routing.pairs), x.values.shape[1]), x.scales.new_empty(x.scales.shape[1], len(routing.pairs))
    )
    _launch(movable(x.values), x.scales, routing, movable(out.values), out.scales, top_k)
    return out


def _check(x: Tensor, routing: Routing) -> int:
    num_tokens, top_k = routing.expert_ids.shape
    check("sort_rows: x", x, (num_tokens, x.shape[1]), *FLOATS, E4M3, rows=True)
    check("sort_rows: pairs", routing.pairs, (num_tokens * top_k,), torch.int32)
    return top_k


def _launch(x: Tensor, scales: Tensor | None, routing: Routing, out: Tensor, out_scales: Tensor | None, slots: int) -> None:
    num_pairs, k = out.shape
    num_scales = 0 if scales is None else scales.shape[1]
    block = max(128, triton.next_power_of_2(k))
    if num_pairs:
        sort_rows_kernel[(num_pairs,)](
            x, scales, routing.pairs, out, out_scales, num_pairs, x.stride(0), k, num_scales, SLOTS=slots, BLOCK=block,
            SCALES=max(16, triton.next_power_of_2(max(1, num_scales))),
            num_warps=min(8, max(1, block * x.itemsize // (32 * 16))), **launch_args(x),
        )  # fmt: skip


def sort_rows_reference(x: Tensor, routing: Routing) -> Tensor:
    """`sort_rows` in plain torch."""
    return movable(x)[routing.pairs.long() // routing.expert_ids.shape[1]].view(x.dtype)


def sort_fp8_rows_reference(x: Fp8Rows, routing: Routing) -> Fp8Rows:
    """`sort_fp8_rows` in plain torch."""
    source = routing.pairs.long() // routing.expert_ids.shape[1]
    return Fp8Rows(movable(x.values)[source].view(E4M3), x.scales[source].T.contiguous())
