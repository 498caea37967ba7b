"""Requests are taken while the device computes: in their order, each once, and never where that would wait."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from batchspec.engine.slots.prefetch import Prefetcher
from batchspec.records import Request
from tests.engines import request
from tests.test_feed import done, feed, requests_of


class Windows:
    """Requests by window: the first of a window is not there before somebody waits for it."""

    def __init__(self, sizes: list[int]) -> None:
        self.num_ready, self.waits = 0, 0
        numbers = iter(range(sum(sizes)))
        self.windows = [[request(next(numbers), [1], cap=1) for _ in range(size)] for size in sizes]

    def __iter__(self) -> Iterator[Request | None]:
        for window in self.windows:
            self.num_ready, self.waits = len(window), self.waits + 1
            for one in window:
                self.num_ready -= 1
                yield one


@given(
    sizes=st.lists(st.integers(0, 6), max_size=6),
    most=st.integers(0, 5),
    turns=st.lists(st.none() | st.integers(0, 9), max_size=60),
)
def test_requests_come_in_their_order_however_many_were_taken_before(
    sizes: list[int], most: int, turns: list[int | None]
) -> None:
    windows = Windows(sizes)
    ahead = Prefetcher(iter(windows), lambda: windows.num_ready, most=most)
    found = []
    for turn in turns:
        if turn is None:
            found += [one for one in [next(ahead, None)] if one is not None]
        else:
            waits = windows.waits
            ahead.take(turn)
            assert windows.waits == waits, "it waited for a window that nobody needed yet"
            assert ahead.num_taken <= most
    found += [one for one in ahead if one is not None]
    assert [one.row_index for one in found] == list(range(sum(sizes)))


def test_the_rest_of_a_list_is_ready_and_nothing_of_a_generator() -> None:
    asked = [request(i, [1], cap=1) for i in range(5)]
    for stream, ready in ((iter(asked), 5), ((one for one in asked), 0)):
        ahead = Prefetcher(stream, None, most=10)
        ahead.take(3)
        assert ahead.num_taken == min(3, ready)
        next(ahead)
        ahead.take(10)
        assert ahead.num_taken == max(0, ready - 1)
        assert list(ahead) == asked[1:]


def test_a_stream_that_ends_early_yields_every_request_that_was_taken() -> None:
    asked = [request(i, [1], cap=1) for i in range(3)]
    ahead = Prefetcher(iter(asked), lambda: 100, most=10)
    ahead.take(8)
    assert list(ahead) == asked


def test_a_stream_that_has_ended_is_freed() -> None:
    """An engine keeps its last run until the next one begins; it shall not keep the rows of that run's caller."""

    class Stream(Iterator[Request]):
        def __next__(self) -> Request:
            raise StopIteration

        def num_ready(self) -> int:
            return 1

    for takes in (True, False):
        stream = Stream()
        alive, ahead = weakref.ref(stream), Prefetcher(stream, stream.num_ready, most=1)
        del stream
        assert alive() is not None
        if takes:
            ahead.take(1)
        else:
            assert next(ahead, None) is None
        assert alive() is None


def test_no_more_is_taken_than_ready_when_one_request_uses_up_several() -> None:
    """Rows for which no time is left are dropped when the stream is asked for the next one."""
    left = list(range(5))

    def stream() -> Iterator[Request]:
        while left:
            one = left.pop()
            if left:
                left.pop()
            yield request(one, [1], cap=1)

    ahead = Prefetcher(stream(), lambda: len(left) - 1, most=10)
    ahead.take(10)
    assert ahead.num_taken == 2


@given(
    caps=st.lists(st.integers(1, 400), min_size=1, max_size=80), shard_rows=st.integers(1, 9), slots=st.integers(1, 6),
    turns=st.lists(st.integers(0, 7), max_size=40),
)  # fmt: skip
def test_requests_that_a_feed_calls_ready_are_handed_out_without_reading_a_shard(
    caps: list[int], shard_rows: int, slots: int, turns: list[int]
) -> None:
    """The order is that of a feed without prefetching; only the admission of the next window may have begun. A
    window is ready once all its rows are admitted."""
    plain, made = feed(caps, shard_rows=shard_rows, slots=slots, clock=lambda: 0.0), feed(
        caps, shard_rows=shard_rows, slots=slots, clock=lambda: 0.0
    )  # fmt: skip
    expected = [one.row_index for one in requests_of(plain)]
    ahead = Prefetcher(made.requests(), lambda: made.num_ready, most=slots)
    found: list[Request] = []
    for turn in turns:
        ready, before = made.num_ready, ahead.num_taken
        ahead.take(turn)
        assert ahead.num_taken - before == min(turn, ready, slots - before)
        one = next(ahead, None)
        if one is None:
            break
        found.append(one)
        made.add(done(one))
    found += [one for one in ahead if one is not None]
    assert [one.row_index for one in found] == expected
