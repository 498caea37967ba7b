"""What the requests that enter slots bring to a step: their tokens and pages, and the passes that prefill them."""

from __future__ import annotations

from collections.abc import Sequence

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.allocator import SlotAllocator
from batchspec.engine.prefill import chunks
from batchspec.engine.request_state import RequestState
from batchspec.engine.scoring import reread
from batchspec.engine.step import Prefill, Refill


def prefill_of(group: Sequence[RequestState], allocator: SlotAllocator, *, scores: bool) -> Prefill:
    """The refills of a group of requests, in passes of at most `prefill_tokens` tokens.

    group   requests that have just got their slots and pages from this allocator
    scores  prompts are scored
    """
    batch = allocator.batch
    refills = tuple(
        Refill(
            slot=state.slot, request=state.request, tokens=tuple(state.tokens), pages=state.pages.columns(),
            num_cached=state.num_shared_pages * batch.page_size, constraint=allocator.constraint(state),
        )
        for state in group
    )  # fmt: skip
    again = int(scores)  # also the last shared token: its hidden state scores the next token
    spans = [
        (refill.slot, max(0, refill.num_cached - again), state.num_tokens) for refill, state in zip(refills, group, strict=True)
    ]
    passes = tuple(tuple(segments) for segments in chunks(spans, batch.prefill_tokens))
    if scores:
        passes = reread(passes, {refill.slot: refill.num_cached for refill in refills})
    mode = SamplingMode.union([state.mode for state in group])
    return Prefill(
        refills=refills,
        passes=passes,
        mode=mode,
        uploads=allocator.automata_to_upload(),
    )
