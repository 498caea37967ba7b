"""A drafter that drafts step by step as trainable network: each draft step is computed for all positions at once.

B rows, L positions (padded at the end), H hidden, W values of the target's hidden states, V' draft vocabulary. Draft step 0 at
position t reads the embedding of token t+1 and the target's features at t, and predicts token t+2. Draft step k has the RoPE
position t+k. It attends to the keys of step 0 at positions 0..t and, of each later step, to the key of its own position: the same
keys as in a job.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from batchspec.config.train_schema import TrainConfig
from batchspec.heads.attend import Keys
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.layer import Step
from batchspec.heads.objective import SoftCrossEntropy, positions_at_once
from batchspec.heads.teacher import TrainingBatch
from batchspec.model.layers.attention.rope_config import RopeSpec


class StepNetwork(DraftNetwork):
    """A chain, or a head that replaces the tokens of later steps by masks."""

    def __init__(self, rope: RopeSpec, head_dim: int, num_layers: int) -> None:
        super().__init__(rope, head_dim)
        self._num_layers = num_layers

    @abstractmethod
    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """For each draft step the hidden states [B, L, H] after the final norm, whose product with `output_matrix` is the logits.

        embedded  [B, L, H] at position t the embedding of token t+1
        features  [B, L, W] hidden states of the target
        """

    @property
    @abstractmethod
    def output_matrix(self) -> Tensor:
        """[V', H]"""

    def loss(self, batch: TrainingBatch, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
        return draft_loss(self, batch, ahead=config.ahead, decay=config.decay, missed=config.missed)

    def drafts(self, batch: TrainingBatch, draft_len: int) -> Tensor:
        return torch.stack([self._likeliest(hidden) for hidden in self(batch.embedded, batch.features, draft_len)], -1)

    def _likeliest(self, hidden: Tensor) -> Tensor:
        """int64 [B, L] draft ids of the largest logits of hidden [B, L, H]."""
        head = self.output_matrix.to(hidden.dtype).t()
        parts = hidden.flatten(0, 1).split(positions_at_once(head.shape[1]))
        return torch.cat([(part @ head).argmax(-1) for part in parts]).view(hidden.shape[:2])

    def _begin(self, embedded: Tensor, count: int) -> tuple[list[Step], list[Keys]]:
        """The draft steps over rows like `embedded`, and an empty `Keys` for each layer."""
        rows, length = embedded.shape[:2]
        cos, sin = self._angles(length + count, embedded)
        steps = [Step(count, rows, (cos[at : at + length], sin[at : at + length])) for at in range(count)]
        return steps, [Keys() for _ in range(self._num_layers)]


def draft_loss(
    network: StepNetwork, batch: TrainingBatch, *, ahead: int, decay: float, missed: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The scalar loss, and fp32 [ahead] the share of positions at which each draft step agrees with the target on the likeliest
    token.

    loss = sum over steps k of decay^k * mean over positions of cross entropy(target's distribution, head's at step k): Li et al.
    2025, arXiv 2503.01840 (training-time test). Positions at which the target's likeliest token is not in the draft vocabulary
    are left out, as SpecForge does. A round discards the drafts after a wrong one, so positions after a wrong draft can have a
    lower weight: a small head then learns more of what can be accepted (Hu et al. 2025, GRIFFIN, arXiv 2502.11018, leaves these
    positions out).

    missed  weight of a position after an earlier step of the same draft whose likeliest token was wrong; below 1 such positions
            do not count as agreement

    The target position u is predicted by step k at position u-1-k, which has read the tokens up to u (in a parallel head, mask
    tokens in place of the last k). Does not synchronise.
    """
    loss = batch.known.new_zeros(())
    matches = []
    count, length = batch.embedded.shape[:2]
    # Whether all drafts so far were right, by position of the head. The last entry is for positions before the row's start.
    right = batch.known.new_ones(count * length + 1)
    for k, hidden in enumerate(network(batch.embedded, batch.features, ahead)):
        positions = batch.positions - 1 - k
        known = batch.known * (positions >= 0)
        at = torch.where(positions >= 0, batch.rows * length + positions, count * length)
        reached = right.index_select(0, at)
        total = known.sum().clamp_min(1.0)
        learnt = hidden.flatten(0, 1).index_select(0, at.clamp_max(count * length - 1))
        head = network.output_matrix.to(learnt.dtype)
        nats, hits = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            learnt, head, batch.probs, batch.best_ids, known * (missed + (1 - missed) * reached)
        )
        loss = loss + decay**k * nats / total
        agrees = (hits > 0) * reached
        if missed < 1:
            right = right.index_copy(0, at, agrees.to(right.dtype))
        matches.append(agrees.sum() / total)
    return loss, torch.stack(matches).detach()
