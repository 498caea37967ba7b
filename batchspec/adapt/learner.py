"""The copy of a job's head that learns, and how its weights get into the drafter.

There are two sets of weights: those that learn (fp32, with an optimiser's state), and a copy of those that draft, in the target's
dtype under their published names. The target is the job's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchspec.draft.base import Rewritable
from batchspec.draft.weights import normalised
from batchspec.model.target import Target
from batchspec.train.data import Numbers, Row
from batchspec.train.evaluate import Acceptance, acceptance
from batchspec.train.network import HeadNetwork
from batchspec.train.objective import draft_loss
from batchspec.train.optimise import Optimiser
from batchspec.train.teacher import Teacher

WARM_STEPS = 10
"""Steps over which the learning rate rises: until then an optimiser knows gradients too little to scale them."""
CLIP, DECAY = 0.5, 0.8
"""As in training (`train/settings.py`)."""
REHEARSED = 2048
"""Tokens of a rehearsal at most: a few more launches would show nothing more."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The head that drafts and the copy that learns, on the same completions."""

    drafts: Acceptance
    learns: Acceptance


class Learner:
    """Nothing here may be called in inference mode but `adopt`, which writes to tensors that may have been made in it."""

    def __init__(
        self, network: HeadNetwork, ids: Numbers, target: Target, drafter: Rewritable, *, lr: float, steps: int, batch_tokens: int
    ) -> None:
        """
        network  the head that `drafter` drafts with, ids int64 [V'] its target ids
        steps    draft steps that are learnt and measured
        """
        self.network, self.hot = network, torch.from_numpy(ids)
        self._drafter, self._steps, self._batch_tokens, self.lr = drafter, steps, batch_tokens, lr
        self._device = target.device.type
        self._narrow = self._device == "cuda" and target.dtype is torch.bfloat16
        dtype = target.dtype if self._narrow else torch.promote_types(target.dtype, torch.float32)
        self._teacher = Teacher(target, network.spec.aux_layer_ids, self.hot, dtype)
        self.drafting = {name: tensor.detach().to(target.dtype, copy=True) for name, tensor in network.state_dict().items()}
        self._begin()

    def _begin(self) -> None:
        self._optimiser = Optimiser(self.network, lr=self.lr, muon=True, fused=self._device == "cuda")
        self._done = 0

    def _cast(self) -> AbstractContextManager[object]:
        """bf16 products on a GPU whose target is bf16."""
        return torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._narrow)

    def rehearse(self) -> None:
        """Compile what learning needs and touch its memory, with a row of noise; nothing is learnt."""
        vocab = self.network.spec.vocab_size
        ids = np.random.default_rng(0).integers(0, vocab, min(self._batch_tokens, REHEARSED)).astype(np.int32)
        self._loss([Row(ids=ids, prompt_len=1)]).backward()
        self.network.zero_grad(set_to_none=True)
        self.compare([Row(ids=ids[:64], prompt_len=1)])

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        lesson = self._teacher.lesson(rows)
        with self._cast():
            return draft_loss(self.network, lesson, ahead=self._steps, decay=DECAY)[0]

    def learn(self, rows: Sequence[Row]) -> None:
        """One step. On a GPU the host does not wait for it."""
        self._done += 1
        self._optimiser.step(self._loss(rows), self.lr * min(1.0, self._done / WARM_STEPS), CLIP)

    def compare(self, rows: Sequence[Row]) -> Comparison:
        """Replay `rows` with both; waits for the device."""
        learns = self._replay(rows)
        with self._wearing(self.drafting):
            return Comparison(self._replay(rows), learns)

    def _replay(self, rows: Sequence[Row]) -> Acceptance:
        return acceptance(
            self.network, self._teacher, rows, max_len=self._steps, batch_tokens=self._batch_tokens, cast=self._cast()
        )

    @contextmanager
    def _wearing(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """The network with other weights, for as long as it does not learn."""
        own = {name: parameter.data for name, parameter in self.network.named_parameters()}
        try:
            for name, parameter in self.network.named_parameters():
                parameter.data = weights[name] if self._narrow else weights[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self.network.named_parameters():
                parameter.data = own[name]

    def adopt(self) -> None:
        """Write what was learnt into the drafter, in place and in stream order: the next round drafts with it."""
        for name, tensor in self.network.state_dict().items():
            self.drafting[name].copy_(tensor)
        self._drafter.rewrite(
            {normalised(name): tensor.view(1, -1) if name == "mask_hidden" else tensor for name, tensor in self.drafting.items()}
        )

    def begin_again(self) -> None:
        """Discard what was learnt since the last `adopt`, and go on at half the learning rate."""
        with torch.no_grad():
            for name, tensor in self.network.state_dict().items():
                tensor.copy_(self.drafting[name])
        self.lr /= 2
        self._begin()
