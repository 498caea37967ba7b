"""One round: draft, verify, accept, commit, catch up, on device tensors, for every drafter of chains and every device.

`tree_round.py` has that of trees. On a GPU this code runs when a round is captured (`graphs.py`); later rounds replay the graph.
Nothing is read back to the host. Legend: R rows, K draft_len, S = K + 1, T flat positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import adjusts_drafts, check_drafts, commit_rules, hold_undecided
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.cache.pages import KVCache
from batchspec.draft.base import Drafter
from batchspec.draft.shapes import ChainShape
from batchspec.engine.rounds.ablation import vocabulary_for
from batchspec.engine.rounds.draft_chances import DraftChances
from batchspec.engine.rounds.records import Drafts, RoundOptions, RoundResult, Verified
from batchspec.engine.rounds.simulated_acceptance import SimulatedAcceptance
from batchspec.engine.rounds.verify_inputs import VerifyInputs
from batchspec.kernels.attention.work_list import SharedPrefixes
from batchspec.kernels.rounds.accept import accept
from batchspec.model.target import Target
from batchspec.packed_batch import PackedBatch


class Round:
    """A round and its buffers. One object serves all row buckets and draft lengths, by views of its buffers."""

    def __init__(
        self, target: Target, drafter: Drafter, cache: KVCache, batch: PackedBatch, options: RoundOptions, device: torch.device
    ) -> None:
        self.target, self.drafter, self.cache, self.options = target, drafter, cache, options
        self.vocabulary = vocabulary_for(target, argmax=options.argmax)
        self.is_uniform = drafter.fixed_len and options.uniform_slots
        """Whether every row verifies the same number of positions, so that the layout needs no prefix sum; unless a round has
        fewer positions."""
        self.chances: DraftChances | None = None
        """Set if rows may verify different numbers of drafts."""
        if options.row_lengths and drafter.draft_len and isinstance(drafter.shape, ChainShape):
            self.chances = DraftChances(drafter, batch.num_slots, device)
        self.max_emitted = drafter.draft_len + 1
        """Maximum number of tokens that a round emits for a row: K + 1."""
        self.kv_per_round = drafter.shape.kv_per_round
        """Number of K/V positions that a round writes, from a row's newest token on."""
        self.draft_lens = drafter.shape.draft_lens if batch.decodes else ()
        """Draft lengths for which graphs are captured, up to the drafter's; none if there are no rounds."""
        self.num_lookahead_slots = drafter.shape.num_lookahead_slots
        """Number of K/V positions after a row's last token that a round may write and read."""
        self.num_nodes: int | None = None
        """Number of nodes that a round with drafts verifies, for trees; None for chains."""
        self._accepted_len = torch.zeros(batch.num_slots, dtype=torch.int32, device=device)
        self.inputs = VerifyInputs(batch.num_slots, drafter.draft_len, cache.page_size, device)
        self.simulated = None
        """Set if acceptance is made up."""
        if options.synthetic is not None:
            self.simulated = SimulatedAcceptance(options.synthetic, drafter.draft_len, device)

    def run(
        self,
        rows: DeviceBatch,
        mode: SamplingMode,
        draft_len: int,
        shared: SharedPrefixes | None = None,
        prepare_next: bool = True,
        num_positions: int | None = None,
    ) -> RoundResult:
        """Run one round over all of `rows` with at most `draft_len` drafts each. Dead rows do not affect results.

        shared         rows that share a prefix, which attention on a GPU then reads once
        prepare_next   the next round may draft; otherwise the drafter only keeps what a later round needs, and prepares no draft
        num_positions  how many positions are verified, of all rows together: the newest token of each row, and the drafts that
                       are most likely to be accepted. None: all drafts. Only with `chances`
        """
        with self._keeping_held_rows(rows, mode):
            drafts = self._draft(rows, mode, draft_len)
            verified = self._verify(rows, mode, drafts, num_positions, shared)
            if verified is None:
                result = RoundResult(torch.full((len(rows.live), 5 + draft_len), -1, dtype=torch.int32))
            else:
                result = self._accept(rows, mode, drafts, verified)
                self._catch_up(rows, verified, prepare_next)
        if self.chances is not None and draft_len:
            self.chances.learn(result.log)
        hold_undecided(rows, rows.live, result.log, mode)
        return result

    def _draft(self, rows: DeviceBatch, mode: SamplingMode, draft_len: int) -> Drafts:
        """Let the drafter propose up to `draft_len` tokens for each row."""
        self.set_draft_mode(mode)
        num_rows = rows.live.shape[0]
        ids, lengths = self.inputs.ids(num_rows, draft_len)[:, 1:], self.inputs.lengths(num_rows)
        if draft_len:
            self.drafter.propose(rows, ids, lengths, self.cache)
            if not self.drafter.fixed_len:  # such drafts, as a lookup's, are not chosen from adjusted logits
                check_drafts(rows, ids, lengths, mode)
            self._simulate(rows, lengths, draft_len)
        return Drafts(ids, lengths, self.rates(draft_len))

    def _verify(
        self, rows: DeviceBatch, mode: SamplingMode, drafts: Drafts, num_positions: int | None, shared: SharedPrefixes | None
    ) -> Verified | None:
        """Choose the target's tokens after each row's newest token and after its drafts. None if there is no such position: on a
        CPU, when every row ended after the host's last read."""
        batch, levels = self._positions(rows, drafts.ids.shape[1], num_positions)
        if not batch.token_ids.shape[0]:
            return None
        batch.read_rows(rows).shared = shared
        hidden, aux_hidden_states = self.target.forward(batch, self.cache, self.drafter.aux_layer_ids)
        logit_rows = None
        if not mode.greedy or self.options.reader is not None:
            num_drafted = batch.positions - (rows.num_tokens - 1)[batch.row_ids]
            logit_rows = LogitRows(batch.row_ids, batch.positions + 1, drafts.ids, num_drafted)
        target_ids, raw = self.choose(hidden, logit_rows, rows, mode)
        return Verified(batch, target_ids, aux_hidden_states, logit_rows, raw, levels)

    def _accept(self, rows: DeviceBatch, mode: SamplingMode, drafts: Drafts, verified: Verified) -> RoundResult:
        """Accept the drafts that agree with the target's choices, and commit the emitted tokens."""
        result = self.commit(
            verified.target_ids, verified.raw, verified.logit_rows, verified.batch.cu_seqlens_q, drafts, rows, rows.live, mode,
            self._accepted_len[: len(rows.live)],
        )
        return replace(result, levels=verified.levels)

    def _catch_up(self, rows: DeviceBatch, verified: Verified, prepare_next: bool) -> None:
        """Let the drafter go over the positions that were just verified."""
        batch = verified.batch.of_group(self.cache.groups.draft_group)
        self.drafter.catch_up(
            batch, verified.aux_hidden_states, self._accepted_len[: len(rows.live)], rows, self.cache, prepare_next=prepare_next
        )

    def verify_all(self) -> None:
        """From now on rows verify all their drafts, and nothing is learnt of these. Graphs that were captured before still do."""
        self.chances = self.drafter.confidence = None

    def row_positions(self, draft_len: int) -> int:
        """Positions of a row that verifies `draft_len` drafts, its newest token included."""
        return draft_len + 1

    def rates(self, draft_len: int) -> Tensor | None:
        """float32 [N, K] rates of simulated acceptance; None without drafts, or if none is simulated."""
        return None if self.simulated is None else self.simulated.rates(draft_len)

    def _simulate(self, rows: DeviceBatch, lengths: Tensor, draft_len: int) -> None:
        """Where acceptance is made up: every row has all drafts, and a confidence in them that fits their rates."""
        if self.simulated is None:
            return
        lengths.fill_(draft_len)
        if self.chances is not None:
            self.simulated.write_confidence(rows, self.chances.confidence[: len(lengths), :draft_len])

    def _positions(
        self, rows: DeviceBatch, draft_len: int, num_positions: int | None
    ) -> tuple[FlatBatch, Tensor | None]:
        """The positions to verify, and the levels of all drafts if their chances are known."""
        inputs, batch, levels = self.inputs, None, None
        lengths = inputs.lengths(rows.live.shape[0])
        if self.is_uniform and num_positions is None:
            batch = inputs.uniform(rows, draft_len)
        else:
            inputs.limit_lengths(rows, draft_len)
        if self.chances is not None and draft_len:
            levels = self.chances.allocate(rows.live, lengths, width=draft_len, num_positions=num_positions)
        return inputs.ragged(rows, draft_len, num_positions) if batch is None else batch, levels

    @contextmanager
    def _keeping_held_rows(self, rows: DeviceBatch, mode: SamplingMode) -> Iterator[None]:
        """The round within this block changes nothing that the drafter keeps of rows that take no part: held rows are resumed
        with it. Drafting and catching up work in the entries of all rows."""
        if not mode.may_hold:
            yield
            return
        took_part, num_rows = rows.live != 0, rows.live.shape[0]
        kept = [tensor[:num_rows].clone() for tensor in self.cache.draft_rows]
        yield
        for tensor, before in zip(self.cache.draft_rows, kept, strict=True):
            shape = (num_rows, *(1 for _ in before.shape[1:]))
            tensor[:num_rows] = torch.where(took_part.view(shape), tensor[:num_rows], before)

    def set_draft_mode(self, mode: SamplingMode) -> None:
        """Set the drafter's sampling mode for the next pass or round; None if its choices do not depend on it."""
        depends = (mode.random and self.options.coupled) or adjusts_drafts(mode)
        self.drafter.mode = mode if depends else None

    def commit(
        self,
        target_ids: Tensor,
        raw: Tensor | None,
        logit_rows: LogitRows | None,
        cu_seqlens_q: Tensor,
        drafts: Drafts,
        rows: DeviceBatch,
        live: Tensor,
        mode: SamplingMode,
        out_accepted_len: Tensor,
    ) -> RoundResult:
        """Accept the drafts that agree with the target's choices, and commit the emitted tokens.

        target_ids, raw   as `choose` returns them
        logit_rows        as for `choose`
        live              int32 [R] in: which rows take part; out: 0 for rows that have ended
        out_accepted_len  int32 [R]
        """
        log = torch.empty((live.shape[0], 5 + drafts.ids.shape[1]), dtype=torch.int32, device=live.device)
        accept(
            drafts.ids, drafts.length, target_ids, cu_seqlens_q, rows.stop_ids, rows.limit, drafts.rates, rows.keys,
            tokens=rows.tokens, num_tokens=rows.num_tokens, live=live, finish=rows.finish,
            out_accepted_len=out_accepted_len, out_log=log,
        )
        commit_rules(rows, log, live, mode)
        if raw is None or logit_rows is None or self.options.reader is None:
            return RoundResult(log)
        found = self.options.reader.read(raw, target_ids, self.vocabulary)
        return RoundResult(log, by_row(found, logit_rows, log.shape[0], log.shape[1] - 4))

    def choose(
        self, hidden: Tensor, logit_rows: LogitRows | None, rows: DeviceBatch, mode: SamplingMode
    ) -> tuple[Tensor, Tensor | None]:
        """The target's choices after `hidden` [T, H], int32 [T], and the raw logits if they are read.

        logit_rows  None if all rows are greedy and no logits are read
        """
        return self.vocabulary.choose(hidden, logit_rows, rows, mode, keeps_raw=self.options.reader is not None)


def by_row(values: Sequence[Tensor], logit_rows: LogitRows, num_rows: int, width: int) -> tuple[Tensor, ...]:
    """Values [T, ...] of flat positions laid out by row and number of drafts before the token, [R, S, ...]; R num_rows, S width.

    logit_rows  the row and the number of drafted tokens of each of the T positions
    Does not synchronise.
    """
    column = torch.zeros_like(logit_rows.positions) if logit_rows.num_drafted is None else logit_rows.num_drafted
    # Padding and dead rows have column numbers out of range: their values go to an extra column, which is dropped.
    column = torch.where((column >= 0) & (column < width), column, width)
    indices, found = (logit_rows.row_ids.long(), column), []
    for value in values:
        laid_out = value.new_zeros((num_rows, width + 1, *value.shape[1:]))
        laid_out[indices] = value
        found.append(laid_out[:, :width])
    return tuple(found)
