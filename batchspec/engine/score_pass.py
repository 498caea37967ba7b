"""Scoring prompts on the device: what a prefill pass computes instead of choosing tokens; `scoring.py` is the host's part.

T tokens of a pass, H hidden, N likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.upload import upload
from batchspec.engine.logprobs import Logprobs
from batchspec.engine.round import Round, RoundResult
from batchspec.engine.step import Segment
from batchspec.kernels.rounds.accept import FULL
from batchspec.packed_batch import SCORED_TOKENS


def score(round_: Round, hidden: Tensor, next_ids: Tensor) -> Logprobs:
    """Log-probability of next_ids int [T] after `hidden` [T, H], and those of the likeliest tokens if the options ask for them.

    The logits of at most SCORED_TOKENS positions are in memory at once.
    """
    parts = [
        round_.logprobs_of(round_.target.logits(hidden[begin : begin + SCORED_TOKENS]), next_ids[begin : begin + SCORED_TOKENS])
        for begin in range(0, len(hidden), SCORED_TOKENS)
    ]
    chosen, top_ids, top = zip(*parts, strict=True)
    return Logprobs(
        torch.cat(chosen), None if top_ids[0] is None else torch.cat(top_ids), None if top[0] is None else torch.cat(top)
    )


def scored(round_: Round, rows: DeviceBatch, segments: Sequence[Segment], hidden: Tensor, next_ids: Tensor) -> RoundResult:
    """The result of a pass over `segments`: log-probabilities of its T tokens in order, and a log that ends the rows that end
    here.

    hidden [T, H], next_ids int [T]: the token after each. Does not synchronise.
    """
    device, found = rows.live.device, score(round_, hidden, next_ids)
    log = torch.full((rows.live.shape[0], 5), -1, dtype=torch.int32, device=device)
    if ending := [segment.slot for segment in segments if segment.last]:
        log[upload(ending, torch.int64, device)] = upload([0, 0, 0, FULL, -1], torch.int32, device)
    round_.mark_diverged(hidden, log, upload([segment.slot for segment in segments], torch.int64, device))
    return RoundResult(log, found.chosen, found.top_ids, found.top)
