"""Runs of the engine whose requests come from its own completions, and runs one after another: prefixes, tokens, row buckets."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchspec.cache.pages import prefix_hashes
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.slots.allocator import TAKEN_AHEAD, SlotAllocator
from batchspec.errors import EngineInUse
from batchspec.records import Request, Snapshot
from batchspec.request_stream import ListedRequests
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, plain_tokens, request, tiny_target
from tests.helpers.moe_models import ids_of
from tests.helpers.waiting_requests import queue_of

DRAFTERS: dict[str, Callable[[], Drafter]] = {"none": NoDrafter, "lookup": lambda: LookupDrafter(4, min_ngram=1, max_ngram=2)}


def rows(count: int = 6, length: int = 14) -> list[Request]:
    """Three pages of their own each, and some tokens."""
    draw = np.random.default_rng(7)
    return [request(i, draw.integers(0, VOCAB, length).tolist(), cap=5 + i) for i in range(count)]


def engine_of(drafter: str, **shape: Any) -> Engine:
    engine = make_engine(tiny_target(), DRAFTERS[drafter](), packed(**{"slots": 3, **shape}), device=DEVICE)
    engine.keeps_prefixes = True
    return engine


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_second_run_finds_the_prefixes_of_the_first_and_has_the_same_tokens(drafter: str) -> None:
    engine, expected = engine_of(drafter), {i.request_id: plain_tokens(tiny_target(), i) for i in rows()}
    first, second = ({done.request_id: done for done in engine.run(iter(rows()))} for _ in range(2))
    for run in (first, second):
        assert {name: ids_of(done) for name, done in run.items()} == expected
    assert {done.cached_tokens for done in first.values()} == {0}
    assert {done.cached_tokens for done in second.values()} == {12}
    engine.keeps_prefixes = False
    list(engine.run(iter(rows())))
    assert {done.cached_tokens for done in engine.run(iter(rows()))} == {0}, "unless it is told to"


def test_a_run_that_is_stopped_early_keeps_no_prefix() -> None:
    """Pages may be named after a prefill that never ran."""
    engine = engine_of("none")
    running = engine.run(iter(rows()))
    next(running)
    running.close()
    assert {done.cached_tokens for done in engine.run(iter(rows()))} == {0}


def test_a_run_that_another_one_has_replaced_gives_none_of_its_completions() -> None:
    """The rows of the first one are no longer on the device; those of the second one go on."""
    engine = engine_of("none", run_ahead=2)
    first, second = engine.steps(iter(rows())), engine.run(iter(rows()))
    assert next(first) == [], "the second run, although it was made, has not begun"
    one = next(second)
    with pytest.raises(EngineInUse, match="another run of this engine has begun"):
        next(first)
    first.close()
    done = {one.request_id: one for one in (one, *second)}
    assert {name: ids_of(one) for name, one in done.items()} == {i.request_id: plain_tokens(tiny_target(), i) for i in rows()}


@pytest.mark.parametrize("how", ["run", "left half-way", "stopped"])
def test_a_run_that_is_over_keeps_no_stream(how: str) -> None:
    """The engine keeps its last run, and a stream may hold the shards of a job."""
    engine, stream = engine_of("none"), ListedRequests(rows())
    alive, running = weakref.ref(stream), engine.run(stream)
    del stream
    next(running)
    assert alive() is not None
    if how == "stopped":
        engine.stop()
    if how == "left half-way":
        running.close()
    else:
        list(running)
    assert alive() is None


def test_a_list_of_requests_is_as_good_as_a_stream() -> None:
    engine, expected = engine_of("none"), {i.request_id: plain_tokens(tiny_target(), i) for i in rows()}
    for asked in (rows(), iter(rows()), (one for one in rows()), ListedRequests(rows())):
        assert {done.request_id: ids_of(done) for done in engine.run(asked)} == expected


def test_no_prefix_is_kept_over_new_weights_or_scales() -> None:
    engine = engine_of("none")
    list(engine.run(iter(rows())))
    with engine.changing_target():
        pass
    assert {done.cached_tokens for done in engine.run(iter(rows()))} == {0}


def test_chances_of_drafts_are_the_prior_ones_again_after_new_weights() -> None:
    drafter = LookupDrafter(4, min_ngram=1, max_ngram=3)
    engine = make_engine(tiny_target(), drafter, packed(4, num_verified=4), device=DEVICE, lengths=4)
    chances = engine.executor.round.chances
    assert chances is not None
    learnt = (chances.tried, chances.accepted, chances._costs)
    prior = [one.clone() for one in learnt]
    repeating = [request(i, [i, 5, 7, i] * 3, cap=20) for i in range(6)]
    list(engine.run(iter(repeating)))
    assert not any(map(torch.equal, learnt, prior))
    with engine.changing_target():
        pass
    assert all(map(torch.equal, learnt, prior))


def test_requests_that_end_at_once_make_the_engine_prefetch_none_that_is_not_ready() -> None:
    """They need no slot, so others could enter in their place; but to ask for those might wait."""
    ended = Snapshot(
        row_index=0, sample_index=0, shard=0, tokens=(5, 6), num_prefills=1, cached_tokens=0, accepted=(1,), drafted=(1,),
        prefill_s=0, decode_s=0,
    )
    first = [request(i, [1, 2], cap=9) for i in range(8)]
    at_once = [replace(request(8 + i, [1, 2], cap=2), resumed=replace(ended, row_index=8 + i)) for i in range(4)]
    asked, prefetching = [*first, *at_once, request(12, [1, 2], cap=2)], False
    too_early = list[str]()

    class Stream(ListedRequests):
        """The last request is not ready before somebody waits for it."""

        @property
        def num_ready(self) -> int:
            return max(0, super().num_ready - 1)

        def next_ready(self) -> Request | None:
            if prefetching and not self.num_ready:
                too_early.append("the last one")
            return super().next_ready()

    engine, take_ahead = make_engine(tiny_target(), NoDrafter(), packed(slots=3), device=DEVICE), EngineRun.take_ahead

    def noted(run: EngineRun) -> None:
        nonlocal prefetching
        prefetching = True
        take_ahead(run)
        prefetching = False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineRun, "take_ahead", noted)
        done = list(engine.run(Stream(asked)))
    assert sorted(one.row_index for one in done) == list(range(len(asked)))
    assert too_early == []


class Chains:
    """A stream in which each row's completion makes its next request, with the completion's tokens in the prompt, for `turns`
    turns."""

    num_ready = 0

    def __init__(self, first: list[Request], turns: int) -> None:
        self._first, self._turns, self._ready, self._decoding = deque(first), turns, deque[Request](), 0
        self.known: dict[str, Request] = {}
        self.asked_in_vain = 0

    @property
    def ended(self) -> bool:
        return not (self._first or self._ready or self._decoding)

    def next_ready(self) -> Request | None:
        if not (self._ready or self._first):
            self.asked_in_vain += not self.ended
            return None
        request = (self._ready or self._first).popleft()
        self._decoding += 1
        self.known[request.request_id] = request
        return request

    def go_on(self, last: Request, tokens: list[int]) -> None:
        self._decoding -= 1
        name, _, turn = last.request_id.partition("/")
        if int(turn or 0) + 1 < self._turns:
            prompt = np.array([*last.prompt_ids, *tokens, 3], np.int32)
            self._ready.append(replace(last, request_id=f"{name}/{int(turn or 0) + 1}", prompt_ids=prompt))


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_completions_become_requests_of_the_same_run(drafter: str, run_ahead: int) -> None:
    engine, chains = engine_of(drafter, run_ahead=run_ahead), Chains(rows(4, 9), turns=3)
    found = {}
    for done in engine.run(chains):
        found[done.request_id] = ids_of(done)
        chains.go_on(chains.known[done.request_id], found[done.request_id])
    assert len(found) == 12
    assert chains.asked_in_vain > 0
    assert found == {name: plain_tokens(tiny_target(), each) for name, each in chains.known.items()}


def test_rounds_shrink_while_no_request_waits_and_grow_with_those_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight slots; two rows at first, which make four when both have ended."""
    engine = engine_of("none", slots=8, row_buckets=(1, 2, 4, 8))
    first, later = rows(2), [request(10 + i, [i + 1] * 9, cap=6) for i in range(4)]
    num_ended = 0

    class Stream:
        num_ready = 0

        @property
        def ended(self) -> bool:
            return num_ended == 6

        def next_ready(self) -> Request | None:
            if first:
                return first.pop(0)
            return later.pop(0) if later and num_ended >= 2 else None

    moved = []
    compact = SlotAllocator.compact

    def noted(self: SlotAllocator, num_slots: int) -> list[tuple[int, int]]:
        moved.append(num_slots)
        return compact(self, num_slots)

    monkeypatch.setattr(SlotAllocator, "compact", noted)
    sizes: list[int] = []
    engine.on_round = lambda totals: sizes.append(engine.scheduler.num_rows)
    for _ in engine.run(Stream()):
        num_ended += 1
    assert num_ended == 6
    assert sizes[2] == 2
    assert sizes[-2] == 4
    assert max(sizes) == 8, "the first results are of all slots"
    assert moved == [2, 1], "four rows in the first four slots need no move"


def test_an_empty_stream_is_asked_no_more_once_it_has_ended() -> None:
    class Stream:
        num_ready, num_asked = 0, 0

        @property
        def ended(self) -> bool:
            return self.num_asked == 2

        def next_ready(self) -> None:
            self.num_asked += 1

    stream = Stream()
    allocator = SlotAllocator(packed(2), engine_of("none").pools, queue_of(stream))
    assert not allocator.is_exhausted()
    assert allocator.is_exhausted()
    assert allocator.refill_is_due()
    assert allocator.refill() == []
    assert stream.num_asked == 2


@given(
    stream=st.lists(st.booleans(), max_size=30),
    turns=st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=60),
)
def test_requests_that_were_taken_ahead_wait_in_the_order_of_the_stream(
    stream: list[bool], turns: list[tuple[int, int] | None]
) -> None:
    """False: the stream has no request at present. No more are taken than asked for, nor more than may wait."""
    given = [request(i, [1], cap=1) if there else None for i, there in enumerate(stream)]

    class Stream:
        def __init__(self) -> None:
            self._left = deque(given)

        @property
        def num_ready(self) -> int:
            return next((place for place, one in enumerate(self._left) if one is None), len(self._left))

        @property
        def ended(self) -> bool:
            return not self._left

        def next_ready(self) -> Request | None:
            return self._left.popleft() if self._left else None

    found, waiting = list[Request](), queue_of(Stream(), most_prefetched=5)
    for turn in turns:
        before, prefetched = len(waiting), waiting.num_prefetched
        if turn is None:
            found += [] if waiting.peek() is None else [waiting[0].request]
            if len(waiting):
                del waiting[0]
        else:
            count, most = turn
            waiting.take_ahead(count, most)
            assert before <= len(waiting) <= max(before, min(before + count, most))
            assert waiting.num_prefetched <= min(5, prefetched + count)
    while not waiting.is_exhausted():
        if waiting.peek() is not None:
            found.append(waiting[0].request)
            del waiting[0]
    assert found == [one for one in given if one is not None]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_prompts_of_requests_that_were_taken_ahead_are_hashed_once_and_before_their_refill(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked, taking = engine_of(drafter, slots=4), rows(12), False
    hashed: list[tuple[bool, bytes]] = []

    def watched(ids: Any, *args: Any, **options: Any) -> list[bytes]:
        hashed.append((taking, ids.tobytes()))
        return prefix_hashes(ids, *args, **options)

    def take(run: EngineRun) -> None:
        nonlocal taking
        taking = True
        take_ahead(run)
        taking = False

    take_ahead = EngineRun.take_ahead
    monkeypatch.setattr(EngineRun, "take_ahead", take)
    monkeypatch.setattr("batchspec.engine.slots.allocator.prefix_hashes", watched)
    done = {c.request_id: ids_of(c) for c in engine.run(iter(asked))}
    assert done == {i.request_id: plain_tokens(tiny_target(), i) for i in asked}
    assert [ids for _, ids in hashed] == [one.prompt_ids.tobytes() for one in asked]
    assert [ahead for ahead, _ in hashed] == [False] * 4 + [True] * 8


@pytest.mark.second
def test_only_as_many_requests_are_prepared_ahead_as_the_next_refills_need() -> None:
    engine, counts = engine_of("none", slots=40), list[int]()
    engine.on_round = lambda totals: counts.append(len(engine._current.requests) - engine.slots.num_live)
    asked = [replace(one, max_new_tokens=5 + i % 7) for i, one in enumerate(rows(200))]
    assert len(list(engine.run(iter(asked)))) == 200
    ended = 40  # at most so many have ended and are not handed out yet
    assert TAKEN_AHEAD <= max(counts) <= TAKEN_AHEAD + ended


def test_requests_that_end_as_they_arrive_are_completed_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests may be such ones: their completions leave with each step."""
    monkeypatch.setattr("batchspec.engine.slots.waiting.MOST_LEFT_OUT", 3)
    arrived = list[int]()

    def arrive(one: Request) -> None:
        arrived.append(one.row_index)

    queue = queue_of(ListedRequests([request(row, [1], cap=2) for row in range(7)]), arrive)
    for count in (3, 6, 7):
        assert queue.peek() is None
        assert len(arrived) == count
    assert queue.is_exhausted()
