"""A job's engine in memory runs rows: what the job learns from them, and who hears of their rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.records import Completion, Request
from batchspec.tasks.registry import GENERATE
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target
from tests.helpers.moe_models import ids_of


def loaded(seen: list[Completion]) -> LoadedEngine[Engine]:
    """An engine whose job decodes answers. seen: gets what the job observes."""
    job: Any = SimpleNamespace(admission=SimpleNamespace(task=GENERATE, observe=seen.append))
    return LoadedEngine(make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE), job)


def requests() -> list[Request]:
    return [request(i, [1, 2, 3 + i], cap=4 + i) for i in range(4)]


def test_the_job_observes_every_row_before_it_is_handed_out() -> None:
    seen = list[Completion]()
    for count, completion in enumerate(loaded(seen).run(requests()), 1):
        assert seen[-1] is completion
        assert len(seen) == count
    assert sorted(done.row_index for done in seen) == [0, 1, 2, 3]


def test_rounds_are_reported_while_the_run_lasts() -> None:
    one, rounds = loaded([]), list[int]()
    assert len(list(one.run(requests(), lambda totals: rounds.append(totals.rounds)))) == 4
    told = len(rounds)
    assert rounds == sorted(rounds)
    assert told > 4
    assert len(list(one.run(requests()))) == 4
    assert len(rounds) == told


def test_rows_that_no_job_has_admitted_are_decoded_alike() -> None:
    bare, of_job = (list(one.run(requests())) for one in (LoadedEngine(loaded([]).engine), loaded([])))
    assert [ids_of(done) for done in bare] == [ids_of(done) for done in of_job]


@pytest.mark.parametrize("of_job", [True, False])
def test_steps_report_rounds_and_teach_the_job_that_admitted_the_rows(of_job: bool) -> None:
    """A leader of ranks has no such job: the process whose requests it decodes learns."""
    seen, rounds = list[Completion](), list[int]()
    one = loaded(seen) if of_job else LoadedEngine(loaded(seen).engine)
    steps = list(one.steps(requests(), lambda totals: rounds.append(totals.rounds)))
    assert sorted(done.row_index for step in steps for done in step) == [0, 1, 2, 3]
    assert len(steps) > 4, "of most steps none ends a row"
    assert rounds
    assert one.engine.on_round is None
    assert seen == ([done for step in steps for done in step] if of_job else [])


@pytest.mark.parametrize("how", ["to its end", "left half-way", "given up by the report"])
def test_an_engine_does_not_keep_what_a_run_reported_to(how: str) -> None:
    """It may know the engine: the last reference would not free it."""
    one = loaded([])

    def report(totals: EngineTotals) -> None:
        if how == "given up by the report":
            raise KeyError

    running = one.run(requests(), report)
    if how == "to its end":
        list(running)
    elif how == "left half-way":
        next(running)
        assert one.engine.on_round is report
        running.close()
    else:
        with pytest.raises(KeyError):
            list(running)
    assert one.engine.on_round is None
