"""Set-up of every test: Triton kernels run in the interpreter where there is no GPU, and torch starts from a fixed seed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: threads of two workers would wait for each other

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch leaves to later

settings.register_profile("batchspec", deadline=None, print_blob=True)  # the interpreter's first call is slow
settings.load_profile("batchspec")


LONG = (
    "test_demo.py",
    "test_kills.py",
    "test_s3_kills.py",
    "test_contention.py",
    "test_crashes.py",
    "test_faults.py",
    "test_job.py",
)
"""Files that take a minute or more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: where workers take whole files, none is left alone with one at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session", autouse=True)
def quick_jobs() -> Iterator[None]:
    """Jobs in this process draw no report, and measure the machine once: both take longer than a tiny model's rows."""
    from batchspec import job
    from batchspec.packing import cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "can_draw", lambda: False)
        patch.setattr(cost, "calibrate", cache(cost.calibrate))
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
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)
