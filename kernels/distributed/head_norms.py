"""RMSNorm of q and k over the heads of all ranks (MiniMax-M2) and the exchange that it needs, in one launch.

    mean = sum over ranks, in rank order, of mean(x^2) of the rank's heads, / R        fp32 inside (fp64 for fp64)
    x    = x / sqrt(mean + eps) * weight                                               in place, of q and of k

R is the number of ranks. They have equal numbers of heads, and each K/V head is on the same number of ranks, so the mean square
of a whole row is the mean of the ranks' mean squares. Rounds as `batchspec.kernels.norm_rope.norm` does. Two numbers a token are
exchanged with one barrier (`barrier.py`), which bounds it: 6.0 us for 64 rows on two H200. Program i computes rows i, i + number
of programs, and so on.
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
from batchspec.kernels.norm_rope.norm import VALUES_PER_THREAD


@triton.jit
def mean_square(x, lane, WIDTH: tl.constexpr, ACC: tl.constexpr):
    values = tl.load(x + lane, mask=lane < WIDTH, other=0.0).to(ACC)
    return tl.sum(values * values, 0) * (1.0 / WIDTH)


@triton.jit
def normed_in_place(x, weight, lane, total, EPS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, ACC: tl.constexpr):
    DTYPE: tl.constexpr = x.dtype.element_ty
    inside = lane < WIDTH
    values = tl.load(x + lane, mask=inside, other=0.0).to(ACC) * (1.0 / tl.sqrt(total * (1.0 / RANKS) + EPS))
    if weight.dtype.element_ty == DTYPE:
        values = values.to(DTYPE).to(ACC)
    tl.store(x + lane, values * tl.load(weight + lane, mask=inside, other=0.0).to(ACC), mask=inside)


@triton.jit(do_not_specialize=["rank", "spins", "num_rows"])
def head_norms_kernel(
    qkv, q_norm, k_norm, addresses, epochs, failed, report, rank, spins, num_rows, num_bytes, row_stride, EPS: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RANKS: tl.constexpr, ACC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Q, K: columns of q and of k, which follow each other."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    of_q, of_k = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    zero = tl.full([], 0, tl.int64)  # offsets of large tensors do not fit into int32
    buffers, own_buffer = buffers_of(addresses, RANKS), buffer_of(addresses, rank, RANKS)
    await_earlier_alone(PDL)
    epoch, spins, count = begin(epochs, failed, spins)
    own = region_of(own_buffer, count, 0, num_bytes, ACC)
    for row in range(first, tl.where(epoch < 0, 0, num_rows), programs):
        x = qkv + (zero + row) * row_stride
        tl.store(own + 2 * row, mean_square(x, of_q, Q, ACC))
        tl.store(own + 2 * row + 1, mean_square(x + Q, of_k, K, ACC))
    send(addresses, rank, epoch, 0, RANKS)
    came = wait(addresses, failed, report, rank, epoch, spins, 0, RANKS)
    start_next(PDL)
    for row in range(first, tl.where(came, num_rows, 0), programs):
        total_q = tl.load(region_of(buffers[0], count, 0, num_bytes, ACC) + 2 * row)
        total_k = tl.load(region_of(buffers[0], count, 0, num_bytes, ACC) + 2 * row + 1)
        for peer in tl.static_range(1, RANKS):
            total_q += tl.load(region_of(buffers[peer], count, 0, num_bytes, ACC) + 2 * row)
            total_k += tl.load(region_of(buffers[peer], count, 0, num_bytes, ACC) + 2 * row + 1)
        x = qkv + (zero + row) * row_stride
        normed_in_place(x, q_norm, of_q, total_q, EPS, Q, RANKS, ACC)
        normed_in_place(x + Q, k_norm, of_k, total_k, EPS, K, RANKS, ACC)
    end(epochs, count)


def head_norms(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, peers: PeerMemory, *, interpret: bool = False) -> None:
    """Norm q and k of each token in place, each over the heads of all ranks.

    qkv             bf16, fp32, fp16 or fp64 [T, (NH + 2 * KVH) * D], this rank's heads: q, then k, then v, which is not changed
                    rows may be slices of wider ones; 2 numbers a row in fp32 (fp64 for fp64) fit into `peers.num_bytes`
    q_norm, k_norm  [NH * D] and [KVH * D] of the same dtype, or fp32 (fp64 for fp64): then the result is rounded once

    All ranks call it, with the same shapes, in the same order. Does not synchronise with the host. If a rank does not arrive
    in time, qkv is undefined and `peers.lost()` names it. Raises ValueError for other shapes, dtypes or strides.
    """
    num_rows, wide = qkv.shape[0], torch.promote_types(qkv.dtype, torch.float32)
    (q,), (k,) = q_norm.shape, k_norm.shape
    check("head_norms: qkv", qkv, (num_rows, q + 2 * k), *FLOATS, rows=True)
    check("head_norms: q_norm", q_norm, (q,), qkv.dtype, wide)
    check("head_norms: k_norm", k_norm, (k,), qkv.dtype, wide)
    if 2 * num_rows * wide.itemsize > peers.num_bytes:
        raise ValueError(f"head_norms: 2 numbers of {num_rows} rows are more than the {peers.num_bytes} bytes of an exchange")
    if not (qkv.is_cuda or interpret):
        raise ValueError("head_norms: tensors on the CPU have no peer memory")
    if not num_rows:
        return
    block = max(16, triton.next_power_of_2(q))
    head_norms_kernel[(min(num_rows, PROGRAMS),)](
        qkv, q_norm, k_norm, peers.addresses, peers.epochs, peers.failed, peers.report, peers.rank, peers.spins, num_rows,
        peers.num_bytes, qkv.stride(0), EPS=eps, Q=q, K=k, BLOCK_Q=block, BLOCK_K=max(16, triton.next_power_of_2(k)),
        RANKS=peers.ranks, ACC=tl.float64 if wide is torch.float64 else tl.float32,
        num_warps=max(1, min(16, block // (32 * VALUES_PER_THREAD))), **launch_args(qkv),
    )


def mean_squares(qkv: Tensor, q: int, k: int) -> Tensor:
    """What a rank exchanges, in plain torch: the mean squares of its q and of its k [T, 2], in fp32 (fp64 for fp64)."""
    parts = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).split((q, k, k), 1)[:2]
    return torch.stack([part.square().mean(1) for part in parts], 1)


def head_norms_reference(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, means: Tensor) -> None:
    """`head_norms` in plain torch, from the means of all ranks' `mean_squares` [T, 2]."""
    q, k, _ = qkv.split((len(q_norm), len(k_norm), len(k_norm)), 1)
    scales = (means + eps).rsqrt()
    for part, weight, scale in ((q, q_norm, scales[:, :1]), (k, k_norm, scales[:, 1:])):
        scaled = part.to(means.dtype) * scale
        part.copy_(scaled.to(qkv.dtype) * weight if weight.dtype is qkv.dtype else scaled * weight)
