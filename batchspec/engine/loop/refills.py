"""What the requests that enter slots bring to a step: their tokens and pages, and the passes that prefill them.

A pass takes many rows. A prompt that is longer than a pass is cut into chunks (chunked prefill)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from batchspec.batch.sampling_mode import SamplingMode
from batchspec.engine.slots.prefix_plan import PrefixPlan
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
    multiple  prompts are cut at positions that are multiples of it, and tokens that the rows had generated before they were
              preempted go in passes of their own (`ModelSpec.prefill_multiple`). None: passes may be cut anywhere
    """
    spans = [(refill.slot, refill.num_cached, state.num_tokens) for state, refill in zip(group, refills, strict=True)]
    if multiple is None:
        whole = {state.slot: _whole(state) for state in group if state.request.images}
        passes = tuple(tuple(segments) for segments in chunks(spans, batch.prefill_tokens, whole=whole))
    else:
        passes = _with_states(group, spans, batch, multiple)
    return Prefill(passes=passes, mode=SamplingMode.union([state.mode for state in group]))


def _whole(state: RequestState) -> list[range]:
    """The images of a row that no pass may cut."""
    return [range(piece.begin, piece.begin + piece.length) for piece in state.request.images if piece.whole]


def _with_states(
    group: Sequence[RequestState], spans: Sequence[tuple[int, int, int]], batch: PackedBatch, multiple: int
) -> tuple[tuple[Segment, ...], ...]:
    """Prompts before outputs: the state of a row has one history, that of a row which was never preempted. A prompt ends a pass
    where its state is kept; rows that take it over begin in a later one."""
    levels: defaultdict[int, list[_Piece]] = defaultdict(list)
    outputs = []
    for state, (slot, begin, end) in zip(group, spans, strict=True):
        plan, prompt = state.prefix_plan or PrefixPlan(), min(end, len(state.request.prompt_ids))
        saves = {count * batch.page_size: entry for count, entry in plan.saves.items()}
        ends, restores = sorted({*saves, prompt}), plan.restores
        for level, stop in enumerate(ends, plan.level):
            levels[level].append(_Piece(slot, begin, stop, restores, saves.get(stop), is_last=stop == end))
            begin, restores = stop, None
        if end > prompt:
            outputs.append((slot, prompt, end))
    passes = [_of_pieces(levels[level], batch.prefill_tokens, multiple) for level in sorted(levels)]
    passes.append([tuple(segments) for segments in chunks(outputs, batch.prefill_tokens, generated=True)])
    return tuple(segments for found in passes for segments in found)


class _Piece(NamedTuple):
    """Tokens begin .. end-1 of a row's prompt; `Segment` says what the others mean."""

    slot: int
    begin: int
    end: int
    restores: int | None
    saves: int | None
    is_last: bool


def _of_pieces(pieces: Sequence[_Piece], max_tokens: int, multiple: int) -> list[tuple[Segment, ...]]:
    by_slot = {piece.slot: piece for piece in pieces}

    def completed(segment: Segment) -> Segment:
        piece = by_slot[segment.slot]
        is_end = segment.end == piece.end
        return replace(
            segment, last=is_end and piece.is_last, restores=piece.restores if segment.begin == piece.begin else None,
            saves=piece.saves if is_end else None,
        )

    found = chunks([piece[:3] for piece in pieces], max_tokens, multiple=multiple)
    return [tuple(completed(segment) for segment in segments) for segments in found]


def chunks(
    spans: Iterable[tuple[int, int, int]], max_tokens: int, *, multiple: int = 1, generated: bool = False,
    whole: Mapping[int, Sequence[range]] = MappingProxyType({}),
) -> Iterator[list[Segment]]:
    """Cut (slot, begin, end) spans into passes of at most `max_tokens` tokens, in order.

    multiple   a row is cut at positions that are multiples of it; not more than max_tokens
    generated  what the segments say
    whole      slot -> positions between which its row is not cut, each range not longer than max_tokens; with a multiple of 1

    The order matters: a row may share pages that an earlier row writes, in an earlier pass or in the same one, where every layer
    writes all K/V before it reads any.
    """
    chunk: list[Segment] = []
    left = max_tokens
    for slot, begin, end in spans:
        while begin < end:
            stop = min(end, begin + left)
            stop = stop if stop == end else max(begin, stop - stop % multiple)
            stop = next((max(begin, own.start) for own in whole.get(slot, ()) if own.start < stop < own.stop), stop)
            assert stop > begin or chunk, "a pass of max_tokens is too short for an image"
            if stop > begin:
                chunk.append(Segment(slot, begin, stop, stop == end, generated=generated))
            left -= stop - begin
            if left == 0 or stop < end:
                yield chunk
                chunk, left = [], max_tokens
            begin = stop
    if chunk:
        yield chunk
