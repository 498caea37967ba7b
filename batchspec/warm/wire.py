"""What a warm engine and the leader of its ranks tell each other, pickled over a pipe between processes of one user.

The engine's process admits rows and makes tables; the leader decodes. A run is asked for step by step, so that it goes on only
while somebody takes its completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchspec.engine.output_processor import EngineTotals
from batchspec.errors import BatchspecError
from batchspec.records import Completion, PackedBatch, Request
from batchspec.token_automaton import TokenAutomaton


@dataclass(frozen=True, slots=True)
class Run:
    """Begin a run."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Decode until rows have ended."""


@dataclass(frozen=True, slots=True)
class Given:
    """The answer to `Ask`."""

    requests: Sequence[Request | None]
    """Without their automata, but for lazy ones. None: there is none yet, see `Engine.run`."""
    follows: Sequence[int]
    """Number of each one's automaton in this run, -1 without one: rows that share an automaton share it on the device."""
    automata: Sequence[TokenAutomaton]
    """Those with the next numbers, without the vocabulary, which the leader has."""
    over: bool
    """There will be no others."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Give up the run. It may cross an answer of the leader, who answers `Stopped` in any case."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Replace the target's weights by those of this folder."""

    folder: str
    is_checkpoint: bool
    """False: they were tensors in memory, and a checkpoint's K/V scales are not among them."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is made."""

    batch: PackedBatch


@dataclass(frozen=True, slots=True)
class Ask:
    """The engine has free slots."""


@dataclass(frozen=True, slots=True)
class Progress:
    totals: EngineTotals


@dataclass(frozen=True, slots=True)
class Ended:
    """Rows that have ended."""

    completions: Sequence[Completion]
    totals: EngineTotals
    over: bool
    """The run is."""


@dataclass(frozen=True, slots=True)
class Stopped:
    totals: EngineTotals


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The weights are replaced."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What the leader raised. It ends: the ranks could not go on together."""

    kind: type[BatchspecError]
    text: str


ToLeader = Run | GoOn | Given | Stop | Weights
FromLeader = Loaded | Ask | Progress | Ended | Stopped | Rewritten | Failed
