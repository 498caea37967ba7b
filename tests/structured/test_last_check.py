"""The last check: whatever goes wrong on the device, no row is written whose tokens its constraint does not allow."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchspec.automata import token_automaton
from batchspec.automata.lazy_automaton import ANSWER, EITHER, THOUGHT, Ask, Expansion, LazyAutomaton, Recheck
from batchspec.automata.token_automaton import NEXT, TokenAutomaton
from batchspec.batch.automata import Automata, AutomataCapacity, AutomatonUpload, ConstraintOffsets
from batchspec.engine.features.automaton_places import AutomatonPlaces
from batchspec.engine.features.last_check import LastCheck
from batchspec.engine.features.lazy_constraints import LazyConstraints
from batchspec.engine.features.lazy_places import LazyPlaces
from batchspec.engine.features.stop_strings import StopStrings
from batchspec.engine.features.texts import Texts
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.slots.open_requests import OpenRequests, completion_of
from batchspec.engine.slots.request_state import RequestState
from batchspec.kernels.rounds.accept import FULL, STOPPED
from batchspec.process.limited_process import LimitedProcess
from batchspec.records import CONSTRAINT_VIOLATED, Completion, Request, Snapshot, Thinking
from batchspec.structured.expander import Expander
from tests.batch.test_logit_rules import ALL
from tests.helpers import grammars
from tests.helpers.automata import (
    BEGIN,
    END,
    EOS,
    PATTERNS_OF_LETTERS,
    TOKENS,
    VOCABULARY,
    automaton,
    constrained_tokens,
    may_follow,
)
from tests.helpers.engines import DEVICE, VOCAB, lazy_of, make_engine, packed, request, tiny_target
from tests.helpers.grammars import GRAMMARS, ExpandLate, Grammar, ScarceProcess, grammar_tokens, lazy, work
from tests.structured.test_constrained import SAMPLINGS, constrained, mixed_job, tokens
from tests.structured.test_constrained import run as run_finite
from tests.structured.test_lazy import following
from tests.structured.test_lazy import run as run_lazy

pytestmark = pytest.mark.usefixtures("poisoned")
SOME = ("none", "lookup", "eagle3", "tree")
outputs = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)


def follows(pattern: str | Grammar | None, tokens: Sequence[int]) -> bool:
    """Whether each token may follow those before it, by the definition."""
    if isinstance(pattern, Grammar):
        return all(grammars.may_follow(pattern, tokens[:i], tokens[i]) for i in range(len(tokens)))
    return pattern is None or all(may_follow(pattern, tokens[:i], tokens[i]) for i in range(len(tokens)))


def check_rows(job: Sequence[tuple[Request, Any]], done: dict[int, Completion]) -> int:
    """Each row follows its constraint or is an error row with the code of the check; returns how many are."""
    violated = 0
    assert len(done) == len(job)
    for req, pattern in job:
        out = done[req.row_index]
        if out.token_ids is not None:
            assert follows(pattern, out.token_ids.tolist())
        else:
            assert out.error is not None
            violated += out.error.code == CONSTRAINT_VIOLATED
    return violated


def never_fails(self: Automata, states: Tensor, classes: Tensor, log: Tensor, live: Tensor) -> None:
    """Advances the states as ever, and fails no row."""
    finish, alive = log[:, 3].clone(), live.clone()
    _ADVANCE(self, states, classes, log, live)
    log[:, 3], live[:] = finish, alive


_ADVANCE = Automata.advance


@given(st.sampled_from(PATTERNS_OF_LETTERS), outputs, st.sampled_from([None, True, False]))
def test_as_many_tokens_are_allowed_as_by_the_definition(pattern: str, tokens: list[int], thought: bool | None) -> None:
    made = automaton(pattern, thinks=thought is not None)
    state = {None: made.answer, True: made.thought, False: made.either}[thought]
    wrong = (i for i, token in enumerate(tokens) if not may_follow(pattern, tokens[:i], token, thought=thought))
    expected = next(wrong, len(tokens))
    if EOS not in tokens[:-1]:  # no row goes on after it
        assert made.num_allowed(state, tokens) == expected


@given(st.sampled_from(GRAMMARS), outputs, st.sampled_from([None, True, False]))
def test_as_many_tokens_are_allowed_by_a_lazy_automaton(grammar: Grammar, tokens: list[int], thought: bool | None) -> None:
    state = {None: ANSWER, True: THOUGHT, False: EITHER}[thought]
    wrong = (i for i, token in enumerate(tokens) if not grammars.may_follow(grammar, tokens[:i], token, thought=thought))
    expected = next(wrong, len(tokens))
    if EOS not in tokens[:-1]:
        assert work(thinks=thought is not None).recheck(Recheck(lazy(grammar), state, tuple(tokens))) == expected


@given(
    st.sampled_from(PATTERNS_OF_LETTERS), st.lists(outputs, min_size=1, max_size=4), st.integers(1, 4), st.sampled_from("CF")
)
def test_a_walk_goes_byte_by_byte_whichever_steps_were_walked_before(
    pattern: str, rows: list[list[int]], kept: int, order: Any
) -> None:
    """A step is kept, dropped and found anew; the tables may lie in memory in either order."""
    made = replace(automaton(pattern), table=np.asarray(automaton(pattern).table, order=order))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_automaton, "KEPT_STEPS", kept)
        for row in (*rows, *rows):
            state = made.answer
            for token in row:
                for symbol in VOCABULARY.symbols[VOCABULARY.starts[token] : VOCABULARY.starts[token + 1]]:
                    state = int(made.table[state, NEXT + made.classes[symbol]])
            assert made.walk(made.answer, row) == state
            assert len(made._steps) <= kept


@settings(max_examples=60)
@given(st.sampled_from(PATTERNS_OF_LETTERS), st.data())
def test_what_is_drawn_from_the_masks_is_allowed_wherever_it_is_cut_off(pattern: str, data: st.DataObject) -> None:
    made, out = automaton(pattern, thinks=True), list[int]()
    begin = state = data.draw(st.sampled_from([made.answer, made.thought, made.either]))
    while len(out) < 12 and EOS not in out:
        out.append(data.draw(st.sampled_from(np.flatnonzero(made.allowed(state)).tolist())))
        state = made.walk(state, out[-1:])
        assert made.num_allowed(begin, out) == len(out)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("pages", [400, 24])
def test_a_row_that_follows_another_row_s_automaton_is_an_error_row(
    name: str, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a place were given twice. With few pages rows are preempted, and walk their tokens on the host meanwhile."""
    place_of, turn = AutomatonPlaces.offsets, [0]

    def of_another(self: AutomatonPlaces, own: TokenAutomaton, state: int, tokens: list[int]) -> ConstraintOffsets:
        others = [one.automaton for one in self._residents.values() if one.automaton is not own]
        turn[0] += 1
        if not others or turn[0] % 2:
            return place_of(self, own, state, tokens)
        return place_of(self, others[0], others[0].answer, tokens)

    monkeypatch.setattr(AutomatonPlaces, "offsets", of_another)
    job = mixed_job()
    assert check_rows(job, run_finite([req for req, _ in job], ALL[name](), num_pages=pages, short_cap=0, run_ahead=2)) >= 1


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("advance", [_ADVANCE, never_fails])
def test_rows_whose_masks_allow_everything_are_error_rows(name: str, advance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = AutomatonUpload.of

    def corrupt(made: TokenAutomaton, place: int, mask_ids: Any) -> AutomatonUpload:
        return replace(upload(made, place, mask_ids), masks=np.full_like(made.masks, -1))

    monkeypatch.setattr(AutomatonUpload, "of", staticmethod(corrupt))
    monkeypatch.setattr(Automata, "advance", advance)
    job = mixed_job()
    assert check_rows(job, run_finite([req for req, _ in job], ALL[name](), num_pages=24, short_cap=0)) > 5


@pytest.mark.parametrize("name", SOME)
def test_a_text_that_ends_too_early_is_an_error_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of each mask is wrong: that of the EOS."""
    upload = AutomatonUpload.of

    def corrupt(made: TokenAutomaton, place: int, mask_ids: Any) -> AutomatonUpload:
        return replace(upload(made, place, mask_ids), masks=made.masks | 1)

    assert EOS == 0
    monkeypatch.setattr(AutomatonUpload, "of", staticmethod(corrupt))
    pattern = "[a-d]{9,11}"
    of_regex = {"constraint": ("regex", pattern)}
    job = [(constrained(request(i, [i, 9], cap=14, sampling=SAMPLINGS[1]), pattern, **of_regex), pattern) for i in range(16)]
    done = run_finite([req for req, _ in job], ALL[name]())
    assert check_rows(job, done) >= 2
    for out in done.values():
        if out.error is not None:
            assert out.error.message.startswith("regex: output token ")
            assert f"(id {EOS}) is not allowed there" in out.error.message
            assert "resume=error" in out.error.message
            assert (out.error.stage, out.error.retryable, out.token_ids) == ("decode", True, None)


def test_a_row_that_ends_at_no_stop_id_is_an_error_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device says that a row has ended at a stop id, and it has not."""
    end = EngineRun._end
    monkeypatch.setattr(EngineRun, "_end", lambda self, state, finish, now: end(self, state, 1, now))
    req = constrained(request(0, [5, 9], cap=4), "[a-d]{9,11}")
    out = run_finite([req], ALL["none"]())[0]
    assert out.error is not None
    assert (out.error.code, "none of its stop ids" in out.error.message) == (CONSTRAINT_VIOLATED, True)


class Damaged(ExpandLate):
    """Expansions are wrong in a way of choice; what is asked at the end is answered rightly."""

    def __init__(self, how: str) -> None:
        super().__init__(0, most_polls=1)
        self._how = how

    def submit(self, ask: Any) -> Any:
        found = super().submit(ask)
        answer = found.result()
        damaged: Future[Any] = Future()
        damaged.set_result(self._damaged(answer) if isinstance(answer, Expansion) and len(answer.mask) else answer)
        return damaged

    def _damaged(self, one: Expansion) -> Expansion:
        ahead = tuple(map(self._damaged, one.ahead))
        match self._how:
            case "ends":
                return replace(one, mask=one.mask | 1, ahead=ahead)
            case "all":
                return replace(one, mask=one.mask | -1, ahead=ahead)
        return replace(one, following=np.where(one.following, one.state, 0).astype(np.int32), ahead=ahead)


@pytest.mark.second
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("how", ["ends", "all", "stays"])
@pytest.mark.parametrize("pages", [400, 24])
def test_rows_of_a_lazy_automaton_with_wrong_states_are_error_rows(name: str, how: str, pages: int) -> None:
    job = [
        (following(request(i, [i, 7], cap=12, sampling=SAMPLINGS[i % 2]), GRAMMARS[i % 4]), GRAMMARS[i % 4]) for i in range(16)
    ]
    done = run_lazy([req for req, _ in job], ALL[name](), expanding=Damaged(how), num_pages=pages, short_cap=0)
    assert check_rows(job, done) >= 2


@pytest.mark.parametrize("name", SOME)
def test_rows_whose_states_have_changed_places_are_error_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two states of an automaton are taken for each other. Where a row's state has no mask then, it must not wait for ever."""
    put = LazyPlaces.put

    def exchange(self: LazyPlaces, made: LazyAutomaton, found: Expansion) -> bool:
        placed, places = put(self, made, found), self.known[made].places
        if placed and len(found.states) > 2:
            places[found.states[[0, 1]]] = places[found.states[[1, 0]]]
        return placed

    monkeypatch.setattr(LazyPlaces, "put", exchange)
    job = [(following(request(i, [i, 7], cap=12), GRAMMARS[i % 5]), GRAMMARS[i % 5]) for i in range(12)]
    assert check_rows(job, run_lazy([req for req, _ in job], ALL[name](), expanding=ExpandLate(0))) >= 2


@pytest.mark.second
@pytest.mark.parametrize("is_lazy", [False, True])
def test_tokens_that_an_earlier_run_left_are_checked_with_the_rest(is_lazy: bool) -> None:
    """A row that has ended by them already passes the check, too."""
    if is_lazy:
        rule: Any = GRAMMARS[4]
        req = following(request(0, [5, 9], cap=14, sampling=SAMPLINGS[1]), rule)
        whole, run = grammar_tokens(req, rule), run_lazy
    else:
        rule = "(ab|c)*d"
        req = constrained(request(0, [5, 9], cap=14, sampling=SAMPLINGS[1]), rule)
        whole, run = constrained_tokens(req, rule), run_finite
    for count in range(1, len(whole) + 1):
        left = Snapshot(
            row_index=0, sample_index=0, shard=0, tokens=tuple(whole[:count]), num_prefills=1, cached_tokens=0,
            accepted=(count - 1,), drafted=(count - 1,), prefill_s=0.0, decode_s=0.0,
        )
        out = run([replace(req, resumed=left)], ALL["none"]())[0]
        assert out.token_ids is not None
        assert out.token_ids.tolist() == whole


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_whole_output_of_an_earlier_run_is_checked_and_not_decoded_anew(is_lazy: bool) -> None:
    rule: Any = GRAMMARS[0] if is_lazy else "(ab|c)*d"
    req = request(0, [5, 9], cap=30, sampling=SAMPLINGS[1])
    req = following(req, rule) if is_lazy else constrained(req, rule)
    whole = grammar_tokens(req, rule) if is_lazy else constrained_tokens(req, rule)
    assert whole[-1] == EOS
    left = Snapshot(
        row_index=0, sample_index=0, shard=0, tokens=tuple(whole), num_prefills=7, cached_tokens=0, accepted=(len(whole) - 1,),
        drafted=(len(whole) - 1,), prefill_s=0.0, decode_s=0.0,
    )
    out = (run_lazy if is_lazy else run_finite)([replace(req, resumed=left)], ALL["none"]())[0]
    assert out.token_ids is not None
    assert out.token_ids.tolist() == whole
    assert out.stats is not None
    assert out.stats.num_prefills == 7


class NeverChecked(ExpandLate):
    """No output is ever checked."""

    def recheck(self, asked: Recheck) -> Any:
        return Future[Any]()


def engine_of(expanding: ExpandLate, decode: Any = None) -> Engine:
    return make_engine(
        tiny_target(window=5), ALL["lookup"](), packed(2, num_verified=4), device=DEVICE, vocabulary=VOCABULARY,
        expanding=expanding,
        automata_capacity=AutomataCapacity(num_tokens=VOCAB, table_words=1 << 14, masks_bytes=1 << 12, lazy_words=1 << 14),
    )


@pytest.mark.second
@pytest.mark.parametrize("how", ["not checked", "no completion"])
def test_rows_that_have_ended_are_not_decoded_anew_when_memory_runs_out(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether their check is outstanding, or the completion of one of them could not be made."""
    rules: list[Any] = [GRAMMARS[0], "(ab|c)*d", None, GRAMMARS[4], "[a-d]{3,9}"]
    job = [request(i, [i, 7], cap=12, sampling=SAMPLINGS[1]) for i in range(5)]
    job = [
        following(one, rule) if isinstance(rule, Grammar) else constrained(one, rule)
        for one, rule in zip(job, rules, strict=True)
    ]
    expected = run_lazy(job, ALL["none"]())
    done = dict[int, Completion]()
    engine = engine_of(NeverChecked(0) if how == "not checked" else ExpandLate(0))
    with monkeypatch.context() as patch:
        if how == "not checked":
            take = OpenRequests.take_completions

            def run_out(own: OpenRequests) -> list[Completion]:
                found = take(own)
                if len(lazy_of(engine)._check._asked) == 2:
                    raise MemoryError
                return found

            patch.setattr(OpenRequests, "take_completions", run_out)
        else:
            patch.setattr("batchspec.engine.slots.open_requests.completion_of", lambda *_, **__: [][0])
        with suppress(MemoryError, IndexError):
            done |= {out.row_index: out for out in engine.run(iter(job))}
    left = {one.row_index: one for one in engine.unfinished()}
    ended = [row for row, one in left.items() if list(one.tokens) == tokens(expected)[row]]
    assert len(ended) >= (2 if how == "not checked" else 1)
    assert not left.keys() & done.keys()
    again = engine_of(ExpandLate(0))
    resumed = [replace(job[row], resumed=left[row]) for row in ended]
    assert tokens({out.row_index: out for out in again.run(iter(resumed))}) == {row: list(left[row].tokens) for row in ended}
    assert again.totals.rounds == again.totals.prefill_tokens == 0


def test_what_cannot_be_checked_is_an_error_row() -> None:
    class Dumb(ExpandLate):
        def recheck(self, asked: Recheck) -> Any:
            found = super().recheck(asked)
            found._result = "no memory"
            return found

    out = run_lazy([following(request(0, [5, 9], cap=9), GRAMMARS[0])], ALL["none"](), expanding=Dumb(0))[0]
    assert out.error is not None
    assert (out.error.code, "cannot be checked a second time (no memory)" in out.error.message) == (CONSTRAINT_VIOLATED, True)


@pytest.mark.second
def test_a_process_that_ends_is_replaced_before_a_row_is_given_up() -> None:
    """Its states are lost, and the rows that need them ask again."""
    job = {"vocabulary": VOCABULARY, "end_ids": (EOS,), "thinks": False, "may_begin": False}
    expander, asked = Expander(job, num=1), Recheck(lazy(GRAMMARS[0]), ANSWER, (3, 5, 4, EOS))
    assert expander.recheck(asked).result(60) == 4
    process = expander._lanes[0].process._process
    assert process is not None
    process.kill()
    process.wait()
    assert expander.recheck(asked).result(60) == 4
    assert expander.recheck(asked._replace(tokens=(3, 5, EOS))).result(60) == 2


def test_where_no_process_can_be_started_an_answer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ended without an answer would let the row wait for ever."""

    def fail(process: LimitedProcess) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(LimitedProcess, "_start", fail)
    expander = Expander({"vocabulary": VOCABULARY, "end_ids": (EOS,), "thinks": False, "may_begin": False}, num=1)
    asked, ask = Recheck(lazy(GRAMMARS[0]), ANSWER, (3, EOS)), Ask(lazy(GRAMMARS[0]), ANSWER, (), 2, True)
    assert expander.recheck(asked).result(60) == "no more processes"
    assert expander.submit(ask).result(60) == "no more processes"


def test_a_row_is_checked_once_more_without_the_states_that_other_rows_left() -> None:
    """They may have taken all memory. Asks of that epoch get None: its states are gone."""
    process, asked = ScarceProcess(), Recheck(lazy(GRAMMARS[0]), ANSWER, (3, 5, 4, EOS))
    ask = Ask(lazy(GRAMMARS[0]), ANSWER, (3, 3, 3, 3, 5), 7, True)
    assert isinstance(process.ask(ask), Expansion)
    process.most = 9
    assert process.recheck(asked) == 4
    assert process.ask(ask) is None
    process.most = 99
    assert isinstance(process.ask(replace(ask, epoch=8)), Expansion)


def test_a_row_that_alone_takes_too_much_memory_to_check_says_so() -> None:
    assert ScarceProcess(3).recheck(Recheck(lazy(GRAMMARS[0]), ANSWER, (3, EOS))) == "full"


def test_no_completion_is_made_of_a_row_that_was_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a row were taken for ready although its check is outstanding."""
    ready = LazyConstraints.ready
    monkeypatch.setattr(LazyConstraints, "ready", lambda self, state: state.finish_reason is not None or ready(self, state))
    with pytest.raises(AssertionError, match="was not checked"):
        run_lazy([following(request(0, [5, 9], cap=4), GRAMMARS[0])], ALL["none"](), expanding=NeverChecked(0))


@pytest.mark.parametrize(
    ("root", "written", "answer"),
    [
        ('"\\n" x', "\na", "\na"), ('"\\n" x', "\n\na", "\na"), ('"\\n" x', "\n\n\na", "\na"), ('"\\n"? x', "\na", "a"),
        ('"\\n"? x', "\n\n\na", "\na"), ("x", "\n\nbab", "bab"), ("x", "a", "a"),
    ],
)
@pytest.mark.parametrize("finish", [STOPPED, FULL])
def test_a_line_break_that_a_recursive_grammar_asks_for_is_part_of_the_answer(
    root: str, written: str, answer: str, finish: int
) -> None:
    """Up to two line breaks may separate thought and answer, and only such are left out without which the answer matches."""
    automaton = LazyAutomaton("grammar", f'root ::= {root}\nx ::= "a" | "b" x "b"')
    spelled = [END, *(TOKENS.index(char.encode()) for char in written), *([EOS] if finish == STOPPED else [])]
    how = Thinking(begin_id=BEGIN, end_id=END, opened=True, budget=None, closing=(END,))
    one = replace(
        request(0, [5, 9], cap=14, stop_ids=(EOS,)), automaton=automaton, automaton_state=automaton.thought, thinking=how
    )
    state = RequestState.of(one, 0)
    state.tokens = spelled
    state.set_finish_reason(finish)
    check = LastCheck(VOCABULARY, ExpandLate(0, thinks=True))
    while not check.done(state):
        assert check.pending()
    assert not check.pending()
    texts = Texts(VOCABULARY.text, VOCABULARY, StopStrings(lambda _: None), check, defers=False)
    done = texts.finish(state, completion_of(state, drafter="none", eos_ids=frozenset({EOS}), slot=0, now=0.0))
    assert (done.text, done.reasoning, done.error) == (answer, "", None)
