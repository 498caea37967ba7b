"""One round: draft, verify, accept, commit, catch up. Written once, on device tensors, for every drafter and device.

Nothing is read back to the host. Legend: R rows, K draft_len, S = K + 1, T flat positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchspec.cache.attention import FlatBatch
from batchspec.cache.pages import KVCache
from batchspec.decode.rows import Rows
from batchspec.decode.sampling import Places, SamplingMode, choose, mark_output
from batchspec.draft.base import Drafter
from batchspec.kernels.accept import accept
from batchspec.kernels.slots import ragged_slots, uniform_slots
from batchspec.model.target import Target
from batchspec.records import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions:
    """What a whole job does in every round."""

    logprobs: int | None = None
    """null: none; 0: of the emitted tokens; N: of the N likeliest too."""
    synthetic: tuple[float, ...] | None = None
    """Unconditional acceptance rates per position; for benchmarks."""
    argmax: bool = True
    uniform_slots: bool = True


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What the host reads of a round, on the device still.

    log           int32 [R, 3+S] accepted_len (-1 for a dead row), draft_len, kept, then the emitted tokens, -1 behind them
    logprobs      float32 [R, S] of the emitted tokens
    top_ids       int32 [R, S, N] and top_logprobs float32 [R, S, N], likeliest first
    """

    log: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class Round:
    """The buffers of a round and the round itself. One object serves every row bucket: views of its buffers."""

    def __init__(
        self, target: Target, drafter: Drafter, cache: KVCache, batch: PackedBatch, options: RoundOptions, device: torch.device
    ) -> None:
        self.target, self.drafter, self.cache, self.options = target, drafter, cache, options
        slots, width = batch.slots, drafter.max_len + 1
        self.width = width

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids = empty(slots, width)  # newest token, then the drafts: verified as they lie
        self.draft_len = empty(slots)
        self.accepted_len = empty(slots)
        self.q_start = empty(slots + 1)
        self.row_ids = empty(slots * width)
        self.positions = empty(slots * width, dtype=torch.int64)
        self.slots = empty(slots * width, dtype=torch.int64)
        self.uniform_q_start = torch.arange(0, slots * width + 1, width, dtype=torch.int32, device=device)
        self.uniform_row_ids = torch.arange(slots * width, device=device).div_(width, rounding_mode="floor").int()
        self.rates = conditional_rates(options.synthetic, drafter.max_len, device)

    def run(self, rows: Rows, mode: SamplingMode) -> RoundResult:
        """One round over all of `rows`; dead rows cost nothing that changes a result."""
        draft_len = self.draft(rows)
        batch = self.layout(rows, draft_len)
        if not batch.token_ids.shape[0]:  # ragged, on a CPU: every row died since the host looked
            return RoundResult(torch.full((len(draft_len), 3 + self.width), -1, dtype=torch.int32))
        hidden, taps = self.target.forward(batch, self.cache, self.drafter.tap_layers)
        place = batch.positions - (rows.num_tokens - 1)[batch.row_ids]
        places = Places(batch.row_ids, batch.positions + 1, self.ids[: len(draft_len), 1:], place)
        result = self.accept(self.target.logits(hidden), places, batch.q_start, draft_len, rows, rows.live, mode)
        self.drafter.catch_up(batch, taps, self.accepted_len[: len(draft_len)], rows, self.cache)
        return result

    def draft(self, rows: Rows) -> Tensor:
        """Proposals into self.ids[:, 1:]; returns draft_len int32 [R], 0 for dead rows, capped so that no row passes its limit.

        A round emits one token more than it accepts.
        """
        num_rows = rows.live.shape[0]
        ids, draft_len = self.ids[:num_rows], self.draft_len[:num_rows]
        newest = (rows.num_tokens - 1).clamp_(min=0).long().unsqueeze(1)
        torch.gather(rows.tokens, 1, newest, out=ids[:, :1])
        self.drafter.propose(rows, ids[:, 1:], draft_len, self.cache)
        if self.rates is not None:
            draft_len.fill_(self.drafter.max_len)
        torch.minimum(draft_len, rows.limit - rows.num_tokens - 1, out=draft_len)
        return draft_len.clamp_(min=0).mul_(rows.live)

    def layout(self, rows: Rows, draft_len: Tensor) -> FlatBatch:
        """The newest token and the drafts of every live row, end to end.

        The uniform layout gives each row S places, dead or not, and needs no prefix sum. The ragged one packs live rows:
        on a CPU, where reading a length costs nothing, T is exact; on a GPU it is R * S, the rest padding.
        """
        num_rows = draft_len.shape[0]
        num_places = num_rows * self.width
        start = rows.num_tokens - 1
        page_size = self.cache.page_size
        if self.options.uniform_slots and self.drafter.fixed_len:
            q_start, row_ids = self.uniform_q_start[: num_rows + 1], self.uniform_row_ids[:num_places]
            positions, slots = self.positions[:num_places], self.slots[:num_places]
            uniform_slots(
                start,
                rows.live,
                rows.page_table,
                tokens_per_row=self.width,
                page_size=page_size,
                out_positions=positions,
                out_slots=slots,
            )
            token_ids = self.ids[:num_rows].view(-1)
            kv_len = (rows.num_tokens + self.drafter.max_len).clamp_(max=rows.tokens.shape[1]).mul_(rows.live)
        else:
            q_len = (draft_len + 1).mul_(rows.live)
            if not q_len.is_cuda:
                num_places = int(q_len.sum())
            q_start, row_ids = self.q_start[: num_rows + 1], self.row_ids[:num_places]
            positions, slots = self.positions[:num_places], self.slots[:num_places]
            ragged_slots(
                start, q_len, rows.page_table, page_size=page_size,
                out_q_start=q_start, out_row_ids=row_ids, out_positions=positions, out_slots=slots,
            )  # fmt: skip
            token_ids = self.ids[row_ids, (positions - start[row_ids]).clamp_(min=0, max=self.width - 1)]
            kv_len = (rows.num_tokens + draft_len).mul_(rows.live)
        return FlatBatch(
            token_ids=token_ids,
            row_ids=row_ids,
            positions=positions,
            slots=slots,
            q_start=q_start,
            kv_len=kv_len,
            page_table=rows.page_table,
            max_q=self.width,
            max_kv=rows.tokens.shape[1] if kv_len.is_cuda else int(kv_len.max()),
        )

    def accept(
        self, logits: Tensor, places: Places, q_start: Tensor, draft_len: Tensor, rows: Rows, live: Tensor, mode: SamplingMode
    ) -> RoundResult:
        """The target's choices at `logits` [T, V], the drafts they confirm, and the commit of what is emitted.

        `live` int32 [R] says which rows take part and is cleared where one of them ends.
        """
        num_rows = draft_len.shape[0]
        raw = self._raw(logits, mode)
        target_ids = choose(logits, places, rows, mode, fast_argmax=self.options.argmax)
        log = torch.empty((num_rows, 3 + self.width), dtype=torch.int32, device=logits.device)
        accept(
            self.ids[:num_rows, 1:], draft_len, target_ids, q_start, rows.stop_ids, rows.limit, self.rates, rows.keys,
            tokens=rows.tokens, num_tokens=rows.num_tokens, live=live, finish=rows.finish,
            out_accepted_len=self.accepted_len[:num_rows], out_log=log,
        )  # fmt: skip
        if mode.penalties:
            mark_output(rows, log[:, 3:], log[:, 2])
        if raw is None:
            return RoundResult(log)
        return self._with_logprobs(log, raw, target_ids, places)

    def _raw(self, logits: Tensor, mode: SamplingMode) -> Tensor | None:
        if self.options.logprobs is None:
            return None
        return logits.clone() if mode.penalties or mode.min_tokens else logits

    def _with_logprobs(self, log: Tensor, raw: Tensor, target_ids: Tensor, places: Places) -> RoundResult:
        """Log-softmax of the raw logits at every place, laid out by row and place."""
        num_rows, num_top = log.shape[0], self.options.logprobs or 0
        normaliser = torch.logsumexp(raw, 1, keepdim=True)
        chosen = (raw.gather(1, target_ids.long().unsqueeze(1)) - normaliser).squeeze(1).float()
        place = torch.zeros_like(places.positions) if places.place is None else places.place
        # Padding and dead rows have no place of their own: what they say goes to a column that is cut off.
        place = torch.where((place >= 0) & (place < self.width), place, self.width)
        where = (places.row_ids.long(), place)

        def by_row(values: Tensor) -> Tensor:
            laid_out = values.new_zeros((num_rows, self.width + 1, *values.shape[1:]))
            laid_out[where] = values
            return laid_out[:, : self.width]

        if not num_top:
            return RoundResult(log, by_row(chosen))
        best = raw.topk(num_top, dim=1)
        return RoundResult(log, by_row(chosen), by_row(best.indices.int()), by_row((best.values - normaliser).float()))


def conditional_rates(synthetic: tuple[float, ...] | None, draft_len: int, device: torch.device) -> Tensor | None:
    """Rates float32 [K] of accepting place j given all before it, from unconditional ones."""
    if synthetic is None:
        return None
    rates, before = [], 1.0
    for rate in synthetic[:draft_len]:
        rates.append(rate / before if before > 0 else 0.0)
        before = rate
    rates += [0.0] * (draft_len - len(rates))
    return torch.tensor(rates, dtype=torch.float32, device=device)
