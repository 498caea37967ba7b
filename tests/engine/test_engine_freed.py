"""An engine without references is freed at once, with its pages and CUDA graphs.

Left to the garbage collector, it would keep a card's memory while the next engine is made, and its graphs could be freed within a
capture, which CUDA does not permit.
"""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchspec import run
from batchspec.draft.base import Drafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.none import NoDrafter
from batchspec.engine.loop.engine import Engine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import StorageError
from batchspec.job.runner.run_monitor import RunMonitor
from batchspec.process.garbage import OF_PYTHON, RARE, imports_frozen, older_objects_frozen
from batchspec.records import Request
from tests.helpers.engines import DEVICE, make_engine, packed, request, tiny_target
from tests.helpers.runs import make_model, make_prompts


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_other_tests(product_freezes: None) -> None:
    gc.collect()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def requests() -> list[Request]:
    return [request(i, [1, 2, 3 + i], cap=6) for i in range(4)]


def use(engine: Engine, how: str) -> None:
    if how == "not run":
        return
    running = engine.run(iter(requests()))
    if how == "run":
        assert len(list(running)) == 4
    else:
        next(running)
        running.close()


@pytest.mark.parametrize("how", ["not run", "run", "left half-way"])
@pytest.mark.parametrize("drafter", [NoDrafter, lambda: LookupDrafter(2, min_ngram=2, max_ngram=6)], ids=["none", "lookup"])
def test_an_engine_that_nobody_holds_is_freed_without_the_garbage_collector(drafter: type[Drafter], how: str) -> None:
    engine = make_engine(tiny_target(), drafter(), packed(2), device=DEVICE)
    use(engine, how)
    executor = weakref.ref(engine.executor)
    del engine
    assert executor() is None


@pytest.mark.parametrize("how", ["run", "left half-way"])
def test_garbage_collections_skip_older_objects_during_a_run_and_no_longer(how: str) -> None:
    engine = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE)
    running = engine.run(iter(requests()))
    next(running)
    assert gc.get_freeze_count() > OF_PYTHON
    if how == "run":
        assert len(list(running)) == 3
    else:
        running.close()
    assert gc.get_freeze_count() == 0


def test_what_python_itself_has_frozen_when_it_starts_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred objects of Python 3.12."""
    calls = list[str]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    with older_objects_frozen():
        assert calls == ["freeze"]
    assert calls == ["freeze", "unfreeze"]


@pytest.mark.parametrize("how", ["not run", "run", "left half-way"])
def test_a_job_freezes_what_it_imported_and_its_engine_more_and_nothing_stays_frozen(how: str) -> None:
    with imports_frozen():
        imported = gc.get_freeze_count()
        assert imported > 0
        running = make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE).run(iter(requests()))
        if how != "not run":
            next(running)
            assert gc.get_freeze_count() > imported
            running.close()
            assert gc.get_freeze_count() == 0
    assert gc.get_freeze_count() == 0


@pytest.mark.second
@pytest.mark.parametrize("how", ["run", "left half-way"])
def test_objects_that_a_host_program_froze_stay_frozen(how: str) -> None:
    """A run within another one is such a case too: the first one's freeze lasts until that one ends."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with imports_frozen():
            use(make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE), how)
        use(make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE), how)
        assert gc.get_freeze_count() == pytest.approx(frozen, rel=0.01)  # some died meanwhile, as they do
    finally:
        gc.unfreeze()
    first, second = (make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE).run(iter(requests())) for _ in range(2))
    next(first)
    use(make_engine(tiny_target(), NoDrafter(), packed(2), device=DEVICE), how)
    assert gc.get_freeze_count() > 0
    next(second)
    first.close()
    second.close()
    assert gc.get_freeze_count() == 0


@pytest.mark.second
def test_garbage_is_collected_rarely_during_a_run_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with older_objects_frozen():
        assert gc.get_threshold() == (RARE, *before[1:])
    assert gc.get_threshold() == before
    gc.set_threshold(0)
    try:
        with older_objects_frozen():
            assert gc.get_threshold()[0] == 0, "it stays switched off"
    finally:
        gc.set_threshold(*before)


@pytest.mark.second
@pytest.mark.parametrize(("how", "code"), [("complete", 0), ("a signal", 75), ("Ctrl-C twice", 75), ("an error", 74)])
def test_a_job_in_a_program_that_goes_on_keeps_no_engine(
    how: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of ten jobs were in memory at once, until Python happened to collect its oldest garbage."""
    observe = RunMonitor.after_round

    def observed(self: RunMonitor, totals: EngineTotals) -> None:
        observe(self, totals)
        if how == "an error":
            raise StorageError("the disk is full")
        for _ in range({"a signal": 1, "Ctrl-C twice": 2}.get(how, 0)):
            signal.raise_signal(signal.SIGTERM if how == "a signal" else signal.SIGINT)

    monkeypatch.setattr(RunMonitor, "after_round", observed)
    model, data = make_model(tmp_path / "model"), make_prompts(tmp_path / "in.parquet", 8)
    words = [
        f"model.path={model}", "model.dtype=float64", f"input.path={data}", "draft=lookup",
        f"output.dir={tmp_path / 'out'}", "decode.max_new_tokens=6", "packing.max_num_seqs=3",
    ]
    gc.collect()
    others = [one for one in gc.get_objects() if isinstance(one, Engine)]  # of other tests of this process
    assert run.main(words) == code
    assert not [one for one in gc.get_objects() if isinstance(one, Engine) and not any(one is other for other in others)]
