"""A drafter as trainable network.

B rows, L positions (padded at the end), H hidden, V' draft vocabulary, K drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from batchspec.config.train_schema import TrainConfig
from batchspec.heads.teacher import TrainingBatch
from batchspec.model.layers.attention.rope import rope_angles, rope_frequencies
from batchspec.model.layers.attention.rope_config import RopeSpec

STD = 0.02
"""Standard deviation of random matrices."""


class DraftNetwork(nn.Module, ABC):
    """A drafter of decoder layers that is trained."""

    def __init__(self, rope: RopeSpec, head_dim: int) -> None:
        super().__init__()
        assert not rope.interleaved, "heads that rotate interleaved pairs are not trained"
        self._attention_factor = rope.attention_factor
        self.register_buffer("freqs", rope_frequencies(rope, head_dim), persistent=False)

    @abstractmethod
    def loss(self, batch: TrainingBatch, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
        """The scalar loss of batch number `step`, and fp32 [train.ahead] the share of positions at which each draft agrees with
        the target on the likeliest token. Does not synchronise."""

    @abstractmethod
    def drafts(self, batch: TrainingBatch, draft_len: int) -> Tensor:
        """int64 [B, L, K]: at position t, if it is trained, the draft ids of the round whose newest token is t+1. Each draft but
        the first follows the row's own tokens, as after drafts that were right."""

    @abstractmethod
    def matrices(self) -> dict[str, Tensor]:
        """The weights that Muon trains, by name; AdamW trains the others."""

    @property
    def num_weights(self) -> int:
        return sum(weight.numel() for weight in self.parameters())

    @torch.no_grad()
    def draw_matrices(self, seed: int) -> None:
        """Give random values to all matrices, on the CPU, the same for one seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.parameters():
            if tensor.dim() > 1:
                nn.init.normal_(tensor, std=STD, generator=generator)

    def _angles(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, R], from position 0 on. Angles are fp32, whatever the dtype of the network, as in a job."""
        assert isinstance(self.freqs, Tensor)
        wide = torch.promote_types(like.dtype, torch.float32)
        cos, sin = rope_angles(torch.arange(positions, device=like.device), self.freqs.float(), self._attention_factor, wide)
        return cos.squeeze(1), sin.squeeze(1)
