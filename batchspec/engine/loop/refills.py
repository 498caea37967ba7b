"""What the requests that enter slots bring to a step: their tokens and pages, and the passes that prefill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.prefill.passes import chunks
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.step import Prefill, Refill, Segment
from batchspec.packed_batch import PackedBatch


def refill_of(state: RequestState, page_size: int) -> Refill:
    """The refill of a request that has just got its slot and pages."""
    return Refill(
        slot=state.slot, request=state.request, tokens=tuple(state.tokens), pages=state.pages.columns(),
        num_cached=state.num_shared_pages * page_size,
    )


def prefill_of(
    group: Sequence[RequestState], refills: Sequence[Refill], batch: PackedBatch, *, multiple: int | None = None
) -> Prefill:
    """The passes that prefill a group of requests, each of at most `prefill_tokens` tokens.

    group     requests that have just got their slots and pages; refills: theirs
    multiple  of a model with recurrent layers: prompts are cut at positions that are multiples of it, and tokens that the rows
              had generated before they were preempted go in passes of their own. None: passes may be cut anywhere
    """
    spans = [
        (refill.slot, max(0, refill.num_cached - state.num_recomputed), state.num_tokens)
        for state, refill in zip(group, refills, strict=True)
    ]
    if multiple is None:
        passes = tuple(tuple(segments) for segments in chunks(spans, batch.prefill_tokens))
    else:
        passes = _of_recurrent_layers(group, spans, batch.prefill_tokens, multiple)
    if any(state.num_recomputed for state in group):
        num_cached = {refill.slot: refill.num_cached for refill in refills}
        passes = tuple(tuple(_recomputing(one, num_cached[one.slot]) for one in segments) for segments in passes)
    return Prefill(passes=passes, mode=SamplingMode.union([state.mode for state in group]))


def _of_recurrent_layers(
    group: Sequence[RequestState], spans: Sequence[tuple[int, int, int]], max_tokens: int, multiple: int
) -> tuple[tuple[Segment, ...], ...]:
    """All prompts, then all outputs: the state of a row has one history, that of a row which was never preempted."""
    ends = [len(state.request.prompt_ids) for state in group]
    prompts = [(slot, begin, min(end, prompt)) for (slot, begin, end), prompt in zip(spans, ends, strict=True)]
    outputs = [(slot, max(begin, prompt), end) for (slot, begin, end), prompt in zip(spans, ends, strict=True) if end > prompt]
    unfinished = {slot for slot, _, _ in outputs}
    found = chain(
        chunks(prompts, max_tokens, multiple=multiple, unfinished=unfinished), chunks(outputs, max_tokens, generated=True)
    )
    return tuple(tuple(segments) for segments in found)


def _recomputing(segment: Segment, num_cached: int) -> Segment:
    """The segment with the number of its first tokens whose K and V are in shared pages already."""
    return replace(segment, num_recomputed=max(0, min(segment.end, num_cached) - segment.begin))
