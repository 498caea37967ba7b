"""Requests leave the input in windows, longest first, and every shard is handed back once, complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import InputShard, table_source
from batchspec.packing.admit import Admission
from batchspec.packing.feed import Feed
from batchspec.packing.ordered_requests import LATE_S
from batchspec.packing.ready_requests import RequestCompiler
from batchspec.packing.work_plan import AdmittedShard, AdmittedShards
from batchspec.records import Completion, Request
from tests.helpers.stand_ins import ByteTokenizer, small_spec
from tests.helpers.streams import all_of, answers_of


def feed(caps: list[int], **options: Any) -> Feed:
    return feed_and_admission(caps, **options)[0]


def feed_and_admission(
    caps: list[int],
    *,
    shard_rows: int,
    slots: int,
    clock: Callable[[], float] = time.monotonic,
    compiling: RequestCompiler | None = None,
    kind: Callable[[Iterator[AdmittedShard]], AdmittedShards] = AdmittedShards,
) -> tuple[Feed, Admission]:
    source = table_source(pa.table({"prompt": ["x"] * len(caps), "max_new_tokens": caps}))
    config = RunConfig()
    config.decode.max_new_tokens = 500
    admission = Admission(
        config, source=source, columns=map_columns(source.schema, {}), spec=small_spec(), tokenizer=cast(Any, ByteTokenizer())
    )
    num_shards = -(-len(caps) // shard_rows)
    made = Feed(
        source.shards(shard_rows), partial(admitted_here, admission, kind), predicted=admission.predicted, num_shards=num_shards,
        shard_rows=shard_rows, slots=slots, clock=clock, compiling=compiling,
    )
    return made, admission


def admitted_here(
    admission: Admission, kind: Callable[[Iterator[AdmittedShard]], AdmittedShards], shards: Iterator[InputShard]
) -> AdmittedShards:
    return kind(AdmittedShard(shard, admission.admit(shard)) for shard in shards)


def done(request: Request, num_tokens: int = 1) -> Completion:
    return Completion(
        request_id=request.request_id, row_index=request.row_index, sample_index=0, shard=request.shard, status="ok",
        finish_reason="stop", token_ids=np.zeros(num_tokens, np.int32), predicted_tokens=request.predicted_tokens,
    )


def windows(made: Feed) -> list[int]:
    """How many requests each window held: short caps come back in falling order within one."""
    caps = [request.max_new_tokens for request in all_of(made.requests)]
    ends = [i for i in range(1, len(caps)) if caps[i] > caps[i - 1]]
    return [b - a for a, b in zip([0, *ends], [*ends, len(caps)], strict=True)]


def test_a_window_holds_several_shards_and_rows_for_every_slot_twice() -> None:
    caps = [1 + i % 60 for i in range(240)]
    assert windows(feed(caps, shard_rows=10, slots=4)) == [40] * 6
    assert windows(feed(caps, shard_rows=10, slots=30)) == [60] * 4
    assert windows(feed(caps, shard_rows=60, slots=30)) == [240]


def test_rows_after_the_last_whole_window_belong_to_it() -> None:
    caps = [1 + i % 60 for i in range(200)]
    assert windows(feed(caps, shard_rows=10, slots=40)) == [80, 120]
    assert windows(feed(caps, shard_rows=10, slots=96)) == [200]


def test_shards_without_requests_are_read_one_at_a_time_so_that_a_run_can_be_ended_between_them() -> None:
    made = feed([-1] * 90 + [9] * 10, shard_rows=10, slots=2)
    assert made.requests.next_ready() is None
    assert not made.requests.ended
    assert [shard.shard.index for shard in made.complete()] == [0]
    answers = list(answers_of(made.requests))
    assert (answers[:8], [one is None for one in answers[8:]]) == ([None] * 8, [False] * 10)
    assert [shard.shard.index for shard in made.complete()] == [*range(1, 9)]


def test_a_request_is_predicted_by_the_rows_that_ended_before_it_was_handed_out() -> None:
    made, admission = feed_and_admission([400] * 8, shard_rows=4, slots=2)
    requests = all_of(made.requests)
    first = next(requests)
    assert first.predicted_tokens == 200
    for _ in range(16):
        admission.observe(done(first, num_tokens=100))
    assert next(requests).predicted_tokens == 150


def test_a_small_change_of_the_prediction_makes_no_new_request() -> None:
    made, admission = feed_and_admission([400] * 8, shard_rows=4, slots=2)
    requests = all_of(made.requests)
    first = next(requests)
    for _ in range(16):
        admission.observe(done(first, num_tokens=190))
    assert admission.predictor.predict(400) == 195
    assert next(requests).predicted_tokens == 200


def test_the_next_window_can_be_taken_without_waiting_once_all_of_it_is_admitted() -> None:
    seconds = 0.0
    made = feed([9] * 80, shard_rows=10, slots=10, clock=lambda: seconds)
    ready = []
    for _ in all_of(made.requests):
        ready.append(made.requests.num_ready)
        seconds += 0.001
    assert ready == [*range(39, 0, -1), 40, *range(39, -1, -1)]


class Worker:
    """Admits a shard in `shard_s` seconds, one after the other. `now` goes on while one waits for it."""

    def __init__(self, shard_s: float) -> None:
        self.shard_s, self.now, self.num_done = shard_s, 0.0, 0

    def clock(self) -> float:
        return self.now

    def admits(self, shards: Iterator[AdmittedShard]) -> AdmittedShards:
        return _OfWorker(shards, self)


class _OfWorker(AdmittedShards):
    def __init__(self, shards: Iterator[AdmittedShard], worker: Worker) -> None:
        super().__init__(shards)
        self._worker = worker

    @property
    def _done_at(self) -> float:
        return (self._worker.num_done + 1) * self._worker.shard_s

    def __next__(self) -> AdmittedShard:
        found = super().__next__()
        self._worker.now = max(self._worker.now, self._done_at)
        self._worker.num_done += 1
        return found

    def is_ready(self) -> bool:
        return self._worker.now >= self._done_at


def test_a_window_that_is_admitted_slowly_comes_in_parts_and_the_engine_waits_for_the_first_alone() -> None:
    """Shards of four rows, a fifth of a second each, and windows of five shards. The second shard comes after LATE_S."""
    worker = Worker(0.2)
    caps = [1 + i for i in range(40)]
    made, _ = feed_and_admission(caps, shard_rows=4, slots=10, clock=worker.clock, kind=worker.admits)
    given, waited = list[int](), list[float]()
    while not made.requests.ended:
        before = worker.now
        request = made.requests.next_ready()
        waited.append(worker.now - before)
        if request is not None:
            given.append(request.max_new_tokens)
        elif not made.requests.ended:
            worker.now = round(worker.now + 0.1, 3)  # a round
    assert given[:16] == [*range(8, 0, -1), *range(12, 8, -1), *range(16, 12, -1)]
    assert sorted(given) == caps
    assert waited[0] == pytest.approx(0.4)
    assert [seconds for seconds in waited[1:20] if seconds] == []


def test_a_part_of_a_late_window_comes_before_the_shorter_requests_that_are_left() -> None:
    """Of shards with ever longer rows. While a request is handed out half a shard is admitted."""
    worker = Worker(0.25)
    made, _ = feed_and_admission([1 + i // 4 for i in range(20)], shard_rows=4, slots=10, clock=worker.clock, kind=worker.admits)
    given = list[int]()
    while (request := made.requests.next_ready()) is not None:
        given.append(request.max_new_tokens)
        worker.now += 0.125
    assert given == [2, 2, 3, 3, 4, 4, 5, 5, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1]


def test_only_an_engine_without_a_row_rests_while_a_shard_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked twice a round, rests would take longer than the rounds of a small model."""
    worker, rests = Worker(0.2), list[float]()
    monkeypatch.setattr("batchspec.packing.ordered_requests.time.sleep", rests.append)
    made, _ = feed_and_admission([9] * 20, shard_rows=4, slots=10, clock=worker.clock, kind=worker.admits)
    given = [request for request in (made.requests.next_ready() for _ in range(10)) if request is not None]
    assert (len(given), rests) == (8, [])
    for request in given:
        made.add(done(request))
    assert made.requests.next_ready() is None
    assert len(rests) == 1


def test_a_window_that_is_admitted_in_time_comes_longest_first() -> None:
    worker = Worker(LATE_S / 6)
    made, _ = feed_and_admission([1 + i for i in range(20)], shard_rows=4, slots=10, clock=worker.clock, kind=worker.admits)
    assert [request.max_new_tokens for request in all_of(made.requests)] == [*range(20, 0, -1)]


def test_parts_without_a_request_end_nothing() -> None:
    """Shards of bad rows, of which each is given back, between those of good ones."""
    worker = Worker(0.2)
    caps = [*[9] * 8, *[-1] * 8, *[7] * 4]
    made, _ = feed_and_admission(caps, shard_rows=4, slots=10, clock=worker.clock, kind=worker.admits)
    given = list[int]()
    while not made.requests.ended:
        request = made.requests.next_ready()
        worker.now += 0.05
        given += [] if request is None else [request.max_new_tokens]
    assert given == [9] * 8 + [7] * 4
    assert [shard.shard.index for shard in made.complete()] == [2, 3]


def admitted_by(rows_a_second: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that were admitted when each of 80 requests, two windows of 40, was handed out; 10 of them fill the slots at once."""
    seconds, rows = 0.0, 0
    admit = Admission.admit

    def counted(self: Admission, shard: InputShard) -> Iterator[Request | Completion]:
        nonlocal rows
        for entry in admit(self, shard):
            rows += 1
            yield entry

    monkeypatch.setattr(Admission, "admit", counted)
    made = feed([9] * 80, shard_rows=10, slots=10, clock=lambda: seconds)
    found = []
    for count, _ in enumerate(all_of(made.requests), 1):
        found.append(rows)
        seconds += 1 / rows_a_second if count >= 10 else 0.0
    return found


def test_the_next_window_is_admitted_bit_by_bit_in_the_last_seconds_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = admitted_by(2.0, monkeypatch)  # the last ten requests of a window are its last five seconds
    assert found[:31] == [40] * 31
    assert found[40] == found[-1] == 80
    steps = [b - a for a, b in pairwise(found[30:41])]
    assert max(steps) <= 5
    assert found[39] >= 70


def test_a_slow_run_leaves_the_next_window_to_others_until_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = admitted_by(0.1, monkeypatch)
    assert found[:40] == [40] * 40
    assert found[40] == 80


def test_a_fast_run_admits_a_row_for_each_that_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """But nothing while the slots fill: the first rounds are waiting."""
    found = admitted_by(1000.0, monkeypatch)
    assert found[:10] == [40] * 10
    assert max(b - a for a, b in pairwise(found[10:41])) <= 2


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12))
def test_every_shard_is_returned_once_when_its_last_row_is_done(num_rows: int, shard_rows: int, slots: int) -> None:
    made = feed([1 + i % 7 for i in range(num_rows)], shard_rows=shard_rows, slots=slots)
    back = []
    for request in all_of(made.requests):
        made.add(done(request))
        for decoded in made.complete():
            assert len(decoded.completions) == decoded.shard.table.num_rows
            back.append(decoded.shard.index)
    assert sorted(back) == list(range(-(-num_rows // shard_rows)))
