"""The gate of a SwiGLU for training: out = silu(gate) * up of two tensors, and its way back in one pass each.

    d_gate = grad * up * s * (1 + gate * (1 - s))      d_up = grad * gate * s      s = 1 / (1 + exp(-gate))

Bound by memory; in torch the way there is two passes and the way back five. Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.timing import Bench
from batchspec.kernels.common.checks import FLOATS, check

BLOCK = 2048


@triton.jit(do_not_specialize=("count",))
def swiglu_train_kernel(gate, up, out, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    opened = tl.load(gate + at, mask=exists, other=0.0).to(ACC)
    passed = tl.load(up + at, mask=exists, other=0.0).to(ACC)
    tl.store(out + at, opened / (1.0 + tl.exp(-opened)) * passed, mask=exists)


@triton.jit(do_not_specialize=("count",))
def swiglu_train_backward_kernel(gate, up, grad, out_gate, out_up, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    opened = tl.load(gate + at, mask=exists, other=0.0).to(ACC)
    passed = tl.load(up + at, mask=exists, other=0.0).to(ACC)
    slope = tl.load(grad + at, mask=exists, other=0.0).to(ACC)
    share = 1.0 / (1.0 + tl.exp(-opened))
    tl.store(out_gate + at, slope * passed * share * (1.0 + opened * (1.0 - share)), mask=exists)
    tl.store(out_up + at, slope * opened * share, mask=exists)


def swiglu_train(gate: Tensor, up: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write silu(gate) * up: three contiguous tensors of one shape and dtype (fp32, bf16, fp16, fp64).

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    check("swiglu_train: gate", gate, tuple(gate.shape), *FLOATS)
    for name, tensor in (("up", up), ("out", out)):
        check(f"swiglu_train: {name}", tensor, tuple(gate.shape), gate.dtype)
    if not (gate.is_cuda or interpret):
        swiglu_train_reference(gate, up, out=out)
    elif gate.numel():
        swiglu_train_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, out, gate.numel(), ACC=_wide(gate), BLOCK=BLOCK, num_warps=8
        )


def swiglu_train_backward(
    gate: Tensor, up: Tensor, grad: Tensor, *, out_gate: Tensor, out_up: Tensor, interpret: bool = False
) -> None:  # fmt: skip
    """Write the gradients of gate and up from that of `gate`'s output; tensors as there."""
    check("swiglu_train_backward: gate", gate, tuple(gate.shape), *FLOATS)
    for name, tensor in (("up", up), ("grad", grad), ("out_gate", out_gate), ("out_up", out_up)):
        check(f"swiglu_train_backward: {name}", tensor, tuple(gate.shape), gate.dtype)
    if not (gate.is_cuda or interpret):
        swiglu_train_backward_reference(gate, up, grad, out_gate=out_gate, out_up=out_up)
    elif gate.numel():
        swiglu_train_backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, grad, out_gate, out_up, gate.numel(), ACC=_wide(gate), BLOCK=BLOCK, num_warps=8
        )


def swiglu_train_reference(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """The same in plain torch."""
    opened, passed = _widened(gate, up)
    out.copy_(opened * opened.sigmoid() * passed)


def swiglu_train_backward_reference(gate: Tensor, up: Tensor, grad: Tensor, *, out_gate: Tensor, out_up: Tensor) -> None:
    """The same in plain torch."""
    opened, passed, slope = _widened(gate, up, grad)
    share = opened.sigmoid()
    out_gate.copy_(slope * passed * share * (1 + opened * (1 - share)))
    out_up.copy_(slope * opened * share)


def _widened(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _wide(tensor: Tensor) -> tl.dtype:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def main() -> None:
    bench = Bench("gate")
    for places, width in ((32768, 1536), (8192, 1536), (16384, 14336)):
        gates = [torch.randn(places, width, device=bench.device).bfloat16() for _ in range(bench.num_copies)]
        up, grad = torch.randn(2, places, width, device=bench.device).bfloat16()
        out, other = torch.empty_like(up), torch.empty_like(up)
        shape = f"N={places} I={width} bfloat16"
        bench.row(
            shape,
            [partial(swiglu_train, x, up, out=out) for x in gates],
            [partial(swiglu_train_reference, x, up, out=out) for x in gates],
            num_bytes=3 * up.nbytes,
        )
        bench.row(
            f"{shape}, way back",
            [partial(swiglu_train_backward, x, up, grad, out_gate=out, out_up=other) for x in gates],
            [partial(swiglu_train_backward_reference, x, up, grad, out_gate=out, out_up=other) for x in gates],
            num_bytes=5 * up.nbytes,
        )


if __name__ == "__main__":
    main()
