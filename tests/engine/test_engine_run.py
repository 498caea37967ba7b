"""Runs of one engine, one after another: whatever ended the earlier ones, and wherever, the next one decodes as a new engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchspec.batch.automata import Automata, AutomataCapacity
from batchspec.batch.device_batch import DeviceBatch
from batchspec.cache.page_tables import PagePools
from batchspec.engine.features.lazy_constraints import LazyConstraints
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.executor import Executor
from batchspec.engine.slots import expected_pages
from batchspec.engine.slots.open_requests import OpenRequests
from batchspec.records import Completion, Request
from tests.batch.test_logit_rules import ALL
from tests.helpers.automata import VOCABULARY
from tests.helpers.engines import DEVICE, VOCAB, make_engine, packed, tiny_target
from tests.helpers.grammars import ExpandLate
from tests.helpers.replaying import SLOTS
from tests.structured.test_constrained import tokens
from tests.structured.test_lazy import OutOfMemory, defined, jobs

pytestmark = pytest.mark.usefixtures("poisoned")
PLACES: tuple[tuple[Any, str], ...] = (
    (OpenRequests, "_completion"),
    (Executor, "execute"),
    (Executor, "read"),
    (DeviceBatch, "begin"),
    (DeviceBatch, "grant"),
    (DeviceBatch, "kill"),
    (Automata, "upload"),
    (Automata, "upload_states"),
    (PagePools, "admit"),
    (PagePools, "release"),
    (LazyConstraints, "poll"),
)


def fail(patch: pytest.MonkeyPatch, owner: Any, method: str, *, count: int, late: bool) -> None:
    """Let a method fail after `count` calls: before the next call has any effect, or, if `late`, after it."""
    works, left = getattr(owner, method), iter(range(count))

    def fails(*args: Any, **named: Any) -> Any:
        over = next(left, None) is None
        if over and not late:
            raise OutOfMemory
        found = works(*args, **named)
        if over:
            raise OutOfMemory
        return found

    patch.setattr(owner, method, fails)


def end_early(data: st.DataObject, engine: Engine, requests: Iterator[Any]) -> None:
    """A run that fails somewhere, or that its caller leaves."""
    with pytest.MonkeyPatch.context() as patch, suppress(OutOfMemory):
        if data.draw(st.booleans()):
            owner, method = data.draw(st.sampled_from(PLACES))
            fail(patch, owner, method, count=data.draw(st.integers(0, 12)), late=data.draw(st.booleans()))
        left = data.draw(st.integers(0, 30))
        with closing(engine.steps(requests)) as steps:
            for _ in islice(steps, left):
                pass


def whole_run(engine: Engine, requests: list[Request]) -> dict[int, Completion]:
    """Completions by row. The number of steps is bounded, because a run without pages for its rows would never end."""
    with closing(engine.steps(iter(requests))) as steps:
        return {out.row_index: out for done in islice(steps, 2000) for out in done}


@pytest.mark.second
@pytest.mark.parametrize("name", ["none", "lookup", "eagle3", "tree"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_of_a_run_that_ended_early_is_found_in_the_next(name: str, data: st.DataObject) -> None:
    """Runs keep prefixes and states of constraints; pages and room for states may be scarce."""
    job, drafter = data.draw(jobs()), ALL[name]()
    room = data.draw(st.sampled_from([{"lazy_words": 1 << 14}, {"lazy_words": 1500, "lazy_masks_bytes": 20}]))
    engine = make_engine(
        tiny_target(window=5), drafter, packed(
            SLOTS, num_verified=drafter.draft_len, num_pages=data.draw(st.sampled_from([400, 24])),
            run_ahead=data.draw(st.sampled_from([0, 2])), prefill_tokens=data.draw(st.sampled_from([5, 64])),
        ),
        device=DEVICE, vocabulary=VOCABULARY, expanding=ExpandLate(data.draw(st.integers(0, 9))),
        automata_capacity=AutomataCapacity(num_tokens=VOCAB, table_words=1 << 17, masks_bytes=1 << 14, **room),
    )
    engine.keeps_prefixes = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expected_pages, "SHORT_CAP_TOKENS", 0)
        for _ in range(data.draw(st.integers(1, 4))):
            end_early(data, engine, iter([req for req, _ in job]))
            if data.draw(st.booleans()):  # its pages are kept
                whole_run(engine, [req for req, _ in job])
        for _ in range(2):
            assert tokens(whole_run(engine, [req for req, _ in job])) == {req.row_index: defined(req, rule) for req, rule in job}
            assert engine.pools.num_free == tuple(pool.num_pages - 1 for pool in engine.pools.pools)
