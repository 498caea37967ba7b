"""Set-up of every test: Triton kernels run in the interpreter where there is no GPU, and torch starts from a fixed seed."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: threads of two workers would wait for each other

import pytest
import torch
from hypothesis import settings

from tests.tiers import COLLECTED, marks_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch leaves to later
    from tests.helpers.interpreter import make_interpreter_quick

    make_interpreter_quick()

settings.register_profile(
    "batchspec",
    deadline=None,  # the interpreter's first call is slow
    print_blob=True,
    derandomize="CI" in os.environ,  # there the same examples decide about the same code; elsewhere each run draws others
)
settings.load_profile("batchspec")


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(gc.unfreeze)  # of `older_objects_skipped`: what Python does not free at its end, Triton reports as leaked


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before -m takes a tier's tests: the tour comes first."""
    items.sort(key=lambda item: item.path.name != "test_tour.py")
    config.stash[COLLECTED] = [marks_of(item) for item in items]
    if "CI" not in os.environ:
        draw_fewer_examples({item.function for item in items if isinstance(item, pytest.Function)})


def draw_fewer_examples(tests: Iterable[Callable[..., object]]) -> None:
    """Half of what a property test asks for, but at least six: while somebody works, each run draws others. CI draws all."""
    for test in tests:
        if hasattr(test, "hypothesis"):
            asked = getattr(test, "_hypothesis_internal_use_settings", None) or settings()
            fewer = min(asked.max_examples, max(6, asked.max_examples // 2))
            vars(test)["_hypothesis_internal_use_settings"] = settings(asked, max_examples=fewer)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection makes many objects and little garbage: looking for it took nearly half of the time (9.8 s, 5.3 without). Later
    it is looked for seldom, as in an engine's run: among the modules of torch and the tests it took 5 % of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.set_threshold(10_000, 20, 100)
        gc.enable()


@pytest.fixture(autouse=True)
def shared_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of several workers use a GPU at the same time. One marked `whole_gpu` waits until no other test does."""
    if not torch.cuda.is_available():
        yield
        return
    with (Path(tempfile.gettempdir()) / f"batchspec-tests-gpu-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("whole_gpu") else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # not left to `close`: a process that the test forked may hold the file open


@pytest.fixture(scope="session", autouse=True)
def older_objects_skipped() -> Iterator[None]:
    """Garbage collections skip the modules and the collected tests: a collection that traversed them took 0.7 s.

    To the product it is a host program that has frozen its objects, so that jobs and engines of this process freeze none.
    `product_freezes` is for tests of that. The number of frozen objects is found by counting them, which takes 15 ms.
    """
    gc.freeze()
    frozen = gc.get_freeze_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: frozen)
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


_freezing = {name: getattr(gc, name) for name in ("freeze", "unfreeze", "get_freeze_count")}


@pytest.fixture(scope="module")
def product_freezes(older_objects_skipped: None) -> Iterator[None]:
    """Nothing is frozen when a test begins, as in a program of the product's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in _freezing.items():
            patch.setattr(gc, name, function)
        gc.unfreeze()
        yield
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_jobs() -> Iterator[None]:
    """Jobs in this process leave out what takes longer than a tiny model's rows."""
    from tests.helpers.runs import make_jobs_quick

    with pytest.MonkeyPatch.context() as patch:
        make_jobs_quick(patch)
        yield


@pytest.fixture
def draws() -> Iterator[None]:
    """Jobs of this test draw their reports."""
    from tests.helpers.runs import drawing

    with drawing():
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Memory that nothing was written to yet holds NaN and the largest integers: what reads it shows."""
    # What torch.empty gives is filled. The public function imports the compiler of torch, which takes more than a second.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)
