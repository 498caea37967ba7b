"""Sinks added to attention whose kernel knows none, in place: out[t, h] *= 1 / (1 + e^(sink[h] - lse[t, h])).

lse is the logarithm of the softmax denominator without the sink. Bound by memory: out is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier, launch_args

VALUES = 4096
"""Values of a program: 32 a thread."""
LN_2 = 0.6931471805599453


@triton.jit(do_not_specialize=["num_lines", "lse_stride_t", "lse_stride_h"])
def apply_sinks_kernel(
    out, lse, sink_logits, num_lines, lse_stride_t, lse_stride_h, unit, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):
    """A line is a head of a token. unit: the number that lse is multiplied with to be a natural logarithm."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    exists = line < num_lines
    token, head = line // NUM_HEADS, line % NUM_HEADS
    d = tl.arange(0, DIM)
    sink = tl.load(sink_logits + head, mask=exists, other=0.0)
    await_earlier(PDL)
    denominator = tl.load(lse + token * lse_stride_t + head * lse_stride_h, mask=exists, other=0.0) * unit
    share = 1.0 / (1.0 + tl.exp(sink - denominator))
    places = out + line[:, None] * HEAD_DIM + d[None, :]
    inside = exists[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(places, mask=inside, other=0.0)
    tl.store(places, (values.to(tl.float32) * share[:, None]).to(out.dtype.element_ty), mask=inside)


def apply_sinks(out: Tensor, lse: Tensor, sink_logits: Tensor, *, base_2: bool = False, interpret: bool = False) -> None:
    """Add the sinks to attention, in place.

    out          bf16 or fp16 [T, NH, D], contiguous; on a CPU any float dtype
    lse          fp32 [T, NH], any strides; fp64 for fp64
    sink_logits  fp32 [NH]; fp64 for fp64
    base_2       lse is a logarithm to base 2; else natural

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides.
    """
    num_tokens, num_heads, head_dim = out.shape
    wide = torch.promote_types(out.dtype, torch.float32)
    dtypes = (torch.bfloat16, torch.float16) if out.is_cuda or interpret else FLOATS
    check("apply_sinks: out", out, (num_tokens, num_heads, head_dim), *dtypes)
    check("apply_sinks: lse", lse, (num_tokens, num_heads), wide, strided=True)
    check("apply_sinks: sink_logits", sink_logits, (num_heads,), wide)
    if not (out.is_cuda or interpret):
        apply_sinks_reference(out, lse, sink_logits, base_2=base_2)
    elif num_tokens:
        dim = triton.next_power_of_2(head_dim)
        lines = max(1, VALUES // dim)
        apply_sinks_kernel[(triton.cdiv(num_tokens * num_heads, lines),)](
            out, lse, sink_logits, num_tokens * num_heads, lse.stride(0), lse.stride(1), LN_2 if base_2 else 1.0,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIM=dim, LINES=lines, num_warps=4, **launch_args(out),
        )


def apply_sinks_reference(out: Tensor, lse: Tensor, sink_logits: Tensor, *, base_2: bool = False) -> None:
    """The same in plain torch."""
    out.mul_(torch.sigmoid((lse * LN_2 if base_2 else lse) - sink_logits).unsqueeze(2))
