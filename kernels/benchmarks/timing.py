"""Timing of a kernel and of its torch reference, and the table that the benchmark main of every kernel prints.

On a GPU the kernel is timed with CUDA events around replays of one captured graph, which cycles over several copies of the inputs
so that they are not in the L2 cache. The reference, which may read back to the host, is timed with the host's clock around
synchronised calls. On a machine without a GPU only the reference is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
COPY_BYTES = 1 << 30


class Bench:
    """One table of timings. The caller makes its tensors on `device`, and `num_copies` copies of large inputs to cycle over."""

    def __init__(self, name: str) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.num_copies = 4 if self.on_gpu else 1
        if not self.on_gpu:
            print(f"{name}: no GPU here, so this times the torch reference only ({torch.get_num_threads()} CPU threads)")
        self.copy_gb_s = self._copy_bandwidth()
        print(f"{name}: copy bandwidth {self.copy_gb_s:.0f} GB/s (bytes read + written)")
        print(f"{'shape':<44} {'us':>10} {'GB/s':>8} {'of copy':>8} {'reference us':>13} {'ratio':>7}")

    def row(self, shape: str, calls: Sequence[Call], reference: Sequence[Call], *, num_bytes: int) -> None:
        """Time one shape and print its row. Each element of `calls` is the same call on another copy of the inputs.

        reference  empty: it would take too long, and is left out; only on a GPU
        num_bytes  bytes that one call reads and writes
        """
        reference_us = wall_us(reference) if reference else None
        us = graph_us(calls) if self.on_gpu or reference_us is None else reference_us
        gb_s = num_bytes / us / 1e3
        compared = f"{'-':>13} {'-':>7}" if reference_us is None else f"{reference_us:>13.2f} {reference_us / us:>6.1f}x"
        print(f"{shape:<44} {us:>10.2f} {gb_s:>8.1f} {gb_s / self.copy_gb_s:>8.1%} {compared}", flush=True)

    def same_row(
        self, shape: str, kernel: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[tuple[Any, ...]],
        outs: Sequence[dict[str, Any]], *, num_bytes: int,
    ) -> None:
        """`row` for a kernel that must write exactly what its reference writes; this is checked first.

        inputs  copies of the positional arguments
        outs    keyword arguments of the kernel and of the reference; their tensors are compared
        """
        kernel(*inputs[0], **outs[0])
        reference(*inputs[0], **outs[1])
        for name, found in outs[0].items():
            if isinstance(found, Tensor):
                torch.testing.assert_close(found, outs[1][name], atol=0, rtol=0)
        self.row(
            shape,
            [partial(kernel, *given, **outs[0]) for given in inputs],
            [partial(reference, *given, **outs[1]) for given in inputs],
            num_bytes=num_bytes,
        )

    def _copy_bandwidth(self) -> float:
        num_bytes = COPY_BYTES if self.on_gpu else COPY_BYTES // 16
        source = torch.ones(num_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        calls = [partial(_copy, target, source)]
        return 2 * num_bytes / (graph_us(calls) if self.on_gpu else wall_us(calls)) / 1e3


def _copy(target: Tensor, source: Tensor) -> None:
    torch.neg(source, out=target)  # a kernel: a memcpy node of a CUDA graph reaches only 2.7 of an H200's 4.25 TB/s


def graph_us(calls: Sequence[Call], *, repeats: int = 9, per_graph: int = 64) -> float:
    """Median microseconds of one call, replayed from a CUDA graph."""
    for call in calls:  # compiles the kernel
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(per_graph):
            calls[index % len(calls)]()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / per_graph)
    return median(times)


def wall_us(calls: Sequence[Call], *, repeats: int = 9) -> float:
    """Median microseconds of one call by the host's clock, with the device synchronised before and after it."""
    times: list[float] = []
    for index in range(repeats + 1):
        start = time.perf_counter()
        calls[index % len(calls)]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times[1:])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN if some values were not written."""
    return float((found.float() - wanted).norm() / wanted.norm())
