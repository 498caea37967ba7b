"""Soft cap of logits, in place: cap * tanh(logit / cap). NaN stays NaN, and infinities become +-cap.

Source: Gemma 2 (arXiv 2408.00118), section 2. Bound by memory: 4 bytes read and 4 written a logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.pdl import await_earlier, launch_args

BLOCK = 4096


@triton.jit(do_not_specialize=["count"])
def softcap_kernel(logits, count, CAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    await_earlier(PDL)
    x = tl.load(logits + at, mask=at < count, other=0.0) * (1.0 / CAP)
    # tanh(|x|) = (1 - e) / (1 + e), e = exp(-2 |x|), whose rounding error is that of a number near 1; near 0 its Taylor series.
    s = x * x
    series = -17.0 / 315 + s * (62.0 / 2835 + s * (-1382.0 / 155925))
    near = x * (1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * series)))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    tl.store(logits + at, tl.where(s < 0.09, near, far) * CAP, mask=at < count)


def softcap(logits: Tensor, cap: float, *, interpret: bool = False) -> None:
    """Cap logits in place.

    logits  fp32 [N, V] contiguous; without a GPU also fp64

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    if not (logits.is_cuda or interpret) or logits.dtype == torch.float64:
        softcap_reference(logits, cap)
        return
    check("softcap: logits", logits, tuple(logits.shape), torch.float32)
    if logits.numel():
        softcap_kernel[(triton.cdiv(logits.numel(), BLOCK),)](
            logits, logits.numel(), CAP=cap, BLOCK=BLOCK, num_warps=8, **launch_args(logits)
        )


def softcap_reference(logits: Tensor, cap: float) -> None:
    """The same in plain torch."""
    logits.div_(cap).tanh_().mul_(cap)
