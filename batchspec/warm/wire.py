"""The messages between a warm engine and the leader of its ranks, pickled over a pipe between processes of one user.

To the leader: Run, then GoOn for each group of completions (so that a run decodes only while somebody reads it), Given in answer
to Ask, Stop, Weights. From the leader: Loaded, once; Ask and Progress during a run; Ended in answer to GoOn; Stopped in answer to
Stop; Rewritten in answer to Weights; Failed, after which the leader ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchspec.automata.token_automaton import TokenAutomaton
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import BatchspecError
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request


@dataclass(frozen=True, slots=True)
class Run:
    """Begin a run."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """Decode until at least one row has ended, or the run has."""


@dataclass(frozen=True, slots=True)
class Given:
    """The answer to `Ask`: at most `REQUESTS` of ranks.py."""

    requests: Sequence[Request]
    """Those that are ready now, if any, without their finite automata, but with lazy ones."""
    follows: Sequence[int]
    """For each request the number of its finite automaton in this run, -1 without one. Rows with the same one share its
    tables."""
    automata: Sequence[TokenAutomaton]
    """Automata that this run has not sent before, numbered on; without the vocabulary, which the leader has."""
    over: bool
    """Whether these are the last requests of the run."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel the run. It may be sent while an answer of the leader is on its way; the leader answers `Stopped` in any case."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Replace the target's weights by those of this folder."""

    folder: str
    is_checkpoint: bool
    """Whether they come from a checkpoint; tensors in memory have no K/V scales of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is loaded and the engine is ready; `batch` is its shape."""

    batch: PackedBatch


@dataclass(frozen=True, slots=True)
class Ask:
    """The engine has free slots."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The totals so far, sent at most every TELL_S seconds (rank_process.py)."""

    totals: EngineTotals


@dataclass(frozen=True, slots=True)
class Ended:
    """Completions of rows that have ended since the last GoOn."""

    completions: Sequence[Completion]
    totals: EngineTotals
    over: bool
    """Whether the run has ended."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run was cancelled."""

    totals: EngineTotals


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The weights are replaced."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that the leader raised, by type and text. The leader ends after it, and with it all ranks."""

    kind: type[BatchspecError]
    text: str


ToLeader = Run | GoOn | Given | Stop | Weights
FromLeader = Loaded | Ask | Progress | Ended | Stopped | Rewritten | Failed
