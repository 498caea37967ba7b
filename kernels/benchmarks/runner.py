"""Checks and times the cases of the table, and prints a line for each way to compute them.

Times are medians of replays of a CUDA graph that cycles over copies of the inputs, so that they are not in the L2 cache. "of
copy" is the share of the bandwidth of a copy, measured at the start; "of limit" the least time by bytes / 4.3 TB/s and operations
/ 790 TFLOP/s (FP8: 1,500) as a share of the measured one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from batchspec.kernels.benchmarks.case import Benchmark, Case, relative_error
from batchspec.kernels.common.compile_ahead import compile_ahead
from batchspec.kernels.common.graph_clock import Call

TOLERANCE = 1e-2
"""The largest relative error of a right result: rounding to bf16 and other orders of sums give up to 6e-3."""
COPY_BYTES = 1 << 30
COMPILER = (sys.executable, "-m", "batchspec.kernels.common.compile_process")
WIDTH = 80
HEADER = f"{'kernel and shape':<{WIDTH}} {'us':>10} {'GB/s':>8} {'of copy':>8} {'TFLOP/s':>8} {'of limit':>8} {'error':>8}"


def print_now(line: str) -> None:
    print(line, flush=True)


class Clock(Protocol):
    """`GraphClock`, or another that times ranks together."""

    def us(self, calls: Sequence[Call], *, repeats: int = ...) -> float: ...


@dataclass(slots=True)
class Runner:
    """Runs benchmarks on one device."""

    clock: Clock
    device: torch.device
    sweep: bool = False
    """Time the settings too."""
    show: Callable[[str], None] = print_now
    copy_gb_s: float = float("nan")

    def run_all(self, benchmarks: Sequence[Benchmark], words: str) -> None:
        """Print the table of their shapes that have all these words."""
        cases = [(benchmark, shape) for benchmark in benchmarks for shape in benchmark.matching(words)]
        if not cases:
            self.show(f"--only {words!r}: no shape has all of these words; each must be as in the table, e.g. rows=64")
            return
        self.begin()
        for benchmark, shape in cases:
            self.run(benchmark, shape)

    def begin(self) -> None:
        """Measure a copy and print the head of the table."""
        source = torch.ones(COPY_BYTES // 4, device=self.device)
        copy = partial(torch.neg, source, out=torch.empty_like(source))  # a memcpy in a CUDA graph is slower than a kernel
        self.copy_gb_s = 2 * source.nbytes / self.clock.us([copy]) / 1e3
        self.show(f"copy bandwidth {self.copy_gb_s:.0f} GB/s (bytes read + written), torch {torch.__version__}")
        self.show(HEADER)

    def run(self, benchmark: Benchmark, shape: tuple[Any, ...]) -> None:
        """Print the lines of one case; an error becomes one line."""
        label = f"{benchmark.name} {benchmark.labelled(shape)}"
        try:
            with torch.device(self.device):
                self._run(label, benchmark.make(*shape))
        except Exception as error:
            self.show(f"{label}: {_one_line(error)}")
        with suppress(AssertionError):  # a torch without CUDA
            torch.cuda.empty_cache()

    def _run(self, label: str, case: Case) -> None:
        expected = None if case.reference is None else case.reference()
        settings = case.settings() if self.sweep else {}
        if settings:
            compile_ahead([calls[0] for calls in settings.values()], self.device, num_probes=len(settings), command=COMPILER)
        self._time(label, "", case, case.calls, expected)
        for way, calls in case.compare.items():
            self._time(label, way, case, calls, expected)
        times = {way: self._time(label, way, case, calls, expected, show=False) for way, calls in settings.items()}
        if timed := {way: us for way, us in times.items() if us is not None}:
            best = min(timed, key=timed.__getitem__)
            self.show(self._line(f"  fastest of {len(timed)}: {best}", case, timed[best], None))

    def _time(
        self, label: str, way: str, case: Case, calls: Sequence[Call], expected: torch.Tensor | None, *, show: bool = True
    ) -> float | None:
        """Microseconds, or None after a line that says what is wrong."""
        name = f"  {way}" if way else label
        try:
            result = calls[0]()
            error = None if expected is None else relative_error(result() if callable(result) else result, expected)
            if error is not None and not error <= TOLERANCE:
                self.show(f"{name}: WRONG, error {error:.1e}")
                return None
            us = self.clock.us(calls, repeats=9 if show else 3)
        except Exception as failure:
            self.show(f"{name}: {_one_line(failure)}")
            return None
        if show:
            self.show(self._line(name, case, us, error))
        return us

    def _line(self, name: str, case: Case, us: float, error: float | None) -> str:
        gb_s = case.num_bytes / us / 1e3
        shares = f"{gb_s:>8.1f} {gb_s / self.copy_gb_s:>8.1%} {case.flop / us / 1e6:>8.1f} {case.limit_us / us:>8.1%}"
        return f"{name:<{WIDTH}} {us:>10.2f} {shares} {'-' if error is None else f'{error:.0e}':>8}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
