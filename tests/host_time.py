"""The host's time for a job's rows, without a model: CPU time of the engine's thread, where a device answers at once.

    python -m tests.host_time [--rows 8000] [--slots 256] [--tokens 140] [--turns 5]

Scheduling, page pools, uploads of new rows and pages, and the reading of results are the engine's own, on CPU tensors. Forward
passes are left out: a prefill emits one token for each of its rows, and a round accepts a random number of drafts. Rows are as
short as GSM8K's. Prints one JSON line, of the fastest turn; compare two commits on one machine, in alternation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import ModelConfig, RunConfig
from batchspec.draft.base import Drafter
from batchspec.draft.spec import open_drafter
from batchspec.engine.features import RowFeatures
from batchspec.engine.loop import round_planner
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.round_planner import RoundPlanner
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.rounds.graphs import Graphs
from batchspec.engine.rounds.records import Moment, PendingResult, RoundOptions, RoundResult
from batchspec.engine.step import Prefill, RoundShape, ScheduledStep, Segment
from batchspec.kernels.rounds.accept import FULL
from batchspec.model.families.shapes import COMMON
from batchspec.model.spec import load_spec
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.packing.planner import GPU_PREFILL, GPU_RUN_AHEAD, PAGE_SIZE, row_buckets
from batchspec.records import Completion, Ids, Request, SamplingParams
from batchspec.request_stream import RequestStream

MAX_NEW_TOKENS = 512
SYSTEM_TOKENS = 24
"""Number of tokens with which every prompt begins, the same in all: one whole page."""
TOKEN, STOP_ID = 7, 2
"""The token that rows emit, and one that they do not."""
K, ACCEPTANCE = 3, 0.7
"""Number of drafts per row and round, and the probability that a draft is accepted after those before it."""
MODEL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": 1024,
}
POOLS = 4
"""Pages for this many batches of the longest rows: a small model leaves most of the memory free."""
ROUND_S, DRAFT_S, PREFILL = 1.2e-3, 0.2e-3, PrefillCost(least=0.033, token=1.8e-6, replay=2e-3, most_replayed=2048)
"""Times that the scheduler is told for a round, for each of its drafts and for a prefill pass: about those of SmolLM2-135M on an
H200."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=140, help="of a prompt, and of an output, on average")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    requests = list(some_requests(args.rows, args.tokens))
    engine = StandInEngine(args.slots, SYSTEM_TOKENS + 2 * args.tokens + MAX_NEW_TOKENS)
    print(json.dumps(min((measure(engine, requests) for _ in range(args.turns)), key=lambda turn: turn["us_a_row"])))


def some_requests(num_rows: int, num_tokens: int) -> Iterator[Request]:
    """Greedy rows. Prompts and outputs have half to one and a half times as many tokens, prompts at least SYSTEM_TOKENS."""
    random = np.random.default_rng(0)
    system_prompt = random.integers(8, 1000, SYSTEM_TOKENS, np.int32)
    lengths = random.integers(num_tokens // 2, num_tokens + num_tokens // 2, (num_rows, 2)).tolist()
    for i, (prompt_len, output_len) in enumerate(lengths):
        question = random.integers(8, 1000, max(1, prompt_len - SYSTEM_TOKENS), np.int32)
        yield Request(
            request_id=f"row-{i}", row_index=i, sample_index=0, shard=0, prompt_ids=np.concatenate((system_prompt, question)),
            max_new_tokens=MAX_NEW_TOKENS, min_new_tokens=0, sampling=SamplingParams(), stop_ids=(STOP_ID,), stop=(), seed=i,
            predicted_tokens=num_tokens, synthetic_len=output_len,
        )


def measure(engine: StandInEngine, requests: Sequence[Request]) -> dict[str, float]:
    """One run over all requests: microseconds of the host a row, in all and by part."""
    rounds = engine.totals.rounds
    engine.watch.restart()
    tokens = sum(0 if done.token_ids is None else len(done.token_ids) for done in engine.run(iter(requests)))
    seconds = {part: engine.watch.seconds[part] for part in ("schedule", "launch", "process")}
    figures = {"us_a_row": sum(seconds.values()), **seconds}
    counts = {"rows": len(requests), "tokens": tokens, "rounds": engine.totals.rounds - rounds}
    return counts | {part: round(value / len(requests) * 1e6, 1) for part, value in figures.items()}


class Stopwatch:
    """Measures the CPU time of one thread by category."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.thread_time()

    def lap(self, spent_on: str) -> None:
        """Add the time since the last call to this category."""
        now = time.thread_time()
        self.seconds[spent_on] += now - self._last
        self._last = now


class StandInEngine(Engine):
    """An engine without forward passes. `watch` has `schedule`, `launch` and `process`, which includes completions; `device` is
    what a device would do."""

    def __init__(self, num_slots: int, max_len: int) -> None:
        """max_len: limit on the tokens of a row."""
        device = torch.device("cpu")
        target, drafter = tiny_models(num_slots, device)
        batch = PackedBatch(
            num_slots=num_slots,
            row_buckets=row_buckets(num_slots),
            num_pages=POOLS * num_slots * -(-max_len // PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_len=max_len,
            num_verified=K,
            prefill_tokens=GPU_PREFILL,
            run_ahead=GPU_RUN_AHEAD,
        )
        self.watch = Stopwatch()
        super().__init__(target, drafter, batch, device=device, features=RowFeatures(defers_text=True, decode=no_text))
        self.executor: Executor = StandInExecutor(self.watch, target, drafter, batch, device)
        self.planner = RoundPlanner(self.executor, batch, adaptive=True)

    def prepare(self, mode: SamplingMode, **more: Any) -> None:
        """The scheduler is told the cost PREFILL of passes."""
        with patch.object(round_planner, "rehearse", lambda *_, **__: PREFILL):
            super().prepare(mode, **more)

    def _begin(self, requests: RequestStream, finished: Sequence[tuple[Ids, Ids]] = ()) -> EngineRun:
        run = super()._begin(requests, finished)
        process, take = run._process, run.requests.take_completions

        def timed_process() -> None:
            process()
            self.watch.lap("process")

        def timed_take() -> list[Completion]:
            self.watch.lap("schedule")
            done = take()
            self.watch.lap("process")
            return done

        run._process, run.requests.take_completions = timed_process, timed_take  # type: ignore[method-assign]
        return run


class StandInExecutor(Executor):
    """Real rows, page tables and uploads; passes that are made up, and rounds of the class below."""

    def __init__(self, watch: Stopwatch, target: Target, drafter: Drafter, batch: PackedBatch, device: torch.device) -> None:
        super().__init__(target, drafter, batch, device=device, options=RoundOptions())
        self._watch = watch
        self.graphs = StandInGraphs(self, watch)
        self._after_pass = False

    def execute(self, step: ScheduledStep) -> None:
        self._watch.lap("schedule")
        super().execute(step)
        self.num_left_at_refill = 1  # as if the device never had to wait
        self._watch.lap("launch")

    def read(self) -> PendingResult:
        result = super().read()
        seconds = ROUND_S + K * DRAFT_S + (cast(float, PREFILL.replay) if self._after_pass else 0.0)
        self._after_pass = result.began is not None
        return TimedResult(result.result, result.began, cast(torch.cuda.Event, "now"), seconds)

    def _launch_prefill(self, prefill: Prefill) -> None:
        """Passes that emit a token of each row that ends in them."""
        self._watch.lap("launch")
        self._pending += [PendingResult.send(self._pass(segments), 0.0) for segments in prefill.passes]
        self._watch.lap("device")

    def _pass(self, segments: Sequence[Segment]) -> RoundResult:
        slots = np.array([segment.slot for segment in segments if segment.last], np.intp)
        log = empty_log(len(self.rows.live), 0)
        self.rows.live.numpy()[slots] = 1
        emit(self.rows, log, slots, np.zeros(len(slots), np.intp))
        return RoundResult(torch.from_numpy(log))


class StandInGraphs(Graphs):
    """Rounds that accept drafts at random; the scheduler takes them to be timed."""

    def __init__(self, executor: Executor, watch: Stopwatch) -> None:
        super().__init__(executor.round, executor.rows, executor.prefix_groups)
        self.captures, self._watch = True, watch
        self._random = np.random.default_rng(0)

    def run(self, shape: RoundShape) -> RoundResult:
        """One round, whose rows end at their limits."""
        self._watch.lap("launch")
        log = empty_log(shape.num_rows, shape.draft_len)
        rejected = self._random.random((shape.num_rows, shape.draft_len + 1)) >= ACCEPTANCE
        rejected[:, -1] = True
        emit(self._rows, log, np.arange(shape.num_rows), rejected.argmax(1))
        self._watch.lap("device")
        return RoundResult(torch.from_numpy(log))

    def prepare(self, shapes: Iterable[RoundShape]) -> None:
        """Nothing is captured."""

    def seconds(self, shape: RoundShape, repeats: int = 5) -> float:
        """What the scheduler is told of a round."""
        return ROUND_S + DRAFT_S * shape.draft_len


@dataclass
class TimedResult(PendingResult):
    """A result that seems to have arrived `seconds` after the one before it: draft lengths and refills are chosen by this."""

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


def empty_log(num_rows: int, draft_len: int) -> NDArray[np.int32]:
    return np.full((num_rows, 5 + draft_len), -1, np.int32)


def tiny_models(num_slots: int, device: torch.device) -> tuple[Target, Drafter]:
    """Only their tensors take memory; nothing is computed."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**COMMON, **MODEL}))
        spec = load_spec(Path(scratch))
    draft = DraftConfig(name="eagle3", num_speculative_tokens=K, parallel=False)
    config = RunConfig(model=ModelConfig(load_format="dummy"), draft=draft)
    target = Target.load(Path(), replace(spec, dtype="float32"), dtype=torch.float32, device=device, dummy=True)
    drafter: Any = open_drafter(config, spec, draft_vocab=spec.vocab_size)
    return target, drafter.build(drafter.load(dtype=torch.float32, device=device), target, slots=num_slots)


def no_text(ids: Sequence[int]) -> str:
    raise AssertionError("texts are left to the maker of the table")


if __name__ == "__main__":
    main()
