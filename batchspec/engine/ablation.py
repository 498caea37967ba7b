"""Rounds with an optimisation switched off, so that what it gains can be measured (`ablation.*`, `batchspec bench --opt`).

Each variant overrides one method of `Round`; a job without ablations uses none of these classes.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from batchspec.engine.round import Round, RoundOptions
from batchspec.kernels.sampling.argmax import NO_TOKEN
from batchspec.model.vocabulary import gather_logits

R = TypeVar("R", bound=Round)


class SoftmaxChoice(Round):
    """ablation.argmax=false: greedy choices by softmax and top-k instead of an argmax; ranks gather all logits for it."""

    def greedy_of_hidden(self, hidden: Tensor) -> Tensor:
        return greedy_by_softmax(self.target.all_logits(hidden))

    def masks_in_product(self, hidden: Tensor) -> bool:
        return False

    def greedy_of_logits(self, logits: Tensor) -> Tensor:
        ranks = self.target.ranks
        return greedy_by_softmax(logits if ranks is None else gather_logits(logits, self.target.spec.vocab_size, ranks))


class RaggedLayout(Round):
    """ablation.uniform_slots=false: rows of equal draft length use the ragged layout too."""

    @property
    def is_uniform(self) -> bool:
        return False


def greedy_by_softmax(logits: Tensor) -> Tensor:
    """The tokens of `sampling.greedy_sample` by softmax and top-k: logits [T, V] -> int32 [T]."""
    ids = torch.softmax(logits, -1).topk(1, dim=-1).indices.flatten()
    return torch.where(logits.amax(-1).isfinite(), ids, NO_TOKEN).int()


def ablated(kind: type[R], options: RoundOptions) -> type[R]:
    """The variant of `kind` without the optimisations that `options` switch off; `kind` itself if they switch off none."""
    without: list[type[Round]] = [] if options.argmax else [SoftmaxChoice]
    if not options.uniform_slots:
        without.append(RaggedLayout)
    return type(f"Ablated{kind.__name__}", (*without, kind), {}) if without else kind
