"""Draft heads that can learn: the tensors of a published checkpoint, and all draft steps of all positions at once.

B rows, L positions (padded at the right), H hidden, W = number of aux hidden states * H. Position t reads the embedding of token
t+1 and the target's features at t, and predicts token t+2: draft step 0. Draft step k is rotated as position t+k; it attends to
the keys of step 0 at positions 0..t, and of later steps to its own position's alone: what drafting after t attends to in a job.

    chain      step k reads the state that step k-1 left and the embedding of token t+1+k (test-time training)
    parallel   step k reads the mask's feature and embedding, for every k
Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840); P-EAGLE (2026, arXiv 2602.01469).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.draft.formats import HeadSpec
from batchspec.draft.weights import fc_product, head_layers
from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.rope import rope_angles, rope_frequencies
from batchspec.train.attend import Keys
from batchspec.train.layer import Layer, Norm, Step


class MidLayer(Layer):
    """The first layer, whose attention reads embedding and state end to end, each normed."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.hidden_norm = Norm(spec.attention.hidden_size, spec.attention.eps)

    def enter(self, embedded: Tensor, state: Tensor, step: Step, keys: Keys) -> Tensor:
        assert self.spec.attention.norm is not None
        norm = self.get_submodule(self.spec.attention.norm)
        return self.of_normed(state, torch.cat([norm(embedded), self.hidden_norm(state)], -1), step, keys)


class HeadNetwork(nn.Module):
    """fc, midlayer.*, layers.1.* .., norm, lm_head: the parameters of a flat checkpoint by their published names. A chain."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        (fc,), (first, *others) = fc_product(spec).parts, head_layers(spec)
        self.fc = nn.Linear(fc.k, fc.rows, bias=fc.bias)
        self.midlayer, self.norm = MidLayer(first), Norm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleDict({str(i): Layer(layer) for i, layer in enumerate(others, 1)})
        self.register_buffer("freqs", rope_frequencies(spec.rope, spec.head_dim), persistent=False)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """For each draft step [B, L, H] after the final norm: what lm_head reads.

        embedded  [B, L, H] at place t the embedding of token t+1
        features  [B, L, W] of the target
        """
        state = self.fc(features)
        all_steps, keys = self._begin(embedded, steps)
        for step in all_steps:
            state = self._pass(embedded, state, step, keys)
            yield self.norm(state)
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))

    def _pass(self, embedded: Tensor, state: Tensor, step: Step, keys: list[Keys]) -> Tensor:
        """All layers, of one draft step."""
        state = self.midlayer.enter(embedded, state, step, keys[0])
        for layer, own in zip(self.layers.values(), keys[1:], strict=True):
            state = layer(state, step, own)
        return state

    def _angles(self, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, D] of positions 0 and on."""
        assert isinstance(self.freqs, Tensor)
        wide, factor = torch.promote_types(like.dtype, torch.float32), self.spec.rope.attention_factor
        cos, sin = rope_angles(torch.arange(positions, device=like.device), self.freqs, factor, wide)
        return cos.squeeze(1), sin.squeeze(1)

    def _begin(self, embedded: Tensor, count: int) -> tuple[list[Step], list[Keys]]:
        """All draft steps over rows like `embedded`, and the keys of each layer, none yet."""
        rows, length = embedded.shape[:2]
        cos, sin = self._angles(length + count, embedded)
        steps = [Step(count, rows, (cos[at : at + length], sin[at : at + length])) for at in range(count)]
        return steps, [Keys() for _ in range(self.spec.num_layers)]


class ParallelNetwork(HeadNetwork):
    """The same, and mask_hidden, what a place that is not known yet has for a feature: all drafts in one forward."""

    def __init__(self, spec: HeadSpec, mask_embedding: Tensor) -> None:
        """mask_embedding [H] the target's embedding of the mask token, which does not learn."""
        super().__init__(spec)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(spec.aux_layer_ids) * spec.target_hidden_size))
        self.register_buffer("mask_embedding", mask_embedding.detach().clone().view(1, 1, -1), persistent=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As of HeadNetwork; step k is the draft after k masks."""
        assert isinstance(self.mask_embedding, Tensor)
        (first, *later), keys = self._begin(embedded, steps)
        yield self.norm(self._pass(embedded, self.fc(features), first, keys))
        mask, known = self.mask_embedding.to(embedded.dtype), self.fc(self.mask_hidden.to(features.dtype))
        for step in later:
            yield self.norm(self._pass(mask, known, step, keys))


def network_of(spec: HeadSpec, embedding: Tensor) -> HeadNetwork:
    """The network of a head: one with a mask drafts in parallel. embedding [V, H] of the target."""
    return HeadNetwork(spec) if spec.mask_token_id is None else ParallelNetwork(spec, embedding[spec.mask_token_id])
