"""Capture of CUDA graphs: rounds and prefill passes share the memory of an engine's graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from batchspec.process.garbage import no_garbage_collection
from batchspec.process.load_progress import count_step

T = TypeVar("T")


class GraphPool:
    """Memory of graphs that are replayed one at a time, in one stream. A later graph reuses memory that earlier graphs need only
    during a replay: the tensors that a replay returns are valid until the next replay of any graph.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch's own type of a pool's handle is private
        self._first: torch.cuda.CUDAGraph | None = None
        """A graph that is never replayed. It keeps the pool in use: torch fails to capture into a pool whose graphs have all been
        freed while a tensor in it is still alive."""

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of the launches of `run`, and the tensors that `run` returns, into which replays write. Executes nothing.

        Waits for the device. `run` must have been executed before: first calls compile kernels and allocate workspaces.
        """
        if self._first is None:
            one = torch.zeros(1, device="cuda")
            self._first, _ = self._capture(one.zero_)
            self._pool = self._first.pool()
        captured = self._capture(run)
        count_step()
        return captured

    def _capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        # The kernels of a graph keep the priority of the stream it was captured on.
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current
        # Only this thread's calls count: the thread that builds a corpus pins memory meanwhile, which would abort the capture.
        with (
            no_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = run()
        return graph, result
