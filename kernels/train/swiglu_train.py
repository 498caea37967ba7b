"""SwiGLU for training: out = silu(gate) * up of two tensors, and its backward pass, one pass over memory each.

    d_gate = grad * up * s * (1 + gate * (1 - s))      d_up = grad * gate * s      s = 1 / (1 + exp(-gate))

Bound by memory; plain torch takes two passes forward and five backward. Source: Shazeer 2020 (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check

BLOCK = 2048


@triton.jit(do_not_specialize=("count",))
def swiglu_train_kernel(gate, up, out, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = index < count
    gate_value = tl.load(gate + index, mask=exists, other=0.0).to(ACC)
    up_value = tl.load(up + index, mask=exists, other=0.0).to(ACC)
    tl.store(out + index, gate_value / (1.0 + tl.exp(-gate_value)) * up_value, mask=exists)


@triton.jit(do_not_specialize=("count",))
def swiglu_train_backward_kernel(gate, up, grad, out_gate, out_up, count, ACC: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = index < count
    gate_value = tl.load(gate + index, mask=exists, other=0.0).to(ACC)
    up_value = tl.load(up + index, mask=exists, other=0.0).to(ACC)
    grad_value = tl.load(grad + index, mask=exists, other=0.0).to(ACC)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate_value))
    tl.store(out_gate + index, grad_value * up_value * sigmoid * (1.0 + gate_value * (1.0 - sigmoid)), mask=exists)
    tl.store(out_up + index, grad_value * gate_value * sigmoid, mask=exists)


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
) -> None:
    """Write the gradients of gate and up, from the gradient `grad` of the output; tensors as in `swiglu_train`."""
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
    gate_value, up_value = _widened(gate, up)
    out.copy_(gate_value * gate_value.sigmoid() * up_value)


def swiglu_train_backward_reference(gate: Tensor, up: Tensor, grad: Tensor, *, out_gate: Tensor, out_up: Tensor) -> None:
    """The same in plain torch."""
    gate_value, up_value, grad_value = _widened(gate, up, grad)
    sigmoid = gate_value.sigmoid()
    out_gate.copy_(grad_value * up_value * sigmoid * (1 + gate_value * (1 - sigmoid)))
    out_up.copy_(grad_value * gate_value * sigmoid)


def _widened(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _wide(tensor: Tensor) -> tl.dtype:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32
