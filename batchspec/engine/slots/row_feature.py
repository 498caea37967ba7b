"""What a row may ask for beyond tokens (stop strings, a thinking budget, a constraint, log-probabilities, ...), on the host.

The engine's core calls the methods below for every feature of a row, and names none of them. What a feature needs on the device
is a `SlotField`, a `LogitRule` or a `LogitReader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.row_commands import NO_COMMANDS, RowCommands
from batchspec.cache.page_tables import PagePools
from batchspec.engine.prefill.padded import PaddedPass, padded_chunk
from batchspec.engine.prefill.passes import PrefillPass, prefill_chunk
from batchspec.engine.rounds.records import LogitReader, RoundResult
from batchspec.engine.rounds.results import RoundLog, Slots
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.slots.watch import Watch
from batchspec.records import Completion


class RowFeature:
    """A feature in one run of the engine. Only `arrive` must be defined. Methods with a `state` are called for its rows alone.

    A row waits while one of its features is not `ready`: for a slot, or, when it has ended, for its completion. Meanwhile other
    rows go ahead. A row that must wait in its slot is **held** there: the device holds one at a token whose mask it does not have
    yet, `poll` holds those that must wait before they reach such a token, and the scheduler **resumes** each when it is ready.
    """

    continues = True
    """Whether another run may continue its rows from their tokens. Not if it keeps what it reads of results: a snapshot has none
    of it."""

    def arrive(self, state: RequestState) -> bool:
        """A request has come, before anything else happens to it. Returns whether the feature is one of its row's; it may set the
        state's mode, and `prefix_hashes` to [] if no page of its prompt may be shared."""
        raise NotImplementedError

    def keep(self, state: RequestState, tokens: Sequence[int]) -> Sequence[int] | None:
        """Those of the tokens of an earlier run with which the row goes on: all, or fewer if the last ones were forced and are to
        be forced again. None: the row is decoded from its beginning."""
        return tokens

    def ready(self, state: RequestState) -> bool:
        """Whether the row need not wait: to enter a slot; to go on in one (`state.slot`); to be completed, if it has ended. May
        fail the row (`RequestState.fail`)."""
        return True

    def enter(self, state: RequestState) -> None:
        """The row, which was ready, enters its slot, or goes on in it."""

    def leave(self, state: RequestState) -> None:
        """The row leaves its slot: it has ended, or is preempted. May fail a row that has ended."""

    def read(self, launch: UnreadLaunch, result: RoundResult, slots: Slots, log: RoundLog) -> None:
        """A result was read; line i of `log` is that of the row in slots[i], whose tokens are not flushed yet. Called for every
        result, whatever rows took part."""

    def examine(self, state: RequestState) -> Watch | None:
        """Look at the row's tokens, which are flushed: when it arrives, and when its last watch is due. It may `cut` or `replace`
        them. Returns the next watch; None: the row need not be examined again."""

    def poll(self) -> Iterable[RequestState]:
        """Take what has come from outside. Returns the rows that this failed, and rows in slots that must be held until they are
        `ready` again. Called before every step."""
        return ()

    def take_commands(self) -> RowCommands:
        """What the device must do before the next pass or round, when the rows that enter are in their slots."""
        return NO_COMMANDS

    def pending(self) -> Iterable[Future[Any]]:
        """What it waits for."""
        return ()

    def finish(self, state: RequestState, done: Completion) -> Completion:
        """The completion with what the feature adds. Features are asked in the order in which the engine has them."""
        return done


class Features:
    """The features that rows of an engine may have: what they need on the device, and what one run leaves to the next. This base
    has none."""

    @property
    def reader(self) -> LogitReader | None:
        """Reads the target's logits; None: nothing does."""
        return None

    @property
    def prefill_pass(self) -> PrefillPass:
        """Launches one prefill pass kernel by kernel."""
        return prefill_chunk

    @property
    def padded_pass(self) -> PaddedPass | None:
        """Launches the same pass, padded, for a CUDA graph that may take its place; None: no pass is a graph."""
        return padded_chunk

    def allocate(self, rows: DeviceBatch) -> None:
        """Allocate what `LogitRule`s read besides the state of the slots. Called once, before any graph is captured."""

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        """The features of a run that begins with these slots and pages, in the order in which they examine and finish rows."""
        return ()
