"""The two tiers of the tests, by markers: what `pytest` runs, and what `.ci/run` runs besides.

A test marked `second` starts, hangs and kills programs, or computes for long. It is left out unless asked for with -m; a test
that is also marked `smoke` stays in the first tier. tests/house/test_tiers.py checks that each test is in exactly one tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

SMOKE = (
    "a whole job", "resume after SIGKILL", "an S3 kill at a PUT", "two workers of which one dies", "a retry", "an extension",
    "a warm call", "a hang", "a structured row with drafts", "two ranks",
)
"""What the smoke tests show, each as the argument of its marker."""


@dataclass(frozen=True, slots=True)
class Marks:
    test: str
    names: frozenset[str]
    smoke: str | None
    """Of SMOKE."""


COLLECTED = pytest.StashKey[list[Marks]]()
"""In pytest's configuration: all tests of the run, before one is left out."""


def marks_of(item: pytest.Item) -> Marks:
    smoke = item.get_closest_marker("smoke")
    return Marks(item.nodeid, frozenset(mark.name for mark in item.iter_markers()), smoke and smoke.args[0])
