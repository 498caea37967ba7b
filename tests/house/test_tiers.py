"""Each test is in exactly one tier, or left out of both as slow; and no smoke test disappears."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import COLLECTED, SMOKE, Marks

ROOT = Path(__file__).parents[2]
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


@pytest.mark.second
def test_each_test_is_in_one_tier(collected: list[Marks]) -> None:
    assert len(SECOND) == 1
    for marks in collected:
        places = [chosen(FIRST, marks), chosen(SECOND[0], marks), chosen("slow or soak", marks)]
        assert places.count(True) == 1, marks


def test_every_smoke_test_is_one_of_the_second_tier_in_the_first(collected: list[Marks]) -> None:
    smoke = [marks for marks in collected if "smoke" in marks.names]
    assert Counter(marks.smoke for marks in smoke) == Counter(SMOKE)
    assert all("second" in marks.names and chosen(FIRST, marks) for marks in smoke)
