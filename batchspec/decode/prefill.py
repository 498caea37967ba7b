"""Prefill: the known tokens of newly placed rows through the target in chunks, many rows at once, one token emitted each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.cache.attention import FlatBatch, HostLayout
from batchspec.decode.round import Drafts, Round, RoundResult
from batchspec.decode.rows import Rows, upload
from batchspec.decode.sampling import Places, SamplingMode
from batchspec.kernels.slots import ragged_slots


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens begin .. end-1 of the row in `slot`; `last` when the row's known tokens end there."""

    slot: int
    begin: int
    end: int
    last: bool


def chunks(spans: Sequence[tuple[int, int, int]], max_tokens: int) -> Iterator[list[Segment]]:
    """Cut (slot, begin, end) spans into passes of at most `max_tokens` tokens, in order.

    In order matters: a row that shares pages with one before it finds their K/V written in an earlier pass or in the same
    one, where every layer writes all K/V before it reads any.
    """
    chunk: list[Segment] = []
    room = max_tokens
    for slot, begin, end in spans:
        while begin < end:
            stop = min(end, begin + room)
            chunk.append(Segment(slot, begin, stop, stop == end))
            room -= stop - begin
            begin = stop
            if room == 0:
                yield chunk
                chunk, room = [], max_tokens
    if chunk:
        yield chunk


def prefill_chunk(round_: Round, rows: Rows, segments: Sequence[Segment], mode: SamplingMode) -> RoundResult | None:
    """One pass over `segments`; rows whose tokens end in it emit their next token and go live. None if there is none.

    The result's log is that of a round that drafted nothing. Does not synchronise.
    """
    device = rows.tokens.device
    batch, slot_ids = flat_batch(rows, segments, round_.cache.page_size)
    hidden, taps = round_.target.forward(batch, round_.cache, round_.drafter.tap_layers, ends_only=True)
    # The rows that end here, in slot order: `accept` finds the choice of slot r at the r-th place of a prefix sum.
    ending = sorted((s.slot, i) for i, s in enumerate(segments) if s.last)
    result = None
    if ending:
        slots = upload([slot for slot, _ in ending], torch.int64, device)
        segment = upload([i for _, i in ending], torch.int64, device)
        mask = torch.zeros_like(rows.live)
        mask[slots] = 1
        q_start = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=device)
        torch.cumsum(mask, 0, dtype=torch.int32, out=q_start[1:])
        places = Places(slots.int(), batch.kv_len[segment].long())
        drafts = Drafts(rows.tokens[:, :0], torch.zeros_like(rows.live))
        result = round_.commit(hidden[segment], places, q_start, drafts, rows, mask, mode)
        rows.live.bitwise_or_(mask)
    round_.drafter.prefill(batch, slot_ids, taps, rows, round_.cache)
    return result


def flat_batch(rows: Rows, segments: Sequence[Segment], page_size: int) -> tuple[FlatBatch, Tensor]:
    """The segments end to end, and the slot of each, int64 [segments]."""
    device = rows.tokens.device
    lengths = [s.end - s.begin for s in segments]
    count, num_tokens = len(segments), sum(lengths)
    slot_ids, begins, ends, q_len = upload(
        [[s.slot for s in segments], [s.begin for s in segments], [s.end for s in segments], lengths], torch.int64, device
    )
    page_table = rows.page_table[slot_ids]
    q_start, row_ids = (torch.empty(size, dtype=torch.int32, device=device) for size in (count + 1, num_tokens))
    positions, slots = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    ragged_slots(
        begins.int(), q_len.int(), page_table, page_size=page_size,
        out_q_start=q_start, out_row_ids=row_ids, out_positions=positions, out_slots=slots,
    )  # fmt: skip
    batch = FlatBatch(
        token_ids=rows.tokens[slot_ids[row_ids], positions],
        row_ids=row_ids,
        positions=positions,
        slots=slots,
        q_start=q_start,
        kv_len=ends.int(),
        page_table=page_table,
        max_q=max(lengths),
        max_kv=max(s.end for s in segments),
        host=HostLayout(lengths, [s.end for s in segments]),
    )
    return batch, slot_ids
