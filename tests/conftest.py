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

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch leaves to later
    from tests.interpreter import make_interpreter_quick

    make_interpreter_quick()

settings.register_profile(
    "batchspec",
    deadline=None,  # the interpreter's first call is slow
    print_blob=True,
    derandomize="CI" in os.environ,  # there the same examples decide about the same code; elsewhere each run draws others
)
settings.load_profile("batchspec")


LONG = (
    "test_compile.py",
    "test_workers.py",
    "test_group_jobs.py",
    "test_job.py",
    "test_hanging_loads.py",
    "test_warm_ranks.py",
    "test_lazy.py",
    "test_retry.py",
    "test_extend_kills.py",
    "test_extend.py",
    "test_demo.py",
    "test_bench.py",
    "test_lossless_formats.py",
    "test_gpu_dispatch.py",
    "test_train.py",
    "test_crashes.py",
    "test_s3.py",
    "test_kv_groups.py",
    "test_lockstep.py",
    "test_slurm.py",
    "test_eagle3.py",
    "test_lossless.py",
    "test_adapt_job.py",
    "test_warm.py",
    "test_prefill_graphs.py",
    "test_replay.py",
    "test_conversations.py",
    "test_tree.py",
    "test_faults.py",
    "test_store_job.py",
    "test_s3_kills.py",
    "test_vocabulary.py",
    "test_ordered_attention.py",
    "test_coupled.py",
    "test_shadowed_modules.py",
    "test_moe_drafters.py",
    "test_expert_blocks.py",
    "test_engine_freed.py",
    "test_constrained.py",
    "test_last_check.py",
    "test_install.py",
    "test_kills.py",
    "test_changed_input.py",
    "test_sharded_draft.py",
    "test_expert_kernels.py",
    "test_fp8_linear.py",
    "test_peer.py",
    "test_contention.py",
    "test_plan.py",
    "test_deterministic.py",
    "test_lossless_combined.py",
)
"""Files that take ten seconds or more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: where workers take whole files, none is left alone with one at the end."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))
    if "CI" in os.environ:
        draw_fewer_examples({item.function for item in items if isinstance(item, pytest.Function)})


def draw_fewer_examples(tests: Iterable[Callable[..., object]]) -> None:
    """Half of what a property test asks for, but at least six: where each run draws the same examples, the later ones, which
    resemble the earlier ones, are paid for in every run and were new in one. Elsewhere each run draws others, and all of them.
    """
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
def quick_jobs() -> Iterator[None]:
    """Jobs in this process leave out what takes longer than a tiny model's rows."""
    from tests.runs import make_jobs_quick

    with pytest.MonkeyPatch.context() as patch:
        make_jobs_quick(patch)
        yield


@pytest.fixture
def draws() -> Iterator[None]:
    """Jobs of this test draw their reports."""
    from tests.runs import drawing

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
