"""The engine on a GPU, rounds captured as graphs, against itself on the CPU, one row at a time: the same tokens in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.pages import PagePool
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.corpus import Corpus
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import load_head
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.prefill.passes import Prefilled
from batchspec.engine.rounds.graphs import GraphPool
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.slots import expected_pages
from batchspec.engine.step import Segment
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import expected_shapes
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request, SamplingParams
from tests.helpers.block_heads import tiny_block
from tests.helpers.engines import decode, make_engine, packed, request, share_always
from tests.helpers.heads import distilled_tensors, random_tensors, tiny_design, write_head
from tests.helpers.stand_ins import dense_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VOCAB, MAX_LEN = 89, 256
PLAIN = ("none", "lookup", "lookup with a corpus", "window")
TREE = TreeShape(topk=3, depth=3, nodes=14)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.8, top_k=12, top_p=0.9),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(frequency_penalty=0.5, logit_bias=((3, 1.5), (7, -2.5))),
)


class _Noise:
    """The same weights on every device."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype, self.device, rng = dtype, device, torch.Generator().manual_seed(0)
        self._tensors = {name: torch.randn(shape, generator=rng) * 0.25 for name, shape in expected_shapes(spec).items()}

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return (torch.ones_like(tensor) if name.endswith("norm.weight") else tensor).to(self.device, self.dtype)

    def stored(self, name: str) -> torch.Tensor:
        return self.tensor(name)

    def entry(self, name: str, index: int) -> torch.Tensor:
        return self.tensor(name)[index]


@cache
def windowed_target(kind: str, windows: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> Target:
    """The target with these windows, one a layer."""
    spec = dense_spec(
        family="llama", hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=64,
        vocab_size=VOCAB, rms_eps=1e-6, rope=RopeSpec(type="default", theta=1000.0), windows=windows,
        tie=False, qk_norm=True, eos_ids=(), max_len=512, dtype="float32", generation={},
    )
    device = torch.device(kind)
    return Target(spec, _Noise(spec, device, dtype), device)


def target(kind: str, window: int | None = None, num_layers: int = 2) -> Target:
    return windowed_target(kind, (window, *[None] * (num_layers - 1)))


def eagle(
    folder: Path, kind: str, draft_len: int, slots: int, *, rows: list[list[int]] | None = None, num_layers: int = 2,
    tree: TreeShape | None = None, own: Target | None = None, **options: Any,
) -> Drafter:
    """A head of `own`, by default the target without windows."""
    own = own or target(kind, num_layers=num_layers)
    taps = (0, 1, 2) if num_layers == 2 else (1, 2, 3)
    design = tiny_design(own.spec, heads=2, kv_heads=2, head_dim=64, draft_vocab=VOCAB, taps=taps)
    tensors = random_tensors(design) if rows is None else distilled_tensors(target("cpu"), design, rows)
    head = load_head(write_head(folder, design, tensors), own.spec, dtype=own.dtype, device=own.device, aux_layers="input")
    if tree is not None:
        return TreeDrafter(head, own, tree, slots=slots, **options)
    return ChainDrafter(head, own, draft_len, slots=slots, **options)


def pard(draft_len: int, slots: int, *, parallel: bool) -> Drafter:
    """Other layers of the same noise draft."""
    model = target("cuda", 9, num_layers=3)
    drafter = PardModel(PardSpec(model=model.spec, mask_token_id=VOCAB - 1), model)
    return PardDrafter(drafter, target("cuda").spec, draft_len, slots=slots, parallel=parallel)


def block(draft_len: int, slots: int, *, own: Target | None = None, **options: Any) -> Drafter:
    """A random head with Markov matrices; one of its layers has a causal window."""
    own, narrow = own or target("cuda"), options.pop("narrow", {})
    head = tiny_block(own.spec, dtype=own.dtype, device=own.device, **narrow)
    return BlockDrafter(head, own, draft_len, slots=slots, **options)


def requests(
    count: int, *, stops: bool = True, samplings: tuple[SamplingParams, ...] = SAMPLINGS, seed: int = 0, longest: int = 90
) -> list[Request]:
    rng = np.random.default_rng(seed)
    common = rng.integers(0, VOCAB, 40).tolist()
    found = []
    for i in range(count):
        prompt = (common if i % 3 == 0 else []) + rng.integers(0, VOCAB, rng.integers(1, 60)).tolist()
        found.append(
            request(
                i,
                prompt,
                cap=int(rng.integers(1, longest)),
                sampling=samplings[i % len(samplings)],
                stop=("AB", "Q") if stops and i % 4 == 1 else (),
                stop_ids=(7,) if i % 5 == 2 else (),
                predicted=int(rng.integers(1, 90)),
            )
        )
    return found


def run(
    own: Target, drafter: Drafter, batch: PackedBatch, asked: list[Request], **options: Any
) -> tuple[Engine, list[Completion]]:
    engine = make_engine(own, drafter, batch, device=own.device, decode=decode, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 4)
        done = list(engine.run(iter(asked)))
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
    return engine, done


def tokens(done: list[Completion]) -> dict[str, list[int]]:
    return {c.request_id: c.token_ids.tolist() for c in done if c.token_ids is not None}


def alone(asked: list[Request], own: Target | None = None) -> dict[str, list[int]]:
    """Every request by itself on the CPU, without drafts."""
    batch = packed(1, page_size=16, max_len=MAX_LEN, num_pages=40)
    return tokens(run(own or target("cpu"), NoDrafter(), batch, asked)[1])


def shape(slots: int, **changes: object) -> PackedBatch:
    values = {"page_size": 16, "max_len": MAX_LEN, "num_pages": 400, "run_ahead": 2, "prefill_tokens": 100, **changes}
    return packed(slots, row_buckets=tuple(sorted({1, 2, 4, slots})), **values)


def lookup(draft_len: int) -> LookupDrafter:
    corpus = Corpus(2000, lengths=(1, 2, 3), device=torch.device("cuda"))
    return LookupDrafter(draft_len, min_ngram=1, max_ngram=3, corpus=corpus)


def hybrid(folder: Path, draft_len: int, slots: int) -> HybridDrafter:
    head = eagle(folder, "cuda", draft_len - 2, slots)
    assert isinstance(head, ChainDrafter)
    return HybridDrafter(head, lookup(draft_len), slots=slots, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "name",
    [
        *PLAIN, "pard", "pard chain", "block", "block, masks", "dflash2", "eagle3", "eagle3 general", "hybrid", "tree",
        "large tree",
    ],
)
def test_graphs_give_the_tokens_of_one_row_at_a_time_on_the_cpu(name: str, tmp_path: Path) -> None:
    asked, slots = requests(40), 8
    general: dict[str, Any] = {"dead_positions": False, "uniform_slots": False, "argmax": False}
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "lookup with a corpus": partial(lookup, 4),
        "hybrid": partial(hybrid, tmp_path, 4, slots),
        "window": partial(WindowDrafter, target("cuda"), 3, slots=slots, window=12, sink=2),
        "pard": partial(pard, 4, slots, parallel=True),
        "pard chain": partial(pard, 3, slots, parallel=False),
        "block": partial(block, 4, slots),
        "dflash2": partial(block, 4, slots, narrow={"dflash2": True}),
        "block, masks": partial(block, 3, slots, narrow={"from_anchor": False, "confidence": "none"}, window=12, sink=2),
        "eagle3": partial(eagle, tmp_path, "cuda", 3, slots),
        "eagle3 general": partial(eagle, tmp_path, "cuda", 3, slots, **general),
        "tree": partial(eagle, tmp_path, "cuda", 3, slots, tree=TREE),
        "large tree": partial(eagle, tmp_path, "cuda", 3, slots, tree=replace(TREE, topk=10, depth=6, nodes=60)),
    }
    options = RoundOptions(uniform_slots=name != "eagle3 general", argmax=name != "eagle3 general")
    engine, done = run(target("cuda"), drafters[name](), shape(slots), asked, options=options)
    assert engine.executor.graphs.num_captured > 0
    assert tokens(done) == alone(asked)


@pytest.mark.parametrize("name", ["none", "lookup", "pard", "eagle3", "hybrid", "tree"])
@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_graphs_forbid_ngrams_as_the_cpu_does(name: str, heat: float, tmp_path: Path) -> None:
    """Greedy rows that have only this rule (the output product may apply its mask), sampled rows, and rows without the rule."""
    rules = ((2, 60, (3, 9)), None, (1, 12, ()), (3, 1000, ()))
    samplings = tuple(SamplingParams(temperature=heat, no_repeat_ngram=rule) for rule in rules)
    asked, slots = requests(40, samplings=samplings), 8
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "pard": partial(pard, 4, slots, parallel=True),
        "eagle3": partial(eagle, tmp_path, "cuda", 3, slots),
        "hybrid": partial(hybrid, tmp_path, 4, slots),
        "tree": partial(eagle, tmp_path, "cuda", 3, slots, tree=TREE),
    }
    engine, done = run(target("cuda"), drafters[name](), shape(slots), asked)
    assert engine.executor.graphs.num_captured > 0
    assert tokens(done) == alone(asked)


@pytest.mark.parametrize("name", ["none", "eagle3", "eagle3 general", "pard", "window"])
def test_rounds_plan_for_longer_rows_than_those_surveyed_while_there_is_one(name: str, tmp_path: Path) -> None:
    """Most rows have at most 54 tokens, for which rounds are captured; the others may have as many as the job allows."""
    general: dict[str, Any] = {"dead_positions": False, "uniform_slots": False, "argmax": False}
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "eagle3": partial(eagle, tmp_path, "cuda", 3, 8),
        "eagle3 general": partial(eagle, tmp_path, "cuda", 3, 8, **general),
        "pard": partial(pard, 4, 8, parallel=True),
        "window": partial(WindowDrafter, target("cuda"), 3, slots=8, window=12, sink=2),
    }
    rng = np.random.default_rng(3)
    lengths = [(int(rng.integers(1, 30)), int(rng.integers(1, 24))) for _ in range(60)] + [(90, 80), (20, 35), (1, 120)]
    asked = [request(i, rng.integers(0, VOCAB, prompt).tolist(), cap=cap) for i, (prompt, cap) in enumerate(lengths)]
    options = RoundOptions(uniform_slots=name != "eagle3 general", argmax=name != "eagle3 general")
    engine, done = run(target("cuda"), drafters[name](), shape(8, longest_row=40), asked, options=options)
    assert {captured.max_kv for captured in engine.executor.graphs._graphs} == {64, None}
    assert tokens(done) == alone(asked)


def test_rows_that_end_soon_decode_in_rounds_over_all_slots(tmp_path: Path) -> None:
    """The last rows too: their tokens are the same, and no graph is captured for fewer rows."""
    rng = np.random.default_rng(5)
    asked = [request(i, rng.integers(0, VOCAB, 9).tolist(), cap=int(rng.integers(1, 9))) for i in range(20)]
    engine = make_engine(target("cuda"), eagle(tmp_path, "cuda", 2, 8), shape(8), device=torch.device("cuda"), adaptive=True)
    engine.prepare(SamplingMode(), most_rounds=8)
    assert engine.batch.row_buckets == (8,)
    captured = engine.executor.graphs.num_captured
    assert tokens(list(engine.run(iter(asked)))) == alone(asked)
    assert engine.executor.graphs.num_captured == captured


def test_rows_with_a_common_beginning_read_it_once_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_always(monkeypatch)
    rng = np.random.default_rng(5)
    beginnings = [rng.integers(0, VOCAB, 132).tolist() for _ in range(3)]
    asked = [
        request(i, beginnings[i % 3] + rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(), cap=int(rng.integers(1, 50)))
        for i in range(40)
    ]
    engine = make_engine(target("cuda"), eagle(tmp_path, "cuda", 2, 8), shape(8), device=torch.device("cuda"))
    shared: list[bool] = []
    engine.on_round = lambda totals: shared.append(engine.scheduler.prefix_groups.any)
    assert tokens(list(engine.run(iter(asked)))) == alone(asked)
    assert any(shared)
    assert engine.totals.cached_tokens > 20 * 128


@pytest.mark.parametrize("drafts", [False, True], ids=["none", "eagle3"])
@pytest.mark.parametrize("seed", range(12))
def test_rows_with_common_beginnings_keep_their_tokens_while_the_batch_shrinks(seed: int, drafts: bool, tmp_path: Path) -> None:
    """Few rows, so that most rounds are the tail; pages get a new owner while they hold keys of a row that failed."""
    rng = np.random.default_rng(seed)
    asked: list[Request] = []
    for _ in range(rng.integers(1, 5)):
        beginning = rng.integers(0, VOCAB, int(rng.integers(128, 150))).tolist()
        for _ in range(rng.integers(1, 6)):
            own = rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()
            cap = int(rng.choice([2, 5, 12, 40]))
            asked.append(request(len(asked), beginning + own, cap=cap, stop=("AB",) if rng.random() < 0.3 else (), predicted=4))
    slots = int(rng.choice([4, 8, 16]))
    drafter = eagle(tmp_path, "cuda", 2, slots) if drafts else NoDrafter()
    engine = make_engine(target("cuda"), drafter, shape(slots, run_ahead=seed % 3), device=torch.device("cuda"), decode=decode)
    take = PagePool.take

    def poison(pool: PagePool, count: int) -> list[int]:
        pages = take(pool, count)
        index = torch.tensor(pages, dtype=torch.int64, device="cuda")
        for layer in engine.executor.cache.layers:
            layer.pages[0].index_fill_(0, index, float("nan"))
            layer.pages[1].index_fill_(0, index, 1e4)
        return pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagePool, "take", poison)
        share_always(patch)
        done = list(engine.run(iter(asked)))
    assert tokens(done) == alone(asked)


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree"])
def test_a_row_whose_logits_are_not_finite_fails_alone(name: str, tmp_path: Path) -> None:
    """Those with one token in the prompt, and those that emit it."""
    bad, slots = 5, 8
    own = target("cuda")
    healthy = own.embedding[bad].clone()
    asked = requests(60, stops=False)
    expected = alone(asked)
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "lookup": partial(LookupDrafter, 4, min_ngram=1, max_ngram=3),
        "eagle3": partial(eagle, tmp_path, "cuda", 3, slots),
        "tree": partial(eagle, tmp_path, "cuda", 3, slots, tree=TREE),
    }
    drafter = drafters[name]()
    own.embedding[bad] = float("nan")
    try:
        _, done = run(own, drafter, shape(slots), asked)
    finally:
        own.embedding[bad] = healthy
    found = {c.request_id: c for c in done}
    failed = 0
    for one in asked:
        fails = bad in one.prompt_ids or bad in expected[one.request_id][:-1]
        failed += fails
        error = found[one.request_id].error
        assert (error is not None) == fails
        if not fails:
            assert tokens(done)[one.request_id] == expected[one.request_id]
    assert 0 < failed < len(asked)


def test_a_distilled_head_is_mostly_right_and_changes_nothing(tmp_path: Path) -> None:
    asked = requests(16, stops=False, samplings=(SamplingParams(),))
    expected = alone(asked)
    rows = [r.prompt_ids.tolist() + expected[r.request_id] for r in asked]
    drafter = eagle(tmp_path, "cuda", 3, 4, rows=[row for row in rows if len(row) > 8])
    engine, done = run(target("cuda"), drafter, shape(4), asked)
    assert tokens(done) == expected
    assert engine.totals.accepted > engine.totals.row_rounds


def test_a_distilled_head_s_trees_are_right_more_often_than_its_chains(tmp_path: Path) -> None:
    asked = requests(16, stops=False, samplings=(SamplingParams(),))
    expected = alone(asked)
    rows = [row for r in asked if len(row := r.prompt_ids.tolist() + expected[r.request_id]) > 8]
    accepted = []
    for tree in (None, TREE):
        engine, done = run(target("cuda"), eagle(tmp_path, "cuda", 3, 4, rows=rows, tree=tree), shape(4), asked)
        assert tokens(done) == expected
        accepted.append(engine.totals.accepted / engine.totals.row_rounds)
    assert accepted[1] > accepted[0]


@pytest.mark.whole_gpu
def test_the_engine_that_chooses_between_trees_and_no_drafts_changes_nothing(tmp_path: Path) -> None:
    asked = requests(60)
    engine, done = run(target("cuda"), eagle(tmp_path, "cuda", 3, 8, tree=TREE), shape(8), asked, adaptive=True)
    assert tokens(done) == alone(asked)
    assert 0 < engine.totals.drafted < 2.5 * engine.totals.row_rounds


@pytest.mark.parametrize("seed", range(4))
def test_run_ahead_with_stop_strings_refills_and_preemptions_changes_nothing(seed: int, tmp_path: Path) -> None:
    """Pages are so scarce that rows are preempted while launched rounds still write to them."""
    asked = [
        replace(r, predicted_tokens=1) for r in requests(100, seed=seed, longest=150)
    ]  # admission trusts it and takes in too many
    drafter = eagle(tmp_path, "cuda", 1 + seed, 16)
    engine, done = run(target("cuda"), drafter, shape(16, num_pages=20, run_ahead=seed), asked)
    assert engine.totals.preempted > 0
    assert tokens(done) == alone(asked)


@pytest.mark.whole_gpu
def test_the_engine_that_chooses_its_draft_lengths_changes_nothing(tmp_path: Path) -> None:
    asked = requests(60)
    expected = alone(asked)
    assert tokens(run(target("cuda"), NoDrafter(), shape(8), asked, adaptive=True)[1]) == expected
    drafter = eagle(tmp_path, "cuda", 3, 8)
    engine, done = run(target("cuda"), drafter, shape(8), asked, adaptive=True)
    assert tokens(done) == expected
    assert 0 < engine.totals.drafted < 2.5 * engine.totals.row_rounds  # a random head: K = 3 never pays


def test_a_graph_is_captured_although_all_earlier_ones_are_gone_but_not_their_tensors() -> None:
    pool, x = GraphPool(), torch.ones(4, device="cuda")
    graph, kept = pool.capture(lambda: x + 1)
    del graph
    graph, found = pool.capture(lambda: x * 3)
    graph.replay()
    assert found.tolist() == [3.0] * 4
    assert kept.shape == found.shape


@pytest.mark.parametrize(("longest", "rehearsed"), [(40, 40), (None, 127)])
def test_prefill_is_rehearsed_with_rows_as_long_as_the_job_has_seen(
    longest: int | None, rehearsed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones may need another attention, which would be compiled for nothing."""
    batch = shape(4, longest_prompt=longest, max_len=128, prefill_tokens=400)
    engine = make_engine(target("cuda"), NoDrafter(), batch, device=torch.device("cuda"), decode=decode)
    ends: list[int] = []
    launch = engine.executor.prefill_pass

    def recorded(segments: Sequence[Segment], mode: SamplingMode) -> Prefilled:
        ends.append(max(segment.end for segment in segments))
        return launch(segments, mode)

    monkeypatch.setattr(engine.executor, "prefill_pass", recorded)
    engine.prepare(SamplingMode())
    assert max(ends) == rehearsed


def test_graph_of_a_chain_round_holds_no_general_kernel_of_torch(tmp_path: Path) -> None:
    """What seeds of slow rounds look like in a trace: prefix sums, fills, casts, concatenations, softmax."""
    from torch.profiler import ProfilerActivity, profile

    asked = requests(4, stops=False, samplings=(SamplingParams(),))
    drafter = eagle(tmp_path, "cuda", 3, 4, num_layers=5)
    engine, _ = run(target("cuda", num_layers=5), drafter, shape(4), asked)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for graph, _ in engine.executor.graphs._graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    names = [event.key for event in trace.key_averages()]
    assert any("verify" in name for name in names)
    for word in ("scan", "cumsum", "FillFunctor", "direct_copy", "CatArray", "softmax", "SoftMax", "copy_kernel_cuda"):
        assert not [name for name in names if word in name], names


def scores(done: Completion) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of the tokens of a prompt but the first, which has none, and of the likeliest tokens at each place."""
    assert done.prompt_logprobs is not None
    assert done.prompt_top_logprobs is not None
    return done.prompt_logprobs[1:], done.prompt_top_logprobs[1][1:]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "windows"])
def test_prompts_are_scored_on_the_card_as_on_the_cpu(kind: str) -> None:
    """Long and short passes, shared prefixes, more rows than slots. In bf16 scores are as near to those of fp32 as the CPU comes:
    0.02 in the mean and 0.13 at most. Their standard deviation is 1.8."""
    windows = (9, None) if kind == "windows" else (None, None)
    asked = [replace(one, max_new_tokens=0, predicted_tokens=0, stop=(), stop_ids=()) for one in requests(40, stops=False)]

    def scored(name: str, dtype: torch.dtype) -> dict[int, Completion]:
        batch = replace(shape(8, prefill_tokens=64) if name == "cuda" else shape(8, run_ahead=0), num_verified=0)
        model = windowed_target(name, windows, dtype)
        engine = make_engine(model, NoDrafter(), batch, device=model.device, logprobs=4, scores=True, adaptive=True)
        engine.prepare(SamplingMode())
        found = {done.row_index: done for done in engine.run(iter(asked))}
        assert engine.executor.graphs.num_captured == 0
        assert found.keys() == set(range(40))
        assert name == "cpu" or sum(done.cached_tokens for done in found.values()) > 0
        return found

    def distance(found: dict[int, Completion]) -> torch.Tensor:
        """Of all scores and likeliest tokens from those in fp32: in the mean, and the largest."""
        gaps = [np.abs(own - right) for row in exact for own, right in zip(scores(found[row]), scores(exact[row]), strict=True)]
        every = torch.from_numpy(np.concatenate(gaps, axis=None))
        return torch.stack((every.mean(), every.max()))

    dtype, exact = torch.bfloat16 if kind == "bf16" else torch.float32, scored("cpu", torch.float32)
    own = distance(scored("cuda", dtype))
    if kind == "bf16":
        assert (own < 1.5 * distance(scored("cpu", dtype))).all(), own
    else:
        assert own.max() < 2e-3, own


def test_rows_with_counts_and_biases_come_after_graphs_without_them_were_captured() -> None:
    """As in later calls of a warm engine: the state is allocated then, and graphs of their mode are captured."""
    plain = requests(12, samplings=(SamplingParams(), SamplingParams(temperature=0.9)))
    more = requests(
        12, samplings=(SamplingParams(frequency_penalty=0.7), SamplingParams(logit_bias=((3, 2.5), (9, -100.0)))), seed=1
    )
    engine = make_engine(target("cuda"), NoDrafter(), shape(4), device=torch.device("cuda"), decode=decode)
    engine.prepare(SamplingMode())
    for asked in (plain, more, plain):
        assert tokens(list(engine.run(iter(asked)))) == alone(asked)
