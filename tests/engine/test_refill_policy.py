"""Further rounds that are launched before the host prepares a refill, so that the device does not wait for it. When a refill is
due: `test_allocator.py`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop import scheduler as scheduler_module
from batchspec.engine.loop.executor import Executor
from batchspec.engine.loop.scheduler import Scheduler
from batchspec.engine.rounds.records import PendingResult
from batchspec.engine.step import ScheduledStep
from batchspec.packed_batch import MOST_ROUNDS_BEFORE_REFILL
from batchspec.records import Request
from tests.engine import test_lossless
from tests.engine.test_lossless import requests_of_a_job
from tests.helpers.engines import DEVICE, make_engine, packed, plain_tokens, request, tiny_target

pytestmark = pytest.mark.usefixtures("poisoned")
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.mark.second
@settings(deadline=None, max_examples=30, suppress_health_check=SLOW)
@given(
    requests=requests_of_a_job(),
    counts=st.lists(st.integers(0, MOST_ROUNDS_BEFORE_REFILL), min_size=1, max_size=8),
    data=st.data(),
)
def test_rounds_before_a_refill_change_no_token(requests: list[Request], counts: list[int], data: st.DataObject) -> None:
    """Every drafter, sampling, number of slots, pages and chunks, rows with common beginnings, preempted rows."""
    drawn = itertools.cycle(counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "rounds_before_refill", lambda *_: next(drawn))
        test_lossless.check_lossless(requests, data)


def rounds_before_refills(nums_left: list[int], **options: Any) -> list[tuple[int, int]]:
    """Rows that end at different rounds enter 3 slots again and again; for each refill but the first: the number of rounds that
    were launched since the last read before it, and how many results were unread when it was launched.

    nums_left  rounds that the device has left to do, as the executor finds after each of these refills
    """
    found: list[tuple[int, int]] = []
    asked = [request(i, [i % 7, 3], cap=2 + i % 5) for i in range(40)]
    engine = make_engine(tiny_target(), NoDrafter(), packed(3, run_ahead=2), device=DEVICE, **options)
    execute, left, rounds = engine.executor.execute, iter(nums_left), 0

    def watched(step: ScheduledStep) -> None:
        nonlocal rounds
        if step.prefill is not None:
            found.append((rounds, len(engine.executor._pending)))
            engine.executor.num_left_at_refill = next(left, 1)
        rounds = 0 if step.num_reads else rounds + (step.round is not None)
        execute(step)

    engine.executor.execute = watched  # type: ignore[method-assign]
    done = {c.request_id: c.token_ids.tolist() for c in engine.run(iter(asked)) if c.token_ids is not None}
    assert done == {r.request_id: plain_tokens(tiny_target(), r) for r in asked}
    return found[1:]


@pytest.mark.parametrize(
    ("nums_left", "counts"),
    [
        ([9, 1, 1, 1], [0, 0, 0]),
        ([9, 0, 1, 1], [0, 1, 1]),
        ([9, 0, 0, 0], [0, 1, 2]),
        ([9, 0, 0, 0, 0], [0, 1, 2, 2]),
        ([9, 0, 0, 2, 2, 2], [0, 1, 2, 1, 0]),
        ([0, 2, 0, 2], [0, 0, 1]),  # the first refill follows no round: the device had nothing else to do
    ],
)
def test_as_many_rounds_as_the_device_needs_are_launched_before_a_refill(nums_left: list[int], counts: list[int]) -> None:
    """One more after the device was found idle, one less after it had more than one round left to do."""
    found = rounds_before_refills(nums_left)
    assert [rounds for rounds, _ in found[: len(counts)]] == counts
    assert [unread for _, unread in found[: len(counts)]] == [2 + count for count in counts]


@pytest.mark.parametrize("change", ["no row decodes", "rows may be held", "no graphs"])
def test_no_extra_round_precedes_refills_without_rounds_beside_rows_that_may_wait_or_without_graphs(change: str) -> None:
    for changed in (False, True):
        scheduler = object.__new__(Scheduler)
        now = change if changed else ""
        executor: Any = SimpleNamespace(num_left_at_refill=None if now == "no graphs" else 0)
        slots: Any = SimpleNamespace(num_decoding=now != "no row decodes", mode=SamplingMode(may_hold=now == "rows may be held"))
        scheduler._executor, scheduler.slots = executor, slots
        scheduler._rounds_before_refill = 0
        scheduler._learn_from_refill()
        assert scheduler._rounds_before_refill == (0 if changed else 1)


def test_the_executor_counts_what_the_device_has_left_to_do_when_a_refill_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refill's own passes do not count. If rounds are not graphs, nothing does: their launch may wait for the device."""
    engine = make_engine(tiny_target(), NoDrafter(), packed(3, run_ahead=2), device=DEVICE)
    executor, counts, execute = engine.executor, list[int | None](), Executor.execute
    monkeypatch.setattr(PendingResult, "has_arrived", False)

    def watched(own: Executor, step: ScheduledStep) -> None:
        earlier = len(own._pending)
        own.graphs.captures = True
        execute(own, step)
        own.graphs.captures = False
        if step.prefill is not None:
            assert own.num_left_at_refill == earlier
            counts.append(own.num_left_at_refill)

    assert executor.num_left_at_refill is None
    monkeypatch.setattr(Executor, "execute", watched)
    monkeypatch.setattr(executor.graphs, "run", executor.graphs._run)
    list(engine.run(iter([request(i, [i % 7, 3], cap=2 + i % 5) for i in range(12)])))
    assert counts[0] == 0
    assert 2 in counts
