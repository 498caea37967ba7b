"""What a round's experts cost: counted on the device, fitted by the host, used by the choice of K and by the planner."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.chain import ChainDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.draft.weights import dummy_head, dummy_spec
from batchspec.engine.rounds import expert_reads
from batchspec.engine.rounds.draft_lengths import DraftLengths
from batchspec.engine.rounds.expert_reads import HALF_LIFE, ExpertReads, counted
from batchspec.engine.step import RoundShape, RoundWidth
from batchspec.kernels.moe.route import num_read, route, route_reference
from batchspec.model.target import Target
from batchspec.packing.cost import read_bytes, round_seconds
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target
from tests.helpers.moe_models import tiny_moe, tiny_spec
from tests.helpers.stand_ins import H200

SHAPES = ((128, 4), (128, 8), (32, 4), (6, 2))


def counts(share: float, num_experts: int, layers: int = 3) -> NDArray[np.int32]:
    """int32 [layers] whose mean is about that share of the experts."""
    return np.full(layers, round(share * num_experts), np.int32)


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
@given(tokens=st.integers(1, 4096))
def test_independent_tokens_read_what_the_formula_says(num_experts: int, top_k: int, tokens: int) -> None:
    expected = float(ExpertReads(num_experts, top_k).expected([tokens])[0])
    assert expected == pytest.approx(num_experts * (1 - (1 - top_k / num_experts) ** tokens))
    assert top_k - 1e-9 <= expected <= num_experts


@pytest.mark.parametrize(("num_experts", "top_k"), SHAPES)
def test_random_choices_are_found_to_be_independent(num_experts: int, top_k: int) -> None:
    rng, tokens = np.random.default_rng(0), max(2, num_experts // top_k)
    reads = ExpertReads(num_experts, top_k, correlation=0.3)
    for _ in range(8 * HALF_LIFE):
        chosen = rng.random((4, tokens, num_experts)).argsort(-1)[..., :top_k].reshape(4, -1)
        reads.observe(np.array([len(np.unique(layer)) for layer in chosen], np.int32), tokens)
    assert reads.correlation == pytest.approx(1.0, abs=0.06)


def test_tokens_that_come_in_pairs_count_half() -> None:
    rng, reads = np.random.default_rng(0), ExpertReads(128, 4)
    for _ in range(200):
        chosen = rng.random((8, 8, 128)).argsort(-1)[..., :4].reshape(8, -1)
        reads.observe(np.array([len(np.unique(layer)) for layer in chosen], np.int32), 16)
    assert reads.correlation == pytest.approx(0.5, abs=0.02)
    assert reads.expected([16]) == pytest.approx(ExpertReads(128, 4).expected([8]), rel=0.03)


def test_the_newest_counts_weigh_half_of_all_after_a_half_life() -> None:
    reads = ExpertReads(128, 4)
    for _ in range(10 * HALF_LIFE):
        reads.observe(counts(0.25, 128), 18)
    first = reads.correlation
    for _ in range(HALF_LIFE):  # twice as many tokens read as many experts: the factor is half as large
        reads.observe(counts(0.25, 128), 36)
    assert reads.correlation == pytest.approx((first + first / 2) / 2, rel=0.01)


def test_rounds_that_read_nearly_all_experts_do_not_change_the_correlation() -> None:
    reads = ExpertReads(128, 4, correlation=0.4)
    reads.observe(counts(1.0, 128), 4096)
    assert reads.correlation == 0.4
    reads.observe(np.array([4, 4], np.int32), 1)
    assert reads.correlation == pytest.approx(1.0)


def test_what_live_rows_read_beyond_the_timed_round_is_added_and_what_they_do_not_read_is_taken_off() -> None:
    reads = ExpertReads(128, 4)
    reads.set_cost(seconds=60e-6, num_experts=30.0)
    reads.set_base(16, RoundWidth(0), counts(32 / 128, 128))
    reads.set_base(16, RoundWidth(3), counts(1.0, 128))
    added = reads.added_s(16, [RoundWidth(0), RoundWidth(3)], np.array([16, 20]))
    assert added[0] == pytest.approx(2e-6 * (128 * (1 - (1 - 4 / 128) ** 16) - 32))
    assert added[1] == pytest.approx(-2e-6 * 128 * (1 - 4 / 128) ** 20)  # five live rows
    assert reads.added_s(8, [RoundWidth(0)], np.array([8])) == 0.0  # never timed
    reads.set_cost(seconds=-1e-6, num_experts=30.0)
    assert reads.expert_s == 0.0
    reads.set_cost(seconds=1e-4, num_experts=0.01)  # noise
    assert reads.expert_s == 0.0


def test_drafts_that_pay_in_a_dense_model_do_not_if_they_read_more_experts() -> None:
    """Few rows: a round with drafts takes twice the experts of one without, which timings over dead rows do not show."""

    def chosen(experts: ExpertReads | None) -> int:
        lengths = DraftLengths(3, choices=(0, 3), experts=experts)
        for k, prepares in ((0, False), (0, True), (3, True)):
            lengths.set_base(2, k, 1e-3, prepare_next=prepares)
        scores = lengths.scores(2, 100)
        return (0, 3)[int(scores.argmax())]

    reads = ExpertReads(128, 4)
    for k in (0, 3):
        reads.set_base(2, RoundWidth(k), counts(4 / 128, 128))
    assert chosen(None) == 3
    assert chosen(reads) == 3
    reads.set_cost(seconds=1e-3, num_experts=1.0)
    assert chosen(reads) == 0


def test_an_experts_time_is_not_charged_to_the_context() -> None:
    """A time per token of context is learnt from what the experts leave."""
    reads = ExpertReads(128, 4)
    reads.set_base(4, RoundWidth(0), counts(4 / 128, 128))
    reads.set_cost(seconds=1e-3, num_experts=1.0)
    experts_s = float(reads.added_s(4, [RoundWidth(0)], np.array([4]))[0])
    lengths = DraftLengths(1, choices=(0, 1), experts=reads)
    for k, prepares in ((0, False), (0, True), (1, True)):
        lengths.set_base(4, k, 1.0, prepare_next=prepares)
    lengths.timed(4, 0, 1000, 1.0 + experts_s + 0.5)
    assert lengths.scores(4, 2000)[0] == pytest.approx(1 / (1.0 + experts_s + 1.0))


def test_an_engine_counts_the_experts_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that all say the same are one token to the router; the factor falls below that of different rows."""
    monkeypatch.setattr(expert_reads, "COUNT_EVERY", 1)

    def correlation(prompts: list[list[int]]) -> float:
        engine = make_engine(tiny_moe("qwen3_moe"), NoDrafter(), packed(4), device=DEVICE)
        list(engine.run(request(i, prompt, cap=12) for i, prompt in enumerate(prompts)))
        assert engine.totals.expert_correlation is not None
        return engine.totals.expert_correlation

    alike, different = correlation([[1, 2, 3]] * 4), correlation([[i, 7 * i + 1, 5] for i in range(4)])
    assert alike == pytest.approx(0.25)
    assert alike < different <= 1.0


def chain(target: Target, slots: int) -> ChainDrafter:
    head_spec = replace(dummy_spec(target.spec, draft_vocab_size=19), aux_layer_ids=(0, 1, 2))
    return ChainDrafter(dummy_head(head_spec, dtype=torch.float64, device=DEVICE), target, 3, slots=slots)


@pytest.mark.parametrize("drafter", ["chain", "lookup"])
def test_tokens_of_dead_rows_read_no_expert(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds over one live row count the same experts and tokens whether they have four slots or one; so do rounds whose other
    rows have ended."""
    target = tiny_moe("qwen3_moe", num_local_experts=40)
    monkeypatch.setattr(expert_reads, "COUNT_EVERY", 1)

    def observed(slots: int, *others: int) -> list[tuple[list[int], int]]:
        found: list[tuple[list[int], int]] = []
        monkeypatch.setattr(ExpertReads, "observe", lambda _, counts, tokens: found.append((counts.tolist(), tokens)))
        own = chain(target, slots) if drafter == "chain" else LookupDrafter(3, min_ngram=1, max_ngram=2)
        batch = packed(slots, row_buckets=(slots,))
        engine = make_engine(target, own, batch, device=DEVICE)
        asked = [request(0, [1, 2, 3], cap=30), *(request(1 + i, [4, i], cap=cap) for i, cap in enumerate(others))]
        list(engine.run(iter(asked)))
        return found

    alone = observed(1)
    assert alone == observed(4)
    assert observed(4, 3, 2, 3)[-5:] == alone[-5:]
    assert any(max(read) < min(40, 2 * tokens) for read, tokens in alone)
    if drafter == "chain":
        assert {tokens for _, tokens in alone} == {4}
    else:
        assert {tokens for _, tokens in alone} > {1}


def test_rounds_over_dead_rows_read_experts_only_while_they_are_timed() -> None:
    engine = make_engine(target := tiny_moe("qwen3_moe"), chain(target, 2), packed(2), device=DEVICE)
    shape = RoundShape(2, 3, SamplingMode())
    for routed in (False, True, False):
        with engine.executor.dead_tokens_routed() if routed else nullcontext():
            engine.executor.graphs.run(shape)
            assert (engine.executor.experts_read() > 0).all() == routed


def test_a_tree_counts_its_nodes() -> None:
    """A round with drafts verifies 60 of a row whatever its depth."""
    reads = ExpertReads(128, 4)
    reads.set_cost(seconds=1.0, num_experts=1.0)
    for num_nodes, tokens in ((None, 7), (60, 61)):
        lengths = DraftLengths(6, choices=(0, 6), experts=reads, num_nodes=num_nodes)
        for k in (0, 6):
            reads.set_base(1, RoundWidth(k), counts(0.0, 128))
            lengths.set_base(1, k, 1e-9)
        seconds = (1 + np.array([0, sum(0.7**k for k in range(1, 7))])) / lengths.scores(1, 0)
        assert seconds == pytest.approx(reads.expected([1, tokens]))


def test_the_first_rounds_are_counted_soon() -> None:
    assert [n for n in range(1, 100) if counted(n)] == [1, 2, 4, 8, 16, 32, 64, 96]


def test_a_model_without_experts_counts_none() -> None:
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    list(engine.run(iter([request(0, [1, 2], cap=40)])))
    assert engine.planner.experts is None
    assert engine.totals.expert_correlation is None


def test_the_planner_reads_fewer_experts_for_tokens_that_are_alike() -> None:
    spec = tiny_spec("qwen3_moe", num_local_experts=128, num_experts_per_tok=8)
    many, few = (read_bytes(spec, torch.bfloat16, 64, correlation=c) for c in (1.0, 0.25))
    assert few == read_bytes(spec, torch.bfloat16, 16) < many
    seconds = [
        round_seconds(spec, replace(H200, overhead_s=0.0, layer_s=0.0), dtype=torch.bfloat16, rows=16, context_tokens=1,
                      tokens_per_row=4, correlation=c)
        for c in (1.0, 0.25)
    ]
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("interpret", [False, True])
def test_routing_counts_the_experts_that_have_tokens(tokens: int, interpret: bool) -> None:
    """Both ways to make the lists: one program for few scores, one an expert for many."""
    logits = torch.randn(tokens, 40, generator=torch.Generator().manual_seed(tokens))
    logits[:, 20:] = -10.0  # never chosen
    found = torch.full((1,), -1, dtype=torch.int32)
    routing = route(logits, 3, norm_topk=True, unit_pairs=16, out_num_read=found, interpret=interpret)
    wanted = len(route_reference(logits, 3, norm_topk=True, unit_pairs=16).expert_ids.unique())
    assert int(found) == int(num_read(routing)) == wanted <= 20


def test_a_count_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="out_num_read"):
        route(torch.zeros(2, 4), 1, norm_topk=True, unit_pairs=16, out_num_read=torch.zeros(2, dtype=torch.int32))
