"""Chunked prefill: the known tokens of refilled slots go through the target, many rows a pass, and each row emits one token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch, HostLayout
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import hold_undecided
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.upload import upload
from batchspec.engine.rounds.records import Drafts, RoundResult
from batchspec.engine.rounds.round import Round
from batchspec.engine.step import Segment
from batchspec.kernels.kv_cache.slot_mapping import compute_slot_mapping

FEW = 17
"""Number of tokens of a pass whose time is nearly all launches."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A pass that was launched. Its rows stay inactive until `activate`."""

    result: RoundResult | None
    """None if no row's tokens ended in the pass; otherwise its log is that of a round without drafts."""
    mask: Tensor | None
    """int32 [slots] 1 for the rows that decode on after their first token."""

    def of_first(self, count: int) -> Prefilled:
        """The same without the padding, of a pass that emits no token: what was read of its first `count` rows."""
        assert self.result is not None
        return Prefilled(RoundResult(self.result.log, tuple(values[:count] for values in self.result.read)), self.mask)

    def activate(self, rows: DeviceBatch) -> None:
        """Rows whose tokens ended in this pass decode from the next round on."""
        if self.mask is not None:
            rows.live.bitwise_or_(self.mask)


def prefill_chunk(round_: Round, rows: DeviceBatch, segments: Sequence[Segment], mode: SamplingMode) -> Prefilled:
    """One pass over `segments`; rows whose tokens end in it emit their next token. Does not synchronise."""
    device = rows.tokens.device
    batch, slot_ids = flat_batch(rows, segments, round_.cache.page_size, shifted=bool(round_.drafter.aux_layer_ids))
    with prefilling(round_):
        hidden, aux_hidden_states = round_.target.forward(batch, round_.cache, round_.drafter.aux_layer_ids, ends_only=True)
        # The rows that end here, in slot order: the choice of slot r is at index cu_seqlens_q[r].
        ending = sorted((s.slot, i) for i, s in enumerate(segments) if s.last)
        result, mask = None, None
        if ending:
            slots = upload([slot for slot, _ in ending], torch.int64, device)
            segment = upload([i for _, i in ending], torch.int64, device)
            mask = torch.zeros_like(rows.live)
            mask[slots] = 1
            cu_seqlens_q = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=device)
            torch.cumsum(mask, 0, dtype=torch.int32, out=cu_seqlens_q[1:])
            logit_rows = LogitRows(slots.int(), batch.kv_len[segment].long())
            result = emit(round_, rows, hidden[segment], logit_rows, cu_seqlens_q, mask, mode)
            hold_undecided(rows, mask, result.log, mode)
        prefill_drafter(round_, rows, batch, slot_ids, aux_hidden_states, mode)
        return Prefilled(result, mask)


PrefillPass = Callable[[Round, DeviceBatch, Sequence[Segment], SamplingMode], Prefilled]
"""As `prefill_chunk`."""


def prefilling(round_: Round) -> AbstractContextManager[object]:
    """Within this block, exchanges between ranks use the buffers of prefill passes."""
    ranks = round_.target.ranks
    return nullcontext() if ranks is None else ranks.prefilling()


def emit(
    round_: Round, rows: DeviceBatch, hidden: Tensor, logit_rows: LogitRows, cu_seqlens_q: Tensor, mask: Tensor,
    mode: SamplingMode,
) -> RoundResult:
    """Choose and commit the token after each of the hidden states `hidden` [N, H]; `logit_rows` has their rows and positions.

    cu_seqlens_q  int32 [slots + 1]: for a slot r that emits, its state is hidden[cu_seqlens_q[r]]
    mask          int32 [slots] in: 1 for the slots that emit; out: 0 for those that end with this token
    """
    drafts = Drafts(rows.tokens[:, :0], torch.zeros_like(rows.live))
    target_ids, raw = round_.choose(hidden, logit_rows, rows, mode)
    return round_.commit(target_ids, raw, logit_rows, cu_seqlens_q, drafts, rows, mask, mode, torch.empty_like(mask))


def prefill_drafter(
    round_: Round, rows: DeviceBatch, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, mode: SamplingMode
) -> None:
    """Let the drafter read the batch, after its tokens were committed.

    slot_ids int64 [R], aux_hidden_states [T, number of layers * H] or None
    """
    round_.set_draft_mode(mode)
    own_batch = batch.of_group(round_.cache.groups.draft_group)
    round_.drafter.prefill(own_batch, slot_ids, aux_hidden_states, rows, round_.cache)


def seconds_of(launch: Callable[[], object]) -> float:
    """Seconds until the device is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    launch()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def flat_batch(
    rows: DeviceBatch, segments: Sequence[Segment], page_size: int, *, shifted: bool = False
) -> tuple[FlatBatch, Tensor]:
    """The segments concatenated, and the slot of each, int64 [segments]. shifted: with `FlatBatch.next_images`."""
    device = rows.tokens.device
    lengths = [s.end - s.begin for s in segments]
    slot_ids, begins, ends, q_len = upload(
        [[s.slot for s in segments], [s.begin for s in segments], [s.end for s in segments], lengths], torch.int64, device
    )
    batch = lay_out(
        rows, slot_ids, [table[slot_ids] for table in rows.page_tables], begins.int(), q_len.int(), ends.int(),
        num_tokens=sum(lengths), max_q=max(lengths), max_kv=max(s.end for s in segments), page_size=page_size,
    )
    batch.host = HostLayout(lengths, [s.end for s in segments])
    batch.tokens = "outputs" if segments[0].generated else "prompt"
    if rows.images is not None:
        spans = [(s.slot, s.begin, s.end) for s in segments]
        batch.rope, batch.images, batch.next_images = rows.images.inputs(spans, shifted=shifted)
        batch.last_keys = rows.images.last_keys(spans)
    return batch, slot_ids


def lay_out(
    rows: DeviceBatch, slot_ids: Tensor, page_tables: Sequence[Tensor], begins: Tensor, q_len: Tensor, kv_len: Tensor, *,
    num_tokens: int, max_q: int, max_kv: int, page_size: int,
) -> FlatBatch:
    """Concatenate the tokens of rows, which are on the device already, and pad them to `num_tokens`.

    slot_ids       int64 [R] the slot of each row
    page_tables    of each K/V group, int32 [R, max pages a row]
    begins, q_len, kv_len  int32 [R] position of the row's first token, number of its tokens, keys that the last one sees
    max_q, max_kv  bounds of q_len and kv_len
    """
    page_table, *more_tables = page_tables
    device = slot_ids.device
    cu_seqlens_q, row_ids = (torch.empty(size, dtype=torch.int32, device=device) for size in (slot_ids.shape[0] + 1, num_tokens))
    positions, slots = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(2))
    compute_slot_mapping(
        begins, q_len, page_table, page_size=page_size,
        out_cu_seqlens_q=cu_seqlens_q, out_row_ids=row_ids, out_positions=positions, out_slot_mapping=slots,
    )
    batch = FlatBatch(
        token_ids=rows.tokens[slot_ids[row_ids], positions],
        row_ids=row_ids,
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens_q,
        kv_len=kv_len,
        page_table=page_table,
        max_q=max_q,
        max_kv=max_kv,
    )
    return batch.read_rows(rows, slot_ids).add_groups(more_tables, page_size)
