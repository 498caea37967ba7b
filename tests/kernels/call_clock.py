"""A clock for tests of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Clock:
    """Counts calls instead of timing them, down from 9 us."""

    def __init__(self) -> None:
        self.left = 9.0

    def us(self, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        self.left -= 1
        return self.left
