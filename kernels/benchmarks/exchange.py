"""Exchanges between GPUs, beside NCCL: processes of their own, one a GPU, run the same cases together.

`python -m tests.kernels.exchange_checks` checks their results.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from batchspec.kernels.benchmarks.case import Benchmark, Case, noise
from batchspec.kernels.benchmarks.runner import Runner, print_now
from batchspec.kernels.common.graph_clock import Call
from batchspec.kernels.distributed.exchange import best_of_ranks, gather, sum_of_ranks
from batchspec.kernels.distributed.head_norms import head_norms
from batchspec.kernels.distributed.peer_memory import PeerMemory, connect
from batchspec.kernels.distributed.reduce_norm import reduce, reduce_norm
from batchspec.kernels.norm_rope.norm import add_norm

ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
SIZES_KB = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BUFFER_BYTES = 1 << 23
WIDTH, EPS, FEW = 8192, 1e-5, 256
CALLS = 40
"""Of a graph."""
NAMES = ("reduce", "reduce_norm", "few_numbers", "head_norms")


class RanksClock:
    """Microseconds of one call; all ranks start at the same time."""

    def us(self, calls: Sequence[Call], *, repeats: int = 7) -> float:
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                calls[i % len(calls)]()
        times = []
        for _ in range(repeats):
            dist.barrier()
            graph.replay()  # the ranks wait for each other here
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
        us: float = median(times)
        return us


def exchanges(peers: PeerMemory, library: dist.ProcessGroup | None) -> dict[str, Benchmark]:
    """The table. library: the group of NCCL; None: it is not timed."""

    def case(call: Call, num_bytes: int = 0, **compare: Call | None) -> Case:
        ways = {name: [way] for name, way in compare.items() if way is not None}
        return Case(calls=[call], reference=None, num_bytes=num_bytes, compare=ways)

    def all_reduce(x: torch.Tensor) -> Call | None:
        return None if library is None else partial(dist.all_reduce, x, group=library)

    def after(first: Call | None, second: Call) -> Call | None:
        def both() -> None:
            assert first is not None
            first()
            second()

        return None if first is None else both

    def sums(kilobytes: int) -> Case:
        x, out = torch.zeros(2, kilobytes * 1024 // (2 * WIDTH), WIDTH, dtype=torch.bfloat16)
        one_shot = partial(reduce, x, peers, out=out)
        return case(one_shot, x.nbytes, two_shot=partial(one_shot, two_shot=True), nccl=all_reduce(x))

    def norms(kilobytes: int) -> Case:
        x, residual, out = torch.zeros(3, kilobytes * 1024 // (2 * WIDTH), WIDTH, dtype=torch.bfloat16)
        weight = torch.ones(WIDTH, dtype=torch.bfloat16)
        norm = partial(add_norm, x, residual, weight, EPS, out=out)
        fused = partial(reduce_norm, x, residual, weight, EPS, peers, out=out)
        return case(
            fused, x.nbytes, two_shot=partial(fused, two_shot=True), nccl_and_norm=after(all_reduce(x), norm), norm_alone=norm
        )

    def few(what: str) -> Case:
        """256 numbers in fp32."""
        x, ids, every = torch.zeros(FEW), torch.zeros(FEW, dtype=torch.int32), torch.zeros(peers.ranks, FEW)
        if what == "best":
            return case(partial(best_of_ranks, x, ids, peers, out_ids=ids))
        if what == "sum":
            return case(partial(sum_of_ranks, x, peers, out=x))
        nccl = None if library is None else partial(dist.all_gather_into_tensor, every.view(-1), x, group=library)
        return case(partial(gather, x, peers, out=every), nccl=nccl)

    def heads(rows: int) -> Case:
        """q and k of MiniMax-M2 on each of two GPUs."""
        return case(partial(head_norms, noise(rows, 4096), noise(3072), noise(512), EPS, peers))

    sizes = tuple((kilobytes,) for kilobytes in SIZES_KB)
    rows: tuple[tuple[Callable[..., Case], str, tuple[tuple[Any, ...], ...], tuple[Any, ...]], ...] = (
        (sums, "kilobytes", sizes, (16,)), (norms, "kilobytes", sizes, (16,)),
        (few, "what", (("best",), ("gather",), ("sum",)), ("gather",)), (heads, "rows", ((64,),), (2,)),
    )
    return {name: Benchmark(name, *row) for name, row in zip(NAMES, rows, strict=True)}


def start_ranks(ranks: int, work: Callable[..., None], *arguments: Any, one_gpu: bool = False) -> None:
    """Call `work(device, group, *arguments)` in a process for each rank, on a GPU each, or all on one."""
    with tempfile.TemporaryDirectory() as folder:
        given = (ranks, folder, one_gpu, work, *arguments)
        torch.multiprocessing.spawn(_joined, given, nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]


def _joined(rank: int, ranks: int, folder: str, one_gpu: bool, work: Callable[..., None], *arguments: Any) -> None:
    os.environ.update(ENVIRONMENT | ({"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if one_gpu else {}))
    device = torch.device("cuda", 0 if one_gpu else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    work(device, dist.group.WORLD, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def time_exchanges(device: torch.device, group: dist.ProcessGroup, names: Sequence[str], words: str) -> None:
    """Time these exchanges, by default all; rank 0 prints."""
    peers, first = connect(BUFFER_BYTES, device, group, limit_s=60), dist.get_rank() == 0
    table = exchanges(peers, dist.new_group(backend="nccl"))
    runner = Runner(RanksClock(), device, show=print_now if first else _nothing)
    runner.run_all([table[name] for name in names or table], words)


def _nothing(line: str) -> None:
    pass
