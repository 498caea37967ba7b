"""Each test is in exactly one tier, or left out of both as slow; and no smoke test disappears."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import COLLECTED, SMOKE, TURNS_OF_A_HALF, Marks, cases_of_other_turns

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


def case(name: str, *marks: str) -> Marks:
    return Marks(f"tests/test_a.py::{name}", frozenset({"second", *marks}), None)


def test_two_turns_of_ci_run_every_case_once() -> None:
    cases = [case(f"test_{i}[{name}]") for i in range(5) for name in "xyz"[: i + 1]] + [case(f"test_plain_{i}") for i in range(8)]
    left = [cases_of_other_turns(cases, turn) for turn in (1000, 1000 + TURNS_OF_A_HALF)]
    assert left[0] | left[1] == {one.test for one in cases}
    assert not left[0] & left[1]
    assert left[0] == cases_of_other_turns(cases, 1000 + TURNS_OF_A_HALF - 1)
    assert min(map(len, left)) >= 7


@pytest.mark.parametrize("mark", ["smoke", "slow", "soak", "every_case"])
def test_cases_of_other_tiers_and_those_that_are_marked_run_in_each_turn(mark: str) -> None:
    assert len(cases_of_other_turns([case("test[x]"), case("test[y]")], 1000)) == 1
    assert not cases_of_other_turns([case("test[x]", mark), case("test[y]", mark)], 1000)


def test_cases_that_rotate_over_architectures_are_not_halved_too(collected: list[Marks]) -> None:
    """Else the turns that have a case may all be those that leave it out."""
    rotated = [marks for marks in collected if {"cards", "second"} <= marks.names]
    assert rotated
    assert [marks.test for marks in rotated if not marks.names & {"every_case", "slow"}] == []


def test_every_smoke_test_is_one_of_the_second_tier_in_the_first(collected: list[Marks]) -> None:
    smoke = [marks for marks in collected if "smoke" in marks.names]
    assert Counter(marks.smoke for marks in smoke) == Counter(SMOKE)
    assert all("second" in marks.names and chosen(FIRST, marks) for marks in smoke)
