"""The two tiers of the tests, by markers: what `pytest` runs, and what `.ci/run` runs besides.

A test marked `second` starts, hangs and kills programs, or computes for long. It is left out unless asked for with -m; a test
that is also marked `smoke` stays in the first tier. tests/test_tiers.py checks that each test is in exactly one tier.

CI runs half of the second tier: every other case of a function that has parameters, and half of the other functions, unless they
are marked `every_case`. `BATCHSPEC_TURN`, the number of the commit, says which half. Without it all run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import pytest

TURN = "BATCHSPEC_TURN"
TURNS_OF_A_HALF = 10
"""Turns in a row that run the same half: as many as compile for all architectures (`tests/kernels/architectures.py`)."""

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


def turn() -> int | None:
    """The value of TURN, by which runs of CI differ; None: not in CI."""
    given = os.environ.get(TURN)
    return None if given is None else int(given)


def cases_of_other_turns(collected: Iterable[Marks], turn: int) -> set[str]:
    """What this turn leaves out of the second tier: every other case of each function, and half of the functions with one."""
    cases = defaultdict(list)
    for marks in collected:
        if "second" in marks.names and not marks.names & {"smoke", "slow", "soak", "every_case"}:
            cases[marks.test.partition("[")[0]].append(marks.test)
    half = turn // TURNS_OF_A_HALF
    return {
        case for function, own in cases.items() for place, case in enumerate(own)
        if (place + crc32(function.encode()) + half) % 2
    }


def marks_of(item: pytest.Item) -> Marks:
    smoke = item.get_closest_marker("smoke")
    return Marks(item.nodeid, frozenset(mark.name for mark in item.iter_markers()), smoke and smoke.args[0])
