"""EAGLE-3 heads as trainable networks: parameters named as in published checkpoints, draft steps as in `step_network.py`.

B rows, L positions (padded at the end), H hidden, W = number of aux hidden states * H.

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
from batchspec.draft.head_tensors import fc_product, head_layers
from batchspec.heads.attend import Keys
from batchspec.heads.layer import Layer, Norm, Step
from batchspec.heads.step_network import StepNetwork
from batchspec.model.layers.layer import LayerSpec


class MidLayer(Layer):
    """The first layer: its attention reads the concatenation of the normed embedding and the normed state."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.hidden_norm = Norm(spec.attention.hidden_size, spec.attention.eps)

    def enter(self, embedded: Tensor, state: Tensor, step: Step, keys: Keys) -> Tensor:
        assert self.spec.attention.norm is not None
        norm = self.get_submodule(self.spec.attention.norm)
        return self.of_normed(state, torch.cat([norm(embedded), self.hidden_norm(state)], -1), step, keys)


class HeadNetwork(StepNetwork):
    """An EAGLE-3 head that drafts a chain. Parameters as in a flat checkpoint: fc, midlayer.*, layers.1.* .., norm, lm_head."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec.rope, spec.head_dim, spec.num_layers)
        self.spec = spec
        product, (first, *others) = fc_product(spec), head_layers(spec)
        assert product is not None, "why_not_trainable"
        (fc,) = product.parts
        self.fc = nn.Linear(fc.k, fc.rows, bias=fc.bias)
        self.midlayer, self.norm = MidLayer(first), Norm(spec.hidden_size, spec.rms_eps)
        self.layers = nn.ModuleDict({str(i): Layer(layer) for i, layer in enumerate(others, 1)})
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)

    @property
    def output_matrix(self) -> Tensor:
        return self.lm_head.weight

    def matrices(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.named_parameters() if weight.dim() == 2 and name != "lm_head.weight"}

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """features: aux hidden states."""
        state = self.fc(features)
        all_steps, keys = self._begin(embedded, steps)
        for step in all_steps:
            state = self._pass(embedded, state, step, keys)
            yield self.norm(state)
            embedded = F.pad(embedded[:, 1:], (0, 0, 0, 1))

    def _pass(self, embedded: Tensor, state: Tensor, step: Step, keys: list[Keys]) -> Tensor:
        """One draft step through all layers."""
        state = self.midlayer.enter(embedded, state, step, keys[0])
        for layer, own in zip(self.layers.values(), keys[1:], strict=True):
            state = layer(state, step, own)
        return state


class ParallelNetwork(HeadNetwork):
    """A head that drafts all tokens in one forward pass. mask_hidden is the feature of positions that have none yet."""

    def __init__(self, spec: HeadSpec, mask_embedding: Tensor) -> None:
        """mask_embedding  [H] the target's embedding of the mask token; not trained"""
        super().__init__(spec)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(spec.aux_layer_ids) * spec.target_hidden_size))
        self.register_buffer("mask_embedding", mask_embedding.detach().clone().view(1, 1, -1), persistent=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As in HeadNetwork; step k is the draft after k mask tokens."""
        assert isinstance(self.mask_embedding, Tensor)
        (first, *later), keys = self._begin(embedded, steps)
        yield self.norm(self._pass(embedded, self.fc(features), first, keys))
        mask, known = self.mask_embedding.to(embedded.dtype), self.fc(self.mask_hidden.to(features.dtype))
        for step in later:
            yield self.norm(self._pass(mask, known, step, keys))


def network_of(spec: HeadSpec, embedding: Tensor) -> HeadNetwork:
    """The network of a head; one with a mask token drafts in parallel. embedding: the target's [V, H]."""
    return HeadNetwork(spec) if spec.mask_token_id is None else ParallelNetwork(spec, embedding[spec.mask_token_id])
