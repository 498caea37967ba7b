"""Rounds with an optimisation switched off choose the same tokens; rounds without ablations are the plain classes."""

from __future__ import annotations

import pytest
from torch import Tensor

from batchspec.engine.rounds.ablation import greedy_by_softmax
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.rounds.vocabulary import Vocabulary
from batchspec.model.target import Target
from batchspec.records import SamplingParams
from tests.distributed.test_tensor_parallel import Loud
from tests.draft.test_vocabulary import drafter, expected_ids
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_spec, tiny_target
from tests.helpers.ranks import on_ranks, part_of, whole_of
from tests.helpers.replaying import DRAFTERS, SLOTS


@pytest.mark.parametrize("name", ["none", "eagle3", "tree"])
def test_an_ablation_changes_no_token(name: str) -> None:
    found = []
    for argmax, uniform_slots in ((True, True), (False, True), (True, False), (False, False)):
        drafter = DRAFTERS[name]()
        options = RoundOptions(argmax=argmax, uniform_slots=uniform_slots)
        batch = packed(SLOTS, num_verified=drafter.draft_len)
        engine = make_engine(tiny_target(window=5), drafter, batch, device=DEVICE, options=options)
        penalised = SamplingParams(repetition_penalty=1.2)
        requests = (request(i, [i, 5], cap=8, sampling=penalised if i == 2 else None) for i in range(4))
        found.append({c.row_index: c.token_ids.tolist() for c in engine.run(requests) if c.token_ids is not None})
        round_ = engine.executor.round
        assert round_.is_uniform == uniform_slots
        assert (type(round_.vocabulary) is Vocabulary) == argmax
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("name", ["none", "eagle3", "tree"])
def test_an_engine_without_ablations_has_the_fast_paths(name: str) -> None:
    drafter = DRAFTERS[name]()
    round_ = make_engine(tiny_target(), drafter, packed(SLOTS, num_verified=drafter.draft_len), device=DEVICE).executor.round
    assert round_.is_uniform
    assert type(round_.vocabulary) is Vocabulary


@pytest.mark.parametrize("name", ["none", "tree"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_ranks_without_argmax_choose_the_tokens_of_one_process_with_it(
    name: str, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By softmax over the logits of all ranks; with logprobs it is of logits that the round has computed already."""
    spec = tiny_spec(5)

    def tokens(target: Target, *, argmax: bool) -> dict[int, list[int]]:
        own, kind = drafter(name, target), RoundOptions(argmax=argmax)
        engine = make_engine(target, own, packed(3, num_verified=7), device=DEVICE, options=kind, logprobs=logprobs)
        return {done.row_index: expected_ids(done) for done in engine.run(request(i, [i, 5], cap=8) for i in range(4))}

    expected = tokens(whole_of(spec, Loud), argmax=True)
    assert len(expected) == 4
    widths: list[int] = []

    def watched(logits: Tensor) -> Tensor:
        widths.append(logits.shape[1])
        return greedy_by_softmax(logits)

    monkeypatch.setattr("batchspec.engine.rounds.ablation.greedy_by_softmax", watched)
    for found in on_ranks(2, lambda ranks: tokens(part_of(spec, ranks, Loud), argmax=False)):
        assert found == expected
    assert set(widths) == {spec.vocab_size}
