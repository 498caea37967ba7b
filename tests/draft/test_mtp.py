"""The MTP drafter through the engine against its definition (tests/helpers/mtp_definition.py), in fp64, where both agree
exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.batch.automata import AutomataCapacity
from batchspec.draft.frequent_tokens import FrequentTokens
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.totals import EngineTotals
from batchspec.engine.rounds.records import RoundOptions
from batchspec.engine.rounds.round import Round
from batchspec.packed_batch import PackedBatch
from batchspec.records import SamplingParams
from tests.draft.mtp_faults import FAULTS, LATENT_FAULTS, SMALL_FAULTS
from tests.draft.test_eagle3 import in_turn
from tests.helpers.automata import EOS, VOCABULARY, automaton, may_follow
from tests.helpers.drafting import synthetic
from tests.helpers.engines import DEVICE, VOCAB, _draw, decode, make_engine, request
from tests.helpers.mtp_checkpoints import LAYOUTS, make_mtp_model
from tests.helpers.mtp_definition import Choose, read_mtp
from tests.helpers.mtp_drafting import (
    CHUNK,
    Model,
    drafter_of,
    load_model,
    mixed_requests,
    num_drafted,
    run,
    trusting,
    wide_batch,
    wrong_drafts,
)
from tests.helpers.row_lengths import LENGTHS

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]

ModelOf = Callable[[str], Model]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """The model of a layout, made once."""
    made: dict[str, Model] = {}

    def find(name: str) -> Model:
        if name not in made:
            made[name] = load_model(make_mtp_model(tmp_path_factory.mktemp("model"), name))
        return made[name]

    return find


GENERAL: dict[str, Any] = {"dead_positions": False, "uniform_slots": False, "argmax": False}


@pytest.mark.parametrize(("place", "name"), enumerate(LAYOUTS), ids=LAYOUTS)
def test_drafts_are_those_of_the_definition(place: int, name: str, model_of: ModelOf) -> None:
    """Of rows whose drafts are accepted at random, so that rounds accept 0 .. K of them; in turn the fast and the general way."""
    model, draft_len = model_of(name), 2 + place % 4
    drafter = drafter_of(model, draft_len, slots=3, **(GENERAL if place // 4 % 2 else {}))
    ran = run(model.target, mixed_requests(), wide_batch(3, draft_len), drafter, options=synthetic(draft_len))
    assert sum(one.stats.num_accepted for one in ran.done.values() if one.stats) > 20
    assert wrong_drafts(model, drafter.seen) == []
    assert num_drafted(drafter.seen) > 70
    assert len({token for _, drafts in drafter.seen for token in drafts}) > VOCAB // 3, "too few different drafts"


@pytest.mark.parametrize(
    ("name", "draft_len"),
    [
        ("dense", 1), ("next", 2), ("dense", 5), ("next", 8), ("nemotron", 1), ("nemotron", 2), ("nemotron", 3),
        ("glm, latents", 1), ("deepseek", 2), ("glm, latents", 3), ("deepseek", 4),
    ],
)
def test_chains_of_any_length_are_those_of_the_definition(name: str, draft_len: int, model_of: ModelOf) -> None:
    """The tokens are the model's own."""
    model = model_of(name)
    drafter = drafter_of(model, draft_len, slots=3)
    requests = mixed_requests()
    ran = run(model.target, requests, wide_batch(3, draft_len), drafter)
    assert wrong_drafts(model, drafter.seen) == []
    assert max(len(drafts) for _, drafts in drafter.seen) == draft_len
    assert ran.tokens == run(model.target, requests, wide_batch(3, 0), NoDrafter()).tokens


@pytest.mark.parametrize("name", ["glm, latents", "deepseek"])
def test_drafts_in_fp32_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    model = load_model(make_mtp_model(tmp_path, name), torch.float32)
    drafter = drafter_of(model, 4, slots=3)
    run(model.target, mixed_requests(), wide_batch(3, 4), drafter, options=synthetic(4))
    exact = replace(model, mtp=read_mtp(tmp_path, torch.float32))
    assert wrong_drafts(exact, drafter.seen) == []
    assert num_drafted(drafter.seen) > 70


@pytest.mark.parametrize("name", ["experts, fused", "wrapped"])
def test_long_prompts_in_several_passes(name: str, model_of: ModelOf) -> None:
    """The last position of a pass reads the first token of the next one."""
    model = model_of(name)
    found = []
    for prefill_tokens in (CHUNK, 2 * CHUNK, 400):
        drafter = drafter_of(model, 3, slots=2)
        requests = [request(i, [(7 * i + j * j) % VOCAB for j in range(80 + 70 * i)], cap=12) for i in range(3)]
        ran = run(model.target, requests, wide_batch(2, 3, prefill_tokens=prefill_tokens), drafter, options=synthetic(3))
        assert wrong_drafts(model, drafter.seen) == []
        found.append((ran.tokens, sorted(drafter.seen)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["dense", "next", "glm, latents", "nemotron"])
def test_rows_with_a_common_prefix_take_over_its_kv(name: str, model_of: ModelOf) -> None:
    """Rows of one prompt, and rows that have a chunk of it alone in common, some of them with the token after it."""
    model = model_of(name)
    prompt = [(3 * j * j + j) % VOCAB for j in range(150)]
    requests = [request(i, prompt, cap=9 + i) for i in range(4)]
    requests += [request(4 + i, [*prompt[: CHUNK + 6 * (i % 2)], i, 3, i], cap=9) for i in range(6)]
    drafter = drafter_of(model, 3, slots=3)
    batch = wide_batch(3, 3, page_size=16, num_pages=90, prefill_tokens=100)
    ran = run(model.target, requests, batch, drafter, options=synthetic(3))
    assert ran.engine.totals.cached_tokens >= 5 * CHUNK
    assert wrong_drafts(model, drafter.seen) == []


@pytest.mark.parametrize("name", ["dense", "next", "glm, latents", "nemotron"])
def test_rows_that_are_preempted_keep_their_drafts(name: str, model_of: ModelOf) -> None:
    model = model_of(name)
    requests = [request(i, [(5 * i + j) % VOCAB for j in range(7)], cap=60, predicted=2) for i in range(5)]
    drafter = drafter_of(model, 3, slots=4)
    with trusting():
        ran = run(model.target, requests, wide_batch(4, 3, num_pages=40, run_ahead=1), drafter, options=synthetic(3))
    assert max(one.stats.num_prefills for one in ran.done.values() if one.stats) > 1, "no row was preempted"
    assert wrong_drafts(model, drafter.seen) == []


@pytest.mark.parametrize("name", ["experts, one by one", "nemotron"])
def test_rows_that_an_earlier_run_began_are_drafted_from_all_of_their_tokens(name: str, model_of: ModelOf) -> None:
    model = model_of(name)
    left = {one.request_id: one for one in mixed_requests(cap=24)}
    for turn in range(4):
        drafter = drafter_of(model, 1 + turn, slots=3)
        engine = make_engine(
            model.target, drafter, wide_batch(3, 1 + turn), device=DEVICE, decode=decode, options=synthetic(1 + turn)
        )

        def stop(totals: EngineTotals, engine: Any = engine, last: bool = turn == 3) -> None:
            if totals.rounds >= 4 and not last:
                engine.stop()

        engine.on_round = stop
        for one in engine.run(iter(list(left.values()))):
            del left[one.request_id]
        for snapshot in engine.unfinished():
            left[f"r{snapshot.row_index}"] = replace(left[f"r{snapshot.row_index}"], resumed=snapshot)
        assert wrong_drafts(model, drafter.seen) == []
    assert not left


@pytest.mark.parametrize("name", ["dense", "next", "glm, latents", "nemotron"])
def test_rounds_of_any_draft_length_leave_the_next_one_its_state(
    name: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rounds draft nothing (K = 0), and some of these prepare no drafts for the next round."""
    model = model_of(name)
    drafter = drafter_of(model, 3, slots=3)
    leads: list[bool] = []
    monkeypatch.setattr(Round, "run", in_turn((3, 0, 0, 0, 2, 0, 1, 0, 0), leads, always=False))
    run(model.target, mixed_requests(cap=26), wide_batch(3, 3), drafter, options=synthetic(3))
    assert set(leads) == {True, False}
    assert {len(drafts) for _, drafts in drafter.seen} >= {1, 2, 3}
    assert wrong_drafts(model, drafter.seen) == []


def test_lengths_that_change_from_round_to_round(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("wrapped, experts")
    lengths, run_round = cycle((8, 0, 1, 5, 0, 2)), Round.run
    monkeypatch.setattr(Round, "run", lambda self, rows, mode, _, *more: run_round(self, rows, mode, next(lengths), *more))
    drafter = drafter_of(model, 8, slots=3)
    run(model.target, mixed_requests(cap=40), wide_batch(3, 8), drafter, options=synthetic(8))
    assert {len(drafts) for _, drafts in drafter.seen} >= {1, 2, 5, 8}
    assert wrong_drafts(model, drafter.seen) == []


@pytest.mark.parametrize(("window", "sink"), [(1, 0), (4, 0), (6, 5), (300, 3)])
def test_a_window_and_a_sink_narrow_what_the_layer_reads(window: int, sink: int, model_of: ModelOf) -> None:
    model = model_of("dense")
    drafter = drafter_of(model, 3, slots=3, window=window, sink=sink)
    run(model.target, mixed_requests(), wide_batch(3, 3), drafter, options=synthetic(3))
    assert wrong_drafts(replace(model, mtp=replace(model.mtp, window=window, sink=sink)), drafter.seen) == []
    assert (wrong_drafts(model, drafter.seen) == []) == (window == 300)


def test_tokens_outside_the_vocabulary_for_drafts_are_not_drafted(model_of: ModelOf) -> None:
    """Before rows have ended it is the lowest ids."""
    model, count = model_of("next"), 12
    drafter = drafter_of(model, 4, slots=3, vocabulary=FrequentTokens(count, [range(VOCAB)]))
    run(model.target, mixed_requests(), wide_batch(3, 4), drafter, options=synthetic(4))
    assert wrong_drafts(replace(model, mtp=replace(model.mtp, vocabulary=range(count))), drafter.seen) == []
    assert len(wrong_drafts(model, drafter.seen)) > 10


SAMPLINGS = (
    SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=5), SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.3), SamplingParams(),
    SamplingParams(temperature=0.9, logit_bias=((3, 2.5), (7, -100.0), (11, 4.0))), SamplingParams(logit_bias=((4, 3.0),)),
)


def test_drafts_of_sampled_rows_are_drawn_with_the_noise_and_the_filters_of_the_rows(model_of: ModelOf) -> None:
    model = model_of("experts, fused")
    prompts = [[i, *((i + 5 * j) % VOCAB for j in range(7 * i))] for i in range(14)]
    requests = [request(i, prompt, cap=16, sampling=SAMPLINGS[i % 7]) for i, prompt in enumerate(prompts)]

    def choose_of(beginning: tuple[int, ...]) -> Choose:
        req = requests[beginning[0]]

        def choose(logits: Tensor, before: Sequence[int]) -> int:
            for token, bias in req.sampling.logit_bias:
                logits[token] += bias
            return _draw(logits, req.sampling, req.seed, len(before))

        return choose

    for general in ({}, GENERAL):
        drafter = drafter_of(model, 3, slots=4, **general)
        run(model.target, requests, wide_batch(4, 3), drafter, options=synthetic(3))
        assert wrong_drafts(model, drafter.seen, choose_of) == []
    assert len(wrong_drafts(model, drafter.seen)) > len(drafter.seen) // 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_constrained_rows_are_chosen_among_the_allowed_tokens(temperature: float, model_of: ModelOf) -> None:
    """Those that its automaton allows after the drafts before; any token after its end, where nothing is allowed."""
    model, sampling = model_of("dense"), SamplingParams(temperature=temperature)
    requests, patterns = [], ["[a-d]*", "(ab|c)*d", "(abc|dab){2,3}"]
    for i in range(9):
        made = automaton(patterns[i % 3])
        one = request(i, [i, *range(3 + i)], cap=14, sampling=sampling, stop_ids=(EOS,))
        requests.append(replace(one, automaton=made, automaton_state=made.answer))

    def choose_of(beginning: tuple[int, ...]) -> Choose:
        req = requests[beginning[0]]

        def choose(logits: Tensor, before: Sequence[int]) -> int:
            output = list(before[len(req.prompt_ids) :])
            allowed = [token for token in range(VOCAB) if may_follow(patterns[req.row_index % 3], output, token)]
            if allowed:
                logits[[token for token in range(VOCAB) if token not in allowed]] = -torch.inf
            return _draw(logits, req.sampling, req.seed, len(before))

        return choose

    drafter = drafter_of(model, 4, slots=3)
    room = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14)
    run(model.target, requests, wide_batch(3, 4), drafter, vocabulary=VOCABULARY, automata_capacity=room)
    seen = [(prefix, drafts[: drafts.index(EOS) + 1] if EOS in drafts else drafts) for prefix, drafts in drafter.seen]
    assert wrong_drafts(model, seen, choose_of) == []
    assert len(wrong_drafts(model, seen)) > len(seen) // 3


def drawn_batch(data: st.DataObject, slots: int, draft_len: int, longest: int) -> PackedBatch:
    page_size = data.draw(st.sampled_from([2, 4, 8]), label="page_size")
    scarce = 3 + -(-longest // page_size)
    return wide_batch(
        slots, draft_len, row_buckets=tuple(size for size in (1, 2, 4) if size <= slots), page_size=page_size, max_len=longest,
        num_pages=data.draw(st.sampled_from([scarce, 900]), label="pages"),
        prefill_tokens=data.draw(st.sampled_from([CHUNK, 100, 300]), label="prefill_tokens"),
        run_ahead=data.draw(st.integers(0, 2), label="run_ahead"),
    )


def check_any_packing(model_of: ModelOf, data: st.DataObject) -> None:
    model = model_of(data.draw(st.sampled_from(list(LAYOUTS)), label="model"))
    slots, draft_len = data.draw(st.sampled_from([1, 2, 4]), label="slots"), data.draw(st.integers(1, 8), label="K")
    flags: dict[str, Any] = {name: data.draw(st.booleans(), label=name) for name in GENERAL}
    drafter = drafter_of(model, draft_len, slots=slots, **flags)
    requests = mixed_requests(data.draw(st.integers(2, 8), label="rows"), cap=data.draw(st.integers(8, 24), label="cap"))
    longest = max(len(one.prompt_ids) + one.max_new_tokens for one in requests)
    options = RoundOptions(
        uniform_slots=data.draw(st.booleans(), label="uniform layout"),
        synthetic=(tuple(0.8 ** (j + 1) for j in range(draft_len)),),
    )
    batch = drawn_batch(data, slots, draft_len, longest)
    with trusting():
        run(model.target, requests, batch, drafter, options=options, lengths=data.draw(LENGTHS, label="lengths"))
    assert wrong_drafts(model, drafter.seen) == []


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_gives_the_drafts_of_the_definition(model_of: ModelOf, data: st.DataObject) -> None:
    check_any_packing(model_of, data)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_in_more_examples(model_of: ModelOf, data: st.DataObject) -> None:
    check_any_packing(model_of, data)


ALL_FAULTS = [
    *(("experts, fused", fault) for fault in FAULTS | SMALL_FAULTS),
    *(("deepseek", fault) for fault in FAULTS | SMALL_FAULTS | LATENT_FAULTS),
]


@pytest.mark.parametrize(("name", "fault"), ALL_FAULTS)
def test_a_fault_in_the_drafter_changes_drafts(
    name: str, fault: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = model_of(name), mixed_requests()
    (FAULTS | SMALL_FAULTS | LATENT_FAULTS)[fault](monkeypatch)
    drafter = drafter_of(model, 4, slots=3)
    run(model.target, requests, wide_batch(3, 4), drafter, options=synthetic(4))
    wrong = wrong_drafts(model, drafter.seen)
    assert len(wrong) > len(drafter.seen) // 10
