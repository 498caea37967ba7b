"""Rows that think and follow a constraint, with budgets, stop strings, samples, little memory and restarts: none is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.automata.lazy_automaton import ANSWER, EITHER, THOUGHT
from batchspec.engine.loop.engine import Engine
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.request_state import Watch
from batchspec.records import Completion, Request, Snapshot, Thinking
from tests.batch.test_logit_rules import ALL
from tests.engine.test_lossless_combined import ROOMS
from tests.helpers import grammars
from tests.helpers.automata import BEGIN, END, EOS, PATTERNS_OF_LETTERS, TOKENS, VOCABULARY, automaton, may_follow
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target
from tests.helpers.grammars import GRAMMARS, ExpandLate, Grammar, lazy
from tests.helpers.one_row import OneRow
from tests.helpers.row_lengths import LENGTHS
from tests.structured.test_constrained import SAMPLINGS

pytestmark = pytest.mark.usefixtures("poisoned")
Rule = str | Grammar
RULES: tuple[Rule, ...] = (*PATTERNS_OF_LETTERS, *GRAMMARS)
CLOSING = ((END,), (TOKENS.index(b"dd"), END), (TOKENS.index(b"a"), TOKENS.index(b"\n"), END))


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[Request, Rule, bool | None]]:
    found: list[tuple[Request, Rule, bool | None]] = []
    for row in range(draw(st.integers(1, 4))):
        rule: Rule = draw(st.sampled_from(RULES))
        opened, cap = draw(st.sampled_from([True, None, False])), draw(st.integers(1, 22))
        prompt, sampling = draw(st.lists(st.integers(3, 28), min_size=1, max_size=9)), draw(st.sampled_from(SAMPLINGS))
        how = Thinking(
            begin_id=BEGIN, end_id=END, opened=opened, budget=draw(st.sampled_from([None, 0, 1, 4])),
            closing=draw(st.sampled_from(CLOSING)),
        )
        stop = tuple(draw(st.lists(st.sampled_from(["dd", "ab", "c", "\u00e9"]), max_size=2)))
        stop_ids = (EOS, *draw(st.sampled_from([(), (), (END,)])))
        for sample in range(draw(st.integers(1, 3))):
            one = request(len(found), prompt, cap=cap, sampling=sampling, stop=stop, stop_ids=stop_ids)
            one = replace(one, row_index=row, sample_index=sample, seed=100 * row + sample, thinking=how)
            if isinstance(rule, Grammar):
                state = {True: THOUGHT, None: EITHER, False: ANSWER}[opened]
                one = replace(one, automaton=lazy(rule), automaton_state=state)
            else:
                made = automaton(rule, thinks=True)
                state = {True: made.thought, None: made.either, False: made.answer}[opened]
                one = replace(one, automaton=made, automaton_state=state, constraint=("regex", rule))
            thought = {True: True, None: False, False: None}[opened]
            found.append((one, rule, thought))
    return draw(st.permutations(found))


def check(done: Completion, one: Request, rule: Rule, thought: bool | None) -> None:
    assert done.error is None, done.error
    assert done.token_ids is not None
    tokens = done.token_ids.tolist()
    allowed: Any = grammars.may_follow if isinstance(rule, Grammar) else may_follow
    body = tokens[:-1] if tokens[-1] == EOS else tokens
    for place, token in enumerate(tokens):
        assert allowed(rule, tokens[:place], token, thought=thought), (tokens, place)
    assert EOS not in body
    if done.finish_reason == "stop" and done.stop_reason is None:
        assert tokens[-1] == EOS
        assert done.text is not None
        if isinstance(rule, Grammar):
            assert grammars.is_text(rule, done.text.encode())
        else:
            assert re.fullmatch(rule, done.text, re.ASCII)
    elif done.finish_reason == "stop":
        assert done.stop_reason in (*one.stop, str(END))
    else:
        assert len(tokens) == one.max_new_tokens


@pytest.mark.second
@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(job=jobs(), data=st.data())
def test_no_row_that_was_produced_rightly_is_refused(name: str, job: list[tuple[Request, Rule, bool | None]], data: Any) -> None:
    left, rules = {one.request_id: one for one, *_ in job}, {one.request_id: (one, rule, how) for one, rule, how in job}
    stop_after = data.draw(st.sampled_from([None, 1, 3]), label="stop_after")
    whole = stop_after is None
    for _ in range(4):
        drafter = ALL[name]()
        batch = packed(
            4, num_verified=drafter.draft_len, run_ahead=data.draw(st.integers(0, 2)), max_len=40,
            num_pages=data.draw(st.sampled_from([24, 400]), label="pages"), prefill_tokens=data.draw(st.sampled_from([3, 64])),
        )
        late = ExpandLate(data.draw(st.integers(0, 9)), lost=data.draw(st.sampled_from([0.0, 0.2])), thinks=True)
        logprobs = data.draw(st.sampled_from([None, 0, 2])) if whole else None  # those of a row come from one run
        engine = make_engine(
            tiny_target(window=5), drafter, batch, device=DEVICE, decode=VOCABULARY.text, vocabulary=VOCABULARY,
            expanding=late, automata_capacity=data.draw(st.sampled_from(ROOMS), label="room"),
            eos_ids=frozenset({EOS}), logprobs=logprobs, lengths=data.draw(LENGTHS, label="lengths"),
        )
        rounds = iter(range(stop_after or 0, 0, -1))

        def stop(_: object, engine: Engine = engine, rounds: Any = rounds) -> None:
            if next(rounds, 0) == 1:
                engine.stop()

        engine.on_round = stop
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 0)
            for done in engine.run(iter(list(left.values()))):
                check(done, *rules[done.request_id])
                del left[done.request_id]
        samples = {(one.row_index, one.sample_index): one.request_id for one in left.values()}
        for snapshot in engine.unfinished() if left else ():
            row = samples[snapshot.row_index, snapshot.sample_index]
            left[row] = replace(left[row], resumed=snapshot)
        if not left:
            return
        stop_after = data.draw(st.sampled_from([None, 2]), label="again")
    assert not whole


def test_tokens_of_an_earlier_run_that_are_not_kept_use_up_no_budget() -> None:
    """The present automaton does not allow them, as that of an earlier version did. The row is decoded from its beginning."""
    rule = automaton(PATTERNS_OF_LETTERS[0])
    ruled = replace(request(0, [4, 7], cap=12, stop_ids=(EOS,)), automaton=rule, automaton_state=rule.answer)
    others = {*range(len(TOKENS))} - {BEGIN, END, EOS}
    refused = min(token for token in others if not rule.allows(rule.answer, token))
    left = Snapshot(
        row_index=0, sample_index=0, shard=0, tokens=(refused,) * 3, num_prefills=1, cached_tokens=0, accepted=(3,), drafted=(3,),
        prefill_s=0.0, decode_s=0.0,
    )
    how = Thinking(begin_id=BEGIN, end_id=END, opened=True, budget=2, closing=(END,))
    row = OneRow(replace(ruled, thinking=how, resumed=left), symbols=VOCABULARY)
    assert (row.state.tokens, row.state.num_forced, row.state.watch) == ([], 0, Watch(2, BEGIN))
