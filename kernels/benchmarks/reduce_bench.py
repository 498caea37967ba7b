"""Checks and timings of the exchanges between GPUs: `python -m batchspec.kernels.benchmarks.reduce_bench RANKS [--one-gpu]`.

Starts RANKS processes, one a GPU. A CUDA graph of all kinds of exchanges, with delays at random between them, is replayed with
new data each time; every rank makes the data of all ranks and compares bit for bit. Then one rank makes no call, and the others
must give up in time. Then sums of 0.05 to 8 MB are timed, in graphs, beside NCCL. Takes less than a minute.

With --one-gpu all ranks share one GPU and take turns on it: this checks the same, and times nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from batchspec.kernels.benchmarks.delay import delay
from batchspec.kernels.distributed.exchange import best_of_ranks, best_of_ranks_reference, gather, sum_of_ranks
from batchspec.kernels.distributed.head_norms import head_norms, head_norms_reference, mean_squares
from batchspec.kernels.distributed.peer_memory import PeerMemory, connect
from batchspec.kernels.distributed.reduce_norm import reduce, reduce_norm, reduce_norm_fp8, reduce_reference
from batchspec.kernels.gemm.fp8_tokens import Fp8Form
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8

Call = Callable[[], object]
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
SUMS = ((64, 8192, torch.bfloat16), (1, 2880, torch.bfloat16), (200, 576, torch.float16), (37, 4096, torch.float32))
"""T, H, dtype of the sums of a replay: more and fewer rows than programs, widths that are no power of two."""
QUANTISED, FORMS = (torch.bfloat16, torch.float32), (Fp8Form(whole=False), Fp8Form(whole=True))
"""Sums in these dtypes are also quantised."""
EXCHANGES = 4 + 4 * len(SUMS) + 2 * len(FORMS) * sum(dtype in QUANTISED for _, _, dtype in SUMS)
REPLAYS, DELAY_STEPS = 1000, 120
AWAY_S = 0.5
SIZES_KB = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTH, EPS = 8192, 1e-5


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
        ):  # fmt: skip
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
        delay((torch.rand(1, device=self.device) ** 4 * DELAY_STEPS).int(), self.scratch)

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


def graph_us(call: Call, calls: int = 40, repeats: int = 7) -> float:
    """Median microseconds of one call; all ranks start at the same time."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        graph.replay()  # the ranks meet here
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    us: float = median(times)
    return us


def time_all(peers: PeerMemory, device: torch.device, nccl: dist.ProcessGroup) -> None:
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    rows: list[tuple[str, ...]] = [  # of the last three, the first is a sum and a norm that quantises, in two launches
        (
            "KB",
            "NCCL",
            "one-shot",
            "two-shot",
            "NCCL, norm",
            "one-shot+norm",
            "two-shot+norm",
            "norm alone",
            "one, norm FP8",
            "one-shot+FP8",
            "two-shot+FP8",
        )
    ]
    for kilobytes in SIZES_KB:
        shape = (kilobytes * 1024 // (2 * WIDTH), WIDTH)
        x, residual, out = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
        norm = partial(add_norm, x, residual, weight, EPS, out=out)
        fused = partial(reduce_norm, x, residual, weight, EPS, peers, out=out)
        fp8 = partial(reduce_norm_fp8, x, residual, weight, EPS, FORMS[0], peers)
        library = partial(dist.all_reduce, x, group=nccl)
        calls: list[Call] = [
            library, partial(reduce, x, peers, out=out), partial(reduce, x, peers, out=out, two_shot=True),
            partial(both, library, norm), fused, partial(fused, two_shot=True), norm,
            partial(both, partial(reduce, x, peers, out=out), partial(norm_fp8, out, residual, weight, EPS, FORMS[0])),
            fp8, partial(fp8, two_shot=True),
        ]  # fmt: skip
        rows.append((str(kilobytes), *(f"{graph_us(call):.1f}" for call in calls)))
    few, ids = torch.zeros(256, device=device), torch.zeros(256, dtype=torch.int32, device=device)
    all_few = torch.zeros(peers.ranks, 256, device=device)
    best, small = partial(best_of_ranks, few, ids, peers, out_ids=ids), partial(gather, few, peers, out=all_few)
    library = partial(dist.all_gather_into_tensor, all_few.view(-1), few, group=nccl)
    found = [f"{graph_us(call):.1f}" for call in (best, small, partial(sum_of_ranks, few, peers, out=few), library)]
    qkv, q_norm, k_norm = (torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((64, 4096), (3072,), (512,)))
    found.append(f"{graph_us(partial(head_norms, qkv, q_norm, k_norm, EPS, peers)):.1f}")
    if peers.rank == 0:
        print(f"microseconds in a graph, {peers.ranks} ranks, bf16 rows of {WIDTH}")
        for row in rows:
            print(f"{row[0]:>6}" + "".join(f"{cell:>15}" for cell in row[1:]))
        print("256 fp32: best {}, gather {}, sum {}; NCCL all_gather {}; q and k norms of 64 rows {}".format(*found), flush=True)


def both(first: Call, second: Call) -> None:
    first()
    second()


def work(rank: int, ranks: int, folder: str, one_gpu: bool) -> None:
    os.environ.update(ENVIRONMENT | ({"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if one_gpu else {}))
    device = torch.device("cuda", 0 if one_gpu else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    began = time.perf_counter()
    replays = REPLAYS // 20 if one_gpu else REPLAYS
    wrong = replay_checks(Checks(connect(1 << 23, device, group, limit_s=60), device), replays)
    checked = time.perf_counter() - began
    wrong += check_absence(connect(1 << 21, device, group, limit_s=AWAY_S), device)
    if rank == 0:
        print(f"{replays} replays of {EXCHANGES} exchanges and their checks: {checked:.1f} s", flush=True)
    for line in wrong or ["all right"]:
        print(f"rank {rank}: {line}", flush=True)
    dist.barrier()
    if not one_gpu:
        nccl = dist.new_group(backend="nccl")
        time_all(connect(1 << 23, device, group, limit_s=60), device, nccl)
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        sys.exit(1)


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 2
    one_gpu = "--one-gpu" in sys.argv
    gpus = torch.cuda.device_count()
    if gpus < (1 if one_gpu else ranks):
        print(f"reduce_bench: this machine has {gpus} GPUs; it needs {1 if one_gpu else ranks}")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (ranks, folder, one_gpu), nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
