"""Acceptance of a head on rows of the target's own output, by exact replay: the rounds that a greedy job would have run.

While drafts are accepted they are the row's own tokens, so one pass over the finished row holds every chain that any round
could draft: step k at place t drafts token t+2+k. The walk then takes them as rounds do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from batchspec.train.data import Numbers, Row
from batchspec.train.network import HeadNetwork
from batchspec.train.teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What rounds with K drafts made of the rows."""

    rounds: int
    tokens: int
    accepted: tuple[int, ...]
    """[K] rounds that kept the draft at this place, and so all before it"""
    drafted: tuple[int, ...]
    """[K] rounds whose row went on far enough to use it"""

    @property
    def mean_length(self) -> float:
        """Tokens a round."""
        return self.tokens / max(self.rounds, 1)

    @property
    def by_position(self) -> list[float]:
        """Share of the rounds that could keep the draft at this place and did."""
        return [a / max(d, 1) for a, d in zip(self.accepted, self.drafted, strict=True)]


@torch.no_grad()
def acceptance(
    network: HeadNetwork,
    teacher: Teacher,
    rows: Sequence[Row],
    *,
    max_len: int,
    batch_tokens: int,
    cast: AbstractContextManager[object],
) -> Acceptance:
    """Replay `rows` with K = max_len and the likeliest draft tokens. Rows sampled at T > 0 are counted as they stand: a job's
    drafts, which share the noise of the draw, are accepted more often there."""
    kept, counted = array("i"), array("i")
    for batch in _batches(rows, batch_tokens):
        lesson = teacher.lesson(batch, probs=False)
        with cast:
            steps = network(lesson.embedded, lesson.features, max_len)
            drafts = torch.stack([teacher.hot[network.lm_head(hidden).argmax(-1)] for hidden in steps], -1).cpu().numpy()
        for row, ids in zip(batch, drafts, strict=True):
            for one, count in _replay(row, ids, max_len):
                kept.append(one)
                counted.append(count)
    depth = np.arange(max_len)
    accepted, drafted = ((np.array(found)[:, None] > depth).sum(0).tolist() for found in (kept, counted))
    return Acceptance(rounds=len(kept), tokens=sum(kept) + len(kept), accepted=tuple(accepted), drafted=tuple(drafted))


def _replay(row: Row, drafts: Numbers, max_len: int) -> Iterator[tuple[int, int]]:
    """(drafts kept, drafts that counted) of each round: as in the engine the last token of a row is none of the drafter's.

    drafts  int64 [L, K] at place t the draft of tokens t+2 .. t+1+K
    """
    newest, last = row.prompt_len, len(row.ids) - 1
    following = np.lib.stride_tricks.sliding_window_view(np.pad(row.ids, (0, max_len), constant_values=-1), max_len)[2:]
    right = drafts[: len(following)] == following
    run = np.where(right.all(1), max_len, right.argmin(1)).tolist()
    while newest < last:
        count = min(max_len, last - newest - 1)
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
