"""The training copy of a job's head, and how its weights get into the drafter.

There are two sets of weights: those in training (fp32, with the optimiser's state), and a copy of those that draft, in the
target's dtype under their published names. The teacher is the job's target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from batchspec.adapt.rank_teacher import TeacherOfRanks
from batchspec.draft.base import Rewritable
from batchspec.draft.weights import normalised
from batchspec.engine.lockstep import Lead
from batchspec.model.target import Target
from batchspec.train.data import Numbers, Row
from batchspec.train.evaluate import Acceptance, acceptance
from batchspec.train.network import HeadNetwork
from batchspec.train.objective import draft_loss
from batchspec.train.optimise import Optimiser
from batchspec.train.teacher import Teacher

WARM_STEPS = 10
"""Steps of learning-rate warm-up, while the optimiser's estimates of the gradients are still poor."""
CLIP, DECAY = 0.5, 0.8
"""As in training (`train/settings.py`)."""
REHEARSED = 2048
"""Maximum number of tokens in a rehearsal: more tokens would compile nothing new."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Acceptance of the drafting head and of the copy in training, on the same completions."""

    drafts: Acceptance
    learns: Acceptance


class Learner:
    """Trains the copy. Only `adopt` may be called in inference mode: the tensors that it writes may be inference tensors."""

    def __init__(
        self, network: HeadNetwork, ids: Numbers, target: Target, drafter: Rewritable, *, lr: float, steps: int,
        batch_tokens: int, lead: Lead | None = None,
    ) -> None:  # fmt: skip
        """
        network  the head with which `drafter` drafts
        ids      int64 [V'] target ids of its draft vocabulary
        steps    number of draft steps that are trained and measured
        lead     of the leader of several ranks that compute the target
        """
        self.network, self.draft_vocab_ids = network, torch.from_numpy(ids)
        self._drafter, self._steps, self._batch_tokens, self.lr = drafter, steps, batch_tokens, lr
        self._device = target.device.type
        self._narrow = self._device == "cuda" and target.dtype is torch.bfloat16
        dtype = target.dtype if self._narrow else torch.promote_types(target.dtype, torch.float32)
        made = Teacher if lead is None else partial(TeacherOfRanks, lead)
        self._teacher = made(target, network.spec.aux_layer_ids, self.draft_vocab_ids, dtype)
        self.drafting = {name: tensor.detach().to(target.dtype, copy=True) for name, tensor in network.state_dict().items()}
        self._begin()

    def _begin(self) -> None:
        self._optimiser = Optimiser(self.network, lr=self.lr, muon=True, fused=self._device == "cuda")
        self._done = 0

    def _cast(self) -> AbstractContextManager[object]:
        """bf16 products on a GPU whose target is bf16."""
        return torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._narrow)

    def rehearse(self) -> None:
        """Compile the kernels of learning and allocate its memory, with a row of random tokens; no weights change."""
        vocab = self.network.spec.vocab_size
        ids = np.random.default_rng(0).integers(0, vocab, min(self._batch_tokens, REHEARSED)).astype(np.int32)
        self._loss([Row(ids=ids, prompt_len=1)]).backward()
        self.network.zero_grad(set_to_none=True)
        self.compare([Row(ids=ids[:64], prompt_len=1)])

    def _loss(self, rows: Sequence[Row]) -> Tensor:
        batch = self._teacher.training_batch(rows)
        with self._cast():
            return draft_loss(self.network, batch, ahead=self._steps, decay=DECAY)[0]

    def learn(self, rows: Sequence[Row]) -> None:
        """One training step. On a GPU the host does not wait for it."""
        self._done += 1
        self._optimiser.step(self._loss(rows), self.lr * min(1.0, self._done / WARM_STEPS), CLIP)

    def compare(self, rows: Sequence[Row]) -> Comparison:
        """Replay `rows` with both heads. Synchronises."""
        learns = self._replay(rows)
        with self._with_weights(self.drafting):
            return Comparison(self._replay(rows), learns)

    def _replay(self, rows: Sequence[Row]) -> Acceptance:
        return acceptance(
            self.network, self._teacher, rows, max_len=self._steps, batch_tokens=self._batch_tokens, cast=self._cast()
        )

    @contextmanager
    def _with_weights(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Use other weights in the network within the block, which must not train."""
        own = {name: parameter.data for name, parameter in self.network.named_parameters()}
        try:
            for name, parameter in self.network.named_parameters():
                parameter.data = weights[name] if self._narrow else weights[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self.network.named_parameters():
                parameter.data = own[name]

    def adopt(self) -> None:
        """Write the trained weights into the drafter, in place and in stream order: the next round drafts with them."""
        for name, tensor in self.network.state_dict().items():
            self.drafting[name].copy_(tensor)
        self._drafter.rewrite(
            {normalised(name): tensor.view(1, -1) if name == "mask_hidden" else tensor for name, tensor in self.drafting.items()}
        )

    def begin_again(self) -> None:
        """Discard the training since the last `adopt`, and continue at half the learning rate."""
        with torch.no_grad():
            for name, tensor in self.network.state_dict().items():
                tensor.copy_(self.drafting[name])
        self.lr /= 2
        self._begin()
