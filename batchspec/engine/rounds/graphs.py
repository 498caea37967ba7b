"""Rounds as CUDA graphs: the host launches one graph instead of some hundred kernels.

A graph is captured while the engine is loaded (`loop/round_planner.py`), or when the first round of its shape comes: then
`Round.run` runs. Every later round of this shape only replays it. On a CPU `Round.run` runs every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from batchspec.batch.device_batch import DeviceBatch
from batchspec.engine.rounds.prefix_tables import PrefixGroupTables
from batchspec.engine.rounds.records import RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.engine.step import RoundShape
from batchspec.process.garbage import no_garbage_collection
from batchspec.process.load_progress import count_step

T = TypeVar("T")
GRAPH_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""fp64, used by tests, has no verify attention that is planned on the device, so it cannot be captured."""


class GraphPool:
    """Captures rounds and prefill passes in memory that their graphs share, because they are replayed one at a time, in one
    stream. A later graph reuses memory that earlier graphs need only during a replay: the tensors that a replay returns are valid
    until the next replay of any graph.
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


def largest_first(shapes: Iterable[RoundShape]) -> list[RoundShape]:
    return sorted(shapes, key=lambda shape: (-shape.num_rows, -shape.draft_len, -shape.width.verified))


class Graphs:
    """Runs rounds, captured if the device can. A shape that was not prepared is captured at its first use."""

    def __init__(self, round_: Round, rows: DeviceBatch, prefix_groups: PrefixGroupTables) -> None:
        self._round, self._rows, self._prefix_groups = round_, rows, prefix_groups
        self.captures = rows.tokens.is_cuda and round_.target.dtype in GRAPH_DTYPES
        self._graphs: dict[RoundShape, tuple[torch.cuda.CUDAGraph, RoundResult]] = {}
        self.pool = GraphPool()
        self.warm_up_s = self.capture_s = 0.0
        """Seconds spent in the first execution of rounds, which compiles their kernels, and in capturing them."""

    def run(self, shape: RoundShape) -> RoundResult:
        """Run one round over the first slots. The result's tensors belong to the graph: copy them before the next round."""
        if not self.captures:
            return self._run(shape)
        if shape not in self._graphs:
            self._capture(shape)
        graph, result = self._graphs[shape]
        graph.replay()
        return result

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def prepare(self, shapes: Iterable[RoundShape]) -> None:
        """Capture ahead of time, the largest shape first: later graphs reuse its memory."""
        for shape in largest_first(shapes):
            if self.captures and shape not in self._graphs:
                self._capture(shape)

    def forget(self, shapes: Iterable[RoundShape]) -> None:
        """Drop graphs: a round of these shapes is captured anew."""
        for shape in shapes:
            self._graphs.pop(shape, None)

    def launches(self, shapes: Iterable[RoundShape]) -> list[Callable[[], object]]:
        """Functions that launch each of these rounds kernel by kernel, in the order of `prepare`."""
        return [partial(self._run, shape) for shape in largest_first(shapes)]

    def seconds(self, shape: RoundShape, repeats: int = 5) -> float:
        """Seconds of the round over dead rows: without attention, and without experts unless dead tokens go through them.

        Synchronises; only while no row is live.
        """
        if not self.captures:
            return 0.0
        self.run(shape)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            self.run(shape)
        end.record()
        end.synchronize()
        seconds: float = start.elapsed_time(end) / 1e3 / repeats
        return seconds

    def _run(self, shape: RoundShape) -> RoundResult:
        self._rows.provide(shape.mode)
        shared = self._prefix_groups.first(shape.num_rows) if shape.shared else None
        return self._round.run(
            self._rows.first(shape.num_rows, shape.max_kv), shape.mode, shape.draft_len, shared, shape.prepare_next,
            shape.width.num_positions(shape.num_rows),
        )

    def _capture(self, shape: RoundShape) -> None:
        """Run the round once over dead rows, which compiles kernels, then capture it; restores what the drafter keeps of
        rows afterwards."""
        state: Sequence[torch.Tensor] = (self._rows.live, *self._round.cache.draft_rows)
        before = [tensor.clone() for tensor in state]
        self._rows.live.zero_()
        began = time.perf_counter()
        self._run(shape)
        warmed_up = time.perf_counter()
        count_step()
        captured = self.pool.capture(partial(self._run, shape))
        self.warm_up_s += warmed_up - began
        self.capture_s += time.perf_counter() - warmed_up
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        self._graphs[shape] = captured
