"""Makes the completion of a request from its state when it has ended. Its features add what they have to it."""

from __future__ import annotations

import numpy as np

from batchspec.batch.logits import tokens_left
from batchspec.engine.slots.request_state import RequestState
from batchspec.records import Completion, RowError, RowStats

NON_FINITE = "non_finite_logits"


def completion_of(
    state: RequestState, *, drafter: str, eos_ids: frozenset[int], slot: int, now: float, nodes: int | None = None
) -> Completion:
    """The completion of a finished request.

    eos_ids  the model's EOS ids, which are not reported as stop_reason
    slot     the slot in which the request ended
    now      the host's clock in seconds
    nodes    number of nodes in each round's tree; None for chains
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
        stats=_stats(state, drafter, slot, now, nodes),
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


def _stats(state: RequestState, drafter: str, slot: int, now: float, nodes: int | None) -> RowStats:
    return RowStats(
        drafter=drafter,
        draft_len=state.draft_len,
        num_prefills=state.num_prefills,
        num_rounds=state.num_rounds,
        num_drafted=state.num_drafted if nodes is None else nodes * sum(state.drafted_at[:1]),
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
