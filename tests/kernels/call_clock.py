"""A clock for tests of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Clock:
    """Counts calls instead of timing them, down from 99 us."""

    def __init__(self) -> None:
        self.left = 99.0

    def us(self, calls: Sequence[Callable[[], object]], *, repeats: int = 1) -> float:
        calls[-1]()
        self.left -= 1
        return self.left
