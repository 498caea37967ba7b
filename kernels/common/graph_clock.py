"""Microseconds of a launch, from replays of a CUDA graph of many such launches: what autotuning compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

Call = Callable[[], Any]
MAX_COPIES = 128
GRAPH_US = 1500.0
"""Approximate duration of one graph."""


class GraphClock:
    """Microseconds a call from CUDA graphs captured on a stream of their own: fast enough to compare hundreds of variants.

    torch.cuda.graph runs the garbage collector at every capture, which takes longer than the capture and the replays together.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def us(self, calls: Sequence[Call], *, repeats: int = 3) -> float:
        """Median of `repeats` replays; `calls` are one call on several copies of the inputs. Raises what the first raises."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            calls[0]()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[-1]()
            end.record()
            end.synchronize()
            once_us = max(2.0, start.elapsed_time(end) * 1e3)
            per_graph = int(max(8, min(MAX_COPIES, GRAPH_US / once_us)))
            per_graph = max(per_graph, min(len(calls), MAX_COPIES))  # use every copy, so that the L2 cache does not hold them
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            try:
                for index in range(per_graph):
                    calls[index % len(calls)]()
            finally:
                graph.capture_end()
            times = []
            for _ in range(repeats + 1):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / per_graph)
        us: float = median(times[1:])
        return us
