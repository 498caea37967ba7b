"""Combinations of a test's parameters: a part that covers each value runs always, the others with -m slow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
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


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of values, one of each axis. As few as have each pair of values of two axes, nearly, are not slow."""
    places = list(product(*(range(len(axis)) for axis in axes)))
    left = {place: set(combinations(enumerate(place), 2)) for place in places}
    chosen = set[tuple[int, ...]]()
    while any(left.values()):
        most = max(left, key=lambda place: len(left[place]))
        chosen.add(most)
        done = left.pop(most)
        left = {place: own - done for place, own in left.items()}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, own, strict=True)), marks=() if own in chosen else pytest.mark.slow
        )
        for own in places
    ]
