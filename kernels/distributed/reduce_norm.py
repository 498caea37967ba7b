"""The sum of the ranks' partial results, with the residual sum and the next norm in the same launch.

    hidden = sum over ranks, in rank order, of partial          in fp32 (fp64 of fp64), rounded once
    reduce:           out = hidden
    reduce_norm:      residual += hidden, out = rms_norm(residual) * weight
    reduce_norm_fp8:  the same, rounded, then quantised to e4m3 as `batchspec.kernels.norm_rope.norm_fp8` does

Two algorithms with the same bits. T rows of H columns, R ranks:

    one-shot   every rank reads all partial results                             reads (R - 1) * T * H values from others
    two-shot   a rank sums H / R columns of each row, then all ranks read
               the sums: a second barrier, less to read                         reads 2 * (R - 1) / R * T * H values

A program does all of this for the rows of its index, so that each step waits only for the same program of the other ranks. The
sum of a value has one order, and the norm of a row is that of `batchspec.kernels.norm_rope.norm`: the result of a row depends
neither on the algorithm nor on the number of programs. Bound by the barrier (some 5 us between two H200) up to about
0.25 MB, then by NVLink.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.common.checks import FLOATS, check
from batchspec.kernels.common.pdl import await_earlier_alone, launch_args, start_next
from batchspec.kernels.distributed.barrier import PROGRAMS, begin, buffer_of, buffers_of, end, region_of, send, wait
from batchspec.kernels.distributed.peer_memory import PeerMemory
from batchspec.kernels.gemm.fp8_tokens import Fp8Form, Fp8Tokens, check_form, empty_tokens
from batchspec.kernels.moe.quantise import GROUP, Fp8Rows, store_quantised
from batchspec.kernels.norm_rope.norm import VALUES_PER_THREAD, add_norm_reference

SHARE_UNIT = 8
"""Columns of a rank's share of a row are a multiple of it: 16 bytes of bf16."""


@triton.jit(do_not_specialize=["rank", "spins", "num_rows", "out_rows"])
def reduce_norm_kernel(
    partial, residual, weight, out, out_scales, out_aux, given, addresses, epochs, failed, report, rank, spins, num_rows,
    out_rows, num_bytes, partial_stride, residual_stride, out_stride, aux_stride, EPS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, RANKS: tl.constexpr, SHARE: tl.constexpr, SHARE_BLOCK: tl.constexpr, ACC: tl.constexpr,
    WHOLE: tl.constexpr, GROUP: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):
    """`residual` and `weight` None: the sum alone. `out_aux` may be None. SHARE: columns of a rank; 0: one-shot.

    out_scales [.., out_rows], WHOLE, GROUP and given: as in `norm_fp8_kernel`; out_scales None: nothing is quantised.
    """
    DTYPE: tl.constexpr = partial.dtype.element_ty
    first, programs = tl.program_id(0), tl.num_programs(0)
    zero = tl.full([], 0, tl.int64)  # offsets of large tensors do not fit into int32
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    if weight is not None:
        scale = tl.load(weight + lane, mask=inside, other=0.0)
    buffers, own_buffer = buffers_of(addresses, RANKS), buffer_of(addresses, rank, RANKS)
    await_earlier_alone(PDL)
    epoch, spins, count = begin(epochs, failed, spins)

    own = region_of(own_buffer, count, 0, num_bytes, DTYPE)
    for row in range(first, tl.where(epoch < 0, 0, num_rows), programs):
        at = zero + row
        tl.store(own + at * WIDTH + lane, tl.load(partial + at * partial_stride + lane, mask=inside), mask=inside)
    send(addresses, rank, epoch, 0, RANKS)
    came = wait(addresses, failed, report, rank, epoch, spins, 0, RANKS)

    if SHARE > 0:
        column = rank * SHARE + tl.arange(0, SHARE_BLOCK)
        mine = (tl.arange(0, SHARE_BLOCK) < SHARE) & (column < WIDTH)
        sums = region_of(own_buffer, count, 1, num_bytes, DTYPE)
        for row in range(first, tl.where(came, num_rows, 0), programs):
            at = (zero + row) * WIDTH + column
            part = tl.load(region_of(buffers[0], count, 0, num_bytes, DTYPE) + at, mask=mine, other=0.0).to(ACC)
            for peer in tl.static_range(1, RANKS):
                part += tl.load(region_of(buffers[peer], count, 0, num_bytes, DTYPE) + at, mask=mine, other=0.0).to(ACC)
            tl.store(sums + at, part.to(DTYPE), mask=mine)
        epoch = tl.where(came, epoch, -1)
        send(addresses, rank, epoch, 1, RANKS)
        came = wait(addresses, failed, report, rank, epoch, spins, 1, RANKS)
    start_next(PDL)

    for row in range(first, tl.where(came, num_rows, 0), programs):
        at = zero + row
        place = at * WIDTH + lane
        if SHARE == 0:
            x = tl.load(region_of(buffers[0], count, 0, num_bytes, DTYPE) + place, mask=inside, other=0.0).to(ACC)
            for peer in tl.static_range(1, RANKS):
                x += tl.load(region_of(buffers[peer], count, 0, num_bytes, DTYPE) + place, mask=inside, other=0.0).to(ACC)
        else:
            x = tl.zeros([BLOCK], ACC)
            for peer in tl.static_range(RANKS):
                theirs = inside & (lane >= peer * SHARE) & (lane < (peer + 1) * SHARE)
                part = tl.load(region_of(buffers[peer], count, 1, num_bytes, DTYPE) + place, mask=theirs, other=0.0)
                x = tl.where(theirs, part.to(ACC), x)  # an addition would turn -0 into 0
        if residual is not None:
            stream = residual + at * residual_stride + lane
            x = x.to(DTYPE).to(ACC) + tl.load(stream, mask=inside, other=0.0).to(ACC)
            x = x.to(DTYPE)
            tl.store(stream, x, mask=inside)
            if out_aux is not None:
                tl.store(out_aux + at * aux_stride + lane, x, mask=inside)
            x = x.to(ACC)
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) * (1.0 / WIDTH) + EPS))
            if weight.dtype.element_ty == DTYPE:
                x = x.to(DTYPE).to(ACC)
            x = x * scale.to(ACC)
        if out_scales is None:
            tl.store(out + at * out_stride + lane, x, mask=inside)
        else:
            x = x.to(DTYPE).to(tl.float32)
            store_quantised(x, out, out_scales, given, at, out_stride, out_rows, WIDTH, BLOCK, WHOLE, GROUP, INTERPRETED)
    end(epochs, count)


def reduce_norm(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: PeerMemory, *, out: Tensor,
    out_aux: Tensor | None = None, two_shot: bool = False, interpret: bool = False,
) -> None:
    """Add the sum of all ranks' partial results to `residual` in place and write the norm of the new residual.

    partial   bf16, fp32, fp16 or fp64 [T, H], at most `peers.num_bytes`  rows may be slices of wider ones
    residual  [T, H] of the same dtype  rows may be slices of wider ones; the same on all ranks
    weight    [H] of the same dtype, or fp32 (fp64 for fp64): then the norm is rounded once
    out       [T, H] of the same dtype  rows may be slices of wider ones
    out_aux   [T, H] of the same dtype or None: a copy of the new residual; rows may be slices of wider ones

    All ranks call it, with the same shapes, in the same order. Does not synchronise with the host. If a rank does not arrive in
    time, the outputs are undefined and `peers.lost()` names it. Raises ValueError for other shapes, dtypes or strides.
    """
    _check_norm("reduce_norm", partial, residual, weight, out_aux)
    check("reduce_norm: out", out, tuple(partial.shape), partial.dtype, rows=True)
    _launch("reduce_norm", partial, residual, weight, eps, peers, out, out_aux, two_shot, interpret)


def reduce_norm_fp8(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, form: Fp8Form, peers: PeerMemory, *,
    out_aux: Tensor | None = None, two_shot: bool = False, interpret: bool = False,
) -> Fp8Tokens:
    """`reduce_norm` of bf16 or fp32, its result quantised in the same launch, for a product with FP8 weights."""
    check("reduce_norm_fp8: partial", partial, tuple(partial.shape), torch.bfloat16, torch.float32, rows=True)
    check_form("reduce_norm_fp8", form)
    _check_norm("reduce_norm_fp8", partial, residual, weight, out_aux)
    out = empty_tokens(partial, partial.shape[1], form)
    _launch("reduce_norm_fp8", partial, residual, weight, eps, peers, out.rows, out_aux, two_shot, interpret, form)
    return out


def reduce(partial: Tensor, peers: PeerMemory, *, out: Tensor, two_shot: bool = False, interpret: bool = False) -> None:
    """Write the sum of all ranks' partial results, see `reduce_norm`. `out` may be `partial`."""
    check("reduce: out", out, tuple(partial.shape), partial.dtype, rows=True)
    _launch("reduce", partial, None, None, 0.0, peers, out, None, two_shot, interpret)


def _check_norm(name: str, partial: Tensor, residual: Tensor, weight: Tensor, out_aux: Tensor | None) -> None:
    shape, dtype = tuple(partial.shape), partial.dtype
    check(f"{name}: residual", residual, shape, dtype, rows=True)
    check(f"{name}: weight", weight, (shape[1],), dtype, torch.promote_types(dtype, torch.float32))
    if out_aux is not None:
        check(f"{name}: out_aux", out_aux, shape, dtype, rows=True)


def _launch(
    name: str, partial: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, peers: PeerMemory,
    out: Tensor | Fp8Rows, out_aux: Tensor | None, two_shot: bool, interpret: bool, form: Fp8Form | None = None,
) -> None:
    """form: how rows are quantised; None: they are not."""
    num_tokens, width = partial.shape
    check(f"{name}: partial", partial, (num_tokens, width), *FLOATS, rows=True)
    if partial.numel() * partial.element_size() > peers.num_bytes:
        raise ValueError(f"{name}: partial {list(partial.shape)} is larger than the {peers.num_bytes} bytes of an exchange")
    if not (partial.is_cuda or interpret):
        raise ValueError(f"{name}: tensors on the CPU have no peer memory")
    if not partial.numel():
        return
    values, scales = (out, None) if isinstance(out, Tensor) else out
    block = max(16 if form is None else GROUP, triton.next_power_of_2(width))
    share = -(-width // (peers.ranks * SHARE_UNIT)) * SHARE_UNIT if two_shot else 0
    reduce_norm_kernel[(min(num_tokens, PROGRAMS),)](
        partial, residual, weight, values, scales, out_aux, None if form is None else form.scale,
        peers.addresses, peers.epochs, peers.failed, peers.report, peers.rank, peers.spins, num_tokens, len(values),
        peers.num_bytes, partial.stride(0), 0 if residual is None else residual.stride(0), values.stride(0),
        0 if out_aux is None else out_aux.stride(0),
        EPS=eps, WIDTH=width, BLOCK=block, RANKS=peers.ranks, SHARE=share, SHARE_BLOCK=triton.next_power_of_2(max(16, share)),
        ACC=tl.float64 if partial.dtype == torch.float64 else tl.float32, WHOLE=form is not None and form.whole, GROUP=GROUP,
        INTERPRETED=not partial.is_cuda,
        # As in `norm`: the order in which the squares of a row are added depends on this number.
        num_warps=min(16, max(1, block // (32 * VALUES_PER_THREAD))), **launch_args(partial),
    )


def reduce_norm_reference(
    partials: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, out_aux: Tensor | None = None
) -> None:
    """`reduce_norm` in plain torch, of the partial results of all ranks [R, T, H]."""
    add_norm_reference(reduce_reference(partials), residual, weight, eps, out=out, out_aux=out_aux)


def reduce_reference(partials: Tensor) -> Tensor:
    """`reduce` in plain torch: the sum [T, H] of [R, T, H] in rank order."""
    total = partials[0].to(torch.promote_types(partials.dtype, torch.float32), copy=True)
    for partial in partials[1:]:
        total += partial
    return total.to(partials.dtype)
