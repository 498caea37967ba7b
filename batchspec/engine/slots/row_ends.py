"""The end of a row: it leaves its slot, waits while its features are not ready, and becomes a completion."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from batchspec.engine.slots.allocator import SlotAllocator
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.run_features import RunFeatures
from batchspec.kernels.rounds.accept import HELD
from batchspec.records import Completion, Ids


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: the slot that it had, -1 for none, and the host's clock in seconds."""

    state: RequestState
    slot: int
    now: float


class RowEnds:
    """Ends rows: `end` those that the device or a feature has ended, `fail` those that a feature has failed. Later `take` makes
    their completions."""

    def __init__(
        self, allocator: SlotAllocator, features: RunFeatures, *, ended: list[Ended], finished: list[tuple[Ids, Ids]],
        complete: Callable[..., Completion],
    ) -> None:
        """
        ended     requests that have ended and have no completion. `_arrive` of engine_run.py adds those that end before they
                  enter a slot
        finished  gets prompt and output of each row that ended without an error, for the drafter to learn from
        complete  makes the completion of a request: `completion_of`, with the arguments that are the same for all requests bound
        """
        self._allocator, self._features, self._ended = allocator, features, ended
        self._finished, self._complete = finished, complete

    def end(self, state: RequestState, finish: int, now: float) -> None:
        """Take a request that has ended out of its slot.

        finish  the device's reason; 0 if a feature ended it
        now     seconds of the host's clock
        If it ended with an error, later rows share no page of its prompt: an infinite key in one of these pages may be the cause.
        All pages of its prefix are forgotten, even those that other rows read without an error: a query to which the infinite
        key is masked, or gets no weight, has finite results.
        """
        slot = state.slot
        self._allocator.release(state, on_device=finish not in (0, HELD))
        if state.finish_reason is None:
            state.set_finish_reason(finish)
        if state.finish_reason == "error":
            self._allocator.pools.forget_prefix(state.prefix_hashes or ())
        self._ended.append(Ended(state, slot, now))

    def fail(self, state: RequestState) -> None:
        """End a row that one of its features has failed, in a slot or not. Its features examine its newest tokens first: if these
        end it, it ends with their reason. Otherwise the lengths of rounds would decide which comes first."""
        error, state.finish_reason, state.error = state.error, None, None
        slot = state.slot
        if slot >= 0:
            self._allocator.slots.flush(state)
        self._features.examine(state)
        if state.finish_reason is None:
            state.fail(error)
        if slot >= 0:
            self._allocator.release(state)
        self._ended.append(Ended(state, slot, time.perf_counter()))

    @property
    def outstanding(self) -> bool:
        """Whether a request has ended and has no completion."""
        return bool(self._ended)

    def take(self) -> list[tuple[RequestState, Completion]]:
        """The requests that have ended and wait for nothing, once each, with their completions."""
        ready, waiting = list[Ended](), list[Ended]()
        for one in self._ended:
            (ready if self._features.ready(one.state) else waiting).append(one)
        self._ended[:] = waiting
        return [(one.state, self._completion(one)) for one in ready]

    def _completion(self, ended: Ended) -> Completion:
        done = self._features.finish(ended.state, self._complete(ended.state, slot=ended.slot, now=ended.now))
        if done.prompt_ids is not None and done.token_ids is not None:  # no error
            self._finished.append((done.prompt_ids, done.token_ids))
        return done
