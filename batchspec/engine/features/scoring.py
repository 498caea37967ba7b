"""Scoring prompts: log-probabilities of the prompts' tokens, from prefill passes without rounds.

The log-probability of token i + 1 is computed from the hidden state of token i. It is kept at the place of token i, by page, as K
and V are, so rows that share pages share it: a page is shared only if the token after it is the same too (`prefix_hashes`).

T tokens of a pass, H hidden, N likeliest tokens (`output.prompt_logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.upload import upload
from batchspec.cache.page_tables import PagePools
from batchspec.engine.features.logprobs import LogprobReader
from batchspec.engine.prefill.passes import Prefilled, PrefillPass, flat_batch, prefilling
from batchspec.engine.rounds.records import LogitReader, RoundLog, RoundResult, Slots
from batchspec.engine.rounds.round import Round
from batchspec.engine.rounds.vocabulary import DIVERGED
from batchspec.engine.slots.launch import UnreadLaunch
from batchspec.engine.slots.open_requests import non_finite_at
from batchspec.engine.slots.request_state import RequestState
from batchspec.engine.slots.row_feature import Features, RowFeature
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.engine.step import Segment
from batchspec.kernels.rounds.accept import FULL
from batchspec.packed_batch import SCORED_TOKENS
from batchspec.records import Completion

ENDS_RUN = (0, 0, 0, 0, DIVERGED)
"""The line of a row in a log whose reader ends the run."""


class PromptFeatures(Features):
    """The features of rows whose prompts are scored, in a batch that does not decode."""

    def __init__(self, num_top: int) -> None:
        """num_top: of how many of the likeliest tokens log-probabilities are read too."""
        self._num_top = num_top
        self._scores: PromptScores | None = None

    @property
    def reader(self) -> LogitReader:
        return LogprobReader(self._num_top)

    @property
    def prefill_pass(self) -> PrefillPass:
        return score_pass

    @property
    def padded_pass(self) -> None:
        """None: a pass computes the logits of each of its tokens, which takes longer than its launches."""

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        if self._scores is None:
            self._scores = PromptScores(pools.pools[0].num_pages, pools.page_size, self._num_top)
        return (Scoring(slots, self._scores, shares_prefixes=pools.groups.windows[0] is None),)


class Scoring(RowFeature):
    """Every row ends with its prefill, and has the scores of its prompt."""

    continues = False

    def __init__(self, slots: SlotTable, scores: PromptScores, *, shares_prefixes: bool) -> None:
        """shares_prefixes: rows may share pages. Not if all layers have windows: then rows share no page that the windows have
        passed, and its scores would be missing."""
        self._slots, self._scores, self._shares_prefixes = slots, scores, shares_prefixes
        self._scored: dict[RequestState, Scores] = {}

    def arrive(self, state: RequestState) -> bool:
        if not self._shares_prefixes:
            state.prefix_hashes = []
        return True

    def read(self, launch: UnreadLaunch, result: RoundResult, slots: Slots, log: RoundLog) -> None:
        self._scores.add(launch, result, self._slots)

    def leave(self, state: RequestState) -> None:
        """A row whose scores are not finite fails: later rows share no page of its prompt."""
        logprobs, _ = self._scored[state] = self._scores.of(state)
        bad = np.flatnonzero(~np.isfinite(logprobs[1:]))
        if len(bad):
            state.fail(non_finite_at(f"position {bad[0] + 1} (prompt token {bad[0] + 1})"))

    def finish(self, state: RequestState, done: Completion) -> Completion:
        if done.token_ids is None:  # a row may fail before it enters a slot
            self._scored.pop(state, None)
            return done
        logprobs, top = self._scored.pop(state)
        return done.replace(status="ok", text=None, prompt_logprobs=logprobs, prompt_top_logprobs=top)


Scores = tuple[NDArray[np.float32], tuple[NDArray[np.int32], NDArray[np.float32]] | None]
"""float32 [tokens], and (int32 ids, float32 values), each [tokens, N], of the likeliest tokens; None if N is 0. The first token
has none: NaN, and ids of -1."""


class PromptScores:
    """Of each prompt token whose page of the first K/V group is in use the log-probability of the next token: float32
    [pages, page_size], and [pages, page_size, N]."""

    def __init__(self, num_pages: int, page_size: int, num_top: int) -> None:
        shape = (num_pages, page_size)
        self._page_size, self._num_top = page_size, num_top
        self._logprobs = np.empty(shape, np.float32)
        self._top_ids, self._top = np.empty((*shape, num_top), np.int32), np.empty((*shape, num_top), np.float32)

    def add(self, launch: UnreadLaunch, result: RoundResult, slots: SlotTable) -> None:
        """Store the results of a pass that has arrived on the host. Rows that have left their slots since then are skipped."""
        logprobs, *top = (values.numpy() for values in result.read)
        offset = 0
        for segment in launch.segments:
            begin, offset = offset, offset + segment.end - segment.begin
            if launch.owners[segment.slot] != slots.owner[segment.slot]:
                continue
            state = slots.at(segment.slot)
            end = min(segment.end, len(state.request.prompt_ids) - 1)
            indices, count = self._page_indices(state, segment.begin, end), max(0, end - segment.begin)
            self._logprobs[indices] = logprobs[begin : begin + count]
            if top:
                self._top_ids[indices], self._top[indices] = (values[begin : begin + count] for values in top)

    def of(self, state: RequestState) -> Scores:
        """The scores of a row's prompt. Call it when the results of all its passes have been added and it has its pages."""
        indices = self._page_indices(state, 0, len(state.request.prompt_ids) - 1)
        logprobs = np.concatenate((np.full(1, np.nan, np.float32), self._logprobs[indices]))
        if not self._num_top:
            return logprobs, None
        none = np.full((1, self._num_top), -1, np.int32), np.full((1, self._num_top), np.nan, np.float32)
        return logprobs, (np.concatenate((none[0], self._top_ids[indices])), np.concatenate((none[1], self._top[indices])))

    def _page_indices(self, state: RequestState, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page, and index in the page, of the row's tokens first .. end-1."""
        tokens = np.arange(first, max(first, end))
        pages = np.array(state.pages.tables[0], np.int64)
        return pages[tokens // self._page_size], tokens % self._page_size


def score_pass(round_: Round, rows: DeviceBatch, segments: Sequence[Segment], mode: SamplingMode) -> Prefilled:
    """A `PrefillPass`: lm_head reads all tokens, and no row emits a token. The result has what the round's reader reads of the
    token after each of the T tokens; its log ends the rows whose prompts end here. Does not synchronise."""
    batch, slot_ids = flat_batch(rows, segments, round_.cache.page_size)
    with prefilling(round_):
        hidden, _ = round_.target.forward(batch, round_.cache)
        next_ids = rows.tokens[slot_ids[batch.row_ids], (batch.positions + 1).clamp(max=rows.tokens.shape[1] - 1)]
        read = _read(round_, hidden, next_ids)
        log = end_log(round_, rows, segments, hidden)
    return Prefilled(RoundResult(log, read), None)


def end_log(round_: Round, rows: DeviceBatch, segments: Sequence[Segment], hidden: Tensor) -> Tensor:
    """The log int32 [R, 5] of a pass without tokens: it ends the rows whose prompts end here, and the run if ranks have different
    hidden states."""
    device = rows.live.device
    log = torch.full((rows.live.shape[0], 5), -1, dtype=torch.int32, device=device)
    if ending := [segment.slot for segment in segments if segment.last]:
        log[upload(ending, torch.int64, device)] = upload([0, 0, 0, FULL, -1], torch.int32, device)
    mark_diverged(log, [segment.slot for segment in segments], round_.vocabulary.diverged(hidden))
    return log


def padded_end_log(ends: Tensor) -> Tensor:
    """As `end_log`, for a padded pass of a target that one process computes. ends: int32 [R] 1 for the rows whose prompts end
    here"""
    log, here = torch.full((ends.shape[0], 5), -1, dtype=torch.int32, device=ends.device), ends.bool()
    log[:, :3].masked_fill_(here.unsqueeze(1), 0)
    log[:, 3].masked_fill_(here, FULL)
    return log


def mark_diverged(log: Tensor, slots: Sequence[int], diverged: Tensor | None) -> None:
    """Write ENDS_RUN into `log` int32 [R, 5] of these slots, if ranks have different hidden states: no row of the pass chooses a
    token, and none may end in it. diverged: as `Vocabulary.diverged`."""
    if diverged is not None:
        lines, line = upload(slots, torch.int64, log.device), upload(ENDS_RUN, log.dtype, log.device)
        log[lines] = torch.where(diverged.any(), line, log[lines])


def _read(round_: Round, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, ...]:
    """What the round's reader reads of next_ids int [T] after `hidden` [T, H]. The logits of at most SCORED_TOKENS positions
    are in memory at once."""
    reader = round_.options.reader
    assert reader is not None
    parts = [
        reader.read(round_.target.logits(hidden[begin:end]), next_ids[begin:end], round_.vocabulary)
        for begin in range(0, len(hidden), SCORED_TOKENS)
        for end in (begin + SCORED_TOKENS,)
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
