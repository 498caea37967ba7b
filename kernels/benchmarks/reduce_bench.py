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

from batchspec.kernels.benchmarks.reduce_checks import (
    AWAY_S,
    EPS,
    EXCHANGES,
    FORMS,
    REPLAYS,
    WIDTH,
    Checks,
    check_absence,
    replay_checks,
)
from batchspec.kernels.distributed.exchange import best_of_ranks, gather, sum_of_ranks
from batchspec.kernels.distributed.head_norms import head_norms
from batchspec.kernels.distributed.peer_memory import PeerMemory, connect
from batchspec.kernels.distributed.reduce_norm import reduce, reduce_norm, reduce_norm_fp8
from batchspec.kernels.norm_rope.norm import add_norm
from batchspec.kernels.norm_rope.norm_fp8 import norm_fp8

Call = Callable[[], object]
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
SIZES_KB = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


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
        graph.replay()  # the ranks wait for each other here
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
        ]
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
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
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
