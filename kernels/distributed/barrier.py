"""The barrier of an exchange between GPUs: programs with the same index on all ranks wait for each other.

Each rank has a symmetric buffer, memory that all ranks of the group can read and write:

    flags   int64 [2 stages, PROGRAMS, ranks]    written by the other ranks: the number of the exchange that they have reached
    data    two halves, of exchanges with even and with odd numbers, each with a region for every stage

A program writes its part of the rank's data, then its flag on every rank (release, system scope), and waits for the flags of
the same program of all ranks (acquire, system scope). Programs with other indices need not run at the same time. There are fewer
programs than a GPU has multiprocessors, and no launch starts early while they wait (`common/pdl.py`): so exchanges of another
stream can run at the same time, on both sides.

Exchanges are numbered in device memory, because a CUDA graph replays the same arguments. All programs of a launch have the same
number, and launches of a rank's stream run one after the other. So whoever has seen a rank's flag of exchange n - 1 knows that
this rank has ended exchange n - 2, and may overwrite the half that it read then: one barrier per exchange is enough, even if
exchanges differ in shape, grid and kernel.

A program gives up after a maximum number of polls: it records which rank did not arrive, on the device and in host memory. From
the next launch on this rank writes no data and sends LOST instead of numbers, so the ranks that wait for it give up at once, and
none reads data that changes meanwhile. The outputs of such launches are undefined: the host must read the record before it uses
results.
Source: https://github.com/vllm-project/vllm (custom_all_reduce) has the same flags, with a barrier before and after the reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAMS = 128
"""Maximum number of programs of a launch. On an H200, more do not make an exchange faster."""
STAGES = 2
LOST = -1
_PROGRAMS, _LOST = tl.constexpr(PROGRAMS), tl.constexpr(LOST)
FLAG_BYTES = 8 * STAGES * PROGRAMS
"""Bytes that the flags of one rank take in a symmetric buffer."""
_FLAG_BYTES = tl.constexpr(FLAG_BYTES)


@triton.jit
def begin(epochs, failed, spins):
    """The number of this exchange (LOST once one has failed), and how often its programs may poll."""
    lost = tl.load(failed) != 0
    epoch = tl.load(epochs + tl.program_id(0)) + 1
    return tl.where(lost, _LOST, epoch), tl.where(lost, 0, spins), epoch


@triton.jit
def end(epochs, count):
    """Record that exchange number `count` has ended, for all programs that a later launch may have."""
    program = tl.program_id(0) + tl.arange(0, _PROGRAMS) * tl.num_programs(0)
    tl.store(epochs + program, count + tl.zeros_like(program), mask=program < _PROGRAMS)


@triton.jit
def buffer_of(addresses, rank, RANKS: tl.constexpr):
    """The address of a rank's data. It is a constant: loaded before it is needed."""
    return tl.load(addresses + rank) + RANKS * _FLAG_BYTES


@triton.jit
def buffers_of(addresses, RANKS: tl.constexpr):
    """The addresses of all ranks' data, as a tuple."""
    found = (buffer_of(addresses, 0, RANKS),)
    for rank in tl.static_range(1, RANKS):
        found = found + (buffer_of(addresses, rank, RANKS),)  # type: ignore[assignment]  # noqa: RUF005  Triton has no other way
    return found


@triton.jit
def region_of(buffer, count, stage, num_bytes, dtype: tl.constexpr):
    """Pointer to the data that a rank contributes to exchange number `count` in one stage; regions have `num_bytes` each."""
    address = buffer + ((count & 1) * 2 + stage) * num_bytes
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def send(addresses, rank, epoch, stage, RANKS: tl.constexpr):
    """Tell the same program of all ranks that what this program has written so far may be read."""
    tl.debug_barrier()  # of all threads of this program, which the release of one thread then covers
    peer = tl.arange(0, RANKS)
    flag = (stage * _PROGRAMS + tl.program_id(0)) * RANKS + rank
    at = (tl.load(addresses + peer) + flag * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(at, epoch + tl.zeros_like(peer).to(tl.int64), sem="release", scope="sys")


@triton.jit
def wait(addresses, failed, report, rank, epoch, spins, stage, RANKS: tl.constexpr):
    """Wait until the same program of every rank has sent `epoch` or more. False if one has not arrived, or is LOST."""
    peer = tl.arange(0, RANKS)
    flag = (stage * _PROGRAMS + tl.program_id(0)) * RANKS + peer
    at = (tl.load(addresses + rank) + flag * 8).to(tl.pointer_type(tl.int64))
    none = tl.zeros_like(peer).to(tl.int64)
    seen = tl.atomic_add(at, none, sem="acquire", scope="sys")
    least = tl.min(seen, 0)
    while (least < epoch) & (least >= 0) & (spins > 0):
        seen = tl.atomic_add(at, none, sem="acquire", scope="sys")
        least = tl.min(seen, 0)
        spins -= 1
    came = (least >= epoch) & (epoch >= 0)
    if (least < epoch) & (epoch >= 0):
        # A rank that is LOST has waited for another rank: that one is recorded if it is missing here too.
        order = tl.where(seen < 0, RANKS + peer, peer)
        missing = 1 + (tl.min(tl.where(seen < epoch, order, 2 * RANKS), 0) % RANKS).to(tl.int64)
        tl.store(failed, missing)
        tl.store(report, missing)
    tl.debug_barrier()  # orders the later reads of other threads after this thread's acquire
    return came
