"""The rows that dense FP8 products read: tokens quantised to e4m3, alone or in one launch with the activation before them.

    quantise_tokens       x                               scales and values as in `quantise_rows` (`kernels/moe/quantise.py`)
    quantise_activation   act(gate) * up, rounded first   the bits of `silu_and_mul` or `gelu_tanh_and_mul`, then quantise_tokens

The library's product (`scaled_mm.py`) refuses numbers of rows that are not multiples of 4, so there is memory for up to 3 rows
more than tokens. These rows are never written, and no other row depends on them.
A row with a scale per 128 values is divided over programs; with one scale, one program holds it. Bound by memory at prefill sizes
(itemsize + 1 bytes a value, with the activation 2 * itemsize + 1), by launch latency at decode sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.gemm.activation import GELU_SLOPE, gated, gelu_tanh_and_mul_reference, silu_and_mul_reference
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows, quantise_groups, quantise_rows_reference

ROW_MULTIPLE = 4
PROGRAM_GROUPS = 16
"""Groups of 128 values of one program, 16 values a thread."""


class Fp8Form(NamedTuple):
    """How the rows of a product are quantised."""

    whole: bool
    """One scale per row; else one per 128 values."""
    scale: float | None = None
    """A calibrated scale of all rows, which needs `whole`; None: computed from each row."""


class Fp8Tokens(NamedTuple):
    """Quantised rows of T tokens."""

    rows: Fp8Rows
    """[R, K] with R >= T; rows from T on have unspecified numbers"""
    num_tokens: int
    """T"""


@triton.jit(do_not_specialize=["num_rows"])
def quantise_tokens_kernel(
    x, out, out_scales, given, num_rows, stride, k, GATED: tl.constexpr, GELU: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """num_rows: rows of out. given: one scale for all rows, or None. GATED: x [T, 2 * k] holds gate and up of a gated MLP."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    parts = tl.cdiv(k, GROUPS * GROUP)
    row = (tl.program_id(0) // parts).to(tl.int64)
    group = tl.program_id(0) % parts * GROUPS + tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = place < k
    await_earlier(PDL)
    values = tl.load(x + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + row * stride + k + place, mask=inside, other=0.0).to(tl.float32)
        values = gated(values, up, GELU, DTYPE).to(DTYPE).to(tl.float32)
    y, scale = quantise_groups(values, given, WHOLE, INTERPRETED)
    tl.store(out + row * k + place, y, mask=inside)
    num_scales = 1 if WHOLE else tl.cdiv(k, GROUP)
    tl.store(out_scales + group.to(tl.int64)[:, None] * num_rows + row, scale, mask=group[:, None] < num_scales)


def quantise_tokens(x: Tensor, form: Fp8Form, *, interpret: bool = False) -> Fp8Tokens:
    """Quantise each row.

    x  bf16 or fp32 [T, K]; on a CPU any float dtype  rows may be slices of wider rows

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides, and for a scale without `whole`.
    """
    if not (x.is_cuda or interpret):
        return Fp8Tokens(quantise_rows_reference(x, whole=form.whole, scale=form.scale), len(x))
    return _launch("quantise_tokens", x, x.shape[1], form, gated=False, gelu=0.0)


def quantise_activation(gate_up: Tensor, form: Fp8Form, *, gelu: bool, interpret: bool = False) -> Fp8Tokens:
    """Quantise act(first half) * second half of each row, act gelu_tanh or silu. gate_up [T, 2 * K]; see `quantise_tokens`."""
    if not (gate_up.is_cuda or interpret):
        return quantise_activation_reference(gate_up, form, gelu=gelu)
    return _launch("quantise_activation", gate_up, gate_up.shape[1] // 2, form, gated=True, gelu=GELU_SLOPE if gelu else 0.0)


def empty_tokens(x: Tensor, k: int, form: Fp8Form) -> Fp8Tokens:
    """Memory for len(x) rows of k values each, and for rows up to a multiple of `ROW_MULTIPLE`."""
    num_rows = -(-len(x) // ROW_MULTIPLE) * ROW_MULTIPLE
    scales = x.new_empty(1 if form.whole else -(-k // GROUP), num_rows, dtype=torch.float32)
    return Fp8Tokens(Fp8Rows(x.new_empty(num_rows, k, dtype=E4M3), scales), len(x))


def check_form(kernel: str, form: Fp8Form) -> None:
    """Raise ValueError for a scale without `whole`."""
    if form.scale is not None and not form.whole:
        raise ValueError(f"{kernel}: scale={form.scale} applies to whole rows; pass whole=True, or scale=None")


def _launch(kernel: str, x: Tensor, k: int, form: Fp8Form, *, gated: bool, gelu: float) -> Fp8Tokens:
    check(f"{kernel}: x", x, (len(x), 2 * k if gated else k), torch.bfloat16, torch.float32, rows=True)
    check_form(kernel, form)
    out = empty_tokens(x, k, form)
    groups = triton.next_power_of_2(-(-k // GROUP))
    groups = groups if form.whole else min(groups, PROGRAM_GROUPS)
    if len(x):
        quantise_tokens_kernel[(len(x) * triton.cdiv(k, groups * GROUP),)](
            x, *out.rows, form.scale, len(out.rows.values), x.stride(0), k, GATED=gated, GELU=gelu, WHOLE=form.whole, GROUP=GROUP,
            GROUPS=groups, INTERPRETED=not x.is_cuda, num_warps=min(16, max(1, groups // 4)), **launch_args(x),
        )
    return out


def quantise_activation_reference(gate_up: Tensor, form: Fp8Form, *, gelu: bool) -> Fp8Tokens:
    """`quantise_activation` in plain torch."""
    inner = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    (gelu_tanh_and_mul_reference if gelu else silu_and_mul_reference)(gate_up, out=inner)
    return Fp8Tokens(quantise_rows_reference(inner, whole=form.whole, scale=form.scale), len(inner))
