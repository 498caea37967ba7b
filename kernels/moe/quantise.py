"""Quantise rows to e4m3 with one scale per 128 values or per row: the activations of products with FP8 weights.

    scale  = max(largest |x| of the group, 1e-10) / 448, or a given scale
    values = x / scale, clamped to -448 .. 448, rounded to nearest even

Computed in fp32, as vLLM's per_token_group_quant_fp8 with group size 128 does (scales are not rounded to powers of two).
Each program quantises one row of x. With a routing it writes the result once for each pair of the token. Bound by memory at
prefill sizes (itemsize bytes a value, and one byte for each pair), by launch latency at decode sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import check
from batchspec.kernels.common.e4m3 import E4M3, LARGEST, magnitude, round_to_e4m3
from batchspec.kernels.common.pdl import await_earlier, launch_args
from batchspec.kernels.moe.sort_rows import check_places, sort_rows_reference
from batchspec.kernels.moe.units import Routing

GROUP = 128
SMALLEST = 1e-10


class Fp8Rows(NamedTuple):
    """Quantised rows."""

    values: Tensor
    """e4m3 [R, K], contiguous"""
    scales: Tensor
    """[ceil(K / 128), R], or [1, R] with one scale per row; contiguous, fp32 (fp64 if the rows were fp64). A product reads the
    scales of neighbouring rows at once"""


@triton.jit
def to_e4m3(x, largest, INTERPRETED: tl.constexpr):
    """x as e4m3, and the scales of its groups; `largest`, their largest magnitudes, broadcasts against x, as do the scales."""
    scale = tl.div_rn(tl.maximum(largest, 1e-10), 448.0)
    return scaled_e4m3(x, scale, INTERPRETED), scale


@triton.jit
def scaled_e4m3(x, scale, INTERPRETED: tl.constexpr):
    """x / scale, rounded to nearest, as e4m3.

    A quotient of fp32 takes about ten instructions. With one reciprocal for all values of a scale it takes three: x times the
    rounded reciprocal, corrected by its remainder, is the quotient rounded to nearest (Markstein 1990, IBM J. Res. Dev. 34).
    Quotients that would overflow saturate uncorrected. A scale of inf gives 0, as the quotient does.
    """
    if INTERPRETED:  # it rounds twice in a fused multiply-add
        y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        inverse = tl.broadcast_to(tl.minimum(inverse, 3.4028234663852886e38), x.shape)
        divisor = tl.broadcast_to(tl.minimum(scale, 3.4028234663852886e38), x.shape)
        quotient = x * inverse
        y = tl.where(tl.abs(quotient) < 1024.0, tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient), quotient)
    return round_to_e4m3(y, INTERPRETED)


@triton.jit
def quantise_groups(values, given, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr):
    """e4m3 [GROUPS, 128] of fp32 values and the scale of each group [GROUPS, 1]. WHOLE: they are one row with one scale.

    given: the scale, or None: it is computed. NaN and inf make it inf.
    """
    largest = tl.max(magnitude(values), 1)
    if WHOLE:
        largest = tl.broadcast_to(tl.max(largest, 0), largest.shape)
    if given is not None:
        scale = tl.where(largest < float("inf"), given, float("inf"))[:, None]
        y = scaled_e4m3(values, scale, INTERPRETED)
    else:
        y, scale = to_e4m3(values, largest[:, None], INTERPRETED)
    return y, scale


@triton.jit
def store_quantised(
    x, out, out_scales, given, row, stride, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    GROUP: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Quantise x [BLOCK], fp32, 0 from WIDTH on, and store it as row `row`, int64, of out [num_rows, WIDTH] and of its scales.

    stride: from row to row of out. given, WHOLE: as in `quantise_groups`.
    """
    y, scale = quantise_groups(tl.reshape(x, [BLOCK // GROUP, GROUP]), given, WHOLE, INTERPRETED)
    group = tl.arange(0, BLOCK // GROUP)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out + row * stride + place, y, mask=place < WIDTH)
    num_scales = 1 if WHOLE else tl.cdiv(WIDTH, GROUP)
    tl.store(out_scales + group.to(tl.int64)[:, None] * num_rows + row, scale, mask=group[:, None] < num_scales)


@triton.jit(do_not_specialize=["num_rows"])
def quantise_kernel(
    x, places, out, out_scales, given, num_rows, stride, k, SLOTS: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """given: one scale for all rows, or None. WHOLE: one scale per row. GROUPS: groups of a row, padded to a power of two.

    num_rows: rows of out. places None: rows in the order of x. Else SLOTS numbers for each row of x: the rows of out that get it.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    await_earlier(PDL)
    row = token
    if places is not None:
        row = tl.load(places + token * SLOTS).to(tl.int64)
    values = tl.load(x + token * stride + place, mask=place < k, other=0.0).to(tl.float32)
    largest = tl.max(magnitude(values), 1)
    if given is not None:
        scale = tl.zeros([GROUPS, 1], tl.float32) + tl.where(tl.max(largest, 0) < float("inf"), given, float("inf"))
        y = scaled_e4m3(values, scale, INTERPRETED)
    else:
        if WHOLE:
            largest = tl.broadcast_to(tl.max(largest, 0), [GROUPS])
        y, scale = to_e4m3(values, largest[:, None], INTERPRETED)
    num_scales = 1 if WHOLE else tl.cdiv(k, GROUP)
    for slot in tl.static_range(SLOTS):
        own = row
        if slot + 1 < SLOTS:  # this load need not wait for the stores below
            row = tl.load(places + token * SLOTS + slot + 1).to(tl.int64)
        tl.store(out + own * k + place, y, mask=place < k)
        tl.store(out_scales + group.to(tl.int64)[:, None] * num_rows + own, scale, mask=group[:, None] < num_scales)


def quantise_rows(
    x: Tensor, routing: Routing | None = None, *, whole: bool = False, scale: float | None = None, interpret: bool = False
) -> Fp8Rows:
    """Quantise each row; with a routing, write the row of each pair's token in the order of the list of pairs (`units.py`).

    x        bf16 or fp32 [T, K]  rows may be slices of wider rows
    routing  of the T tokens; None: the R rows of the result are those of x
    whole    True: one scale per row; False: one per 128 values of a row
    scale    a calibrated scale for all rows, which needs `whole`; None: computed from each row

    Does not synchronise on a GPU. Raises ValueError for other shapes, dtypes or strides, and for a scale without `whole`.
    """
    num_tokens, k = x.shape
    check("quantise_rows: x", x, (num_tokens, k), torch.bfloat16, torch.float32, rows=True)
    if routing is not None:
        check_places("quantise_rows", routing, num_tokens)
    if scale is not None and not whole:
        raise ValueError(f"quantise_rows: scale={scale} applies to whole rows; pass whole=True, or scale=None")
    if not (x.is_cuda or interpret):
        return quantise_rows_reference(x, routing, whole=whole, scale=scale)
    num_rows, num_groups = num_tokens if routing is None else len(routing.pairs), -(-k // GROUP)
    rows = Fp8Rows(x.new_empty(num_rows, k, dtype=E4M3), x.new_empty(1 if whole else num_groups, num_rows, dtype=torch.float32))
    if num_rows:
        groups = triton.next_power_of_2(num_groups)
        quantise_kernel[(num_tokens,)](
            x, routing and routing.places, *rows, scale, num_rows, x.stride(0), k,
            SLOTS=1 if routing is None else routing.expert_ids.shape[1], WHOLE=whole, GROUP=GROUP, GROUPS=groups,
            INTERPRETED=not x.is_cuda, num_warps=min(16, max(1, groups // 2)), **launch_args(x),
        )
    return rows


def quantise_rows_reference(
    x: Tensor, routing: Routing | None = None, *, whole: bool = False, scale: float | None = None
) -> Fp8Rows:
    """`quantise_rows` in plain torch, for any floating-point dtype; fp64 rows are scaled in fp64.

    On a GPU torch multiplies by the reciprocal of a number from Python, which rounds differently: it divides by tensors here.
    """
    x = x if routing is None else sort_rows_reference(x, routing)
    num_rows, k = x.shape
    size = k if whole else GROUP
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = torch.nn.functional.pad(wide, (0, -k % size)).view(num_rows, -(-k // size), size)
    if scale is None:
        scales = wide.abs().amax(-1).clamp(min=SMALLEST) / wide.new_full((), LARGEST)
    else:
        scales = wide.new_full(wide.shape[:2], scale)
    values = (wide / scales[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return Fp8Rows(values.flatten(1)[:, :k].contiguous(), scales.T.contiguous())
