"""How likely each draft is to be accepted, learnt on the device, and which drafts a round verifies.

A chance belongs to a draft's position in the round and to its drafter's confidence in it. Rounds learn it from every draft that
they verify, and spend their places on the drafts that are most likely to survive (`kernels/rounds/allocate_drafts.py`). The host
reads how many drafts survive with which probability, and decides from it how many places the next rounds have.
Legend: R rows, K draft_len, P the largest K, B bins of confidence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchspec.draft.base import Drafter
from batchspec.kernels.rounds.allocate_drafts import LEVELS, PER_HALF, allocate_drafts
from batchspec.kernels.rounds.learn_acceptance import learn_acceptance

PRIOR_DRAFTS = 8.0
"""Number of drafts of a position and confidence that the drafter's prior counts as."""
HALF_LIFE_DRAFTS = 2048.0
"""Drafts of a position and confidence after which an observation counts half."""


class Calibration(NamedTuple):
    """Drafts of one confidence, in any position."""

    drafts: int
    """Those that were verified after accepted ones."""
    accepted: int
    expected: float
    """How many should have been accepted, by the chances with which they were chosen."""


class DraftChances:
    """Chances of the drafts of one drafter. All ranks of a group compute the same ones, from the same integers."""

    def __init__(self, drafter: Drafter, slots: int, device: torch.device) -> None:
        """The drafter writes its confidence here from now on."""
        shape = (drafter.draft_len, len(drafter.prior_chances))
        self._prior = torch.tensor(drafter.prior_chances, dtype=torch.float32, device=device)
        self.tried, self.accepted = torch.empty(2, *shape, dtype=torch.float32, device=device)
        """fp32 [P, B] drafts verified after accepted ones, and those of them that were accepted; old ones count less."""
        self._costs = torch.empty(shape, dtype=torch.int32, device=device)
        self.forget()
        self._totals = torch.zeros(3, *shape, dtype=torch.float64, device=device)
        self.confidence = torch.zeros(slots, drafter.draft_len, dtype=torch.int32, device=device)
        """int32 [slots, P] confidence in each draft of the present round."""
        drafter.confidence = self.confidence

    def allocate(self, live: Tensor, draft_len: Tensor, *, width: int, num_positions: int | None) -> Tensor:
        """Cut draft_len int32 [R] of rows with up to `width` drafts so that all live rows have `num_positions` positions, one
        of each for its newest token. None: all drafts are verified, and only counted here.

        Returns int32 [K, LEVELS]: how many drafts there were, by position and level of survival, whether verified or not.
        """
        counts = torch.empty(width, LEVELS, dtype=torch.int32, device=live.device)
        confidence = self.confidence[: len(live), :width]
        allocate_drafts(confidence, self._costs, live, num_places=num_positions, draft_len=draft_len, out_counts=counts)
        return counts

    def learn(self, log: Tensor) -> None:
        """Learn from a round's log int32 [R, K+5]."""
        learn_acceptance(
            self.confidence[: len(log), : log.shape[1] - 5], log, self._prior, tried=self.tried, accepted=self.accepted,
            costs=self._costs, totals=self._totals, weight=PRIOR_DRAFTS, half_life=HALF_LIFE_DRAFTS,
        )

    def forget(self) -> None:
        """Discard what was learnt, in place, where captured rounds read it: the chances are the drafter's prior ones."""
        self.tried.zero_()
        self.accepted.zero_()
        self._costs.copy_((-PER_HALF * self._prior.log2() + 0.5).clamp(min=0, max=LEVELS - 1))

    def calibration(self) -> dict[int, Calibration]:
        """By confidence, of those that had drafts, over the engine's life. Synchronises."""
        sums = enumerate(self._totals.sum(1).T.tolist())
        return {i: Calibration(round(drafts), round(accepted), expected) for i, (drafts, accepted, expected) in sums if drafts}
