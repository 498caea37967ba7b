"""The score gap that `batchspec verify` prints: over the tokens that a row may draw."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.batch.automata import AutomataCapacity
from batchspec.commands.decode_again import _rises, first_difference
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.packing.planner import PAGE_SIZE
from batchspec.records import Request, SamplingParams
from tests.helpers.automata import EOS, VOCABULARY, automaton, may_follow
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, request, tiny_target
from tests.helpers.grammars import GRAMMARS, ExpandLate, lazy
from tests.helpers.grammars import may_follow as may_grammar

SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.9))


def an_engine(**more: object) -> Engine:
    batch = packed(1, page_size=PAGE_SIZE, num_verified=0)
    room = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14, lazy_words=1 << 14, lazy_masks_bytes=256)
    return make_engine(
        tiny_target(), NoDrafter(), batch, device=DEVICE, vocabulary=VOCABULARY, automata_capacity=room,
        **more,  # type: ignore[arg-type]
    )


ENGINE = cache(an_engine)


def decoded(engine: Engine, req: Request) -> list[int]:
    (done,) = engine.run(iter([req]))
    assert done.token_ids is not None
    found: list[int] = done.token_ids.tolist()
    return found


def gaps(engine: Engine, req: Request, plain: list[int], place: int) -> list[float]:
    """By token: the gap of an output that has this token at `place`; 0 of the plain one."""
    found = []
    for token in range(VOCAB):
        written = [*plain[:place], token]
        difference = None if token == plain[place] else first_difference(engine, req, written, plain)
        assert difference is None or (difference.token_index, difference.gap is None) == (place, False)
        found.append(0.0 if difference is None or difference.gap is None else difference.gap)
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_the_gap_of_a_token_that_the_schema_does_not_allow_is_infinite(sampling: SamplingParams) -> None:
    pattern, made, engine = "(ab|c)*d", automaton("(ab|c)*d"), an_engine()
    req = replace(
        request(0, [5, 3, 8], cap=12, sampling=sampling), stop_ids=(EOS,), automaton=made, automaton_state=made.answer
    )
    plain = decoded(engine, req)
    for place in (0, len(plain) - 1):
        for token, gap in enumerate(gaps(engine, req, plain, place)):
            allowed = may_follow(pattern, plain[:place], token)
            assert (gap == math.inf) == (not allowed), (place, token)
            assert not allowed or gap >= 0  # the plain token has the highest score


FILTERED = (SamplingParams(temperature=0.9, top_k=3), SamplingParams(temperature=1.3, min_p=0.2))


@pytest.mark.parametrize("sampling", [*SAMPLINGS, *FILTERED])
def test_a_gap_is_how_much_the_logit_must_rise_for_the_token_to_be_chosen(sampling: SamplingParams) -> None:
    """Also of a token whose noise is the largest but whose logit top-k or min-p leaves out. A bias raises the logit. With min-p
    less may be enough: a token that becomes the likeliest raises the limit for the others."""
    engine, req = an_engine(), request(0, [5, 3, 8], cap=1, sampling=sampling)
    plain = decoded(engine, req)
    for token, gap in enumerate(gaps(engine, req, plain, 0)):
        assert 0 <= gap < math.inf
        for rise, chosen in ((gap - 1e-3, plain[0]), (gap + 1e-3, token))[int(sampling.min_p > 0) :]:
            raised = replace(req, sampling=replace(sampling, logit_bias=((token, rise),)))
            assert decoded(engine, raised) == [chosen], (token, gap)


@pytest.mark.second
@settings(max_examples=40)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    sampling=st.builds(
        SamplingParams, temperature=st.sampled_from([0.0, 0.7, 1.5]), top_k=st.sampled_from([0, 1, 4]),
        top_p=st.sampled_from([1.0, 0.5]), min_p=st.sampled_from([0.0, 0.3]), repetition_penalty=st.sampled_from([1.0, 1.4]),
    ),
)
def test_no_gap_is_negative_and_that_of_the_token_of_plain_decoding_is_zero(prompt: list[int], sampling: SamplingParams) -> None:
    req = request(0, prompt, cap=3, sampling=sampling)
    plain = decoded(ENGINE(), req)
    for place, token in enumerate(plain):
        found = _rises(ENGINE(), req, plain[:place])
        assert float(found.min()) == float(found[token]) == 0.0


def test_a_plain_token_that_one_pass_does_not_choose_shows_as_a_gap() -> None:
    """Decoding token by token and all at once would be far apart: both tokens count."""
    engine, req = an_engine(), request(0, [5, 3, 8], cap=1)
    chosen = decoded(engine, req)
    found = gaps(engine, req, chosen, 0)
    worst = found.index(max(found))
    difference = first_difference(engine, req, chosen, [worst])
    assert difference.gap == max(found)


def test_the_gap_of_a_row_without_a_schema_is_finite() -> None:
    engine, req = an_engine(), request(0, [5, 3, 8], cap=3)
    assert all(0 <= gap < math.inf for gap in gaps(engine, req, decoded(engine, req), 1))


def test_a_stop_id_before_the_minimum_counts_only_where_the_text_can_only_end() -> None:
    made, engine = automaton("d|dd|ddd"), an_engine()
    req = replace(
        request(0, [4], cap=8, min_new_tokens=7), stop_ids=(EOS,), automaton=made, automaton_state=made.answer
    )
    plain = decoded(engine, req)
    assert plain[-1] == EOS
    assert gaps(engine, req, plain, 0)[EOS] == math.inf
    at_end = gaps(engine, req, plain, len(plain) - 1)
    assert at_end[EOS] == 0
    assert all(gap == math.inf for token, gap in enumerate(at_end) if token != EOS)


def test_rows_of_lazy_automata_have_the_same_gaps() -> None:
    grammar, engine = GRAMMARS[0], an_engine(expanding=ExpandLate(0, most_polls=0))
    made = lazy(grammar)
    req = replace(request(0, [5, 3], cap=6), stop_ids=(EOS,), automaton=made, automaton_state=made.answer)
    plain = decoded(engine, req)
    for token, gap in enumerate(gaps(engine, req, plain, 1)):
        assert (gap == math.inf) == (not may_grammar(grammar, plain[:1], token)), token
