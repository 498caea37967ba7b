"""Requests are taken while the device computes: in their order, each once, and never where that would wait."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.engine.slots.waiting import WaitingRequests
from batchspec.records import Request
from batchspec.request_stream import ListedRequests, RequestStream
from tests.helpers.engines import request
from tests.helpers.streams import all_of
from tests.helpers.waiting_requests import queue_of
from tests.packing.test_feed import done, feed


class Windows:
    """Requests by window: the first of a window is not there before somebody waits for it."""

    def __init__(self, sizes: list[int]) -> None:
        self.waits, self.ended = 0, False
        numbers = iter(range(sum(sizes)))
        self._windows = deque([request(next(numbers), [1], cap=1) for _ in range(size)] for size in sizes)
        self._left: deque[Request] = deque()

    @property
    def num_ready(self) -> int:
        return len(self._left)

    def next_ready(self) -> Request | None:
        while not self._left:
            if not self._windows:
                self.ended = True
                return None
            self.waits += 1
            self._left += self._windows.popleft()
        return self._left.popleft()


def waiting(stream: RequestStream, most: int) -> WaitingRequests:
    return queue_of(stream, most_prefetched=most)


def prefetch(ahead: WaitingRequests, count: int) -> None:
    ahead.take_ahead(count, 0)


def take(ahead: WaitingRequests) -> Request | None:
    state = ahead.peek()
    if state is not None:
        del ahead[0]
    return None if state is None else state.request


def rest_of(ahead: WaitingRequests) -> Iterator[Request]:
    while (one := take(ahead)) is not None:
        yield one
    assert ahead.is_exhausted()


@given(
    sizes=st.lists(st.integers(0, 6), max_size=6),
    most=st.integers(0, 5),
    turns=st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=60),
)
def test_requests_come_in_their_order_however_many_were_taken_before(
    sizes: list[int], most: int, turns: list[tuple[int, int] | None]
) -> None:
    """A turn takes a request, or prefetches some and makes the states of some that were prefetched."""
    windows = Windows(sizes)
    ahead = waiting(windows, most)
    found = []
    for turn in turns:
        if turn is None:
            found += [one for one in [take(ahead)] if one is not None]
        else:
            waits, states = windows.waits, len(ahead)
            ahead.take_ahead(*turn)
            assert windows.waits == waits, "it waited for a window that nobody needed yet"
            assert ahead.num_prefetched <= most
            assert len(ahead) <= max(states, turn[1])
    found += rest_of(ahead)
    assert [one.row_index for one in found] == list(range(sum(sizes)))


def test_the_rest_of_a_list_is_ready_and_nothing_of_a_generator() -> None:
    asked = [request(i, [1], cap=1) for i in range(5)]
    for stream, ready in ((iter(asked), 5), ((one for one in asked), 0)):
        ahead = waiting(ListedRequests(stream), 10)
        prefetch(ahead, 3)
        assert ahead.num_prefetched == min(3, ready)
        take(ahead)
        prefetch(ahead, 10)
        assert ahead.num_prefetched == max(0, ready - 1)
        assert list(rest_of(ahead)) == asked[1:]


def test_a_stream_that_ends_early_yields_every_request_that_was_taken() -> None:
    class Promising(ListedRequests):
        num_ready = 100

    asked = [request(i, [1], cap=1) for i in range(3)]
    ahead = waiting(Promising(asked), 10)
    prefetch(ahead, 8)
    assert list(rest_of(ahead)) == asked


def test_a_stream_that_has_ended_is_freed() -> None:
    """An engine keeps its last run until the next one begins; it shall not keep the rows of that run's caller."""

    class Ends:
        num_ready = 1
        ended = True

        def next_ready(self) -> None:
            return None

    for takes in (True, False):
        stream = Ends()
        alive, ahead = weakref.ref(stream), waiting(stream, 1)
        del stream
        assert alive() is not None
        if takes:
            prefetch(ahead, 1)
        else:
            assert take(ahead) is None
        assert alive() is None
        assert ahead.is_exhausted()


def test_no_more_is_taken_than_ready_when_one_request_uses_up_several() -> None:
    """Rows for which no time is left are dropped when the stream is asked for the next one."""

    class EverySecond:
        def __init__(self) -> None:
            self.left, self.ended = list(range(5)), False

        @property
        def num_ready(self) -> int:
            return len(self.left) - 1

        def next_ready(self) -> Request | None:
            one, self.left = self.left[-1], self.left[:-2]
            return request(one, [1], cap=1)

    ahead = waiting(EverySecond(), 10)
    prefetch(ahead, 10)
    assert ahead.num_prefetched == 2


@pytest.mark.second
@given(
    caps=st.lists(st.integers(1, 400), min_size=1, max_size=80), shard_rows=st.integers(1, 9), slots=st.integers(1, 6),
    turns=st.lists(st.integers(0, 7), max_size=40),
)
def test_requests_that_a_feed_calls_ready_are_handed_out_without_reading_a_shard(
    caps: list[int], shard_rows: int, slots: int, turns: list[int]
) -> None:
    """The order is that of a feed without prefetching; only the admission of the next window may have begun. A
    window is ready once all its rows are admitted."""
    plain, made = feed(caps, shard_rows=shard_rows, slots=slots, clock=lambda: 0.0), feed(
        caps, shard_rows=shard_rows, slots=slots, clock=lambda: 0.0
    )
    expected = [one.row_index for one in all_of(plain.requests)]
    ahead = waiting(made.requests, slots)
    found: list[Request] = []
    for turn in turns:
        ready, before = made.requests.num_ready, ahead.num_prefetched
        prefetch(ahead, turn)
        assert ahead.num_prefetched - before == min(turn, ready, slots - before)
        one = take(ahead)
        if one is None:
            break
        found.append(one)
        made.add(done(one))
    found += rest_of(ahead)
    assert [one.row_index for one in found] == expected
