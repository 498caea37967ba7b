"""The end of a row: what leaves its slot, what waits, and whose completion comes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from batchspec.engine.loop.engine_run import EngineRun
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.kernels.rounds.accept import FAILED, FULL, HELD, STOPPED
from batchspec.records import Completion, Request, RowError
from tests.helpers.engines import request

BAD = RowError(code="bad", stage="decode", message="no", retryable=False)


class Allocator:
    """Notes what is released, and whether the device has ended it already."""

    def __init__(self) -> None:
        self.slots, self.pools = SlotTable(2, 20, 0), self
        self.released: list[bool] = []
        self.forgotten: list[tuple[bytes, ...]] = []

    def release(self, state: RequestState, *, on_device: bool = False) -> None:
        self.released.append(on_device)
        self.slots.clear(state, on_device=on_device)

    def forget_prefix(self, hashes: tuple[bytes, ...]) -> None:
        self.forgotten.append(tuple(hashes))


class Features:
    """`waiting` are not ready; `examined` says what an examination finds."""

    def __init__(self, examined: str | None = None) -> None:
        self.waiting, self.examined = set[RequestState](), examined

    def arrive(self, request: Request, draft_len: int) -> RequestState:
        return RequestState.of(request, draft_len)

    def ready(self, state: RequestState) -> bool:
        return state not in self.waiting

    def examine(self, state: RequestState) -> None:
        state.finish_reason = self.examined

    def finish(self, state: RequestState, done: Completion) -> Completion:
        return done


class Ends:
    """Open requests, some of them in slots, and what ends them."""

    def __init__(self, examined: str | None = None) -> None:
        self.allocator, self.features = Allocator(), Features(examined)
        features: Any = self.features
        self.requests = OpenRequests(features, drafter="none", draft_len=0, num_nodes=None, eos_ids=frozenset())

    def end(self, state: RequestState, finish: int, now: float) -> None:
        run: Any = SimpleNamespace(_allocator=self.allocator, pools=self.allocator, requests=self.requests)
        EngineRun._end(run, state, finish, now)

    def fail(self, state: RequestState) -> None:
        scheduler: Any = SimpleNamespace(
            _allocator=self.allocator, _features=self.features, _requests=self.requests, slots=self.allocator.slots
        )
        Scheduler._fail(scheduler, state)

    def row(self, *, in_slot: bool = True) -> RequestState:
        state = self.requests.arrive(request(len(self.requests), [1, 2, 3], cap=4))
        assert state is not None
        state.prefix_hashes, state.tokens = [b"a", b"b"], [7]
        if in_slot:
            self.allocator.slots.fill([state], self.allocator.slots.free()[:1], 0)
        return state

    def take(self) -> list[int]:
        """The rows whose completions can be taken now."""
        return [done.row_index for done in self.requests.take_completions()]


@pytest.mark.parametrize(
    ("finish", "reason", "on_device"),
    [(STOPPED, "stop", True), (FULL, "length", True), (FAILED, "error", True), (HELD, "stop", False), (0, "stop", False)],
)
def test_a_row_leaves_its_slot_and_the_device_is_told_unless_it_ended_the_row(finish: int, reason: str, on_device: bool) -> None:
    own = Ends()
    state = own.row()
    state.first_token_at = 1.0
    if finish in (HELD, 0):  # a feature has ended it
        state.finish_reason = "stop"
    own.end(state, finish, 2.5)
    assert (state.finish_reason, own.allocator.released, state.slot) == (reason, [on_device], -1)
    assert own.allocator.forgotten == ([(b"a", b"b")] if reason == "error" else [])
    assert own.requests.any_ended
    (done,) = own.requests.take_completions()
    assert done.stats is not None
    assert (done.finish_reason, done.stats.slot, done.stats.decode_s) == (reason, 0, 1.5)


@pytest.mark.parametrize("in_slot", [True, False])
@pytest.mark.parametrize("examined", ["stop", None])
def test_a_row_that_a_feature_fails_ends_with_its_reason_if_its_newest_tokens_end_it(in_slot: bool, examined: str | None) -> None:
    own = Ends(examined)
    state = own.row(in_slot=in_slot)
    state.fail(BAD)
    own.fail(state)
    assert (state.finish_reason, state.error) == (("stop", None) if examined else ("error", BAD))
    assert own.allocator.released == [False] * in_slot
    (done,) = own.requests.take_completions()
    assert done.stats is not None
    assert (done.status, done.stats.slot) == ("ok" if examined else "error", 0 if in_slot else -1)


def test_a_row_is_completed_once_and_not_before_its_features_are_ready() -> None:
    own = Ends()
    late, early = own.row(), own.row()
    bad = own.row(in_slot=False)
    own.features.waiting.add(late)
    own.end(late, STOPPED, 1.0)
    own.end(early, STOPPED, 1.0)
    bad.fail(BAD)
    own.fail(bad)
    assert own.take() == [1, 2]
    assert len(own.requests.take_finished()) == 1, "a drafter learns nothing from an error"
    assert (own.take(), own.requests.any_ended) == ([], True)
    own.features.waiting.clear()
    assert own.take() == [0]
    assert (own.take(), own.requests.any_ended, len(own.requests.take_finished())) == ([], False, 1)


def test_a_request_is_open_until_the_caller_has_its_completion() -> None:
    """Until then another run may continue it, but for one that has failed."""
    own = Ends()
    rows = [own.row(), own.row()]
    failed = own.row(in_slot=False)
    failed.fail(BAD)
    own.fail(failed)
    own.end(rows[0], STOPPED, 1.0)
    assert [one.row_index for one in own.requests.snapshots(2.0)] == [0, 1]
    assert own.take() == [2, 0]
    assert [one.row_index for one in own.requests.snapshots(2.0)] == [0, 1]
    own.requests.handed_out()
    assert ([one.row_index for one in own.requests.snapshots(2.0)], len(own.requests)) == ([1], 1)
