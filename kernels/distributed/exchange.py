"""Exchanges of few values: every rank gets those of all ranks, their sum in rank order, or each row's best token of all ranks.

    gather         out[r, i] = x of rank r [i]
    sum_of_ranks   out[i] = sum over ranks, in rank order, of x[i]        in fp32 (fp64 of fp64), rounded once
    best_of_ranks  out[t] = the id of the largest score of all ranks, the lowest id of equals

One launch and one barrier each (`barrier.py`). Bound by the barrier, some 5 us between two H200. One exchange replaces several
launches for the greedy token, the masses of a cutoff's search, and the squares of a norm over the heads of all ranks.
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
from batchspec.kernels.sampling.argmax import NO_TOKEN

BLOCK = 1024
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes of a value -> the dtype as which a gather moves it. All ranks must cut a tensor into the same blocks."""
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def give(own, x, num_values, epoch, BLOCK: tl.constexpr):
    """Write this program's blocks of x to a region of the rank; nothing once an exchange has failed."""
    lane = tl.arange(0, BLOCK).to(tl.int64)
    for begins in range(tl.program_id(0) * BLOCK, tl.where(epoch < 0, 0, num_values), tl.num_programs(0) * BLOCK):
        at = begins + lane
        tl.store(own + at, tl.load(x + at, mask=at < num_values), mask=at < num_values)


@triton.jit(do_not_specialize=["rank", "spins", "num_values"])
def exchange_kernel(
    x, out, addresses, epochs, failed, report, rank, spins, num_values, num_bytes, RANKS: tl.constexpr, SUM: tl.constexpr,
    ACC: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """The kernel of `gather`, with SUM of `sum_of_ranks`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    lane = tl.arange(0, BLOCK).to(tl.int64)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    buffers, own_buffer = buffers_of(addresses, RANKS), buffer_of(addresses, rank, RANKS)
    await_earlier_alone(PDL)
    epoch, spins, count = begin(epochs, failed, spins)
    give(region_of(own_buffer, count, 0, num_bytes, DTYPE), x, num_values, epoch, BLOCK)
    send(addresses, rank, epoch, 0, RANKS)
    came = wait(addresses, failed, report, rank, epoch, spins, 0, RANKS)
    start_next(PDL)
    for begins in range(first, tl.where(came, num_values, 0), step):
        at = begins + lane
        inside = at < num_values
        if SUM:
            total = tl.load(region_of(buffers[0], count, 0, num_bytes, DTYPE) + at, mask=inside, other=0).to(ACC)
            for peer in tl.static_range(1, RANKS):
                total += tl.load(region_of(buffers[peer], count, 0, num_bytes, DTYPE) + at, mask=inside, other=0).to(ACC)
            tl.store(out + at, total.to(DTYPE), mask=inside)
        else:
            for peer in tl.static_range(RANKS):
                values = tl.load(region_of(buffers[peer], count, 0, num_bytes, DTYPE) + at, mask=inside)
                tl.store(out + peer * num_values.to(tl.int64) + at, values, mask=inside)
    end(epochs, count)


@triton.jit(do_not_specialize=["rank", "spins", "num_rows"])
def best_of_ranks_kernel(
    scores, ids, out_ids, addresses, epochs, failed, report, rank, spins, num_rows, num_bytes, RANKS: tl.constexpr,
    FLAG: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Scores are in a rank's first region, ids in the second: one barrier serves both."""
    DTYPE: tl.constexpr = scores.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    buffers, own_buffer = buffers_of(addresses, RANKS), buffer_of(addresses, rank, RANKS)
    await_earlier_alone(PDL)
    epoch, spins, count = begin(epochs, failed, spins)
    give(region_of(own_buffer, count, 0, num_bytes, DTYPE), scores, num_rows, epoch, BLOCK)
    give(region_of(own_buffer, count, 1, num_bytes, tl.int32), ids, num_rows, epoch, BLOCK)
    send(addresses, rank, epoch, 0, RANKS)
    came = wait(addresses, failed, report, rank, epoch, spins, 0, RANKS)
    start_next(PDL)
    for begins in range(first, tl.where(came, num_rows, 0), step):
        at = begins + lane
        inside = at < num_rows
        best = tl.load(region_of(buffers[0], count, 0, num_bytes, DTYPE) + at, mask=inside, other=0.0)
        winner = tl.load(region_of(buffers[0], count, 1, num_bytes, tl.int32) + at, mask=inside, other=0)
        for peer in tl.static_range(1, RANKS):
            score = tl.load(region_of(buffers[peer], count, 0, num_bytes, DTYPE) + at, mask=inside, other=0.0)
            token = tl.load(region_of(buffers[peer], count, 1, num_bytes, tl.int32) + at, mask=inside, other=0)
            winner = tl.where((score > best) | ((score == best) & (token < winner)), token, winner)
            best = tl.where(score > best, score, best)
        if FLAG:
            winner = tl.where(tl.abs(best) < float("inf"), winner, _NO_TOKEN)
        tl.store(out_ids + at, winner, mask=inside)
    end(epochs, count)


def gather(x: Tensor, peers: PeerMemory, *, out: Tensor, interpret: bool = False) -> None:
    """Write x of all ranks, in rank order.

    x    any dtype and shape, contiguous, at most `peers.num_bytes`
    out  [R, *shape of x] of the same dtype

    All ranks call it, with the same shapes, in the same order. Does not synchronise with the host. If a rank does not arrive in
    time, the output is undefined and `peers.lost()` names it. Raises ValueError for other shapes, dtypes or strides.
    """
    check("gather: x", x, tuple(x.shape), x.dtype)
    check("gather: out", out, (peers.ranks, *x.shape), x.dtype)
    if not x.numel():
        return
    word = WORDS[x.element_size()]
    _launch("gather", x.view(-1).view(word), out.view(-1).view(word), peers, interpret, add=False)


def sum_of_ranks(x: Tensor, peers: PeerMemory, *, out: Tensor, interpret: bool = False) -> None:
    """Write the sum of x over all ranks; see `gather`.

    x    fp32, bf16, fp16 or fp64 of any shape, contiguous, at most `peers.num_bytes`
    out  of the same shape and dtype; may be x
    """
    check("sum_of_ranks: x", x, tuple(x.shape), *FLOATS)
    check("sum_of_ranks: out", out, tuple(x.shape), x.dtype)
    if x.numel():
        _launch("sum_of_ranks", x.view(-1), out.view(-1), peers, interpret, add=True)


def best_of_ranks(
    scores: Tensor, ids: Tensor, peers: PeerMemory, *, out_ids: Tensor, flag_nonfinite: bool = False, interpret: bool = False
) -> None:
    """Write the id of each row's largest score of all ranks, the lowest id of equals; see `gather`.

    scores   fp32, bf16, fp16 or fp64 [T], without NaN: the largest of this rank
    ids      int32 [T]: where that is
    out_ids  int32 [T]
    flag_nonfinite  write NO_TOKEN if the largest score is not finite
    """
    (num_rows,) = scores.shape
    check("best_of_ranks: scores", scores, (num_rows,), *FLOATS)
    check("best_of_ranks: ids", ids, (num_rows,), torch.int32)
    check("best_of_ranks: out_ids", out_ids, (num_rows,), torch.int32)
    _check_place("best_of_ranks", num_rows * max(4, scores.element_size()), scores, peers, interpret)
    if num_rows:
        block = min(BLOCK, max(16, triton.next_power_of_2(num_rows)))
        best_of_ranks_kernel[(min(PROGRAMS, triton.cdiv(num_rows, block)),)](
            scores, ids, out_ids, peers.addresses, peers.epochs, peers.failed, peers.report, peers.rank, peers.spins, num_rows,
            peers.num_bytes, RANKS=peers.ranks, FLAG=flag_nonfinite, BLOCK=block, num_warps=4, **launch_args(scores),
        )


def _launch(name: str, x: Tensor, out: Tensor, peers: PeerMemory, interpret: bool, *, add: bool) -> None:
    _check_place(name, x.nbytes, x, peers, interpret)
    exchange_kernel[(min(PROGRAMS, triton.cdiv(x.numel(), BLOCK)),)](
        x, out, peers.addresses, peers.epochs, peers.failed, peers.report, peers.rank, peers.spins, x.numel(), peers.num_bytes,
        RANKS=peers.ranks, SUM=add, ACC=tl.float64 if x.dtype == torch.float64 else tl.float32, BLOCK=BLOCK, num_warps=4,
        **launch_args(x),
    )


def _check_place(name: str, num_bytes: int, x: Tensor, peers: PeerMemory, interpret: bool) -> None:
    if num_bytes > peers.num_bytes:
        raise ValueError(f"{name}: {num_bytes} bytes are more than the {peers.num_bytes} of an exchange")
    if not (x.is_cuda or interpret):
        raise ValueError(f"{name}: tensors on the CPU have no peer memory")


def best_of_ranks_reference(scores: Tensor, ids: Tensor, *, flag_nonfinite: bool = False) -> Tensor:
    """`best_of_ranks` in plain torch, of the scores and ids of all ranks [R, T]: int32 [T]."""
    best = scores.amax(0)
    winner = torch.where(scores == best, ids, torch.iinfo(torch.int32).max).amin(0)
    return torch.where(best.isfinite(), winner, NO_TOKEN) if flag_nonfinite else winner
