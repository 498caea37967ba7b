"""Choices with an optimisation switched off, so that what it gains can be measured (`ablation.argmax`, `batchspec bench --opt`).

`vocabulary_for` chooses the classes once, when an engine is made; a job without ablations uses none of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchspec.engine.rounds.vocabulary import Vocabulary
from batchspec.engine.rounds.vocabulary_of_ranks import SharedVocabulary
from batchspec.kernels.sampling.argmax import NO_TOKEN
from batchspec.model.target import Target
from batchspec.model.vocabulary import gather_logits


class SoftmaxVocabulary(Vocabulary):
    """ablation.argmax=false: greedy choices by softmax and top-k instead of an argmax."""

    def greedy(self, hidden: Tensor) -> Tensor:
        return greedy_by_softmax(self.target.all_logits(hidden))

    def masks_in_product(self, hidden: Tensor) -> bool:
        return False

    def greedy_by_logits(self, logits: Tensor) -> Tensor:
        return greedy_by_softmax(logits)


class SharedSoftmaxVocabulary(SharedVocabulary):
    """The same for ranks, which gather all logits for it."""

    def greedy(self, hidden: Tensor) -> Tensor:
        return greedy_by_softmax(self.target.all_logits(hidden))

    def masks_in_product(self, hidden: Tensor) -> bool:
        return False

    def greedy_by_logits(self, logits: Tensor) -> Tensor:
        return greedy_by_softmax(gather_logits(logits, self.target.spec.vocab_size, self._ranks))


def greedy_by_softmax(logits: Tensor) -> Tensor:
    """The tokens of `vocabulary.greedy_sample` by softmax and top-k: logits [T, V] -> int32 [T]."""
    ids = torch.softmax(logits, -1).topk(1, dim=-1).indices.flatten()
    return torch.where(logits.amax(-1).isfinite(), ids, NO_TOKEN).int()


def vocabulary_for(target: Target, *, argmax: bool) -> Vocabulary:
    """The vocabulary of this target; argmax: greedy tokens by an argmax."""
    if target.ranks is None:
        return Vocabulary(target) if argmax else SoftmaxVocabulary(target)
    return SharedVocabulary(target) if argmax else SharedSoftmaxVocabulary(target)
