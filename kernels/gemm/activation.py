"""What comes between the two products of an MLP. With a gate, out = round(act(gate)) * up of a fused product gate_up [T, 2 * I]
(Shazeer 2020, arXiv 2002.05202); without one, out = relu(up)^2, in place (So et al. 2021, arXiv 2109.08668).

    silu(x)      = x / (1 + exp(-x))
    gelu_tanh(x) = x / (1 + exp(-2u)),  u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x (1 + tanh(u)) / 2 (arXiv 1606.08415)

In fp32 (fp64 for fp64), rounded to the tensors' dtype before the product, as in plain torch.
Bound by memory at prefill sizes (bytes: 3 * T * I * itemsize, without a gate 2 * T * I * itemsize), by launch latency at decode
sizes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

BLOCK = 2048
GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
VALUES_PER_THREAD = 8  # a 16-byte load of bf16


@triton.jit
def gated(gate, up, GELU: tl.constexpr, DTYPE: tl.constexpr):
    """act(gate), rounded to DTYPE, times up. GELU: the slope of gelu_tanh at 0 times 2, or 0 for silu."""
    inner = gate
    if GELU > 0:
        inner = GELU * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-inner))).to(DTYPE).to(gate.dtype) * up


@triton.jit
def silu_and_mul_kernel(
    gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr
):
    """GELU: as in `gated`."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    lane = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    exists = lane < WIDTH
    await_earlier(PDL)
    gate = tl.load(gate_up + row * stride + lane, mask=exists, other=0.0).to(ACC)
    up = tl.load(gate_up + row * stride + WIDTH + lane, mask=exists, other=0.0).to(ACC)
    tl.store(out + row * WIDTH + lane, gated(gate, up, GELU, out.dtype.element_ty), mask=exists)


def silu_and_mul(gate_up: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write silu(first half) * second half of each row.

    gate_up  fp32, bf16, fp16 or fp64 [T, 2 * I]  rows may be slices of wider ones
    out      [T, I] of the same dtype, contiguous

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("silu_and_mul", gate_up, out)
    if not (gate_up.is_cuda or interpret):
        silu_and_mul_reference(gate_up, out=out)
    else:
        _launch(gate_up, out, gelu=0.0)


def gelu_tanh_and_mul(gate_up: Tensor, *, out: Tensor, interpret: bool = False) -> None:
    """Write gelu_tanh(first half) * second half of each row. Arguments as in `silu_and_mul`."""
    _check("gelu_tanh_and_mul", gate_up, out)
    if not (gate_up.is_cuda or interpret):
        gelu_tanh_and_mul_reference(gate_up, out=out)
    else:
        _launch(gate_up, out, gelu=GELU_SLOPE)


@triton.jit
def squared_relu(up):
    """relu(up)^2. NaN stays NaN: it marks damaged weights."""
    up = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return up * up


@triton.jit(do_not_specialize=["num_values"])
def relu_squared_kernel(up, num_values, BLOCK: tl.constexpr, ACC: tl.constexpr, PDL: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = lane < num_values
    await_earlier(PDL)
    tl.store(up + lane, squared_relu(tl.load(up + lane, mask=exists, other=0.0).to(ACC)), mask=exists)


def relu_squared_(up: Tensor, *, interpret: bool = False) -> Tensor:
    """Replace each number by relu(x)^2, and return the tensor.

    up  fp32, bf16, fp16 or fp64 [T, I], contiguous

    Does not synchronise on a GPU. Raises ValueError for other dtypes or strides.
    """
    check("relu_squared_: up", up, tuple(up.shape), *FLOATS)
    if not (up.is_cuda or interpret):
        return up.relu_().square_()
    if up.numel():
        relu_squared_kernel[(triton.cdiv(up.numel(), BLOCK),)](
            up, up.numel(), BLOCK=BLOCK, ACC=tl.float64 if up.dtype == torch.float64 else tl.float32,
            num_warps=BLOCK // (32 * VALUES_PER_THREAD), **launch_args(up),
        )
    return up


def _check(name: str, gate_up: Tensor, out: Tensor) -> None:
    num_flat_tokens, width = out.shape
    check(f"{name}: gate_up", gate_up, (num_flat_tokens, 2 * width), *FLOATS, rows=True)
    check(f"{name}: out", out, (num_flat_tokens, width), gate_up.dtype)


def _launch(gate_up: Tensor, out: Tensor, *, gelu: float) -> None:
    num_flat_tokens, width = out.shape
    if num_flat_tokens:
        block = min(BLOCK, max(16, triton.next_power_of_2(width)))
        silu_and_mul_kernel[(num_flat_tokens * triton.cdiv(width, block),)](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, GELU=gelu,
            ACC=tl.float64 if gate_up.dtype == torch.float64 else tl.float32,
            num_warps=max(1, block // (32 * VALUES_PER_THREAD)), **launch_args(gate_up),
        )


def silu_and_mul_reference(gate_up: Tensor, *, out: Tensor) -> None:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=out)


def gelu_tanh_and_mul_reference(gate_up: Tensor, *, out: Tensor) -> None:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)
