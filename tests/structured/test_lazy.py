"""Rows that follow lazy automata: the tokens are those of the definition, whatever drafts, slots, pages, run-ahead and room."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.automata.lazy_automaton import ANSWER, EITHER, THOUGHT, Answer, Ask, Expanding, Expansion, LazyAutomaton
from batchspec.automata.token_automaton import START, TokenSymbols
from batchspec.batch.automata import Automata, AutomataCapacity, StatesUpload
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.pages import SCRATCH_PAGE
from batchspec.draft.base import Drafter
from batchspec.engine.features.lazy_constraints import LazyConstraints
from batchspec.engine.features.lazy_places import LazyPlaces
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.prefill.passes import prefill_chunk
from batchspec.engine.rounds.graphs import Graphs
from batchspec.engine.rounds.records import PendingResult, RoundLog, RoundResult
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.step import RoundShape, ScheduledStep, Segment
from batchspec.kernels.rounds.accept import HELD
from batchspec.process.limited_process import Died
from batchspec.records import Completion, Repetition, Request, SamplingParams, Snapshot, Thinking
from batchspec.structured import expand_process, lazy_dfa
from batchspec.structured.channels import state_after_header
from tests.batch.test_logit_rules import ALL
from tests.helpers.automata import BEGIN, END, EOS, PATTERNS_OF_LETTERS, VOCABULARY, constrained_tokens, written
from tests.helpers.engines import (
    DEVICE,
    VOCAB,
    ForcedDrafter,
    first_repetition,
    lazy_of,
    make_engine,
    packed,
    request,
    tiny_target,
)
from tests.helpers.grammars import (
    GRAMMARS,
    ExpandLate,
    ExpandScarcely,
    Grammar,
    LateAnswer,
    ScarceProcess,
    grammar_tokens,
    is_text,
    lazy,
    may_follow,
)
from tests.helpers.replaying import SLOTS
from tests.helpers.row_lengths import LENGTHS
from tests.structured.test_constrained import SAMPLINGS, constrained, tokens

pytestmark = [pytest.mark.second, pytest.mark.usefixtures("poisoned")]


def following(req: Request, grammar: Grammar, **more: Any) -> Request:
    return replace(req, stop_ids=(EOS,), automaton=lazy(grammar), automaton_state=ANSWER, **more)


def run(
    requests: Sequence[Request], drafter: Drafter, *, expanding: Expanding | None = None, lazy_words: int = 1 << 14,
    lazy_masks: int = 64, short_cap: int = 512, logprobs: int | None = None, lengths: int | None = None, **shape: Any,
) -> dict[int, Completion]:
    room = AutomataCapacity(
        num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14, lazy_words=lazy_words, lazy_masks_bytes=4 * lazy_masks
    )
    engine = make_engine(
        tiny_target(window=5), drafter, packed(SLOTS, **{"num_verified": drafter.draft_len, **shape}), device=DEVICE,
        vocabulary=VOCABULARY, automata_capacity=room, expanding=expanding or ExpandLate(0, most_polls=0),
        logprobs=logprobs, lengths=lengths,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", short_cap)
        return {done.row_index: done for done in engine.run(iter(requests))}


def engine_of(
    expanding: Expanding, *, drafter: Drafter | None = None, lengths: int | None = None, **shape: Any
) -> Engine:
    drafter = drafter or ALL["none"]()
    return make_engine(
        tiny_target(window=5), drafter, packed(SLOTS, num_verified=drafter.draft_len, **shape), device=DEVICE,
        vocabulary=VOCABULARY, expanding=expanding, lengths=lengths, automata_capacity=AutomataCapacity(
            num_tokens=VOCAB, table_words=1 << 14, masks_bytes=1 << 12, lazy_words=1 << 14,
        ),
    )


def test_rows_that_are_stopped_while_rounds_are_in_flight_go_on_after_all_their_tokens() -> None:
    """The tables become full while rows decode, so that all states are forgotten: the rows wait for theirs. Without rounds in
    flight all tokens are known then."""
    ruled = [GRAMMARS[i % len(GRAMMARS)] for i in range(8)]
    job = [following(request(i, [i, 7], cap=60, sampling=SAMPLINGS[i % 2]), rule) for i, rule in enumerate(ruled)]
    known, ahead = (
        tokens(run(job, ALL["none"](), expanding=ExpandLate(0), lazy_words=1500, lazy_masks=8, run_ahead=run_ahead))
        for run_ahead in (0, 2)
    )
    assert ahead == known


@pytest.mark.parametrize("seed", [113, 116, 118])
def test_rows_that_wait_in_their_slots_have_the_pages_of_all_their_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are short, and rows get some in a step in which the last row that decodes must wait, too."""
    draw, run_round, checked = random.Random(seed), Graphs.run, list[int]()
    drafter, job = draw.choice(["none", "lookup"]), list[Request]()
    for i in range(5):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
        one = request(i, prompt, cap=draw.randint(10, 30), sampling=draw.choice(SAMPLINGS), predicted=3)
        job.append(following(one, draw.choice(GRAMMARS)))

    def check(graphs: Graphs, shape: RoundShape) -> RoundResult:
        rows = graphs._rows
        for slot in torch.nonzero(rows.live[: shape.num_rows]).flatten().tolist():
            assert (rows.page_tables[0][slot, : int(rows.num_tokens[slot])] != SCRATCH_PAGE).all(), slot
            checked.append(slot)
        return run_round(graphs, shape)

    monkeypatch.setattr(Graphs, "run", check)
    monkeypatch.setattr(expand_process, "AHEAD_S", 60.0)  # a slow machine computes the same states ahead: as many rows wait
    run(
        job, ALL[drafter](), short_cap=0, page_size=1, num_pages=draw.choice([40, 48, 56, 64]),
        expanding=ExpandLate(seed, most_polls=30), run_ahead=draw.choice([0, 2]),
    )
    assert len(checked) > 50


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[Request, Grammar | str | None]]:
    found: list[tuple[Request, Grammar | str | None]] = []
    for index in range(draw(st.integers(1, 6))):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
        cap = draw(st.integers(1, 14))
        one = request(index, prompt, cap=cap, sampling=draw(st.sampled_from(SAMPLINGS)), predicted=draw(st.integers(1, cap)))
        rule = draw(st.sampled_from((None, *PATTERNS_OF_LETTERS[:3], *GRAMMARS, *GRAMMARS)))
        found.append((following(one, rule) if isinstance(rule, Grammar) else constrained(one, rule), rule))
    return found


def defined(req: Request, rule: Grammar | str | None) -> list[int]:
    return grammar_tokens(req, rule) if isinstance(rule, Grammar) else constrained_tokens(req, rule)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_are_those_of_the_definition_whatever_drafts(name: str, data: st.DataObject) -> None:
    job = data.draw(jobs())
    shape = {"run_ahead": data.draw(st.sampled_from([0, 2])), "prefill_tokens": data.draw(st.sampled_from([5, 64]))}
    num_pages = data.draw(st.sampled_from([400, 24]))  # few pages: rows are preempted and walk their tokens again
    room = data.draw(st.sampled_from([{}, {"lazy_words": 1500, "lazy_masks": 5}]))  # little room: states are forgotten
    expanding = ExpandLate(data.draw(st.integers(0, 9)), lost=data.draw(st.sampled_from([0.0, 0.2])))
    lengths = data.draw(LENGTHS, label="lengths")
    shape |= {**room, "num_pages": num_pages}
    done = run([req for req, _ in job], ALL[name](), short_cap=0, expanding=expanding, lengths=lengths, **shape)
    assert tokens(done) == {req.row_index: defined(req, rule) for req, rule in job}
    for req, rule in job:
        out = done[req.row_index]
        if isinstance(rule, Grammar) and out.status == "ok":
            assert out.token_ids is not None
            assert is_text(rule, written(out.token_ids.tolist()))


@pytest.mark.parametrize("right", [True, False])
def test_drafts_that_are_all_right_or_all_forbidden(right: bool) -> None:
    job = [
        (following(request(i, [i, 7], cap=12, sampling=SAMPLINGS[i % 2]), grammar), grammar) for i, grammar in enumerate(GRAMMARS)
    ]
    expected = {req.row_index: grammar_tokens(req, grammar) for req, grammar in job}
    outputs = {req.seed: expected[req.row_index] for req, _ in job}
    done = run([req for req, _ in job], ForcedDrafter(4, outputs, right=right, fixed_len=True))
    assert tokens(done) == expected
    for out in done.values():  # a round that waits counts no token that it did not emit
        assert out.stats is not None
        assert out.token_ids is not None
        emitted = out.stats.num_prefills + out.stats.num_accepted + out.stats.num_rounds
        assert emitted - out.stats.num_discarded == len(out.token_ids)


def test_rounds_learn_that_drafts_before_a_wait_were_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose drafts are all right wait at nearly every state. A wait is no rejection, for the device and for the host."""
    monkeypatch.setattr(expand_process, "MAX_AHEAD", 0)
    ruled = [
        (following(request(i, [i, 7], cap=14, sampling=SAMPLINGS[i % 2]), grammar), grammar) for i, grammar in enumerate(GRAMMARS)
    ]
    outputs = {req.seed: grammar_tokens(req, grammar) for req, grammar in ruled}
    engine = engine_of(ExpandLate(0, most_polls=3), drafter=ForcedDrafter(4, outputs, right=True, fixed_len=True), lengths=4)
    heard, learn = list[RoundLog](), engine.planner.learn

    def noted(launch: UnreadLaunch, result: PendingResult, log: RoundLog, *weights: Any) -> None:
        heard.append(log)
        learn(launch, result, log, *weights)

    monkeypatch.setattr(engine.planner, "learn", noted)
    done = {one.row_index: one for one in engine.run(iter([req for req, _ in ruled]))}
    assert tokens(done) == {req.row_index: outputs[req.seed] for req, _ in ruled}
    (known,) = engine.calibration().values()
    assert known.accepted == known.drafts > 30
    assert sum(int(log.after_draft.sum()) for log in heard) > 10
    for log in heard:
        chose_last = (log.num_kept > 0) & ~log.after_draft & np.isin(log.finish, (0, HELD))
        assert (log.accepted_len == log.draft_len)[chose_last].all()


def test_states_are_asked_for_once_and_serve_all_rows_and_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand_process, "MAX_AHEAD", 0)
    expanding = ExpandLate(0, most_polls=0)
    room = AutomataCapacity(num_tokens=VOCAB, table_words=1 << 10, masks_bytes=1 << 10, lazy_words=1 << 14, lazy_masks_bytes=256)
    engine = make_engine(
        tiny_target(window=5), ALL["eagle3"](), packed(SLOTS, num_verified=3), device=DEVICE, vocabulary=VOCABULARY,
        automata_capacity=room, expanding=expanding,
    )
    same = [following(request(i, [4, 7], cap=12), GRAMMARS[0]) for i in range(12)]
    first = {done.row_index: done for done in engine.run(iter(same))}
    asks = expanding.num_asks
    assert 1 < asks <= 12
    again = {done.row_index: done for done in engine.run(iter(same))}
    assert expanding.num_asks == asks
    assert tokens(again) == tokens(first)
    rounds = [sum(done.stats.num_rounds for done in found.values() if done.stats) for found in (first, again)]
    assert rounds[1] < rounds[0]  # no draft is cut where the states are known


def test_a_request_that_enters_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup runs between rounds for every free slot, so its time counts."""
    asked, may_go_on = list[bool](), LazyConstraints.may_go_on

    def noted(states: LazyConstraints, state: RequestState) -> bool:
        asked.append(may_go_on(states, state))
        return asked[-1]

    monkeypatch.setattr(LazyConstraints, "may_go_on", noted)
    engine = engine_of(ExpandLate(0, most_polls=0))
    same = following(request(0, [4, 7], cap=12), GRAMMARS[0])
    for _ in range(2):
        asked.clear()
        (done,) = engine.run(iter([same]))
        assert done.token_ids is not None
    assert asked == [True]


@pytest.mark.parametrize("is_allowed", [True, False])
def test_tokens_of_an_earlier_run_are_checked_although_the_states_were_lost(is_allowed: bool) -> None:
    req = following(request(0, [4, 7], cap=12), GRAMMARS[0])
    whole = grammar_tokens(req, GRAMMARS[0])
    wrong = next(token for token in range(VOCAB) if not may_follow(GRAMMARS[0], whole[:1], token))
    left = Snapshot(
        row_index=0, sample_index=0, shard=0, tokens=(whole[0], whole[1] if is_allowed else wrong), num_prefills=5,
        cached_tokens=0, accepted=(1,), drafted=(1,), prefill_s=0.0, decode_s=0.0,
    )
    expanding = ExpandLate(0)
    engine = engine_of(expanding)
    expanding._lost_epoch = lazy_of(engine)._places.epoch
    (done,) = engine.run(iter([replace(req, resumed=left)]))
    assert done.error is None
    assert tokens({0: done}) == {0: whole}
    assert done.stats is not None
    assert done.stats.num_prefills == (6 if is_allowed else 1)


def test_a_state_after_tokens_is_found_although_the_states_were_lost() -> None:
    expanding = ExpandLate(0)
    engine = engine_of(expanding)
    expanding._lost_epoch = lazy_of(engine)._places.epoch
    found = lazy_of(engine).after(following(request(0, [4, 7], cap=12), GRAMMARS[0]), [3])
    assert isinstance(found, Expansion)


class ExpandSlowly(ExpandLate):
    """The states of one automaton take as long as many rounds."""

    def __init__(self, slow: LazyAutomaton) -> None:
        super().__init__(0, most_polls=0)
        self._slow = slow

    def submit(self, ask: Ask) -> Future[Answer]:
        found = super().submit(ask)
        if ask.automaton == self._slow:
            assert isinstance(found, LateAnswer)
            found.polls = 2000
        return found


def test_requests_that_await_a_state_let_others_into_the_slots_first() -> None:
    """Rows of one automaton are the first of the job, and more than there are slots."""
    job = [(following(request(i, [i, 7], cap=12), GRAMMARS[0]), GRAMMARS[0]) for i in range(SLOTS)]
    job += [(following(request(i, [i, 7], cap=6), GRAMMARS[5]), GRAMMARS[5]) for i in range(SLOTS, SLOTS + 3)]
    done = run([req for req, _ in job], ALL["none"](), expanding=ExpandSlowly(lazy(GRAMMARS[0])))
    assert sorted(list(done)[:3]) == [SLOTS, SLOTS + 1, SLOTS + 2]
    assert tokens(done) == {req.row_index: grammar_tokens(req, grammar) for req, grammar in job}


def test_states_that_are_computed_ahead_save_asks_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    job = [following(request(i, [i, 7], cap=14, sampling=SAMPLINGS[i % 2]), GRAMMARS[i % 3]) for i in range(9)]
    found = []
    for most in (0, expand_process.MAX_AHEAD):
        monkeypatch.setattr(expand_process, "MAX_AHEAD", most)
        monkeypatch.setattr(expand_process, "AHEAD_S", 60.0)
        expanding = ExpandLate(0)
        found.append((tokens(run(job, ALL["none"](), expanding=expanding)), expanding.num_asks))
    assert found[0][0] == found[1][0]
    assert 3 * found[1][1] < 2 * found[0][1]


@pytest.mark.parametrize("name", ["none", "eagle3", "lookup", "tree"])
@pytest.mark.parametrize("opened", [True, None, False])
def test_an_answer_follows_its_grammar_after_the_thought(name: str, opened: bool | None) -> None:
    grammar = GRAMMARS[5]
    how = Thinking(begin_id=BEGIN, end_id=END, opened=opened, budget=5, closing=(END,))
    thought = {True: True, None: False, False: None}[opened]
    requests = [
        replace(
            following(request(i, [i, 11, 4], cap=25, sampling=SamplingParams(temperature=1.0)), grammar), thinking=how,
            automaton_state={True: THOUGHT, None: EITHER, False: ANSWER}[opened],
        )
        for i in range(8)
    ]
    done = run(requests, ALL[name](), expanding=ExpandLate(0, thinks=True))
    ended = 0
    for out in tokens(done).values():
        for place, token in enumerate(out):
            assert may_follow(grammar, out[:place], token, thought=thought), (out, place)
        ended += out[-1] == EOS
    assert ended >= 3
    assert tokens(done) == tokens(run(requests, ALL["none"](), expanding=ExpandLate(0, thinks=True)))


def test_a_row_goes_on_where_an_earlier_run_left_it() -> None:
    req = following(request(0, [5, 9], cap=14, sampling=SAMPLINGS[1]), GRAMMARS[4])
    whole = grammar_tokens(req, GRAMMARS[4])
    left = Snapshot(
        row_index=0, sample_index=0, shard=0, tokens=tuple(whole[:3]), num_prefills=1, cached_tokens=0, accepted=(2,),
        drafted=(2,), prefill_s=0.0, decode_s=0.0,
    )
    assert len(whole) > 3
    assert tokens(run([replace(req, resumed=left)], ALL["none"]())) == {0: whole}
    wrong = replace(left, tokens=(END, END, END))  # of another grammar: not taken over
    assert tokens(run([replace(req, resumed=wrong)], ALL["none"]())) == {0: whole}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    req = following(request(0, [5, 9], cap=6), GRAMMARS[0])
    free = run([replace(req, max_new_tokens=1, automaton=None)], ALL["none"](), logprobs=VOCAB)[0]
    done = run([req], ALL["eagle3"](), logprobs=0)[0]
    assert done.token_ids is not None
    assert done.logprobs is not None
    assert free.top_logprobs is not None
    assert len(done.logprobs) == len(done.token_ids)
    first = free.top_logprobs[0][0].tolist().index(int(done.token_ids[0]))
    assert done.logprobs[0] == pytest.approx(free.top_logprobs[1][0][first])


@pytest.mark.parametrize("name", ["none", "lookup"])
def test_a_row_whose_state_cannot_be_found_is_an_error_row_and_the_others_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_dfa, "MAX_PLACES", 5)
    wide = Grammar({"S": ("AS", "BS", "CS", "DS", "ES", "FS", "d"), **{name: (f"a{name}c", "b") for name in "ABCDEF"}})
    at_once = Grammar({"S": ("a", *(f"a{letter}d" for letter in "ABCDEF")), **dict.fromkeys("ABCDEF", ("bb", "c"))})
    job = [(following(request(i, [i, 7], cap=9), (GRAMMARS[0], wide, at_once)[i % 3]), i % 3) for i in range(9)]
    done = run([req for req, _ in job], ALL[name](), num_pages=24, short_cap=0)
    assert len(done) == 9
    for req, kind in job:
        out = done[req.row_index]
        if kind == 0:
            assert tokens({0: out}) == {0: grammar_tokens(req, GRAMMARS[0])}
        else:
            assert out.status == "error"
            assert out.error is not None
            assert (out.error.code, out.error.stage) == ("large_schema", "decode")
            assert "make the grammar less ambiguous" in out.error.message


class FailsToExplain(ExpandLate):
    """The process ends, once, or cannot answer, when it is asked why a row has no token left."""

    def __init__(self, answer: str | None) -> None:
        super().__init__(0, most_polls=2)
        self._answer, self.num_failed = answer, 0

    def submit(self, ask: Ask) -> Future[Answer]:
        if ask.reads_ahead or self.num_failed:
            return super().submit(ask)
        self.num_failed += 1
        found = LateAnswer()
        found.polls = 1
        found.set_result(self._answer)
        if self._answer is None:
            self._lost_epoch = ask.epoch
        return found


@pytest.mark.parametrize(
    ("answer", "said"), [(None, "no token is left for output token 1"), ("it takes too long", "it takes too long")]
)
def test_a_row_without_a_token_says_so_although_the_states_were_lost(answer: str | None, said: str) -> None:
    grammar = GRAMMARS[0]
    allowed = [token for token in range(VOCAB) if may_follow(grammar, [], token)]
    sampling = SamplingParams(bad_words=tuple((token,) for token in allowed))
    expanding = FailsToExplain(answer)
    done = run(
        [following(request(0, [4, 7], cap=5, sampling=sampling), grammar), following(request(1, [5, 7], cap=5), grammar)],
        ALL["none"](), expanding=expanding,
    )
    assert expanding.num_failed == 1
    assert done[0].error is not None
    assert said in done[0].error.message
    assert tokens({1: done[1]}) == {1: grammar_tokens(request(1, [5, 7], cap=5), grammar)}


class OutOfMemory(Exception):
    pass


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wherever_a_run_fails_the_next_ones_go_on_from_its_tokens(name: str, data: st.DataObject) -> None:
    """No row comes twice, and none is lost."""
    job = data.draw(jobs())
    left, done = {req.row_index: req for req, _ in job}, dict[int, Completion]()
    for turn in range(8):
        where = data.draw(st.sampled_from(["execute", "_process", "_completion"]))
        after = data.draw(st.integers(0, 25)) if turn < 7 else 10**6
        engine = engine_of(ExpandLate(turn), drafter=ALL[name](), num_pages=data.draw(st.sampled_from([400, 24])))
        owner = {"execute": engine.executor, "_process": EngineRun, "_completion": OpenRequests}[where]
        turns, works = iter(range(after)), getattr(owner, where)

        def fails(*args: Any, turns: Iterator[int] = turns, works: Any = works) -> Any:
            if next(turns, None) is None:
                raise OutOfMemory
            return works(*args)

        with pytest.MonkeyPatch.context() as patch, suppress(OutOfMemory):
            patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 0)
            patch.setattr(owner, where, fails)
            for out in engine.run(iter(list(left.values()))):
                done[out.row_index] = out
                del left[out.row_index]
        for one in engine.unfinished():
            if one.row_index in left:
                earlier = left[one.row_index].resumed
                assert earlier is None or one.tokens[: len(earlier.tokens)] == earlier.tokens
                left[one.row_index] = replace(left[one.row_index], resumed=one)
        if not left:
            break
    assert tokens(done) == {req.row_index: defined(req, rule) for req, rule in job}


@pytest.mark.parametrize("fails_at", range(6))
def test_states_that_the_device_did_not_get_are_uploaded_in_the_next_run(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm engine serves calls after one that ran out of memory. Its host must know which states the device has."""
    job = [(following(request(i, [i, 7], cap=12), grammar), grammar) for i, grammar in enumerate(GRAMMARS)]
    engine = engine_of(ExpandLate(0, most_polls=0))
    upload, left = Automata.upload_states, iter(range(fails_at))

    def fails(automata: Automata, new: StatesUpload) -> None:
        if next(left, None) is None:
            raise OutOfMemory
        upload(automata, new)

    with monkeypatch.context() as patch:
        patch.setattr(Automata, "upload_states", fails)
        with pytest.raises(OutOfMemory):
            list(engine.run(req for req, _ in job))
    done = {out.row_index: out for out in engine.run(req for req, _ in job)}
    assert tokens(done) == {req.row_index: defined(req, rule) for req, rule in job}


def test_states_whose_upload_an_interrupted_run_lost_are_uploaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm engine goes on after memory ran out in any step."""
    engine = engine_of(ExpandLate(0, most_polls=0))
    job = [following(request(i, [4, i], cap=8), grammar) for i, grammar in enumerate(GRAMMARS)]
    expected = {req.row_index: grammar_tokens(req, grammar) for req, grammar in zip(job, GRAMMARS, strict=True)}
    for failing in range(8):
        steps, execute = iter(range(failing)), engine.executor.execute

        def fails(step: ScheduledStep, steps: Iterator[int] = steps, execute: Any = execute) -> None:
            if next(steps, None) is None:
                raise OutOfMemory
            execute(step)

        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "execute", fails)
            with pytest.raises(OutOfMemory):
                list(engine.run(iter(job)))
        assert tokens({done.row_index: done for done in engine.run(iter(job))}) == expected
        lazy_of(engine).forget()


def in_a_header() -> int:
    """The state in which the output of a harmony model usually begins: after <|start|>assistant."""
    return state_after_header((0, 1), TokenSymbols.of([START, b"assistant"]))


def states_alone(req: Request, grammar: Grammar) -> int:
    """The most states that any of the row's asks takes in a process of its own."""
    return _states_alone(grammar, tuple(grammar_tokens(req, grammar)))


@cache
def _states_alone(grammar: Grammar, out: tuple[int, ...]) -> int:
    found = 0
    for count in range(len(out)):
        process = ScarceProcess()
        process.ask(Ask(lazy(grammar), ANSWER, out[:count], 1, True))
        assert process._work is not None
        found = max(found, process._work._known[lazy(grammar)].dfa.num_states)
    return found


@pytest.mark.parametrize("name", ["none", "eagle3"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_row_is_an_error_row_only_if_its_own_states_take_too_much(name: str, data: st.DataObject) -> None:
    """Rows of one grammar share the states and the memory of its process: the row that reaches a limit is not the only cause."""
    deep = Grammar({"S": ("aSa", "bSb", "cSc", "d")})
    rules = data.draw(st.lists(st.sampled_from((deep, deep, deep, *GRAMMARS[:3])), min_size=2, max_size=7))
    job = [(following(request(i, [i, 9], cap=14, sampling=SAMPLINGS[1]), rule), rule) for i, rule in enumerate(rules)]
    needs = {req.row_index: states_alone(req, rule) for req, rule in job}
    most = data.draw(st.sampled_from(sorted(needs.values())))
    expanding = ExpandScarcely(data.draw(st.integers(0, 9)), most)
    shape = {"num_pages": data.draw(st.sampled_from([400, 24])), "run_ahead": data.draw(st.sampled_from([0, 2]))}
    done = run([req for req, _ in job], ALL[name](), short_cap=0, expanding=expanding, **shape)
    assert len(done) == len(job)
    for req, rule in job:
        out = done[req.row_index]
        if out.error is None:
            assert out.token_ids is not None
            assert out.token_ids.tolist() == grammar_tokens(req, rule)
        else:
            assert needs[req.row_index] > most
            assert out.error.message.startswith("grammar: full (after output token ")
            assert out.error.code == "large_schema"


@pytest.mark.parametrize("name", ["none", "lookup", "eagle3"])
def test_a_row_that_fails_has_ended_if_its_tokens_end_it_before(name: str) -> None:
    """A feature examines a row every few tokens, after a number that depends on the lengths of rounds. So a row that waits for a
    state which cannot be found may have tokens that no feature has examined."""
    deep, most = Grammar({"S": ("aSa", "bSb", "cSc", "d")}), 150
    rule = Repetition(min_pattern_size=1, max_pattern_size=2, min_count=2)
    plain = [following(request(i, [i, 9], cap=14, sampling=SAMPLINGS[1]), deep) for i in range(24)]
    kept = {req.row_index: tokens_before_failing(req, deep, most) for req in plain if states_alone(req, deep) > most}
    ends = {row: first_repetition(grammar_tokens(plain[row], deep)[: kept[row]], rule) for row in kept}
    expected = {row: "error" if end is None else "repetition" for row, end in ends.items()}
    assert set(expected.values()) == {"error", "repetition"}
    done = run([replace(plain[row], repetition=rule) for row in kept], ALL[name](), expanding=ExpandScarcely(0, most))
    assert {row: done[row].finish_reason for row in kept} == expected
    for row, end in ends.items():
        if end is not None:
            assert tokens(done)[row] == grammar_tokens(plain[row], deep)[:end]


def test_a_row_that_fails_while_it_has_no_slot_has_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that waits for a state is preempted, and fails before it has a slot again."""
    deep, most = Grammar({"S": ("aSa", "bSb", "cSc", "d")}), 150
    rule = Repetition(min_pattern_size=1, max_pattern_size=2, min_count=2)
    row = replace(following(request(0, [0, 9], cap=14, sampling=SAMPLINGS[1], predicted=1), deep), repetition=rule)
    kept = tokens_before_failing(row, deep, most)
    assert first_repetition(grammar_tokens(row, deep)[:kept], rule) is not None
    launch, preempted = Scheduler._round, list[int]()

    def after_preempting(scheduler: Scheduler, *, reads: bool = True) -> Iterator[ScheduledStep]:
        for held in [] if scheduler.unread or preempted else list(scheduler.slots.held):
            scheduler.slots.flush(held)
            if len(held.tokens) == kept:
                preempted.append(held.request.row_index)
                scheduler._allocator.preempt(held)
        yield from launch(scheduler, reads=reads)

    monkeypatch.setattr(Scheduler, "_round", after_preempting)
    others, without_slot = [request(100 + i, [i, 3], cap=60, predicted=60) for i in range(2)], 0
    for seed in range(6):
        preempted.clear()
        done = run([*others, row], ALL["none"](), expanding=ExpandScarcely(seed, most), short_cap=0, run_ahead=0)
        assert done[0].finish_reason == "repetition"
        without_slot += len(preempted)
    assert without_slot


def tokens_before_failing(req: Request, grammar: Grammar, most: int) -> int:
    """The number of tokens after which no state is found, as it takes more than `most`."""
    out = tuple(grammar_tokens(req, grammar))
    return next(count for count in range(len(out)) if _states_alone(grammar, out[: count + 1]) > most)


@pytest.mark.parametrize("ahead_s", [0.0, 60.0], ids=["", "much read ahead"])
@pytest.mark.parametrize("name", ["none", "lookup"])
def test_the_limit_of_states_is_an_error_only_of_rows_that_reach_it_alone(
    name: str, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that other rows need, or that are read ahead, count too: then the process ends, and the rows ask again."""
    deep = Grammar({"S": ("aSa", "bSb", "cSc", "d")})
    job = [following(request(i, [i, 9], cap=14, sampling=SAMPLINGS[1]), rule) for i, rule in enumerate((deep, deep, deep))]
    needs = {req.row_index: states_alone(req, deep) for req in job}
    assert len(set(needs.values())) > 1
    monkeypatch.setattr(expand_process, "AHEAD_S", ahead_s)
    for most in sorted(set(needs.values())):
        monkeypatch.setattr(lazy_dfa, "MAX_STATES", most)
        done = run(job, ALL[name](), expanding=ExpandScarcely(most))
        assert {row: out.status == "error" for row, out in done.items()} == {row: need > most for row, need in needs.items()}


@pytest.mark.parametrize("begins", [ANSWER, EITHER, in_a_header()], ids=["answer", "either", "in a header"])
def test_a_row_that_fails_ends_wherever_its_output_begins(begins: int) -> None:
    """In a harmony model an output usually begins inside of a header. A row that fails alone must not be asked about for ever."""
    wide = Grammar({"S": ("aSa", "bSb", "cSc", "d")})
    job = [replace(following(request(i, [4, 7], cap=12), (GRAMMARS[0], wide)[i]), automaton_state=begins) for i in range(2)]
    asks = 0

    def failing(process: ScarceProcess, request: object, result: Any = ScarceProcess.result) -> Any:
        nonlocal asks
        asks += 1
        assert asks < 1000
        if isinstance(request, Ask) and request.automaton == lazy(wide):
            process.end()
            raise Died("compiling it takes more than 20 s")
        return result(process, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScarceProcess, "result", failing)
        done = run(job, ALL["none"](), expanding=ExpandScarcely(0, channels=True))
    assert len(done) == 2
    assert done[1].error is not None
    assert (done[1].error.code, done[1].error.retryable) == ("large_schema", False)


def test_a_row_may_be_decoded_again_if_its_automaton_is_lazy_only_for_want_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a finite automaton, which another run may have the time for, it would not have failed."""
    monkeypatch.setattr(lazy_dfa, "MAX_PLACES", 5)
    wide = Grammar({"S": ("AS", "BS", "CS", "DS", "ES", "FS", "d"), **{name: (f"a{name}c", "b") for name in "ABCDEF"}})
    first = following(request(0, [0, 7], cap=9), wide)
    assert isinstance(first.automaton, LazyAutomaton)
    second = replace(following(request(1, [1, 7], cap=9), wide), automaton=first.automaton._replace(retryable=True))
    done = run([first, second], ALL["none"](), short_cap=0)
    errors = [done[row].error for row in range(2)]
    assert [error is not None and error.retryable for error in errors] == [False, True]
    assert errors[1] is not None
    assert errors[1].message.endswith("decode the row again (resume=error)")


def test_a_row_without_an_answer_because_of_the_machine_may_be_decoded_again() -> None:
    job = [following(request(i, [4, 7], cap=12), rule) for i, rule in enumerate(GRAMMARS[:2])]

    def failing(process: ScarceProcess, request: object, result: Any = ScarceProcess.result) -> Any:
        if isinstance(request, Ask) and request.automaton == lazy(GRAMMARS[1]):
            raise OSError("no process")
        return result(process, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScarceProcess, "result", failing)
        done = run(job, ALL["none"](), expanding=ExpandScarcely(0))
    assert [done[i].status for i in range(2)] == ["ok", "error"]
    assert done[1].error is not None
    assert done[1].error.retryable
    assert "resume=error" in done[1].error.message


def test_little_room_is_enough_and_is_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more grammars than there is room for wait, and one that takes more than all of it is an error row."""
    forgotten = 0
    forget = LazyPlaces.forget

    def counted(places: LazyPlaces) -> None:
        nonlocal forgotten
        forgotten += 1
        forget(places)
        assert places._next_word == 1 << 17

    monkeypatch.setattr(LazyPlaces, "forget", counted)
    taken = list[int]()
    upload = Automata.upload_states

    def noted(automata: Automata, new: StatesUpload) -> None:
        assert not len(new.at) or 1 << 17 <= new.at.min() <= new.at.max() < len(automata.tables)
        assert new.mask_ids.max(initial=0) < len(automata.masks)
        taken.append(len(new.at))
        upload(automata, new)

    monkeypatch.setattr(Automata, "upload_states", noted)
    job = [(following(request(i, [i, 7], cap=12, sampling=SAMPLINGS[i % 2]), g), g) for i, g in enumerate((*GRAMMARS, *GRAMMARS))]
    done = run([req for req, _ in job], ALL["eagle3"](), lazy_words=560, lazy_masks=4)
    assert tokens(done) == {req.row_index: grammar_tokens(req, grammar) for req, grammar in job}
    assert forgotten > 3
    assert len(taken) > 20
    few = run([req for req, _ in job], ALL["none"](), lazy_words=300, lazy_masks=4)
    assert {out.error.message.split("(")[0] for out in few.values() if out.error is not None} == {
        "grammar: one of its states takes more than the memory for them on the device "
    }


@pytest.mark.parametrize("name", ["eagle3", "tree"])
@torch.inference_mode()
def test_rows_that_wait_go_on_with_the_drafts_that_were_prepared_for_them(name: str) -> None:
    """A round in which a row takes no part leaves what the drafter keeps of it as it is, and renews that of the others."""
    drafter = ALL[name]()
    engine = make_engine(tiny_target(), drafter, packed(2, num_verified=drafter.draft_len), device=DEVICE)
    executor, mode = engine.executor, SamplingMode(may_hold=True)
    requests = [request(i, [3 + i, 5, 7], cap=20) for i in range(2)]
    executor.rows.begin([0, 1], requests, [()] * 2)
    executor.rows.grant([(slot, 0, (range(1 + 8 * slot, 9 + 8 * slot),)) for slot in range(2)])
    prefill_chunk(executor.round, executor.rows, [Segment(slot, 0, 3, True) for slot in range(2)], mode).activate(executor.rows)
    executor.rows.live[1] = 0
    before = [tensor.clone() for tensor in executor.cache.draft_rows]
    executor.round.run(executor.rows, mode, drafter.draft_len)
    hidden, hidden_before = executor.cache.draft_rows[1], before[1]
    assert all(torch.equal(tensor[1], old[1]) for tensor, old in zip(executor.cache.draft_rows, before, strict=True))
    assert not torch.equal(hidden[0], hidden_before[0])
