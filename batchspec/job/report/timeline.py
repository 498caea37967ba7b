"""The timeline of a run: sampled while it runs, read for the pictures of the report.

_batchspec/logs/run-<attempt>.timeline.jsonl   a header, then one line for each sample: seconds since the start and running sums

Every value is a running sum, so the difference of two samples is the total between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchspec.data.runstate.in_thread import in_thread
from batchspec.errors import StorageError

Floats = NDArray[np.float64]

SAMPLE_S = 1.0
DETAIL = 3600
"""Two samples are at least 1/DETAIL of the elapsed run time apart: a day takes about 15,000 samples."""
WRITE_S = 60.0
"""A killed run loses at most the samples of this many seconds."""
BINS = 120
NAMES = (
    "t",
    "tokens",
    "preempted",
    "live_s",
    "ending_s",
    "waiting_s",
    "prefill_s",
)


class Totals(Protocol):
    """Fields of engine.output_processor.EngineTotals."""

    tokens: int
    preempted: int
    live_rows: int
    prefill_s: float


class Timeline:
    """Samples an engine's totals, at first once a second, later less often.

    write  stores the whole file so far, called in a thread; after a StorageError recording ends and the run continues
    slots  number of slots of the batch
    clock  seconds, monotonic
    wall   seconds since 1970
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        slots: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._write: Callable[[str], None] | None = write
        self._saving: Future[None] | None = None
        self._clock, self._slots = clock, slots
        self._began = self._now = self._written = clock()
        self._lines = [json.dumps({"started_at": round(wall(), 3), "slots": slots}), json.dumps([0] * len(NAMES))]
        self._live_s = self._ending_s = self._waiting_s = self._prefill_s = 0.0
        self._prefilled, self._owed = 0.0, 0.0
        self._sampled = self._began
        self._latest: list[float] | None = None

    def observe(self, totals: Totals, *, exhausted: bool) -> None:
        """Called after every round and prefill. `exhausted`: no rows are left to admit, so a free slot stays free.

        No rounds run during a prefill: slots that have a row, or will get one, then count as in prefill, not as live or waiting.
        """
        now = self._clock()
        seconds, self._now = now - self._now, now
        # Prefill time is reported late, and may exceed the time since the last call: the rest is counted in later ones.
        self._owed += totals.prefill_s - self._prefilled
        self._prefilled = totals.prefill_s
        prefill_s = min(max(self._owed, 0.0), seconds)
        self._owed -= prefill_s
        idle = max(0, self._slots - totals.live_rows)
        self._live_s += (seconds - prefill_s) * totals.live_rows
        self._prefill_s += prefill_s * (totals.live_rows if exhausted else max(self._slots, totals.live_rows))
        if exhausted:
            self._ending_s += seconds * idle
        else:
            self._waiting_s += (seconds - prefill_s) * idle
        self._latest = [now - self._began, totals.tokens, totals.preempted]
        self._latest += [self._live_s, self._ending_s, self._waiting_s, self._prefill_s]
        if now - self._sampled >= max(SAMPLE_S, (now - self._began) / DETAIL):
            self._sampled = now
            self._sample()
            if now - self._written >= WRITE_S:
                self._written = now
                self._save()

    def close(self) -> None:
        """Write the last sample. Waits for the store."""
        self._sample()
        self._settle()
        self._save()
        self._settle()

    def _sample(self) -> None:
        if self._latest is not None:
            self._lines.append(json.dumps([round(value, 3) for value in self._latest]))
            self._latest = None

    def _settle(self) -> None:
        """Wait until no write is under way."""
        if self._saving is not None:
            ended, self._saving = self._saving, None
            try:
                ended.result()
            except StorageError:
                self._write = None

    def _save(self) -> None:
        """Begin to write in a thread, unless the last write is still under way: the next one has its samples too."""
        if self._saving is not None and not self._saving.done():
            return
        self._settle()
        if self._write is not None:
            self._saving = in_thread(partial(self._write, "\n".join(self._lines) + "\n"), "timeline")


@dataclass(frozen=True, slots=True)
class Run:
    started_at: float
    samples: dict[str, Floats]
    """Each name of NAMES -> its values, one a sample."""

    @property
    def seconds(self) -> float:
        return float(self.samples["t"][-1])


def parse_run(text: str) -> Run | None:
    """The run of a timeline file; None if it is damaged or has no sample."""
    try:
        header, *lines = [json.loads(line) for line in text.splitlines()]
        values = np.array(lines, np.float64)
        if values.ndim != 2 or values.shape[1] != len(NAMES) or len(values) < 2:
            return None
        return Run(float(header["started_at"]), dict(zip(NAMES, values.T, strict=True)))
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All runs of a job on one time axis without the pauses between them; simultaneous runs are added up. Arrays are [bins]."""

    edges_s: Floats
    """[bins + 1] seconds of work since the beginning."""
    starts_s: tuple[float, ...]
    """Position on the axis at which each run began."""
    tok_s: Floats
    live_rows: Floats
    """Mean number of slots with a row."""
    ending: Floats
    """Slots that are empty because no row was left."""
    waiting: Floats
    """Slots that are empty while rows are left: before a refill, or for lack of pages."""
    prefill: Floats
    """Slots whose present or next row is in a prefill pass, or waits for one to end."""
    preempted: int


def course(runs: Sequence[Run]) -> Course | None:
    """The runs over time; None if none has a sample."""
    runs = sorted((run for run in runs if run.seconds > 0), key=lambda run: run.started_at)
    if not runs:
        return None
    spans = _union([(run.started_at, run.started_at + run.seconds) for run in runs])
    starts = [sum(min(end, run.started_at) - begin for begin, end in spans if begin < run.started_at) for run in runs]
    count = min(BINS, max(len(run.samples["t"]) for run in runs) - 1)
    edges = np.linspace(0.0, sum(end - begin for begin, end in spans), count + 1)
    sums = {name: np.zeros(count) for name in NAMES[1:]}
    for start, run in zip(starts, runs, strict=True):
        for name, total in sums.items():
            total += np.diff(np.interp(edges, start + run.samples["t"], run.samples[name]))
    width = edges[1] - edges[0]
    return Course(
        edges_s=edges,
        starts_s=tuple(float(start) for start in starts),
        tok_s=sums["tokens"] / width,
        live_rows=sums["live_s"] / width,
        ending=sums["ending_s"] / width,
        waiting=sums["waiting_s"] / width,
        prefill=sums["prefill_s"] / width,
        preempted=round(float(sums["preempted"].sum())),
    )


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans in order, overlapping ones merged."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
