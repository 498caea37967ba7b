"""What a row may ask for beyond tokens (stop strings, a thinking budget, a constraint, log-probabilities, ...), on the host.

The engine's core asks `RunFeatures`, which calls the methods of every feature of a row and names none of them. What a feature
needs on the device is a `SlotField`, a `LogitRule` or a `LogitReader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.row_commands import NO_COMMANDS, RowCommands
from batchspec.cache.page_tables import PagePools
from batchspec.engine.prefill.padded import PaddedPass, padded_chunk
from batchspec.engine.prefill.passes import PrefillPass, prefill_chunk
from batchspec.engine.rounds.records import LogitReader, PendingResult, RoundLog, RoundResult, Slots
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.request_state import RequestState, Watch
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.packed_batch import ExampleRow
from batchspec.records import Completion, Request


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

    def expect(self, requests: Iterable[Request]) -> None:
        """These requests will probably be among the first of the next run: what takes long may begin while the engine is
        prepared. No result depends on it."""

    def examples(self, rows: DeviceBatch, most_tokens: int) -> Iterable[ExampleRow]:
        """Rows of at most so many tokens that bring more than text to a prefill pass: it is compiled and launched with them
        before the first row comes."""
        return ()

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        """The features of a run that begins with these slots and pages, in the order in which they examine and finish rows."""
        return ()


class RunFeatures:
    """The features of one run, and which of them each row has. Hands each question on to the features of the row that it is
    about, in their order; `RowFeature` says what the methods mean."""

    def __init__(self, features: Sequence[RowFeature] = ()) -> None:
        self._features = tuple(features)
        # those that are called in every step, without the features that do not define them
        self._read, self._poll, self._take_commands = (self._defining(name) for name in ("read", "poll", "take_commands"))
        self._of_row: dict[RequestState, tuple[RowFeature, ...]] = {}

    def arrive(self, request: Request, draft_len: int) -> RequestState:
        """The state of a new request, or of one that continues from the tokens of an earlier run. Its features may have ended it.

        draft_len  K of this run; the earlier run may have had a larger one
        """
        state = RequestState.of(request, draft_len)
        own = tuple(feature for feature in self._features if feature.arrive(state))
        if own:
            self._of_row[state] = own
        state.continues = all(feature.continues for feature in own)
        tokens: Sequence[int] | None = None if request.resumed is None else request.resumed.tokens
        for feature in own:
            tokens = None if tokens is None else feature.keep(state, tokens)
        if tokens is not None:
            state.resume(tokens)
        self.examine(state)
        state.replaced = False  # nothing of it is on the device
        return state

    def ready(self, state: RequestState) -> bool:
        """Whether the row need not wait for any of its features."""
        return all(feature.ready(state) for feature in self._of(state))

    def enter(self, state: RequestState) -> None:
        for feature in self._of(state):
            feature.enter(state)

    def leave(self, state: RequestState) -> None:
        for feature in self._of(state):
            feature.leave(state)

    def read(self, launch: UnreadLaunch, result: PendingResult, slots: Slots, log: RoundLog) -> None:
        for feature in self._read:
            feature.read(launch, result.result, slots, log)

    def examine(self, state: RequestState) -> None:
        """Let the row's features examine it in their order: each sees the tokens that the ones before it have kept."""
        found = [feature.examine(state) for feature in self._of(state)]
        state.watch = Watch.first(watch for watch in found if watch is not None)

    def poll(self) -> Iterator[RequestState]:
        for feature in self._poll:
            yield from feature.poll()

    def take_commands(self) -> RowCommands:
        return RowCommands.joined(feature.take_commands() for feature in self._take_commands)

    def wait(self, seconds: float) -> None:
        """Wait until something that a feature waits for is there, but no longer than so many seconds."""
        pending: list[Future[Any]] = [future for feature in self._features for future in feature.pending()]
        wait(pending, seconds, FIRST_COMPLETED)

    def finish(self, state: RequestState, done: Completion) -> Completion:
        """The row's completion with what its features add. They are not asked about the row again."""
        for feature in self._of_row.pop(state, ()):
            done = feature.finish(state, done)
        return done

    def _defining(self, method: str) -> tuple[RowFeature, ...]:
        return tuple(own for own in self._features if getattr(type(own), method) is not getattr(RowFeature, method))

    def _of(self, state: RequestState) -> tuple[RowFeature, ...]:
        return self._of_row.get(state, ())
