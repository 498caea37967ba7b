"""Which steps of sampling the rows of a pass need, so that a round leaves out the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from batchspec.records import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMode:
    """A flag is set if at least one row of the pass needs the step; the host knows what each row asks for."""

    random: bool = False
    filters: bool = False
    penalties: bool = False
    min_tokens: bool = False
    constrained: bool = False
    options: frozenset[str] = frozenset()
    """Options of rows that have a rule of their own (`LogitRule`): what `SamplingParams` has besides numbers."""
    may_hold: bool = False
    """Whether a row may have to be held in its slot, until the host brings what its next token needs."""

    @classmethod
    def of(cls, p: SamplingParams, min_new_tokens: int, *, constrained: bool = False, may_hold: bool = False) -> SamplingMode:
        """What one request needs."""
        return _mode(
            random=p.temperature > 0,
            filters=p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0),
            penalties=p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0,
            options=frozenset(name for name in _OPTIONS if getattr(p, name)),
            min_tokens=min_new_tokens > 0,
            constrained=constrained,
            may_hold=may_hold,
        )

    @classmethod
    def union(cls, modes: Iterable[SamplingMode]) -> SamplingMode:
        """The smallest mode that serves all of `modes`."""
        found = {id(mode): mode for mode in modes}.values()  # most requests share one object
        flags = {name: any(getattr(mode, name) for mode in found) for name in _FLAGS}
        return cls(**flags, options=frozenset().union(*(mode.options for mode in found)))

    @property
    def greedy(self) -> bool:
        """Whether every row takes the argmax of the raw logits."""
        return self == SamplingMode()


_OPTIONS = tuple(item.name for item in fields(SamplingParams) if not isinstance(item.default, int | float))
_FLAGS = tuple(item.name for item in fields(SamplingMode) if item.name != "options")


@cache
def _mode(**flags: Any) -> SamplingMode:
    """The mode with these values: always the same object, so that `union` can tell modes apart by identity."""
    return SamplingMode(**flags)
