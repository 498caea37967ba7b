"""Drafts of sampled rows that share the noise of the target's own draws: argmax(draft logits / T + the same Gumbel noise).

The noise of a draw depends on (row key, position, token) alone. A drafter that adds it to its own logits proposes what the target
will draw if the two distributions are alike; a plain argmax is right only if the most likely token is drawn. No probability of a
draft is kept: drafts are compared with draws, and any draft is lossless.
top_k, top_p and min_p narrow the draft's logits as they narrow the target's; so do the rules of `batch/logits.py` that drafters
follow, which may read the drafts before.
Source: Gumbel-coupled drafts, Daliri et al. 2025, "Coupling without communication and drafter-invariant speculative decoding"
(arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logits import LogitRows, adjust_draft_logits, drafters_read_drafts
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.sampling.add_gumbel_noise import add_gumbel_noise
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.cutoff import cutoff


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What is done to a drafter's logits before it chooses: the noise that the target will draw with at each of T places.

    at    row, position (in prompt + output) of the token that is drafted, and the drafts before it where a rule reads them
    mode  what the rows of the pass need: rules of `batch/logits.py`, filters

    Nothing else in `draft` changes logits: whatever masks or biases the target's comes in here, for chains and trees alike.
    """

    rows: DeviceBatch
    at: LogitRows
    mode: SamplingMode

    def choose(self, logits: Tensor, out_ids: Tensor, map_ids: Tensor | None = None) -> None:
        """Of a chain: the draft token at each place, int32 [T] of any stride.

        logits   [T, V], changed in place
        map_ids  int32 [V] token of each column; None: its number
        """
        self._perturb(logits, map_ids)
        argmax(logits, out_ids=out_ids, map_ids=map_ids)

    def choose_parallel(self, logits: Tensor, out_ids: Tensor, map_ids: Tensor | None = None) -> None:
        """Of K drafts a row whose logits one pass made, T = R * K. Where a rule reads drafts, they are chosen one after another.

        out_ids  int32 [R, K], the `drafts` that these draws were made with
        """
        width, at = out_ids.shape[1], self.at
        if at.num_drafted is None:
            drafted = torch.empty_like(at.row_ids)
            self.choose(logits, drafted, map_ids)
            out_ids.copy_(drafted.view_as(out_ids))
            return
        assert at.drafts is out_ids
        for k in range(width):
            row_ids, positions, num_drafted = (x[k::width].contiguous() for x in (at.row_ids, at.positions, at.num_drafted))
            turn = replace(at, row_ids=row_ids, positions=positions, num_drafted=num_drafted)
            Draws(self.rows, turn, self.mode).choose(logits[k::width], out_ids[:, k], map_ids)

    def branches(self, logits: Tensor, map_ids: Tensor | None = None) -> None:
        """Of a tree: change logits [T, V] in place; the largest are the children. Siblings share the noise of their position."""
        self._perturb(logits, map_ids)

    def _perturb(self, logits: Tensor, map_ids: Tensor | None) -> None:
        rows, at, dtype = self.rows, self.at, torch.float64 if logits.dtype == torch.float64 else torch.float32
        adjust_draft_logits(logits, at, rows, self.mode, map_ids)
        if not self.mode.random:  # nothing is drawn: the noise of greedy rows is 0
            return
        low = torch.full_like(logits[:, 0], -torch.inf, dtype=dtype)
        if self.mode.filters:
            cutoff(logits, at.row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=low)
        add_gumbel_noise(logits, at.row_ids, at.positions, rows.keys, rows.temperature, low, map_ids)


def first_draws(mode: SamplingMode | None, rows: DeviceBatch, row_ids: Tensor, num_tokens: Tensor) -> Draws | None:
    """For a row's first draft, the token after its last committed one. None: drafts are argmaxes of the logits as they are.

    row_ids     int32 [T] row of `rows`
    num_tokens  int32 [T] its committed tokens
    """
    return None if mode is None else Draws(rows, LogitRows(row_ids, num_tokens.long()), mode)


def later_draws(
    mode: SamplingMode | None, rows: DeviceBatch, row_ids: Tensor, positions: Tensor, *, ahead: int, drafts: Tensor,
    draft_rows: Tensor | None = None,
) -> Draws | None:  # fmt: skip
    """For drafts that may have others before them; None as above.

    row_ids     int32 [T] row of `rows`
    positions   int64 [T] + ahead: position of the token that is drafted
    drafts      int32 [., K] the row's drafts of this round, or a node's path, at least up to the position; token ids everywhere
    draft_rows  int32 [T] row of `drafts`; None: that of row_ids
    """
    if mode is None:
        return None
    at = LogitRows(row_ids, positions + ahead)
    if drafters_read_drafts(mode):
        at = replace(at, drafts=drafts, num_drafted=at.positions - rows.num_tokens[row_ids], draft_rows=draft_rows)
    return Draws(rows, at, mode)
