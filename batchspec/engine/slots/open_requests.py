"""The open requests of a run, taken from the stream, until their completions are in the caller's hands.

An open request waits, is in a slot, is preempted, or has ended and waits for its completion or for the caller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchspec.batch.logits import tokens_left
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import RunFeatures
from batchspec.records import Completion, Ids, Request, RowError, RowStats, Snapshot


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended and has no completion."""

    state: RequestState
    slot: int
    """The slot that it had; -1 for none."""
    now: float
    """When it ended, in seconds of the host's clock."""


class OpenRequests:
    """A request is opened by `arrive`, ended by `end`, completed by `take_completions`, and closed by `handed_out`."""

    def __init__(
        self, features: RunFeatures, *, drafter: str, draft_len: int, num_nodes: int | None, eos_ids: frozenset[int],
        finished: Sequence[tuple[Ids, Ids]] = (),
    ) -> None:
        """
        drafter    its name
        draft_len  K of the run
        num_nodes  number of nodes in each round's tree; None for chains
        eos_ids    of the model
        finished   of an earlier run: see `take_finished`
        """
        self._features, self._drafter, self._draft_len, self._num_nodes = features, drafter, draft_len, num_nodes
        self._eos_ids, self._finished = eos_ids, list(finished)
        self._open: dict[RequestState, None] = {}  # a dict, because it keeps their order
        self._ended: list[Ended] = []
        self._taken: list[RequestState] = []

    def arrive(self, request: Request) -> RequestState | None:
        """The state of a request that needs a slot; None for one that has ended already, by the tokens of an earlier run or by
        what its features force."""
        state = self._features.arrive(request, self._draft_len)
        self._open[state] = None
        if state.finish_reason is None:
            return state
        self.end(state, slot=-1, now=time.perf_counter())
        return None

    def ready(self, state: RequestState) -> bool:
        """Whether the request need not wait for any of its features."""
        return self._features.ready(state)

    def end(self, state: RequestState, *, slot: int, now: float) -> None:
        """A request has ended, with a finish reason. slot: that it had, -1 for none; now: seconds of the host's clock."""
        assert state.finish_reason is not None
        assert state.slot < 0
        self._ended.append(Ended(state, slot, now))

    @property
    def any_ended(self) -> bool:
        """Whether a request has ended and has no completion."""
        return bool(self._ended)

    @property
    def any_left(self) -> bool:
        """Whether a request is open and its completion was not taken: it waits, is in a slot, or has ended."""
        return len(self._open) > len(self._taken)

    def take_completions(self) -> list[Completion]:
        """Those of the requests that have ended and wait for no feature, once each. They stay open until `handed_out`."""
        ready, waiting = list[Ended](), list[Ended]()
        for one in self._ended:
            (ready if self.ready(one.state) else waiting).append(one)
        self._ended = waiting
        self._taken = [one.state for one in ready]
        return [self._completion(one) for one in ready]

    def take_finished(self) -> tuple[tuple[Ids, Ids], ...]:
        """Prompt and output of each row that was completed without an error since the last call: the drafter may learn of them.
        """
        finished, self._finished = tuple(self._finished), []
        return finished

    def handed_out(self) -> None:
        """The caller has the completions that were taken last."""
        for state in self._taken:
            del self._open[state]
        self._taken = []

    def snapshots(self, now: float) -> list[Snapshot]:
        """Of all that another run may continue: they have tokens, which are flushed. now: seconds of the host's clock.

        Requests that have ended are included: the next run completes them without decoding. Those that have failed are not: the
        next run decodes them from the beginning.
        """
        left = (state for state in self._open if state.continues and state.tokens and state.finish_reason != "error")
        return [state.snapshot(now) for state in left]

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def _completion(self, ended: Ended) -> Completion:
        done = completion_of(
            ended.state, drafter=self._drafter, eos_ids=self._eos_ids, slot=ended.slot, now=ended.now, num_nodes=self._num_nodes
        )
        done = self._features.finish(ended.state, done)
        if done.prompt_ids is not None and done.token_ids is not None:  # no error
            self._finished.append((done.prompt_ids, done.token_ids))
        return done


NON_FINITE = "non_finite_logits"


def completion_of(
    state: RequestState, *, drafter: str, eos_ids: frozenset[int], slot: int, now: float, num_nodes: int | None = None
) -> Completion:
    """The completion of a finished request.

    eos_ids  the model's EOS ids, which are not reported as stop_reason
    slot     the slot in which the request ended
    now      the host's clock in seconds
    num_nodes  number of nodes in each round's tree; None for chains
    """
    assert state.finish_reason is not None
    request = state.request
    done = Completion(
        request_id=request.request_id,
        row_index=request.row_index,
        sample_index=request.sample_index,
        shard=request.shard,
        prompt_ids=request.prompt_ids,
        seed=request.seed,
        predicted_tokens=request.predicted_tokens,
        cached_tokens=state.cached_tokens,
        image_digest=request.image_digest,
        image_tokens=sum(piece.length for piece in request.images),
        status="error",
        finish_reason="error",
        stats=_stats(state, drafter, slot, now, num_nodes),
    )
    if state.finish_reason == "error":
        if state.error is not None:
            return done.failed(state.error)
        where = f"position {state.num_tokens} (output token {len(state.tokens)})"
        return done.failed(non_finite_at(where, of_left=tokens_left(state.mode)))
    stop_id = None if state.stop_id is None or state.stop_id in eos_ids else str(state.stop_id)
    return done.replace(
        status="truncated" if state.truncated else "ok",
        finish_reason=state.finish_reason,
        stop_reason=stop_id if state.stop_reason is None else state.stop_reason,
        token_ids=np.array(state.tokens, np.int32),
    )


def non_finite_at(where: str, *, of_left: str = "") -> RowError:
    """The error of a request whose logits were not finite at this position. of_left: as `tokens_left`"""
    message = (
        f"the model's logits at {where} hold NaN or +inf, or no finite value{of_left}; check the weights and model.dtype, or "
        "drop the row"
    )
    return RowError(code=NON_FINITE, stage="decode", message=message, retryable=True)


def _stats(state: RequestState, drafter: str, slot: int, now: float, num_nodes: int | None) -> RowStats:
    return RowStats(
        drafter=drafter,
        draft_len=state.draft_len,
        num_prefills=state.num_prefills,
        num_rounds=state.num_rounds,
        num_drafted=state.num_drafted if num_nodes is None else num_nodes * sum(state.drafted_at[:1]),
        num_accepted=state.num_accepted,
        num_discarded=state.num_discarded,
        histogram=tuple(state.histogram),
        drafted_at=tuple(state.drafted_at),
        accepted_at=tuple(state.accepted_at),
        prefill_s=state.prefill_s,
        decode_s=state.decode_s(now),
        slot=slot,
        num_forced=state.num_forced,
    )
