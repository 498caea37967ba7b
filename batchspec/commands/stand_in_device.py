"""An engine whose device answers at once, so that its remaining time is the host's.

Scheduling, page pools, uploads of new rows and pages, and the reading of results are the engine's own, on CPU tensors. Forward
passes are left out: a prefill emits one token for each of its rows, and a round accepts a random number of drafts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.commands.shapes import COMMON
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import ModelConfig, RunConfig
from batchspec.draft.base import Drafter
from batchspec.draft.spec import open_drafter
from batchspec.engine.features import RowFeatures
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import Ended
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.passes import prefill_chunk
from batchspec.engine.prefill.runner import PrefillRunner
from batchspec.engine.rounds.graphs import Graphs, RoundShape
from batchspec.engine.rounds.results import Moment, PendingResult
from batchspec.engine.rounds.round import RoundOptions, RoundResult
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.step import Prefill, ScheduledStep, Segment
from batchspec.kernels.rounds.accept import FULL
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.packing.planner import GPU_PREFILL, GPU_RUN_AHEAD, PAGE_SIZE, row_buckets
from batchspec.records import Completion, Request
from batchspec.request_stream import RequestStream

K, ACCEPTANCE = 3, 0.7
"""Number of drafts per row and round, and the probability that a draft is accepted after those before it."""
MODEL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": 1024,
}  # fmt: skip
"""Sizes of the models: only their tensors take memory; nothing is computed."""
POOLS = 4
"""Pages for this many batches of the longest rows: a small model leaves most of the memory free."""
TOKEN = 7
"""The token that rows emit; it is not a stop id."""
ROUND_S, DRAFT_S, PREFILL = 1.2e-3, 0.2e-3, PrefillCost(least=0.033, token=1.8e-6, replay=2e-3, most_replayed=2048)
"""Times that the scheduler is told for a round, for each of its drafts and for a prefill pass: about those of SmolLM2-135M on an
H200."""


class Stopwatch:
    """Measures the CPU time of one thread by category, without the stopwatch's own."""

    def __init__(self) -> None:
        self._own_s = 0.0
        self.restart()
        for _ in range(1000):
            self.lap("")
        self._own_s = self.seconds[""] / 1000

    def restart(self) -> None:
        """Forget what was measured."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.thread_time()

    def lap(self, spent_on: str) -> None:
        """Add the time since the last call to this category."""
        now = time.thread_time()
        self.seconds[spent_on] += now - self._last - self._own_s
        self._last = now


class StandInEngine(Engine):
    """An engine without forward passes.

    watch  `schedule`, `launch` and `process`, each of `round`, `refill` (prefill passes and the rows that enter) and other steps;
           `take`: taking requests ahead of a refill; `finish`: completions; `caller`: what was done with them; `stand-in`: what a
           device would do
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        """max_len: limit on the tokens of a row."""
        device = torch.device("cpu")
        target, drafter = _tiny_models(num_slots, device)
        batch = PackedBatch(
            num_slots=num_slots,
            row_buckets=row_buckets(num_slots),
            num_pages=POOLS * num_slots * -(-max_len // PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_len=max_len,
            draft_len=K,
            prefill_tokens=GPU_PREFILL,
            run_ahead=GPU_RUN_AHEAD,
        )
        super().__init__(target, drafter, batch, device=device, features=RowFeatures(defers_text=True, decode=_no_text))
        self.watch = Stopwatch()
        self.executor: StandInExecutor = StandInExecutor(self.watch, target, drafter, batch, device)
        self.planner = RoundPlanner(self.executor, batch, adaptive=True)

    def run(self, requests: RequestStream | Iterable[Request]) -> Generator[Completion]:
        """See `Engine`."""
        with closing(super().run(requests)) as completions:
            for done in completions:
                self.watch.lap("finish")
                yield done
                self.watch.lap("caller")

    def _process(self) -> None:
        kind = "refill" if self.scheduler.launches.unread[0].is_prefill else "round"
        super()._process()
        self.watch.lap(f"process {kind}")

    def _take_ahead(self) -> None:
        self.watch.lap("process round")
        super()._take_ahead()
        self.watch.lap("take")

    def _end(self, state: RequestState, finish: int, now: float) -> None:
        self.watch.lap("process round")
        super()._end(state, finish, now)
        self.watch.lap("finish")

    def _completed(self, ended: Ended) -> Completion:
        done = super()._completed(ended)
        self.watch.lap("finish")
        return done


class StandInExecutor(Executor):
    """Real rows, page tables and uploads; rounds and passes of the two classes below."""

    def __init__(self, watch: Stopwatch, target: Target, drafter: Drafter, batch: PackedBatch, device: torch.device) -> None:
        super().__init__(target, drafter, batch, device=device, options=RoundOptions())
        self._watch = watch
        self.graphs = StandInGraphs(self, watch)
        self._prefill = StandInPrefill(self, watch)
        self._after_pass = False
        self.num_refills = 0

    def execute(self, step: ScheduledStep) -> None:
        """See `Executor`."""
        kind = "refill" if step.prefill is not None else "round" if step.round is not None else "other"
        self._watch.lap(f"schedule {kind}")
        super().execute(step)
        self.num_refills += step.prefill is not None
        self.num_left_at_refill = 1  # as if the device never had to wait
        self._watch.lap(f"launch {kind}")

    def read(self) -> PendingResult:
        """See `Executor`."""
        result = super().read()
        seconds = ROUND_S + K * DRAFT_S + (cast(float, PREFILL.replay) if self._after_pass else 0.0)
        self._after_pass = result.began is not None
        return _TimedResult(result.result, result.began, cast(torch.cuda.Event, "now"), seconds)

    def rehearse(self, mode: SamplingMode) -> PrefillCost:
        """What the scheduler is told of a prefill pass."""
        return PREFILL


class StandInGraphs(Graphs):
    """Rounds that accept drafts at random; the scheduler takes them to be timed."""

    def __init__(self, executor: Executor, watch: Stopwatch) -> None:
        super().__init__(executor.round, executor.rows, executor.prefix_groups)
        self.captures, self._watch = True, watch
        self._random = np.random.default_rng(0)

    def run(self, shape: RoundShape) -> RoundResult:
        """One round, whose rows end at their limits."""
        self._watch.lap("launch round")
        log = _log(shape.num_rows, shape.draft_len)
        rejected = self._random.random((shape.num_rows, shape.draft_len + 1)) >= ACCEPTANCE
        rejected[:, -1] = True
        emit(self._rows, log, np.arange(shape.num_rows), rejected.argmax(1))
        self._watch.lap("stand-in")
        return RoundResult(torch.from_numpy(log))

    def prepare(self, shapes: Iterable[RoundShape]) -> None:
        """Nothing is captured."""

    def seconds(self, shape: RoundShape, repeats: int = 5) -> float:
        """What the scheduler is told of a round."""
        return ROUND_S + DRAFT_S * shape.draft_len


class StandInPrefill(PrefillRunner):
    """Passes that emit a token of each row that ends in them."""

    def __init__(self, executor: Executor, watch: Stopwatch) -> None:
        super().__init__(executor.rows, executor.drafter, partial(prefill_chunk, executor.round, executor.rows))
        self._watch = watch

    def run(self, prefill: Prefill) -> list[PendingResult]:
        """See `PrefillRunner`."""
        self._watch.lap("launch refill")
        results = [PendingResult.send(self._pass(segments), 0.0) for segments in prefill.passes]
        self._watch.lap("stand-in")
        return results

    def _pass(self, segments: Sequence[Segment]) -> RoundResult:
        slots = np.array([segment.slot for segment in segments if segment.last], np.intp)
        log = _log(len(self._rows.live), 0)
        self._rows.live.numpy()[slots] = 1
        emit(self._rows, log, slots, np.zeros(len(slots), np.intp))
        return RoundResult(torch.from_numpy(log))


@dataclass
class _TimedResult(PendingResult):
    """A result that seems to have arrived `seconds` after the result of the previous round. Draft lengths and the time between
    refills are chosen by this."""

    seconds: float = 0.0

    def seconds_since(self, began: Moment) -> float:
        return self.seconds


def emit(rows: DeviceBatch, log: NDArray[np.int32], slots: NDArray[np.intp], accepted_len: NDArray[np.intp]) -> None:
    """Commit accepted_len + 1 tokens of each live row in `slots`, fewer at its limit, and log it, as `accept` does."""
    live, num_tokens, limit = rows.live.numpy(), rows.num_tokens.numpy(), rows.limit.numpy()
    alive = live[slots] != 0
    slots, accepted_len = slots[alive], accepted_len[alive]
    kept = np.minimum(accepted_len + 1, limit[slots] - num_tokens[slots])
    num_tokens[slots] += kept
    is_full = num_tokens[slots] >= limit[slots]
    live[slots] = ~is_full
    num_drafts = log.shape[1] - 5
    log[slots, 0], log[slots, 1], log[slots, 2], log[slots, 3] = accepted_len, num_drafts, kept, FULL * is_full
    log[slots, 4:] = np.where(np.arange(num_drafts + 1) < kept[:, None], TOKEN, -1)


def _log(num_rows: int, draft_len: int) -> NDArray[np.int32]:
    return np.full((num_rows, 5 + draft_len), -1, np.int32)


def _tiny_models(num_slots: int, device: torch.device) -> tuple[Target, Drafter]:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**COMMON, **MODEL}))
        spec = load_spec(Path(scratch))
    draft = DraftConfig(name="eagle3", num_speculative_tokens=K, parallel=False)
    config = RunConfig(model=ModelConfig(load_format="dummy"), draft=draft)
    target = Target.load(Path(), replace(spec, dtype="float32"), dtype=torch.float32, device=device, dummy=True)
    drafter: Any = open_drafter(config, spec, draft_vocab=spec.vocab_size)
    return target, drafter.build(drafter.load(dtype=torch.float32, device=device), target, slots=num_slots)


def _no_text(ids: Sequence[int]) -> str:
    raise AssertionError("texts are left to the caller")
