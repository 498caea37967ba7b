"""Each test is in exactly one tier, or left out of both as slow; and no smoke test disappears."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from tests.tiers import COLLECTED, SMOKE, TURNS_OF_A_HALF, Marks, cases_of_other_turns, is_halved

ROOT = Path(__file__).parents[1]
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
FIRST = PYTEST["addopts"][PYTEST["addopts"].index("-m") + 1]
SECOND = re.findall(r"-m '(.*)'", (ROOT / ".ci/run").read_text())


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> list[Marks]:
    if any(Path(given).resolve() != ROOT / "tests" for given in pytestconfig.args):
        pytest.skip("needs the collection of all tests: pytest -k test_tiers")
    return pytestconfig.stash[COLLECTED]


def chosen(expression: str, marks: Marks) -> bool:
    """Whether -m takes the test."""
    return bool(eval(expression, {name: name in marks.names for name in ("second", "smoke", "slow", "soak")}))


def test_each_test_is_in_one_tier(collected: list[Marks]) -> None:
    assert len(SECOND) == 1
    for marks in collected:
        places = [chosen(FIRST, marks), chosen(SECOND[0], marks), chosen("slow or soak", marks)]
        assert places.count(True) == 1, marks


class Case:
    """A test of the second tier with these markers."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, [getattr(pytest.mark, name).mark for name in ("second", *marks)]

    def iter_markers(self) -> list[pytest.Mark]:
        return self.marks


def test_two_turns_of_ci_run_every_case_once_and_functions_without_several_cases_twice() -> None:
    cases: list[Any] = [*(Case(f"tests/test_a.py::test_{i}[{case}]") for i in range(5) for case in "xyz"[: i + 1])]
    alone: list[Any] = [Case("tests/test_a.py::test_plain"), Case("tests/test_b.py::test_0[x]")]
    left = [cases_of_other_turns([*cases, *alone], turn) for turn in (1000, 1000 + TURNS_OF_A_HALF)]
    several = {case.nodeid for case in cases if "test_0[" not in case.nodeid}
    assert left[0] | left[1] == several
    assert not left[0] & left[1]
    assert left[0] == cases_of_other_turns(cases, 1000 + TURNS_OF_A_HALF - 1)
    assert min(map(len, left)) >= 4


@pytest.mark.parametrize("mark", ["smoke", "slow", "soak", "every_case"])
def test_cases_of_other_tiers_and_those_that_are_marked_run_in_each_turn(mark: str) -> None:
    plain, marked = Case("tests/test_a.py::test[x]"), Case("tests/test_a.py::test[x]", mark)
    assert is_halved(cast(pytest.Item, plain))
    assert not is_halved(cast(pytest.Item, marked))


def test_every_smoke_test_is_one_of_the_second_tier_in_the_first(collected: list[Marks]) -> None:
    smoke = [marks for marks in collected if "smoke" in marks.names]
    assert Counter(marks.smoke for marks in smoke) == Counter(SMOKE)
    assert all("second" in marks.names and chosen(FIRST, marks) for marks in smoke)
