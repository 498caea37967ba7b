"""Checks of the exchanges between GPUs: `python -m tests.kernels.exchange_checks RANKS [--one-gpu]`.

Starts RANKS processes, one a GPU. A CUDA graph of all kinds of exchanges, with delays at random between them, is replayed with
new data each time; every rank makes the data of all ranks and compares bit for bit. Then one rank makes no call, and the others
must give up in time. Takes less than a minute. With --one-gpu all ranks share one GPU and take turns on it.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from batchspec.kernels.benchmarks.exchange import EPS, WIDTH, start_ranks
from batchspec.kernels.distributed.exchange import best_of_ranks, best_of_ranks_reference, gather, sum_of_ranks
from batchspec.kernels.distributed.head_norms import head_norms, head_norms_reference, mean_squares
from batchspec.kernels.distributed.peer_memory import PeerMemory, connect
from batchspec.kernels.distributed.reduce_norm import reduce, reduce_norm, reduce_norm_fp8, reduce_reference
from batchspec.kernels.gemm.fp8_tokens import Fp8Form
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8

SUMS = ((64, 8192, torch.bfloat16), (1, 2880, torch.bfloat16), (200, 576, torch.float16), (37, 4096, torch.float32))
"""T, H, dtype of the sums of a replay: more and fewer rows than programs, widths that are no power of two."""
QUANTISED, FORMS = (torch.bfloat16, torch.float32), (Fp8Form(whole=False), Fp8Form(whole=True))
"""Sums in these dtypes are also quantised."""
EXCHANGES = 4 + 4 * len(SUMS) + 2 * len(FORMS) * sum(dtype in QUANTISED for _, _, dtype in SUMS)
REPLAYS, DELAY_STEPS = 1000, 120
AWAY_S = 0.5


@triton.jit
def delay_kernel(steps, scratch):
    for _ in range(tl.load(steps)):
        tl.atomic_add(scratch, 1)


def values(rank: int, step: Tensor, salt: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The values that a rank contributes to an exchange of a replay: any process can compute those of any rank."""
    count = 1
    for size in shape:
        count *= size
    word = (torch.arange(count, device=step.device) + step * 40503 + rank * 7919 + salt * 104729) * 2654435761
    word = ((word >> 7) ^ (word >> 20)) & 0xFFFF
    return (word.float() / 16384 - 2).to(dtype).view(shape)


def differing(found: Tensor, wanted: Tensor) -> Tensor:
    """Number of bytes that differ."""
    return (found.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)).sum()


class Checks:
    """The exchanges of one replay and how many bytes of them were wrong so far."""

    def __init__(self, peers: PeerMemory, device: torch.device) -> None:
        self.peers, self.device = peers, device
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.scratch = torch.zeros(1, dtype=torch.int32, device=device)
        self.wrong: dict[str, Tensor] = {}
        self.one_shot: dict[int, Tensor] = {}
        """The norms of this replay, by salt."""

    def run(self) -> None:
        self.step += 1
        for two_shot in (False, True):  # exchanges after each other have different data: old data in a buffer is noticed
            for salt, (tokens, width, dtype) in enumerate(SUMS):
                self.sum(salt, (tokens, width), dtype, two_shot)
                for form in FORMS if dtype in QUANTISED else ():
                    self.quantised(salt, (tokens, width), dtype, form, two_shot)
        self.few()

    def sum(self, salt: int, shape: tuple[int, int], dtype: torch.dtype, two_shot: bool) -> None:
        peers = self.peers
        partials, others = (
            torch.stack([values(rank, self.step, number, shape, dtype) for rank in range(peers.ranks)])
            for number in (salt, 20 + salt)
        )
        residual, weight = values(99, self.step, salt, shape, dtype), values(98, self.step, salt, shape[1:], dtype)
        out, aux, out_sum, wanted = (torch.full(shape, torch.nan, dtype=dtype, device=self.device) for _ in range(4))
        stream, own = residual.clone(), partials[peers.rank].clone()
        self.delay()
        reduce_norm(own, stream, weight, EPS, peers, out=out, out_aux=aux, two_shot=two_shot)
        own.fill_(torch.nan)  # other ranks must not read this buffer any more
        self.delay()
        reduce(others[peers.rank], peers, out=out_sum, two_shot=two_shot)
        total = reduce_reference(partials)
        add_norm(total, residual, weight, EPS, out=wanted)
        way = "two-shot" if two_shot else "one-shot"
        for name, found, right in (
            ("residual", stream, residual), ("aux", aux, residual), ("norm", out, wanted),
            ("sum", out_sum, reduce_reference(others)),
        ):
            self.note(f"{way} {name}", found, right)
        if two_shot:
            self.note("norms of both ways", out, self.one_shot[salt])
        else:
            self.one_shot[salt] = out

    def quantised(self, salt: int, shape: tuple[int, int], dtype: torch.dtype, form: Fp8Form, two_shot: bool) -> None:
        """Compare with the launch that one GPU uses for the sum: the bits must be equal."""
        peers, count = self.peers, shape[0]
        partials = torch.stack([values(rank, self.step, 40 + salt, shape, dtype) for rank in range(peers.ranks)])
        residual, weight = values(97, self.step, salt, shape, dtype), values(96, self.step, salt, shape[1:], dtype)
        stream, own = residual.clone(), partials[peers.rank].clone()
        self.delay()
        found = reduce_norm_fp8(own, stream, weight, EPS, form, peers, two_shot=two_shot).rows
        own.fill_(torch.nan)
        wanted = norm_fp8(reduce_reference(partials), residual, weight, EPS, form).rows
        way = f"{'two-shot' if two_shot else 'one-shot'} FP8 {'rows' if form.whole else 'groups'}"
        self.note(f"{way} residual", stream, residual)
        self.note(f"{way} values", found.values[:count], wanted.values[:count])
        self.note(f"{way} scales", found.scales[:, :count], wanted.scales[:, :count])

    def few(self) -> None:
        peers = self.peers
        ranks = range(peers.ranks)
        squares = torch.stack([values(rank, self.step, 50, (300, 2), torch.float32) for rank in ranks])
        out, out_all = torch.full_like(squares[0], torch.nan), torch.full_like(squares, torch.nan)
        self.delay()
        gather(squares[peers.rank].clone(), peers, out=out_all)
        self.delay()
        sum_of_ranks(squares[peers.rank].clone(), peers, out=out)
        scores = torch.stack([values(rank, self.step, 51, (300,), torch.bfloat16) for rank in ranks]).float()
        ids = (
            torch.arange(300, dtype=torch.int32, device=self.device)
            + 1000 * torch.arange(peers.ranks, device=self.device)[:, None]
        )
        ids, out_ids = ids.int(), torch.full((300,), -7, dtype=torch.int32, device=self.device)
        self.delay()
        best_of_ranks(scores[peers.rank].clone(), ids[peers.rank].clone(), peers, out_ids=out_ids)
        heads = torch.stack([values(rank, self.step, 52, (300, 24 * 128 + 8 * 128), torch.bfloat16) for rank in ranks])
        weights = values(95, self.step, 53, (24 * 128,), torch.bfloat16), values(95, self.step, 54, (4 * 128,), torch.bfloat16)
        normed, expected = heads[peers.rank].clone(), heads[peers.rank].clone()
        self.delay()
        head_norms(normed, *weights, EPS, peers)
        head_norms_reference(expected, *weights, EPS, torch.stack([mean_squares(one, 3072, 512) for one in heads]).mean(0))
        self.note("head norms", (normed - expected).abs() <= 2**-6 * expected.abs(), torch.ones_like(expected, dtype=torch.bool))
        self.note("gather", out_all, squares)
        self.note("sum of few", out, reduce_reference(squares))
        self.note("best", out_ids, best_of_ranks_reference(scores, ids))

    def delay(self) -> None:
        """Delay this rank: differently on each rank and in each replay, mostly briefly."""
        steps = (torch.rand(1, device=self.device) ** 4 * DELAY_STEPS).int()  # each takes about half a microsecond
        delay_kernel[(1,)](steps, self.scratch)

    def note(self, name: str, found: Tensor, right: Tensor) -> None:
        if name not in self.wrong:
            self.wrong[name] = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.wrong[name] += differing(found, right)


def replay_checks(checks: Checks, replays: int) -> list[str]:
    """Run the checks; returns what was wrong."""
    torch.cuda.manual_seed(1 + checks.peers.rank)
    checks.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        checks.run()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    found = [f"{name}: {int(count)} bytes differ" for name, count in checks.wrong.items() if int(count)]
    steps = int(checks.step)
    return found + ([] if steps == replays + 1 else [f"{steps} steps"]) + lost_of(checks.peers)


def lost_of(peers: PeerMemory) -> list[str]:
    return [] if peers.lost() is None else [f"rank {peers.lost()} did not come"]


def check_absence(peers: PeerMemory, device: torch.device) -> list[str]:
    """The last rank arrives late: the others record it and return; then it learns that. `peers` cannot be used afterwards."""
    last = peers.ranks - 1
    x = torch.ones(64, WIDTH, dtype=torch.bfloat16, device=device)
    began = time.perf_counter()
    if peers.rank == last:
        dist.barrier()
    for _ in range(2):
        reduce(x, peers, out=x)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    if peers.rank == last:
        return [] if peers.lost() is not None else ["the late rank did not learn that it was given up"]
    dist.barrier()
    wrong = [] if peers.lost() == last else [f"rank {last} was away, the note says {peers.lost()}"]
    print(f"rank {peers.rank}: gave up after {took:.2f} s, limit about {AWAY_S} s", flush=True)
    return wrong + ([f"gave up after {took:.1f} s"] if took > 20 * AWAY_S else [])


def check(device: torch.device, group: dist.ProcessGroup, replays: int) -> None:
    """Print what is wrong, and raise AssertionError if anything is."""
    began = time.perf_counter()
    wrong = replay_checks(Checks(connect(1 << 23, device, group, limit_s=60), device), replays)
    checked = time.perf_counter() - began
    wrong += check_absence(connect(1 << 21, device, group, limit_s=AWAY_S), device)
    if dist.get_rank() == 0:
        print(f"{replays} replays of {EXCHANGES} exchanges and their checks: {checked:.1f} s", flush=True)
    for line in wrong or ["all right"]:
        print(f"rank {dist.get_rank()}: {line}", flush=True)
    assert not wrong


def main(ranks: int, one_gpu: bool) -> None:
    gpus = torch.cuda.device_count()
    if gpus < (1 if one_gpu else ranks):
        print(f"exchange_checks: this machine has {gpus} GPUs; it needs {1 if one_gpu else ranks}")
        return
    start_ranks(ranks, check, REPLAYS // 20 if one_gpu else REPLAYS, one_gpu=one_gpu)


if __name__ == "__main__":
    main(int(sys.argv[1]), "--one-gpu" in sys.argv)
