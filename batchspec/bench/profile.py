"""Where the time of a round goes: kernels, and the gaps between CUDA graph replays, from a trace of the torch profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import ConfigError
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.records import Request

SKIP_ROUNDS = 8
PROFILED_ROUNDS = 10
NAME_CHARS = 110
TOP = 12
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    name: str
    count: float
    """Calls per round."""
    us: float
    """Microseconds per round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times per round over the profiled rounds. A round is one graph replay; without graphs an equal share of the trace."""

    rounds: int
    round_us: float
    """Median time from the start of one replay to the start of the next."""
    busy_us: float
    """Time during which at least one kernel of the replay ran."""
    gap_us: float
    """Median time from the end of a replay to the start of the next."""
    outside_us: float
    """Kernels and copies outside the replays: page tables, copies of results to the host."""
    kernels: tuple[KernelTime, ...]
    """Kernels of the replays, the longest first."""

    @property
    def kernels_per_round(self) -> float:
        return sum(kernel.count for kernel in self.kernels)

    def summary(self) -> dict[str, Any]:
        top = [[kernel.name[:60], round(kernel.count, 1), round(kernel.us, 1)] for kernel in self.kernels[:TOP]]
        return {
            "rounds": self.rounds, "round_us": round(self.round_us, 1), "busy_us": round(self.busy_us, 1),
            "gap_us": round(self.gap_us, 1), "outside_us": round(self.outside_us, 1),
            "kernels_per_round": round(self.kernels_per_round, 1), "top": top,
        }

    def text(self, title: str) -> str:
        lines = [
            f"{title}: {self.rounds} rounds of {self.round_us:,.1f} us: {self.busy_us:,.1f} us in {self.kernels_per_round:,.1f} "
            f"kernels, gap between replays {self.gap_us:,.1f} us, kernels between them {self.outside_us:,.1f} us",
            f"{'count':>8} {'us/round':>10} {'us each':>9} {'share':>6}  kernel",
        ]
        for kernel in self.kernels:
            share = kernel.us / self.busy_us if self.busy_us else 0.0
            name = kernel.name if len(kernel.name) <= NAME_CHARS else kernel.name[: NAME_CHARS - 3] + "..."
            lines.append(f"{kernel.count:>8.1f} {kernel.us:>10.1f} {kernel.us / kernel.count:>9.2f} {share:>6.1%}  {name}")
        return "\n".join(lines) + "\n"


def profile_rounds(loaded: LoadedEngine[Engine], requests: Iterable[Request]) -> Profile:
    """Trace some rounds of a run once all slots are filled. Raises ConfigError without a GPU or if the run is too short."""
    if not torch.cuda.is_available():
        raise ConfigError("--profile needs a GPU: it lists kernels; leave it out")
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    first = last = 0

    def on_round(totals: EngineTotals) -> None:
        nonlocal first, last
        if not first and totals.rounds >= SKIP_ROUNDS:
            torch.cuda.synchronize()
            profiler.start()
            first = totals.rounds
        elif first and not last and totals.rounds >= first + PROFILED_ROUNDS:
            torch.cuda.synchronize()
            profiler.stop()
            last = totals.rounds

    loaded.engine.totals = EngineTotals()
    try:
        with closing(loaded.run(requests, on_round)) as completions:
            for _ in completions:
                if last:
                    break
    finally:
        if first and not last:
            profiler.stop()
    if not last:
        raise ConfigError(f"--profile needs {SKIP_ROUNDS + PROFILED_ROUNDS} rounds with every slot filled; raise --gen")
    return read_trace(_events(profiler), last - first)


def profile_calls(call: Callable[[], object], count: int) -> Profile:
    """Trace `count` calls, each counted as a round. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("--profile needs a GPU: it lists kernels; leave it out")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return read_trace(_events(profiler), count)


def _events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def read_trace(events: Sequence[dict[str, Any]], num_rounds: int) -> Profile:
    """The Profile of Chrome trace events (ts and dur in us). `num_rounds` is used if the trace holds no graph launch."""
    launches = {
        event["args"]["correlation"] for event in events
        if "GraphLaunch" in event.get("name", "") and event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    work = sorted((event for event in events if event.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    replays: dict[int, list[dict[str, Any]]] = defaultdict(list)
    outside = []
    for event in work:
        launch = event["args"].get("correlation", 0) if launches else 0
        if not launches or launch in launches:
            replays[launch].append(event)
        else:
            outside.append(event)
    spans = sorted((run[0]["ts"], max(e["ts"] + e["dur"] for e in run)) for run in replays.values())
    rounds = len(spans) if launches else max(1, num_rounds)
    by_name: dict[str, list[float]] = defaultdict(list)
    for run in replays.values():
        for event in run:
            by_name[event["name"]].append(event["dur"])
    kernels = [KernelTime(name=n, count=len(durs) / rounds, us=sum(durs) / rounds) for n, durs in by_name.items()]
    ends = spans[-1][1] - spans[0][0] if spans else 0.0
    return Profile(
        rounds=rounds,
        round_us=median(later[0] - earlier[0] for earlier, later in pairwise(spans)) if len(spans) > 1 else ends / rounds,
        busy_us=sum(_union(run) for run in replays.values()) / rounds,
        gap_us=median(later[0] - earlier[1] for earlier, later in pairwise(spans)) if len(spans) > 1 else 0.0,
        outside_us=sum(event["dur"] for event in outside) / rounds,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.us)),
    )


def _union(run: Sequence[dict[str, Any]]) -> float:
    """Microseconds covered by the events, which are sorted by their start."""
    total, end = 0.0, float("-inf")
    for event in run:
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(end, event["ts"]))
        end = max(end, stop)
    return total
