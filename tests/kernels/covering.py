"""Combinations of a test's parameters: a part that covers each value runs always, the others with -m slow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], one_in: int = 2) -> list[Any]:
    """All combinations of values, one of each axis. One in `one_in` is not slow: with 2 and three axes, each pair of values is in
    one of those; each value is, if the other axes have `one_in` values together."""
    found = []
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        found.append(pytest.param(*values, marks=pytest.mark.slow if sum(places) % one_in else ()))
    return found
