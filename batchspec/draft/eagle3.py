"""EAGLE-3 as a chain: a small head that reads the target's features drafts K tokens, one after another.

    place p of a row:  e = embed(token[p+1]),  h = fc(taps[p])       RoPE position p: tokens move left by one, positions do not
    layer 0:           x = attention(cat(norm(e), norm(h))),  residual = h;  then as any decoder layer
    draft 1            argmax lm_head(norm(residual)) at the row's last verified place
    draft k+1          the same one place further, with e = embed(draft k) and h = the residual that drafted it

The head's K/V is always made of true features in the end: what drafting writes, the next catch-up writes over.
Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840). What a round saves: dead positions
(https://github.com/lightseekorg/tokenspeed/pull/217), uniform slots and persistent buffers
(https://github.com/lightseekorg/tokenspeed/pull/142), argmax in place of softmax and top-k
(https://github.com/sgl-project/sglang/pull/26235).
Legend: R rows, T flat places, K draft_len, H hidden, W taps * target hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchspec.cache.attention import AttentionPlan, FlatBatch, plan_attention
from batchspec.draft.head import EagleHead, Place
from batchspec.draft.weights import Head
from batchspec.kernels.slots import uniform_slots
from batchspec.model.rope import Rope, rope_frequencies, rope_of
from batchspec.model.target import Target

if TYPE_CHECKING:
    from batchspec.cache.pages import KVCache
    from batchspec.decode.rows import Rows


class Eagle3Drafter:
    """Carries of each slot the first draft token of the next round and the hidden state that drafted it.

    Nothing is read back to the host and no shape depends on data: a round with it can be captured in a CUDA graph. `propose`
    and `catch_up` work on the state of the first R slots and leave it fit for the rows that live: whoever prefills other slots
    between the two must do so behind `catch_up`.
    """

    name = "eagle3"
    fixed_len = True

    def __init__(
        self,
        head: Head,
        target: Target,
        max_len: int,
        *,
        slots: int,
        window: int | None = None,
        sink: int = 0,
        dead_positions: bool = True,
        uniform_slots: bool = True,
        argmax: bool = True,
    ) -> None:
        """
        window          newest keys that the head reads at most, beside the first `sink` ones; its own windows count too
        dead_positions  False: every place of a catch-up runs to the end of the head and the live ones are picked then
        uniform_slots   False: cache locations of each draft step anew, by the general path
        argmax          False: drafts by softmax and top-k
        """
        spec, device, steps = head.spec, target.device, max(0, max_len - 1)
        self.max_len = max_len
        self.tap_layers = spec.tap_layers
        self.num_kv_layers = spec.num_layers
        self.kv_shape: tuple[int, int] | None = (spec.num_kv_heads, spec.head_dim)
        self.head = EagleHead(head, target, argmax=argmax)
        self._spec, self._first_layer, self._dtype = spec, target.spec.num_layers, target.dtype
        self._windows = [own if window is None else min(window, own or window) for own in spec.windows]
        self._sink = sink if window is not None else 0
        self._prune, self._uniform = dead_positions, uniform_slots
        self._freqs = rope_frequencies(spec.rope, spec.head_dim).to(device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._first, self._hidden = zeros(slots), zeros(slots, spec.hidden_size, dtype=target.dtype)
        self.state: tuple[Tensor, ...] = (self._first, self._hidden)
        self._ids = zeros(steps, slots)
        self._start, self._kv_len = zeros(slots), zeros(steps * slots)
        self._positions, self._slots = (zeros(steps * slots, dtype=torch.int64) for _ in range(2))
        self._step_positions, self._step_slots = (zeros(steps * slots, dtype=torch.int64) for _ in range(2))
        self._q_start = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._steps = torch.arange(steps, dtype=torch.int32, device=device).unsqueeze(1)

    @torch.inference_mode()
    def prefill(self, batch: FlatBatch, slot_ids: Tensor, taps: Tensor | None, rows: Rows, cache: KVCache) -> None:
        assert taps is not None
        line = slot_ids.index_select(0, batch.row_ids)
        place = batch.q_start[1:] - 1
        first, hidden = torch.empty_like(batch.kv_len), self._hidden.new_empty(len(slot_ids), self._hidden.shape[1])
        self._read(batch, rows.tokens, line, taps, place, batch.kv_len, cache, first, hidden)
        self._first.index_copy_(0, slot_ids, first)
        self._hidden.index_copy_(0, slot_ids, hidden)

    @torch.inference_mode()
    def catch_up(self, batch: FlatBatch, taps: Tensor | None, accepted_len: Tensor, rows: Rows, cache: KVCache) -> None:
        assert taps is not None
        num_rows, num_places = accepted_len.shape[0], batch.token_ids.shape[0]
        place = batch.q_start[:-1] + accepted_len
        if num_places < num_rows * batch.max_q:  # packed: dead rows at the end may begin behind the last place
            place.clamp_(max=num_places - 1)
        kv_len = (rows.num_tokens - 1).mul_(rows.live)
        first, hidden = self._first[:num_rows], self._hidden[:num_rows]
        self._read(batch, rows.tokens, batch.row_ids, taps, place, kv_len, cache, first, hidden)

    def _read(
        self, batch: FlatBatch, tokens: Tensor, line: Tensor, taps: Tensor, place: Tensor, kv_len: Tensor, cache: KVCache,
        out_first: Tensor, out_hidden: Tensor,
    ) -> None:  # fmt: skip
        """Run all T places as far as their K/V needs, and row r's place[r] to its first draft token and hidden state.

        tokens int32 [lines, M] with line [T] of each place; taps [T, W]; place [R]; kv_len int32 [R] keys that place[r] sees, 0
        for dead rows. A rejected place may read any token.
        """
        everywhere = Place(self._rope(batch.positions), batch.slots)
        normed, residual = self.head.enter(tokens, self.head.features(taps), row_ids=line, positions=batch.positions)
        last = self._spec.num_layers - 1
        plans = self._plans(batch, cache, slice(0, last) if self._prune else slice(0, last + 1))
        for i in range(last + (not self._prune)):
            kv = cache.layer(self._first_layer + i)
            normed = self.head.layer(i, normed, residual, everywhere, kv, plans[self._windows[i]])
        if not self._prune:
            torch.index_select(residual, 0, place, out=out_hidden)
            self.head.choose(normed.index_select(0, place), out_first)
        else:
            live = self._live(batch, place, kv_len)
            plan = self._plans(live, cache, slice(last, last + 1))[self._windows[last]]
            torch.index_select(residual, 0, place, out=out_hidden)
            kv = cache.layer(self._first_layer + last)
            normed = self.head.layer(last, normed, out_hidden, everywhere, kv, plan, live=place)
            self.head.choose(normed, out_first)
        if self._spec.feed_normed:
            out_hidden.copy_(normed if self._prune else normed.index_select(0, place))

    def _rope(self, positions: Tensor) -> Rope:
        return rope_of(positions, self._freqs, self._spec.rope.attention_factor, self._dtype)

    def _live(self, batch: FlatBatch, place: Tensor, kv_len: Tensor) -> FlatBatch:
        """The one place of each row that goes on: attention with one query a row."""
        num_rows = place.shape[0]
        return replace(
            batch,
            token_ids=self._q_start[:num_rows],  # attention asks for their number only
            row_ids=self._q_start[:num_rows],
            positions=batch.positions.index_select(0, place),
            q_start=self._q_start[: num_rows + 1],
            kv_len=kv_len,
            max_q=1,
            host=None,
        )

    def _plans(self, batch: FlatBatch, cache: KVCache, layers: slice) -> dict[int | None, AttentionPlan]:
        kv, heads = cache.layer(self._first_layer), self._spec.num_heads
        windows = set(self._windows[layers])
        return {w: plan_attention(batch, kv, num_heads=heads, window=w, sink=self._sink) for w in windows}

    @torch.inference_mode()
    def propose(self, rows: Rows, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        num_rows, width = draft_ids.shape
        torch.mul(rows.live, width, out=draft_len)
        draft_ids[:, 0].copy_(self._first[:num_rows])
        if width == 1:
            return
        tokens, hidden = self._first[:num_rows], self._hidden[:num_rows]
        steps = self._uniform_steps(rows, width - 1, cache.page_size) if self._uniform else None
        drafted: list[Tensor] = []
        for k in range(width - 1):
            batch = self._general_step(rows, k, tokens, cache.page_size) if steps is None else steps[k]
            normed, residual = self.head.enter(tokens, hidden)
            plans = self._plans(batch, cache, slice(None))
            place = Place(self._rope(batch.positions), batch.slots)
            for i, window in enumerate(self._windows):
                normed = self.head.layer(i, normed, residual, place, cache.layer(self._first_layer + i), plans[window])
            hidden = normed if self._spec.feed_normed else residual
            tokens = self._ids[k, :num_rows] if self._uniform else torch.empty_like(tokens)
            self.head.choose(normed, tokens)
            drafted.append(tokens)
        if self._uniform:
            draft_ids[:, 1:].copy_(self._ids[: width - 1, :num_rows].t())
        else:
            draft_ids[:, 1:] = torch.cat([ids.unsqueeze(1) for ids in drafted], 1)

    def _uniform_steps(self, rows: Rows, num_steps: int, page_size: int) -> list[FlatBatch]:
        """The batch of every draft step: all cache locations by one launch, nothing in the loop."""
        num_rows = rows.live.shape[0]
        count = num_steps * num_rows
        by_row, by_step = (num_rows, num_steps), (num_steps, num_rows)
        max_len = rows.tokens.shape[1]
        start = torch.sub(rows.num_tokens, 1, out=self._start[:num_rows])
        uniform_slots(
            start, rows.live, rows.page_table, tokens_per_row=num_steps, page_size=page_size,
            out_positions=self._positions[:count], out_slots=self._slots[:count],
        )  # fmt: skip
        positions = self._step_positions[:count].view(by_step).copy_(self._positions[:count].view(by_row).t())
        slots = self._step_slots[:count].view(by_step).copy_(self._slots[:count].view(by_row).t())
        kv_len = torch.add(rows.num_tokens, self._steps[:num_steps], out=self._kv_len[:count].view(by_step))
        kv_len.clamp_(max=max_len).mul_(rows.live)
        q_start = self._q_start[: num_rows + 1]
        return [self._step(rows, start, positions[k], slots[k], q_start, kv_len[k]) for k in range(num_steps)]

    def _general_step(self, rows: Rows, k: int, tokens: Tensor, page_size: int) -> FlatBatch:
        """The same of one step by operations that fit any number of places a row: lengths, prefix sum, fills, casts."""
        q_len = torch.full_like(tokens, 1)
        q_start = torch.cat((torch.zeros_like(tokens[:1]), torch.cumsum(q_len, 0, dtype=torch.int32)))
        alive = rows.live != 0
        positions = torch.where(alive, rows.num_tokens.long() - 1 + k, 0)
        page = positions // page_size
        known = alive & (page < rows.page_table.shape[1])
        pages = rows.page_table.gather(1, page.clamp(max=rows.page_table.shape[1] - 1).unsqueeze(1)).squeeze(1)
        slots = torch.where(known, pages.long() * page_size + positions % page_size, 0)
        kv_len = (rows.num_tokens + k).clamp(max=rows.tokens.shape[1]) * rows.live
        return self._step(rows, tokens, positions, slots, q_start, kv_len.int())

    def _step(self, rows: Rows, tokens: Tensor, positions: Tensor, slots: Tensor, q_start: Tensor, kv_len: Tensor) -> FlatBatch:
        return FlatBatch(
            token_ids=tokens,
            row_ids=self._q_start[: tokens.shape[0]],
            positions=positions,
            slots=slots,
            q_start=q_start,
            kv_len=kv_len,
            page_table=rows.page_table,
            max_q=1,
            max_kv=rows.tokens.shape[1],
        )
