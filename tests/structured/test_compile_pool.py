"""Cheap constraints are compiled first, and hostile ones have one budget of CPU time, which never makes one an error row."""

from __future__ import annotations

import resource
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from batchspec.automata.lazy_automaton import LazyAutomaton
from batchspec.automata.token_automaton import TokenAutomaton, TokenSymbols
from batchspec.process.child_process import OutOfTime, stopped_after
from batchspec.structured import compile_process
from batchspec.structured import compiler as compiler_module
from batchspec.structured.compile_pool import CHECK_S, SHORT_S, SLICE_S, Attempt, Budget
from batchspec.structured.compiler import Compiler
from tests.helpers.automata import EOS, VOCABULARY, finite

HOSTILE = [f"(a?){{{count}}}a{{3000}}" for count in (2990, 2991, 2992)]
"""Each takes 20 s and more as a finite automaton."""
JOB: dict[str, Any] = {"vocabulary": VOCABULARY, "end_ids": (EOS,), "thinks": False, "may_begin": False}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """With one process, and two seconds for all that need more than SLICE_S."""
    monkeypatch.setattr(compiler_module, "num_processes", lambda: 1)
    return Compiler(VOCABULARY, (EOS,), thinks=False, may_begin=False, cpu_s=2)


def _note(done: list[str], text: str, _: Future[Any]) -> None:
    done.append(text)


@pytest.mark.second
def test_hostile_constraints_delay_no_other_and_share_one_budget(compiler: Compiler) -> None:
    done: list[str] = []
    begun = {text: compiler.begin("regex", text) for text in (*HOSTILE, *(f"[ab]{{{count}}}" for count in range(9)))}
    for text, future in begun.items():
        future.add_done_callback(partial(_note, done, text))
    found = {text: future.result(100) for text, future in begun.items()}
    assert done[-3:] == HOSTILE
    assert all(isinstance(found[text], TokenAutomaton) for text in done[:-3])
    assert found[HOSTILE[0]] == LazyAutomaton("regex", HOSTILE[0])
    for text in HOSTILE[1:]:  # another run may have time for them
        assert found[text] == LazyAutomaton("regex", text, retryable=True)
    assert sorted(compiler.stats.lazy.items()) == [
        ("compiling it takes more than 0.5 s, and other constraints have used up the time for such ones", 2),
        ("compiling it takes more than 2 s", 1),
    ]


@pytest.mark.second
def test_a_new_process_is_ready_before_its_first_attempt(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes once for all constraints is no part of the time of the first one, which would never end in time."""
    monkeypatch.setattr("batchspec.structured.compile_pool.SLICE_S", 0.05)
    monkeypatch.setattr(Budget, "attempt", lambda *_, **__: Attempt("regex", "ab", 0.05, 5, "late"))
    many = TokenSymbols.of([f"{count:x}".encode() for count in range(200_000)])
    made = Compiler(many, (0,), thinks=False, may_begin=False, cpu_s=2)
    assert isinstance(made.compile("regex", "ab"), TokenAutomaton)
    assert not made.stats.lazy


@pytest.mark.second
def test_one_that_runs_out_of_time_ends_no_process(compiler: Compiler) -> None:
    compiler.compile("regex", "ab")
    assert compiler._pool is not None
    (process,) = compiler._pool.processes
    pid = process.pid
    assert isinstance(compiler.compile("regex", HOSTILE[0]), LazyAutomaton)
    assert finite(compiler.compile("regex", "ba")).num_states == finite(compiler.compile("regex", "ab")).num_states
    assert process.pid == pid


def test_one_that_takes_longer_than_a_slice_becomes_a_finite_automaton(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchspec.structured.compile_pool.SLICE_S", 1e-4)
    assert isinstance(compiler.compile("regex", "(a|b)*a(a|b|c|d){9}"), TokenAutomaton)


def booked(budget: Budget, attempt: Attempt, **answer: Any) -> dict[str, Any]:
    budget.book(attempt, answer)
    return answer


def test_the_budget_grows_with_what_finite_automata_take() -> None:
    """So a job of many large schemas compiles as many of them as before, and a hostile job at most three times as long."""
    budget = Budget(20)
    full = budget.attempt("regex", "a", is_again=True)
    assert (full.cpu_s, full.check_s, full.is_last) == (20, 20, True)
    assert "retryable" not in booked(budget, full, lazy="", seconds=21.0, out_of_time=True)
    spent = budget.attempt("regex", "a", is_again=True)
    assert (spent.cpu_s, spent.check_s, spent.is_last) == (0, CHECK_S, True)
    assert booked(budget, spent, lazy="", seconds=0.1, out_of_time=True)["retryable"]
    assert "retryable" not in booked(budget, spent, error="", seconds=0.1)
    first = budget.attempt("regex", "a", is_again=False)
    booked(budget, first, table=None, seconds=5.2)
    assert budget.attempt("regex", "a", is_again=True).cpu_s == pytest.approx(4)
    booked(budget, first, table=None, seconds=30.0)
    assert budget.attempt("regex", "a", is_again=True) == full


def test_first_attempts_become_shorter_when_too_many_were_in_vain() -> None:
    """Otherwise hundreds of hostile constraints would delay the cheap ones by half a second each."""
    budget = Budget(20)
    full, first = (budget.attempt("regex", "a", is_again=again) for again in (True, False))
    assert (first.cpu_s, first.check_s, first.is_last) == (SLICE_S, SLICE_S, False)
    for _ in range(40):
        assert budget.attempt("regex", "a", is_again=False) == first
        booked(budget, first, later=True, seconds=0.5)
    assert budget.attempt("regex", "a", is_again=False) == first._replace(cpu_s=SHORT_S, check_s=SHORT_S)
    assert budget.attempt("regex", "a", is_again=True) == full
    booked(budget, full, lazy="", seconds=21.0)
    assert budget.attempt("regex", "a", is_again=True).cpu_s == SLICE_S  # which it has not had yet
    booked(budget, first, table=None, seconds=0.1)
    assert budget.attempt("regex", "a", is_again=False) == first


@pytest.mark.second
@pytest.mark.parametrize("place", ["rules_of", "compiled", "Network"])
@pytest.mark.parametrize("is_last", [False, True])
def test_each_step_of_an_attempt_is_stopped_after_its_time(place: str, is_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a last attempt decides; reading a constraint, and the check that it can be lazy, end in an error row."""

    def endless(*_: Any, **__: Any) -> Any:
        while True:
            time.sleep(0)

    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(compile_process, place, endless)
    kind, source = ("grammar", 'root ::= "a" root "b" | "c"') if place == "Network" else ("regex", "a")
    attempt = Attempt(kind, source, cpu_s=0.1, check_s=3 if place == "compiled" else 0.1, too_long="why", is_last=is_last)
    found = compile_process.answer(attempt, **JOB)
    assert found.pop("seconds") > 0.09
    if not is_last:
        assert found == {"later": True}
    elif place == "compiled":
        assert found == {"lazy": "why", "out_of_time": True, "is_weaker": False}
    else:
        assert found == {"code": "large_schema", "error": "reading it takes more than 0.1 s", "out_of_time": True}


def test_a_block_is_stopped_though_an_error_in_it_is_caught() -> None:
    def catches_errors() -> None:
        with stopped_after(0.05):
            while True:
                try:
                    raise ValueError
                except Exception:
                    continue

    began = time.process_time()
    with pytest.raises(OutOfTime):
        catches_errors()
    assert 0.04 < time.process_time() - began < 5
    with stopped_after(0.05):
        pass
    while time.process_time() - began < 0.3:  # what comes after a block is not stopped
        pass
