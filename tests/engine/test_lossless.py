"""Tokens depend on the request alone: not on drafter, K, which drafts are verified, slots, pages, order, run-ahead, chunks or
compaction.

The reference decodes each request by itself, one token at a time, without cache or batch (tests/helpers/engines.py); the model is
float64, where the comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft import corpus as corpus_module
from batchspec.draft.base import Drafter
from batchspec.draft.block import BlockDrafter
from batchspec.draft.block_head import BlockWeights
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.corpus import Corpus
from batchspec.draft.head import Head
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec
from batchspec.draft.shapes import TreeShape
from batchspec.draft.tree import TreeDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.draft.window import WindowDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.rounds.records import RoundOptions, RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.step import RoundShape, ScheduledRound
from batchspec.model.layers.attention import block
from batchspec.model.layers.attention.kv_layout import LayerKV
from batchspec.model.layers.attention.plan import AttentionPlan, plan_attention
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Repetition, Request, SamplingParams
from tests.helpers.block_heads import tiny_block
from tests.helpers.engines import (
    DEVICE,
    VOCAB,
    ForcedDrafter,
    decode,
    full_logits,
    make_engine,
    packed,
    plain_rows,
    plain_tokens,
    request,
    tiny_target,
)
from tests.helpers.row_lengths import LENGTHS

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.3),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, min_p=0.6),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(frequency_penalty=0.75),
    SamplingParams(temperature=0.8, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((3, 1.5), (7, -2.5))),
    SamplingParams(repetition_penalty=1.25, logit_bias=((0, -100.0), (5, 2.25), (VOCAB - 1, 3.0))),
    SamplingParams(bad_words=tuple((i,) for i in range(2, VOCAB, 5))),
    SamplingParams(bad_words=tuple((i, j) for i in range(8) for j in range(8))),
    SamplingParams(temperature=1.2, bad_words=(*((i, (i * 7 + 3) % VOCAB) for i in range(VOCAB)), (3, 4, 5), (5,) * 8)),
    SamplingParams(no_repeat_ngram=(2, 100, ())),
    SamplingParams(no_repeat_ngram=(3, 7, tuple(range(0, VOCAB, 4)))),
    SamplingParams(no_repeat_ngram=(1, 5, (2, 3))),
    SamplingParams(temperature=0.5, top_k=4, no_repeat_ngram=(2, 9, (1,))),
)


REPETITIONS = (
    None,
    Repetition(min_pattern_size=1, max_pattern_size=1, min_count=2),
    Repetition(min_pattern_size=2, max_pattern_size=9, min_count=2),
    Repetition(min_pattern_size=1, max_pattern_size=4, min_count=3),
)


def run(
    requests: list[Request],
    batch: PackedBatch,
    drafter: Drafter,
    *,
    uniform_slots: bool = True,
    refill_dead: bool = True,
    short_cap: int = 512,
    dtype: torch.dtype = torch.float64,
    fp8_kv: bool = False,
    lengths: int | None = None,
) -> tuple[dict[str, list[int]], dict[str, Completion], Engine]:
    """The job through the engine. A `short_cap` below the caps makes admission trust predictions, so that pages run out.

    lengths  seed with which each round draws how many drafts it verifies, and of which rows; None: all drafts of all rows
    """
    engine = make_engine(
        tiny_target(dtype, window=5, fp8_kv=fp8_kv),
        drafter,
        batch,
        device=DEVICE,
        options=RoundOptions(uniform_slots=uniform_slots),
        decode=decode,
        refill_dead=refill_dead,
        lengths=lengths,
    )
    launch = engine.executor._launch_round

    def launch_checked(scheduled: ScheduledRound) -> None:
        rows = engine.executor.rows
        assert not rows.live[engine.slots.free()].any(), "a slot without a row is live on the device"
        # Its newest token is below its limit, and drafts follow: whatever it emits before this round, no row may read more keys.
        most = int(((rows.limit - 1 + drafter.draft_len) * rows.live).max())
        assert scheduled.shape.max_kv is None or most <= scheduled.shape.max_kv, "a row may grow beyond what attention plans for"
        launch(scheduled)

    def plan_checked(batch: FlatBatch, kv: LayerKV, **options: Any) -> AttentionPlan:
        assert batch.kv_len.max() <= batch.max_kv, "a row is longer than attention plans for"
        return plan_attention(batch, kv, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "plan_attention", plan_checked)
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", short_cap)
        patch.setattr(engine.executor, "_launch_round", launch_checked)
        done = {completion.request_id: completion for completion in engine.run(iter(requests))}
    assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)  # every page came back
    return {name: c.token_ids.tolist() for name, c in done.items() if c.token_ids is not None}, done, engine


def expected_tokens(
    requests: list[Request], *, fp8_kv: bool = False, guesses: Mapping[str, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    return plain_rows(tiny_target(window=5, fp8_kv=fp8_kv), requests, guesses)


@cache
def parallel_head() -> Head:
    spec = dummy_spec(tiny_target(window=5).spec, draft_vocab_size=19, parallel=True)
    return dummy_head(replace(spec, aux_layer_ids=(0, 1, 2)), dtype=torch.float64, device=DEVICE)


@cache
def block_head(from_anchor: bool = True, *, dflash2: bool = False) -> BlockWeights:
    spec = tiny_target(window=5).spec
    return tiny_block(spec, dflash2=True) if dflash2 else tiny_block(spec, from_anchor=from_anchor)


BLOCK_HEADS: tuple[dict[str, bool], ...] = ({}, {"from_anchor": False}, {"dflash2": True})
"""A DSpark head, one whose masks are at its drafts, and a DFlash2 head."""


@cache
def pard_model() -> PardModel:
    """The tiny target, other weights, as a model that drafts."""
    model = tiny_target(window=3)
    return PardModel(PardSpec(model=model.spec, mask_token_id=VOCAB - 1), model)


def lookup(draft_len: int, max_ngram: int, corpus_tokens: int) -> LookupDrafter:
    corpus = None
    if corpus_tokens:
        corpus = Corpus(corpus_tokens, lengths=tuple(range(1, max_ngram + 1)), device=DEVICE, background=False)
    return LookupDrafter(draft_len, min_ngram=1, max_ngram=max_ngram, corpus=corpus)


def hybrid(draft_len: int, head_len: int, slots: int, *, chain: bool, corpus_tokens: int = 0) -> HybridDrafter:
    target = tiny_target(window=5)
    make = ChainDrafter if chain else ParallelDrafter
    head = make(parallel_head(), target, head_len, slots=slots)
    return HybridDrafter(head, lookup(draft_len, 3, corpus_tokens), slots=slots, device=DEVICE)


@pytest.fixture(autouse=True, scope="module")
def few_tokens() -> Iterator[None]:
    """An index of ended rows is made from the first of them on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "FEWEST", 1)
        yield


@st.composite
def requests_of_a_job(draw: st.DrawFn) -> list[Request]:
    beginning = draw(st.lists(st.integers(0, VOCAB - 1), max_size=10))  # shared: whole pages of it are prefilled once
    found = []
    for index in range(draw(st.integers(1, 7))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14))
        cap = draw(st.integers(1, 24))
        one = request(
            index,
            beginning + own if draw(st.booleans()) else own,
            cap=cap,
            sampling=draw(st.sampled_from(SAMPLINGS)),
            stop_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True))),
            stop=tuple(draw(st.lists(st.sampled_from(["A", "BC", "CAB", "Z"]), max_size=1))),
            min_new_tokens=draw(st.integers(0, min(3, cap))),
            predicted=draw(st.integers(1, cap)),
        )
        found.append(replace(one, repetition=draw(st.sampled_from(REPETITIONS))))
    return draw(st.permutations(found))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_of_a_job(), data=st.data())
def test_every_packing_and_drafter_gives_the_tokens_of_plain_decoding(requests: list[Request], data: st.DataObject) -> None:
    check_lossless(requests, data)


@pytest.mark.slow
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_of_a_job(), data=st.data())
def test_every_packing_and_drafter_is_lossless_in_more_examples(requests: list[Request], data: st.DataObject) -> None:
    check_lossless(requests, data)


def check_lossless(requests: list[Request], data: st.DataObject) -> None:
    fp8_kv = data.draw(st.booleans(), label="e4m3 K/V")
    draft_len = data.draw(st.integers(1, 8), label="K")
    kind = data.draw(
        st.sampled_from(["none", "lookup", "window", "parallel", "block", "pard", "tree", "hybrid", "right", "wrong"]),
        label="drafter",
    )
    drafter: Drafter
    slots = data.draw(st.sampled_from([1, 4, 16]), label="slots")
    if kind == "none":
        drafter = NoDrafter()
    elif kind == "window":
        window, sink = data.draw(st.integers(1, 9), label="window"), data.draw(st.integers(0, 3), label="sink")
        drafter = WindowDrafter(tiny_target(), draft_len, slots=slots, window=window, sink=sink)
    elif kind == "lookup":
        drafter = lookup(draft_len, data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 8, 100]), label="corpus"))
    elif kind == "pard":
        parallel = data.draw(st.booleans(), label="parallel")
        drafter = PardDrafter(pard_model(), tiny_target().spec, draft_len, slots=slots, parallel=parallel)
    elif kind == "parallel":
        drafter = ParallelDrafter(parallel_head(), tiny_target(window=5), draft_len, slots=slots)
    elif kind == "block":
        head, reads = data.draw(st.sampled_from(BLOCK_HEADS), label="head"), data.draw(st.sampled_from([None, 1, 4]))
        drafter = BlockDrafter(block_head(**head), tiny_target(window=5), draft_len, slots=slots, window=reads, sink=1)
    elif kind == "hybrid":
        chain = data.draw(st.booleans(), label="chain")
        head_len = data.draw(st.integers(1, draft_len), label="head_len")
        drafter = hybrid(draft_len, head_len, slots, chain=chain, corpus_tokens=data.draw(st.sampled_from([0, 50])))
    elif kind == "tree":
        topk = data.draw(st.integers(2, 5), label="topk")
        nodes = data.draw(st.integers(1, min(63, topk + (draft_len - 1) * topk**2)), label="nodes")
        shape = TreeShape(topk=topk, depth=draft_len, nodes=nodes)
        drafter = TreeDrafter(parallel_head(), tiny_target(window=5), shape, slots=slots)
    else:
        expected = expected_tokens(requests, fp8_kv=fp8_kv)
        outputs = {r.seed: expected[r.request_id] for r in requests}
        drafter = ForcedDrafter(draft_len, outputs, right=kind == "right", fixed_len=data.draw(st.booleans()))
    page_size = data.draw(st.sampled_from([2, 4, 8]), label="page_size")
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    num_lookahead_slots = drafter.shape.kv_per_round if isinstance(drafter, TreeDrafter) else 0
    scarce = 1 + -(-(longest + num_lookahead_slots) // page_size) + data.draw(st.integers(0, 6))
    batch = packed(
        slots,
        row_buckets=tuple(b for b in (1, 2, 4, 8, 16) if b <= slots),
        page_size=page_size,
        num_pages=data.draw(st.sampled_from([scarce, 400]), label="pages"),
        max_len=longest + data.draw(st.integers(0, 5)),
        num_verified=drafter.draft_len,
        prefill_tokens=data.draw(st.sampled_from([1, 7, 64]), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 3), label="run_ahead"),
        longest_row=data.draw(st.none() | st.integers(2, longest), label="longest_row"),
    )
    tokens, done, _ = run(
        requests,
        batch,
        drafter,
        uniform_slots=data.draw(st.booleans(), label="uniform_slots"),
        refill_dead=data.draw(st.booleans(), label="refill_dead"),
        short_cap=data.draw(st.sampled_from([2, 512]), label="short_cap"),
        fp8_kv=fp8_kv,
        lengths=data.draw(LENGTHS, label="lengths"),
    )
    assert tokens == expected_tokens(requests, fp8_kv=fp8_kv, guesses=tokens)
    for completion in done.values():
        check_statistics(completion, kind, scarce_pages=batch.num_pages == scarce)


def check_statistics(completion: Completion, kind: str, *, scarce_pages: bool) -> None:
    stats = completion.stats
    assert stats is not None
    assert completion.token_ids is not None
    assert len(completion.token_ids) + stats.num_discarded == stats.num_prefills + stats.num_accepted + stats.num_rounds
    assert sum(stats.histogram) == stats.num_rounds
    assert sum(j * count for j, count in enumerate(stats.histogram)) == stats.num_accepted
    assert stats.accepted_at == tuple(sum(stats.histogram[j:]) for j in range(1, stats.draft_len + 1))
    assert kind == "tree" or sum(stats.drafted_at) == stats.num_drafted
    at_least = (stats.num_rounds, *stats.drafted_at)
    assert all(more >= fewer for more, fewer in pairwise(at_least))
    assert all(num_accepted <= num for num_accepted, num in zip(stats.accepted_at, stats.drafted_at, strict=True))
    assert (stats.num_prefills == 1) or scarce_pages
    # A forced drafter does not know the tokens that would have followed a stop.
    if kind == "right" and completion.finish_reason == "length":
        assert stats.num_accepted == stats.num_drafted
    if kind == "wrong" and completion.finish_reason == "length":
        assert stats.num_accepted == 0
    if kind == "none":
        assert stats.num_drafted == 0


def test_acceptance_is_one_when_the_drafts_are_right_and_zero_when_they_are_wrong() -> None:
    requests = [request(i, [i, i + 1, 3], cap=21) for i in range(3)]
    expected = expected_tokens(requests)
    outputs = {r.seed: expected[r.request_id] for r in requests}
    for right, rounds in ((True, 4), (False, 20)):
        _, done, _ = run(requests, packed(4), ForcedDrafter(4, outputs, right=right, fixed_len=True))
        assert [c.stats.num_rounds for c in done.values() if c.stats] == [rounds] * 3


@pytest.mark.parametrize("limit", [22, 23, 32])
def test_drafts_past_the_limit_of_a_row_are_among_the_keys_that_attention_plans_for(limit: int) -> None:
    """Rounds are prepared for 32 keys: a row of 22 tokens may read 10 more. `run` checks each plan."""
    requests = [request(i, [i, 5, 7], cap=limit - 3) for i in range(2)]
    expected = expected_tokens(requests)
    outputs = {r.seed: expected[r.request_id] for r in requests}
    tokens, _, engine = run(
        requests, packed(2, longest_row=16, run_ahead=2), ForcedDrafter(4, outputs, right=False, fixed_len=True)
    )
    assert tokens == expected
    assert engine.planner.max_kv(limit) == (32 if limit == 22 else None)


@pytest.mark.parametrize("place", [0, 4, 7])
def test_rounds_plan_for_the_longest_row_in_the_batch(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight rows, which two slots decode, may have more than 32 keys."""
    requests = [request(i, [i, 5, 7], cap=37 if i == place else 9) for i in range(8)]
    expected = expected_tokens(requests)
    launched: list[tuple[int, int]] = []
    whole = Round.run

    def noted(self: Round, rows: DeviceBatch, *args: Any) -> RoundResult:
        launched.append((int((rows.limit * rows.live).max()), rows.max_kv))
        return whole(self, rows, *args)

    monkeypatch.setattr(Round, "run", noted)
    outputs = {r.seed: expected[r.request_id] for r in requests}
    drafter = ForcedDrafter(4, outputs, right=True, fixed_len=True)
    tokens, *_ = run(requests, packed(2, longest_row=16, max_len=48), drafter)
    assert tokens == expected
    assert set(launched) == {(12, 32), (40, 48)}


def test_lookup_accepts_what_repeats() -> None:
    requests = [request(i, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], cap=60) for i in range(2)]
    _, done, _ = run(requests, packed(2), LookupDrafter(4, min_ngram=1, max_ngram=3))
    assert all(c.stats.num_accepted > 10 for c in done.values() if c.stats)


def test_an_index_of_ended_rows_drafts_more_and_changes_no_token_whatever_it_holds() -> None:
    """Filled in the order in which rows end: another one for each number of slots; by a thread that may come late; by others."""
    sampling = SamplingParams(temperature=0.7, top_k=3)
    requests = [request(i, [1, 2, 3, i % 2], cap=8 + 5 * i, sampling=sampling if i % 3 else None) for i in range(8)]
    expected, rounds = expected_tokens(requests), []
    for slots, background, strangers in ((1, False, 0), (3, False, 0), (3, True, 0), (8, False, 5), (3, False, 0)):
        drafter = LookupDrafter(4, min_ngram=1, max_ngram=3)
        drafter.corpus = Corpus(300, lengths=(1, 2, 3), device=DEVICE, background=background)
        for seed in range(strangers):
            drafter.learn(np.arange(3, dtype=np.int32), np.random.default_rng(seed).integers(0, VOCAB, 40).astype(np.int32))
        tokens, done, _ = run(requests, packed(slots), drafter)
        assert tokens == expected
        rounds.append(sum(c.stats.num_rounds for c in done.values() if c.stats))
    assert rounds[1] == rounds[4]  # one order, one index, one course
    _, done, _ = run(requests, packed(1), LookupDrafter(4, min_ngram=1, max_ngram=3))
    assert rounds[0] < sum(c.stats.num_rounds for c in done.values() if c.stats)


@pytest.mark.parametrize(("run_ahead", "fp8_kv"), [(0, False), (2, False), (2, True)])
def test_pages_that_run_out_set_rows_back_and_change_nothing(run_ahead: int, fp8_kv: bool) -> None:
    requests = [request(i, [i, 5, 7], cap=90, predicted=4) for i in range(4)]
    batch = packed(4, num_pages=40, max_len=93, run_ahead=run_ahead)
    tokens, done, engine = run(requests, batch, LookupDrafter(4, min_ngram=1, max_ngram=2), short_cap=2, fp8_kv=fp8_kv)
    assert engine.totals.preempted > 0
    assert max(c.stats.num_prefills for c in done.values() if c.stats) > 1
    assert tokens == expected_tokens(requests, fp8_kv=fp8_kv)
    assert not fp8_kv or tokens != expected_tokens(requests)  # the rounding of K and V shows


@pytest.mark.parametrize(("pages", "rounds", "preempted"), [(169, 23, 0), (165, 26, 1), (150, 46, 0)])
def test_the_last_rows_begin_together_if_few_pages_lack_at_the_end(pages: int, rounds: int, preempted: int) -> None:
    """Eight equal rows need 21 pages each at the end, six of them for their outputs. Four pages lack: all rows begin, and one is
    preempted. 19 pages lack: a row waits until the others have ended, and there are twice as many rounds."""
    requests = [request(i, [i, *range(1, 30), *range(1, 30), i], cap=24) for i in range(8)]
    tokens, _, engine = run(requests, packed(8, num_pages=pages, max_len=84), NoDrafter())
    assert (engine.totals.rounds, engine.totals.preempted) == (rounds, preempted)
    assert tokens == expected_tokens(requests)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rows_that_are_all_sampled_alike_are_preempted_and_resume(sampling: SamplingParams) -> None:
    """No other row makes a round do what these rows need; a preempted row keeps its own counts, not those of its slot."""
    requests = [request(i, [i, 5, 7, 1, 3], cap=24, sampling=sampling, predicted=4) for i in range(5)]
    tokens, done, _ = run(requests, packed(3, num_pages=14, max_len=29), lookup(3, 2, 0), short_cap=2)
    assert max(c.stats.num_prefills for c in done.values() if c.stats) > 1
    assert tokens == expected_tokens(requests, guesses=tokens)


def test_pages_of_its_own_that_a_preempted_row_finds_are_not_counted_as_shared() -> None:
    requests = [request(i, [i, 5, 7, 1, 3, 9, 4, 2, 8], cap=40, predicted=4) for i in range(6)]
    _, done, engine = run(requests, packed(3, num_pages=26, max_len=49), NoDrafter(), short_cap=2)
    assert engine.totals.cached_tokens > 0
    assert [c.cached_tokens for c in done.values()] == [0] * 6


def test_rounds_do_no_more_than_the_rows_in_slots_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.2)
    requests = [request(0, [1], cap=20), request(1, [2], cap=8, sampling=sampling)]
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    run_graph, modes = engine.executor.graphs.run, []

    def noted(shape: RoundShape) -> RoundResult:
        modes.append(shape.mode)
        return run_graph(shape)

    monkeypatch.setattr(engine.executor.graphs, "run", noted)
    assert len(list(engine.run(iter(requests)))) == 2
    assert modes == [SamplingMode(random=True, filters=True, penalties=True)] * 7 + [SamplingMode()] * 12


def test_what_is_drafted_after_the_end_of_a_row_lies_in_no_page_of_another() -> None:
    """Short rows follow long ones in their slots, and other rows get the pages that those had."""
    requests = [request(i, [i, 3], cap=3 if i % 4 else 40) for i in range(12)]
    drafter = WindowDrafter(tiny_target(), 4, slots=2, window=50)
    tokens, _, _ = run(requests, packed(2, page_size=2, num_pages=23, max_len=42), drafter)
    assert tokens == expected_tokens(requests, guesses=tokens)


def test_the_tail_is_compacted_into_smaller_buckets() -> None:
    requests = [request(i, [i], cap=4 + 12 * (i == 7)) for i in range(8)]
    tokens, _, engine = run(requests, packed(8, row_buckets=(1, 2, 4, 8)), NoDrafter())
    assert engine.scheduler.num_rows == 1
    assert tokens == expected_tokens(requests, guesses=tokens)


def test_shared_prefixes_are_prefilled_once() -> None:
    beginning = list(range(21))
    requests = [request(i, [*beginning, i], cap=5) for i in range(6)]
    tokens, done, engine = run(requests, packed(3), NoDrafter())
    assert engine.totals.prefill_tokens == 22 + 5 * 2  # pages of 4: of 21 common tokens 20 are five whole pages
    assert sorted(c.cached_tokens for c in done.values()) == [0, 20, 20, 20, 20, 20]
    assert tokens == expected_tokens(requests, guesses=tokens)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_row_shares_the_longest_part_of_its_prefix_that_any_row_has(slots: int) -> None:
    """Prefixes form a tree: 8 tokens of all rows, two branches of 8 more, and leaves of 4 in one of them. Pages have 4 tokens."""
    root, left, right, leaf = [*range(9)], [*range(9, 17)], [*range(20, 28)], [*range(17, 21)]
    prompts = [
        [*root, 1], [*root, *left, 1], [*root, *right, 1], [*root, *left, *leaf, 1], [*root, *left, 2], [*root, *right, 2],
        [*root, *left, *leaf, 2], [*root, 2], [*root, *right, *leaf, 1],
    ]
    requests = [request(i, prompt, cap=5) for i, prompt in enumerate(prompts)]
    tokens, done, engine = run(requests, packed(slots), NoDrafter())
    cached = {one.row_index: one.cached_tokens for one in done.values()}
    assert [cached[row] for row in range(len(prompts))] == [0, 8, 8, 16, 16, 16, 20, 8, 16]
    assert engine.totals.prefill_tokens == sum(map(len, prompts)) - sum(cached.values())
    assert tokens == expected_tokens(requests, guesses=tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SamplingParams(temperature=0.8, repetition_penalty=1.3)},
        {"sampling": SamplingParams(presence_penalty=1.5)},
        {"stop_ids": tuple(range(0, 16)), "min_new_tokens": 20},
    ],
    ids=["drawn with a penalty", "a penalty alone", "stop ids that may not be drawn yet"],
)
@pytest.mark.parametrize("lengths", [None, 1])
def test_logprobs_are_those_of_the_raw_logits(changes: dict[str, Any], lengths: int | None) -> None:
    """Whatever changes the choice, and however many drafts are verified."""
    target = tiny_target(window=5)
    requests = [request(i, [1, 2, 3, 1, 2], cap=20, **changes) for i in range(2)]
    drafter = LookupDrafter(3, min_ngram=1, max_ngram=2)
    engine = make_engine(target, drafter, packed(2, num_verified=3), device=DEVICE, logprobs=4, lengths=lengths)
    for req, done in zip(requests, sorted(engine.run(iter(requests)), key=lambda done: done.row_index), strict=True):
        check_logprobs(target, req, done)


def check_logprobs(target: Target, req: Request, done: Completion) -> None:
    assert done.token_ids is not None
    assert done.logprobs is not None
    assert done.top_logprobs is not None
    ids = [*req.prompt_ids.tolist(), *done.token_ids.tolist()]
    for place, token in enumerate(done.token_ids.tolist()):
        logprobs = torch.log_softmax(full_logits(target, ids[: len(req.prompt_ids) + place]), -1)
        assert abs(float(logprobs[token]) - float(done.logprobs[place])) < 1e-5
        best = logprobs.topk(4)
        assert done.top_logprobs[0][place].tolist() == best.indices.tolist()
        torch.testing.assert_close(torch.from_numpy(done.top_logprobs[1][place]), best.values.float())


def test_rows_with_logprobs_are_not_continued_though_they_have_ended() -> None:
    """Three rows end in one step; the caller takes the first completion alone."""
    engine = make_engine(tiny_target(), NoDrafter(), packed(3, num_verified=0), device=DEVICE, logprobs=1)
    done = engine.run(iter([request(i, [3, 4, 5 + i], cap=4) for i in range(3)]))
    next(done)
    done.close()
    assert engine.unfinished() == []


@pytest.mark.parametrize(
    ("kept", "forced", "discarded"),
    [((0,), 0, 6), ((1, 0), 0, 6), ((4,), 2, 4), ((3,), 1, 4), ((6, 5, 1), 0, 5), ((4, 3), 1, 4), ((6,), 2, 2)],
)
def test_tokens_that_are_replaced_are_counted_once(kept: tuple[int, ...], forced: int, discarded: int) -> None:
    """Two tokens are forced after two, then four drawn ones come; then the first so many are kept, one number after the other."""
    state = RequestState.of(request(0, [1], cap=20), 0)
    state.tokens = [5, 6]
    state.replace(2, [7, 8])
    state.tokens += [1, 2, 3, 4]
    state.replace(kept[0])
    for count in kept[1:]:
        state.cut(count, "stop", "x")
    assert (state.num_forced, state.num_discarded, len(state.tokens)) == (forced, discarded, kept[-1])


def test_tokens_after_a_stop_string_leave_no_logprobs() -> None:
    """Right drafts, a token of the prefill and five of each round: the string is complete at the third of one."""
    plain = request(0, [3, 1, 4], cap=60, sampling=SamplingParams(temperature=1.5))
    output = plain_tokens(tiny_target(), plain)
    place = next(place for place in range(3, 60, 5) if output[place] not in output[:place])
    req = replace(plain, stop=(decode([output[place]]),))
    drafter = ForcedDrafter(4, {req.seed: output}, right=True, fixed_len=True)
    engine = make_engine(tiny_target(), drafter, packed(1), device=DEVICE, decode=decode, logprobs=2)
    (done,) = engine.run(iter([req]))
    assert done.token_ids is not None
    assert done.stats is not None
    assert done.logprobs is not None
    assert done.top_logprobs is not None
    assert done.token_ids.tolist() == output[: place + 1]
    assert done.stats.num_discarded > 0
    assert done.logprobs.shape == (place + 1,)
    assert [values.shape for values in done.top_logprobs] == [(place + 1, 2)] * 2


def test_an_engine_serves_one_stream_after_another() -> None:
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    runs = [
        [c.token_ids.tolist() for c in engine.run(iter([request(0, [4, 5], cap=6)])) if c.token_ids is not None] for _ in range(2)
    ]
    assert runs[0] == runs[1]


DRAFTERS: dict[str, Callable[[int, int], Drafter]] = {
    "lookup": lambda draft_len, _: lookup(draft_len, 3, 0),
    "chain": lambda draft_len, slots: ChainDrafter(parallel_head(), tiny_target(window=5), draft_len, slots=slots),
    "parallel": lambda draft_len, slots: ParallelDrafter(parallel_head(), tiny_target(window=5), draft_len, slots=slots),
    "block": lambda draft_len, slots: BlockDrafter(block_head(), tiny_target(window=5), draft_len, slots=slots),
    "pard": lambda draft_len, slots: PardDrafter(pard_model(), tiny_target().spec, draft_len, slots=slots, parallel=True),
    "window": lambda draft_len, slots: WindowDrafter(tiny_target(window=5), draft_len, slots=slots, window=3, sink=1),
    "hybrid": lambda draft_len, slots: hybrid(draft_len, min(2, draft_len), slots, chain=True, corpus_tokens=50),
}
"""Of the length and for as many slots. What heads keep of a row is made anew when it resumes."""


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests=requests_of_a_job(), data=st.data())
def test_a_run_that_is_stopped_is_resumed_by_another_with_the_same_tokens(requests: list[Request], data: st.DataObject) -> None:
    """Stopped again and again, each time by another engine with another drafter, other slots and pages, until all rows are
    done."""
    tokens, left, stats = dict[str, list[int]](), {r.request_id: r for r in requests}, {}
    known = dict[str, list[list[int]]]()
    for turn in range(20):
        draft_len, slots = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 3, 8]))
        kind = data.draw(st.sampled_from(list(DRAFTERS)), label="drafter")
        drafter = DRAFTERS[kind](draft_len, slots) if draft_len else NoDrafter()
        batch = packed(slots, num_verified=draft_len, run_ahead=data.draw(st.integers(0, 2)))
        lengths = data.draw(LENGTHS, label="lengths")
        engine = make_engine(tiny_target(window=5), drafter, batch, device=DEVICE, decode=decode, lengths=lengths)
        rounds = data.draw(st.integers(1, 6)) if turn < 19 else 10**6

        def stop_in_time(totals: EngineTotals, engine: Engine = engine, rounds: int = rounds) -> None:
            if totals.rounds >= rounds:
                engine.stop()

        engine.on_round = stop_in_time
        for completion in engine.run(iter(list(left.values()))):
            assert completion.token_ids is not None
            tokens[completion.request_id] = completion.token_ids.tolist()
            stats[completion.request_id] = completion
            del left[completion.request_id]
        for snapshot in engine.unfinished():
            name = f"r{snapshot.row_index}"
            known.setdefault(name, []).append(list(snapshot.tokens))
            left[name] = replace(left[name], resumed=snapshot)
        if not left:
            break
    expected = expected_tokens(requests, guesses=tokens)
    assert tokens == expected
    for name, each in known.items():
        for begun in each:
            size = len(expected[name])  # of a repetition that was not found yet more tokens are known
            assert begun[:size] == expected[name][: len(begun)]
    for completion in stats.values():
        check_statistics(completion, "lookup", scarce_pages=True)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_run_that_is_stopped_keeps_every_token_that_it_has_read(run_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of rows in slots, and of preempted rows that wait: the next run emits none of them a second time."""
    monkeypatch.setattr(expected_pages, "SHORT_CAP_TOKENS", 2)
    requests = [request(i, [i, 5, 7], cap=40, predicted=4) for i in range(4)]
    batch = packed(3, num_pages=25, max_len=43, run_ahead=run_ahead)
    engine = make_engine(tiny_target(), LookupDrafter(4, min_ngram=1, max_ngram=3), batch, device=DEVICE)

    def stop_after_a_preemption(totals: EngineTotals) -> None:
        if totals.preempted:
            engine.stop()

    engine.on_round = stop_after_a_preemption
    assert not list(engine.run(iter(requests)))
    left = engine.unfinished()
    assert len(left) == 3
    assert sum(len(snapshot.tokens) for snapshot in left) == engine.totals.tokens


def test_a_stop_request_before_the_run_is_not_lost() -> None:
    """A signal may arrive while a job is still reading its first rows."""
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    engine.stop()
    assert engine.unfinished() == []
    assert list(engine.run(iter([request(0, [4, 5], cap=6)]))) == []
    assert engine.unfinished() == []


def test_a_stop_string_on_the_host_frees_the_slot_while_rounds_run_ahead() -> None:
    sampling = SamplingParams(temperature=1.0)
    requests = [request(i, [i], cap=30, sampling=sampling, stop=("A", "B", "C", "D")) for i in range(8)]
    expected = expected_tokens(requests)
    tokens, _, _ = run(requests, packed(2, run_ahead=3), NoDrafter())
    assert tokens == expected
    assert any(len(output) < 30 for output in expected.values())


def test_synthetic_acceptance_keeps_the_rates_asked_for() -> None:
    requests = [request(i, [i, 2], cap=400) for i in range(16)]
    batch = packed(16, row_buckets=(1, 2, 4, 8, 16), num_pages=2000, max_len=402, num_verified=3)
    options = RoundOptions(synthetic=((0.6, 0.28, 0.12),))
    engine = make_engine(tiny_target(), LookupDrafter(3, min_ngram=1, max_ngram=2), batch, device=DEVICE, options=options)
    stats = [c.stats for c in engine.run(iter(requests)) if c.stats]
    rounds = sum(s.num_rounds for s in stats)
    rates = [sum(s.accepted_at[j] for s in stats) / rounds for j in range(3)]
    assert rates == pytest.approx([0.6, 0.28, 0.12], abs=0.04)
