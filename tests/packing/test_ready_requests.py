"""A row waits for its own automaton and for no other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.packing import ready_requests
from batchspec.packing.ready_requests import ReadyRequests
from batchspec.records import Completion, Request
from batchspec.request_stream import ListedRequests
from tests.helpers.automata import automaton
from tests.helpers.engines import request
from tests.helpers.streams import all_of, answers_of
from tests.packing.test_feed import feed


class Compiles:
    """Constraints of rows that are done when a test says so; those whose text begins with `bad` have no automaton."""

    def __init__(self) -> None:
        self.begun: dict[str, Future[Any]] = {}

    def begin(self, one: Request) -> Future[Any] | None:
        return None if one.constraint is None else self.begun.setdefault(one.constraint[1], Future())

    def finish(self, text: str) -> None:
        self.begun[text].set_result(None)

    def compiled(self, one: Request) -> Request | Completion:
        if one.constraint is None:
            return one
        assert self.begun[one.constraint[1]].done(), "the row is asked for too early"
        if one.constraint[1].startswith("bad"):
            return Completion(
                request_id=one.request_id, row_index=one.row_index, sample_index=one.sample_index, shard=one.shard,
                status="error", finish_reason="error",
            )
        return replace(one, automaton=automaton("[ab]*"), automaton_state=1)


def rows(*texts: str | None) -> ListedRequests:
    return ListedRequests(
        replace(request(index, [1], cap=2), constraint=None if text is None else ("regex", text))
        for index, text in enumerate(texts)
    )


def numbers(found: Iterable[Request | None]) -> list[int | None]:
    return [None if one is None else one.row_index for one in found]


def test_no_request_is_ready_if_requests_wait_for_their_automata() -> None:
    """Which request is next depends on which automata are compiled by then, so none is prefetched."""
    made = feed([9] * 8, shard_rows=4, slots=2, compiling=Compiles())
    assert made.requests.next_ready() is not None
    assert made.requests.num_ready == 0
    assert len(list(all_of(made.requests))) == 7


def test_rows_whose_automata_are_loaded_are_admitted_first() -> None:
    compiles, refused = Compiles(), list[Completion]()
    made = ReadyRequests(
        rows("a", None, "b", "a", None, "bad", "c"), compiles, refused=refused.append, busy=lambda: True, ahead=9
    )
    assert numbers([made.next_ready() for _ in range(4)]) == [1, 4, None, None]
    assert list(compiles.begun) == ["a", "b", "bad", "c"]
    compiles.finish("b")
    assert numbers([made.next_ready(), made.next_ready()]) == [2, None]
    compiles.finish("a")
    compiles.finish("bad")
    assert numbers([made.next_ready(), made.next_ready(), made.next_ready()]) == [0, 3, None]
    assert [one.row_index for one in refused] == [5]
    compiles.finish("c")
    assert numbers(answers_of(made)) == [6]


def test_no_more_rows_than_asked_for_wait() -> None:
    compiles = Compiles()
    made = ReadyRequests(rows("a", "b", "c", None), compiles, refused=lambda _: None, busy=lambda: True, ahead=2)
    assert made.next_ready() is None
    assert list(compiles.begun) == ["a", "b"]
    compiles.finish("a")
    assert numbers([made.next_ready(), made.next_ready()]) == [0, None]
    assert list(compiles.begun) == ["a", "b", "c"]
    compiles.finish("c")
    assert numbers([made.next_ready(), made.next_ready(), made.next_ready()]) == [2, 3, None]


def test_where_nothing_else_can_be_done_the_next_automaton_is_waited_for_but_not_for_long() -> None:
    compiles = Compiles()
    made = ReadyRequests(rows("a"), compiles, refused=lambda _: None, busy=lambda: False, ahead=2)
    began = time.perf_counter()
    assert made.next_ready() is None
    assert time.perf_counter() - began >= ready_requests.WAIT_S
    compiles.finish("a")
    assert numbers(answers_of(made)) == [0]


@given(st.data(), st.lists(st.sampled_from([None, "a", "b", "c", "bad", "bad too"]), max_size=12), st.integers(1, 5))
def test_every_row_is_handed_out_once_or_refused_in_any_order_of_compilation(
    data: st.DataObject, texts: list[str | None], ahead: int
) -> None:
    compiles, refused, found = Compiles(), list[Completion](), list[Request]()
    made = ReadyRequests(rows(*texts), compiles, refused=refused.append, busy=lambda: True, ahead=ahead)
    for one in answers_of(made):
        if one is not None:
            found.append(one)
            continue
        pending = [text for text, future in compiles.begun.items() if not future.done()]
        assert pending, "None means that something is compiled"
        compiles.finish(data.draw(st.sampled_from(pending)))
    bad = [index for index, text in enumerate(texts) if text is not None and text.startswith("bad")]
    assert sorted(one.row_index for one in refused) == bad
    assert sorted(one.row_index for one in found) == [index for index in range(len(texts)) if index not in bad]
    assert all((one.automaton is None) == (one.constraint is None) for one in found)


def test_a_stream_of_refused_rows_answers_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards of those that were refused are committed meanwhile."""
    monkeypatch.setattr(ready_requests, "MOST_LEFT_OUT", 3)
    compiles, refused = Compiles(), list[Completion]()
    stream = ReadyRequests(rows(*["bad"] * 7, None, *["bad"] * 3), compiles, refused=refused.append, ahead=4)
    compiles.begun["bad"] = Future()
    compiles.finish("bad")
    assert (stream.next_ready(), len(refused), stream.ended) == (None, 3, False)
    assert numbers(answers_of(stream)) == [None, 7, None]
    assert len(refused) == 10
