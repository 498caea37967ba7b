"""Padded prefill passes, as CUDA graphs hold them, on a CPU: they give what plain passes give, whatever lies in the padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.device_batch import SLOT_FIELDS
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.bench.arguments import parse
from batchspec.bench.engines import config_of, variant_specs
from batchspec.config.compose import compose
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.refills import chunks
from batchspec.engine.prefill.cost import PrefillCost
from batchspec.engine.prefill.graphs import CAPTURE_AT, PrefillGraphs
from batchspec.engine.prefill.padded import PassInputs, emitting_first, padded_chunk
from batchspec.engine.prefill.passes import Prefilled, prefill_chunk
from batchspec.engine.prefill.shapes import PassShape, PassShapes
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.step import Segment
from batchspec.job.load.build import build_engine
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.attention.flash import SHORT
from batchspec.model.lora_products import LoraStacks
from batchspec.model.target import Target
from batchspec.packed_batch import ExpectedRows
from batchspec.records import Request
from tests.batch.test_logit_rules import ALL
from tests.engine import test_lossless
from tests.engine.test_lossless import SAMPLINGS, block_head, parallel_head, pard_model, requests_of_a_job
from tests.helpers.automata import constrained_tokens
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_tokens, request, tiny_spec, tiny_target
from tests.helpers.moe_models import tiny_moe
from tests.helpers.padded_prefill import ALWAYS, padded_passes
from tests.helpers.ranks import on_ranks, part_of
from tests.model import test_lora_lossless
from tests.structured import test_constrained

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
GREEDY = SamplingMode()


@settings(deadline=None, max_examples=40, suppress_health_check=SLOW)
@given(requests=requests_of_a_job(), data=st.data())
def test_jobs_with_padded_passes_have_the_tokens_of_plain_decoding(requests: list[Request], data: st.DataObject) -> None:
    """Every drafter, sampling, number of slots, pages and chunks, K/V in e4m3, rows with common beginnings, preempted rows."""
    with padded_passes():
        test_lossless.check_lossless(requests, data)


@pytest.mark.parametrize("kind", test_lora_lossless.KINDS)
@settings(deadline=None, max_examples=3, suppress_health_check=SLOW)
@given(requests=requests_of_a_job(), data=st.data())
def test_rows_with_adapters_are_padded_too(kind: str, requests: list[Request], data: st.DataObject) -> None:
    adapters = st.integers(0, test_lora_lossless.NUM_ADAPTERS)
    requests = [replace(r, adapter=data.draw(adapters, label="adapter")) for r in requests]
    with padded_passes():
        test_lora_lossless.check(requests, kind, data)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=3, suppress_health_check=SLOW)
@given(job=test_constrained.jobs())
def test_rows_with_automata_are_padded_too(name: str, job: list[tuple[Request, str | None]]) -> None:
    with padded_passes() as shapes:
        done = test_constrained.run([req for req, _ in job], ALL[name](), prefill_tokens=64)
    assert test_constrained.tokens(done) == {req.row_index: constrained_tokens(req, pattern) for req, pattern in job}
    assert shapes


@pytest.mark.parametrize("kind", ["experts", "adapters"])
@torch.inference_mode()
def test_padding_goes_through_no_expert_and_no_adapter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of 30 tokens together, padded to 96 tokens; every row of the slots has an adapter."""
    given: list[Tensor] = []
    live, lora = Target._live, LoraStacks.tokens

    def live_tokens(own: Target, batch: FlatBatch) -> Tensor | None:
        found = live(own, batch)
        given.extend([] if found is None else [found])
        return found

    def adapted_tokens(own: LoraStacks, adapters: Tensor) -> LoraTokens:
        given.append(adapters != 0)
        return lora(own, adapters)

    monkeypatch.setattr(Target, "_live", live_tokens)
    monkeypatch.setattr(LoraStacks, "tokens", adapted_tokens)
    target = tiny_moe("mixtral") if kind == "experts" else test_lora_lossless.adapted_target()
    batch = packed(8, row_buckets=(8,), prefill_tokens=96)
    executor = Executor(target, NoDrafter(), batch, device=DEVICE, options=RoundOptions(), prefill_graphs=True)
    asked = [replace(request(i, [i] * 45, cap=4), adapter=int(kind == "adapters")) for i in range(8)]
    executor.rows.begin(range(8), asked, [()] * 8)
    pages = [(slot, 0, (range(1 + 12 * slot, 13 + 12 * slot),) * len(executor.rows.page_tables)) for slot in range(8)]
    executor.rows.grant(pages)
    graphs = executor.prefill_graphs
    assert graphs is not None
    graphs.cost = ALWAYS
    graphs.run([Segment(2, 0, 40, True), Segment(5, 0, 27, False), Segment(6, 22, 45, True)], GREEDY)
    assert graphs.num_padded == 1
    assert given[0].tolist() == [True] * 90 + [False] * 6
    assert all(tokens.sum() <= 90 for tokens in given[1:])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "minimax_m2", "gpt_oss"])
def test_targets_with_experts_are_padded_too(family: str) -> None:
    """gpt_oss has two K/V groups and attention sinks, mixtral a window."""
    target, rng = tiny_moe(family), np.random.default_rng(0)
    asked = [request(i, rng.integers(0, VOCAB, 1 + 2 * i).tolist(), cap=6, sampling=SAMPLINGS[i]) for i in range(6)]
    with padded_passes() as shapes:
        engine = make_engine(target, NoDrafter(), packed(4), device=DEVICE)
        found = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(asked)) if c.token_ids is not None}
    assert found == {r.request_id: plain_tokens(target, r) for r in asked}
    assert len(shapes) > 1


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_of_first_tokens_are_those_of_plain_passes(num_top: int) -> None:
    """Padding has its own slots and writes to no row's."""
    asked = [request(i, [1 + i, 5, 7][: 1 + i % 3], cap=3, sampling=SAMPLINGS[i]) for i in range(8)]

    def done() -> dict[str, tuple[Any, ...]]:
        engine = make_engine(
            tiny_target(), NoDrafter(), packed(5, run_ahead=2), device=DEVICE, logprobs=num_top,
        )
        return {c.request_id: (c.token_ids, c.logprobs, c.top_logprobs) for c in engine.run(iter(asked))}

    plain = done()
    with padded_passes() as shapes:
        padded = done()
    assert shapes
    for name, (token_ids, logprobs, top) in plain.items():
        assert padded[name][0].tolist() == token_ids.tolist()
        np.testing.assert_allclose(padded[name][1], logprobs, atol=1e-6)
        assert (top is None) == (num_top == 0)
        for ours, theirs in zip(padded[name][2] or (), top or (), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)


DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "none": lambda slots: NoDrafter(),
    "chain": lambda slots: ChainDrafter(parallel_head(), tiny_target(window=5), 2, slots=slots),
    "chain, all positions": lambda slots: ChainDrafter(
        parallel_head(), tiny_target(window=5), 2, slots=slots, dead_positions=False
    ),
    "parallel": lambda slots: ParallelDrafter(parallel_head(), tiny_target(window=5), 2, slots=slots),
    "block": lambda slots: BlockDrafter(block_head(), tiny_target(window=5), 2, slots=slots),
    "tree": lambda slots: TreeDrafter(parallel_head(), tiny_target(window=5), TreeShape(topk=2, depth=2, nodes=5), slots=slots),
    "pard": lambda slots: PardDrafter(pard_model(), tiny_target().spec, 2, slots=slots, parallel=True),
}


@dataclass(frozen=True)
class Refills:
    """Rows that enter slots, and rows that decode meanwhile in others. The first `begin` tokens of a row are in its pages."""

    slots: int
    entering: dict[int, tuple[Request, int]]
    decoding: dict[int, Request]
    max_tokens: int

    def executor(self, drafter: Drafter) -> Executor:
        """With these rows in their slots; pages hold noise."""
        batch = packed(
            self.slots, row_buckets=(self.slots,), page_size=4, num_pages=1 + 8 * self.slots, max_len=32,
            num_verified=drafter.shape.num_verified,
        )
        executor = Executor(tiny_target(window=5), drafter, batch, device=DEVICE, options=RoundOptions())
        noise, rows = torch.Generator().manual_seed(1), executor.rows
        for layer in executor.cache.layers:
            layer.pages.copy_(torch.randn(layer.pages.shape, generator=noise, dtype=layer.pages.dtype))
        there = {slot: one for slot, (one, _) in self.entering.items()} | self.decoding
        rows.begin(list(there), list(there.values()), [()] * len(there))
        pages = {slot: tuple(range(1 + 8 * slot, 9 + 8 * slot)) for slot in there}
        rows.grant([(slot, 0, (own,) * len(rows.page_tables)) for slot, own in pages.items()])
        rows.live[list(self.decoding)] = 1
        return executor

    @property
    def passes(self) -> list[list[Segment]]:
        return [*chunks([(slot, begin, len(r.prompt_ids)) for slot, (r, begin) in self.entering.items()], self.max_tokens)]

    @property
    def mode(self) -> SamplingMode:
        return SamplingMode.union(SamplingMode.of(r.sampling, r.min_new_tokens) for r, _ in self.entering.values())


@st.composite
def refills(draw: st.DrawFn) -> Refills:
    slots = draw(st.integers(1, 7))
    prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
    kinds = draw(st.lists(st.sampled_from(["entering", "decoding", "free"]), min_size=slots, max_size=slots))
    kinds[draw(st.integers(0, slots - 1))] = "entering"
    made = [
        request(i, draw(prompts), cap=draw(st.integers(1, 4)), sampling=draw(st.sampled_from(SAMPLINGS)),
                stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True))))
        for i in range(slots)
    ]
    order = draw(st.permutations([slot for slot, kind in enumerate(kinds) if kind == "entering"]))
    entering = {slot: (made[slot], draw(st.integers(0, len(made[slot].prompt_ids) - 1))) for slot in order}
    decoding = {slot: made[slot] for slot, kind in enumerate(kinds) if kind == "decoding"}
    return Refills(slots, entering, decoding, draw(st.integers(1, 40)))


@pytest.mark.parametrize("name", DRAFTERS)
@settings(deadline=None, max_examples=15, suppress_health_check=SLOW)
@given(job=refills())
@torch.inference_mode()
def test_padded_passes_leave_what_plain_passes_leave_and_touch_no_other_row(name: str, job: Refills) -> None:
    """Tokens, state of all slots, what the drafter carries, K and V; of rows that decode meanwhile not a bit changes."""
    plain, padded = (job.executor(DRAFTERS[name](job.slots)) for _ in range(2))
    before = [layer.pages.clone() for layer in padded.cache.layers]
    with padded_passes() as shapes:
        launch = partial(prefill_chunk, padded.round, padded.rows)
        graphs = PrefillGraphs(padded.round, padded.rows, padded.graphs, launch, padded_chunk, padded.batch)
        for segments in job.passes:
            expected, found = prefill_chunk(plain.round, plain.rows, segments, job.mode), graphs.run(segments, job.mode)
            assert (found.result is None) == (expected.result is None) == (not any(s.last for s in segments))
            if found.result is not None and expected.result is not None:
                assert torch.equal(found.result.log, expected.result.log)
            expected.activate(plain.rows)
            found.activate(padded.rows)
    assert len(shapes) == len(job.passes)
    for field in SLOT_FIELDS:
        for ours, theirs in zip(padded.rows._tensors(field), plain.rows._tensors(field), strict=True):
            assert torch.equal(ours, theirs), field
    for ours, theirs in zip(padded.cache.draft_rows, plain.cache.draft_rows, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    others = [page for slot in {*range(job.slots)} - {*job.entering} for page in range(1 + 8 * slot, 9 + 8 * slot)]
    for layer, other, own in zip(padded.cache.layers, plain.cache.layers, before, strict=True):
        torch.testing.assert_close(layer.pages[:, 1:], other.pages[:, 1:], rtol=1e-9, atol=1e-12)
        assert torch.equal(layer.pages[:, others], own[:, others])


@settings(deadline=None, max_examples=30, suppress_health_check=SLOW)
@given(job=refills())
@torch.inference_mode()
def test_a_padded_batch_keeps_the_contract_of_flat_batches(job: Refills) -> None:
    """No row is without a token; dead rows have no keys; their tokens and those of no row go to slot 0 in every K/V group."""
    executor = job.executor(NoDrafter())
    inputs, page_size = PassInputs(job.slots, DEVICE), executor.cache.page_size
    for segments in job.passes:
        ordered, num_tokens = emitting_first(segments), sum(s.end - s.begin for s in segments)
        inputs.fill(ordered, job.slots)
        batch, slot_ids = inputs.batch(PassShape(64, job.slots, 64, 64, 128, job.mode), executor.rows, page_size=page_size)
        count = len(segments)
        assert sorted(slot_ids.tolist()) == list(range(job.slots))  # no two rows write to one line
        assert batch.cu_seqlens_q.diff().tolist() == [s.end - s.begin for s in ordered] + [1] * (job.slots - count)
        assert batch.kv_len.tolist() == [s.end for s in ordered] + [0] * (job.slots - count)
        for group in range(executor.cache.groups.num_groups):
            slots = batch.of_group(group).slot_mapping
            assert bool((slots[:num_tokens] > 0).all())
            assert not slots[num_tokens:].any()


def _tensors(done: Prefilled) -> list[Tensor]:
    assert done.result is not None
    return [done.result.log, *done.result.read]


class Copied:
    """A stand-in for CUDA graphs on a CPU: a capture changes nothing, and a replay writes to the captured addresses."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self.replays = executor, 0

    def capture(self, run: Callable[[], Prefilled]) -> tuple[Any, Prefilled]:
        executor, graphs = self._executor, self._executor.prefill_graphs
        assert graphs is not None
        state = [tensor for field in SLOT_FIELDS for tensor in executor.rows._tensors(field)]
        state += [graphs._inputs._buffer, *(layer.pages for layer in executor.cache.layers), *executor.cache.draft_rows]
        before = [tensor.clone() for tensor in state]
        outcome = run()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)

        def replay() -> None:
            self.replays += 1
            found = run()
            assert found.result is not None
            assert outcome.result is not None
            for there, value in zip(_tensors(outcome), _tensors(found), strict=True):
                there.copy_(value)

        return SimpleNamespace(replay=replay), outcome


@pytest.mark.parametrize("most", [0, 1, 16])
def test_a_shape_is_captured_when_it_is_asked_for_the_third_time(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, and if there are as many graphs as there may be, passes are plain. The capturing pass counts once."""
    monkeypatch.setattr("batchspec.engine.prefill.graphs.PREFILL_GRAPHS", most)
    rng = np.random.default_rng(2)
    asked = [request(i, rng.integers(0, VOCAB, 5 + i % 3).tolist(), cap=2 + i % 5, sampling=SAMPLINGS[i % 4]) for i in range(40)]
    target, drafter = tiny_target(window=5), ChainDrafter(parallel_head(), tiny_target(window=5), 2, slots=3)
    plain: list[Sequence[Segment]] = []

    engine = make_engine(target, drafter, packed(3, num_verified=2), device=DEVICE, prefill_graphs=True)
    graphs, pool = graphs_with(engine, ALWAYS)
    launch = graphs._launch

    def counted(segments: Sequence[Segment], mode: SamplingMode) -> Prefilled:
        plain.append(segments)
        return launch(segments, mode)

    monkeypatch.setattr(graphs, "_launch", counted)
    found = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(asked)) if c.token_ids is not None}
    assert found == {r.request_id: plain_tokens(target, r) for r in asked}
    assert graphs.num_captured == min(most, sum(uses >= CAPTURE_AT for uses in graphs._uses.values()))
    assert graphs.num_padded == graphs.num_captured + pool.replays
    assert len(plain) == sum(graphs._uses.values()) - graphs.num_captured
    assert (pool.replays > 1) == (most > 0)


def graphs_with(engine: Engine, cost: PrefillCost) -> tuple[PrefillGraphs, Copied]:
    """The passes of an engine on a CPU, as if it could capture them and had timed them."""
    graphs = engine.executor.prefill_graphs
    assert graphs is not None
    pool: Any = Copied(engine.executor)
    graphs.cost, graphs._captures, graphs._pool = cost, True, pool
    return graphs, pool


REPLAYED = replace(ALWAYS, replay=0.5)


def test_shapes_that_the_survey_predicts_are_captured_before_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no pass is launched kernel by kernel: other shapes are padded to the smallest captured one that holds them."""
    rng = np.random.default_rng(2)
    lengths = [40 - i for i in range(36)]
    asked = [
        request(i, [*map(int, rng.integers(0, VOCAB, n))], cap=2 + i % 5, sampling=SAMPLINGS[i % 4])
        for i, n in enumerate(lengths)
    ]
    target, drafter = tiny_target(window=5), ChainDrafter(parallel_head(), tiny_target(window=5), 2, slots=3)
    batch = packed(3, num_verified=2, max_len=64, prefill_tokens=128)
    engine = make_engine(target, drafter, batch, device=DEVICE, prefill_graphs=True)
    graphs, pool = graphs_with(engine, replace(REPLAYED, least=0.01))
    monkeypatch.setattr(graphs, "_launch", None)
    mode = SamplingMode.union(SamplingMode.of(one.sampling, 0) for one in asked)
    monkeypatch.setattr(SamplingMode, "union", lambda modes: mode)
    expected = ExpectedRows(prompt_lens=np.array(lengths, np.int32), common_tokens=0, output_tokens=4.0, num_rows=1000)
    with torch.inference_mode():
        captured = graphs.prepare(expected, mode, round_s=1.0)
    assert captured == graphs.num_captured > 1
    largest_first = [shape.num_tokens for shape in graphs._graphs]
    assert largest_first == sorted(set(largest_first), reverse=True)
    found = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(asked)) if c.token_ids is not None}
    assert found == {r.request_id: plain_tokens(target, r) for r in asked}
    assert graphs.num_captured == captured
    assert graphs.num_padded == pool.replays > 10


@pytest.mark.parametrize(
    ("num_rows", "cost", "limit_s", "most"),
    [
        (6, REPLAYED, 100.0, 12),  # no shape is used three times
        (1000, REPLAYED, 0.0, 12),
        (1000, REPLAYED, 1.9, 12),  # less time than two plain passes take
        (1000, REPLAYED, 100.0, 0),
        (1000, ALWAYS, 100.0, 12),  # no pass is replayed
    ],
)
def test_no_shape_is_captured_ahead_that_is_rare_or_has_no_time_or_no_graph_left(
    num_rows: int, cost: PrefillCost, limit_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured() -> int:
        graphs, _ = graphs_with(make_engine(tiny_target(), NoDrafter(), packed(3), device=DEVICE, prefill_graphs=True), cost)
        expected = ExpectedRows(prompt_lens=np.full(200, 20, np.int32), common_tokens=0, output_tokens=4.0, num_rows=num_rows)
        found = graphs.prepare(expected, GREEDY, round_s=1.0)
        assert found == graphs.num_captured
        return found

    monkeypatch.setattr("batchspec.engine.prefill.graphs.PREPARE_S", limit_s)
    monkeypatch.setattr("batchspec.engine.prefill.graphs.PREFILL_GRAPHS", most)
    assert captured() == 0
    monkeypatch.undo()
    num_rows, cost = 1000, replace(REPLAYED, least=0.01)
    assert captured() > 0


def test_a_shape_is_captured_once_padding_to_a_larger_one_has_cost_as_much_as_three_plain_passes() -> None:
    """A row of 30 tokens has a shape of 32 tokens. Padded to 96 it loses 64 of the 160 tokens' time that a plain pass loses."""
    batch = packed(2, max_len=128, prefill_tokens=128)
    engine = make_engine(tiny_target(), NoDrafter(), batch, device=DEVICE, prefill_graphs=True)
    graphs, pool = graphs_with(engine, PrefillCost(least=160.0, token=1.0, replay=1.0))
    with torch.inference_mode():
        for _ in range(CAPTURE_AT):
            graphs.run(rows_of((0, 50), (0, 40)), GREEDY)
        (large,) = graphs._graphs
        assert (large.num_tokens, pool.replays) == (96, 0)
        for replays in range(1, 8):
            graphs.run(rows_of((0, 30)), GREEDY)
            assert (graphs.num_captured, pool.replays) == (1, replays)
        graphs.run(rows_of((0, 30)), GREEDY)  # the eighth: 8 * 64 / 160 > 3
        assert graphs.num_captured == 2
        graphs.run(rows_of((0, 20), (0, 60)), GREEDY)
        assert (graphs.num_captured, pool.replays) == (2, 8), "as many tokens and fewer rows: it needs no graph of its own"


@pytest.mark.parametrize(("launches_s", "replay_s"), [(2.0, 0.25), (0.0, None)])
def test_the_replay_of_a_short_pass_is_timed_where_it_pays(
    launches_s: float, replay_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 17 tokens are padded to 24 where launches take longer than these."""
    clock = [0.0]
    engine = make_engine(tiny_target(), NoDrafter(), packed(3), device=DEVICE, prefill_graphs=True)
    graphs = engine.executor.prefill_graphs
    assert graphs is not None

    class Timed(Copied):
        def capture(self, run: Callable[[], Prefilled]) -> tuple[Any, Prefilled]:
            graph, outcome = super().capture(run)

            def replay() -> None:
                clock[0] += 0.25
                graph.replay()

            return SimpleNamespace(replay=replay), outcome

    pool: Any = Timed(engine.executor)
    graphs._captures, graphs._pool = True, pool
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("batchspec.engine.prefill.passes.time.perf_counter", lambda: clock[0])
    plain = PrefillCost(least=launches_s, token=0.05)
    with torch.inference_mode():
        cost = graphs.learn(plain, GREEDY, longest=40)
    expected = plain if replay_s is None else replace(plain, replay=replay_s, most_replayed=SHORT)
    assert cost == expected == graphs.cost
    assert graphs.num_captured == (replay_s is not None)
    done = {c.request_id: c.token_ids.tolist() for c in engine.run(iter([request(7, [7, 5], cap=3)])) if c.token_ids is not None}
    assert done == {r.request_id: plain_tokens(tiny_target(), r) for r in [request(7, [7, 5], cap=3)]}


def test_no_pass_is_padded_before_passes_were_timed_nor_without_being_asked_for() -> None:
    for asked in (False, True):
        engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE, prefill_graphs=asked)
        assert len(list(engine.run(request(i, [i, 5], cap=3) for i in range(6)))) == 6
        graphs = engine.executor.prefill_graphs
        assert (graphs is not None) == asked
        assert graphs is None or graphs.num_padded == 0


def shapes_of(drafter: Drafter | None = None, *, target: Target | None = None, **options: Any) -> PassShapes:
    own = drafter or NoDrafter()
    engine = make_engine(target or tiny_target(), own, packed(32, num_verified=own.draft_len), device=DEVICE, **options)
    return PassShapes(engine.executor.round, packed(24, prefill_tokens=4096))


SHAPES = cache(shapes_of)


def rows_of(*spans: tuple[int, int]) -> list[Segment]:
    return [Segment(slot, begin, end, True) for slot, (begin, end) in enumerate(spans)]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 1)], (1, 1, 64, 64, 1)),
        ([(0, 50)] * 3, (192, 4, 64, 64, 192)),  # 150 tokens and a dead row
        ([(0, 48)] * 2, (96, 2, 64, 64, 96)),
        ([(0, 65), (0, 30)], (96, 2, 128, 128, 96)),
        ([(0, 65), (0, 30), (0, 1)], (128, 4, 128, 128, 128)),  # 96 tokens and a dead row
        ([(300, 330)] * 20, (768, 24, 64, 512, 12288)),  # a common beginning of 300 tokens: 600 tokens, 6,600 keys
        ([(0, 2000), (0, 2000)], (4096, 2, 2048, 2048, 4096)),
        ([(0, 1365)] * 3, (4096, 4, 2048, 2048, 4096)),  # as large as the largest pass
    ],
)
def test_a_pass_is_padded_to_powers_of_two_and_midpoints(spans: list[tuple[int, int]], expected: tuple[int, ...]) -> None:
    """tokens, rows (at most one a slot), tokens and keys of a row, keys of all rows"""
    num_tokens, num_rows, max_q, max_kv, max_keys = expected
    assert shapes_of().of(rows_of(*spans), GREEDY, ALWAYS) == PassShape(num_tokens, num_rows, max_q, max_kv, max_keys, GREEDY)


@example([(0, 400)] * 11)  # more tokens than a graph has, which drawn lists rarely are
@example([(900, 1)] * 24)
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), min_size=1, max_size=24))
def test_a_pass_stays_within_the_bounds_of_its_shape(rows: list[tuple[int, int]]) -> None:
    segments = rows_of(*((begin, begin + length) for begin, length in rows))
    shape = SHAPES().of(segments, GREEDY, ALWAYS)
    num_tokens, num_keys = sum(length for _, length in rows), sum(s.end for s in segments)
    if shape is None:
        assert num_tokens + 24 > 4096 or num_keys > 2 * 4096
        return
    assert num_tokens + shape.num_rows - len(rows) <= shape.num_tokens <= 4096
    assert len(rows) <= shape.num_rows <= 24
    assert max(length for _, length in rows) <= shape.max_q <= shape.max_kv <= SHORT
    assert max(s.end for s in segments) <= shape.max_kv
    assert num_keys <= shape.max_keys <= 4 * 4096


@given(st.lists(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), min_size=1, max_size=24), min_size=2, max_size=2))
def test_a_shape_holds_the_passes_that_are_padded_to_it_and_joint_bounds_hold_both(passes: list[list[tuple[int, int]]]) -> None:
    exact = [PassShape.exact(rows_of(*((begin, begin + n) for begin, n in rows)), GREEDY) for rows in passes]
    one, other = (SHAPES().fitting(numbers, ALWAYS) for numbers in exact)
    if one is None or other is None:
        return
    assert one.holds(exact[0])
    assert not one.holds(replace(exact[0], mode=SamplingMode(random=True)))
    for name in ("num_tokens", "num_rows", "max_q", "max_kv", "max_keys"):
        assert not one.holds(replace(exact[0], **{name: getattr(one, name) + 1}))
    if one.holds(exact[1]):
        assert exact[1].num_tokens + one.num_rows - exact[1].num_rows <= one.num_tokens
    if one.num_tokens == other.num_tokens and one.num_rows == other.num_rows:
        assert all(one.with_bounds_of(other).holds(numbers) for numbers in exact)


def test_passes_that_no_graph_can_hold_or_that_padding_makes_slower_stay_plain() -> None:
    pass_, shapes = rows_of((0, 30), (0, 40)), shapes_of()  # 70 tokens, padded to 96
    assert shapes.of(pass_, GREEDY, ALWAYS) is not None
    assert shapes.of(pass_, SamplingMode(constrained=True), ALWAYS) is not None
    assert shapes.of(pass_, SamplingMode(constrained=True, may_hold=True), ALWAYS) is None
    assert shapes.of(rows_of((0, SHORT)), GREEDY, ALWAYS) is not None
    assert shapes.of(rows_of((SHORT, SHORT + 1)), GREEDY, ALWAYS) is None
    assert shapes.of(rows_of(*[(0, 1366)] * 3), GREEDY, ALWAYS) is None  # 4,098 tokens
    assert shapes.of(rows_of(*[(1900, 1901)] * 9), GREEDY, ALWAYS) is None  # 17,109 keys
    assert shapes.of(pass_, GREEDY, None) is None
    assert shapes.of(pass_, GREEDY, PrefillCost(least=96.0, token=1.0)) is not None
    assert shapes.of(pass_, GREEDY, PrefillCost(least=95.0, token=1.0)) is None
    assert shapes.of(rows_of((0, 48), (0, 48)), GREEDY, PrefillCost(least=1.0, token=1.0)) is not None  # nothing is padded


def test_engines_whose_passes_stay_plain() -> None:
    pass_ = rows_of((0, 30), (0, 40))
    ordered = Target.load(Path(), tiny_spec(dtype="bfloat16").in_one_order(), dtype=torch.bfloat16, device=DEVICE, dummy=True)
    with_sink = ChainDrafter(parallel_head(), tiny_target(window=5), 2, slots=32, window=4, sink=1)
    for shapes in (shapes_of(target=ordered), shapes_of(with_sink, target=tiny_target(window=5))):
        assert shapes.of(pass_, GREEDY, ALWAYS) is None


def test_ranks_pass_plainly() -> None:
    def shape(ranks: Any) -> object:
        return shapes_of(target=part_of(tiny_spec(5), ranks)).of(rows_of((0, 30)), GREEDY, ALWAYS)

    assert on_ranks(2, shape) == [None, None]


@pytest.mark.parametrize("asked", [False, True])
def test_bench_and_jobs_ask_by_the_same_key(asked: bool) -> None:
    words = ["o", "n", "--draft", "none", *([] if asked else ["--opt", "prefill_graphs=false"])]
    args = parse(words)
    config = config_of(args, [*variant_specs(args)][-1])
    assert config.ablation.prefill_graphs == asked
    assert compose([]).ablation.prefill_graphs
    assert compose([f"ablation.prefill_graphs={asked}"]).ablation == replace(compose([]).ablation, prefill_graphs=asked)
    engine = build_engine(config, tiny_target(), NoDrafter(), packed(2))
    assert (engine.executor.prefill_graphs is not None) == asked
