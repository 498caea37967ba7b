"""Which steps of sampling the rows of a pass need, so that a round leaves out the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from batchspec.records import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMode:
    """The host knows what each row asks for: a flag is set where at least one row of the pass needs the step."""

    random: bool = False
    filters: bool = False
    penalties: bool = False
    biased: bool = False
    min_tokens: bool = False
    constrained: bool = False
    waits: bool = False
    """A row follows a lazy automaton: it may have to wait for the host."""

    @classmethod
    def of(cls, p: SamplingParams, min_new_tokens: int, *, constrained: bool = False, waits: bool = False) -> SamplingMode:
        """What one request needs."""
        return cls(
            random=p.temperature > 0,
            filters=p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0),
            penalties=p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0,
            biased=bool(p.logit_bias),
            min_tokens=min_new_tokens > 0,
            constrained=constrained,
            waits=waits,
        )

    @classmethod
    def union(cls, modes: Iterable[SamplingMode]) -> SamplingMode:
        """What serves all of `modes`."""
        found = set(modes)
        return cls(**{flag.name: any(getattr(mode, flag.name) for mode in found) for flag in fields(cls)})

    @property
    def greedy(self) -> bool:
        """Plain argmax of the raw logits for every row."""
        return self == SamplingMode()
