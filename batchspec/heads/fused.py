"""Autograd functions of the fused training kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchspec.kernels.train.rope_train import rope_train
from batchspec.kernels.train.swiglu_train import swiglu_train, swiglu_train_backward


class RoPE(torch.autograd.Function):
    """RoPE of x [B, L, H, D] with tables cos and sin [L, D], the first half of sin negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin.roll(sin.shape[-1] // 2, -1)), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    rope_train(x.flatten(0, 1), cos, sin, out=out.view(-1, *x.shape[2:]))
    return out


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of two tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(up)
        swiglu_train(gate, up, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        out_gate, out_up = torch.empty_like(gate), torch.empty_like(up)
        swiglu_train_backward(gate, up, grads[0].contiguous(), out_gate=out_gate, out_up=out_up)
        return out_gate, out_up
