"""The messages between a warm engine and the leader of its ranks, over a pipe; `distributed/wire.py` encodes them.

To the leader: Run, then GoOn for each group of completions (so that a run decodes only while somebody reads it), Given in answer
to Ask, Stop, Weights. From the leader: Loaded, once; Ask and Progress during a run; Ended in answer to GoOn; Stopped in answer to
Stop; Rewritten in answer to Weights; Failed, after which the leader ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from batchspec.automata.token_automaton import TokenAutomaton
from batchspec.distributed.wire import Codec
from batchspec.engine.loop.totals import EngineTotals
from batchspec.packed_batch import PackedBatch
from batchspec.records import Completion, Request


class Run(msgspec.Struct, frozen=True, tag=True):
    """Begin a run."""


class GoOn(msgspec.Struct, frozen=True, tag=True):
    """Decode until at least one row has ended, or none is left to decode at present."""


class Given(msgspec.Struct, frozen=True, tag=True):
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


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Cancel the run. It may be sent while an answer of the leader is on its way; the leader answers `Stopped` in any case."""


class Weights(msgspec.Struct, frozen=True, tag=True):
    """Replace the target's weights by those of this folder."""

    folder: str
    is_checkpoint: bool
    """Whether they come from a checkpoint; tensors in memory have no K/V scales of a checkpoint."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and the engine is ready; `batch` is its shape."""

    batch: PackedBatch


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The engine has free slots."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The totals so far, sent at most every TELL_S seconds (rank_process.py)."""

    totals: EngineTotals


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Completions of rows that have ended since the last GoOn; none, if no row came that can be decoded."""

    completions: Sequence[Completion]
    totals: EngineTotals
    over: bool
    """Whether the run has ended."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The run was cancelled."""

    totals: EngineTotals


class Rewritten(msgspec.Struct, frozen=True, tag=True):
    """The weights are replaced."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An error that the leader raised, by its name in errors.py and its text. The leader ends after it, and with it all ranks."""

    name: str
    text: str


ToLeader = Run | GoOn | Given | Stop | Weights
FromLeader = Loaded | Ask | Progress | Ended | Stopped | Rewritten | Failed
TO_LEADER, FROM_LEADER = Codec[ToLeader](ToLeader), Codec[FromLeader](FromLeader)
