"""What a round's experts cost: counted on the device, fitted by the host, used by the choice of K and by the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchspec.draft.none import NoDrafter
from batchspec.engine import round_planner
from batchspec.engine.draft_lengths import DraftLengths
from batchspec.engine.engine import Engine
from batchspec.engine.expert_reads import HALF_LIFE, ExpertReads
from batchspec.kernels.moe.route import num_read, route, route_reference
from batchspec.packing.cost import H200, read_bytes, round_seconds
from tests.engines import DEVICE, packed, request, tiny_target
from tests.moe_models import tiny_moe, tiny_spec

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


def test_rounds_that_read_nearly_all_experts_say_nothing() -> None:
    reads = ExpertReads(128, 4, correlation=0.4)
    reads.observe(counts(1.0, 128), 4096)
    assert reads.correlation == 0.4
    reads.observe(np.array([4, 4], np.int32), 1)
    assert reads.correlation == pytest.approx(1.0)


def test_what_live_rows_read_beyond_the_timed_round_is_added() -> None:
    reads = ExpertReads(128, 4)
    reads.set_cost(seconds=60e-6, num_experts=30.0)
    reads.set_base(16, 0, counts(32 / 128, 128))
    reads.set_base(16, 3, counts(1.0, 128))
    added = reads.added_s(16, np.array([0, 3]))
    assert added[0] == pytest.approx(2e-6 * (128 * (1 - (1 - 4 / 128) ** 16) - 32))
    assert added[1] == 0.0  # it read more than live rows will
    assert reads.added_s(8, np.array([0])) == 0.0  # never timed
    reads.set_cost(seconds=-1e-6, num_experts=30.0)
    assert reads.expert_s == 0.0
    reads.set_cost(seconds=1e-4, num_experts=0.01)  # noise
    assert reads.expert_s == 0.0


def test_drafts_that_pay_in_a_dense_model_do_not_where_they_read_more_experts() -> None:
    """Few rows: a round with drafts takes twice the experts of one without, which timings over dead rows do not show."""

    def chosen(experts: ExpertReads | None) -> int:
        lengths = DraftLengths(3, choices=(0, 3), experts=experts)
        for k, prepares in ((0, False), (0, True), (3, True)):
            lengths.set_base(2, k, 1e-3, prepare_next=prepares)
        scores = lengths.scores(2, 100)
        return (0, 3)[int(scores.argmax())]

    reads = ExpertReads(128, 4)
    for k in (0, 3):
        reads.set_base(2, k, counts(4 / 128, 128))
    assert chosen(None) == 3
    assert chosen(reads) == 3
    reads.set_cost(seconds=1e-3, num_experts=1.0)
    assert chosen(reads) == 0


def test_an_experts_time_is_not_charged_to_the_context() -> None:
    """A time per token of context is learnt from what the experts leave."""
    reads = ExpertReads(128, 4)
    reads.set_base(4, 0, counts(4 / 128, 128))
    reads.set_cost(seconds=1e-3, num_experts=1.0)
    experts_s = float(reads.added_s(4, np.array([0]))[0])
    lengths = DraftLengths(1, choices=(0, 1), experts=reads)
    for k, prepares in ((0, False), (0, True), (1, True)):
        lengths.set_base(4, k, 1.0, prepare_next=prepares)
    lengths.timed(4, 0, 1000, 1.0 + experts_s + 0.5)
    assert lengths.scores(4, 2000)[0] == pytest.approx(1 / (1.0 + experts_s + 1.0))


def test_an_engine_counts_the_experts_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that all say the same are one token to the router; the factor falls below that of different rows."""
    monkeypatch.setattr(round_planner, "COUNT_EVERY", 1)

    def correlation(prompts: list[list[int]]) -> float:
        engine = Engine(tiny_moe("qwen3_moe"), NoDrafter(), packed(4), device=DEVICE)
        list(engine.run(request(i, prompt, cap=12) for i, prompt in enumerate(prompts)))
        assert engine.totals.expert_correlation is not None
        return engine.totals.expert_correlation

    alike, different = correlation([[1, 2, 3]] * 4), correlation([[i, 7 * i + 1, 5] for i in range(4)])
    assert alike == pytest.approx(0.25)
    assert alike < different <= 1.0


def test_a_model_without_experts_counts_none() -> None:
    engine = Engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
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
    ]  # fmt: skip
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
