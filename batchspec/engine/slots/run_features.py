"""The features of one run of the engine, and which of them each row has. The engine's core asks here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from batchspec.batch.row_commands import RowCommands
from batchspec.engine.rounds.results import PendingResult, RoundLog, Slots
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RowFeature
from batchspec.engine.slots.watch import Watch
from batchspec.records import Completion, Request


class RunFeatures:
    """Hands each question on to the features of the row that it is about, in their order. `RowFeature` says what the methods
    mean."""

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
