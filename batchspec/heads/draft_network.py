"""A drafter as trainable network: draft steps are computed for all positions at once.

B rows, L positions (padded at the end), H hidden, W values of the target's hidden states, V' draft vocabulary. Draft step 0 at
position t reads the embedding of token t+1 and the target's features at t, and predicts token t+2. Draft step k has the RoPE
position t+k. It attends to the keys of step 0 at positions 0..t and, of each later step, to the key of its own position: the same
keys as in a job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from batchspec.heads.attend import Keys
from batchspec.heads.layer import Step
from batchspec.model.layers.attention.rope import rope_angles, rope_frequencies
from batchspec.model.layers.attention.rope_config import RopeSpec

STD = 0.02
"""Standard deviation of random matrices."""


class DraftNetwork(nn.Module, ABC):
    """A drafter of decoder layers that is trained."""

    def __init__(self, rope: RopeSpec, head_dim: int, num_layers: int) -> None:
        super().__init__()
        assert not rope.interleaved, "heads that rotate interleaved pairs are not trained"
        self._attention_factor, self._num_layers = rope.attention_factor, num_layers
        self.register_buffer("freqs", rope_frequencies(rope, head_dim), persistent=False)

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

    def _begin(self, embedded: Tensor, count: int) -> tuple[list[Step], list[Keys]]:
        """The draft steps over rows like `embedded`, and an empty `Keys` for each layer."""
        rows, length = embedded.shape[:2]
        cos, sin = self._angles(length + count, embedded)
        steps = [Step(count, rows, (cos[at : at + length], sin[at : at + length])) for at in range(count)]
        return steps, [Keys() for _ in range(self._num_layers)]

    def _angles(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, R], from position 0 on. Angles are fp32, whatever the dtype of the network, as in a job."""
        assert isinstance(self.freqs, Tensor)
        wide = torch.promote_types(like.dtype, torch.float32)
        cos, sin = rope_angles(torch.arange(positions, device=like.device), self.freqs.float(), self._attention_factor, wide)
        return cos.squeeze(1), sin.squeeze(1)
