"""EAGLE-3 as a chain: a small head that reads the target's hidden states drafts K tokens, one after another.

    position p of a row  e = embed(token[p+1]),  h = fc(aux_hidden_states[p])     RoPE position p: only tokens are shifted by one
    layer 0              x = attention(cat(norm(e), norm(h))),  residual = h;  then as any decoder layer
    draft 1              argmax lm_head(norm(residual)) at the row's last verified position
    draft k+1            the same at the next position, with e = embed(draft k) and h = the residual that drafted it

K/V that drafting writes comes from the head's own states. The next catch-up overwrites it with K/V from the target's.
Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840). What a round saves: dead positions
(https://github.com/lightseekorg/tokenspeed/pull/217), uniform slots and persistent buffers
(https://github.com/lightseekorg/tokenspeed/pull/142), argmax in place of softmax and top-k
(https://github.com/sgl-project/sglang/pull/26235).
Legend: R rows, T flat positions, K draft_len, H hidden, W = len(aux_layer_ids) * target hidden.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.cache.layer_state import RowTensor
from batchspec.cache.pages import KVCache
from batchspec.draft.bound_head import DraftWeights, HeadShape, Place
from batchspec.draft.coupled import Draws, first_draws, later_draws
from batchspec.draft.reader import HeadReader, Reading, zeros_on
from batchspec.kernels.drafting.gather_last_accepted import gather_last_accepted
from batchspec.kernels.drafting.prepare_chain_draft_inputs import prepare_chain_draft_inputs
from batchspec.model.target import Target


class ChainDrafter(HeadReader):
    """Keeps for each slot the first draft token of the next round, the hidden state that drafted it, and how sure it is of it.

    Nothing is read back to the host and no shape depends on data: a round with it can be captured in a CUDA graph. `propose`
    and `catch_up` change the entries of the first R slots.
    """

    name = "eagle3"

    def __init__(
        self, head: DraftWeights, target: Target, draft_len: int, *, slots: int, uniform_slots: bool = True,
        **reading: Unpack[Reading],
    ) -> None:
        """uniform_slots=False: each draft step computes its own slot mapping, by the ragged path (ablation)."""
        super().__init__(head, target, draft_len, **reading)
        device, steps = target.device, max(0, draft_len - 1)
        self._uniform = uniform_slots
        zeros = partial(zeros_on, device)
        self._cu_seqlens_q = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._kv_len = zeros(slots)
        self._live_positions, self._live_slots = (zeros(slots, dtype=torch.int64) for _ in range(2))
        self._positions, self._slots = (zeros(steps * slots, dtype=torch.int64) for _ in range(2))

    @staticmethod
    def row_tensors(spec: HeadShape, dtype: torch.dtype) -> tuple[RowTensor, ...]:
        return RowTensor((), torch.int32), RowTensor((spec.hidden_size,), dtype), RowTensor((), torch.int32)

    @torch.inference_mode()
    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        assert aux_hidden_states is not None
        line, place, last = slot_ids.index_select(0, batch.row_ids), batch.cu_seqlens_q[1:] - 1, self._last
        if self._prune:
            pages = self._pages(cache, last)
            features = self.head.features(aux_hidden_states)
            normed, residual, at = self._read(batch, rows.tokens, line, features, cache, last)
            self.head.keep(last, normed, at, pages)
            # Only the last position of each row goes on, as in a draft step. Its K/V is written a second time.
            ends = self._one_query_each(batch, batch.positions.index_select(0, place), batch.kv_len)
            at = Place(self._rope(batch.rope_at(place)), batch.slot_mapping.index_select(0, place))
            hidden, plan = residual.index_select(0, place), self._plans(ends, cache, [last])[self._windows[last]]
            normed = self.head.layer(last, normed.index_select(0, place), hidden, at, pages, plan)
        else:
            normed, hidden = self._read_whole(batch, rows.tokens, line, aux_hidden_states, cache, place)
        first = cache.draft_rows[0].new_empty(normed.shape[0], *cache.draft_rows[0].shape[1:])
        sure = torch.zeros_like(batch.kv_len)
        self._prepare_next(normed, first, sure, first_draws(self.mode, rows, slot_ids.int(), rows.num_tokens[slot_ids]))
        cache.enter(slot_ids, batch.kv_len, (first, normed if self._spec.feed_normed else hidden, sure))

    @torch.inference_mode()
    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        assert aux_hidden_states is not None
        num_rows, last = accepted_len.shape[0], self._last
        first, hidden, sure = (x[:num_rows] for x in cache.draft_rows)
        if prepare_next and not self._prune:
            place = (batch.cu_seqlens_q[:-1] + accepted_len).clamp_(max=batch.token_ids.shape[0] - 1)
            normed, residual = self._read_whole(batch, rows.tokens, batch.row_ids, aux_hidden_states, cache, place)
            hidden.copy_(normed if self._spec.feed_normed else residual)
            self._prepare_next(normed, first, sure, self._draws_at_end(rows))
            return
        features = self.head.features(aux_hidden_states)
        normed, residual, at = self._read(batch, rows.tokens, batch.row_ids, features, cache, last)
        if prepare_next:
            q = self.head.queries(last, normed, at, self._pages(cache, last))
            self._finish_accepted(batch, q, residual, accepted_len, rows, cache, first, hidden, sure)
        else:
            self.head.keep(last, normed, at, self._pages(cache, last))

    def _prepare_next(self, normed: Tensor, out: Tensor, out_sure: Tensor, draws: Draws | None) -> None:
        """Prepare the next round's first draft from the head's output [R, H] at each row's last accepted position."""
        self.head.output.choose(normed, out, draws, None if self.confidence is None else out_sure)

    def _draws_at_end(self, rows: DeviceBatch) -> Draws | None:
        """The noise and rules for the token after each row's last one."""
        return first_draws(self.mode, rows, self._cu_seqlens_q[: rows.live.shape[0]], rows.num_tokens)

    def _read_whole(
        self, batch: FlatBatch, tokens: Tensor, line: Tensor, aux_hidden_states: Tensor, cache: KVCache, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run all T positions through the whole head; returns its output and residual stream at flat positions `place`."""
        features = self.head.features(aux_hidden_states)
        normed, residual, _ = self._read(batch, tokens, line, features, cache, self._last + 1)
        return normed.index_select(0, place), residual.index_select(0, place)

    def _finish_accepted(
        self, batch: FlatBatch, q: Tensor, residual: Tensor, accepted_len: Tensor, rows: DeviceBatch, cache: KVCache,
        out_first: Tensor, out_hidden: Tensor, out_sure: Tensor,
    ) -> None:
        """Compute the rest of the last layer, from its queries on, only at each row's last accepted position."""
        num_rows, feeds_normed = accepted_len.shape[0], self._spec.feed_normed
        live_q = q.new_empty(num_rows, *q.shape[1:])
        stream = torch.empty_like(out_hidden) if feeds_normed else out_hidden
        positions, kv_len, slots = (x[:num_rows] for x in (self._live_positions, self._kv_len, self._live_slots))
        gather_last_accepted(
            q.flatten(1), residual, batch.cu_seqlens_q, accepted_len, batch.positions, rows.num_tokens, rows.live,
            out_q=live_q.view(num_rows, -1), out_residual=stream, out_positions=positions, out_kv_len=kv_len,
            slot_mapping=batch.slot_mapping, out_slots=slots,
        )
        ends = self._one_query_each(batch, positions, kv_len)
        plan = self._plans(ends, cache, [self._last])[self._windows[self._last]]
        attend = self.head.mixer.attend(self._pages(cache, self._last), plan)
        normed = self.head.finish(self._last, live_q, stream, attend, slots, out=out_hidden if feeds_normed else None)
        self._prepare_next(normed, out_first, out_sure, self._draws_at_end(rows))

    def _one_query_each(self, batch: FlatBatch, positions: Tensor, kv_len: Tensor) -> FlatBatch:
        """The same rows with one query each, for attention."""
        num_rows = positions.shape[0]
        return replace(
            batch,
            token_ids=self._cu_seqlens_q[:num_rows],  # attention only needs their number
            row_ids=self._cu_seqlens_q[:num_rows],
            positions=positions,
            cu_seqlens_q=self._cu_seqlens_q[: num_rows + 1],
            kv_len=kv_len,
            max_q=1,
            host=None,
        )

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> Tensor | None:
        chain = self._uniform_chain if self._uniform else self._general_chain
        chain(rows, draft_ids, draft_len, cache)
        return None

    def _uniform_chain(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        """Draft by steps that share one slot mapping and one attention plan; each reads tokens where the last one wrote them."""
        num_rows, width = draft_ids.shape
        by_step = (width - 1, num_rows)
        positions, slots = (x[: (width - 1) * num_rows].view(by_step) for x in (self._positions, self._slots))
        first, hidden, sure = (x[:num_rows] for x in cache.draft_rows)
        kv_len = self._kv_len[:num_rows]
        if self.confidence is not None:
            self.confidence[:num_rows, 0] = sure
        prepare_chain_draft_inputs(
            first, rows.num_tokens, rows.live, cache.draft_table(rows), page_size=cache.page_size,
            max_tokens=rows.tokens.shape[1], out_ids=draft_ids, out_draft_len=draft_len, out_positions=positions,
            out_slot_mapping=slots, out_kv_len=kv_len,
        )
        if width == 1:
            return
        steps = list(zip(positions.unbind(), slots.unbind(), strict=True))
        longest = self._step(rows, cache, *steps[0], self._cu_seqlens_q[: num_rows + 1], kv_len)
        plans = self._plans(longest, cache, range(self._last + 1))
        for k, step in enumerate(steps):
            hidden = self._draft(rows, draft_ids, k, hidden, *step, plans, cache)

    def _general_chain(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        """The same for any number of positions a row: each step computes lengths, prefix sums and a plan of its own."""
        num_rows, width = draft_ids.shape
        torch.mul(rows.live, width, out=draft_len)
        draft_ids[:, 0], hidden, sure = (x[:num_rows] for x in cache.draft_rows)
        if self.confidence is not None:
            self.confidence[:num_rows, 0] = sure
        for k in range(width - 1):
            batch = self._general_step(rows, k, cache)
            plans = self._plans(batch, cache, range(self._last + 1))
            hidden = self._draft(rows, draft_ids, k, hidden, batch.positions, batch.slot_mapping, plans, cache)

    def _draft(
        self, rows: DeviceBatch, draft_ids: Tensor, k: int, hidden: Tensor, positions: Tensor, slots: Tensor,
        plans: dict[int | None, Any], cache: KVCache,
    ) -> Tensor:
        """Draft one more token: column k + 1 of draft_ids, given those up to k; returns the hidden state that drafted it."""
        normed, residual = self.head.enter(draft_ids[:, k], hidden)
        row_ids = self._cu_seqlens_q[: positions.shape[0]]
        at = Place(self._rope(rows.rope_positions(positions, row_ids)), slots)
        for i, window in enumerate(self._windows):
            normed = self.head.layer(i, normed, residual, at, self._pages(cache, i), plans[window], positions)
        # A position's input is the token after it; its output drafts the token after that.
        draws = later_draws(self.mode, rows, row_ids, positions, ahead=2, drafts=draft_ids)
        sure = None if self.confidence is None else self.confidence[: len(draft_ids), k + 1]
        self.head.output.choose(normed, draft_ids[:, k + 1], draws, sure)
        return normed if self._spec.feed_normed else residual

    def _general_step(self, rows: DeviceBatch, k: int, cache: KVCache) -> FlatBatch:
        page_table, page_size = cache.draft_table(rows), cache.page_size
        q_len = torch.full_like(rows.live, 1)
        cu_seqlens_q = torch.cat((torch.zeros_like(q_len[:1]), torch.cumsum(q_len, 0, dtype=torch.int32)))
        alive = rows.live != 0
        positions = torch.where(alive, rows.num_tokens.long() - 1 + k, 0)
        page = positions // page_size
        known = alive & (page < page_table.shape[1])
        pages = page_table.gather(1, page.clamp(max=page_table.shape[1] - 1).unsqueeze(1)).squeeze(1)
        slots = torch.where(known, pages.long() * page_size + positions % page_size, 0)
        kv_len = (rows.num_tokens + k).clamp(max=rows.tokens.shape[1]) * rows.live
        return self._step(rows, cache, positions, slots, cu_seqlens_q, kv_len.int())

    def _step(
        self, rows: DeviceBatch, cache: KVCache, positions: Tensor, slots: Tensor, cu_seqlens_q: Tensor, kv_len: Tensor
    ) -> FlatBatch:
        row_ids = self._cu_seqlens_q[: positions.shape[0]]
        return FlatBatch(
            token_ids=row_ids,  # attention only needs their number
            row_ids=row_ids,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=cu_seqlens_q,
            kv_len=kv_len,
            page_table=cache.draft_table(rows),
            max_q=1,
            max_kv=rows.max_kv,
        )
