"""Prefill passes replayed from CUDA graphs on a GPU, against plain passes and against rows alone on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.window import WindowDrafter
from batchspec.engine.features.logprobs import LogprobReader
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.executor import Executor
from batchspec.engine.prefill.graphs import CAPTURE_AT, PrefillGraphs
from batchspec.engine.prefill.passes import Prefilled, prefill_chunk
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.step import Segment
from batchspec.model.target import Target
from batchspec.packed_batch import ExpectedRows
from batchspec.packing import memory
from batchspec.records import Request, SamplingParams
from tests.engine.test_state_passes import KINDS, prompts_of
from tests.engine.test_state_passes import check as check_states
from tests.gpu import test_gpu_lora
from tests.gpu.test_gpu_engine import (
    MAX_LEN,
    TREE,
    VOCAB,
    alone,
    block,
    eagle,
    hybrid,
    pard,
    requests,
    run,
    shape,
    target,
    tokens,
    windowed_target,
)
from tests.helpers.engines import make_engine, packed, request
from tests.helpers.padded_prefill import ALWAYS

GPU = torch.device("cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are padded whatever they take."""
    monkeypatch.setattr(PrefillGraphs, "cost", ALWAYS)
    monkeypatch.setattr("batchspec.engine.loop.warm_up.time_passes", lambda *_, **__: ALWAYS)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is captured when it is asked for the first time: a job of few rows replays many passes."""
    monkeypatch.setattr("batchspec.engine.prefill.graphs.CAPTURE_AT", 1)


def graphs_of(engine: Engine) -> PrefillGraphs:
    found = engine.executor.prefill_graphs
    assert found is not None
    return found


@pytest.mark.usefixtures("always", "at_once")
@pytest.mark.parametrize(
    "name",
    [
        "none", "lookup", "window", "pard", "pard chain", "block", "eagle3", "eagle3 general", "eagle3 with a window", "hybrid",
        "tree",
    ],
)
def test_jobs_with_replayed_passes_have_the_tokens_of_one_row_at_a_time_on_the_cpu(name: str, tmp_path: Path) -> None:
    """In float32, where passes of rows of at most 64 tokens are replayed. All kinds of sampling, shared prefixes, preemption."""
    asked, slots = requests(120), 8
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "window": partial(WindowDrafter, target("cuda"), 3, slots=slots, window=12, sink=2),
        "pard": partial(pard, 4, slots, parallel=True),
        "pard chain": partial(pard, 3, slots, parallel=False),
        "block": partial(block, 4, slots),
        "eagle3": partial(eagle, tmp_path, "cuda", 3, slots),
        "eagle3 general": partial(eagle, tmp_path, "cuda", 3, slots, dead_positions=False),
        "eagle3 with a window": partial(eagle, tmp_path, "cuda", 3, slots, window=9),
        "hybrid": partial(hybrid, tmp_path, 4, slots),
        "tree": partial(eagle, tmp_path, "cuda", 3, slots, tree=TREE),
    }
    engine, done = run(target("cuda"), drafters[name](), shape(slots), asked, prefill_graphs=True)
    graphs = graphs_of(engine)
    assert graphs.num_captured > 0
    assert graphs.num_padded > graphs.num_captured
    assert tokens(done) == alone(asked)


@pytest.mark.usefixtures("always", "at_once")
@pytest.mark.parametrize("windows", [(9, None), (9, 40, None)], ids=str)
def test_groups_of_windows_are_replayed(windows: tuple[int | None, ...]) -> None:
    asked = requests(80)
    engine, done = run(windowed_target("cuda", windows), NoDrafter(), shape(8, run_ahead=3), asked, prefill_graphs=True)
    assert graphs_of(engine).num_padded > graphs_of(engine).num_captured > 0
    assert tokens(done) == alone(asked, windowed_target("cpu", windows))


@pytest.mark.usefixtures("always", "at_once")
def test_rows_with_adapters_are_replayed() -> None:
    asked = [replace(own, adapter=i % (test_gpu_lora.NUM_ADAPTERS + 1)) for i, own in enumerate(requests(60))]
    engine, done = run(test_gpu_lora.target("cuda"), NoDrafter(), shape(8), asked, prefill_graphs=True)
    assert graphs_of(engine).num_padded > graphs_of(engine).num_captured > 0
    assert tokens(done) == alone(asked, test_gpu_lora.target("cpu"))


@pytest.mark.whole_gpu
@pytest.mark.usefixtures("at_once")
def test_a_prepared_engine_knows_what_its_passes_take_and_changes_no_token(tmp_path: Path) -> None:
    """Launches of a tiny model take longer than its tokens: passes are padded without any other help. In float32 only passes of
    rows of at most 64 tokens are; a refill of all slots fits into a pass, so every refill that the times may suggest is one."""
    asked = [replace(r, stop=()) for r in requests(80) if len(r.prompt_ids) <= 64]
    drafter = eagle(tmp_path, "cuda", 3, 8)
    engine = make_engine(target("cuda"), drafter, shape(8, prefill_tokens=512), device=GPU, adaptive=True, prefill_graphs=True)
    lengths = np.array([len(r.prompt_ids) for r in asked], np.int32)
    engine.prepare(
        SamplingMode(), expected=ExpectedRows(prompt_lens=lengths, common_tokens=0, output_tokens=8.0, num_rows=100 * len(asked))
    )
    prepared = graphs_of(engine).num_captured
    assert prepared > 1, "more than the pass whose replay is timed"
    assert tokens(list(engine.run(iter(asked)))) == alone(asked)
    assert graphs_of(engine).num_padded > graphs_of(engine).num_captured - prepared, "some passes are replays"


class Passes:
    """The same passes launched plainly and as graphs, in bf16; torch's attention serves rows of more than 64 tokens."""

    def __init__(self, own: Target, make: Callable[[], Drafter], *, slots: int = 16, **options: Any) -> None:
        batch = packed(
            slots, page_size=16, max_len=MAX_LEN, num_pages=1 + 16 * slots, prefill_tokens=4096, row_buckets=(slots,),
            num_verified=3,
        )
        self._slots, self._rng = slots, np.random.default_rng(0)
        reading = RoundOptions(reader=LogprobReader(0))
        self.plain, self.graphed = (
            Executor(own, make(), batch, device=GPU, options=reading, prefill_graphs=True, **options) for _ in range(2)
        )

    def enter(self, mean: int) -> list[Segment]:
        """Rows enter most of the slots, of `mean` tokens on average; some do not end in the pass. The same in both."""
        slots = sorted(self._rng.choice(self._slots, self._slots - 3, replace=False).tolist())
        lengths = self._rng.integers(mean - 8, mean + 8, len(slots)).tolist()
        asked = [
            request(i, self._rng.integers(0, VOCAB, n).tolist(), cap=4, sampling=SamplingParams(temperature=i % 2))
            for i, n in enumerate(lengths)
        ]
        for executor in (self.plain, self.graphed):
            rows = executor.rows
            rows.begin(slots, asked, [()] * len(slots))
            pages = [(slot, 0, (range(1 + 16 * slot, 17 + 16 * slot),) * len(rows.page_tables)) for slot in slots]
            rows.grant(pages)
        return [Segment(slot, 0, n, i % 5 != 4) for i, (slot, n) in enumerate(zip(slots, lengths, strict=True))]

    def run(self, segments: Sequence[Segment]) -> tuple[Prefilled, Prefilled]:
        mode, graphs = SamplingMode(random=True), self.graphed.prefill_graphs
        assert graphs is not None
        return prefill_chunk(self.plain.round, self.plain.rows, segments, mode), graphs.run(segments, mode)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """As two kernels in bf16 are."""
    return float((found.float() - expected.float()).norm()) <= 0.02 * float(expected.float().norm()) + 1e-6


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mean", [40, 120, 190])
@pytest.mark.parametrize("windows", [(None, None), (9, None)], ids=str)
@torch.inference_mode()
def test_replayed_passes_leave_what_plain_passes_leave_in_bf16(
    windows: tuple[int | None, ...], mean: int, tmp_path: Path
) -> None:
    """K, V, what the drafter carries and logprobs; other pages keep every bit, and slots of the pass alone have results."""
    own = windowed_target("cuda", windows, torch.bfloat16)
    passes = Passes(own, lambda: eagle(tmp_path, "cuda", 3, 16, own=own))
    graphs = passes.graphed.prefill_graphs
    assert graphs is not None
    for _ in range(CAPTURE_AT + 6):
        segments = passes.enter(mean)
        before = [layer.pages.clone() for layer in passes.graphed.cache.layers]
        plain, replayed = passes.run(segments)
        assert plain.result is not None
        assert replayed.result is not None
        emits = torch.tensor([s.slot for s in segments if s.last], device=GPU)
        assert torch.equal(replayed.result.log[:, 0] >= 0, plain.result.log[:, 0] >= 0)
        (before_graphs,), (after_graphs,) = plain.result.read, replayed.result.read
        same = replayed.result.log[emits, 4] == plain.result.log[emits, 4]
        assert float(same.float().mean()) > 0.7
        assert close(after_graphs[emits][same], before_graphs[emits][same])
        others = torch.ones(before[0].shape[1], dtype=torch.bool, device=GPU)
        others[0] = False
        for s in segments:
            others[1 + 16 * s.slot : 1 + 16 * s.slot + -(-s.end // 16)] = False
        for ours, theirs, old in zip(passes.graphed.cache.layers, passes.plain.cache.layers, before, strict=True):
            assert torch.equal(ours.pages[:, others], old[:, others])
            assert close(ours.pages[:, ~others][:, 1:], theirs.pages[:, ~others][:, 1:])
    assert graphs.num_padded > graphs.num_captured > 0


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_the_host_launches_a_replayed_pass_once(tmp_path: Path) -> None:
    own = windowed_target("cuda", (None,) * 6, torch.bfloat16)
    passes = Passes(own, NoDrafter)
    graphs = passes.graphed.prefill_graphs
    assert graphs is not None
    segments = passes.enter(120)
    for _ in range(CAPTURE_AT + 1):
        passes.run(segments)
    counts = []
    mode = SamplingMode(random=True)
    for launch in (partial(prefill_chunk, passes.plain.round, passes.plain.rows), graphs.run):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            launch(segments, mode)
            torch.cuda.synchronize()
        events = {event.key: event.count for event in trace.key_averages()}
        counts.append((sum(events.get(name, 0) for name in LAUNCHES), events.get("cudaGraphLaunch", 0)))
    (plain_kernels, plain_graphs), (kernels, launched) = counts
    assert plain_graphs == 0
    assert plain_kernels > 40
    assert launched == 1
    assert kernels <= 4


@pytest.mark.usefixtures("always", "at_once")
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_states_are_those_of_rows_by_themselves_on_the_cpu(kind: str) -> None:
    """In float32, rows of at most 64 tokens, with common beginnings. Passes are launched before results of earlier ones, which
    write to the same tensors, are read."""
    rng = np.random.default_rng(7)
    common = rng.integers(0, VOCAB, 33).tolist()
    rows = [(common if i % 3 == 0 else []) + rng.integers(0, VOCAB, rng.integers(1, 31)).tolist() for i in range(150)]
    batch = shape(24, decodes=False, num_verified=0)
    engine = Engine(target("cuda"), NoDrafter(), batch, device=GPU, features=KINDS[kind](), prefill_graphs=True)
    done = list(engine.run(iter(prompts_of(*rows))))
    graphs = graphs_of(engine)
    assert graphs.num_captured > 0
    assert graphs.num_padded > 2 * graphs.num_captured
    assert sorted(one.row_index for one in done) == list(range(150))
    check_states(done, target("cpu"), kind, atol=1e-4)


@pytest.mark.whole_gpu
@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_the_graphs_take_no_more_memory_than_is_kept_for_them() -> None:
    own = windowed_target("cuda", (None, None), torch.bfloat16)
    passes = Passes(own, NoDrafter)
    torch.cuda.synchronize()
    for mean in (16, 40, 90, 190):
        segments = passes.enter(mean)
        for _ in range(CAPTURE_AT - 1):
            passes.run(segments)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        passes.run(segments)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken = before - torch.cuda.mem_get_info()[0]
        assert taken <= memory.prefill_graph_bytes(own.spec, dtype=torch.bfloat16, tokens=4096)


@pytest.mark.usefixtures("always", "at_once")
def test_rows_with_penalties_and_biases_are_replayed_by_graphs_of_their_own() -> None:
    samplings = (
        SamplingParams(),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=0.7, logit_bias=((3, 2.0),)),
    )
    asked: list[Request] = [r for one in samplings for r in requests(40, samplings=(one,), stops=False)]
    asked = [replace(r, request_id=f"r{i}", row_index=i) for i, r in enumerate(asked)]
    engine, done = run(target("cuda"), NoDrafter(), shape(8), asked, prefill_graphs=True)
    assert len({captured.mode for captured in graphs_of(engine)._graphs}) > 1
    assert tokens(done) == alone(asked)
