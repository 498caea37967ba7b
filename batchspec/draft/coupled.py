"""Drafts of sampled rows that use the noise of the target's own draws: argmax(draft logits / T + the same Gumbel noise).

The noise of a draw depends only on (row key, position, token). A drafter that adds it to its own logits proposes what the target
will draw if the two distributions are alike; a plain argmax is right only if the most likely token is drawn. Probabilities of
drafts are not kept: drafts are compared with the target's draws, so any draft is lossless. top_k, top_p and min_p are applied to
the draft's logits as to the target's; so are the rules of `batch/logits.py` that drafters follow, which may read earlier drafts.
Source: Gumbel-coupled drafts, Daliri et al. 2025, "Coupling without communication and drafter-invariant speculative decoding"
(arXiv 2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.logit_rule import LogitRows
from batchspec.batch.logits import adjust_draft_logits, drafters_read_drafts
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.kernels.sampling.add_gumbel_noise import add_gumbel_noise
from batchspec.kernels.sampling.argmax import argmax
from batchspec.kernels.sampling.cutoff import cutoff


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Changes a drafter's logits before it chooses: rules, filters, and the noise with which the target will draw at T positions.

    at    row and position (in prompt + output) of the token that is drafted, and the earlier drafts if a rule reads them
    mode  what the rows of the pass need: rules of `batch/logits.py`, filters

    All changes to a drafter's logits are made here, for chains and trees alike.
    """

    rows: DeviceBatch
    at: LogitRows
    mode: SamplingMode

    def choose(
        self, logits: Tensor, out_ids: Tensor, map_ids: Tensor | None = None, out_confidence: Tensor | None = None
    ) -> None:
        """Choose the draft token of a chain at each position, int32 [T] of any stride.

        logits   [T, V], changed in place
        map_ids  int32 [V] token of each column; None: the column's index
        out_confidence  int32 [T] of any stride: how sure each choice is among the changed logits, as `argmax` writes it
        """
        self._perturb(logits, map_ids)
        argmax(logits, out_ids=out_ids, map_ids=map_ids, out_confidence=out_confidence)

    def choose_parallel(
        self, logits: Tensor, out_ids: Tensor, map_ids: Tensor | None = None, out_confidence: Tensor | None = None
    ) -> None:
        """Choose K drafts a row from the logits of one pass, T = R * K. If a rule reads drafts, they are chosen one after
        another.

        out_ids  int32 [R, K], the `drafts` that these draws were made with
        out_confidence  int32 [R, K] or None, as in `choose`
        """
        width, at = out_ids.shape[1], self.at
        if not self.in_turns:
            drafted, sure = torch.empty_like(at.row_ids), None if out_confidence is None else torch.empty_like(at.row_ids)
            self.choose(logits, drafted, map_ids, sure)
            out_ids.copy_(drafted.view_as(out_ids))
            if out_confidence is not None and sure is not None:
                out_confidence.copy_(sure.view_as(out_confidence))
            return
        assert at.drafts is out_ids
        for k in range(width):
            sure = None if out_confidence is None else out_confidence[:, k]
            self.turn(k, width).choose(logits[k::width], out_ids[:, k], map_ids, sure)

    @property
    def in_turns(self) -> bool:
        """Whether drafts of a row must be chosen one after another, because a rule reads earlier ones."""
        return self.at.num_drafted is not None

    def turn(self, k: int, width: int) -> Draws:
        """Those of draft k of each row, of draws for `width` drafts a row."""
        at = self.at
        assert at.num_drafted is not None
        row_ids, positions, num_drafted = (x[k::width].contiguous() for x in (at.row_ids, at.positions, at.num_drafted))
        return Draws(self.rows, replace(at, row_ids=row_ids, positions=positions, num_drafted=num_drafted), self.mode)

    def branches(self, logits: Tensor, map_ids: Tensor | None = None) -> None:
        """Change logits [T, V] in place; the largest are the candidates: of a tree the children, which have the noise of the same
        position, of a block those of each draft."""
        self._perturb(logits, map_ids)

    def _perturb(self, logits: Tensor, map_ids: Tensor | None) -> None:
        rows, at, dtype = self.rows, self.at, torch.float64 if logits.dtype == torch.float64 else torch.float32
        adjust_draft_logits(logits, at, rows, self.mode, map_ids)
        if not self.mode.random:  # no row is sampled: the noise of greedy rows is 0
            return
        low = torch.full_like(logits[:, 0], -torch.inf, dtype=dtype)
        if self.mode.filters:
            cutoff(logits, at.row_ids, rows.temperature, rows.top_k, rows.top_p, rows.min_p, out_cutoff=low)
        add_gumbel_noise(logits, at.row_ids, at.positions, rows.keys, rows.temperature, low, map_ids)


def first_draws(mode: SamplingMode | None, rows: DeviceBatch, row_ids: Tensor, num_tokens: Tensor) -> Draws | None:
    """The `Draws` of a row's first draft, the token after its last committed one. None: drafts are argmaxes of plain logits.

    row_ids     int32 [T] row of `rows`
    num_tokens  int32 [T] number of its committed tokens
    """
    return None if mode is None else Draws(rows, LogitRows(row_ids, num_tokens.long()), mode)


def later_draws(
    mode: SamplingMode | None, rows: DeviceBatch, row_ids: Tensor, positions: Tensor, *, ahead: int, drafts: Tensor,
    draft_rows: Tensor | None = None,
) -> Draws | None:
    """The `Draws` of later drafts, which may have others before them. None: drafts are argmaxes of plain logits.

    row_ids     int32 [T] row of `rows`
    positions   int64 [T]; positions + ahead is the position of the token that is drafted
    drafts      int32 [., K] the row's drafts of this round, or a node's path, as target ids, at least up to the position
    draft_rows  int32 [T] row of `drafts`; None: as row_ids
    """
    if mode is None:
        return None
    at = LogitRows(row_ids, positions + ahead)
    if drafters_read_drafts(mode):
        at = replace(at, drafts=drafts, num_drafted=at.positions - rows.num_tokens[row_ids], draft_rows=draft_rows)
    return Draws(rows, at, mode)
