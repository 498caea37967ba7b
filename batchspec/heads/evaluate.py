"""Acceptance of a head on the target's own outputs, by exact replay of the rounds that a greedy job would have run.

Accepted drafts are the row's own tokens, so one pass over the finished row computes the drafts of all possible rounds: draft k at
position t is of token t+2+k. The replay then walks over the row as rounds do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from batchspec.heads.data import Numbers, Row
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Counts over the replayed rounds with K drafts."""

    rounds: int
    tokens: int
    accepted: tuple[int, ...]
    """[K] rounds that accepted the draft at this position, and so all before it"""
    drafted: tuple[int, ...]
    """[K] rounds whose row was long enough to use the draft at this position"""

    @property
    def mean_length(self) -> float:
        """Tokens per round."""
        return self.tokens / max(self.rounds, 1)

    @property
    def by_position(self) -> list[float]:
        """accepted / drafted at each position."""
        return [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]


@torch.no_grad()
def acceptance(
    network: DraftNetwork,
    teacher: Teacher,
    rows: Sequence[Row],
    *,
    draft_len: int,
    batch_tokens: int,
    cast: AbstractContextManager[object],
) -> Acceptance:
    """Replay `rows` with K = draft_len and greedy drafts. For rows sampled at T > 0 this underestimates a job's acceptance:
    there, drafts are drawn with the noise of the target's draw and are accepted more often."""
    kept, counted = array("i"), array("i")
    for batch in _batches(rows, batch_tokens):
        data = teacher.training_batch(batch, probs=False)
        with cast:
            likeliest = network.drafts(data, draft_len)
        drafts = teacher.draft_vocab_ids[likeliest].cpu().numpy()
        for row, ids in zip(batch, drafts, strict=True):
            for one, count in _replay(row, ids, draft_len):
                kept.append(one)
                counted.append(count)
    depth = np.arange(draft_len)
    accepted, drafted = ((np.array(found)[:, None] > depth).sum(0).tolist() for found in (kept, counted))
    return Acceptance(rounds=len(kept), tokens=sum(kept) + len(kept), accepted=tuple(accepted), drafted=tuple(drafted))


def _replay(row: Row, drafts: Numbers, draft_len: int) -> Iterator[tuple[int, int]]:
    """(drafts accepted, drafts made) of each round. As in the engine, the last token of a row is never drafted.

    drafts  int64 [L, K] at position t the draft of tokens t+2 .. t+1+K
    """
    newest, last = row.prompt_len, len(row.ids) - 1
    following = np.lib.stride_tricks.sliding_window_view(np.pad(row.ids, (0, draft_len), constant_values=-1), draft_len)[2:]
    right = drafts[: len(following)] == following
    run = np.where(right.all(1), draft_len, right.argmin(1)).tolist()
    while newest < last:
        count = min(draft_len, last - newest - 1)
        kept = min(run[newest - 1], count)
        yield kept, count
        newest += kept + 1


def _batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if batch and len(row.ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
